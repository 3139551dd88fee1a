"""The paper's selection problem as printed: the largest coefficients of least squares."""

from collections.abc import Callable

import torch
from torch import Tensor

from stamp_core.coresets.selection.base import Candidates

Solver = Callable[[Tensor, Tensor], Tensor]  # matrix [D, n], target [D] -> a [n]
PRECISION = torch.finfo(torch.float32).eps  # of the features


def choose(candidates: Candidates) -> Tensor:
    """The images with the largest coefficients, for comparison with herding.

    The printed problem, min || m + 1/N sum_i a_i x_i - p ||^2 over real a, with m the mean of
    other exemplars, does not select by itself: without exemplars p is the mean of the candidates
    and a = 1 has no error. With no more images than features all coefficients are then equal,
    and the lowest indices are chosen.
    """
    return largest_first(solve_printed_problem(candidates, minimum_norm), candidates.count)


def solve_printed_problem(candidates: Candidates, solver: Solver) -> Tensor:
    """The a that minimises || matrix a - target ||^2; -inf without finite features.  # [N]"""
    finite = candidates.features.isfinite().all(1)
    features = candidates.features[finite].double()  # [n, D]
    solution = torch.full((len(finite),), -torch.inf, dtype=torch.float64)
    if len(features):  # scipy's nnls corrupts memory on a matrix without columns
        target = candidates.prototype - candidates.exemplar_mean
        solution[finite] = solver(features.T / len(features), target)
    return solution


def largest_first(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, rounded; ties to the lowest index.  # [count]"""
    return scores.round(decimals=6).argsort(descending=True, stable=True)[:count]


def minimum_norm(matrix: Tensor, target: Tensor) -> Tensor:
    """The minimum-norm least-squares solution, to the precision of the features.  # [n]

    By singular values ("gelsd"): torch's faster "gelsy" reads uninitialised memory (PyTorch
    issue 187411), so that its results vary and can be wrong.
    """
    cutoff = PRECISION * max(matrix.shape)  # smaller singular values are rounding errors
    solved = torch.linalg.lstsq(matrix, target[:, None], rcond=cutoff, driver="gelsd")
    solution: Tensor = solved.solution[:, 0]
    return solution
