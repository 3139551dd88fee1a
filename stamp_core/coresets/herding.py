"""Pictures whose mean feature is greedily kept nearest to the prototype (the default rule)."""

import torch
from torch import Tensor

from stamp_core.coresets import Candidates, distances

LAST = torch.finfo(torch.float64).max  # farther than any finite feature, nearer than what is taken


def choose(candidates: Candidates) -> Tensor:
    """The pictures of a greedy mean matching, ties to the lowest index (Welling, 2009)."""
    return extend(candidates, torch.empty(0, dtype=torch.int64))


def extend(candidates: Candidates, chosen: Tensor) -> Tensor:
    """`chosen` and, until all places are taken, whatever brings the mean nearest to the prototype.

    Of k + 1 pictures that add up to s + x the mean is nearest to p where x is nearest to
    (k + 1) p - s. Pictures without finite features come last, in the order in which they stand.
    """
    features = candidates.features.double()  # [N, D]
    room, total = torch.empty_like(features), features[chosen].sum(0)
    while len(chosen) < candidates.places:
        wanted = (len(chosen) + 1) * candidates.prototype - total
        distance = distances(features, wanted, room).nan_to_num_(nan=LAST)
        distance[chosen] = torch.inf
        nearest = distance.argmin()  # the first of equals
        total += features[nearest]
        chosen = torch.cat([chosen, nearest[None]])
    return chosen
