"""A class-conditional normalising flow of affine couplings (Dinh et al., 2017)."""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.core.seeding import generator

Scale = Literal["default", "general"]
BLOCKS = 2  # residual blocks of a coupling's network
LEAST, LARGEST = 1e-3, 3.0  # scale of a feature in one coupling
NARROW = 1e-3  # bound of the initial weights of a block's last layer

# "default" only shrinks: features with a deviation below 1 never become standard normal noise.
SCALES: dict[Scale, Callable[[Tensor], Tensor]] = {
    "default": lambda raw: torch.sigmoid(raw + 2) + LEAST,
    "general": lambda raw: (F.softplus(raw) + LEAST).clamp(max=LARGEST),
}


class Coupling(nn.Module):
    """The network of a coupling: from the kept features and the class to shift and scale."""

    def __init__(self, kept: int, moved: int, classes: int, hidden: int) -> None:
        super().__init__()
        self.enter = nn.Linear(kept + classes, hidden)
        layers = [nn.Linear(hidden, hidden) for _ in range(2 * BLOCKS)]
        self.first = nn.ModuleList(layers[::2])
        self.second = nn.ModuleList(layers[1::2])
        self.leave = nn.Linear(hidden, 2 * moved)
        for layer in layers[1::2]:  # so that a block is close to the identity at first
            nn.init.uniform_(layer.weight, -NARROW, NARROW)
            nn.init.uniform_(layer.bias, -NARROW, NARROW)

    def forward(self, kept: Tensor, onehot: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and scale before its activation; `gates` [N, BLOCKS, H] scale the blocks."""
        x = self.enter(torch.cat([kept, onehot], 1))
        for first, second, gate in zip(self.first, self.second, gates.unbind(1), strict=True):
            inner = second(F.leaky_relu(first(F.leaky_relu(x))))
            x = torch.addcmul(x, inner, gate)
        shift, raw = self.leave(x).chunk(2, 1)
        return shift, raw  # [N, D - D // 2] each


class Flow(nn.Module):
    """An invertible map between features and standard normal noise, given the class.

    Each layer permutes the features; a coupling keeps the first half and maps the second one to
    shift + scale * x. The first two layers, or the first half of them, reverse the order, so that
    every feature is mapped; the others permute at random, in the same way in every flow.
    """

    orders: Tensor  # [layers, D]
    inverse: Tensor  # [layers, D]

    def __init__(self, features: int, classes: int, hidden: int, layers: int, scale: Scale) -> None:
        super().__init__()
        self.classes = classes
        self.hidden = hidden
        self.kept = features // 2
        self.scale = SCALES[scale]
        sizes = (self.kept, features - self.kept, classes, hidden)
        self.couplings = nn.ModuleList(Coupling(*sizes) for _ in range(layers))
        self.gates = nn.Linear(classes, layers * BLOCKS * hidden)  # of all blocks of all couplings
        reversals = max(2, layers // 2)
        orders = [
            torch.arange(features).flip(0)
            if layer < reversals
            else torch.randperm(features, generator=generator("flow", layer))
            for layer in range(layers)
        ]
        self.register_buffer("orders", torch.stack(orders))
        self.register_buffer("inverse", torch.stack(orders).argsort(1))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The noise of features and the logarithm of their density.  # [N, D], [N]"""
        onehot, gates = self._classes(labels)
        scales = []
        for order, coupling, gate in zip(self.orders, self.couplings, gates, strict=True):
            x = x.index_select(1, order)
            kept, moved = x.tensor_split([self.kept], 1)
            shift, raw = coupling(kept, onehot, gate)
            scales.append(self.scale(raw))
            x = torch.cat([kept, torch.addcmul(shift, moved, scales[-1])], 1)
        volume = torch.cat(scales, 1).log().sum(1)  # log |det dnoise / dfeatures|
        normal = x.square().sum(1) + x.shape[1] * math.log(2 * math.pi)
        return x, volume - normal / 2

    def sample(self, noise: Tensor, labels: Tensor) -> Tensor:
        """The features of some noise: the inverse of `forward`.  # [N, D]"""
        onehot, gates = self._classes(labels)
        layers = list(zip(self.inverse, self.couplings, gates, strict=True))
        for order, coupling, gate in reversed(layers):
            kept, moved = noise.tensor_split([self.kept], 1)
            shift, raw = coupling(kept, onehot, gate)
            mapped = torch.cat([kept, (moved - shift) / self.scale(raw)], 1)
            noise = mapped.index_select(1, order)
        return noise

    def _classes(self, labels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The classes one-hot and, for each layer, their gates.  # [N, L], [N, BLOCKS, H]"""
        onehot = F.one_hot(labels, self.classes).to(self.gates.weight.dtype)
        gates = torch.sigmoid(self.gates(onehot))
        return onehot, gates.view(len(labels), -1, BLOCKS, self.hidden).unbind(1)
