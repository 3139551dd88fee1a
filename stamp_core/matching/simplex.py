"""Gradient matching over the simplex: exactly, by least distances, and as in the public code."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from stamp_core.config.limits import Fraction, NonNegativeInt, Positive, PositiveInt

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
SOLVED = 1e-8  # duality gap, relative to |g0|^2, up to which a problem counts as solved
_UNREACHABLE = 1e-10  # squared residual up to which no vector is within the bounds
_ROUNDING = 1e-14  # of F, relative to its terms
_ITERATIONS = 100


@dataclass(frozen=True)
class Problem:
    """Maximise min_i <g_i, d> over |d - g0| <= radius, which F(w) bounds for w on the simplex."""

    gradients: Array  # [K, k], in an orthonormal basis
    reference: Array  # [k], g0
    radius: float
    resolution: float  # gradients are known up to this share of their norm

    @cached_property
    def norms(self) -> Array:
        """The norms of the gradients.  # [K]"""
        return np.asarray(np.linalg.norm(self.gradients, axis=1))

    @cached_property
    def directions(self) -> Array:
        """The gradients, each with norm 1.  # [K, k]"""
        return self.gradients / self.norms[:, None]

    @cached_property
    def reference_products(self) -> Array:
        return self.gradients @ self.reference  # [K], with g0

    def value(self, w: Array) -> float:
        """F(w) = <g_w, g0> + radius |g_w|, where g_w = sum_i w_i g_i."""
        combined = w @ self.gradients
        return float(combined @ self.reference) + self.radius * norm(combined)

    def rounding(self, w: Array) -> float:
        return float(_ROUNDING * w @ self.norms) * (self.radius + norm(self.reference))

    def worst_product(self, shift: Array) -> float:
        """The smallest <g_i, d> of d = g0 + sum_i shift_i g_i."""
        return float((self.gradients @ (self.reference + shift @ self.gradients)).min())


@dataclass(frozen=True)
class Optimum:
    """The best weights and the best d that were found."""

    weights: Array  # [K]
    shift: Array  # [K], d = g0 + sum_i shift_i g_i
    iterations: int


@dataclass(frozen=True)
class SoftmaxParams:
    """The optimiser of the public code: SGD with momentum on z, where w = softmax(z)."""

    rounds: NonNegativeInt = 100  # of SGD
    lr: Positive = 25.0  # of SGD
    momentum: Fraction = 0.5  # of SGD
    schedule: PositiveInt = 30  # rounds after which the learning rate decays
    decay: Positive = 0.5  # by this factor


def solve(problem: Problem) -> Optimum:
    """The optimum, by Newton's method on the worst product t.

    Let d(t) be the vector nearest to g0 with all <g_i, d> >= t, and v >= 0 the multipliers of
    d(t) = g0 + sum_i v_i g_i. At the optimal t, |d(t) - g0| is the radius; or t is 0, where d(0)
    is in the ball and no t > 0 has a d(t). As |d(t) - g0| is convex with slope sum v / |d(t) - g0|,
    Newton's step from above leads to t = F(v / sum v), which is again above the optimum.
    """
    count, iterations = len(problem.gradients), 0
    weights, shift = np.full(count, 1 / count), np.zeros(count)
    if not problem.radius:
        return Optimum(np.eye(count)[problem.reference_products.argmin()], shift, 0)
    value, worst = problem.value(weights), problem.worst_product(shift)
    while iterations < _ITERATIONS and value - worst > problem.rounding(weights):
        iterations += 1
        try:
            new_weights, new_shift = _nearest(problem, value)
        except RuntimeError:  # too many iterations: the gap shows how good the best so far is
            break
        if (new_worst := problem.worst_product(new_shift)) > worst:
            shift, worst = new_shift, new_worst
        new_value = problem.value(new_weights)
        if not new_weights.any() or new_value >= value - problem.rounding(weights):
            break
        weights, value = new_weights, new_value
    return Optimum(weights, shift, iterations)


def _nearest(problem: Problem, t: float) -> tuple[Array, Array]:
    """v / sum v, 0 if g0 is d(t), and the shift of d(t), if there is one, pulled into the ball."""
    bounds = (t - problem.reference_products) / (problem.radius * problem.norms)
    v, exists = least_distance(problem.directions, bounds, problem.resolution)
    share = exists / max(1.0, norm(v @ problem.directions))
    v = v / problem.norms
    return v / (v.sum() or 1.0), problem.radius * share * v


def norm(vector: Array) -> float:
    """The Euclidean norm, in a tenth of the time of numpy's where there are few numbers."""
    return math.sqrt(vector @ vector)


def least_distance(rows: Array, bounds: Array, resolution: float) -> tuple[Array, bool]:
    """Multipliers v >= 0 of the shortest u with rows @ u >= bounds, and whether there is one.

    It is u = v @ rows; without one, v @ rows = 0 and v @ bounds > 0. Rows have norm 1 and are known
    up to `resolution`. With E = (rows, bounds)', the last unit vector e and the minimiser x >= 0 of
    |E x - e|, v = x / (1 - x @ bounds). A ridge limits the multipliers of nearly opposite rows.
    """
    count, width = rows.shape
    size = max(1.0, float(np.abs(bounds).max()))
    target = np.zeros(width + 1 + count)
    target[width] = 1.0
    system = np.vstack([rows.T, bounds / size, 0.1 * resolution * np.eye(count)])
    x = nnls(system, target, maxiter=max(100, 20 * count))[0]
    residual = 1 - float(x @ bounds) / size
    if residual <= _UNREACHABLE:
        return x, False
    return x * (size / residual), True


def coordinates(gram: Array, resolution: float) -> Array:
    """Vectors with that Gram matrix, without axes below this share of the longest.  # [K, k]"""
    values, axes = np.linalg.eigh(gram)
    large = values > resolution**2 * values[-1]
    return np.asarray(axes[:, large] * np.sqrt(values[large]))


def softmax_descent(a: Array, b: Array, radius: float, softmax: SoftmaxParams) -> Array:
    """The best w = softmax(z) on the path of SGD on z from z = 0."""
    z, velocity = np.zeros(len(b)), np.zeros(len(b))
    best, smallest = z, math.inf
    for iteration in range(softmax.rounds + 1):
        w = np.exp(z - z.max())
        w /= w.sum()
        norm = math.sqrt(w @ a @ w + 1e-4)
        objective = b @ w + radius * norm
        if objective < smallest:
            best, smallest = w, objective
        slope = b + radius / norm * (a @ w)
        velocity = softmax.momentum * velocity + w * (slope - slope @ w)
        z = z - softmax.lr * softmax.decay ** (iteration // softmax.schedule) * velocity
    return best
