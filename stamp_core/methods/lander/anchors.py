"""Anchors of classes: drawn or read from a file, and images that are synthesised near them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.core import paths
from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import Log
from stamp_core.methods.base.synthesis import Outputs, Source, Synthesis
from stamp_core.models.adam import FlatAdam
from stamp_core.models.encoders import Shape
from stamp_core.models.generators import BETAS, ImageGenerator, build_seeded

# Random anchors are as far from each other as the published ones of CIFAR-100: the mean square of
# the difference of two numbers is 0.081, so `radius` keeps its meaning.
DEVIATION = math.sqrt(0.081 / 2)
CHUNK = 10  # consecutive images of a batch that share a noisy layer


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
    """Images from the anchors of their classes: noisy linear layers, then an `ImageGenerator`.

    Every `CHUNK` consecutive images have a noisy layer of their own, drawn anew by `redraw`.
    """

    def __init__(self, shape: Shape, latent: int, width: int, anchor: int, images: int) -> None:
        super().__init__()
        chunks = math.ceil(images / CHUNK)
        self.norm = nn.BatchNorm1d(anchor, track_running_stats=False)
        self.weight = nn.Parameter(torch.zeros(chunks, anchor, latent))
        self.bias = nn.Parameter(torch.zeros(chunks, 1, latent))
        self.generator = ImageGenerator(shape, latent, width)

    @torch.no_grad()
    def redraw(self, draw: torch.Generator) -> None:
        """Draw the weights of the noisy layers from N(0, 1) and set their biases to 0."""
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
        params: Any,
        source: Source,
        anchors: Tensor,  # [L, A]
        log: Log,
    ) -> None:
        sizes = runtime.shape, params.latent, params.generator_width
        inputs = anchors.shape[1], params.synthesis_batch_size
        self.layers = build_seeded(
            lambda: NoisyLabelGenerator(*sizes, *inputs), *source.seed, "generator"
        )
        super().__init__(runtime, params, source, self.layers, log)
        self.first_saved = params.warmup
        self.anchor_weight: float = params.anchor_weight
        self.anchors = anchors[self.classes].float().to(runtime.device)  # [K, A]

    def draw_targets(self, count: int) -> Tensor:
        """Labels as places in `classes`: all in turn, and for the rest random ones.  # [N]"""
        cycles, rest = divmod(count, len(self.classes))
        drawn = torch.randint(len(self.classes), (rest,), generator=self.draw)
        return torch.cat([torch.arange(len(self.classes)).repeat(cycles), drawn])

    def start_round(self, targets: Tensor) -> tuple[Tensor, list[FlatAdam]]:
        """The anchors of the labels, and a new optimiser after the noisy layers are drawn."""
        self.layers.redraw(self.draw)
        adam = FlatAdam(self.generator, self.params.generator_lr, betas=BETAS)
        return self.anchors[targets], [adam]

    def teacher_loss(self, teacher: Outputs, targets: Tensor) -> Tensor:
        """The loss on the labels and, for mapped features, on their anchors."""
        hinge = anchor_hinge(teacher[1], self.anchors[targets], self.params.radius)
        return super().teacher_loss(teacher, targets) + self.anchor_weight * hinge

    def student_loss(self, student: Outputs, teacher: Outputs) -> Tensor:
        """The student's divergence from the teacher, also in mapped features."""
        distance = F.mse_loss(student[1], teacher[1])
        return super().student_loss(student, teacher) + self.anchor_weight * distance
