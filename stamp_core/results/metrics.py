"""Metrics of a run: accuracy, forgetting and transfer; their mean and interval over seeds.

a[e, u, i] is the accuracy of client u's model on its task i after experience e, n[u, i] the number
of test images behind it, m[t, i] the same over all clients after task t. Indices start at 0.

NaN means undefined. A mean, minimum or standard deviation over a NaN, or over nothing, is NaN. The
exceptions, which skip NaN, are `micro_average`, `task_forgetting` and `summarise`.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

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


def average_incremental_accuracy(m: Accuracies) -> float:
    """mean_t mean_{i<=t} m[t, i]: average incremental accuracy (iCaRL, "average of sessions")."""
    return mean([mean(row[: t + 1]) for t, row in enumerate(_square(m))])


def learning_accuracy(m: Accuracies) -> float:
    """mean_i m[i, i]: learning accuracy, of each task right after it was learnt."""
    return mean(np.diagonal(_square(m)))


def average_forgetting(m: Accuracies) -> float:
    """mean_{i<T-1} task_forgetting(m)[i]: average forgetting AF as in the paper.

    NaN where a task's is, and for a single task.
    """
    return mean(task_forgetting(m))


def task_forgetting(m: Accuracies) -> Accuracies:
    """max_{t<T-1} m[t, i] - m[T-1, i] of each task i but the last.  # [T-1]

    The maximum excludes the last row, so it can be negative. It includes the rows before task i
    was learnt, as the paper's formula and code do. It skips NaN; a task without any other entry
    has NaN.
    """
    best = np.fmax.reduce(_square(m)[:-1, :-1], axis=0, initial=np.nan)
    return np.asarray(best - m[-1, :-1])


def forgetting_diagonal(m: Accuracies) -> float:
    """mean_{i<T-1} (m[i, i] - m[T-1, i]): forgetting since a task was learnt; NaN for one task.

    Backward transfer BWT (GEM) is its negative.
    """
    return mean(np.diagonal(_square(m))[:-1] - m[-1, :-1])


def forward_transfer(m: Accuracies, initial: Accuracies) -> float:
    """mean_{i>=1} (m[i-1, i] - initial[i]): forward transfer FWT (GEM); NaN for one task.

    `initial` [T] is the accuracy of the untrained network. In later cycles the tasks are not new,
    and FWT includes what earlier cycles taught.
    """
    return mean(np.diagonal(_square(m), offset=1) - initial[1:])


def generalisation_gap(local: Accuracies, global_: Accuracies) -> float:
    """mean_t (local[t, t] - global_[t, t]): the local-global gap on new tasks."""
    return mean(np.diagonal(_square(local)) - np.diagonal(_square(global_)))


def run_metrics(
    a: Accuracies,
    n: NDArray[np.int64],
    initial: Accuracies | None = None,
    local: Accuracies | None = None,
) -> dict[str, float]:
    """Every metric of one model's accuracies a [E, U, T], by name, over its last cycle.

    `initial` [U, T] is the untrained network's accuracy and `local` [E, U, T] that of the local
    models after training; without them forward_transfer and gap are NaN.
    """
    tasks = a.shape[2]
    a = last_cycle(a, tasks)
    m = micro_average(a, n)
    # final accuracy of each client, over the tasks that it has images of
    clients = np.array([mean(row[own > 0]) for row, own in zip(a[-1], n, strict=True)])
    before = np.full(tasks, np.nan) if initial is None else micro_average(initial[None], n)[0]
    own = np.full_like(m, np.nan) if local is None else micro_average(last_cycle(local, tasks), n)
    return {
        "accuracy": final_accuracy(m),
        "average_incremental_accuracy": average_incremental_accuracy(m),
        "learning_accuracy": learning_accuracy(m),
        "forgetting": average_forgetting(m),
        "forgetting_diagonal": forgetting_diagonal(m),
        "backward_transfer": -forgetting_diagonal(m),
        "forward_transfer": forward_transfer(m, before),
        "gap": generalisation_gap(own, m),
        "worst_client": float(np.min(clients)),
        "client_spread": sample_std(clients),
    }


def confidence_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The mean and the half-width of its Student t interval; NaN for fewer than two values."""
    n = len(values)
    if n < 2:
        return mean(values), np.nan
    half = stdtrit(n - 1, (1 + level) / 2) * sample_std(values) / np.sqrt(n)
    return mean(values), float(half)


def summarise(values: Iterable[float]) -> dict[str, float]:
    """Mean, std (ddof 1), the limits of the mean's 95 % interval, and n, over the defined values.

    NaN values are left out of n and counted as `undefined`.
    """
    every = np.array(list(values), dtype=np.float64)
    defined = every[~np.isnan(every)].tolist()
    middle, half = confidence_interval(defined)
    limits = {"low": middle - half, "high": middle + half}
    counts = {"n": len(defined), "undefined": len(every) - len(defined)}
    return {"mean": middle, "std": sample_std(defined), **limits, **counts}


def paired_difference(
    a_by_seed: Mapping[int, float], b_by_seed: Mapping[int, float]
) -> dict[str, float]:
    """`summarise` of the differences a - b over the seeds that both have."""
    common = sorted(a_by_seed.keys() & b_by_seed.keys())
    return summarise(a_by_seed[seed] - b_by_seed[seed] for seed in common)


def mean(values: Accuracies | Sequence[float]) -> float:
    """The mean; NaN if a value is NaN or there is none."""
    return float(np.mean(values)) if len(values) else np.nan


def sample_std(values: Accuracies | Sequence[float]) -> float:
    """The sample standard deviation (ddof 1); NaN if a value is NaN or there are fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else np.nan


def _square(m: Accuracies) -> Accuracies:
    """`m` itself if it is T x T: one row per task of one cycle."""
    if m.ndim != 2 or m.shape[0] != m.shape[1] or not m.size:
        raise ValueError(f"the matrix is {m.shape}, not T x T; cut it with last_cycle first")
    return m
