"""Networks that generate images: from noise, or from the anchor of a class and noisy layers."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.core.seeding import address
from stamp_core.models.encoders import Shape

_Module = TypeVar("_Module", bound=nn.Module)

CHUNK = 10  # consecutive images of a batch that share a noisy layer
SLOPE = 0.2  # of LeakyReLU for negative values
BETAS = (0.5, 0.999)  # of Adam on generators of images


class ImageGenerator(nn.Module):
    """Images with pixels in [0, 1] from latent vectors, at a quarter, half and all of their size.

    Its normalisations always use the statistics of the batch, so it has no buffers.
    """

    def __init__(self, shape: Shape, latent: int, width: int) -> None:
        super().__init__()
        channels, *sides = shape
        self.quarter = [2 * width, *(math.ceil(side / 4) for side in sides)]
        half = tuple(math.ceil(side / 2) for side in sides)
        self.project = nn.Linear(latent, math.prod(self.quarter))
        self.layers = nn.Sequential(
            _batch_norm(2 * width),
            nn.Upsample(half),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            _batch_norm(2 * width),
            nn.LeakyReLU(SLOPE),
            nn.Upsample(tuple(sides)),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            _batch_norm(width),
            nn.LeakyReLU(SLOPE),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, latent: Tensor) -> Tensor:
        """The images of latent vectors."""  # [N, latent] -> [N, C, H, W]
        coarse = self.project(latent).view(-1, *self.quarter)
        # on a CPU the convolutions of the other memory format take half as long again
        images: Tensor = self.layers(coarse.contiguous(memory_format=torch.channels_last))
        return images


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


def build_seeded(build: Callable[[], _Module], *parts: int | str) -> _Module:
    """The module that `build` returns, with the initial weights of an address.

    The global generator is left unchanged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(address(*parts))
        return build()


def _batch_norm(channels: int) -> nn.Module:
    """Batch normalisation without running statistics."""
    return nn.BatchNorm2d(channels, track_running_stats=False)
