"""Experiments with other values than the files have, from Python."""

import copy

import pytest

from stamp_core import load_experiment, read_params
from stamp_core.config.decode import ParameterError
from stamp_core.methods.base.registry import read_preset
from workbench import run_folder


def test_overrides_are_the_values_of_a_preset_and_of_a_setting_that_have_them():
    params = read_params()
    before = copy.deepcopy(params)
    other = copy.deepcopy(params)
    preset = other["methods"]["stamp"] = read_preset("stamp", other)
    preset["spatial"] = {**preset["spatial"], "kappa": 0.9}
    other["settings"]["tiny"]["training"]["lr"] = 0.03
    values = {"spatial.kappa": 0.9, "setting.training.lr": 0.03}
    changed = load_experiment("tiny", "stamp", params, overrides=values)
    same = load_experiment("tiny", "stamp", other)
    assert changed.resolved() == same.resolved()
    assert params == before
    assert changed.name == "tiny-stamp-overrides-spatial.kappa=0.9,setting.training.lr=0.03"
    assert run_folder(changed, "0") != run_folder(same, "0")


def test_a_method_without_a_preset_takes_overrides():
    params = {**read_params(), "methods": {}}
    changed = load_experiment("tiny", "fedprox", params, overrides={"mu": 0.5})
    assert changed.params.mu == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"spatial.kapa": 0.9}, "spatial.*kapa.*kappa"),
        ({"setting.training.learning": 1}, "tiny.training.*learning"),
        ({"spatial": 3}, "spatial"),
        ({"splt.alpha": 0.3}, "stamp: 'splt' is unknown; did you mean 'split'"),
    ],
)
def test_overrides_of_nothing_are_refused_by_name(values, message):
    with pytest.raises(ParameterError, match=message):
        load_experiment("tiny", "stamp", read_params(), overrides=values)


def test_values_in_the_place_of_parameters_are_refused_with_the_place_for_them():
    with pytest.raises(ParameterError, match=r"read_params\(\).*overrides"):
        load_experiment("tiny", "stamp", {"spatial.kappa": 0.9})
