"""Comparisons of many methods: rank correlation, p-values of intervals, Holm's correction."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

Values = NDArray[np.float64]
LEVEL = 0.05


def rank_correlation(a: Iterable[float], b: Iterable[float]) -> dict[str, float]:
    """Spearman's ρ with its 95 % interval (Bonett and Wright, 2000), from 4 methods on."""
    ranks = pd.DataFrame({"a": [*a], "b": [*b]}).rank()
    n, rho = len(ranks), float(ranks.a.corr(ranks.b))
    half = 1.96 * np.sqrt((1 + rho**2 / 2) / (n - 3)) if n > 3 else np.nan
    most = 1 - 6 / (n**3 - n)
    middle = np.arctanh(np.clip(rho, -most, most))
    low, high = np.tanh([middle - half, middle + half])
    return {"rho": rho, "low": float(min(low, rho)), "high": float(max(high, rho))}


def interval_p_value(low: float, high: float, n: int) -> float:
    """Of the two-sided test that a mean is 0, from its Student t interval; NaN if undefined."""
    middle, half = (low + high) / 2, (high - low) / 2
    if n < 2 or np.isnan(half):
        return np.nan
    if half == 0:
        return 1.0 if middle == 0 else 0.0
    return float(2 * stdtr(n - 1, -abs(middle) / half * stdtrit(n - 1, 0.975)))


def holm(p_values: Sequence[float]) -> Values:
    """Holm's step-down correction of a family of p-values; undefined ones stay so and are none."""
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(len(p), np.nan)
    defined = np.flatnonzero(~np.isnan(p))
    order = defined[np.argsort(p[defined], kind="stable")]
    factors = len(order) - np.arange(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * p[order]))
    return adjusted
