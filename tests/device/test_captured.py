"""SGD steps as graphs of the pretend device: the results of the CPU, mistakes seen or refused."""

from functools import partial

import child
import pytest

from stamp_core.methods.base.registry import get_method

results = partial(child.results, "graph_cases.py")


def test_replayed_steps_have_the_results_of_the_cpu():
    runs = results()["runs"]
    capturing = [kind for kind in child.kinds() if get_method(kind).graph_safe]
    assert {f"{kind}, {name}" for kind in capturing for name in ("mlp", "batch norm")} <= set(runs)
    assert {name: problem for name, (problem, _, _) in runs.items() if problem} == {}


def test_steps_are_replayed_where_they_can_be_and_the_record_says_so():
    runs = results()["runs"]
    assert all(replayed for _, replayed, _ in runs.values())
    eager = {name for name, (_, _, said) in runs.items() if said != "graphs"}
    assert eager == {"stamp, alternating"}


@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        ("Baked", "encoder.1.weight"),  # the first tensor that differs
        ("Untyped", "'NoneType' object is not subscriptable"),
    ],
)
def test_a_step_that_depends_on_its_client_is_noticed(mistake, problem):
    found, warnings = results()["mistakes"][mistake]
    assert problem in found and not warnings


@pytest.mark.parametrize(
    ("mistake", "refused"),
    [
        ("Reading", "_local_scalar_dense.default: not permitted"),
        ("Uploading", "_to_copy.default: not permitted"),
        ("OnHost", "aten.ones.default: a graph of pretend:0 has no operation of the CPU"),
    ],
)
def test_a_step_that_cannot_be_captured_runs_as_it_is_with_a_warning(mistake, refused):
    found, warnings = results()["mistakes"][mistake]
    assert found == ""
    assert len(warnings) == 1 and "not captured" in warnings[0] and refused in warnings[0]
