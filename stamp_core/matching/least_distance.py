"""Least distance programming: the shortest vector within linear bounds (Lawson and Hanson)."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
_UNREACHABLE = 1e-10  # squared residual up to which no vector is within the bounds


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
