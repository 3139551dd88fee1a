"""Weights decomposed by output channel: theta = B * sigmoid(m) + A + sum_k alpha_k KB_k."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stamp_core.core.arithmetic import sqrt
from stamp_core.models.flat import FlatModel
from workbench.methods.base.task_server import pack_bits, unpack_bits


class Channels:
    """Where weights (N in C channels, the first axis) and the rest [R] are in a flat vector [P]."""

    def __init__(self, shapes: Sequence[Sequence[int]], decomposed: Sequence[bool]) -> None:
        self.sizes = [math.prod(shape) for shape in shapes]
        self.decomposed = list(decomposed)
        chosen = [shape for shape, yes in zip(shapes, decomposed, strict=True) if yes]
        self.widths = [shape[0] for shape in chosen]  # channels of each decomposed tensor
        self.blocks = [math.prod(shape) for shape in chosen]  # its weights
        self.count = sum(self.widths)
        self.weights = sum(self.blocks)

    def views(self, parameters: Tensor, decomposed: bool = True) -> list[Tensor]:
        """Views of the decomposed tensors in a vector of parameters, or of the others."""
        parts = zip(parameters.split(self.sizes), self.decomposed, strict=True)
        return [part for part, yes in parts if yes == decomposed]

    def pick(self, parameters: Tensor, decomposed: bool = True) -> Tensor:
        """The decomposed weights in a vector of parameters, or the rest.  # [N] or [R]"""
        return torch.cat([parameters[:0], *self.views(parameters, decomposed)])

    def join(self, weights: Tensor, rest: Tensor) -> Tensor:
        """The vector of parameters with these weights and this rest.  # [P]"""
        parameters = rest.new_empty(sum(self.sizes))
        for decomposed, values in ((True, weights), (False, rest)):
            views = self.views(parameters, decomposed)
            sizes = [len(view) for view in views]
            for view, part in zip(views, values.split(sizes) if sizes else (), strict=True):
                view.copy_(part)
        return parameters

    def rows(self, weights: Tensor) -> list[Tensor]:
        """Views of the decomposed tensors with one row for each channel.  # [width, fan] each"""
        tensors = zip(weights.split(self.blocks), self.widths, strict=True)
        return [part.view(width, -1) for part, width in tensors]

    def expand(self, values: Tensor) -> Tensor:
        """The value of its channel for each weight.  # [C] -> [N]"""
        fans = [block // width for block, width in zip(self.blocks, self.widths, strict=True)]
        tensors = zip(values.split(self.widths), fans, strict=True)
        return torch.cat([values[:0], *(part.repeat_interleave(fan) for part, fan in tensors)])

    def draw_masks(self, generator: torch.Generator) -> Tensor:
        """Normal numbers of variance 1 / width for the channels of each tensor.  # [C]"""
        widths = torch.tensor(self.widths, dtype=torch.int64)
        numbers = torch.randn(self.count, generator=generator)
        return numbers / sqrt(widths.repeat_interleave(widths))

    def largest(self, values: Tensor, sparsity: float) -> Tensor:
        """The channels whose value is above that of a share of their tensor's.  # bool [C]"""
        parts = [
            part > part.sort().values[math.floor(sparsity * len(part))]
            for part in values.split(self.widths)
            if len(part)  # nothing is decomposed
        ]
        return torch.cat([values[:0].bool(), *parts])


class Decomposed:
    """The parts of theta that are trained: B [N], m [C], A [N] and alpha [T, K], with KB [K, N].

    Each of the T decomposed tensors has an attention of its own.

    They are one flat vector, `flat.parameters`, with the gradients `flat.gradients`.
    """

    def __init__(self, channels: Channels, trained: Sequence[Tensor], knowledge: Tensor) -> None:
        self.channels = channels
        self.knowledge = knowledge
        self.flat = FlatModel(nn.ParameterList(trained))
        sizes = [part.numel() for part in trained]
        self.base, self.mask, self.adaptive, attention = self.flat.parameters.split(sizes)
        self.attention = attention.view(len(channels.blocks), len(knowledge))
        self.gradients = self.flat.gradients.split(sizes)

    def known(self) -> tuple[Tensor, ...]:
        """KB, tensor by tensor.  # [K, block] each"""
        return tuple(self.knowledge.split(self.channels.blocks, 1))

    def foreign(self) -> Tensor:
        """The sum over k of alpha_k KB_k.  # [N]"""
        pairs = zip(self.known(), self.attention, strict=True)
        return torch.cat([self.base[:0], *(torch.mv(known.T, row) for known, row in pairs)])

    def compose(self, parameters: Tensor) -> None:
        """Write theta into a vector of parameters.  # [P]"""
        channels = self.channels
        parts = zip(
            channels.views(parameters),
            channels.rows(self.base),
            channels.rows(self.adaptive),
            self.mask.sigmoid()[:, None].split(channels.widths),
            self.known(),
            self.attention,
            strict=True,
        )
        for theta, base, adaptive, share, known, attention in parts:
            torch.addcmul(adaptive, base, share, out=theta.view_as(base))
            theta.addmv_(known.T, attention)

    def backward(self, gradients: Tensor) -> None:
        """Set the gradients of the parts from those of the parameters [P], composed as now.

        With g = dL/dtheta and s = sigmoid(m): dL/dB = g s, dL/dm = s (1 - s) sum g B over the
        channel, dL/dA = g, dL/dalpha_k = <g, KB_k> in each tensor.
        """
        channels = self.channels
        base, mask, g, attention = self.gradients
        torch.cat([gradients[:0], *channels.views(gradients)], out=g)
        torch.mul(g, self.base, out=base)  # overwritten below: larger than a cache, memory is slow
        share = self.mask.sigmoid()
        sums = [row.sum(1) for row in channels.rows(base)]  # g B over each channel
        torch.mul(torch.cat([mask[:0], *sums]), share * (1 - share), out=mask)
        rows = channels.rows(g), channels.rows(base), share[:, None].split(channels.widths)
        for row, to_base, part in zip(*rows, strict=True):
            torch.mul(row, part, out=to_base)
        rows = attention.view_as(self.attention)
        for known, part, row in zip(self.known(), g.split(channels.blocks), rows, strict=True):
            torch.mv(known, part, out=row)


class PastWeights:
    """What holds the weights of past tasks, theta_i = B s_i + A_i, where they were at an anchor.

    With b = B - B° and a_i = A_i - A_i° their squared distance from there is sum_i |b s_i + a_i|^2.
    B and all A_i take implicit steps down this sum: along the gradient where the step ends, so that
    no size overshoots. Every step keeps a_i a multiple of s_i, a_i = -v s_i: `target` is B° + v,
    the B at which no theta_i would have moved.
    """

    def __init__(self, target: Tensor, squares: Tensor, size: float) -> None:
        self.target = target.clone()
        self.compensation = size / (1 + size)
        pull = squares * self.compensation
        self.pull = pull / (1 + pull)

    def retain(self, base: Tensor) -> None:
        """One step of B and, by way of the target, of all A_i; in place.

        It solves b = b' - size sum_i s_i (b s_i + a_i) and a_i = a_i' - size (b s_i + a_i), so that
        v = v' + q (b - v') with q = size / (1 + size), and b = b' + p (v' - b') with
        p = q sum_i s_i^2 / (1 + q sum_i s_i^2).
        """
        base.lerp_(self.target, self.pull)
        self.target.lerp_(base, self.compensation)


def true_indices(mask: Tensor) -> Tensor:
    """The indices at which a mask is true; numpy finds them in an eighth of torch's time."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def to_sparse(vector: Tensor, threshold: float) -> dict[str, Tensor]:
    """The values above a threshold in size, and their places: bits or, if fewer bytes, indices."""
    mask = vector.abs() > threshold
    indices = true_indices(mask)
    bits = pack_bits(mask)
    places = indices.int() if len(indices) * torch.int32.itemsize < len(bits) else bits
    return {"values": vector[indices], "places": places}


def to_dense(values: Tensor, places: Tensor, size: int) -> Tensor:
    """The vector that `to_sparse` was given, with zeros for what was left out.  # [size]"""
    bits = places.dtype == torch.uint8
    indices = true_indices(unpack_bits(places, size)) if bits else places.long()
    return values.new_zeros(size).index_copy_(0, indices, values)
