"""Gradient inversion: images whose simulated update points where an uploaded one does.

Adam with the signs of the gradients minimises 1 - cosine similarity, plus total variation (Geiping
et al., 2020). The server is given the labels and, for several SGD steps, which image is in which.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from stamp_core.models.flat import Adam, split_like
from stamp_core.models.networks import Classifier

DECAYS = (3 / 8, 5 / 8, 7 / 8)  # shares of the iterations after which the step is a tenth


class Attack(NamedTuple):
    """How images are optimised."""

    iterations: int = 300
    lr: float = 0.1  # of normalised images
    variation: float = 1e-2  # weight of total variation


class Target(NamedTuple):
    """An update to reproduce, and the SGD steps of the simulated client."""

    received: Tensor  # [P]
    update: Tensor  # [P]
    lr: float
    steps: Sequence[Tensor]  # the places of each step's images: int64 [N]
    weights: Sequence[Tensor]  # of these images' gradients in the gradient of the step: [N]


def invert(
    classifier: Classifier,
    targets: Sequence[Target],
    labels: Tensor,
    start: Tensor,
    limits: tuple[Tensor, Tensor],
    attack: Attack,
) -> Tensor:
    """Images [M, C, H, W] with labels [M] that explain all targets together.

    `start` are the first images, `limits` the least and the largest value of a channel [C, 1, 1].
    """
    images = start.clone().requires_grad_()
    adam = Adam(images.detach(), (0.9, 0.999))  # moves the same values
    for iteration in range(attack.iterations):
        loss = inversion_loss(classifier, targets, labels, images)
        (slope,) = torch.autograd.grad(loss + attack.variation * total_variation(images), [images])
        decays = sum(iteration >= share * attack.iterations for share in DECAYS)
        adam.descend(slope.sign(), attack.lr * 0.1**decays)
        adam.x.clamp_(*limits)
    return adam.x


def inversion_loss(
    classifier: Classifier, targets: Iterable[Target], labels: Tensor, images: Tensor
) -> Tensor:
    """The mean over targets of 1 - cosine similarity of an update and its simulation."""
    similar = [
        F.cosine_similarity(simulated_update(classifier, each, labels, images), each.update, 0)
        for each in targets
    ]
    return 1 - torch.stack(similar).mean()


def simulated_update(
    classifier: Classifier, target: Target, labels: Tensor, images: Tensor
) -> Tensor:
    """The update of a client that takes the target's SGD steps on these images.  # [P]

    It can be differentiated by them.
    """
    names, tensors = zip(*classifier.named_parameters(), strict=True)
    values = [each.clone().requires_grad_() for each in split_like(target.received, tensors)]
    update = torch.zeros_like(target.received)
    for step, weights in zip(target.steps, target.weights, strict=True):
        logits = functional_call(classifier, dict(zip(names, values, strict=True)), (images[step],))
        loss = weights @ F.cross_entropy(logits, labels[step], reduction="none")
        slopes = torch.autograd.grad(loss, values, create_graph=True)
        values = [v - target.lr * slope for v, slope in zip(values, slopes, strict=True)]
        update = update + target.lr * torch.cat([slope.flatten() for slope in slopes])
    return update


def total_variation(images: Tensor) -> Tensor:
    """The mean absolute difference of neighbouring pixels, down and across."""
    return images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()
