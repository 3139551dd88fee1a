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
    combine,
    gram,
    orthonormal_coordinates,
    products_with_sums,
)
from stamp_core.matching.least_distance import Array, Mask, coordinates
from stamp_core.matching.simplex import SOLVED, Problem, SoftmaxParams, softmax_descent, solve

_TINY = 1e-8  # gradients no longer than this share of the longest one take no part
_CANCELLED = 1e-7  # a sum of vectors shorter than this share of their norms is rounding error
_FROM_GRAM, _FROM_BASIS = 1e-6, 3e-7  # relative precision of coordinates
_DEGENERATE = 1e-7  # largest gap of a solved problem, relative to max_i |g_i| max |d|
_NO_REFERENCE = "reference is zero"


@dataclass(frozen=True)
class MatchingParams:
    """The matching problem and its solver."""

    kappa: float = 0.5  # radius of the ball around g0, relative to |g0|
    reference: Literal["mean", "weighted", "current"] = "mean"  # g0; current: the last one
    length: Literal["free", "1+kappa", "1+kappa^2", "reference", "current"] = "1+kappa"
    normalise: Literal["none", "mean", "current"] = "none"  # the norm that all gradients get
    blocks: Literal["model", "layers"] = "model"
    solver: Literal["exact", "authors"] = "exact"
    softmax: SoftmaxParams = field(default_factory=SoftmaxParams)  # of the solver "authors"

    def __post_init__(self) -> None:
        """Refuse a radius below 0."""
        require_at_least(self, 0, "kappa")


@dataclass(frozen=True)
class MatchResult:
    """The coefficients of d and what is recorded about it.

    gap, value and products are relative to |g0|^2, length to |g0|. The gap of the solver "authors",
    whose d may be outside the ball, is that of g0 + kappa |g0| g_w / |g_w|.
    """

    coefficients: Tensor  # float64 [L, K]: d = sum_i coefficients[block, i] gradients[i]
    weights: Tensor  # float64 [L, K], on the simplex
    status: str
    dropped: int  # gradients that are not finite or too short
    gap: float = 0.0  # duality gap: min_i <g_i, d> is below its maximum by at most this
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
    """The solution of one block, in normalised gradients."""

    weights: Array  # [K]
    shift: Array  # [K], d = g0 + sum_i shift_i g_i
    norms: Array  # [K]
    usable: Mask  # [K], the gradients that take part in this block
    iterations: int = 0


@dataclass(frozen=True)
class _Certified:
    """A solution whose d is in the ball, and what it is worth."""

    weights: Array  # [K]
    coefficients: Array  # [K], of d
    iterations: int
    status: str
    gap: float
    value: float
    pairs: Array  # [K + 2, 2], inner products of the gradients, d and g0 with d and g0


def match(
    gradients: Vectors,
    matching: MatchingParams,
    weights: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, MatchResult]:
    """The direction d [P] and what is recorded about it.

    `weights` belong to the reference "weighted", `sizes` to the blocks "layers". The record is
    measured on the gradients themselves. A Gram matrix cannot tell nearly opposite gradients from
    opposite ones: if the gap shows this, the problem is solved again in an orthonormal basis.
    """
    if matching.blocks == "model":
        sizes = None
    elif sizes is None:
        raise invalid("sizes", None, f"given, as blocks is {matching.blocks!r}")
    grams = gram(gradients, sizes).numpy()
    inputs = _prepare(grams, matching, weights)
    if isinstance(inputs, str):
        result = _no_match(inputs, grams)
        return combine(gradients, result.coefficients, sizes), result
    finite = [each for each, one in zip(gradients, inputs.finite, strict=True) if one]
    solutions = [_solve_gram(each, inputs, matching) for each in grams]
    blocks = _certify(solutions, finite, sizes, inputs, matching)
    unsolved = any(each.gap > SOLVED * each.pairs[-1, -1] for each in blocks)
    if unsolved and matching.solver == "exact":
        bases = orthonormal_coordinates(finite, sizes)
        solutions = [_solve_exactly(each.numpy(), _FROM_BASIS, inputs, matching) for each in bases]
        blocks = _certify(solutions, finite, sizes, inputs, matching)
    result = _result(blocks, inputs, matching)
    return combine(gradients, result.coefficients, sizes), result


def match_gram(
    gram_matrix: Tensor, matching: MatchingParams, weights: Tensor | None = None
) -> MatchResult:
    """The match of gradients known by their Gram matrix alone ([L, K, K] or [K, K])."""
    grams = gram_matrix.detach().to("cpu", torch.float64).numpy()
    grams = grams.reshape(-1, *grams.shape[-2:])
    if matching.blocks == "model":
        grams = grams.sum(0, keepdims=True)
    inputs = _prepare(grams, matching, weights)
    if isinstance(inputs, str):
        return _no_match(inputs, grams)
    blocks = []
    for each in grams:
        solution = _solve_gram(each, inputs, matching)
        rows, finite = _sums(solution, inputs), each[np.ix_(inputs.finite, inputs.finite)]
        products = np.concatenate([finite, rows @ finite]) @ rows.T
        blocks.append(_certify_block(solution, products, inputs, matching))
    return _result(blocks, inputs, matching)


def _no_match(status: str, grams: Array) -> MatchResult:
    """The record where there is nothing to match."""
    zeros = torch.zeros(grams.shape[:2], dtype=torch.float64)
    return MatchResult(zeros, zeros, status, grams.shape[1])


# --- the gradients and the reference


def _prepare(grams: Array, matching: MatchingParams, weights: Tensor | None) -> _Inputs | str:
    """The inputs, or the status if there is nothing to match."""
    squares = np.diagonal(grams, 0, 1, 2).sum(0)
    finite = squares < np.finfo(np.float32).max  # nan is not
    norms = np.sqrt(squares[finite])
    large = norms > _TINY * norms.max(initial=0.0)
    if not large.any():
        return "no usable gradient"
    if "current" in (matching.reference, matching.length, matching.normalise) and not finite[-1]:
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
    if matching.reference == "mean":
        return np.full(count, 1 / count)
    if matching.reference == "current":
        return np.asarray(np.eye(count)[-1])
    if weights is None or len(weights) != len(finite):
        raise invalid("weights", weights, f"{len(finite)} numbers, as reference is 'weighted'")
    values = weights.detach().to("cpu", torch.float64).numpy()[finite]
    if not (values >= 0).all() or not 0 < values.sum() < math.inf:
        raise invalid("weights", values.tolist(), "at least 0 and not all of them 0")
    return np.asarray(values / values.sum())


# --- one block


def _solve_gram(gram: Array, inputs: _Inputs, matching: MatchingParams) -> _Solution:
    """The solution from the Gram matrix of all gradients as given."""
    scale = np.outer(inputs.normalisation, inputs.normalisation)
    gram = gram[np.ix_(inputs.finite, inputs.finite)] * scale
    if matching.solver == "authors":
        return _solve_as_authors(gram, inputs, matching)
    norms = np.sqrt(gram.diagonal())
    units = np.where(norms > 0, norms, 1.0)
    rows = norms[:, None] * coordinates(gram / np.outer(units, units), _FROM_GRAM)
    return _solve_exactly(rows, _FROM_GRAM, inputs, matching)


def _solve_exactly(
    rows: Array, resolution: float, inputs: _Inputs, matching: MatchingParams
) -> _Solution:
    """The exact solution from coordinates of the gradients."""
    reference, norms = inputs.reference @ rows, np.linalg.norm(rows, axis=1)
    usable = inputs.large & (norms > _TINY * norms.max())
    weights, shift = np.zeros_like(norms), np.zeros_like(norms)
    if not usable.any():
        return _Solution(weights, shift, norms, usable)
    radius = matching.kappa * float(np.linalg.norm(reference))
    optimum = solve(Problem(rows[usable], reference, radius, resolution))
    weights[usable], shift[usable] = optimum.weights, optimum.shift
    return _Solution(weights, shift, norms, usable, optimum.iterations)


def _solve_as_authors(gram: Array, inputs: _Inputs, matching: MatchingParams) -> _Solution:
    """The solution of the public code, whose absolute terms 1e-4 dominate for short gradients."""
    linear = gram @ inputs.reference
    square = max(float(linear @ inputs.reference), 0.0)
    unit = float(np.sqrt(gram.diagonal() + 1e-4).mean()) ** 2
    radius = matching.kappa * math.sqrt(square / unit + 1e-4)
    w = softmax_descent(gram / unit, linear / unit, radius, matching.softmax)
    shift = radius / (math.sqrt(w @ gram @ w / unit + 1e-4) + 1e-4) * w
    norms = np.sqrt(gram.diagonal())
    return _Solution(w, shift, norms, np.ones(len(w), bool), matching.softmax.rounds)


# --- the certificate


def _certify(
    solutions: Sequence[_Solution],
    gradients: Vectors,
    sizes: Sequence[int] | None,
    inputs: _Inputs,
    matching: MatchingParams,
) -> list[_Certified]:
    """The solutions with their certificates, from inner products of the gradients themselves."""
    sums = torch.from_numpy(np.stack([_sums(each, inputs) for each in solutions]))
    products = products_with_sums(gradients, sums, sizes).numpy()
    pairs = zip(solutions, products, strict=True)
    return [_certify_block(each, part, inputs, matching) for each, part in pairs]


def _sums(solution: _Solution, inputs: _Inputs) -> Array:
    """The coefficients of d - g0, g0 and g_w in the finite gradients as given.  # [3, K]"""
    return inputs.normalisation * np.stack([solution.shift, inputs.reference, solution.weights])


def _certify_block(
    solution: _Solution, products: Array, inputs: _Inputs, matching: MatchingParams
) -> _Certified:
    """The solution with d pulled back into the ball, which rounding may have led out of.

    `products` [K + 3, 3] are those of the gradients, d - g0, g0 and g_w with the last three.
    """
    products = products * np.append(inputs.normalisation, np.ones(3))[:, None]
    if matching.solver == "authors":
        share, gap, value, status = 1.0, *_judge_authors(products, matching), "authors"
    else:
        share, gap, value, status = _judge(solution, products, inputs, matching)
    transform = np.array([[share, 0.0], [1.0, 1.0], [0.0, 0.0]])  # from d - g0 and g0 to d and g0
    pairs = products @ transform
    return _Certified(
        solution.weights,
        inputs.reference + share * solution.shift,
        solution.iterations,
        status,
        max(gap, 0.0),
        value,
        np.concatenate([pairs[:-3], transform.T @ pairs[-3:]]),
    )


def _judge(
    solution: _Solution, products: Array, inputs: _Inputs, matching: MatchingParams
) -> tuple[float, float, float, str]:
    """The share of d - g0 that is in the ball, the gap of this d, F(w) and the status."""
    away, rho, combined = np.sqrt(np.maximum(products[-3:].diagonal(), 0.0)).tolist()
    usable, norms = solution.usable, solution.norms
    if rho <= _CANCELLED * (inputs.reference @ norms) or not usable.any():
        return 0.0, 0.0, 0.0, _NO_REFERENCE
    radius = matching.kappa * rho
    share = radius / away if away > radius else 1.0
    value = float(products[-1, 1]) + radius * combined
    gap = value - float((products[:-3, :2] @ [share, 1.0])[usable].min())
    tolerance, status = _DEGENERATE * (rho + radius) * float(norms.max()), "exact"
    if gap > tolerance:
        status = "not solved to the end"
    elif usable.sum() == 1:
        status = "one gradient"
    elif away < radius * (1 - 1e-6) and abs(value) <= tolerance:
        status = "pareto: projected on the cone"
    return share, gap, value, status


def _judge_authors(products: Array, matching: MatchingParams) -> tuple[float, float]:
    """The gap of g0 + radius g_w / |g_w|, as the authors' d may be outside the ball, and F(w)."""
    _, rho, combined = np.sqrt(np.maximum(products[-3:].diagonal(), 0.0)).tolist()
    radius = matching.kappa * rho
    value = float(products[-1, 1]) + radius * combined
    step = radius / combined if combined else 0.0
    return value - float((products[:-3, 1:] @ [1.0, step]).min()), value


# --- the record


def _result(blocks: Sequence[_Certified], inputs: _Inputs, matching: MatchingParams) -> MatchResult:
    """The coefficients of the gradients as given, and the numbers of the record."""
    status = "; ".join(dict.fromkeys(each.status for each in blocks))
    factor, numbers = 1.0, dict[str, Any]()
    pairs = np.sum([each.pairs for each in blocks], 0)
    if status != _NO_REFERENCE and pairs[-1, -1] > 0:
        factor, numbers = _summarise(pairs, inputs, matching)
        numbers["gap"] = sum(each.gap for each in blocks) / float(pairs[-1, -1])
        numbers["value"] = sum(each.value for each in blocks) / float(pairs[-1, -1])
    coefficients = np.stack([each.coefficients for each in blocks])
    weights = np.stack([each.weights for each in blocks])
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return MatchResult(
        _expand(factor * coefficients * inputs.normalisation, inputs.finite),
        _expand(weights, inputs.finite),
        status,
        inputs.dropped,
        support=int((weights > 1e-6).any(0).sum()),
        entropy=abs(float((weights * logs).sum(1).mean())),
        iterations=sum(each.iterations for each in blocks),
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
    """The factor that gives d its length, and numbers of the record.

    `pairs` [K + 2, 2] are the inner products of the K gradients, d and g0 with d and g0.
    """
    (square, both), (_, reference) = pairs[-2:].tolist()
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
