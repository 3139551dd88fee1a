"""Every metric against small matrices computed by hand, intervals against scipy's."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from stamp_core.results.metrics import Accuracies
from workbench.report import metrics

quick = settings(deadline=None, max_examples=50)
accuracies = st.integers(0, 64).map(lambda hits: hits / 64)  # sums of them are exact

THREE = np.array([[0.5, 0.2, 0.1], [0.6, 0.7, 0.3], [0.4, 0.3, 0.8]])
# What the authors of STAMP logged for FedAvg on CIFAR100 with 20 classes a task.
AUTHORS = np.array(
    [
        [0.32295, 0.2313, 0.2336, 0.2592, 0.26095],
        [0.2488, 0.3181, 0.23125, 0.26925, 0.2446],
        [0.2683, 0.25215, 0.2953, 0.2676, 0.25065],
        [0.2569, 0.2579, 0.23635, 0.33715, 0.2567],
        [0.27935, 0.2571, 0.2385, 0.2854, 0.31615],
    ]
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Accuracies, np.ndarray]:
    """An array a [E, U, T] and counts n [U, T], some of them 0."""
    clients, tasks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    a = draw(arrays(np.float64, (tasks, clients, tasks), elements=accuracies))
    n = draw(arrays(np.int64, (clients, tasks), elements=st.integers(0, 3)))
    return a, n


@pytest.mark.parametrize("experiences", [0, 1, 5])
def test_incomplete_cycles_are_refused(experiences):
    text = rf"{experiences} experiences are not whole cycles of 2 tasks"
    with pytest.raises(ValueError, match=text):
        metrics.last_cycle(np.zeros((experiences, 1, 2)), 2)


def test_the_authors_matrix():
    """Last row: 1.3765 / 5 = .2753. Forgetting by task: .0436, .0610, .0568, .05175; mean .0533.

    The diagonal holds each column's maximum here, so both readings of forgetting agree.
    """
    assert metrics.final_accuracy(AUTHORS) == pytest.approx(0.2753, abs=1e-6)
    assert metrics.average_forgetting(AUTHORS) == pytest.approx(0.21315 / 4, abs=1e-9)
    assert metrics.forgetting_diagonal(AUTHORS) == metrics.average_forgetting(AUTHORS)


def test_forgetting_includes_rows_before_the_task_but_not_the_last():
    """Task 1 was best before it was learnt (.9 in row 0), task 0 is best at the end (.8).

    AF = ((.5 - .8) + (.9 - .6)) / 2 = 0; diagonal = ((.5 - .8) + (.7 - .6)) / 2 = -.1.
    """
    m = np.array([[0.5, 0.9, 0.0], [0.4, 0.7, 0.0], [0.8, 0.6, 0.5]])
    assert metrics.average_forgetting(m) == pytest.approx(0)
    assert metrics.forgetting_diagonal(m) == pytest.approx(-0.1)


def test_forgetting_skips_undefined_entries():
    """Without its upper triangle THREE keeps AF .3; a task never scored before the end has none."""
    m = THREE.copy()
    m[np.triu_indices(3, 1)] = np.nan
    assert metrics.average_forgetting(m) == pytest.approx(0.3)
    m[1, 1] = np.nan
    assert math.isnan(metrics.average_forgetting(m))


def test_an_undefined_entry_makes_a_mean_undefined():
    """m[2, 2] is in the last row, on the diagonal and in the last mean; m[0, 2] in none of them."""
    for hole, undefined in (((2, 2), True), ((0, 2), False)):
        m = THREE.copy()
        m[hole] = np.nan
        assert math.isnan(metrics.final_accuracy(m)) is undefined
        assert math.isnan(metrics.learning_accuracy(m)) is undefined
        assert math.isnan(metrics.average_incremental_accuracy(m)) is undefined


def test_clients():
    """Last row: client 0 has (.2 + .4) / 2 = .3, client 1 (.6 + .8) / 2 = .7; s = .4 / sqrt(2)."""
    a, n = np.array([[[0.9, 0.9], [0.9, 0.9]], [[0.2, 0.4], [0.6, 0.8]]]), np.ones((2, 2), int)
    found = metrics.run_metrics(a, n)
    expected = [0.3, 0.4 / math.sqrt(2)]
    assert [found["worst_client"], found["client_spread"]] == pytest.approx(expected)
    a[1, 0, 0] = np.nan  # no score; without images client 0 has .4, its other task's
    found = metrics.run_metrics(a, np.array([[0, 1], [1, 1]]))
    assert [found["worst_client"], found["client_spread"]] == pytest.approx(
        [0.4, 0.3 / math.sqrt(2)]
    )
    found = metrics.run_metrics(a, n)
    assert math.isnan(found["worst_client"]) and math.isnan(found["client_spread"])


def test_one_task_has_neither_forgetting_nor_transfer():
    m = np.array([[0.75]])
    assert math.isnan(metrics.average_forgetting(m))
    assert math.isnan(metrics.forgetting_diagonal(m))
    assert math.isnan(metrics.forward_transfer(m, m[0]))
    assert metrics.final_accuracy(m) == metrics.learning_accuracy(m) == 0.75


@quick
@given(runs())
def test_micro_average_lies_between_the_clients_or_is_undefined(run):
    a, n = run
    m = metrics.micro_average(a, n)
    assert np.array_equal(np.isnan(m).all(axis=0), (n == 0).all(axis=0))
    scored = np.where(n > 0, a, np.nan)
    defined = ~np.isnan(m)
    assert (m[defined] >= np.fmin.reduce(scored, axis=1)[defined] - 1e-12).all()
    assert (m[defined] <= np.fmax.reduce(scored, axis=1)[defined] + 1e-12).all()


@pytest.mark.parametrize("shape", [(4, 2), (0, 0), (3,)])
def test_only_square_matrices_are_scored(shape):
    with pytest.raises(ValueError, match="not T x T; cut it with last_cycle first"):
        metrics.learning_accuracy(np.zeros(shape))


def test_run_metrics_are_of_the_last_cycle():
    """Two clients with THREE shifted by -.1 and +.1 and equal counts pool to THREE.

    By hand, row = after task, column = task:
    ACC = (.4 + .3 + .8) / 3 = .5; diagonal (.5 + .7 + .8) / 3 = 2/3.
    After each task: .5, (.6 + .7) / 2 = .65, .5; their mean 1.65 / 3 = .55.
    AF = ((max(.5, .6) - .4) + (max(.2, .7) - .3)) / 2 = (.2 + .4) / 2 = .3.
    Diagonal forgetting = ((.5 - .4) + (.7 - .3)) / 2 = .25.
    FWT with initial (.9, .1, .2) = ((.2 - .1) + (.3 - .2)) / 2 = .1.
    """
    second = np.stack([THREE - 0.1, THREE + 0.1], axis=1)  # [T, U, T]
    a = np.concatenate([np.zeros_like(second), second])
    n = np.full((2, 3), 5)
    initial = np.array([[0.8, 0.0, 0.1], [1.0, 0.2, 0.3]])
    found = metrics.run_metrics(a, n, initial, local=a + 0.05)
    assert found == pytest.approx(
        {
            "accuracy": 0.5,
            "average_incremental_accuracy": 0.55,
            "learning_accuracy": 2 / 3,
            "forgetting": 0.3,
            "forgetting_diagonal": 0.25,
            "backward_transfer": -0.25,
            "forward_transfer": 0.1,
            "gap": 0.05,
            "worst_client": 0.4,
            "client_spread": 0.2 / math.sqrt(2),
        }
    )


@quick
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(0.5, 0.999))
def test_interval_is_scipys(values, level):
    mean, half = metrics.confidence_interval(values, level)
    if np.std(values) > 1e-9:  # scipy has no interval for equal values
        scipys = stats.t.interval(level, len(values) - 1, np.mean(values), stats.sem(values))
        assert (mean - half, mean + half) == pytest.approx(scipys, rel=1e-9, abs=1e-12)
    else:
        assert half == pytest.approx(0, abs=1e-7)


def test_summarise_counts_undefined_values():
    """1, 2, 3 and one NaN: the interval 2 -/+ 2.484138 of three values."""
    found = metrics.summarise([1.0, math.nan, 3.0, 2.0])
    expected = {"mean": 2, "std": 1, "n": 3, "low": -0.484138, "high": 4.484138, "undefined": 1}
    assert found == pytest.approx(expected, abs=1e-6)


def test_summarise_one_value_and_none():
    one, none = metrics.summarise([0.5]), metrics.summarise([math.nan])
    assert (one["mean"], one["n"], one["undefined"]) == (0.5, 1, 0)
    assert all(math.isnan(one[key]) for key in ("std", "low", "high"))
    assert (none["n"], none["undefined"]) == (0, 1) and math.isnan(none["mean"])


def test_paired_differences_over_common_seeds():
    """Seeds 0, 1, 2 in both: differences 1, 2, 3, whatever the values of other seeds."""
    a = {2: 33.0, 0: 11.0, 1: 22.0, 9: 99.0}
    b = {0: 10.0, 1: 20.0, 2: 30.0, 7: -5.0}
    assert metrics.paired_difference(a, b) == metrics.summarise([1.0, 2.0, 3.0])
    assert metrics.paired_difference(a, {7: 1.0})["n"] == 0
