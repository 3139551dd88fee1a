"""MixStyle (Zhou et al., 2021): the content of one image with the channel statistics of another."""

import numpy as np
import torch
from torch import Tensor

EPSILON = 1e-6  # added to variances, as published: the deviation of a constant channel is not 0


def mixstyle_images(content: Tensor, style: Tensor, weights: Tensor) -> Tensor:
    """Images of `content` in a mixture of both styles, clipped.  # uint8 [n, C, H, W]"""
    mixed = mix_statistics(content.double() / 255, style.double() / 255, weights)
    return (255 * mixed).round().clamp(0, 255).to(torch.uint8)


def mix_statistics(content: Tensor, style: Tensor, weights: Tensor) -> Tensor:
    """`content` with a weighted mean of both channel means and deviations.  # [n, C, H, W]

    `weights` [n] are of the content's own style.
    """
    mean, deviation = _channel_statistics(content)
    style_mean, style_deviation = _channel_statistics(style)
    own = weights.to(content).view(-1, 1, 1, 1)
    scale = torch.lerp(style_deviation, deviation, own)
    return scale * (content - mean) / deviation + torch.lerp(style_mean, mean, own)


def _channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel.  # [n, C, 1, 1] each

    The variance is divided by H W, so that it exists for a single pixel. The published H W - 1
    gives the same result up to epsilon, as the factor cancels out.
    """
    variance, mean = torch.var_mean(images, (2, 3), correction=0, keepdim=True)
    return mean, (variance + EPSILON).sqrt()


def mixing_weights(count: int, generator: torch.Generator, alpha: float = 0.1) -> Tensor:
    """Weights of each image's own style, lambda ~ Beta(alpha, alpha).  # float64 [count]

    Drawn by numpy: torch's Beta takes no generator, and numpy's is stable for small alpha.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, count))
