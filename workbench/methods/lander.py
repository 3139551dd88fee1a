"""LANDER (Tran et al., 2024): images synthesised near the text embeddings of their classes."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative, NonNegativeInt, Positive, PositiveInt
from stamp_core.core import paths
from stamp_core.core.fingerprint import file_digest
from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import ClientRound, Log, Message, Reply, State
from stamp_core.models.encoders import Shape
from stamp_core.models.flat import FlatModel, FlatSGD
from workbench.adam import FlatAdam
from workbench.methods.base.data_free import DataFree, DataFreeContext, DataFreeParams
from workbench.methods.base.generators import BETAS, ImageGenerator, build_seeded
from workbench.methods.base.synthesis import MappedClassifier, Outputs, Source, Synthesis

# Random anchors are as far from each other as the published ones of CIFAR-100: the mean square of
# the difference of two numbers is 0.081, so `RADIUS` keeps its meaning.
DEVIATION = math.sqrt(0.081 / 2)
RADIUS = 0.015  # mean squared distance to the anchors that has no loss
CHUNK = 10  # consecutive images of a batch that share a noisy layer


@dataclass(frozen=True)
class LanderParams(DataFreeParams):
    """How images are synthesised and used; the defaults are those published for CIFAR-100."""

    kd: NonNegative = 0.4  # w_pre before it is balanced by the numbers of classes
    ce: NonNegative = 0.2  # w_cur before the same: weight of new images where there is replay
    anchors: str = "random"  # or a .npy file in the folder of downloads, with a row per class
    anchor_features: PositiveInt = 512  # of random anchors
    anchor_weight: NonNegative = 5.0  # of staying near the anchors, in training and synthesis
    images: PositiveInt = 10000
    generator_steps: PositiveInt = 40
    statistics_weight: NonNegative = 1.0
    warmup: NonNegativeInt = 10  # the images of these rounds are not kept either
    student_steps: PositiveInt = 50
    student_lr: Positive = 0.1
    student_weight_decay: NonNegative = 2e-4

    def file_digests(self) -> dict[str, str]:
        """The sha256 of the file of anchors, on which numbers depend, if there is one."""
        random = self.anchors == "random"
        return {} if random else {"anchors": file_digest(anchors_path(self.anchors))}


def draw_anchors(classes: int, features: int, seed: int) -> Tensor:
    """Random anchors of a run.  # float16 [L, A]"""
    table = torch.randn(classes, features, generator=generator(seed, "anchors"))
    return (DEVIATION * table).half()


def anchors_path(name: str) -> Path:
    """The path of a file of anchors."""
    path = paths.RAW / name
    if not path.is_file():
        raise invalid("anchors", name, f"'random' or a file: there is none at {path}")
    return path


def read_anchors(name: str, classes: int) -> Tensor:
    """The first rows of a file in the folder of downloads, one per class.  # float16 [L, A]"""
    path = anchors_path(name)
    try:
        rows = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise invalid("anchors", name, f"a .npy file of numbers: {path} is not one") from error
    if rows.ndim != 2 or rows.dtype.kind not in "fiu":
        found = f"{rows.dtype} {list(rows.shape)}"
        raise invalid("anchors", name, f"a table of numbers, a row per class: {path} is {found}")
    if len(rows) < classes:
        right = f"a table with a row per class: {path} has {len(rows)} rows for {classes} classes"
        raise invalid("anchors", name, right)
    table = torch.from_numpy(rows[:classes].astype(np.float32)).half()
    if not table.isfinite().all():
        raise invalid("anchors", name, f"a table of finite numbers in float16: {path} is not")
    return table


def anchor_hinge(mapped: Tensor, anchors: Tensor, radius: float) -> Tensor:
    """By how much the mean squared distance of a batch exceeds the radius.  # of [N, A]"""
    return F.relu(F.mse_loss(mapped, anchors) - radius)


class NoisyLabelGenerator(nn.Module):
    """Images from anchors: a noisy linear layer for every `CHUNK` images, then a generator."""

    def __init__(self, shape: Shape, latent: int, width: int, anchor: int, images: int) -> None:
        super().__init__()
        chunks = math.ceil(images / CHUNK)
        self.norm = nn.BatchNorm1d(anchor, track_running_stats=False)
        self.weight = nn.Parameter(torch.zeros(chunks, anchor, latent))
        self.bias = nn.Parameter(torch.zeros(chunks, 1, latent))
        self.generator = ImageGenerator(shape, latent, width)

    @torch.no_grad()
    def redraw(self, draw: torch.Generator) -> None:
        self.weight.copy_(torch.randn(self.weight.shape, generator=draw))
        self.bias.zero_()

    def forward(self, anchors: Tensor) -> Tensor:
        """The images of classes with these anchors."""  # [N, A] -> [N, C, H, W]
        missing = len(self.weight) * CHUNK - len(anchors)
        padded = F.pad(self.norm(anchors), (0, 0, 0, missing)).view(len(self.weight), CHUNK, -1)
        latent = torch.baddbmm(self.bias, padded, self.weight).flatten(0, 1)
        images: Tensor = self.generator(latent[: len(anchors)])
        return images


class AnchoredSynthesis(Synthesis):
    """A generator whose inputs are anchors, through noisy layers that every round draws anew."""

    def __init__(
        self,
        runtime: ClientRuntime,
        params: LanderParams,
        source: Source,
        anchors: Tensor,
        log: Log,
    ) -> None:
        sizes = runtime.shape, params.latent, params.generator_width
        inputs = anchors.shape[1], params.synthesis_batch_size
        build = partial(NoisyLabelGenerator, *sizes, *inputs)
        self.layers = build_seeded(build, *source.seed, "generator")
        super().__init__(runtime, params, source, self.layers, log)
        self.first_saved = params.warmup
        self.anchor_weight: float = params.anchor_weight
        self.anchors = anchors[self.classes].float().to(runtime.device)  # [K, A]

    def draw_targets(self, count: int) -> Tensor:
        """Labels as indices of `classes`: all in turn, and for the rest random ones.  # [N]"""
        cycles, rest = divmod(count, len(self.classes))
        drawn = torch.randint(len(self.classes), (rest,), generator=self.draw)
        return torch.cat([torch.arange(len(self.classes)).repeat(cycles), drawn])

    def start_round(self, targets: Tensor) -> tuple[Tensor, list[FlatAdam]]:
        self.layers.redraw(self.draw)
        adam = FlatAdam(self.generator, self.params.generator_lr, betas=BETAS)
        return self.anchors[targets], [adam]

    def teacher_loss(self, teacher: Outputs, targets: Tensor) -> Tensor:
        hinge = anchor_hinge(teacher[1], self.anchors[targets], RADIUS)
        return super().teacher_loss(teacher, targets) + self.anchor_weight * hinge

    def student_loss(self, student: Outputs, teacher: Outputs) -> Tensor:
        distance = F.mse_loss(student[1], teacher[1])
        return super().student_loss(student, teacher) + self.anchor_weight * distance


@dataclass
class LanderContext(DataFreeContext):
    anchors: Tensor  # [L, A]
    map_sgd: FlatSGD  # of the linear map


class Lander(DataFree):
    """FedAvg with anchors per class, near which a linear map brings features and images."""

    Params: ClassVar = LanderParams
    fedavg_equivalent: ClassVar = {"kd": 0.0, "anchor_weight": 0.0, "ce_classes": "all"}

    def __init__(self, params: LanderParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        random = params.anchors == "random"
        self.file = None if random else read_anchors(params.anchors, runtime.classes)
        self.map = FlatModel(self.feature_map().to(runtime.device))
        self.extra_networks = {"map": self.map}
        self.network = MappedClassifier(self.classifier, self.map.module)

    def feature_map(self, *seed: int | str) -> nn.Module:
        width = self.params.anchor_features if self.file is None else self.file.shape[1]
        return build_seeded(partial(nn.Linear, self.classifier.features, width), *seed)

    def initial_weights(self, name: str, seed: int) -> Tensor:
        return FlatModel(self.feature_map(seed, name)).parameters

    def init_server(self, seed: int) -> State:
        server: State = super().init_server(seed)
        server["anchors"] = self.file  # float16 [L, A]
        if self.file is None:
            sizes = self.runtime.classes, self.params.anchor_features
            server["anchors"] = draw_anchors(*sizes, seed)
        server["holders"] = list[int]()  # clients that have the anchors
        return server

    def broadcast(self, server: State, client: int) -> Message:
        message = super().broadcast(server, client)
        held = client in server["holders"]
        return message if held else {**message, "anchors": server["anchors"]}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        holders = sorted({*server["holders"], *(reply.client for reply in replies)})
        return super().aggregate({**server, "holders": holders}, replies, log)

    def synthesis(self, source: Source, server: State, log: Log) -> Synthesis:
        return AnchoredSynthesis(self.runtime, self.params, source, server["anchors"], log)

    def start(self, client_round: ClientRound) -> LanderContext:
        shared = vars(super().start(client_round))
        held = client_round.state if "anchors" in client_round.state else client_round.message
        anchors = held["anchors"].to(self.runtime.device, torch.float32)
        return LanderContext(**shared, anchors=anchors, map_sgd=self.runtime.new_sgd(self.map))

    def loss_weights(self, past: int, new: int) -> tuple[float, float]:
        """The weights balanced by the numbers of classes in distillation and in the task."""
        alpha = math.log2((past + new) / 2 + 1)
        beta = math.sqrt(past / (past + new))
        return self.params.ce * ((1 + 1 / alpha) / beta), self.params.kd * (alpha * beta)

    def new_loss(self, outputs: Outputs, labels: Tensor, context: LanderContext) -> Tensor:
        loss = super().new_loss(outputs, labels, context)
        if not self.params.anchor_weight:
            return loss
        hinge = anchor_hinge(outputs[1], context.anchors[labels], RADIUS)
        return loss + float(self.params.anchor_weight) * hinge

    def distillation_loss(self, student: Outputs, teacher: Outputs, classes: Tensor) -> Tensor:
        loss = super().distillation_loss(student, teacher, classes)
        return loss + F.mse_loss(student[1], teacher[1])

    def correct_gradient(self, batch: Batch, context: LanderContext) -> None:
        context.map_sgd.step()
        self.map.gradients.zero_()

    def update_state(self, client_round: ClientRound, context: LanderContext) -> State:
        anchors = context.anchors.cpu().half()
        return {**super().update_state(client_round, context), "anchors": anchors}
