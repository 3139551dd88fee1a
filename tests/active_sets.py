"""A small quadratic program with lower bounds, solved by trying every active set."""

from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def best_active_set(matrix: Array, linear: Array, lower: float = 0.0) -> Array:
    """The v >= lower that minimises 0.5 v'Av + b'v for a regular A: the best of all active sets.

    In each of them some v are at the bound, and the others solve A_SS v_S = -(b_S + A_SN lower).
    """
    count = len(linear)
    minima = []
    for free in map(list, chain(*(combinations(range(count), k) for k in range(count + 1)))):
        v = np.full(count, lower)
        bound = [k for k in range(count) if k not in free]
        right = linear[free] + matrix[np.ix_(free, bound)] @ v[bound]
        v[free] = np.linalg.solve(matrix[np.ix_(free, free)], -right)
        if (v >= lower - 1e-12).all():
            minima.append((0.5 * v @ matrix @ v + linear @ v, tuple(v)))
    return np.array(min(minima)[1])
