"""MixStyle (Zhou et al., 2021): the content of one image with the channel statistics of another."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from stamp_core.models.networks import MICRO_BATCH_START

EPSILON = 1e-6  # added to variances, as published: the deviation of a constant channel is not 0


def mixstyle_images(content: Tensor, style: Tensor, weights: Tensor) -> Tensor:
    """Images of `content` in a mixture of both styles, clipped.  # uint8 [n, C, H, W]"""
    mixed = mixstyle_features(content.double() / 255, style.double() / 255, weights)
    return (255 * mixed).round().clamp(0, 255).to(torch.uint8)


def mixstyle_features(features: Tensor, style: Tensor, weights: Tensor) -> Tensor:
    """Features with a weighted mean of both channel means and deviations.  # [n, C, H, W]

    `weights` [n] are of the features' own style. As published, gradients flow through `features`
    but not through means and deviations.
    """
    mean, deviation = _channel_statistics(features)
    style_mean, style_deviation = _channel_statistics(style)
    own = weights.to(features).view(-1, 1, 1, 1)
    scale = torch.lerp(style_deviation, deviation, own)
    return scale * (features - mean) / deviation + torch.lerp(style_mean, mean, own)


def _channel_statistics(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, without gradients.  # [n, C, 1, 1] each

    The variance is divided by H W, so that it exists for a single pixel. The published H W - 1
    gives the same result up to epsilon, as the factor cancels out.
    """
    variance, mean = torch.var_mean(maps.detach(), (2, 3), correction=0, keepdim=True)
    return mean, (variance + EPSILON).sqrt()


def mixing_weights(count: int, generator: torch.Generator, alpha: float = 0.1) -> Tensor:
    """Weights of each image's own style, lambda ~ Beta(alpha, alpha).  # float64 [count]

    Drawn by numpy: torch's Beta takes no generator, and numpy's is stable for small alpha.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, count))


@contextmanager
def feature_mixstyle(
    encoder: nn.Module, labels: Tensor, alpha: float, generator: torch.Generator
) -> Iterator[None]:
    """A context in which the encoder mixes the style of each image with another of its class.

    Where a network takes micro-batches, styles are mixed within each of them.
    """
    drawn: dict[int, tuple[Tensor, Tensor]] = {}  # partners and weights of each micro-batch

    def mix(layer: nn.Module, inputs: object, maps: Tensor) -> Tensor:
        begin = MICRO_BATCH_START.get()
        if begin not in drawn:  # a recomputed micro-batch uses the same draws
            own = labels[begin : begin + len(maps)]
            partners = _same_class_partners(own, generator)
            drawn[begin] = partners, mixing_weights(len(own), generator, alpha)
        partners, weights = drawn[begin]
        exact = maps.to(torch.promote_types(maps.dtype, torch.float32))  # bfloat16 is too coarse
        return mixstyle_features(exact, exact[partners], weights).to(maps)

    with ExitStack() as hooks:
        for layer in mixstyle_layers(encoder):
            hooks.enter_context(layer.register_forward_hook(mix))
        yield


def mixstyle_layers(encoder: nn.Module) -> list[nn.Module]:
    """The layers whose outputs are mixed: two stages of a ResNet, else the first pooling."""
    stages = dict(encoder.named_children())
    if "layer1" in stages:
        return [stages["layer1"], stages["layer2"]]
    pooling: list[nn.Module] = [m for m in encoder.modules() if isinstance(m, nn.MaxPool2d)]
    return pooling[:1]


def _same_class_partners(labels: Tensor, generator: torch.Generator) -> Tensor:
    """A random permutation of a batch within each class: the index of each partner.  # [n]"""
    order = torch.randperm(len(labels), generator=generator).to(labels.device)
    shuffled = order[labels[order].argsort(stable=True)]  # by class, random within each
    by_class = labels.argsort(stable=True)
    partners = torch.empty_like(by_class)
    partners[by_class] = shuffled
    return partners
