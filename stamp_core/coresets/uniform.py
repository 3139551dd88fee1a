"""Pictures at random: the control that every other rule has to beat."""

import torch
from torch import Tensor

from stamp_core.coresets import Candidates


def choose(candidates: Candidates) -> Tensor:
    """Random pictures, each set of them as likely as any other; features are not looked at."""
    shuffled = torch.randperm(len(candidates.features), generator=candidates.draw)
    return shuffled[: candidates.places]
