"""How near reconstructions are to the true images, and to what the labels alone give.

Images have values in 0..1.
"""

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from stamp_core.data.dataset import ImageDataset

WINDOW = 7  # pixels, the side of SSIM's uniform window
EXACT = 1e-10  # mean squared errors are not below it: 100 dB at most
_OTHER_CLASS = 1e3  # added to the error of a pair of different labels: larger than any error


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of pairs of images, in dB.  # [N]"""
    error = (one - other).square().flatten(1).mean(1)
    return -10 * error.clamp_min(EXACT).log10()


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Structural similarity of pairs of images (Wang et al., 2004).  # [N]

    Means, variances and covariances are those of uniform windows inside the images.
    """

    def mean(images: Tensor) -> Tensor:
        return F.avg_pool2d(images, WINDOW, stride=1)

    x, y, c1, c2 = mean(one), mean(other), 0.01**2, 0.03**2
    variances = mean(one * one) - x * x + mean(other * other) - y * y
    covariances = mean(one * other) - x * y
    alike = (2 * x * y + c1) * (2 * covariances + c2)
    return (alike / ((x * x + y * y + c1) * (variances + c2))).flatten(1).mean(1)


def pair(found: Tensor, labels: Tensor, images: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Places of reconstructions and of the images that they belong to: the least sum of errors.

    Pairs have one label as far as possible; `labels` are those of the reconstructions.  # [n], [n]
    """
    errors = torch.cdist(found.flatten(1), images.flatten(1)).square() / images[0].numel()
    costs = errors + _OTHER_CLASS * (labels[:, None] != true)
    rows, columns = linear_sum_assignment(costs.numpy())
    return torch.from_numpy(rows), torch.from_numpy(columns)


def strangers(dataset: ImageDataset, label: int, half: int) -> Tensor:
    """Every second test image of a class: what no client has; half 0 or 1.  # [n, C, H, W]"""
    own = (dataset.y_test == label).nonzero().flatten()[half::2]
    return dataset.x_test[own].float() / 255


def identified(found: Tensor, images: Tensor, labels: Tensor, dataset: ImageDataset) -> Tensor:
    """Which reconstructions are nearer to their image than to all strangers of one half.

    # bool [n]
    """
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
