"""Ranks and corrected p-values against published tables and naive second implementations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr, ttest_1samp

from workbench.report.metrics import confidence_interval
from workbench.report.ranks import holm, interval_p_value, rank_correlation

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12).filter(lambda x: np.std(x) > 1e-3))
def test_a_p_value_is_that_of_the_t_test_behind_the_interval(values):
    middle, half = confidence_interval(values)
    p = interval_p_value(middle - half, middle + half, len(values))
    assert p == pytest.approx(ttest_1samp(values, 0.0).pvalue, rel=1e-6, abs=1e-9)


def naive_holm(p_values: list[float]) -> list[float]:
    """Of each hypothesis the largest product of one that is rejected before it."""
    count = len(p_values)
    order = sorted(range(count), key=lambda place: p_values[place])
    found = [0.0] * count
    for step, place in enumerate(order):
        before = [(count - k) * p_values[order[k]] for k in range(step + 1)]
        found[place] = min(1.0, max(before))
    return found


@given(P_VALUES)
def test_holm_is_that_of_the_definition(p_values):
    assert holm(p_values) == pytest.approx(naive_holm(p_values))


def test_undefined_p_values_stay_and_count_for_nothing():
    assert holm([0.02, np.nan, 0.03]) == pytest.approx([0.04, np.nan, 0.04], nan_ok=True)
    assert np.isnan(interval_p_value(np.nan, np.nan, 1))
    assert interval_p_value(0.0, 0.0, 3) == 1.0
    assert interval_p_value(1.0, 1.0, 3) == 0.0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=4, max_size=12))
def test_a_rank_correlation_is_scipys_and_lies_in_its_interval(pairs):
    """With ties too; undefined where one of the scores is the same for all."""
    a, b = zip(*pairs, strict=True)
    found = rank_correlation(a, b)
    if len({*a}) == 1 or len({*b}) == 1:
        assert np.isnan([*found.values()]).all()
        return
    assert found["rho"] == pytest.approx(float(spearmanr(a, b).statistic), abs=1e-12)
    assert -1 <= found["low"] <= found["rho"] + 1e-8 and found["rho"] - 1e-8 <= found["high"] <= 1
    other = rank_correlation(a, [-value for value in b])
    assert other["low"] == pytest.approx(-found["high"], abs=1e-9)


def test_the_interval_of_a_rank_correlation_covers_it_as_often_as_it_says():
    """Of normal scores with ρ = 0.6, whose rank correlation is 6/π arcsin(0.3)."""
    rng = np.random.default_rng(0)
    truth = 6 / np.pi * np.arcsin(0.6 / 2)
    draws = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=(2000, 12))
    found = [rank_correlation(draw[:, 0], draw[:, 1]) for draw in draws]
    covered = np.mean([each["low"] <= truth <= each["high"] for each in found])
    assert 0.93 <= covered <= 0.97
