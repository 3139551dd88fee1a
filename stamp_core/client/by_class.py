"""Images by class: the first ones, a balanced sample, class means."""

import torch
from torch import Tensor


def first_per_class(labels: Tensor, count: int) -> Tensor:
    """Indices of the first `count` images of each class, ascending.  # [n]"""
    firsts = [(labels == label).nonzero().flatten()[:count] for label in labels.unique()]
    indices: Tensor = torch.cat([labels[:0], *firsts]).sort().values
    return indices


def sample_balanced(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices of at most `count` images, evenly over classes as far as possible.  # [n]"""
    if len(labels) <= count:
        return torch.arange(len(labels))
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]  # shuffled inside each class
    sizes = labels.unique(return_counts=True)[1]
    rank = torch.empty_like(shuffled)  # in its class, in shuffled order
    rank[by_class] = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    chosen: Tensor = shuffled[rank[shuffled].argsort(stable=True)[:count]]
    return chosen


def class_means(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each class present, and these classes, ascending.  # [L, ...], [L]"""
    matrix, classes = averaging_matrix(labels, values.dtype)
    return (matrix @ values.flatten(1)).view(-1, *values.shape[1:]), classes


def averaging_matrix(labels: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What makes class means of values, and the classes present, ascending.  # [L, N], [L]"""
    classes, own = labels.unique(return_inverse=True)
    members = (own[:, None] == torch.arange(len(classes), device=own.device)).to(dtype).T
    return members / members.sum(1, keepdim=True), classes
