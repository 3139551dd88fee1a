"""What a run is worth: accuracy, forgetting and transfer, and what several seeds say of them.

a[s, u, i] is the accuracy of client u's model on its task i after step s, n[u, i] the number of
test pictures behind it, m[t, i] the same over all clients after task t. All indices start at 0.
NaN means undefined: never zero, and never left out of a mean without a word. A mean, minimum or
deviation that meets a NaN is NaN, and so is a mean over nothing; the three functions that pass over
some, `pooled`, `forgetting` and `describe`, say which.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]


def last_cycle(a: Array, tasks: int) -> Array:
    """The last T of the S steps, all that is scored where the tasks are gone through repeatedly."""
    if len(a) == 0 or len(a) % tasks:
        raise ValueError(f"{len(a)} steps are not whole cycles of {tasks} tasks")
    return a[-tasks:]  # [T, ...]


def pooled(a: Array, n: NDArray[np.int64]) -> Array:
    """m[t, i] = sum_u n[u, i] a[t, u, i] / sum_u n[u, i], the micro average over clients: [T, T].

    A client without test pictures of its task i has no say there; where no client has any, or one
    that has some was not scored, m[t, i] is NaN.
    """
    correct = np.where(n > 0, n * a, 0).sum(axis=1)  # [T, T]
    pictures = n.sum(axis=0).astype(np.float64)  # [T]
    return np.asarray(correct / np.where(pictures > 0, pictures, np.nan))


def final_accuracy(m: Array) -> float:
    """mean_i m[T-1, i]: final average accuracy, ACC."""
    return mean(m[-1])


def accuracy_over_steps(m: Array) -> Array:
    """The curve mean_{i<=t} m[t, i] for each t, over the tasks met so far: [T]."""
    return np.array([mean(row[: t + 1]) for t, row in enumerate(square(m))])


def average_incremental_accuracy(m: Array) -> float:
    """mean_t mean_{i<=t} m[t, i]: average incremental accuracy (iCaRL, "average of sessions")."""
    return mean(accuracy_over_steps(m))


def learning_accuracy(m: Array) -> float:
    """mean_i m[i, i]: learning accuracy, each task right after it was learnt."""
    return mean(np.diagonal(square(m)))


def forgetting(m: Array) -> float:
    """mean_{i<T-1} (max_{t<T-1} m[t, i] - m[T-1, i]): average forgetting AF as the paper prints it.

    The maximum leaves out the last row, so the value may be negative, and takes in the rows before
    task i was learnt, as the paper's formula and code do. It passes over NaN entries; a task with
    nothing else makes the result NaN, and so does a single task.
    """
    square(m)
    best = np.fmax.reduce(m[:-1, :-1], axis=0, initial=np.nan)  # [T-1]
    return mean(best - m[-1, :-1])


def forgetting_diagonal(m: Array) -> float:
    """mean_{i<T-1} (m[i, i] - m[T-1, i]): forgetting since a task was learnt; NaN for one task."""
    return mean(np.diagonal(square(m))[:-1] - m[-1, :-1])


def backward_transfer(m: Array) -> float:
    """mean_{i<T-1} (m[T-1, i] - m[i, i]): backward transfer BWT (GEM); NaN for one task."""
    return -forgetting_diagonal(m)


def forward_transfer(m: Array, initial: Array) -> float:
    """mean_{i>=1} (m[i-1, i] - initial[i]): forward transfer FWT (GEM); NaN for one task.

    `initial` [T] is the accuracy of the untrained network. In a later cycle the tasks are not new,
    so the value then holds what earlier cycles taught as well.
    """
    return mean(np.diagonal(square(m), offset=1) - initial[1:])


def generalisation_gap(local: Array, global_: Array) -> tuple[float, Array]:
    """mean_t (local[t, t] - global_[t, t]) and its curve [T]: the local-global gap on new tasks."""
    curve = np.diagonal(square(local)) - np.diagonal(square(global_))
    return mean(curve), curve


def per_client(a: Array) -> Array:
    """mean_i a[T-1, u, i], the final accuracy of each client: [U]."""
    return np.array([mean(row) for row in a[-1]])


def worst_client(a: Array) -> float:
    """min_u of the clients' final accuracies."""
    return float(np.min(per_client(a)))


def client_spread(a: Array) -> float:
    """The sample standard deviation over the clients' final accuracies; NaN for one client."""
    return deviation(per_client(a))


def summary(
    a: Array, n: NDArray[np.int64], initial: Array | None = None, local: Array | None = None
) -> dict[str, float]:
    """Every number of one model's array a [S, U, T], by name, over its last cycle.

    `initial` [U, T] is the untrained network's accuracy and `local` [S, U, T] that of the local
    models after training; without them forward_transfer and gap are NaN.
    """
    tasks = a.shape[2]
    a = last_cycle(a, tasks)
    m = pooled(a, n)
    start = np.full(tasks, np.nan) if initial is None else pooled(initial[None], n)[0]
    own = np.full_like(m, np.nan) if local is None else pooled(last_cycle(local, tasks), n)
    return {
        "accuracy": final_accuracy(m),
        "average_incremental_accuracy": average_incremental_accuracy(m),
        "learning_accuracy": learning_accuracy(m),
        "forgetting": forgetting(m),
        "forgetting_diagonal": forgetting_diagonal(m),
        "backward_transfer": backward_transfer(m),
        "forward_transfer": forward_transfer(m, start),
        "gap": generalisation_gap(own, m)[0],
        "worst_client": worst_client(a),
        "client_spread": client_spread(a),
    }


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The mean and the half-width of its Student t interval, NaN for fewer than two values."""
    n = len(values)
    if n < 2:
        return mean(values), np.nan
    half = stdtrit(n - 1, (1 + level) / 2) * deviation(values) / np.sqrt(n)
    return mean(values), float(half)


def describe(values: Iterable[float]) -> dict[str, float]:
    """Mean, std (ddof 1), the ends of the mean's 95 % interval, and n, over the defined values.

    NaN values do not enter: they make n smaller and are counted as `undefined`.
    """
    every = np.array(list(values), dtype=np.float64)
    defined = every[~np.isnan(every)].tolist()
    middle, half = interval(defined)
    return {
        "mean": middle,
        "std": deviation(defined),
        "n": len(defined),
        "low": middle - half,
        "high": middle + half,
        "undefined": len(every) - len(defined),
    }


def paired(a_by_seed: Mapping[int, float], b_by_seed: Mapping[int, float]) -> dict[str, float]:
    """What `describe` says of the differences a - b over the seeds that both have."""
    common = sorted(a_by_seed.keys() & b_by_seed.keys())
    return describe(a_by_seed[seed] - b_by_seed[seed] for seed in common)


def mean(values: Array | Sequence[float]) -> float:
    """The mean; NaN if a value is NaN or there is none."""
    return float(np.mean(values)) if len(values) else np.nan


def deviation(values: Array | Sequence[float]) -> float:
    """The sample standard deviation (ddof 1); NaN if a value is NaN or there are fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else np.nan


def square(m: Array) -> Array:
    """`m` itself if it is T x T: a row per task of one cycle."""
    if m.ndim != 2 or m.shape[0] != m.shape[1] or not m.size:
        raise ValueError(f"the matrix is {m.shape}, not T x T; cut it with last_cycle first")
    return m
