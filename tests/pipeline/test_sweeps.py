"""Sweeps train what has no current records and nothing else; slips in them are named."""

import itertools
from copy import deepcopy

import pytest
import small
from parameters import PARAMS, SWEEP

from stamp_core.config.decode import ParameterError
from stamp_core.engine.experiment import load_experiment
from workbench.workflow import grid
from workbench.workflow.profiles import read_profile
from workbench.workflow.sweeps import load_sweeps, run_sweep, sweep_experiments


def test_all_keys_get_each_value_and_everything_else_stays():
    params, preset = deepcopy(PARAMS), load_experiment("tiny", "near", deepcopy(PARAMS))
    swept = sweep_experiments("kappa", params)
    assert params == PARAMS  # as they were
    assert [e.sweep for e in swept] == [("kappa", "0.0"), ("kappa", "0.5")]
    assert [e.name for e in swept] == ["tiny-near-kappa-0.0", "tiny-near-kappa-0.5"]
    for experiment, value in zip(swept, (0.0, 0.5), strict=True):
        expected = preset.resolved()
        for part in ("spatial", "temporal"):
            expected["method"][part]["kappa"] = value
        assert experiment.resolved() == expected


def test_a_sweep_has_every_setting_method_and_value_with_names_filled_in():
    swept = sweep_experiments("exemplars", deepcopy(PARAMS))
    expected = itertools.product(("tiny", "other"), ("kept", "herded"), (1, 2))
    assert [(e.setting.name, e.method, e.params.memory.exemplars_per_class) for e in swept] == [
        *expected
    ]
    alphas = sweep_experiments("alpha", deepcopy(PARAMS))
    assert [e.setting.split.alpha for e in alphas] == [0.5, 1.0]


@pytest.mark.parametrize("names", [{"setting": ["tny"]}, {"method": ["nera"]}], ids=str)
def test_a_sweep_of_what_is_not_there_makes_no_new_block(names):
    key = "settings.{setting}.training.lr" if "setting" in names else "methods.{method}.server_lr"
    params = {**deepcopy(PARAMS), "sweeps": {"kappa": {**SWEEP, "keys": [key], **names}}}
    with pytest.raises(ParameterError, match=r"is unknown; did you mean '(tiny|near)'"):
        sweep_experiments("kappa", params)


@pytest.mark.parametrize("profile", ["default", "quick", "paper"])
def test_the_sweeps_of_the_project_are_valid(profile):
    params = read_profile(profile)
    for name in params["sweeps"]:
        assert len(sweep_experiments(name, params)) >= 2


def test_only_experiments_without_current_records_are_trained(params, trained):
    """Of kappa 0.0, 0.5 and then 0.5, 0.75 only the last is new; records of 0.0 are deleted."""
    first = run_sweep("kappa", "default", device="cpu")
    assert trained == ["tiny-near-kappa-0.0", "tiny-near-kappa-0.5"]
    assert [(r.run, r.sweep) for r in first] == [
        (("tiny", "near", seed), ("kappa", value)) for value in ("0.0", "0.5") for seed in (0, 1)
    ]
    trained.clear()
    params["sweeps"]["kappa"]["values"] = [0.5, 0.75]
    records = run_sweep("kappa", "default", device="cpu")
    assert trained == ["tiny-near-kappa-0.75"] and len(records) == 4
    folder = grid.ROOT / "data/sweeps/kappa"
    names = {"tiny-near-kappa-0.5-0to1", "tiny-near-kappa-0.75-0to1"}
    assert {path.name for path in folder.iterdir()} == names


def test_a_damaged_record_does_not_block_its_sweep(params, trained, tmp_path):
    """As a kill or a full disk left it before records were written whole."""
    params["sweeps"]["kappa"]["values"] = [0.5]
    first = run_sweep("kappa", "default", device="cpu")
    (grid.ROOT / "data/sweeps/kappa/tiny-near-kappa-0.5-0to1/1/run.json").write_bytes(b"{")
    with pytest.warns(UserWarning, match=r"the record in .*0to1/1 is damaged .*; kept as"):
        again = run_sweep("kappa", "default", device="cpu")
    assert trained == 2 * ["tiny-near-kappa-0.5"]
    assert (tmp_path / "resume" / "tiny-near-kappa-0.5-0to1-1.aside").is_dir()
    for one, other in zip(first, again, strict=True):
        small.assert_same(one, other)


def test_missing_records_are_an_error_with_the_command_except_in_the_quick_profile(params, trained):
    with pytest.raises(ParameterError) as error:
        load_sweeps("sensitivity", "default")
    assert str(error.value) == (
        "no records of tiny-near-kappa-0.0; make them with `dvc repro sweep@kappa`"
    )
    assert load_sweeps("sensitivity", "paper") == [] and not trained
    assert len(load_sweeps("sensitivity", "quick")) == 4 and len(trained) == 2
    assert len(load_sweeps("sensitivity", "quick")) == 4 and len(trained) == 2


def test_coreset_sweeps_come_with_no_memory_and_every_image(params, trained):
    """From the grid, in the settings that it trains: not in `other`."""
    records = load_sweeps("coresets", "quick")
    baselines = [record.run[:2] for record in records if record.sweep == ("", "")]
    assert baselines == [("tiny", "fedavg"), ("tiny", "keep_all")]
    assert len(records) == 8 + 2


def test_the_setting_s_own_rounds_come_from_the_grid_on_the_seeds_of_the_sweep(params, trained):
    """Of the grid's two seeds the sweep has one, and of its methods `near`."""
    key = "settings.{setting}.training.rounds"
    sweep = {**SWEEP, "figure": "rounds", "seeds": "1", "keys": [key], "values": [3]}
    params |= {"sweeps": {"longer": sweep}, "grid": {**params["grid"], "seeds": ["0to1"]}}
    shown = [(r.run, r.about["setting"]["training"]["rounds"]) for r in load_sweeps("rounds")]
    assert shown == [(("tiny", "near", 1), 3), (("tiny", "near", 1), 1)]
