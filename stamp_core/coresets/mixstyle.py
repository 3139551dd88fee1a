"""MixStyle (Zhou et al., 2021): the content of one picture in the colours of another."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from stamp_core.models.networks import BEGIN

EPSILON = 1e-6  # under the root, as published: a constant channel can be divided by its deviation


def mixstyle(content: Tensor, style: Tensor, share: Tensor) -> Tensor:
    """Pictures with the style of `content` and `style` mixed, clipped.  # uint8 [n, C, H, W]"""
    mixed = restyle_features(content.double() / 255, style.double() / 255, share)
    return (255 * mixed).round().clamp(0, 255).to(torch.uint8)


def restyle_features(features: Tensor, style: Tensor, share: Tensor) -> Tensor:
    """Maps whose mean and deviation are `share` of their own and the rest those of `style`.

    Gradients flow through `features`, not through any mean or deviation, as published.
    """  # [n, C, H, W], share [n]
    mean, deviation = moments(features)
    other_mean, other_deviation = moments(style)
    own = share.to(features).view(-1, 1, 1, 1)
    scale = torch.lerp(other_deviation, deviation, own)
    return scale * (features - mean) / deviation + torch.lerp(other_mean, mean, own)


def moments(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each map, apart from the gradient.  # [n, C, 1, 1]

    The variance is that of the map itself (divided by H W), which a single pixel has as well;
    dividing by H W - 1, as published, cancels out but for epsilon.
    """
    variance, mean = torch.var_mean(maps.detach(), (2, 3), correction=0, keepdim=True)
    return mean, (variance + EPSILON).sqrt()


def shares(count: int, draw: torch.Generator, alpha: float = 0.1) -> Tensor:
    """How much each picture keeps of its style: lambda ~ Beta(alpha, alpha).  # float64 [count]

    Torch's own Beta knows no generator, and numpy's takes logarithms where small alphas underflow.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=draw))
    return torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, count))


@contextmanager
def mixed_styles(
    encoder: nn.Module, labels: Tensor, alpha: float, draw: torch.Generator
) -> Iterator[None]:
    """While it lasts, every map of a batch takes on the style of another of its class.

    Of its part of the batch, where a network takes fewer pictures at once.
    """
    drawn: dict[int, tuple[Tensor, Tensor]] = {}  # partners and shares of each part

    def mix(layer: nn.Module, given: object, maps: Tensor) -> Tensor:
        begin = BEGIN.get()
        if begin not in drawn:  # a part that is computed again takes on the same styles
            own = labels[begin : begin + len(maps)]
            drawn[begin] = same_class(own, draw), shares(len(own), draw, alpha)
        partners, share = drawn[begin]
        fine = maps.to(torch.promote_types(maps.dtype, torch.float32))  # bfloat16 is too coarse
        return restyle_features(fine, fine[partners], share).to(maps)

    with ExitStack() as hooks:
        for layer in lower_layers(encoder):
            hooks.enter_context(layer.register_forward_hook(mix))
        yield


def lower_layers(encoder: nn.Module) -> list[nn.Module]:
    """Where styles are mixed: after the first two stages of a ResNet, else the first pooling."""
    stages = dict(encoder.named_children())
    if "layer1" in stages:
        return [stages["layer1"], stages["layer2"]]
    pooling: list[nn.Module] = [m for m in encoder.modules() if isinstance(m, nn.MaxPool2d)]
    return pooling[:1]


def same_class(labels: Tensor, draw: torch.Generator) -> Tensor:
    """For each picture of a batch a random one of its class, maybe itself.  # [n]"""
    order = torch.randperm(len(labels), generator=draw).to(labels.device)
    by_class = order[labels[order].argsort(stable=True)]  # shuffled inside each class
    places = labels.argsort(stable=True)
    partners = torch.empty_like(places)
    partners[places] = by_class
    return partners
