"""Gradient inversion (Zhu et al., 2019), as in GLFC: images from gradients of a public encoder."""

import math
from collections import deque
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.core.seeding import generator
from stamp_core.models.encoders import Shape

CHANNELS, KERNEL, STRIDES = 12, 5, (2, 2, 1)  # of the encoder's convolutions, as published
HISTORY = 20  # pairs of steps and changes of the gradient that L-BFGS remembers
CURVATURE = 1e-10  # pairs of a smaller inner product are left out, as in torch's L-BFGS

Pair = tuple[Tensor, Tensor, Tensor]  # s [n, d], y [n, d] and 1 / <s, y> [n, 1], each 0 if left out


class GradientEncoder:
    """Three 5 x 5 convolutions and a linear layer: the same from a run's seed for everybody."""

    def __init__(self, shape: Shape, classes: int, seed: int, device: torch.device) -> None:
        depth, *sides = shape
        features = CHANNELS * math.prod(math.ceil(side / 4) for side in sides)
        inputs = (depth * KERNEL**2, *2 * [CHANNELS * KERNEL**2])
        sizes = [*((CHANNELS, values) for values in inputs), (classes, features)]
        parts = [part for size in sizes for part in (size, size[:1])]  # weights, then biases
        draw = generator(seed, "gradient encoder")
        self.parts = [(torch.rand(part, generator=draw) - 0.5).to(device) for part in parts]
        self.classes, self.shape, self.device = classes, shape, device

    def logits(self, images: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """The logits of images, each with weights of its own, [n, ...] each.  # [n, classes]

        Convolutions are written as batched products of matrices: for small images that is several
        times as fast as grouped convolutions, and it can be differentiated twice.
        """
        for stride, weight, bias in zip(STRIDES, parts[0:6:2], parts[1:6:2], strict=True):
            sides = [math.ceil(side / stride) for side in images.shape[2:]]
            patches = F.unfold(images, KERNEL, padding=KERNEL // 2, stride=stride)  # [n, d, cells]
            maps = torch.baddbmm(bias[:, :, None], weight, patches).sigmoid()
            images = maps.unflatten(2, sides)
        features = images.flatten(1)[:, :, None]
        return torch.baddbmm(parts[7][:, :, None], parts[6], features).squeeze(2)

    def gradients(self, images: Tensor, labels: Tensor) -> Tensor:
        """The gradient of each image's cross-entropy; images have values in [0, 1].  # [n, G]"""
        own = [part.expand(len(images), *part.shape).requires_grad_() for part in self.parts]
        loss = F.cross_entropy(self.logits(images, own), labels, reduction="sum")
        slopes = torch.autograd.grad(loss, own, create_graph=images.requires_grad)
        return torch.cat([slope.flatten(1) for slope in slopes], 1)

    def recover_labels(self, gradients: Tensor) -> Tensor:
        """The label of each gradient: its row in the last layer alone is negative.  # [n]"""
        weights, biases = (part.numel() for part in self.parts[-2:])
        rows = gradients[:, -weights - biases : -biases].unflatten(1, (self.classes, -1))
        labels: Tensor = rows.sum(2).argmin(1)
        return labels


def reconstruct(
    encoder: GradientEncoder, gradients: Tensor, labels: Tensor, start: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Images with these gradients, by L-BFGS each, and the distances left.  # [n, ...], [n]"""

    def evaluate(values: Tensor) -> tuple[Tensor, Tensor]:
        """The squared distance of each image's gradient, and its derivative.  # [n, 1], [n, d]"""
        values = values.detach().requires_grad_()
        difference = encoder.gradients(values.view_as(start), labels) - gradients
        distance = difference.square().sum(1, keepdim=True)
        return distance.detach(), torch.autograd.grad(distance.sum(), values)[0]

    values = start.flatten(1)
    distance, slope = evaluate(values)
    first = distance.clamp(min=torch.finfo(distance.dtype).tiny)
    history = deque[Pair](maxlen=HISTORY)
    scale = torch.ones_like(distance)  # of the initial inverse Hessian
    length = 1 / slope.abs().sum(1, keepdim=True).clamp(min=1)
    for _ in range(steps):
        step = length * _quasi_newton(slope, history, scale)
        trial_distance, trial_slope = evaluate(values + step)
        pair = _curvature_pair(step, trial_slope - slope)
        history.append(pair)
        scale = torch.where(pair[2] > 0, 1 / (pair[2] * pair[1].square().sum(1, True)), scale)
        nearer = trial_distance < distance
        values = torch.where(nearer, values + step, values)
        slope = torch.where(nearer, trial_slope, slope)
        distance = torch.where(nearer, trial_distance, distance)
        length = torch.where(nearer, torch.ones_like(length), length / 2)
    return values.view_as(start), (distance / first).squeeze(1)


def _curvature_pair(step: Tensor, change: Tensor) -> Pair:
    """The pair for the history; zeros where curvature is not positive, or values not finite."""
    product = (step * change).sum(1, keepdim=True)
    valid = (product > CURVATURE) & product.isfinite()
    parts = (step, change, 1 / product)
    left, right, inverse = (torch.where(valid, part, torch.zeros_like(part)) for part in parts)
    return left, right, inverse


def _quasi_newton(slope: Tensor, history: Sequence[Pair], scale: Tensor) -> Tensor:
    """Minus the inverse Hessian, as L-BFGS estimates it, times each slope.  # [n, d]"""
    direction, weights = -slope, list[Tensor]()
    for step, change, inverse in reversed(history):
        weights.append(inverse * (step * direction).sum(1, keepdim=True))
        direction = direction - weights[-1] * change
    direction = scale * direction
    for step, change, inverse in history:
        weight = weights.pop() - inverse * (change * direction).sum(1, keepdim=True)
        direction = direction + weight * step
    return direction
