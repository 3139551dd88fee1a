"""k-centre by farthest-first traversal (Gonzalez, 1985)."""

from dataclasses import replace

import torch
from torch import Tensor

from stamp_core.coresets.selection import herding
from stamp_core.coresets.selection.base import Candidates


def choose(candidates: Candidates) -> Tensor:
    """The image nearest to the prototype, then always the one farthest from all chosen images."""
    first = min(1, candidates.exemplars_per_class)
    chosen = herding.choose(replace(candidates, exemplars_per_class=first))
    features = candidates.features.double()  # [N, D]
    invalid = ~features.isfinite().all(1)
    buffer, nearest = torch.empty_like(features), torch.full((len(features),), torch.inf).double()
    while len(chosen) < candidates.count:
        distances = torch.sub(features, features[chosen[-1]], out=buffer).square_().sum(1)
        nearest = nearest.minimum(distances)
        nearest[invalid] = -1
        nearest[chosen] = -2
        chosen = torch.cat([chosen, nearest.argmax()[None]])
    return chosen
