"""Pictures that leave no other far away: farthest-first traversal (Gonzalez, 1985)."""

from dataclasses import replace

import torch
from torch import Tensor

from stamp_core.coresets import Candidates, comparable, distances, herding


def choose(candidates: Candidates) -> Tensor:
    """First the picture nearest to the prototype, then always the one farthest from all chosen.

    The greatest distance of a picture from its nearest chosen one is at most twice what the best
    choice of as many pictures reaches. Ties go to the lowest index; pictures without finite
    features come last.
    """
    chosen = herding.choose(replace(candidates, count=min(1, candidates.count)))
    features, alone = candidates.features.double(), ~comparable(candidates.features)
    room, nearest = torch.empty_like(features), torch.full((len(features),), torch.inf).double()
    while len(chosen) < candidates.places:
        nearest = nearest.minimum(distances(features, features[chosen[-1]], room))
        nearest[alone] = -1
        nearest[chosen] = -2
        chosen = torch.cat([chosen, nearest.argmax()[None]])
    return chosen
