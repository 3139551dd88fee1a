"""Random images: the control for every other rule."""

import torch
from torch import Tensor

from stamp_core.coresets.selection.base import Candidates


def choose(candidates: Candidates) -> Tensor:
    """Random indices, uniform over all subsets; features are not used."""
    order = torch.randperm(len(candidates.features), generator=candidates.generator)
    return order[: candidates.count]
