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

from stamp_core.models.flat import split_like
from stamp_core.models.networks import Classifier
from workbench.adam import Adam
from workbench.studies.attacks.capture import Upload

DECAYS = (3 / 8, 5 / 8, 7 / 8)  # shares of the iterations after which the step is a tenth


class Attack(NamedTuple):
    """How images are optimised."""

    iterations: int = 300
    lr: float = 0.1  # of normalised images
    variation: float = 1e-2  # weight of total variation


def invert(
    classifier: Classifier,
    uploads: Sequence[Upload],
    labels: Tensor,
    start: Tensor,
    limits: tuple[Tensor, Tensor],
    attack: Attack,
) -> Tensor:
    """Images [M, C, H, W] of `labels` that explain all uploads, from `start` within `limits`."""
    images = start.clone().requires_grad_()
    adam = Adam(images.detach(), (0.9, 0.999))  # moves the same values
    for iteration in range(attack.iterations):
        loss = inversion_loss(classifier, uploads, labels, images)
        (slope,) = torch.autograd.grad(loss + attack.variation * total_variation(images), [images])
        decays = sum(iteration >= share * attack.iterations for share in DECAYS)
        adam.descend(slope.sign(), attack.lr * 0.1**decays)
        adam.x.clamp_(*limits)
    return adam.x


def inversion_loss(
    classifier: Classifier, uploads: Iterable[Upload], labels: Tensor, images: Tensor
) -> Tensor:
    """The mean over uploads of 1 - cosine similarity of an update and its simulation."""
    similar = [
        F.cosine_similarity(simulated_update(classifier, each, labels, images), each.update, 0)
        for each in uploads
    ]
    return 1 - torch.stack(similar).mean()


def simulated_update(
    classifier: Classifier, upload: Upload, labels: Tensor, images: Tensor
) -> Tensor:
    """The update by the upload's SGD steps on these images, with its graph.  # [P]"""
    names, tensors = zip(*classifier.named_parameters(), strict=True)
    values = [each.clone().requires_grad_() for each in split_like(upload.received, tensors)]
    update = torch.zeros_like(upload.received)
    for step, weights in zip(upload.steps, upload.weights, strict=True):
        logits = functional_call(classifier, dict(zip(names, values, strict=True)), (images[step],))
        loss = weights @ F.cross_entropy(logits, labels[step], reduction="none")
        slopes = torch.autograd.grad(loss, values, create_graph=True)
        values = [v - upload.lr * slope for v, slope in zip(values, slopes, strict=True)]
        update = update + upload.lr * torch.cat([slope.flatten() for slope in slopes])
    return update


def total_variation(images: Tensor) -> Tensor:
    """The mean absolute difference of neighbouring pixels, down and across."""
    return images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()
