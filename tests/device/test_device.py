"""Training on a device other than the CPU, on a pretend one: the same results, mistakes refused."""

import re
from functools import partial

import child
import pytest

from stamp_core.coresets.selection.base import selection_rules

results = partial(child.results, "device_cases.py")
ROUNDING = 1e-4  # relative to the largest number of its kind


@pytest.fixture(scope="session")
def methods(request):
    """Of the methods whose tests were selected, by one child."""
    mine = [
        item for item in request.session.items if "methods" in getattr(item, "fixturenames", ())
    ]
    return results(*sorted({item.callspec.params["kind"] for item in mine}))


@pytest.mark.parametrize("kind", child.kinds())
def test_a_method_has_the_results_of_the_cpu_on_a_device(methods, kind):
    """Where convolutions have channels last they may add up in another order: both have them so."""
    found = methods[kind]["problems"]
    assert found == dict.fromkeys(("mlp", "batch norm", "no room", "channels last"), "")


def test_every_rule_and_other_paths_have_the_results_of_the_cpu_on_a_device():
    runs = results()["runs"]
    assert set(selection_rules()) <= set(runs)
    assert {name: problem for name, problem in runs.items() if problem} == {}


def test_methods_that_read_weights_by_position_have_the_results_of_the_cpu():
    found = results()["layouts"]
    assert found and {name: problem for name, problem in found.items() if problem} == {}


@pytest.mark.parametrize("kind", child.kinds())
def test_channels_last_changes_numbers_by_rounding_alone(methods, kind):
    assert methods[kind]["moved"] < ROUNDING


def test_channels_last_changes_methods_that_read_by_position_by_rounding_alone():
    moved = results()["moved"]
    assert moved and {name: share for name, share in moved.items() if not share < ROUNDING} == {}


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("labels on the CPU", "nll_loss.*at least two devices"),
        ("an upload on the device", "message.parameters is on pretend:0; it must be on the CPU"),
        ("a generator of the CPU", "randn.*cannot draw on pretend"),
        ("an array of the device", "can't convert a tensor on pretend:0 to numpy"),
        ("a pickle of the device", "a tensor on pretend:0 cannot be pickled"),
        ("labels of test images on the CPU", "at least two devices"),
    ],
)
def test_a_mistake_that_a_gpu_would_refuse_is_refused(mistake, error):
    assert re.search(error, results()["mistakes"][mistake])


def test_the_device_counts_what_crosses():
    assert results()["miscounted"] == {}


# copies to the device, copies back and values read that a step may cost; no other method has any
ALLOWED = {"gem": (0, 1, 0), "gradma": (0, 1, 0)}  # a quadratic program, solved on the CPU
WITHOUT_STEPS = ("class_gaussians", "nearest_class_mean", "stsa")  # their costs are NaN


@pytest.mark.parametrize("kind", sorted({*child.kinds()} - {*WITHOUT_STEPS}))
def test_a_step_copies_and_waits_for_nothing(methods, kind):
    pairs = zip(methods[kind]["step"], ALLOWED.get(kind, (0, 0, 0)), strict=True)
    assert all(counted <= allowed for counted, allowed in pairs)


def test_what_an_evaluation_copies_does_not_depend_on_the_number_of_images():
    one, many = results()["chunks"]
    assert one == many and min(one) > 0


@pytest.mark.parametrize("kind", sorted({*child.kinds()} & {*child.DRAWING}))
def test_the_draws_of_a_client_round_go_to_the_device_at_once(methods, kind):
    assert methods[kind]["epoch"] == [0, 0, 0]
