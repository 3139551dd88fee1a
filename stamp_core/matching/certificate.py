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
        return np.stack([self.reference, self.shift, self.weights])


@dataclass(frozen=True)
class Products:
    """Inner products of the gradients, g0, the shift d - g0 and g_w in one block."""

    with_reference: Array  # [K], of the gradients
    with_shift: Array  # [K]
    with_combined: Array  # [K]
    squares: Array  # [3], of g0, the shift and g_w
    reference_shift: float
    reference_combined: float
    rounding: float = 0.0  # of each, relative to the norms of the gradients in both sums


@dataclass(frozen=True)
class Certified:
    """A solution whose d is in the ball, and what it is worth."""

    solution: Solution
    products: Products
    status: str
    share: float = 0.0  # of the shift that is in the ball: d = g0 + share * shift
    gap: float = 0.0
    value: float = 0.0  # F(w)
    bound: float = 0.0  # of the gap's rounding, which it contains

    def coefficients(self) -> Array:
        """Those of d in the gradients.  # [K]"""
        return self.solution.reference + self.share * self.solution.shift

    def with_d(self) -> Array:
        """The inner products of the gradients with d.  # [K]"""
        return self.share * self.products.with_shift + self.products.with_reference

    def reference_d(self) -> float:
        """<g0, d>."""
        return self.share * self.products.reference_shift + float(self.products.squares[0])

    def square_d(self) -> float:
        """|d|^2."""
        shift_d = self.share * float(self.products.squares[1]) + self.products.reference_shift
        return self.share * shift_d + self.reference_d()

    def is_solved(self) -> bool:
        """Whether the gap is as small as the solver leaves it."""
        return self.gap <= SOLVED * float(self.products.squares[0])

    def is_precise(self) -> bool:
        """Whether rounding changes |g0|^2, |d|^2 and the gap, relative to |g0|^2, by that at most.

        Otherwise the gradients nearly cancel out in a sum.
        """
        sizes = np.abs([self.solution.reference, self.coefficients()]) @ self.solution.norms
        errors = self.products.rounding * sizes**2  # [2]
        squares = np.array([self.products.squares[0], self.square_d()])
        return bool(self.bound <= SOLVED * squares[0] and (errors <= SOLVED * squares).all())


def certify(solution: Solution, products: Products, kappa: float, softmax: bool) -> Certified:
    """The solution with d pulled back into the ball, which rounding may have led out of.

    The d of softmax_sgd stays where it is; its gap is that of g0 + kappa |g0| g_w / |g_w|.

    With V = sum_i |v_i| |g_i| for a sum v of gradients, <u, v> is known up to rounding U V, |v|^2
    up to rounding V^2, and |v| up to that over |v|, or up to its root. The bound adds up the errors
    of F(w) and of the products with d, which is in the smallest ball that g0 may have.
    """
    sizes = np.abs(solution.sums()) @ solution.norms  # [3]
    norms = np.sqrt(np.maximum(products.squares, 0.0))
    errors = _norm_errors(norms, products.rounding * sizes**2)
    rho, _, combined = norms.tolist()
    if not softmax and (rho <= CANCELLED * sizes[0] or not solution.usable.any()):
        return Certified(solution, products, NO_REFERENCE)
    value = products.reference_combined + kappa * rho * combined
    moved = 2 if softmax else 1  # the sum that d is moved along
    longest = norms[moved] + errors[moved]
    share = float(kappa * (rho - errors[0]) / longest) if longest else 1.0
    share = share if softmax else min(1.0, share)
    pair = (products.with_shift, products.with_reference)
    factors = [share, 1.0]
    if softmax:
        pair = (products.with_reference, products.with_combined)
        factors = [1.0, share]
    with_d = np.stack(pair, 1) @ factors
    worst = float(with_d[solution.usable].min())
    bound = sizes[0] * sizes[2] + solution.norms.max() * (sizes[0] + abs(share) * sizes[moved])
    lengths = errors[0] * combined + (rho + errors[0]) * errors[2]
    bound = float(products.rounding * bound + kappa * lengths)
    gap = max(value - worst + bound, 0.0)
    status = "softmax_sgd" if softmax else _status(solution, norms, kappa, gap, value)
    return Certified(solution, products, status, 1.0 if softmax else share, gap, value, bound)


def _norm_errors(norms: Array, errors: Array) -> Array:
    """The errors of norms from those of their squares.  # [3]"""
    largest = np.maximum(norms, np.sqrt(errors))
    return errors / np.where(largest > 0, largest, 1.0)


def _status(solution: Solution, norms: Array, kappa: float, gap: float, value: float) -> str:
    """What kind of solution it is; `norms` are those of g0, the shift and g_w."""
    radius = kappa * float(norms[0])
    tolerance = DEGENERATE * (float(norms[0]) + radius) * float(solution.norms.max())
    if gap > tolerance:
        return "not solved to the end"
    if solution.usable.sum() == 1:
        return "one gradient"
    if norms[1] < radius * (1 - 1e-6) and abs(value) <= tolerance:
        return "pareto: projected on the cone"
    return "exact"
