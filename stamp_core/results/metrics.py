"""What an accuracy matrix says of a run's end; workbench/report/metrics.py has the other metrics.

a[e, u, i] is the accuracy of client u's model on its task i after experience e, n[u, i] the number
of test images behind it, m[t, i] the same over all clients after task t. Indices start at 0.
NaN means undefined; of these functions `micro_average` and `task_forgetting` skip it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Accuracies = NDArray[np.float64]


def last_cycle(a: Accuracies, tasks: int) -> Accuracies:
    """The last T of the E experiences; metrics of repeated tasks are those of the last cycle."""
    if len(a) == 0 or len(a) % tasks:
        raise ValueError(f"{len(a)} experiences are not whole cycles of {tasks} tasks")
    return a[-tasks:]


def micro_average(a: Accuracies, n: NDArray[np.int64]) -> Accuracies:
    """m[t, i] = sum_u n[u, i] a[t, u, i] / sum_u n[u, i].  # [T, T]

    A client without test images of its task i does not count. Where no client has any, or where
    a client has some but no score, m[t, i] is NaN.
    """
    correct = np.where(n > 0, n * a, 0).sum(axis=1)  # [T, T]
    images = n.sum(axis=0).astype(np.float64)  # [T]
    return np.asarray(correct / np.where(images > 0, images, np.nan))


def final_accuracy(m: Accuracies) -> float:
    """mean_i m[T-1, i]: final average accuracy, ACC."""
    return mean(m[-1])


def task_forgetting(m: Accuracies) -> Accuracies:
    """max_{t<T-1} m[t, i] - m[T-1, i] of each task i but the last.  # [T-1]

    The maximum excludes the last row, so it can be negative. It includes the rows before task i
    was learnt, as the paper's formula and code do. It skips NaN; a task without any other entry
    has NaN.
    """
    best = np.fmax.reduce(square(m)[:-1, :-1], axis=0, initial=np.nan)
    return np.asarray(best - m[-1, :-1])


def mean(values: Accuracies | Sequence[float]) -> float:
    """The mean; NaN if a value is NaN or there is none."""
    return float(np.mean(values)) if len(values) else np.nan


def square(m: Accuracies) -> Accuracies:
    """`m` itself if it is T x T: one row per task of one cycle."""
    if m.ndim != 2 or m.shape[0] != m.shape[1] or not m.size:
        raise ValueError(f"the matrix is {m.shape}, not T x T; cut it with last_cycle first")
    return m
