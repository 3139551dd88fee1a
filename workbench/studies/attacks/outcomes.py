"""One attack: the images that explain some uploads, beside the true ones and controls."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.data.dataset import ImageDataset
from stamp_core.models.flat import split_like
from workbench.studies.attacks.capture import Images, Upload
from workbench.studies.attacks.inversion import Attack, Target, invert
from workbench.studies.attacks.labels import label_accuracy, recover_counts
from workbench.studies.attacks.scores import identified, mean_images, other_images, pair, psnr, ssim

KINDS = ("exemplar", "new")
COMPARED = ("psnr", "ssim", "identified")  # also with other images of the same classes
Pixels = NDArray[np.uint8]  # [n, C, H, W]


@dataclass(frozen=True, eq=False)
class Outcome:
    """Reconstructions and what they cost."""

    found: Tensor  # [m, C, H, W], values in 0..1
    labels: Tensor  # [m], their labels
    loss: float
    seconds: float


def attack_uploads(
    runtime: ClientRuntime,
    targets: Sequence[Target],
    labels: Tensor,
    attack: Attack,
    draw: torch.Generator,
) -> Outcome:
    """The images [M] with these labels that explain the targets."""
    before = time.perf_counter()
    noise = torch.randn(len(labels), *runtime.shape, generator=draw)
    limits = -runtime.offset, 255 * runtime.scale - runtime.offset
    images, loss = invert(runtime.classifier, targets, labels, noise, limits, attack)
    return Outcome(pixels(runtime, images), labels, loss, time.perf_counter() - before)


def pixels(runtime: ClientRuntime, images: Tensor) -> Tensor:
    """Normalised images with values in 0..1."""
    return (images + runtime.offset) / (255 * runtime.scale)


def scores(
    runtime: ClientRuntime, outcome: Outcome, images: Images, draw: torch.Generator
) -> list[dict[str, Any]]:
    """For new images and for exemplars the means of their scores, and the gains over controls."""
    dataset, labels = runtime.dataset, outcome.labels
    true = pixels(runtime, images.values)
    controls = other_images(dataset, labels, draw), mean_images(dataset, labels)
    found, other, mean = (
        by_kind(each, labels, true, images, dataset) for each in (outcome.found, *controls)
    )
    return [
        {
            **{"kind": kind, **own},
            **{f"{name}_gain": own[name] - other[kind][name] for name in COMPARED},
            "psnr_over_mean": own["psnr"] - mean[kind]["psnr"],
        }
        for kind, own in found.items()
    ]


def by_kind(
    found: Tensor, labels: Tensor, true: Tensor, images: Images, dataset: ImageDataset
) -> dict[str, dict[str, float]]:
    """The mean scores of new images and of exemplars that have a reconstruction."""
    rows, columns = pair(found, labels, true, images.labels)
    pairs = found[rows], true[columns]
    near = identified(*pairs, images.labels[columns], dataset)
    each = pd.DataFrame({"psnr": psnr(*pairs), "ssim": ssim(*pairs), "identified": near.float()})
    each["kind"] = np.where(images.exemplar[columns], *KINDS)
    grouped = each.groupby("kind")
    means = grouped.mean().assign(images=grouped.size())
    return {str(kind): row.to_dict() for kind, row in means.iterrows()}


def recovered(runtime: ClientRuntime, upload: Upload) -> float:
    """The share of the labels of all steps that the gradient of the head gives away."""
    tensors = list(runtime.classifier.parameters())
    *_, weights, bias = split_like(upload.received, tensors)
    *_, by_weights, by_bias = split_like(upload.gradient, tensors)
    labels = upload.images.labels[torch.cat(upload.steps)]
    counts = recover_counts((weights, bias), (by_weights, by_bias), len(labels))
    return label_accuracy(counts, labels)


def side_by_side(runtime: ClientRuntime, outcome: Outcome, images: Images) -> tuple[Pixels, Pixels]:
    """True images and their reconstructions.  # uint8 [n, C, H, W] each"""
    true = pixels(runtime, images.values)
    rows, columns = pair(outcome.found, outcome.labels, true, images.labels)
    both = true[columns], outcome.found[rows]
    shown, found = ((255 * each).round().clamp(0, 255).byte().numpy() for each in both)
    return shown, found
