"""How near reconstructions are to the true images, and to what the labels alone give.

Images have values in 0..1. Labels: how many images of each class an update was computed on, from
the gradient of the head alone. That by the bias is the mean of softmax(logits) - onehot(label) over
the images. The quotient of a class's rows by weights and by bias is the mean feature of its images,
if they are alike (Ma et al., 2022: "iLRG"). The model's own softmax at these features leaves the
counts as the only unknowns of a linear system, solved here with nonnegative least squares.
"""

from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, nnls
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.core.arithmetic import distances
from stamp_core.data.dataset import ImageDataset
from stamp_core.models.flat import split_like
from workbench.studies.attacks.capture import Images, Upload

KINDS = ("exemplar", "new")
COMPARED = ("psnr", "ssim", "identified")  # also with other images of the same classes
Pixels = NDArray[np.uint8]  # [n, C, H, W]
WINDOW = 7  # pixels, the side of SSIM's uniform window
EXACT = 1e-10  # mean squared errors are not below it: 100 dB at most
_OTHER_CLASS = 1e3  # added to the error of a pair of different labels: larger than any error


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of pairs of images, in dB.  # [N]"""
    error = (one - other).square().flatten(1).mean(1)
    return -10 * error.clamp_min(EXACT).log10()


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Structural similarity of pairs of images, by uniform windows (Wang et al., 2004).  # [N]"""

    def mean(images: Tensor) -> Tensor:
        return F.avg_pool2d(images, WINDOW, stride=1)

    x, y, c1, c2 = mean(one), mean(other), 0.01**2, 0.03**2
    variances = mean(one * one) - x * x + mean(other * other) - y * y
    covariances = mean(one * other) - x * y
    alike = (2 * x * y + c1) * (2 * covariances + c2)
    return (alike / ((x * x + y * y + c1) * (variances + c2))).flatten(1).mean(1)


def pair(found: Tensor, labels: Tensor, images: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Places of reconstructions and of their images, of one label if possible.  # [n], [n]"""
    errors = distances(found.flatten(1), images.flatten(1)).square() / images[0].numel()
    costs = errors + _OTHER_CLASS * (labels[:, None] != true)
    rows, columns = linear_sum_assignment(costs.numpy())
    return torch.from_numpy(rows), torch.from_numpy(columns)


def strangers(dataset: ImageDataset, label: int, half: int) -> Tensor:
    """Every second test image of a class: what no client has; half 0 or 1.  # [n, C, H, W]"""
    own = (dataset.y_test == label).nonzero().flatten()[half::2]
    return dataset.x_test[own].float() / 255


def identified(found: Tensor, images: Tensor, labels: Tensor, dataset: ImageDataset) -> Tensor:
    """Which reconstructions are nearer to their image than to all strangers.  # bool [n]"""
    nearest = torch.empty(len(labels), dtype=torch.bool)
    for k, label in enumerate(labels.tolist()):
        candidates = torch.cat([images[k, None], strangers(dataset, label, 1)])
        nearest[k] = (candidates - found[k]).flatten(1).norm(dim=1).argmin() == 0
    return nearest


def other_images(dataset: ImageDataset, labels: Tensor, draw: torch.Generator) -> Tensor:
    """Strangers of the other half with these labels, at random, each once.  # [M, C, H, W]"""
    found = torch.empty(len(labels), *dataset.shape)
    for label in labels.unique().tolist():
        own, wanted = strangers(dataset, label, 0), labels == label
        order = torch.randperm(len(own), generator=draw)
        found[wanted] = own[order[torch.arange(int(wanted.sum())) % len(own)]]
    return found


def mean_images(dataset: ImageDataset, labels: Tensor) -> Tensor:
    """The mean of the same strangers of each label's class.  # [M, C, H, W]"""
    return torch.stack([strangers(dataset, label, 0).mean(0) for label in labels.tolist()])


# --- of an upload


def pixels(runtime: ClientRuntime, images: Tensor) -> Tensor:
    """Normalised images with values in 0..1."""
    return (images + runtime.offset) / (255 * runtime.scale)


def scores(
    runtime: ClientRuntime, found: Tensor, labels: Tensor, images: Images, draw: torch.Generator
) -> list[dict[str, Any]]:
    """The means of scores by kind of image, and gains over controls, of reconstructions `found`."""
    controls = other_images(runtime.dataset, labels, draw), mean_images(runtime.dataset, labels)
    own, other, mean = (by_kind(runtime, each, labels, images) for each in (found, *controls))
    return [
        {
            **{"kind": kind, **means},
            **{f"{name}_gain": means[name] - other[kind][name] for name in COMPARED},
            "psnr_over_mean": means["psnr"] - mean[kind]["psnr"],
        }
        for kind, means in own.items()
    ]


def by_kind(
    runtime: ClientRuntime, found: Tensor, labels: Tensor, images: Images
) -> dict[str, dict[str, float]]:
    """The mean scores of new images and of exemplars that have a reconstruction."""
    true = pixels(runtime, images.values)
    rows, columns = pair(found, labels, true, images.labels)
    pairs = found[rows], true[columns]
    near = identified(*pairs, images.labels[columns], runtime.dataset)
    each = pd.DataFrame({"psnr": psnr(*pairs), "ssim": ssim(*pairs), "identified": near.float()})
    each["kind"] = np.where(images.exemplar[columns], *KINDS)
    grouped = each.groupby("kind")
    means = grouped.mean().assign(images=grouped.size())
    return {str(kind): row.to_dict() for kind, row in means.iterrows()}


def side_by_side(
    runtime: ClientRuntime, found: Tensor, labels: Tensor, images: Images
) -> tuple[Pixels, Pixels]:
    """True images and their reconstructions.  # uint8 [n, C, H, W] each"""
    true = pixels(runtime, images.values)
    rows, columns = pair(found, labels, true, images.labels)
    shown = [(255 * x).round().clamp(0, 255).byte().numpy() for x in (true[columns], found[rows])]
    return shown[0], shown[1]


# --- labels


def recovered(runtime: ClientRuntime, upload: Upload) -> float:
    """The share of the labels of all steps that the gradient of the head gives away."""
    tensors = list(runtime.classifier.parameters())
    *_, weights, bias = split_like(upload.received, tensors)
    *_, by_weights, by_bias = split_like(upload.gradient, tensors)
    labels = upload.images.labels[torch.cat(upload.steps)]
    counts = recover_counts((weights, bias), (by_weights, by_bias), len(labels))
    return label_accuracy(counts, labels)


def recover_counts(head: tuple[Tensor, Tensor], slopes: tuple[Tensor, Tensor], n: int) -> Tensor:
    """The estimated number of images of each class, n in all.  # int64 [L]

    `head` are the weights [L, D] and the bias [L] before the update, `slopes` the mean gradient of
    its SGD steps. For several steps the rule is an approximation: the head moves meanwhile.
    """
    weights, bias = (each.double() for each in head)
    by_weights, by_bias = (each.double() for each in slopes)
    present = by_bias < 0  # no class without images has a negative slope
    of_all = by_weights[present].sum(0) / by_bias[present].sum()
    own = by_weights / torch.where(present, by_bias, 1)[:, None]
    features = torch.where(present[:, None], own, of_all)  # [L, D]
    softmax = (features @ weights.T + bias).softmax(1)  # [L, L], a row per class of images
    system = torch.cat([softmax.T - torch.eye(len(bias)), torch.ones(1, len(bias))])
    wanted = torch.cat([n * by_bias, torch.tensor([float(n)])])
    shares, _ = nnls(system.numpy(), wanted.numpy())
    return round_to_sum(n * shares / max(shares.sum(), 1e-12), n)


def round_to_sum(values: NDArray[np.float64], total: int) -> Tensor:
    """Whole numbers with a given sum, by the largest remainders.  # int64 [L]"""
    floors = np.floor(values).astype(np.int64)
    order = np.argsort(floors - values, kind="stable")
    floors[order[: max(0, total - floors.sum())]] += 1
    return torch.from_numpy(floors)


def label_accuracy(counts: Tensor, labels: Tensor) -> float:
    """The share of images whose label is among the estimated ones."""
    true = torch.bincount(labels, minlength=len(counts))
    return int(torch.minimum(counts, true).sum()) / len(labels)
