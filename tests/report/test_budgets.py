"""Budgets: a method is shown if and only if none that costs no more is as accurate."""

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.made_records import fake_record, shifted, three_seeds
from workbench.report.frames import run_frame
from workbench.report.tables.results import budget_table


def costing(method: str, images: int, accuracy: float) -> list:
    rounds = ({"images": images}, {"images": 0})
    return [fake_record(method, seed, (accuracy, accuracy), rounds=rounds) for seed in (0, 1)]


@settings(deadline=None)  # runs are made, which takes its time on a busy machine
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6))
def test_exactly_the_methods_that_no_other_dominates_are_shown(others):
    """The naive definition, over pairs; equal ones are decided by the order of rows."""
    methods = {f"m{k}": pair for k, pair in enumerate(others)} | {"fedavg": (2, 1)}
    records = [run for name, (c, a) in methods.items() for run in costing(name, 100 * c, a / 10)]
    table = budget_table(run_frame(records))
    shown = table[table.budget.str.startswith("images")]
    pairs = {methods[name] for name in shown.method}
    assert len(pairs) == len(shown)  # of equal ones, one
    dominated = {
        pair
        for pair in methods.values()
        for other in methods.values()
        if other != pair and other[0] <= pair[0] and other[1] >= pair[1]
    }
    assert pairs == {*methods.values()} - dominated
    assert [float(cost) for cost in shown["from"]] == sorted(c / 2 for c, _ in pairs)


def test_a_row_is_compared_with_the_row_before_over_common_seeds_and_joint_is_left_out():
    dear = ({"images": 1500}, {"images": 1000})
    better = [
        *three_seeds("stamp", shifted(0.1), rounds=dear),
        fake_record("stamp", 9, rounds=dear),
    ]
    joint = three_seeds("joint", shifted(0.3))
    table = budget_table(run_frame([*three_seeds(), *better, *joint]))
    row = table.iloc[1]
    assert (*row[["from", "method", "n"]],) == ("1.25", "stamp", "4")
    assert row["above the row before"].startswith("+10.0 (+10.0 to")
    assert "joint" not in set(table.method)


def test_without_fedavg_only_what_needs_no_unit_is_shown():
    table = budget_table(run_frame(three_seeds("replay")))
    assert isinstance(table, pd.DataFrame) and set(table.budget) == {"kept by a client, kB"}
