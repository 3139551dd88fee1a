"""The largest coefficients of the paper's printed problem with a >= 0, then herding."""

import torch
from scipy.optimize import nnls
from torch import Tensor

from stamp_core.coresets import Candidates, herding, largest
from stamp_core.coresets.least_squares import solve


def choose(candidates: Candidates) -> Tensor:
    """The pictures with the largest positive coefficients, and by herding what they leave free.

    With nothing kept, a = 1 leaves no error and is positive: like least squares, the problem
    selects nothing by itself. Otherwise it tends to have few positive coefficients.
    """
    found = coefficients(candidates)
    positive = int((found > 0).sum())
    return herding.extend(candidates, largest(found, min(positive, candidates.places)))


def coefficients(candidates: Candidates) -> Tensor:
    """The a >= 0 with the least error; -inf without finite features.  # [N]"""
    return solve(candidates, lambda matrix, gap: torch.from_numpy(nnls(matrix, gap)[0]))
