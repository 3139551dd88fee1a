"""The largest coefficients of the paper's printed problem, solved by least squares."""

from collections.abc import Callable

import torch
from torch import Tensor

from stamp_core.coresets import Candidates, comparable, largest

PRECISION = torch.finfo(torch.float32).eps  # of the features


def choose(candidates: Candidates) -> Tensor:
    """The pictures with the largest coefficients.

    The printed problem, min || kept + 1/N sum_i a_i x_i - p ||^2 over real a, selects nothing by
    itself: with nothing kept, p is the mean of the candidates and a = 1 leaves no error at all.
    As many pictures as features or fewer are then a single tie, which goes to the lowest
    indices, as good as at random. The rule is here to be compared with.
    """
    return largest(coefficients(candidates), candidates.places)


def coefficients(candidates: Candidates) -> Tensor:
    """The shortest of the a with the least error; -inf without finite features.  # [N]"""
    return solve(candidates, shortest)


def solve(candidates: Candidates, solver: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What `solver` makes of the printed problem, written || matrix a - gap ||^2.  # [N]"""
    known = comparable(candidates.features)
    features = candidates.features[known].double()  # [n, D]
    found = torch.full((len(known),), -torch.inf, dtype=torch.float64)
    if len(features):  # on a matrix without columns scipy's nnls corrupts memory
        found[known] = solver(features.T / len(features), candidates.prototype - candidates.kept)
    return found


def shortest(matrix: Tensor, gap: Tensor) -> Tensor:
    """The minimum-norm solution of least squares, to the precision of the features.  # [n]

    By singular values: torch's faster driver "gelsy" reads memory that nobody has set (PyTorch
    issue 187411), so that its answers vary and can be wrong.
    """
    cutoff = PRECISION * max(matrix.shape)  # below it, singular values are rounding errors
    found = torch.linalg.lstsq(matrix, gap[:, None], rcond=cutoff, driver="gelsd")
    solution: Tensor = found.solution[:, 0]
    return solution
