"""The meta-networks: how a client is fine-tuned, from the statistics of its images in a network."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime
from stamp_core.core.arithmetic import sqrt
from stamp_core.core.seeding import generator
from stamp_core.models.flat import split_like
from workbench.methods.fedl2p.normalisation import Moments, all_but_channels, running_statistics

HIDDEN = 100  # width of both hidden layers of a meta-network
GAIN = 0.1  # of the Xavier initialisation of their weights
BETA = 0.5  # initial value of all biases of BNNet
MULTIPLIER = 1.0  # and of LRNet
MAX_MULTIPLIER = 1000.0
VARIANCE_EPSILON = 1e-5  # added to variances


class LayerStatistics(NamedTuple):
    """The inputs of the meta-networks: statistics of a client's images in a network."""

    inputs: Tensor  # [L 2] mean and deviation of each learnable layer's input
    divergences: Tensor  # [N] of each normalisation's input from its running statistics


class MetaNets:
    """BNNet, LRNet and a learnt learning rate for each tensor of a model, in one vector `meta`."""

    def __init__(self, module: nn.Module, norms: int) -> None:
        self.tensors = [p.numel() for p in module.parameters()]
        bn = _mlp_parts(norms, norms) if norms else []  # without normalisation no BNNet
        lr = _mlp_parts(2 * len(_learnable(module)), len(self.tensors))
        self.parts = [*bn, *lr, torch.empty(len(self.tensors))]
        self.bn_size = sum(part.numel() for part in bn)  # BNNet comes first in `meta`

    def initial(self, seed: int, lr: float) -> Tensor:
        """The initial `meta`: Xavier weights, constant biases, learning rates of `lr`.  # [M]"""
        fills = [*[BETA] * (len(self.parts) - 7), *[MULTIPLIER] * 6, lr]
        parts = [torch.full_like(part, fill) for part, fill in zip(self.parts, fills, strict=True)]
        draw = generator(seed, "meta")
        for part in parts:
            if part.dim() == 2:
                nn.init.xavier_normal_(part, GAIN, generator=draw)
        return torch.cat([part.flatten() for part in parts])

    def __call__(self, meta: Tensor, statistics: LayerStatistics) -> tuple[Tensor, Tensor]:
        """beta for each normalisation and the multiplied learning rate of each tensor."""
        *nets, lrs = split_like(meta, self.parts)
        multipliers = _clamp(_mlp(nets[-6:], statistics.inputs), MAX_MULTIPLIER)
        beta = _clamp(_mlp(nets[:6], statistics.divergences), 1.0) if self.bn_size else meta[:0]
        return beta, lrs * multipliers  # [N], [K]

    def expand(self, lrs: Tensor) -> Tensor:
        """The learning rate of each parameter from those of the tensors.  # [K] -> [P]"""
        return torch.cat([lr.expand(n) for lr, n in zip(lrs, self.tensors, strict=True)])


def _learnable(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if list(layer.parameters(recurse=False))]


def _mlp_parts(inputs: int, outputs: int) -> list[Tensor]:
    """Empty weights and biases of a network with two hidden layers."""
    sizes = pairwise((inputs, HIDDEN, HIDDEN, outputs))
    return [part for a, b in sizes for part in (torch.empty(b, a), torch.empty(b))]


def _mlp(parts: Sequence[Tensor], x: Tensor) -> Tensor:
    x = F.relu(F.linear(x, *parts[0:2]))
    x = F.relu(F.linear(x, *parts[2:4]))
    return F.linear(x, *parts[4:6])


def _clamp(x: Tensor, maximum: float) -> Tensor:
    """`x` clamped to 0 and `maximum`, with a straight-through gradient: that of `x` itself."""
    return x.detach().clamp(0, maximum) + (x - x.detach())


@torch.no_grad()
def layer_statistics(
    runtime: ClientRuntime, norms: Sequence[nn.Module], indices: Tensor
) -> LayerStatistics:
    """The statistics of some training images in the live model in evaluation mode."""
    module = runtime.model.module.eval()
    layers = _learnable(module)
    sums = dict[nn.Module, Tensor]()

    def add(layer: nn.Module, args: tuple[Tensor]) -> None:
        x = args[0]
        dims = all_but_channels(x) if layer in norms else None
        variance, mean = (m.double() for m in torch.var_mean(x, dims, correction=0))
        part = torch.stack([mean, variance + mean.square()]) * (len(x) / len(indices))
        sums[layer] = sums.get(layer, 0) + part  # [2, C] or [2]: means of x and of x^2

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(add).remove)
        for batch in runtime.plain_batches(indices, runtime.chunk):
            module(batch.images)
    moments = [_moments(sums[layer].view(2, -1).mean(1)) for layer in layers]
    inputs = [torch.stack([mean, sqrt(v + VARIANCE_EPSILON)]) for mean, v in moments]
    pairs = zip(running_statistics(norms), norms, strict=True)
    divergences = [_divergence(net, _moments(sums[norm])) for net, norm in pairs]
    return LayerStatistics(torch.cat(inputs), torch.stack(divergences) if norms else torch.empty(0))


def _moments(means: Tensor) -> Moments:
    return means[0].float(), (means[1] - means[0].square()).clamp(min=0).float()


def _divergence(one: Moments, other: Moments) -> Tensor:
    """(KL(one, other) + KL(other, one)) / 2 of Gaussians, averaged over channels."""
    gap = (one[0] - other[0]).square()
    v = one[1] + VARIANCE_EPSILON
    w = other[1] + VARIANCE_EPSILON
    return (((v + gap) / w + (w + gap) / v - 2) / 4).mean()
