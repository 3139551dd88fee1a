"""Batch normalisation with statistics mixed from those of a network and those of a client."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stamp_core.core.arithmetic import sqrt

Moments = tuple[Tensor, Tensor]  # mean and variance of each channel


def running_statistics(norms: Sequence[Any]) -> list[Moments]:
    """Copies of the running statistics."""
    return [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]


@contextmanager
def mixed_normalisation(
    norms: Sequence[nn.Module], net: Sequence[Moments], beta: Tensor
) -> Iterator[None]:
    """A context in which norms use (1 - beta) net + beta own as means and as variances."""
    with ExitStack() as hooks:
        for norm, *mixture in zip(norms, net, beta, strict=True):
            hooks.callback(norm.register_forward_hook(partial(_normalise, *mixture)).remove)
        yield


def _normalise(net: Moments, beta: Tensor, norm: Any, args: tuple[Tensor], _: Tensor) -> Tensor:
    """A forward hook: the output of a normalisation with mixed statistics."""
    x = args[0].float()
    own = norm.running_mean, norm.running_var
    if norm.training:
        variance, mean = torch.var_mean(x, all_but_channels(x), correction=0)
        own = mean, variance
    shape = (-1, *[1] * (x.dim() - 2))
    mean, variance = (torch.lerp(*pair, beta).view(shape) for pair in zip(net, own, strict=True))
    scaled = (x - mean) / sqrt(variance + norm.eps) * norm.weight.view(shape)
    result: Tensor = scaled + norm.bias.view(shape)
    return result.to(args[0])


def store_mixture(norms: Sequence[Any], net: Sequence[Moments], beta: Tensor) -> None:
    """Make the mixed statistics the running ones."""
    for norm, (mean, variance), share in zip(norms, net, beta, strict=True):
        norm.running_mean.copy_(torch.lerp(mean, norm.running_mean, share))
        norm.running_var.copy_(torch.lerp(variance, norm.running_var, share))


def all_but_channels(x: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, x.dim())]
