"""The sections of a setting as frozen dataclasses that check themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stamp_core.config.decode import invalid, require_above, require_at_least, require_fraction


@dataclass(frozen=True)
class Split:
    """Which client learns which classes when. A field with a default is off unless set."""

    kind: Literal["classes", "domains"]
    clients: int
    tasks: int
    classes_per_task: int | None = None  # kind "classes" only
    cycles: int = 1  # passes over the task sequence
    order: Literal["independent", "common", "given", "mixed", "disjoint"] = "independent"
    common_clients: int = 0  # order "mixed": clients that follow one common order
    alpha: float | None = None  # Dirichlet concentration over clients inside each task
    min_samples: int = 1  # with alpha: the fewest images of a client in a task
    images_per_class: int | None = None  # drawn at random for each client; None: all images

    def __post_init__(self) -> None:
        """Refuse combinations that no plan can have."""
        require_at_least(self, 1, "clients", "tasks", "cycles")
        require_at_least(self, 0, "min_samples", "common_clients")
        if self.kind == "classes" and self.classes_per_task is None:
            raise invalid("classes_per_task", None, "a number of classes, as kind is 'classes'")
        if self.kind == "domains" and self.classes_per_task is not None:
            raise invalid("classes_per_task", self.classes_per_task, "absent, as kind is 'domains'")
        for name in ("classes_per_task", "images_per_class"):
            if getattr(self, name) is not None:
                require_at_least(self, 1, name)
        if self.common_clients > self.clients:
            raise invalid(
                "common_clients", self.common_clients, f"at most clients = {self.clients}"
            )
        if self.common_clients and self.order != "mixed":
            raise invalid("common_clients", self.common_clients, "0 unless order is 'mixed'")
        if self.min_samples != 1 and self.alpha is None:
            raise invalid("min_samples", self.min_samples, "absent unless alpha is set")
        if self.alpha is not None:
            require_above(self, 0, "alpha")
            if self.order not in ("common", "given"):
                right = "'common' or 'given' where alpha is set: clients share tasks"
                raise invalid("order", self.order, right)
            if self.images_per_class is not None:
                raise invalid(
                    "images_per_class", self.images_per_class, "absent where alpha is set"
                )


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
        """Refuse empty layers, and options that a kind does not have."""
        require_at_least(self, 1, "features")
        if self.micro_batch_size is not None:
            require_at_least(self, 1, "micro_batch_size")
        if not self.channels or min(self.channels) < 1:
            raise invalid("channels", list(self.channels), "at least one number above 0")
        if self.kind in ("mlp", "lenet", "swin_t", "fcn") and self.norm != "none":
            raise invalid("norm", self.norm, f"'none', as kind is {self.kind!r}")
        if self.kind == "resnet18" and self.norm == "none":
            raise invalid("norm", self.norm, "'batch' or 'group', as kind is 'resnet18'")
        if self.kind != "resnet18" and self.stem != "published":
            raise invalid("stem", self.stem, f"absent, as kind is {self.kind!r}")


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
    deterministic: bool = True  # on a GPU: the same bits in every run; a CPU has them anyway

    def __post_init__(self) -> None:
        """Refuse numbers outside their ranges."""
        require_at_least(self, 1, "rounds", "batch_size")
        require_at_least(self, 0, "epochs", "lr", "weight_decay", "shift")
        require_fraction(self, "momentum", "dropout")
        if not 0 < self.participation <= 1:
            raise invalid("participation", self.participation, "above 0 and at most 1")


@dataclass(frozen=True)
class Diagnostics:
    """What is recorded besides accuracies; it costs time and changes no result."""

    angles: bool = False  # between the gradients of a client's tasks, after each experience
    displacements: bool = False  # the same between updates of whole epochs
    features: int = 0  # test images per class whose features are recorded after each experience
    memory: int = 0  # exemplars per class of the first client's memory that the record keeps

    def __post_init__(self) -> None:
        """Refuse a negative number of images."""
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
