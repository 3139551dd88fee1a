"""The sections of a setting as frozen dataclasses that check themselves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stamp_core.config.decode import require, require_above, require_at_least, require_fraction


@dataclass(frozen=True)
class Split:
    """Which client learns which classes when. A field with a default is off unless set."""

    kind: Literal["classes", "domains", "file"]  # file: tasks of any size, not drawn here
    clients: int
    tasks: int
    classes_per_task: int | None = None  # kind "classes" only
    cycles: int = 1  # passes over the task sequence
    order: Literal["independent", "common", "given", "mixed"] = "independent"
    common_clients: int = 0  # order "mixed": clients that follow one common order
    alpha: float | None = None  # Dirichlet concentration over clients inside each task
    min_samples: int = 1  # with alpha: the fewest images of a client in a task
    images_per_class: int | None = None  # drawn at random for each client; None: all images
    sizes: Literal["drawn", "equal"] = "drawn"  # with alpha: of the clients' shares of a task
    joining: int = 0  # of the clients: how many join with each task after the first
    old_share: float = 0.0  # of the clients that joined before a task: those that do not learn it
    classes_per_client: int | None = None  # of a task, drawn for each client; None: all of them

    def __post_init__(self) -> None:
        """Validate numbers and combinations."""
        require_at_least(self, 1, "clients", "tasks", "cycles")
        require_at_least(self, 1, "classes_per_task", "images_per_class", "classes_per_client")
        require_at_least(self, 0, "min_samples", "common_clients", "joining")
        require_above(self, 0, "alpha")
        require_fraction(self, "old_share")
        if self.kind == "classes":
            right = "a number of classes, as kind is 'classes'"
            require(self, "classes_per_task", self.classes_per_task is not None, right)
        else:
            right = f"absent, as kind is {self.kind!r}"
            require(self, "classes_per_task", self.classes_per_task is None, right)
        if self.kind == "file":  # nothing of such a plan is drawn
            require(self, "order", self.order == "independent", right)
            drawn = ("alpha", "images_per_class", "joining", "old_share", "classes_per_client")
            for name in drawn:
                require(self, name, not getattr(self, name), right)
        few = self.common_clients <= self.clients
        require(self, "common_clients", few, f"at most clients = {self.clients}")
        if self.order != "mixed":
            require(self, "common_clients", self.common_clients == 0, "0 unless order is 'mixed'")
        some = self.clients > self.joining * (self.tasks - 1)
        require(self, "joining", some, "so few that a client is there from the first task")
        size = self.classes_per_task or 0
        few = self.classes_per_client is None or self.classes_per_client <= size
        require(self, "classes_per_client", few, f"at most classes_per_task = {size}")
        self._check_alpha()

    def _check_alpha(self) -> None:
        """Validate what needs an alpha, or has to be absent with one."""
        if self.alpha is None:
            for name, unset in (("min_samples", 1), ("sizes", "drawn")):
                require(self, name, getattr(self, name) == unset, "absent unless alpha is set")
            return
        right = "'common' or 'given' where alpha is set: clients share tasks"
        require(self, "order", self.order in ("common", "given"), right)
        for name in ("images_per_class", "joining", "old_share", "classes_per_client"):
            require(self, name, not getattr(self, name), "absent where alpha is set")


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
    clients_per_round: int | None = None  # their number instead
    schedule: Literal["constant", "cosine", "exponential"] = "constant"  # of lr in an experience
    lr_end: float | None = None  # what lr falls to, reached after the experience's last round
    dropout: float = 0.0  # probability that a selected client does not complete the round
    buffers: Literal["shared", "local", "frozen"] = "shared"  # of batch normalisation
    shift: int = 0  # augmentation: random translation in pixels
    flip: bool = False  # augmentation: random mirroring
    secure_sums: bool = False  # the server is handed sums of uploads, no single one
    deterministic: bool = True  # on a GPU: runs are bit-identical; on a CPU they are anyway

    def __post_init__(self) -> None:
        """Validate the numbers."""
        require_at_least(self, 1, "rounds", "batch_size", "clients_per_round")
        require_at_least(self, 0, "epochs", "lr", "weight_decay", "shift")
        require_fraction(self, "momentum", "dropout")
        some = 0 < self.participation <= 1
        require(self, "participation", some, "above 0 and at most 1")
        one = self.clients_per_round is None or self.participation == 1
        require(self, "participation", one, "absent, as clients_per_round is set")
        if self.schedule == "constant":
            require(self, "lr_end", self.lr_end is None, "absent, as schedule is 'constant'")
            return
        falls = self.lr_end is not None and 0 < self.lr_end <= self.lr
        right = f"above 0 and at most lr = {self.lr:g}, as schedule is {self.schedule!r}"
        require(self, "lr_end", falls, right)

    def count_selected(self, clients: int) -> int:
        """How many of so many clients are selected in a round."""
        if self.clients_per_round is not None:
            return min(self.clients_per_round, clients)
        return max(1, math.ceil(self.participation * clients - 1e-9))  # 0.28 * 25 > 7

    def lr_in(self, round_: int) -> float:
        """The local learning rate in a round of an experience."""
        if self.lr_end is None:
            return self.lr
        passed = round_ / self.rounds
        if self.schedule == "cosine":
            return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * passed)) / 2
        return self.lr * math.pow(self.lr_end / self.lr, passed)


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
class Privacy:
    """Differential privacy of clients: their updates are clipped, and noise is added."""

    clip: float  # largest L2 norm of an update, the uploaded parameters minus the received ones
    noise_multiplier: float  # the noise's standard deviation over clip; 0: clipping only
    noise: Literal["local", "central"]  # on each client's update, or by the server on their sum

    def __post_init__(self) -> None:
        """Validate the numbers."""
        require_above(self, 0, "clip")
        require_at_least(self, 0, "noise_multiplier")

    @property
    def is_central(self) -> bool:
        """Whether the server adds noise."""
        return self.noise == "central" and self.noise_multiplier > 0


@dataclass(frozen=True)
class Setting:
    """One experiment without its method: data, plan, network and training."""

    name: str
    data: Mapping[str, Any]  # source and its own options, checked by stamp_core.data
    split: Split
    network: Network
    training: Training
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    privacy: Privacy | None = None
