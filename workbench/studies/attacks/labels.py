"""How many images of each class an update was computed on, from the gradient of the head alone.

The gradient by the head's bias is the mean of softmax(logits) - onehot(label) over the images. The
quotient of a class's rows by weights and by bias is the mean feature of its images, if they are
alike (Ma et al., 2022: "iLRG"). The model's own softmax at these features leaves the counts as the
only unknowns of a linear system, solved here with nonnegative least squares.
"""

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor


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


def round_to_sum(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", total: int) -> Tensor:
    """Whole numbers with a given sum, by the largest remainders.  # int64 [L]"""
    floors = np.floor(values).astype(np.int64)
    order = np.argsort(floors - values, kind="stable")
    floors[order[: max(0, total - floors.sum())]] += 1
    return torch.from_numpy(floors)


def label_accuracy(counts: Tensor, labels: Tensor) -> float:
    """The share of images whose label is among the estimated ones."""
    true = torch.bincount(labels, minlength=len(counts))
    return int(torch.minimum(counts, true).sum()) / len(labels)
