"""The certificate of a match: how far min_i <g_i, d> is from its maximum, at most."""

from dataclasses import dataclass

import numpy as np

from stamp_core.matching.simplex import SOLVED, Array, Mask

CANCELLED = 1e-7  # a sum of vectors shorter than this share of their norms is rounding error
DEGENERATE = 1e-7  # largest gap of a solved problem, relative to max_i |g_i| max |d|
NO_REFERENCE = "reference is zero"


@dataclass(frozen=True)
class Solution:
    """The solution of one block, in normalised gradients."""

    reference: Array  # [K], g0 = sum_i reference_i g_i
    weights: Array  # [K]
    shift: Array  # [K], d = g0 + sum_i shift_i g_i
    norms: Array  # [K]
    usable: Mask  # [K], the gradients that take part in this block
    iterations: int = 0

    def sums(self) -> Array:
        """The coefficients of g0, of the shift d - g0 and of g_w.  # [3, K]"""
        return np.array([self.reference, self.shift, self.weights])


@dataclass(frozen=True)
class Products:
    """Inner products of the gradients, g0, the shift d - g0 and g_w in one block."""

    with_reference: Array  # [K], of the gradients
    with_shift: Array  # [K]
    with_combined: Array  # [K]
    squares: Array  # [3], of g0, the shift and g_w
    reference_shift: float
    reference_combined: float
    rounding: float = 0.0  # of <u, v>, relative to U V with V = sum_i |v_i| |g_i|


@dataclass(frozen=True)
class Certified:
    """A solution whose d is in the ball, and what it is worth."""

    solution: Solution
    products: Products
    status: str
    share: float = 0.0  # of the shift that is in the ball: d = g0 + share * shift
    gap: float = 0.0
    value: float = 0.0  # F(w)
    bound: float = 0.0  # of rounding in the gap, which contains it

    def coefficients(self) -> Array:
        return self.solution.reference + self.share * self.solution.shift

    def with_d(self) -> Array:
        return self.share * self.products.with_shift + self.products.with_reference

    def reference_d(self) -> float:
        return self.share * self.products.reference_shift + float(self.products.squares[0])

    def square_d(self) -> float:
        shift_d = self.share * float(self.products.squares[1]) + self.products.reference_shift
        return self.share * shift_d + self.reference_d()

    def is_solved(self) -> bool:
        return self.gap <= SOLVED * float(self.products.squares[0])

    def is_precise(self) -> bool:
        """Whether rounding is as small, in the gap and in the squares of all four sums."""
        sums = np.vstack([self.solution.sums(), self.coefficients()])
        errors = self.products.rounding * (np.abs(sums) @ self.solution.norms) ** 2  # [4]
        squares = np.append(self.products.squares, self.square_d())
        return bool(self.bound <= SOLVED * squares[0] and (errors <= SOLVED * squares).all())


def certify(solution: Solution, products: Products, kappa: float, softmax: bool) -> Certified:
    """The solution with d pulled back into the ball, which rounding may have led out of.

    The d of softmax_sgd stays where it is; its gap is that of g0 + kappa |g0| g_w / |g_w|. The
    bound adds up the errors of F(w), where rounding V^2 of |v|^2 is rounding V^2 / |v| of |v|, and
    of the products with d. It holds where `is_precise`: products of errors are left out.
    """
    rho, length, combined = np.sqrt(np.maximum(products.squares, 0.0)).tolist()
    size, moved, mixed = (np.abs(solution.sums()) @ solution.norms).tolist()  # V of the three sums
    if not softmax and (rho <= CANCELLED * size or not solution.usable.any()):
        return Certified(solution, products, NO_REFERENCE)
    radius = kappa * rho
    value = products.reference_combined + radius * combined
    if softmax:
        moved = mixed
        share = radius / combined if combined else 0.0
        with_d = np.stack([products.with_reference, products.with_combined], 1) @ [1.0, share]
    else:
        share = radius / length if length > radius else 1.0
        with_d = np.stack([products.with_shift, products.with_reference], 1) @ [share, 1.0]
    bound = float(solution.norms.max()) * (2 * size + share * moved)
    if rho and combined:
        bound += kappa * (rho * mixed**2 / combined + combined * size**2 / rho)
    bound *= products.rounding
    gap = max(value - float(with_d[solution.usable].min()) + bound, 0.0)
    if softmax:
        return Certified(solution, products, "softmax_sgd", 1.0, gap, value, bound)
    tolerance = DEGENERATE * (rho + radius) * float(solution.norms.max())
    status = "exact"
    if gap > tolerance:
        status = "not solved to the end"
    elif solution.usable.sum() == 1:
        status = "one gradient"
    elif length < radius * (1 - 1e-6) and abs(value) <= tolerance:
        status = "pareto: projected on the cone"
    return Certified(solution, products, status, share, gap, value, bound)
