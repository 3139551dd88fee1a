"""SGD steps as graphs of the pretend device: the results of the CPU, mistakes seen or refused."""

from functools import partial

import child
import pytest

from stamp_core.methods.base.registry import get_method, method_names

results = partial(child.results, "graph_cases.py")


def test_replayed_steps_have_the_results_of_the_cpu():
    runs = results()["runs"]
    capturing = [kind for kind in method_names() if get_method(kind).captures]
    assert {f"{kind}, {name}" for kind in capturing for name in ("mlp", "batch norm")} <= set(runs)
    assert {name: problem for name, (problem, _, _) in runs.items() if problem} == {}


def test_steps_are_replayed_where_they_can_be_and_the_record_says_so():
    runs = results()["runs"]
    without = {name for name, (_, replayed, _) in runs.items() if not replayed}
    assert without == {"micro-batches"}
    eager = {name for name, (_, _, said) in runs.items() if said != "graphs"}
    assert eager == {"micro-batches", "stamp, alternating"}


@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        ("Baked", "encoder.1.weight"),  # the first tensor that differs
        ("Undeclared", "KeyError: 'received'"),
        ("FromMessage", "no attribute 'message'"),
        ("Kept", "does not support item assignment"),
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


def test_a_tensor_of_the_client_may_be_an_input():
    assert results()["mistakes"]["Declared"] == ["", []]


def test_graphs_are_measured_and_compared_where_there_are_any():
    (_, speeds), *others = results()["measured"]
    assert "none here" not in speeds and speeds.count("n = 1") == 2
    assert ["graphs and eager are bit-identical", "True"] in others


def test_a_capture_changes_nothing_and_a_replay_repeats_it():
    """x starts at 1, y at 0; a step sets y = 2 x, adds 1 to x and returns the sum of x."""
    assert results()["captured"] == {
        "before": [1, 1, 0, 0, 2],
        "captured": [1, 1, 0, 0, 2],
        "replay 1": [2, 2, 2, 2, 4],
        "replay 2": [3, 3, 4, 4, 6],
    }


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("to the device", "_to_copy.default: not permitted"),
        ("back", "_to_copy.default: not permitted"),
        ("a value", "_local_scalar_dense.default: not permitted"),
        ("sizes by values", "index.Tensor: not permitted"),
        ("an index of the CPU", "index.Tensor: not permitted"),
        ("an operation on the CPU", "clone.default: a graph of pretend:0 has no operation of"),
    ],
)
def test_a_graph_holds_operations_of_the_device_alone(step, error):
    assert error in results()["refused"][step]
