"""The sections of a setting as frozen dataclasses that check themselves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from stamp_core.config.decode import require
from stamp_core.config.limits import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Share,
    between,
)


@dataclass(frozen=True)
class Split:
    """Which client learns which classes when. A field with a default is off unless set."""

    kind: Literal["classes", "domains", "file"]  # file: tasks of any size, not drawn here
    clients: Count  # of the federation, at its end
    tasks: Count  # of each client
    classes_per_task: PositiveInt | None = None  # kind "classes" only
    cycles: Count = 1  # passes over the task sequence
    # of each client's tasks: drawn for each, one drawn for all, as listed, some clients in common
    order: Literal["independent", "common", "given", "mixed"] = "independent"
    common_clients: NonNegativeInt = 0  # order "mixed": clients that follow one common order
    alpha: Positive | None = None  # Dirichlet concentration over clients inside each task
    min_samples: NonNegativeInt = 1  # with alpha: the fewest images of a client in a task
    images_per_class: PositiveInt | None = None  # drawn at random for each client; None: all images
    sizes: Literal["drawn", "equal"] = "drawn"  # with alpha: of the clients' shares of a task
    joining: NonNegativeInt = 0  # of the clients: how many join with each task after the first
    old_share: Fraction = 0.0  # of clients that joined before a task: those that do not learn it
    classes_per_client: PositiveInt | None = None  # of a task, drawn for each; None: all of them

    def __post_init__(self) -> None:
        given, right = self.classes_per_task is not None, f"absent, as kind is {self.kind!r}"
        if self.kind == "classes":
            require(self, "classes_per_task", given, "a number of classes, as kind is 'classes'")
        else:
            require(self, "classes_per_task", not given, right)
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

    # fcn: a class per pixel; identity and last_block: on features of a pre-trained encoder
    kind: Literal["mlp", "cnn", "lenet", "resnet18", "swin_t", "fcn", "identity", "last_block"]
    features: Count = 64  # width of the last hidden layer (mlp, cnn, fcn)
    # cnn: one 5 x 5 convolution with pooling each; fcn: at the full and at half the size;
    # last_block: one number, after the block
    channels: tuple[Count, ...] = (16, 32)
    norm: Literal["none", "batch", "group"] = "none"  # normalisation (cnn, resnet18)
    stem: Literal["published", "small"] = "published"  # resnet18: 7 x 7 / 2 and pooling, or 3 x 3
    pretrained: str | None = None  # a file of weights, in the folder of downloads or absolute

    def __post_init__(self) -> None:
        require(self, "channels", bool(self.channels), "at least one number")
        kind = f"as kind is {self.kind!r}"
        if self.kind == "resnet18":
            require(self, "norm", self.norm != "none", f"'batch' or 'group', {kind}")
            return
        require(self, "norm", self.norm == "none" or self.kind == "cnn", f"'none', {kind}")
        require(self, "stem", self.stem == "published", f"absent, {kind}")


@dataclass(frozen=True)
class Training:
    """How each client learns in a round; the same for all methods of a table."""

    rounds: PositiveInt  # per task
    epochs: NonNegativeInt  # local, in a round
    batch_size: PositiveInt  # new images of an SGD step
    lr: NonNegative  # of local SGD
    momentum: Fraction = 0.0  # of local SGD
    weight_decay: NonNegative = 0.0  # in local SGD
    participation: Share = 1.0  # share of clients selected in a round
    clients_per_round: PositiveInt | None = None  # their number instead
    schedule: Literal["constant", "cosine", "exponential"] = "constant"  # of lr in an experience
    lr_end: Positive | None = None  # what lr falls to, reached after the experience's last round
    buffers: Literal["shared", "local", "frozen"] = "shared"  # of batch normalisation
    shift: Annotated[int, between(0, 100)] = 0  # augmentation: random translation in pixels
    flip: bool = False  # augmentation: random mirroring
    secure_sums: bool = False  # the server is handed sums of uploads, no single one

    def __post_init__(self) -> None:
        one = self.clients_per_round is None or self.participation == 1
        require(self, "participation", one, "absent, as clients_per_round is set")
        if self.schedule == "constant":
            require(self, "lr_end", self.lr_end is None, "absent, as schedule is 'constant'")
            return
        falls = self.lr_end is not None and self.lr_end <= self.lr
        right = f"above 0 and at most lr = {self.lr:g}, as schedule is {self.schedule!r}"
        require(self, "lr_end", falls, right)

    def count_selected(self, clients: int) -> int:
        if self.clients_per_round is not None:
            return min(self.clients_per_round, clients)
        return max(1, math.ceil(self.participation * clients - 1e-9))  # 0.28 * 25 > 7

    def lr_in(self, round_: int) -> float:
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
    features: NonNegativeInt = 0  # test images per class whose features the record keeps
    memory: NonNegativeInt = 0  # exemplars per class of the first client that the record keeps


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of clients: their updates are clipped, and noise is added."""

    clip: Annotated[Positive, between(0, 1e6)]  # largest L2 norm of an uploaded update
    # the noise's standard deviation over clip; 0: clipping only
    noise_multiplier: Annotated[NonNegative, between(0, 1e6)]
    noise: Literal["local", "central"]  # on each client's update, or by the server on their sum

    @property
    def is_central(self) -> bool:
        """Whether the server adds noise."""
        return self.noise == "central" and self.noise_multiplier > 0


@dataclass(frozen=True)
class Setting:
    """One experiment without its method: data, plan, network and training."""

    name: str  # its key in params/settings.yaml
    data: Mapping[str, Any]  # source and its own options, checked by stamp_core.data
    split: Split
    network: Network
    training: Training
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    privacy: Privacy | None = None
