"""The minimum of F(w) = <g_w, g0> + sum_l r_l |g_w^l| over the simplex, from inner products."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from stamp_core.config.decode import require_above, require_at_least, require_fraction

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
SOLVED = 1e-8  # relative duality gap up to which a problem counts as solved
_TOLERANCE = 1e-10  # relative duality gap at which the solver stops
_SINGULAR = 1e-7  # |g_w| below this share of a gradient's norm counts as 0
_RIDGE = 1e-13  # relative; keeps faces of linearly dependent gradients solvable
_SMALL = 24  # gradients; up to here the active set needs no start from the accelerated gradient
_NEGLIGIBLE = 1e-13  # weights that rounding leaves instead of 0
_ROUNDING = 1e-14  # of F, relative to its terms
_PATIENCE = 10  # faces in succession that do not lower F
_ITERATIONS = 150  # of the accelerated gradient


@dataclass(frozen=True)
class Problem:
    """Minimise F(w) = linear . w + sum_l radii_l |g_w^l| over the simplex, |g_w^l|^2 = w'A_l w."""

    grams: Array  # [L, K, K], A_l, scaled so that a squared norm is about 1
    linear: Array  # [K], <g_i, g0>
    radii: Array  # [L]
    unit: float  # |g0|^2, which gaps are relative to

    def evaluate(self, w: Array) -> tuple[float, Array, Array]:
        """F, its gradient <g_i, d(w)> [K] and the norms |g_w^l| [L]."""
        products = self.grams @ w  # [L, K]
        norms = np.sqrt(np.maximum(products @ w, 0.0))
        gradient = self.linear + multipliers(self.radii, norms) @ products
        return float(self.linear @ w + self.radii @ norms), gradient, norms

    def rounding(self, w: Array, value: float) -> float:
        """The rounding error of F, which is `value` at `w`."""
        return _ROUNDING * (float(np.abs(self.linear) @ w) + abs(value))

    def singular(self, w: Array) -> bool:
        """Whether g_w = 0, so that F has no gradient."""
        return not multipliers(self.radii, self.evaluate(w)[2]).any()

    def stationary(self, w: Array) -> bool:
        """Whether F = 0, as at g_w = 0, where F's gradient is no certificate of the minimum."""
        return self.singular(w) or abs(self.evaluate(w)[0]) <= SOLVED * self.unit

    def gap(self, w: Array) -> float:
        """The duality gap F(w) - min_i <g_i, d(w)>, relative to |g0|^2."""
        value, gradient, _ = self.evaluate(w)
        return (value - float(gradient.min())) / self.unit


@dataclass(frozen=True)
class SoftmaxParams:
    """The optimiser of the public code: SGD with momentum on z, where w = softmax(z)."""

    rounds: int = 100
    lr: float = 25.0
    momentum: float = 0.5
    schedule: int = 30  # rounds after which the learning rate decays
    decay: float = 0.5  # by this factor

    def __post_init__(self) -> None:
        """Refuse values with which SGD cannot descend."""
        require_at_least(self, 0, "rounds")
        require_at_least(self, 1, "schedule")
        require_above(self, 0, "lr", "decay")
        require_fraction(self, "momentum")


@dataclass(frozen=True)
class SimplexMinimum:
    """The minimiser of F, or the best point that the solver reached."""

    weights: Array  # [K]
    iterations: int
    cone: Array | None = None  # [K]; where g_w = 0: d = g0 + sum_i cone_i g_i instead


def multipliers(radii: Array, norms: Array) -> Array:
    """lambda_l = r_l / |g_w^l| of d = g0 + sum_l lambda_l g_w^l, and 0 where g_w^l = 0."""
    return np.asarray(radii / np.where(norms > _SINGULAR, norms, math.inf))


def minimise_on_simplex(problem: Problem) -> SimplexMinimum:
    """The minimiser; where g_w = 0 there, with the projection of g0 on {d: all <g_i, d> >= 0}.

    At g_w = 0, F is 0 and has a kink, which is not always the minimum. Let v be the minimiser of
    |g0 + sum_i v_i g_i| over v >= 0 and p that projection: F at v / sum v has the sign of
    radius - |p - g0|. If it is negative, descent from there never returns to g_w = 0. Otherwise p
    lies in the ball and all <g_i, p> >= 0 = F: p is the best d.
    """
    count = len(problem.linear)
    if not problem.radii.any():
        return SimplexMinimum(np.eye(count)[problem.linear.argmin()], 0)
    if count == 1:
        return SimplexMinimum(np.ones(1), 0)
    if count == 2 and len(problem.radii) == 1:
        w, iterations = _minimise_pair(problem), 1
    else:
        w, iterations = _descend(problem, np.full(count, 1 / count))
    if problem.gap(w) <= SOLVED and not problem.singular(w):
        return SimplexMinimum(w, iterations)
    cone = _project_on_cone(problem.grams.sum(0), problem.linear)
    if cone.any() and problem.evaluate(cone / cone.sum())[0] < -SOLVED * problem.unit:
        w, more = _descend(problem, cone / cone.sum())
        return SimplexMinimum(w, iterations + more)
    return SimplexMinimum(w, iterations, cone if problem.stationary(w) else None)


def _minimise_pair(problem: Problem) -> Array:
    """The minimiser for two gradients: F is linear plus the norm of g_2 + x (g_1 - g_2)."""
    (a, h), (_, b) = problem.grams[0].tolist()
    first, second = problem.linear.tolist()
    square, offset = a + b - 2 * h, h - b  # |u|^2 and <g_2, u> of u = g_1 - g_2
    if square <= 4 * _RIDGE * (a + b):
        return np.array([0.5, 0.5])
    slope = (second - first) / (problem.radii[0] * math.sqrt(square))
    if abs(slope) >= 1:
        x = 1.0 if slope > 0 else 0.0
    else:
        height = math.sqrt(max(b - offset * offset / square, 0.0))
        x = height * slope / math.sqrt((1 - slope * slope) * square) - offset / square
    x = min(max(x, 0.0), 1.0)
    return np.array([x, 1 - x])


def _descend(problem: Problem, w: Array) -> tuple[Array, int]:
    """The minimiser from `w` on, and the number of iterations."""
    total = 0
    for limit in (_ITERATIONS if len(w) > _SMALL else 0, 10 * _ITERATIONS):
        w, first_order = _accelerated_gradient(problem, w, limit)
        w, second_order = _active_set(problem, w)
        total += first_order + second_order
        if problem.gap(w) <= SOLVED or problem.stationary(w):
            break
    return w, total


def _accelerated_gradient(problem: Problem, w: Array, limit: int) -> tuple[Array, int]:
    """Projected gradient with momentum, which restarts when it points uphill (FISTA)."""
    point, momentum, lipschitz, iterations = w, 1.0, 1.0, 0
    while iterations < limit and (iterations % 10 or problem.gap(w) > _TOLERANCE):
        value, gradient, _ = problem.evaluate(point)
        while True:
            new = project_simplex(point - gradient / lipschitz)
            step = new - point
            bound = value + gradient @ step + lipschitz / 2 * (step @ step)
            if problem.evaluate(new)[0] <= bound + 1e-15 * abs(value):
                break
            lipschitz *= 2
        if gradient @ (new - w) > 0:
            momentum = 1.0
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        point, momentum = new + (momentum - 1) / following * (new - w), following
        w, lipschitz, iterations = new, lipschitz * 0.9, iterations + 1
    return w, iterations


def project_simplex(v: Array) -> Array:
    """The point of the simplex nearest to `v`."""
    v = v - v.max()  # so that adding 1 is not lost in large numbers
    descending = -np.sort(-v)
    levels = (np.cumsum(descending) - 1) / np.arange(1, len(v) + 1)
    return np.asarray(np.maximum(v - levels[np.flatnonzero(descending > levels)[-1]], 0.0))


def _active_set(problem: Problem, w: Array) -> tuple[Array, int]:
    """Minimise on one face after another, and count them.

    A gradient whose weight reaches 0 leaves the support; the worst-served gradient enters.
    """
    w = np.where(w > _NEGLIGIBLE, w, 0.0)
    w /= w.sum()
    step = _minimise_on_plane if len(problem.radii) == 1 else _newton_step
    support, best, smallest = w > 0, w, math.inf
    idle, stuck, iterations = 0, False, 0
    while True:
        value, gradient, _ = problem.evaluate(w)
        gap = value - float(gradient.min())
        if gap < smallest:
            best, smallest = w, gap
        if gap <= _TOLERANCE * problem.unit or idle > _PATIENCE:
            return best, iterations
        if problem.stationary(w):
            return w, iterations
        if stuck or np.abs(gradient[support] - value).max() < 1e-3 * gap:
            support[gradient.argmin()] = True
        face = np.flatnonzero(support)
        target = np.zeros_like(w)
        grams, linear = problem.grams[:, face[:, None], face], problem.linear[face]
        target[face] = step(replace(problem, grams=grams, linear=linear), w[face])
        w = _line_search(problem, w, target, value + problem.rounding(w, value))
        decreased = problem.evaluate(w)[0] < value - problem.rounding(w, value)
        idle = 0 if decreased else idle + 1
        stuck = idle > 0 and bool((w[face] > 0).all())  # this is the minimum of the face
        support = w > 0
        iterations += 1


def _minimise_on_plane(problem: Problem, w: Array) -> Array:
    """The minimum of F of one block on the plane sum w = 1, or a point on a descending ray.

    There, linear + radius A w / |g_w| = F 1. So w is along F y - z with y = A^-1 1 and
    z = A^-1 linear, and |g_w|^2 = w'A w gives F^2 1'y - 2 F 1'z + linear'z = radius^2, of which
    F is the larger root. Without a root F decreases without end along y 1'z / 1'y - z.
    """
    linear, radius = problem.linear, float(problem.radii[0])
    y, z = _solve_twice(problem.grams[0], linear)
    a, h = y.sum(), z.sum()
    root = h * h - a * (linear @ z - radius**2)
    if root > 0:
        return np.asarray(((h + math.sqrt(root)) / a * y - z) / math.sqrt(root))
    ray = h / a * y - z
    shrinks = ray < 0
    if not shrinks.any():
        return w
    return np.asarray(w + 2 * (w[shrinks] / -ray[shrinks]).min() * ray)  # beyond the first bound


def _newton_step(problem: Problem, w: Array) -> Array:
    """The minimum on the plane sum w = 1 of the quadratic with F's gradient and Hessian at `w`."""
    _, gradient, norms = problem.evaluate(w)
    products = problem.grams @ w  # [L, K]
    lambdas = multipliers(problem.radii, norms)
    scaled = products * (lambdas / np.maximum(norms, _SINGULAR) ** 2)[:, None]
    hessian = np.tensordot(lambdas, problem.grams, 1) - scaled.T @ products
    size = hessian.trace() / len(w)
    if size <= _RIDGE * float(lambdas.max()):
        # F is linear: the minimum is at the vertex with the steepest descent.
        return np.asarray(np.eye(len(w))[gradient.argmin()])
    hessian += size  # a multiple of 11', which is 0 for steps inside the plane
    y, z = _solve_twice(hessian, gradient)
    return np.asarray(w + z.sum() / y.sum() * y - z)


def _solve_twice(matrix: Array, linear: Array) -> Array:
    """matrix^-1 times 1 and times `linear`.  # [2, K]"""
    ridge = matrix + np.diag(_RIDGE * matrix.diagonal())
    return np.asarray(np.linalg.solve(ridge, np.stack([np.ones_like(linear), linear], 1)).T)


def _line_search(problem: Problem, w: Array, target: Array, ceiling: float) -> Array:
    """A point from `w` to `target`, not beyond the first bound, where F is at most `ceiling`."""
    step = target - w
    bounds = np.divide(w, -step, out=np.full_like(w, math.inf), where=step < 0)
    first = bounds.argmin()
    share = min(1.0, float(bounds[first]))
    while share > 1e-9:
        new = np.maximum(w + share * step, 0.0)
        if share == bounds[first]:
            new[first] = 0.0
        new /= new.sum()
        if problem.evaluate(new)[0] <= ceiling:
            return new
        share /= 2
    return w


def _project_on_cone(gram: Array, linear: Array) -> Array:
    """The v >= 0 for which g0 + sum_i v_i g_i is the projection of g0 on {d: all <g_i, d> >= 0}."""
    values, vectors = np.linalg.eigh(gram)
    nonzero = values > 1e-14 * values[-1]
    roots, axes = np.sqrt(values[nonzero]), vectors.T[nonzero]
    basis = roots[:, None] * axes  # the gradients in the space that they span
    return np.asarray(nnls(basis, -(axes @ linear) / roots, maxiter=100 * len(linear))[0])


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
