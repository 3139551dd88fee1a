"""Gradient matching: the step near a reference that is best for the row it serves worst.

Rows g_1 .. g_K point downhill ("old - new", or gradients) and the caller steps along minus d.
Of all d with |d - g0| <= kappa |g0|, the one with the largest min_i <g_i, d> is
d = g0 + kappa |g0| g_w / |g_w|, where g_w = sum_i w_i g_i and w minimises
F(w) = <g_w, g0> + kappa |g0| |g_w| over the simplex (CAGrad; Liu et al., 2021).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stamp_core.config import at_least, wrong
from stamp_core.rows import (
    Rows,
    Sketch,
    chunks,
    combine,
    gram,
    layers,
    products,
    squares,
    working,
)
from stamp_core.simplex import (
    SOLVED,
    Array,
    Found,
    Mask,
    Problem,
    Softmax,
    minimise,
    slopes,
    softmax_descent,
)

__all__ = [
    "Matched",
    "Matching",
    "Sketch",
    "Softmax",
    "combine",
    "gram",
    "layers",
    "match",
    "solve",
]
TINY = 1e-8  # rows no longer than this share of the longest one take no part
LOST = 1e-7  # a sum of rows shorter than this share of their lengths is rounding
NO_REFERENCE, UNSOLVED = "reference is zero", "not solved to the end"


@dataclass(frozen=True)
class Matching:
    """Which problem is solved, and how."""

    kappa: float = 0.5  # radius of the ball around g0, relative to |g0|
    reference: Literal["mean", "weighted", "current", "half"] = "mean"  # g0; current: last row
    form: Literal["full", "direction"] = "full"  # direction: d without g0
    length: Literal["free", "1+kappa", "1+kappa^2", "reference", "current"] = "1+kappa"
    normalise: Literal["none", "mean", "current"] = "none"  # whose length all rows are given
    blocks: Literal["model", "layers", "coupled", "elements"] = "model"  # coupled: one w for all
    solver: Literal["exact", "authors"] = "exact"
    softmax: Softmax = field(default_factory=Softmax)  # of the solver "authors"

    def __post_init__(self) -> None:
        """Refuse a radius below 0 and blocks that the public code does not know."""
        at_least(self, 0, "kappa")
        if self.solver == "authors" and self.blocks in ("coupled", "elements"):
            raise wrong("solver", self.solver, f"'exact', as blocks is {self.blocks!r}")

    @property
    def needs_current(self) -> bool:
        """Whether nothing can be done without the last row."""
        names = (self.reference, self.length, self.normalise)
        return "current" in names or self.reference == "half"


@dataclass(frozen=True)
class Matched:
    """What was found; gap, value and least are relative to |g0|^2, length to |g0|."""

    coefficients: Tensor  # float64 [L, K]: d = sum_i coefficients[block, i] rows[i]
    weights: Tensor  # float64 [L, K], on the simplex; with blocks "elements" both are empty
    gap: float  # F(w) is no farther from its least value
    value: float  # F(w)
    least: float  # min_i <g_i, d>, before d is put to its length
    least_reference: float  # min_i <g_i, g0>
    length: float
    cosine: float  # of d and g0
    support: int  # rows with a weight above 1e-6 in some block
    entropy: float  # of the weights; its mean over blocks
    iterations: int
    dropped: int  # rows that are not finite or too small
    status: str


@dataclass(frozen=True)
class Cast:
    """Which rows take part, how they are scaled, and what the reference is made of."""

    finite: Mask  # [all rows]; what follows is about the K finite ones
    large: Mask  # [K], those long enough to take part
    scales: Array  # [K]
    shares: Array  # [K], g0 = sum_i shares_i scales_i rows_i
    current: float  # the length of the last row as it came in

    @property
    def dropped(self) -> int:
        """Rows that take no part."""
        return len(self.finite) - int(self.large.sum())


@dataclass(frozen=True)
class Played:
    """The weights of one problem and the d they stand for."""

    weights: Array  # [K]
    coefficients: Array  # [l, K]: d of each block, in scaled rows
    gap: float
    value: float
    iterations: int
    status: str


# --- from rows to a direction


def match(
    rows: Rows,
    matching: Matching,
    weights: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Matched]:
    """The direction d [P] and how it was found; `sizes` of the blocks where there are several."""
    if matching.blocks == "elements":
        return elementwise(rows, matching, weights)
    if matching.blocks == "model":
        sizes = None
    elif sizes is None:
        raise wrong("sizes", None, f"given, as blocks is {matching.blocks!r}")
    matched = solve(gram(rows, sizes), matching, weights)
    return combine(rows, matched.coefficients, sizes), matched


def solve(gram: Tensor, matching: Matching, weights: Tensor | None = None) -> Matched:
    """The match of rows of which only the inner products are known ([L, K, K] or [K, K])."""
    if matching.blocks == "elements":
        raise wrong("blocks", "elements", "another: single elements need the rows themselves")
    products = gram.detach().to("cpu", torch.float64).numpy()
    products = products.reshape(-1, *products.shape[-2:])
    if matching.blocks == "model":
        products = products.sum(0, keepdims=True)
    cast = assign(np.diagonal(products, 0, 1, 2).sum(0), matching, weights)
    if isinstance(cast, str):
        return nothing(len(products), products.shape[1], cast)
    grams = products[:, cast.finite][:, :, cast.finite] * np.outer(cast.scales, cast.scales)
    alone = matching.blocks == "layers"
    problems = [block[None] for block in grams] if alone else [grams]
    played = [play(each, cast, matching) for each in problems]
    return describe(played, grams, cast, matching)


def assign(squares: Array, matching: Matching, weights: Tensor | None) -> Cast | str:
    """The cast, from the squared lengths of all rows; or, in words, why there is none."""
    finite = np.isfinite(squares)
    norms = np.sqrt(squares[finite])
    large = norms > TINY * norms.max(initial=0.0)
    if not large.any():
        return "no usable row"
    if matching.needs_current and not finite[-1]:
        return "the current row is not finite"
    return Cast(
        finite,
        large,
        scales(norms, large, matching),
        shares(finite, matching, weights),
        float(norms[-1]),
    )


def scales(norms: Array, large: Mask, matching: Matching) -> Array:
    """What gives the rows one length; those too small to have a direction stay.  # [K]"""
    if matching.normalise == "none":
        return np.ones_like(norms)
    target = norms[large].mean() if matching.normalise == "mean" else norms[-1]
    return np.asarray(np.where(large, target / np.where(large, norms, 1.0), 1.0))


def shares(finite: Mask, matching: Matching, weights: Tensor | None) -> Array:
    """The coefficients of g0, which sum to 1.  # [K]"""
    count = int(finite.sum())
    if matching.reference == "weighted":
        return samples(finite, weights)
    if matching.reference == "mean" or count == 1:
        return np.full(count, 1 / count)
    others = 0.0 if matching.reference == "current" else 0.5
    found = np.full(count, others / (count - 1))
    found[-1] = 1 - others
    return found


def samples(finite: Mask, weights: Tensor | None) -> Array:
    """The given weights of the finite rows, made to sum to 1."""
    if weights is None or len(weights) != len(finite):
        raise wrong("weights", weights, f"{len(finite)} numbers, as reference is 'weighted'")
    given = weights.detach().to("cpu", torch.float64).numpy()[finite]
    if not (given >= 0).all() or not 0 < given.sum() < math.inf:
        raise wrong("weights", given.tolist(), "at least 0 and not all of them 0")
    return np.asarray(given / given.sum())


# --- one problem, in the space of inner products


def play(grams: Array, cast: Cast, matching: Matching) -> Played:
    """Solve one problem of l blocks that share w.  # grams [l, K, K]"""
    if matching.solver == "authors":
        return authors(grams[0], cast.shares, matching)
    played = exact(grams, cast, matching)
    if played.status == UNSOLVED:  # single precision makes squares of nearly equal rows negative
        played = exact(semidefinite(grams), cast, matching)
    return played


def exact(grams: Array, cast: Cast, matching: Matching) -> Played:
    """The minimiser, and g0 where there is nothing to minimise."""
    linear = grams @ cast.shares  # [l, K], <g_i, g0>
    squares = np.maximum(linear @ cast.shares, 0.0)  # [l], |g0|^2
    lengths = np.sqrt(np.maximum(np.diagonal(grams, 0, 1, 2), 0.0))  # [l, K]
    lost = np.sqrt(squares) <= LOST * (lengths @ cast.shares)
    whole = np.sqrt((lengths**2).sum(0))
    usable = cast.large & (whole > TINY * whole.max())
    if lost.all() or not usable.any():
        kept = np.tile(cast.shares, (len(grams), 1))
        return Played(cast.shares, kept, 0.0, 0.0, 0, NO_REFERENCE)
    unit = float((whole[usable] ** 2).mean())
    problem = Problem(
        grams[:, usable][:, :, usable] / unit,
        linear[:, usable].sum(0) / unit,
        matching.kappa * np.where(lost, 0.0, np.sqrt(squares / unit)),
        float(squares.sum()) / unit,
    )
    return among_all(problem, minimise(problem), unit, usable, cast.shares, matching.form)


def among_all(
    problem: Problem, found: Found, unit: float, usable: Mask, shares: Array, form: str
) -> Played:
    """What was found, put back among the rows that took no part."""
    value, gradient, lengths = problem.at(found.weights)
    coefficients = np.tile(shares if form == "full" else 0 * shares, (len(lengths), 1))
    status = "one row" if len(gradient) == 1 else "exact"
    if found.cone is None:
        coefficients[:, usable] += np.outer(slopes(problem.radii, lengths), found.weights)
    else:
        value, gradient = 0.0, problem.linear + problem.grams.sum(0) @ found.cone
        coefficients[:] = shares
        coefficients[:, usable] += found.cone
        status = "pareto: projected on the cone"
    gap = max(value - float(gradient.min()), 0.0)
    weights = np.zeros_like(shares)
    weights[usable] = found.weights
    status = status if gap <= SOLVED * problem.unit or found.cone is not None else UNSOLVED
    return Played(weights, coefficients, gap * unit, value * unit, found.iterations, status)


def semidefinite(grams: Array) -> Array:
    """The matrices without the eigenvalues that are as small as the negative ones: rounding."""
    values, vectors = np.linalg.eigh(grams)  # rising
    clean = np.where(values > -2 * values[:, :1], values, 0.0)
    return np.asarray((vectors * clean[:, None]) @ vectors.transpose(0, 2, 1))


def authors(gram: Array, shares: Array, matching: Matching) -> Played:
    """What the public code finds, with its absolute 1e-4 in which short rows drown."""
    linear = gram @ shares
    square = max(float(linear @ shares), 0.0)
    unit = float(np.sqrt(gram.diagonal() + 1e-4).mean()) ** 2
    radius = matching.kappa * math.sqrt(square / unit + 1e-4)
    w = softmax_descent(gram / unit, linear / unit, radius, matching.softmax)
    length = math.sqrt(w @ gram @ w / unit + 1e-4)
    base = shares if matching.form == "full" else 0 * shares
    coefficients = base + radius / (length + 1e-4) * w
    exactly = np.array([matching.kappa * math.sqrt(square / unit)])  # without the 1e-4
    problem = Problem(gram[None] / unit, linear / unit, exactly, 1.0)
    value, gap = unit * problem.at(w)[0], unit * problem.gap(w)
    return Played(w, coefficients[None], gap, value, matching.softmax.rounds, "authors")


# --- every element a problem of its own


def elementwise(rows: Rows, matching: Matching, weights: Tensor | None) -> tuple[Tensor, Matched]:
    """The direction where every element is matched alone, and how it was found.

    g0 lies between the least and the largest g_i. Where no g_i has the other sign, min_i g_i d
    grows up to the end of the ball, (1 + kappa) g0. Where one has, min_i g_i d falls on both sides
    of 0, and the best d in the ball is the one nearest to 0: max(1 - kappa, 0) g0.
    """
    result = torch.zeros(rows[0].shape, dtype=working(rows), device=rows[0].device)
    cast = assign(squares(rows), matching, weights)
    if isinstance(cast, str):
        return result, nothing(0, len(rows), cast)
    kept = [row for row, finite in zip(rows, cast.finite.tolist(), strict=True) if finite]
    scales, shares = (torch.from_numpy(x).to(result)[:, None] for x in (cast.scales, cast.shares))
    large = torch.from_numpy(cast.large).to(result.device)
    table = torch.zeros(len(kept) + 2, 2, dtype=torch.float64, device=result.device)
    value, place = 0.0, 0
    for columns in chunks(kept, 0, len(result)):
        columns = columns * scales
        g0 = (columns * shares).sum(0)
        disagrees = (columns[large] * g0 < 0).any(0)
        best, d = (torch.where(disagrees, a * g0, b * g0) for a, b in factors(matching))
        value += float((columns[large] * best).amin(0).sum())
        pair = torch.stack([d, g0])
        table += products(torch.cat([columns, pair]), pair)
        result[place : place + len(d)] = d
        place += len(d)
    stretch, numbers = measure(table.cpu().numpy(), cast, matching)
    if numbers:
        numbers["value"] = value / float(table[-1, -1])
    return result.mul_(stretch), replace(
        nothing(0, len(rows), "exact"), dropped=cast.dropped, **numbers
    )


def factors(matching: Matching) -> Iterator[tuple[float, float]]:
    """d / g0 where a row disagrees and where none does: in the full form, in the one asked for."""
    kappa = matching.kappa
    full = max(1 - kappa, 0.0), 1 + kappa
    yield full
    yield full if matching.form == "full" else (-kappa if kappa < 1 else 0.0, kappa)


# --- what there is to say about it


def describe(played: list[Played], grams: Array, cast: Cast, matching: Matching) -> Matched:
    """The coefficients on the rows as they came in, and the numbers of the record."""
    own = np.concatenate([each.coefficients for each in played])  # [L, K]
    pairs = np.stack([own, np.broadcast_to(cast.shares, own.shape)], 2)  # [L, K, 2], d and g0
    images = grams @ pairs  # [L, K, 2], <g_i, d> and <g_i, g0> of each block
    table = np.concatenate([images.sum(0), (pairs.transpose(0, 2, 1) @ images).sum(0)])
    status = "; ".join(dict.fromkeys(each.status for each in played))
    stretch, numbers = measure(table, cast, matching, moved=status != NO_REFERENCE)
    if numbers:
        numbers["gap"] = sum(each.gap for each in played) / float(table[-1, -1])
        numbers["value"] = sum(each.value for each in played) / float(table[-1, -1])
    weights = np.stack([each.weights for each in played])
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return replace(
        nothing(len(own), len(cast.finite), status),
        coefficients=spread(stretch * own * cast.scales, cast),
        weights=spread(weights, cast),
        support=int((weights > 1e-6).any(0).sum()),
        entropy=abs(float((weights * logs).sum(1).mean())),
        iterations=sum(each.iterations for each in played),
        dropped=cast.dropped,
        **numbers,
    )


def measure(
    table: Array, cast: Cast, matching: Matching, moved: bool = True
) -> tuple[float, dict[str, Any]]:
    """What d is multiplied by, and numbers of the record, from products with d and with g0.

    The table [K + 2, 2] holds those of the K rows, then of d and of g0 themselves. Without a g0
    there is nothing to measure by.
    """
    (square, both), (_, reference) = table[-2:].tolist()
    if not moved or reference <= 0:
        return 1.0, {}
    length, rho = math.sqrt(max(square, 0.0)), math.sqrt(reference)
    stretch = stretched(length, rho, cast.current, matching)
    least, least_reference = (table[:-2][cast.large].min(0) / reference).tolist()
    return stretch, {
        "least": least,
        "least_reference": least_reference,
        "length": stretch * length / rho,
        "cosine": min(max(both / (length * rho), -1.0), 1.0) if length else 0.0,
    }


def stretched(length: float, rho: float, current: float, matching: Matching) -> float:
    """What brings d to the length asked for; a d that is no more than rounding stays."""
    if matching.length == "free":
        return 1.0
    if matching.length.startswith("1"):
        power = 2 if matching.length.endswith("2") else 1
        return 1 / (1 + matching.kappa**power)
    target = rho if matching.length == "reference" else current
    return target / length if length > LOST * rho else 1.0


def spread(values: Array, cast: Cast) -> Tensor:
    """Values of the finite rows among all rows; the others have 0.  # [L, all rows]"""
    whole = np.zeros((len(values), len(cast.finite)))
    whole[:, cast.finite] = values
    return torch.from_numpy(whole)


def nothing(blocks: int, rows: int, status: str) -> Matched:
    """A match without rows: d = 0."""
    zeros = torch.zeros(blocks, rows, dtype=torch.float64)
    return Matched(zeros, zeros, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0, rows, status)
