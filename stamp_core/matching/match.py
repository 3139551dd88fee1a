"""Gradient matching: the direction near a reference that is best for the worst-served gradient.

Gradients g_1 .. g_K are ascent directions ("old - new", or gradients): the caller steps along -d.
Of all d in the ball |d - g0| <= kappa |g0|, the one with the largest min_i <g_i, d> is
d = g0 + kappa |g0| g_w / |g_w|, where g_w = sum_i w_i g_i and w minimises
F(w) = <g_w, g0> + kappa |g0| |g_w| over the simplex (CAGrad; Liu et al., 2021).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stamp_core.config.decode import invalid, require_at_least
from stamp_core.matching.gram import (
    Vectors,
    column_chunks,
    combine,
    gram,
    inner_products,
    squared_norms,
    sum_dtype,
)
from stamp_core.matching.simplex import (
    SOLVED,
    Array,
    Mask,
    Problem,
    SoftmaxParams,
    minimise_on_simplex,
    multipliers,
    softmax_descent,
)

_TINY = 1e-8  # gradients no longer than this share of the longest one take no part
_CANCELLED = 1e-7  # a sum of vectors shorter than this share of their norms is rounding error
_NO_REFERENCE, _UNSOLVED = "reference is zero", "not solved to the end"


@dataclass(frozen=True)
class MatchingParams:
    """The matching problem and its solver."""

    kappa: float = 0.5  # radius of the ball around g0, relative to |g0|
    reference: Literal["mean", "weighted", "current", "half"] = "mean"  # g0; current: the last one
    form: Literal["full", "direction"] = "full"  # direction: d without g0
    length: Literal["free", "1+kappa", "1+kappa^2", "reference", "current"] = "1+kappa"
    normalise: Literal["none", "mean", "current"] = "none"  # the norm that all gradients get
    blocks: Literal["model", "layers", "coupled", "elements"] = "model"  # coupled: one w for all
    solver: Literal["exact", "authors"] = "exact"
    softmax: SoftmaxParams = field(default_factory=SoftmaxParams)  # of the solver "authors"

    def __post_init__(self) -> None:
        """Refuse a radius below 0, and blocks that the public code does not support."""
        require_at_least(self, 0, "kappa")
        if self.solver == "authors" and self.blocks in ("coupled", "elements"):
            raise invalid("solver", self.solver, f"'exact', as blocks is {self.blocks!r}")


@dataclass(frozen=True)
class MatchResult:
    """The coefficients of d and what is recorded about it.

    gap, value and products are relative to |g0|^2, length to |g0|.
    """

    coefficients: Tensor  # float64 [L, K]: d = sum_i coefficients[block, i] gradients[i]
    weights: Tensor  # float64 [L, K], on the simplex; with blocks "elements" both are empty
    status: str
    dropped: int  # gradients that are not finite or too short
    gap: float = 0.0  # duality gap: F(w) exceeds its minimum by at most this
    value: float = 0.0  # F(w)
    worst_product: float = 0.0  # min_i <g_i, d>, before d is rescaled to its length
    worst_product_reference: float = 0.0  # min_i <g_i, g0>
    length: float = 0.0
    cosine: float = 0.0  # of d and g0
    support: int = 0  # gradients with a weight above 1e-6 in some block
    entropy: float = 0.0  # of the weights, averaged over blocks
    iterations: int = 0


@dataclass(frozen=True)
class _Inputs:
    """The gradients that take part, their scales and the reference."""

    finite: Mask  # [all gradients]; the other fields are about the K finite ones
    large: Mask  # [K], those long enough to take part
    normalisation: Array  # [K], the factor of each gradient
    reference: Array  # [K], g0 = sum_i reference_i normalisation_i g_i
    current_norm: float  # of the last gradient, before normalisation
    dropped: int  # the number of gradients that take no part


@dataclass(frozen=True)
class _Solution:
    """The minimiser of one problem and d, in scaled gradients."""

    weights: Array  # [K]
    coefficients: Array  # [l, K], d of each block
    gap: float
    value: float
    iterations: int
    status: str


def match(
    gradients: Vectors,
    matching: MatchingParams,
    weights: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, MatchResult]:
    """The direction d [P] and what is recorded about it.

    `weights` belong to the reference "weighted", `sizes` to blocks other than "model".
    """
    if matching.blocks == "elements":
        return _match_elements(gradients, matching, weights)
    if matching.blocks == "model":
        sizes = None
    elif sizes is None:
        raise invalid("sizes", None, f"given, as blocks is {matching.blocks!r}")
    result = match_gram(gram(gradients, sizes), matching, weights)
    return combine(gradients, result.coefficients, sizes), result


def match_gram(
    gram_matrix: Tensor, matching: MatchingParams, weights: Tensor | None = None
) -> MatchResult:
    """The match of gradients known by their Gram matrix alone ([L, K, K] or [K, K])."""
    if matching.blocks == "elements":
        raise invalid("blocks", "elements", "another: single elements need the gradients")
    grams = gram_matrix.detach().to("cpu", torch.float64).numpy()
    grams = grams.reshape(-1, *grams.shape[-2:])
    if matching.blocks == "model":
        grams = grams.sum(0, keepdims=True)
    inputs = _prepare(np.diagonal(grams, 0, 1, 2).sum(0), matching, weights)
    if isinstance(inputs, str):
        zeros = torch.zeros(*grams.shape[:2], dtype=torch.float64)
        return MatchResult(zeros, zeros, inputs, grams.shape[1])
    scale = np.outer(inputs.normalisation, inputs.normalisation)
    grams = grams[:, inputs.finite][:, :, inputs.finite] * scale
    problems = grams[:, None] if matching.blocks == "layers" else grams[None]  # [n, l, K, K]
    solutions = [_solve(problem, inputs, matching) for problem in problems]
    return _result(solutions, grams, inputs, matching)


# --- the gradients and the reference


def _prepare(squares: Array, matching: MatchingParams, weights: Tensor | None) -> _Inputs | str:
    """The inputs, from all squared norms; or the status if there is nothing to match."""
    finite = np.isfinite(squares)
    norms = np.sqrt(squares[finite])
    large = norms > _TINY * norms.max(initial=0.0)
    if not large.any():
        return "no usable gradient"
    names = (matching.reference, matching.length, matching.normalise)
    if ("current" in names or matching.reference == "half") and not finite[-1]:
        return "the current gradient is not finite"
    normalisation = np.ones_like(norms)
    if matching.normalise != "none":
        target = norms[large].mean() if matching.normalise == "mean" else norms[-1]
        normalisation[large] = target / norms[large]  # for the others it would amplify noise
    reference = _reference_weights(finite, matching, weights)
    dropped = len(finite) - int(large.sum())
    return _Inputs(finite, large, normalisation, reference, float(norms[-1]), dropped)


def _reference_weights(finite: Mask, matching: MatchingParams, weights: Tensor | None) -> Array:
    """The coefficients of g0, which sum to 1.  # [K]"""
    count = int(finite.sum())
    if matching.reference == "weighted":
        if weights is None or len(weights) != len(finite):
            raise invalid("weights", weights, f"{len(finite)} numbers, as reference is 'weighted'")
        values = weights.detach().to("cpu", torch.float64).numpy()[finite]
        if not (values >= 0).all() or not 0 < values.sum() < math.inf:
            raise invalid("weights", values.tolist(), "at least 0 and not all of them 0")
        return np.asarray(values / values.sum())
    if matching.reference == "mean" or count == 1:
        return np.full(count, 1 / count)
    others = 0.0 if matching.reference == "current" else 0.5
    reference = np.full(count, others / (count - 1))
    reference[-1] = 1 - others
    return reference


# --- one problem, in the space of inner products


def _solve(grams: Array, inputs: _Inputs, matching: MatchingParams) -> _Solution:
    """Solve one problem whose l blocks share w.  # grams [l, K, K]"""
    if matching.solver == "authors":
        return _solve_as_authors(grams[0], inputs.reference, matching)
    solution = _solve_exactly(grams, inputs, matching)
    if solution.status == _UNSOLVED:  # in float32, nearly equal gradients give an indefinite matrix
        values, vectors = np.linalg.eigh(grams)  # ascending
        cleaned = np.where(values > -2 * values[:, :1], values, 0.0)  # [l, K], without rounding
        semidefinite = (vectors * cleaned[:, None]) @ vectors.transpose(0, 2, 1)
        solution = _solve_exactly(np.asarray(semidefinite), inputs, matching)
    return solution


def _solve_exactly(grams: Array, inputs: _Inputs, matching: MatchingParams) -> _Solution:
    """The exact solution; g0 where the reference or all gradients are zero."""
    reference = inputs.reference
    linear = grams @ reference  # [l, K], <g_i, g0>
    squares = np.maximum(linear @ reference, 0.0)  # [l], |g0|^2
    norms = np.sqrt(np.maximum(np.diagonal(grams, 0, 1, 2), 0.0))  # [l, K]
    cancelled = np.sqrt(squares) <= _CANCELLED * (norms @ reference)  # [l], g0 is rounding error
    norms = np.sqrt((norms**2).sum(0))  # [K]
    usable = inputs.large & (norms > _TINY * norms.max())
    if cancelled.all() or not usable.any():
        return _Solution(reference, np.tile(reference, (len(grams), 1)), 0.0, 0.0, 0, _NO_REFERENCE)
    unit = float((norms[usable] ** 2).mean())  # the problem is solved for norms near 1
    problem = Problem(
        grams[:, usable][:, :, usable] / unit,
        linear[:, usable].sum(0) / unit,
        matching.kappa * np.where(cancelled, 0.0, np.sqrt(squares / unit)),
        float(squares.sum()) / unit,
    )
    minimum = minimise_on_simplex(problem)
    value, gradient, norms = problem.evaluate(minimum.weights)
    weights = np.zeros_like(reference)
    weights[usable] = minimum.weights
    base = reference if matching.form == "full" else 0 * reference
    coefficients = base + multipliers(problem.radii, norms)[:, None] * weights
    status = "one gradient" if len(gradient) == 1 else "exact"
    if minimum.cone is not None:
        status = "pareto: projected on the cone"
        value, gradient = 0.0, problem.linear + problem.grams.sum(0) @ minimum.cone
        coefficients[:] = reference
        coefficients[:, usable] += minimum.cone
    gap = max(value - float(gradient.min()), 0.0)
    if gap > SOLVED * problem.unit and minimum.cone is None:
        status = _UNSOLVED
    return _Solution(weights, coefficients, gap * unit, value * unit, minimum.iterations, status)


def _solve_as_authors(gram: Array, reference: Array, matching: MatchingParams) -> _Solution:
    """The solution of the public code, whose absolute terms 1e-4 dominate for short gradients."""
    linear = gram @ reference
    square = max(float(linear @ reference), 0.0)
    unit = float(np.sqrt(gram.diagonal() + 1e-4).mean()) ** 2
    radius = matching.kappa * math.sqrt(square / unit + 1e-4)
    w = softmax_descent(gram / unit, linear / unit, radius, matching.softmax)
    norm = math.sqrt(w @ gram @ w / unit + 1e-4)
    base = reference if matching.form == "full" else 0 * reference
    coefficients = base + radius / (norm + 1e-4) * w
    exact_radius = np.array([matching.kappa * math.sqrt(square / unit)])  # without the 1e-4
    problem = Problem(gram[None] / unit, linear / unit, exact_radius, 1.0)
    value, gap = unit * problem.evaluate(w)[0], unit * problem.gap(w)
    return _Solution(w, coefficients[None], gap, value, matching.softmax.rounds, "authors")


# --- each element matched as a separate problem


def _match_elements(
    gradients: Vectors, matching: MatchingParams, weights: Tensor | None
) -> tuple[Tensor, MatchResult]:
    """The direction if every element is matched alone, and what is recorded about it.

    g0 lies between the smallest and the largest g_i. If no g_i has the other sign, min_i g_i d
    grows up to the end of the ball, (1 + kappa) g0. If one has, min_i g_i d decreases on both
    sides of 0, and the best d in the ball is the one nearest to 0: max(1 - kappa, 0) g0.
    """
    d = torch.zeros(gradients[0].shape, dtype=sum_dtype(gradients), device=gradients[0].device)
    empty = torch.zeros(0, len(gradients), dtype=torch.float64)
    inputs = _prepare(squared_norms(gradients), matching, weights)
    if isinstance(inputs, str):
        return d, MatchResult(empty, empty, inputs, len(gradients))
    finite = [each for each, one in zip(gradients, inputs.finite.tolist(), strict=True) if one]
    factors = torch.from_numpy(inputs.normalisation).to(d)[:, None]
    reference = torch.from_numpy(inputs.reference).to(d)[:, None]
    large = torch.from_numpy(inputs.large).to(d.device)
    kappa = matching.kappa
    full = max(1 - kappa, 0.0), 1 + kappa  # d / g0, in conflict and without
    ratios = full if matching.form == "full" else (-kappa if kappa < 1 else 0.0, kappa)
    pairs = torch.zeros(len(finite) + 2, 2, dtype=torch.float64, device=d.device)
    value, start = 0.0, 0
    for columns in column_chunks(finite, 0, len(d)):
        columns = columns * factors
        g0 = (columns * reference).sum(0)
        conflict = (columns[large] * g0 < 0).any(0)
        best, part = (torch.where(conflict, a * g0, b * g0) for a, b in (full, ratios))
        value += float((columns[large] * best).amin(0).sum())
        both = torch.stack([part, g0])
        pairs += inner_products(torch.cat([columns, both]), both)
        d[start : start + len(part)] = part
        start += len(part)
    factor, numbers = _summarise(pairs.cpu().numpy(), inputs, matching)
    if numbers:
        numbers["value"] = value / float(pairs[-1, -1])
    return d.mul_(factor), MatchResult(empty, empty, "exact", inputs.dropped, **numbers)


# --- the record


def _result(
    solutions: list[_Solution], grams: Array, inputs: _Inputs, matching: MatchingParams
) -> MatchResult:
    """The coefficients of the gradients as given, and the numbers of the record."""
    coefficients = np.concatenate([each.coefficients for each in solutions])  # [L, K]
    reference = np.broadcast_to(inputs.reference, coefficients.shape)
    both = np.stack([coefficients, reference], 2)  # [L, K, 2], d and g0
    pairs = grams @ both  # [L, K, 2], <g_i, d> and <g_i, g0> in each block
    pairs = np.concatenate([pairs.sum(0), (both.transpose(0, 2, 1) @ pairs).sum(0)])
    status = "; ".join(dict.fromkeys(each.status for each in solutions))
    factor, numbers = 1.0, dict[str, Any]()
    if status != _NO_REFERENCE:
        factor, numbers = _summarise(pairs, inputs, matching)
    if numbers:
        numbers["gap"] = sum(each.gap for each in solutions) / float(pairs[-1, -1])
        numbers["value"] = sum(each.value for each in solutions) / float(pairs[-1, -1])
    weights = np.stack([each.weights for each in solutions])
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return MatchResult(
        _expand(factor * coefficients * inputs.normalisation, inputs.finite),
        _expand(weights, inputs.finite),
        status,
        inputs.dropped,
        support=int((weights > 1e-6).any(0).sum()),
        entropy=abs(float((weights * logs).sum(1).mean())),
        iterations=sum(each.iterations for each in solutions),
        **numbers,
    )


def _expand(values: Array, finite: Mask) -> Tensor:
    """The values of the finite gradients in their places, 0 elsewhere.  # [L, all gradients]"""
    expanded = np.zeros((len(values), len(finite)))
    expanded[:, finite] = values
    return torch.from_numpy(expanded)


def _summarise(
    pairs: Array, inputs: _Inputs, matching: MatchingParams
) -> tuple[float, dict[str, Any]]:
    """The factor that gives d its length, and the numbers of the record; none if g0 = 0.

    `pairs` [K + 2, 2] are the inner products of the K gradients, d and g0 with d and g0.
    """
    (square, both), (_, reference) = pairs[-2:].tolist()
    if reference <= 0:
        return 1.0, {}
    norm, rho = math.sqrt(max(square, 0.0)), math.sqrt(reference)
    if matching.length in ("1+kappa", "1+kappa^2"):
        factor = 1 / (1 + matching.kappa ** (2 if matching.length.endswith("2") else 1))
    elif matching.length == "free" or norm <= _CANCELLED * rho:  # d may be rounding error
        factor = 1.0
    else:
        factor = (rho if matching.length == "reference" else inputs.current_norm) / norm
    worst_product, worst_reference = (pairs[:-2][inputs.large].min(0) / reference).tolist()
    return factor, {
        "worst_product": worst_product,
        "worst_product_reference": worst_reference,
        "length": factor * norm / rho,
        "cosine": min(max(both / (norm * rho), -1.0), 1.0) if norm else 0.0,
    }
