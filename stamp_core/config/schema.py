"""The sections of a setting as frozen dataclasses that check themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stamp_core.config.decode import require, require_above, require_at_least, require_fraction


@dataclass(frozen=True)
class Split:
    """Which client learns which classes when. A field with a default is off unless set."""

    kind: Literal["classes", "domains"]
    clients: int
    tasks: int
    classes_per_task: int | None = None  # kind "classes" only
    cycles: int = 1  # passes over the task sequence
    order: Literal["independent", "common", "given", "mixed"] = "independent"
    common_clients: int = 0  # order "mixed": clients that follow one common order
    alpha: float | None = None  # Dirichlet concentration over clients inside each task
    min_samples: int = 1  # with alpha: the fewest images of a client in a task
    images_per_class: int | None = None  # drawn at random for each client; None: all images

    def __post_init__(self) -> None:
        """Validate numbers and combinations."""
        require_at_least(self, 1, "clients", "tasks", "cycles")
        require_at_least(self, 1, "classes_per_task", "images_per_class")
        require_at_least(self, 0, "min_samples", "common_clients")
        require_above(self, 0, "alpha")
        if self.kind == "classes":
            right = "a number of classes, as kind is 'classes'"
            require(self, "classes_per_task", self.classes_per_task is not None, right)
        else:
            right = "absent, as kind is 'domains'"
            require(self, "classes_per_task", self.classes_per_task is None, right)
        few = self.common_clients <= self.clients
        require(self, "common_clients", few, f"at most clients = {self.clients}")
        if self.order != "mixed":
            require(self, "common_clients", self.common_clients == 0, "0 unless order is 'mixed'")
        if self.alpha is None:
            require(self, "min_samples", self.min_samples == 1, "absent unless alpha is set")
            return
        right = "'common' or 'given' where alpha is set: clients share tasks"
        require(self, "order", self.order in ("common", "given"), right)
        right = "absent where alpha is set"
        require(self, "images_per_class", self.images_per_class is None, right)


@dataclass(frozen=True)
class Network:
    """An encoder and a linear head over all classes of the data."""

    kind: Literal["mlp", "cnn", "lenet", "resnet18", "swin_t", "fcn"]  # fcn: a class per pixel
    features: int = 64  # width of the last hidden layer (mlp, cnn, fcn)
    # cnn: one 5 x 5 convolution with pooling each; fcn: at the full and at half the size
    channels: tuple[int, ...] = (16, 32)
    norm: Literal["none", "batch", "group"] = "none"
    stem: Literal["published", "small"] = "published"  # resnet18: 7 x 7 / 2 and pooling, or 3 x 3
    pretrained: str | None = None  # a file of weights, in the folder of downloads or absolute
    precision: Literal["float32", "bfloat16"] = "float32"  # of the encoder's layers, not of weights
    micro_batch_size: int | None = None  # images per forward pass; None: the whole batch

    def __post_init__(self) -> None:
        """Validate numbers, and options that only some kinds have."""
        require_at_least(self, 1, "features", "micro_batch_size")
        filled = bool(self.channels) and min(self.channels) >= 1
        require(self, "channels", filled, "at least one number above 0")
        kind = f"as kind is {self.kind!r}"
        if self.kind == "resnet18":
            require(self, "norm", self.norm != "none", f"'batch' or 'group', {kind}")
            return
        require(self, "norm", self.norm == "none" or self.kind == "cnn", f"'none', {kind}")
        require(self, "stem", self.stem == "published", f"absent, {kind}")


@dataclass(frozen=True)
class Training:
    """How each client learns in a round; the same for all methods of a table."""

    rounds: int  # per task
    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    participation: float = 1.0  # share of clients selected in a round
    dropout: float = 0.0  # probability that a selected client does not complete the round
    buffers: Literal["shared", "local", "frozen"] = "shared"  # of batch normalisation
    shift: int = 0  # augmentation: random translation in pixels
    flip: bool = False  # augmentation: random mirroring
    secure_sums: bool = False  # the server is handed sums of uploads, no single one
    deterministic: bool = True  # on a GPU: runs are bit-identical; on a CPU they are anyway

    def __post_init__(self) -> None:
        """Validate the numbers."""
        require_at_least(self, 1, "rounds", "batch_size")
        require_at_least(self, 0, "epochs", "lr", "weight_decay", "shift")
        require_fraction(self, "momentum", "dropout")
        some = 0 < self.participation <= 1
        require(self, "participation", some, "above 0 and at most 1")


@dataclass(frozen=True)
class Diagnostics:
    """What is recorded besides accuracies; it costs time and changes no result."""

    angles: bool = False  # between the gradients of a client's tasks, after each experience
    displacements: bool = False  # the same between updates of whole epochs
    features: int = 0  # test images per class whose features are recorded after each experience
    memory: int = 0  # exemplars per class of the first client's memory that the record keeps

    def __post_init__(self) -> None:
        """Validate the numbers of images."""
        require_at_least(self, 0, "features", "memory")


@dataclass(frozen=True)
class Setting:
    """One experiment without its method: data, plan, network and training."""

    name: str
    data: Mapping[str, Any]  # source and its own options, checked by stamp_core.data
    split: Split
    network: Network
    training: Training
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
