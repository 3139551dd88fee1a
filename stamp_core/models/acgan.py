"""Parts of an AC-GAN (Odena et al., 2017): generator, noise, labels, losses."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stamp_core.models.encoders import Shape

BETAS = (0.5, 0.999)  # of Adam, as published for colour images
Sides = tuple[int, int]  # height and width
SMALLEST = 4  # the sides of the first maps are at most this


class Generator(nn.Module):
    """Images in (-1, 1) from noise, by transposed convolutions that double the sides of maps.

    Batch normalisation always uses the statistics of the batch, in training and in sampling: the
    network has no buffers that would have to be sent.
    """

    def __init__(self, shape: Shape, inputs: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(inputs, width)]
        for place, after in enumerate(chain := _sides(shape)):
            last = after == chain[-1]
            outputs = shape[0] if last else max(1, width // 2)
            if place:
                layers.append(Upsampling(width, outputs, after))
            else:  # of 1 x 1 maps a transposed convolution is a linear layer
                first = nn.Linear(width, outputs * math.prod(after), bias=False)
                layers += [first, nn.Unflatten(1, (outputs, *after))]
            if not last:
                layers += [nn.BatchNorm2d(outputs, track_running_stats=False), nn.ReLU()]
            width = outputs
        self.layers = nn.Sequential(*layers, nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        """One image for each row of noise.  # [n, inputs] -> [n, C, H, W]"""
        images: Tensor = self.layers(noise)
        return images


class Upsampling(nn.Module):
    """A transposed convolution to maps with twice the sides, or one pixel less.

    Its kernel is 4 or 3 pixels wide, stride 2, padding 1, without bias. As a matrix product and a
    sum of overlapping patches it takes a third of the time of torch's layer for small images.
    """

    def __init__(self, inputs: int, outputs: int, after: Sides) -> None:
        super().__init__()
        kernel = 4 - after[0] % 2, 4 - after[1] % 2
        self.weight = nn.Parameter(torch.empty(inputs, outputs * math.prod(kernel)))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as in torch's layer
        self.fold = nn.Fold(after, kernel, padding=1, stride=2)

    def forward(self, maps: Tensor) -> Tensor:
        """The larger maps.  # [n, inputs, h, w] -> [n, outputs, H, W]"""
        patches = maps.flatten(2).transpose(1, 2) @ self.weight  # [n, h w, outputs kernel]
        larger: Tensor = self.fold(patches.transpose(1, 2))
        return larger


def _sides(shape: Shape) -> list[Sides]:
    """The sides of the maps after each layer, from at most `SMALLEST` to those of the images."""
    _, height, width = shape
    sides = [(height, width)]
    while max(height, width) > SMALLEST:
        height, width = (height + 1) // 2, (width + 1) // 2
        sides.append((height, width))
    return sides[::-1]


def draw_labels(classes: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Labels drawn uniformly from a mask of classes.  # bool [L] -> [count]"""
    chosen = classes.nonzero().flatten()
    return chosen[torch.randint(len(chosen), (count,), generator=draw)]


def draw_balanced(labels: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Indices of images whose labels are drawn uniformly from those present.  # [count]"""
    order, sizes = labels.argsort(stable=True), labels.unique(return_counts=True)[1]
    classes = torch.randint(len(sizes), (count,), generator=draw)
    place = torch.randint(2**62, (count,), generator=draw) % sizes[classes]
    return order[(sizes.cumsum(0) - sizes)[classes] + place]


def generator_inputs(labels: Tensor, noise: Tensor, classes: int) -> Tensor:
    """One-hot labels followed by noise.  # [n], [n, noise] -> [n, classes + noise]"""
    return torch.cat([F.one_hot(labels, classes).to(noise.dtype), noise], 1)


@contextmanager
def unchanged_statistics(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """A context in which batches do not change the running statistics of batch normalisation."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
