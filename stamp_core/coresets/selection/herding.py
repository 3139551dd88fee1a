"""Herding (Welling, 2009), the default rule: greedy mean matching to the class prototype."""

import torch
from torch import Tensor

from stamp_core.coresets.selection.base import Candidates

LAST = torch.finfo(torch.float64).max  # above any distance of finite features, below infinity


def choose(candidates: Candidates) -> Tensor:
    """Indices by greedy mean matching, ties to the lowest index."""
    return extend_by_herding(candidates, torch.empty(0, dtype=torch.int64))


def extend_by_herding(candidates: Candidates, chosen: Tensor) -> Tensor:
    """`chosen`, extended one by one by the image that brings the mean nearest to the prototype.

    With k chosen features of sum s, the mean with x is nearest to p where x is nearest to
    (k + 1) p - s. Images with features that are not finite come last, by their index.
    """
    features = candidates.features.double()  # [N, D]
    buffer, total = torch.empty_like(features), features[chosen].sum(0)
    while len(chosen) < candidates.count:
        target = (len(chosen) + 1) * candidates.prototype - total
        distances = torch.sub(features, target, out=buffer).square_().sum(1).nan_to_num_(nan=LAST)
        distances[chosen] = torch.inf
        nearest = distances.argmin()  # the lowest index of equals
        total += features[nearest]
        chosen = torch.cat([chosen, nearest[None]])
    return chosen
