"""The nearest vector that agrees with given rows: a small quadratic program over inner products."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from stamp_core.rows import Difference, Vector, combine, gram

Array = NDArray[np.float64]
SOLVED = 1e-6  # residuals are cosines
CUTS = (1e-8, 1e-11, 1e-14)  # eigenvalues below that share of the largest are taken for 0
NOT_FINITE, NOT_SOLVED = "not finite", "not solved"


class Double(Difference):
    """A vector in float64, formed piece by piece where it is looked at.

    Two rows that point almost against each other get large multipliers, and what sums in float32
    leave of their inner products is noise.
    """

    def __init__(self, vector: Vector) -> None:
        self.vector = vector
        self.shape, self.dtype, self.device = vector.shape, torch.float64, vector.device

    def __len__(self) -> int:
        """How many elements there are."""
        return len(self.vector)

    def narrow(self, dimension: int, start: int, length: int) -> Tensor:
        """A piece, as of a tensor."""
        return self.vector.narrow(dimension, start, length).double()


@dataclass(frozen=True)
class Correction:
    """What a vector lacks to agree with the rows."""

    added: Tensor | None  # float64 [P]; None where there is nothing to add
    troubles: tuple[str, ...] = ()  # why some blocks were left as they are


@dataclass(frozen=True)
class Found:
    """The minimiser of a quadratic program, as far as it was found."""

    v: Array  # [K]
    residual: float = 0.0
    trouble: str = ""


def correction(
    vector: Tensor,
    rows: Sequence[Vector],
    sizes: Sequence[int] | None = None,
    *,
    rho: float = 0.0,
    ridge: float = 0.0,
    margin: float = 0.0,
) -> Correction:
    """What to add to the vector so that <row, result> >= rho |row| |vector| in every block.

    It is sum_k v_k row_k with v = argmin 0.5 v'(A + ridge) v + b'v over v >= margin, where A is
    the rows' Gram matrix and b_k = <row_k, vector> - rho |row_k| |vector|; nothing if all b >= 0.
    """
    exact = [Double(row) for row in (*rows, vector)]
    grams = gram(exact, sizes).numpy()  # [L, K + 1, K + 1]
    found = [multipliers(each, rho, ridge, margin) for each in grams]
    shares = torch.from_numpy(np.stack([each.v for each in found]))
    added = combine(exact[:-1], shares, sizes) if shares.any() else None
    troubles = tuple(sorted({each.trouble for each in found if each.trouble}))
    return Correction(added, troubles)


def multipliers(gram: Array, rho: float, ridge: float, margin: float) -> Found:
    """The multipliers v of the rows before the last one, which is the vector."""
    nothing = np.zeros(len(gram) - 1)
    if not np.isfinite(gram).all():
        return Found(nothing, trouble=NOT_FINITE)
    lengths = np.sqrt(gram.diagonal())
    rows, size = lengths[:-1], float(lengths[-1])
    linear = np.where(rows > 0, gram[:-1, -1] - rho * size * rows, 0.0)
    if (linear >= 0).all():
        return Found(nothing)
    matrix = gram[:-1, :-1] + ridge * np.eye(len(rows))
    found = minimise(matrix, linear, margin, size + margin * float(rows.sum()))
    if found.residual > SOLVED:  # with rho > 0 there may be no vector that fits
        return Found(nothing, found.residual, NOT_SOLVED)
    return found


def minimise(matrix: Array, linear: Array, lower: float = 0.0, size: float = 1.0) -> Found:
    """The v >= lower where 0.5 v'Av + b'v is least, and how far it is from optimal.

    `size` is the length of what b holds the products with: the residual is relative to it and to
    the lengths of the rows, which are the roots of A's diagonal. A row without a length has no say.
    """
    lengths = np.sqrt(matrix.diagonal())
    inside = np.flatnonzero(lengths > 0)
    v = np.full(len(linear), lower)
    if not len(inside):
        return Found(v)
    scale = lengths[inside]
    slopes = (linear + lower * matrix.sum(1))[inside] / (scale * size)
    u, residual = cone(matrix[np.ix_(inside, inside)] / np.outer(scale, scale), slopes)
    v[inside] += u * size / scale
    return Found(v, residual)


def cone(matrix: Array, linear: Array) -> tuple[Array, float]:
    """The u >= 0 where 0.5 u'Au + b'u is least, and the largest |min(u, Au + b)|.

    With A = S'S it is where |S u + y| is least, S'y = b. Directions in which rows that depend on
    each other differ by rounding alone are left out, unless the residual says that they count.
    """
    values, axes = np.linalg.eigh(matrix)
    best, least = np.zeros(len(linear)), np.inf
    for cut in CUTS:
        kept = values > cut * values[-1]  # never empty, as scipy's nnls must not be
        roots, basis = np.sqrt(values[kept]), axes.T[kept]
        try:
            u = nnls(roots[:, None] * basis, -(basis @ linear) / roots, maxiter=1000)[0]
        except RuntimeError:  # too many iterations
            continue
        residual = float(np.abs(np.minimum(u, matrix @ u + linear)).max())
        if residual < least:
            best, least = u, residual
        if least <= SOLVED:
            break
    return best, least
