"""Networks that generate images, and the random inputs of their training."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from stamp_core.core.seeding import address
from stamp_core.models.encoders import Shape

_Module = TypeVar("_Module", bound=nn.Module)

SLOPE = 0.2  # of LeakyReLU for negative values
BETAS = (0.5, 0.999)  # of Adam on generators of images


class ImageGenerator(nn.Module):
    """Images in [0, 1] from latent vectors; normalised by the batch, so without buffers."""

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


def build_seeded(build: Callable[[], _Module], *parts: int | str) -> _Module:
    """The module that `build` returns with the initial weights of an address."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(address(*parts))
        return build()


def _batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, track_running_stats=False)


def draw_inputs(
    classes: Tensor, size: Sequence[int], draw: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Labels drawn uniformly from a mask of classes [L], and noise.  # [size[0]], size"""
    chosen = classes.nonzero().flatten()
    labels = chosen[torch.randint(len(chosen), (size[0],), generator=draw)]
    return labels.to(device), torch.randn(*size, generator=draw).to(device)


class Pool:
    """Rows of some tensors, which `make` makes many at a time whenever too few are left."""

    def __init__(self, make: Callable[[], Sequence[Tensor]]) -> None:
        self.make = make
        self.rows: Sequence[Tensor] = ()

    def take(self, count: int) -> Sequence[Tensor]:
        while not self.rows or len(self.rows[0]) < count:
            new = self.make()
            pairs = zip(self.rows or [part[:0] for part in new], new, strict=True)
            self.rows = [torch.cat(pair) for pair in pairs]
        taken, self.rows = zip(*((each[:count], each[count:]) for each in self.rows), strict=True)
        return taken
