"""Gradient matching: the direction near a reference that is best for the worst-served gradient.

Gradients g_1 .. g_K are ascent directions ("old - new", or gradients): the caller steps along -d.
Of all d in the ball |d - g0| <= kappa |g0|, the one with the largest min_i <g_i, d> is
d = g0 + kappa |g0| g_w / |g_w|, where g_w = sum_i w_i g_i and w minimises
F(w) = <g_w, g0> + kappa |g0| |g_w| over the simplex (CAGrad; Liu et al., 2021).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative
from stamp_core.matching.certificate import (
    CANCELLED,
    NO_REFERENCE,
    Certified,
    Products,
    Solution,
    certify,
)
from stamp_core.matching.gram import (
    Vectors,
    combine,
    gram,
    gram_rounding,
    orthonormal_coordinates,
    products_with_sums,
)
from stamp_core.matching.simplex import (
    Array,
    Mask,
    Problem,
    SoftmaxParams,
    coordinates,
    softmax_descent,
    solve,
)

_TINY = 1e-8  # gradients no longer than this share of the longest one take no part
_FROM_GRAM, _FROM_BASIS = 1e-6, 3e-7  # relative precision of coordinates
# Numbers in all gradients from which on the Gram matrix certifies what it can. One more pass over
# fewer takes a few milliseconds, and then every result has the digits of products of gradients.
_LARGE = 2**23


@dataclass(frozen=True)
class MatchingParams:
    """The matching problem and its solver."""

    kappa: NonNegative = 0.5  # radius of the ball around g0, relative to |g0|
    # g0: the mean, the mean weighted by images, the last gradient, or half of it and half of the
    # others' weighted mean
    reference: Literal["mean", "weighted", "current", "halves"] = "mean"
    # of the result: as solved, divided by 1 + kappa or 1 + kappa^2, or that of g0 or the last one
    length: Literal["free", "1+kappa", "1+kappa^2", "reference", "current"] = "1+kappa"
    normalise: Literal["none", "mean", "current"] = "none"  # the norm that all gradients get
    blocks: Literal["model", "layers"] = "model"  # what is matched as one vector
    solver: Literal["exact", "softmax_sgd"] = "exact"  # softmax_sgd: that of the public code
    softmax: SoftmaxParams = field(default_factory=SoftmaxParams)


@dataclass(frozen=True)
class MatchResult:
    """The coefficients of d and what is recorded about it.

    gap, value and products are relative to |g0|^2, length to |g0|. The gap of softmax_sgd, whose d
    may be outside the ball, is that of g0 + kappa |g0| g_w / |g_w|.
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

    matching: MatchingParams
    finite: Mask  # [all gradients]; the other fields are about the K finite ones
    large: Mask  # [K], those long enough to take part
    normalisation: Array  # [K], the factor of each gradient
    reference: Array  # [K], g0 = sum_i reference_i normalisation_i g_i
    current_norm: float  # of the last gradient, before normalisation
    dropped: int  # the number of gradients that take no part


def match(
    gradients: Vectors,
    matching: MatchingParams,
    weights: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, MatchResult]:
    """The direction d [P] and its record; `weights` are of the reference, `sizes` of "layers"."""
    if matching.blocks == "model":
        sizes = None
    elif sizes is None:
        raise invalid("sizes", None, f"given, as blocks is {matching.blocks!r}")
    grams = gram(gradients, sizes).numpy()
    inputs = _prepare(grams, matching, weights)
    if isinstance(inputs, str):
        result = _no_match(inputs, grams)
    else:
        result = _result(_solve(gradients, grams, sizes, inputs), inputs)
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
    solutions = [_solve_gram(each, inputs) for each in grams]
    return _result(_certify_by_gram(solutions, grams, [0.0] * len(grams), inputs), inputs)


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
    return _Inputs(matching, finite, large, normalisation, reference, float(norms[-1]), dropped)


def _reference_weights(finite: Mask, matching: MatchingParams, weights: Tensor | None) -> Array:
    """The coefficients of g0, which sum to 1.  # [K]"""
    count = int(finite.sum())
    if matching.reference == "mean":
        return np.full(count, 1 / count)
    if matching.reference == "current":
        return np.asarray(np.eye(count)[-1])
    if weights is None and matching.reference == "halves":
        weights = torch.ones(len(finite))
    if weights is None or len(weights) != len(finite):
        right = f"{len(finite)} numbers, as reference is {matching.reference!r}"
        raise invalid("weights", weights, right)
    values = weights.detach().to("cpu", torch.float64).numpy()[finite]
    if not (values >= 0).all() or not 0 < values.sum() < math.inf:
        raise invalid("weights", values.tolist(), "at least 0 and not all of them 0")
    shares = np.asarray(values / values.sum())
    others = 1 - shares[-1]
    if matching.reference == "halves" and others > 0:
        shares *= 0.5 / others
        shares[-1] = 0.5
    return shares


# --- the solutions and their certificates


def _solve(
    gradients: Vectors, grams: Array, sizes: Sequence[int] | None, inputs: _Inputs
) -> list[Certified]:
    """The certified solution of each block.

    The certificate of large gradients comes from the Gram matrix where it is precise enough: a
    further pass would take as long as all the rest. Otherwise it comes from the gradients. A Gram
    matrix cannot tell nearly opposite gradients from opposite ones: if the gap shows this, the
    problem is solved again in an orthonormal basis.
    """
    solutions = [_solve_gram(each, inputs) for each in grams]
    exact = inputs.matching.solver == "exact"
    if len(gradients) * len(gradients[0]) >= _LARGE:
        blocks = _certify_by_gram(solutions, grams, gram_rounding(gradients, sizes), inputs)
        if all(each.is_precise() and (each.is_solved() or not exact) for each in blocks):
            return blocks
    finite = [each for each, one in zip(gradients, inputs.finite, strict=True) if one]
    blocks = _certify_by_gradients(solutions, finite, sizes, inputs)
    if exact and not all(each.is_solved() for each in blocks):
        bases = orthonormal_coordinates(finite, sizes)
        solutions = [_solve_exactly(each.numpy(), _FROM_BASIS, inputs) for each in bases]
        blocks = _certify_by_gradients(solutions, finite, sizes, inputs)
    return blocks


def _solve_gram(gram: Array, inputs: _Inputs) -> Solution:
    """The solution from the Gram matrix of all gradients as given."""
    scale = np.outer(inputs.normalisation, inputs.normalisation)
    gram = gram[inputs.finite][:, inputs.finite] * scale
    if inputs.matching.solver == "softmax_sgd":
        return _solve_as_published(gram, inputs)
    norms = np.sqrt(gram.diagonal())
    units = np.where(norms > 0, norms, 1.0)
    rows = norms[:, None] * coordinates(gram / np.outer(units, units), _FROM_GRAM)
    return _solve_exactly(rows, _FROM_GRAM, inputs)


def _solve_exactly(rows: Array, resolution: float, inputs: _Inputs) -> Solution:
    """The exact solution from coordinates of the gradients."""
    reference = inputs.reference @ rows
    norms = np.linalg.norm(rows, axis=1)
    usable = inputs.large & (norms > _TINY * norms.max())
    weights = np.zeros_like(norms)
    shift = np.zeros_like(norms)
    if not usable.any():
        return Solution(inputs.reference, weights, shift, norms, usable)
    radius = inputs.matching.kappa * float(np.linalg.norm(reference))
    optimum = solve(Problem(rows[usable], reference, radius, resolution))
    weights[usable] = optimum.weights
    shift[usable] = optimum.shift
    return Solution(inputs.reference, weights, shift, norms, usable, optimum.iterations)


def _solve_as_published(gram: Array, inputs: _Inputs) -> Solution:
    """The solution of the public code, whose absolute terms 1e-4 dominate for short gradients."""
    softmax = inputs.matching.softmax
    linear = gram @ inputs.reference
    square = max(float(linear @ inputs.reference), 0.0)
    unit = float(np.sqrt(gram.diagonal() + 1e-4).mean()) ** 2
    radius = inputs.matching.kappa * math.sqrt(square / unit + 1e-4)
    w = softmax_descent(gram / unit, linear / unit, radius, softmax)
    shift = radius / (math.sqrt(w @ gram @ w / unit + 1e-4) + 1e-4) * w
    norms = np.sqrt(gram.diagonal())
    return Solution(inputs.reference, w, shift, norms, np.ones(len(w), bool), softmax.rounds)


def _certify_by_gram(
    solutions: Sequence[Solution], grams: Array, rounding: Sequence[float], inputs: _Inputs
) -> list[Certified]:
    """The solutions with their certificates, from Gram matrices with this relative rounding."""
    blocks = []
    for solution, each, error in zip(solutions, grams, rounding, strict=True):
        sums = inputs.normalisation * solution.sums()
        finite = each[inputs.finite][:, inputs.finite]
        products = np.concatenate([finite, sums @ finite]) @ sums.T
        blocks.append(_certify(solution, products, error, inputs))
    return blocks


def _certify_by_gradients(
    solutions: Sequence[Solution], gradients: Vectors, sizes: Sequence[int] | None, inputs: _Inputs
) -> list[Certified]:
    """The solutions with their certificates, from products of the finite gradients themselves."""
    sums = torch.from_numpy(np.stack([inputs.normalisation * each.sums() for each in solutions]))
    products = products_with_sums(gradients, sums, sizes).numpy()
    pairs = zip(solutions, products, strict=True)
    return [_certify(solution, block, 0.0, inputs) for solution, block in pairs]


def _certify(solution: Solution, products: Array, rounding: float, inputs: _Inputs) -> Certified:
    """One certificate; `products` [K + 3, 3] are those of the gradients and sums with the sums."""
    reference, shift, combined = (products[:-3] * inputs.normalisation[:, None]).T
    sums = products[-3:]
    pairs = float(sums[1, 0]), float(sums[2, 0])
    named = Products(reference, shift, combined, sums.diagonal(), *pairs, rounding)
    return certify(solution, named, inputs.matching.kappa, inputs.matching.solver == "softmax_sgd")


# --- the record


def _result(blocks: Sequence[Certified], inputs: _Inputs) -> MatchResult:
    """The coefficients of the gradients as given, and the numbers of the record."""
    status = "; ".join(dict.fromkeys(each.status for each in blocks))
    factor = 1.0
    numbers = dict[str, float]()
    square = sum(float(each.products.squares[0]) for each in blocks)
    if status != NO_REFERENCE and square > 0:
        factor, numbers = _summarise(blocks, square, inputs)
    coefficients = np.stack([each.coefficients() for each in blocks])
    weights = np.stack([each.solution.weights for each in blocks])
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return MatchResult(
        _expand(factor * coefficients * inputs.normalisation, inputs.finite),
        _expand(weights, inputs.finite),
        status,
        inputs.dropped,
        support=int((weights > 1e-6).any(0).sum()),
        entropy=abs(float((weights * logs).sum(1).mean())),
        iterations=sum(each.solution.iterations for each in blocks),
        **numbers,
    )


def _expand(values: Array, finite: Mask) -> Tensor:
    """The values of the finite gradients, 0 for the others.  # [L, all gradients]"""
    expanded = np.zeros((len(values), len(finite)))
    expanded[:, finite] = values
    return torch.from_numpy(expanded)


def _summarise(
    blocks: Sequence[Certified], square: float, inputs: _Inputs
) -> tuple[float, dict[str, float]]:
    """The factor that gives d its length, and numbers of the record; `square` is |g0|^2."""
    kappa = inputs.matching.kappa
    length = inputs.matching.length
    rho = math.sqrt(square)
    norm = math.sqrt(max(sum(each.square_d() for each in blocks), 0.0))
    factor = {"1+kappa": 1 / (1 + kappa), "1+kappa^2": 1 / (1 + kappa**2)}.get(length, 1.0)
    if length in ("reference", "current") and norm > CANCELLED * rho:  # or d is rounding error
        factor = (rho if length == "reference" else inputs.current_norm) / norm
    with_d = np.sum([each.with_d() for each in blocks], 0)
    with_reference = np.sum([each.products.with_reference for each in blocks], 0)
    cosine = sum(each.reference_d() for each in blocks) / (norm * rho) if norm else 0.0
    return factor, {
        "gap": sum(each.gap for each in blocks) / square,
        "value": sum(each.value for each in blocks) / square,
        "worst_product": float(with_d[inputs.large].min() / square),
        "worst_product_reference": float(with_reference[inputs.large].min() / square),
        "length": factor * norm / rho,
        "cosine": min(max(cosine, -1.0), 1.0),
    }
