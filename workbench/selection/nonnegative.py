"""The paper's printed problem with a >= 0: its positive coefficients, then herding."""

import torch
from scipy.optimize import nnls
from torch import Tensor

from stamp_core.coresets.selection.base import Candidates
from stamp_core.coresets.selection.herding import extend_by_herding
from workbench.selection.least_squares import largest_first, solve_printed_problem


def choose(candidates: Candidates) -> Tensor:
    """The images with the largest positive coefficients; herding chooses the rest."""
    values = solve_printed_problem(candidates, nonnegative_solution)
    positive = int((values > 0).sum())
    return extend_by_herding(candidates, largest_first(values, min(positive, candidates.count)))


def nonnegative_solution(matrix: Tensor, target: Tensor) -> Tensor:
    """The least-squares solution with a >= 0.  # [n]"""
    return torch.from_numpy(nnls(matrix, target)[0])
