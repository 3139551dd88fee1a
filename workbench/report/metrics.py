"""Metrics of a run: accuracy, forgetting and transfer; their mean and interval over seeds.

Symbols are those of stamp_core/results/metrics.py. NaN means undefined. A mean, minimum or standard
deviation over a NaN, or over nothing, is NaN; `summarise` skips NaN.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from stamp_core.results.metrics import (
    Accuracies,
    final_accuracy,
    last_cycle,
    mean,
    micro_average,
    square,
    task_forgetting,
)


def average_incremental_accuracy(m: Accuracies) -> float:
    """mean_t mean_{i<=t} m[t, i]: average incremental accuracy (iCaRL, "average of sessions")."""
    return mean([mean(row[: t + 1]) for t, row in enumerate(square(m))])


def learning_accuracy(m: Accuracies) -> float:
    """mean_i m[i, i]: learning accuracy, of each task right after it was learnt."""
    return mean(np.diagonal(square(m)))


def average_forgetting(m: Accuracies) -> float:
    """mean_{i<T-1} task_forgetting(m)[i]: average forgetting AF as in the paper.

    NaN where a task's is, and for a single task.
    """
    return mean(task_forgetting(m))


def forgetting_diagonal(m: Accuracies) -> float:
    """mean_{i<T-1} (m[i, i] - m[T-1, i]): forgetting since a task was learnt; NaN for one task.

    Backward transfer BWT (GEM) is its negative.
    """
    return mean(np.diagonal(square(m))[:-1] - m[-1, :-1])


def forward_transfer(m: Accuracies, initial: Accuracies) -> float:
    """mean_{i>=1} (m[i-1, i] - initial[i]): forward transfer FWT (GEM); NaN for one task.

    `initial` [T] is the accuracy of the untrained network. In later cycles the tasks are not new,
    and FWT includes what earlier cycles taught.
    """
    return mean(np.diagonal(square(m), offset=1) - initial[1:])


def generalisation_gap(local: Accuracies, global_: Accuracies) -> float:
    """mean_t (local[t, t] - global_[t, t]): the local-global gap on new tasks."""
    return mean(np.diagonal(square(local)) - np.diagonal(square(global_)))


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


def sample_std(values: Accuracies | Sequence[float]) -> float:
    """The sample standard deviation (ddof 1); NaN if a value is NaN or there are fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else np.nan
