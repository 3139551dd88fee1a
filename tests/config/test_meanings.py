"""Every parameter has a meaning and, if it is a number, limits; where a value of a run stands."""

import pytest

from stamp_core.config.params import read_params
from workbench.workflow.explain import explanations, meaning, parameters, places
from workbench.workflow.show import shown

PARAMETERS = {
    f"{place} {path}": parameter
    for place, before, kind in places()
    for path, parameter in parameters(kind, before)
}
SMALL, CHOSEN = "cifar100_c2_small", "params/cifar100.yaml: chosen"


def test_every_parameter_has_a_meaning():
    assert not [key for key, parameter in PARAMETERS.items() if not meaning(*parameter)]


def test_every_number_has_limits():
    free = (int, float, int | None, float | None)
    assert not [key for key, (_, _, hint) in PARAMETERS.items() if hint in free]


def test_presets_that_set_a_parameter_are_named():
    *_, used = explanations("spatial.kappa", read_params())
    assert "stamp_code 0.25" in used


@pytest.mark.parametrize(
    ("names", "key", "value", "place"),
    [
        ("tiny_alpha replay", "setting.data.source", "digits", "params/settings.yaml: digits"),
        ("tiny_alpha replay", "setting.split.clients", "4", "params/settings.yaml: tiny"),
        ("tiny_alpha replay", "setting.split.alpha", "1.0", "params/settings.yaml: tiny_alpha"),
        ("tiny_alpha replay", "setting.split.cycles", "1", "default"),
        (f"{SMALL} temporal_only", "method.temporal.kappa", "0.25", f"{CHOSEN}.temporal_only"),
        (f"{SMALL} temporal_only", "method.memory.exemplars_per_class", "20", f"{CHOSEN}.stamp"),
        (f"{SMALL} fedomg", "method.server_lr", "1.5", f"{CHOSEN}.{SMALL}.fedomg"),
        (f"{SMALL} joint", "setting.training.batch_size", "160", "the method joint"),
    ],
)
def test_where_a_value_stands(names, key, value, place):
    profile = "cifar100" if SMALL in names else "default"
    found = {line.split()[0]: line for line in shown(*names.split(), profile)}
    assert found[key].split(None, 2)[1:] == [value, place]
