"""The least value of <g_w, g0> + sum_l r_l |g_w^l| over the simplex, from inner products alone."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from stamp_core.config import above, at_least, fraction

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
TOLERANCE = 1e-10  # aimed at; SOLVED is what counts
SOLVED = 1e-8
SINGULAR = 1e-7  # |g_w| below this share of a row's length has no direction
RIDGE = 1e-13  # relative; keeps faces of dependent rows solvable
MANY = 24  # rows; up to here the active set needs no help to find the support
DUST = 1e-13  # weights that rounding leaves instead of 0
ROUNDING = 1e-14  # of F, relative to its terms
PATIENCE = 10  # faces in a row that bring F no lower
ROUNDS = 150  # of the accelerated gradient


@dataclass(frozen=True)
class Problem:
    """Minimise F(w) = linear . w + sum_l radii_l |g_w^l| over the simplex, |g_w^l|^2 = w'A_l w."""

    grams: Array  # [L, K, K], scaled so that a squared row length is about 1
    linear: Array  # [K], <g_i, g0>
    radii: Array  # [L]
    unit: float  # |g0|^2, which gaps are relative to

    def at(self, w: Array) -> tuple[float, Array, Array]:
        """F, its gradient <g_i, d(w)> [K] and the lengths |g_w^l| [L]."""
        images = self.grams @ w  # [L, K]
        lengths = np.sqrt(np.maximum(images @ w, 0.0))
        gradient = self.linear + slopes(self.radii, lengths) @ images
        return float(self.linear @ w + self.radii @ lengths), gradient, lengths

    def rounding(self, w: Array, value: float) -> float:
        """Changes of F from `value` at `w` that mean nothing."""
        return ROUNDING * (float(np.abs(self.linear) @ w) + abs(value))

    def singular(self, w: Array) -> bool:
        """Whether g_w has no direction left."""
        return not slopes(self.radii, self.at(w)[2]).any()

    def kinked(self, w: Array) -> bool:
        """Whether F is 0 there, as it is where g_w = 0, so that its slope may say little."""
        return self.singular(w) or abs(self.at(w)[0]) <= SOLVED * self.unit

    def restricted(self, inside: NDArray[np.intp]) -> "Problem":
        """The same problem among some of the rows."""
        grams = self.grams[:, inside[:, None], inside]
        return Problem(grams, self.linear[inside], self.radii, self.unit)

    def gap(self, w: Array) -> float:
        """F(w) less the least <g_i, d(w)>: the distance to the optimum is no larger."""
        value, gradient, _ = self.at(w)
        return (value - float(gradient.min())) / self.unit


@dataclass(frozen=True)
class Softmax:
    """The optimiser of the public code: SGD with momentum on z, where w = softmax(z)."""

    rounds: int = 100
    rate: float = 25.0
    momentum: float = 0.5
    schedule: int = 30  # rounds after which the rate shrinks
    decay: float = 0.5  # by this factor

    def __post_init__(self) -> None:
        """Refuse what cannot descend."""
        at_least(self, 0, "rounds")
        at_least(self, 1, "schedule")
        above(self, 0, "rate", "decay")
        fraction(self, "momentum")


@dataclass(frozen=True)
class Found:
    """Where F is least, as far as it was found."""

    weights: Array  # [K]
    iterations: int
    cone: Array | None = None  # [K]: where g_w = 0, d = g0 + sum_i cone_i g_i instead


def slopes(radii: Array, lengths: Array) -> Array:
    """radii / lengths, and 0 where g_w has no direction: any d in the ball is a subgradient."""
    return np.asarray(radii / np.where(lengths > SINGULAR, lengths, math.inf))


def minimise(problem: Problem) -> Found:
    """The minimiser; where it has no direction, the projection of g0 on {d: all <g_i, d> >= 0}."""
    count = len(problem.linear)
    if not problem.radii.any():
        return Found(np.eye(count)[problem.linear.argmin()], 0)
    if count == 1:
        return Found(np.ones(1), 0)
    if count == 2 and len(problem.radii) == 1:
        w, rounds = pair(problem), 1
    else:
        w, rounds = descend(problem, np.full(count, 1 / count))
    if problem.gap(w) <= SOLVED and not problem.singular(w):
        return Found(w, rounds)
    return without_direction(problem, Found(w, rounds))


def without_direction(problem: Problem, found: Found) -> Found:
    """The minimiser where g_w = 0 was met: F = 0 and a kink there, but not always the least.

    With v = argmin |g0 + sum_i v_i g_i| over v >= 0, p that projection and m = |p - g0|, F at
    v / sum v has the sign of radius - m. If it is below 0, descending from there never meets
    g_w = 0 again. Otherwise p lies in the ball and all <g_i, p> >= 0 = F: it is the best d.
    """
    cone = project_cone(problem.grams.sum(0), problem.linear)
    if cone.any() and problem.at(cone / cone.sum())[0] < -SOLVED * problem.unit:
        w, rounds = descend(problem, cone / cone.sum())
        return Found(w, found.iterations + rounds)
    if problem.kinked(found.weights):
        return replace(found, cone=cone)
    return found


def pair(problem: Problem) -> Array:
    """The minimiser for two rows: F is linear plus the length of g_2 + x (g_1 - g_2)."""
    (a, h), (_, b) = problem.grams[0].tolist()
    first, second = problem.linear.tolist()
    square, lean = a + b - 2 * h, h - b  # |u|^2 and <g_2, u> of u = g_1 - g_2
    if square <= 4 * RIDGE * (a + b):
        return np.array([0.5, 0.5])
    slope = (second - first) / (problem.radii[0] * math.sqrt(square))
    if abs(slope) >= 1:
        x = 1.0 if slope > 0 else 0.0
    else:
        height = math.sqrt(max(b - lean * lean / square, 0.0))
        x = height * slope / math.sqrt((1 - slope * slope) * square) - lean / square
    x = min(max(x, 0.0), 1.0)
    return np.array([x, 1 - x])


def descend(problem: Problem, w: Array) -> tuple[Array, int]:
    """The minimiser from `w` on, and how many iterations it took."""
    total = 0
    for rounds in (ROUNDS if len(w) > MANY else 0, 10 * ROUNDS):
        w, slow = accelerated(problem, w, rounds)
        w, fast = active_set(problem, w)
        total += slow + fast
        if problem.gap(w) <= SOLVED or problem.kinked(w):
            break
    return w, total


def accelerated(problem: Problem, w: Array, most: int) -> tuple[Array, int]:
    """Projected gradient with momentum, which starts anew when it points uphill."""
    point, speed, bound, rounds = w, 1.0, 1.0, 0
    while rounds < most and (rounds % 10 or problem.gap(w) > TOLERANCE):
        value, gradient, _ = problem.at(point)
        while True:
            new = project_simplex(point - gradient / bound)
            step = new - point
            ceiling = value + gradient @ step + bound / 2 * (step @ step)
            if problem.at(new)[0] <= ceiling + 1e-15 * abs(value):
                break
            bound *= 2
        if gradient @ (new - w) > 0:
            speed = 1.0
        faster = (1 + math.sqrt(1 + 4 * speed**2)) / 2
        point, speed = new + (speed - 1) / faster * (new - w), faster
        w, bound, rounds = new, bound * 0.9, rounds + 1
    return w, rounds


def project_simplex(v: Array) -> Array:
    """The point of the simplex nearest to `v`."""
    v = v - v.max()  # so that adding 1 is not lost beside large numbers
    falling = -np.sort(-v)
    levels = (np.cumsum(falling) - 1) / np.arange(1, len(v) + 1)
    return np.asarray(np.maximum(v - levels[np.flatnonzero(falling > levels)[-1]], 0.0))


def active_set(problem: Problem, w: Array) -> tuple[Array, int]:
    """Go to the lowest point of face after face: a row that hits 0 leaves, the worst one enters."""
    w = np.where(w > DUST, w, 0.0)
    w /= w.sum()
    support, best, least = w > 0, w, math.inf
    idle, stuck, rounds = 0, False, 0
    while True:
        value, gradient, _ = problem.at(w)
        gap = value - float(gradient.min())
        if gap < least:
            best, least = w, gap
        if gap <= TOLERANCE * problem.unit or idle > PATIENCE:
            return best, rounds
        if problem.kinked(w):
            return w, rounds
        if stuck or np.abs(gradient[support] - value).max() < 1e-3 * gap:
            support[gradient.argmin()] = True
        inside = np.flatnonzero(support)
        target = np.zeros_like(w)
        target[inside] = lowest(problem.restricted(inside), w[inside])
        w = toward(problem, w, target, value + problem.rounding(w, value))
        fell = problem.at(w)[0] < value - problem.rounding(w, value)
        idle = 0 if fell else idle + 1
        stuck = idle > 0 and bool((w[inside] > 0).all())  # as low as this face gets
        support = w > 0
        rounds += 1


def lowest(problem: Problem, w: Array) -> Array:
    """The lowest point of a face, or a step toward it; it may lie outside the simplex."""
    if len(problem.radii) == 1:
        return plane(problem.grams[0], problem.linear, float(problem.radii[0]), w)
    return newton(problem, w)


def plane(gram: Array, linear: Array, radius: float, w: Array) -> Array:
    """Where F is least on the plane sum w = 1; else a point on a ray along which F never rises.

    There, linear + radius A w / |g_w| = F 1. So w is along F y - z with y = A^-1 1 and
    z = A^-1 linear, and |g_w|^2 = w'A w gives F^2 1'y - 2 F 1'z + linear'z = radius^2, of which
    F is the larger root. Without a root F falls forever along y 1'z / 1'y - z.
    """
    y, z = inverse(gram, linear)
    a, h = y.sum(), z.sum()
    root = h * h - a * (linear @ z - radius**2)
    if root > 0:
        return np.asarray(((h + math.sqrt(root)) / a * y - z) / math.sqrt(root))
    ray = h / a * y - z
    shrinks = ray < 0
    if not shrinks.any():
        return w
    return np.asarray(w + 2 * (w[shrinks] / -ray[shrinks]).min() * ray)  # past the first bound


def newton(problem: Problem, w: Array) -> Array:
    """Where a quadratic with F's slope and curvature at `w` is least on the plane sum w = 1."""
    _, gradient, lengths = problem.at(w)
    images = problem.grams @ w  # [L, K]
    weights = slopes(problem.radii, lengths)
    turned = images * (weights / np.maximum(lengths, SINGULAR) ** 2)[:, None]
    curvature = np.tensordot(weights, problem.grams, 1) - turned.T @ images
    size = curvature.trace() / len(w)
    if size <= RIDGE * float(weights.max()):  # straight: toward the corner where F falls most
        return np.asarray(np.eye(len(w))[gradient.argmin()])
    curvature += size  # 11', which no step inside the plane notices
    y, z = inverse(curvature, gradient)
    return np.asarray(w + z.sum() / y.sum() * y - z)


def inverse(matrix: Array, linear: Array) -> Array:
    """matrix^-1 times 1 and times `linear`.  # [2, K]"""
    ridge = matrix + np.diag(RIDGE * matrix.diagonal())
    return np.asarray(np.linalg.solve(ridge, np.stack([np.ones_like(linear), linear], 1)).T)


def toward(problem: Problem, w: Array, target: Array, ceiling: float) -> Array:
    """From `w` toward `target`, up to the first bound; half as far while F is over the ceiling."""
    move = target - w
    shares = np.divide(w, -move, out=np.full_like(w, math.inf), where=move < 0)
    first = shares.argmin()
    share = min(1.0, float(shares[first]))
    while share > 1e-9:
        new = np.maximum(w + share * move, 0.0)
        if share == shares[first]:
            new[first] = 0.0
        new /= new.sum()
        if problem.at(new)[0] <= ceiling:
            return new
        share /= 2
    return w


def project_cone(gram: Array, linear: Array) -> Array:
    """The v >= 0 for which g0 + sum_i v_i g_i is the projection of g0 on {d: all <g_i, d> >= 0}."""
    values, vectors = np.linalg.eigh(gram)
    kept = values > 1e-14 * values[-1]
    lengths, axes = np.sqrt(values[kept]), vectors.T[kept]
    short = lengths[:, None] * axes  # rows in as many dimensions as they have
    return np.asarray(nnls(short, -(axes @ linear) / lengths, maxiter=100 * len(linear))[0])


def softmax_descent(a: Array, b: Array, radius: float, softmax: Softmax) -> Array:
    """The best w = softmax(z) that SGD on z comes across, from z = 0 on."""
    z, velocity = np.zeros(len(b)), np.zeros(len(b))
    best, least = z, math.inf
    for rounds in range(softmax.rounds + 1):
        w = np.exp(z - z.max())
        w /= w.sum()
        length = math.sqrt(w @ a @ w + 1e-4)
        objective = b @ w + radius * length
        if objective < least:
            best, least = w, objective
        slope = b + radius / length * (a @ w)
        velocity = softmax.momentum * velocity + w * (slope - slope @ w)
        z = z - softmax.rate * softmax.decay ** (rounds // softmax.schedule) * velocity
    return best
