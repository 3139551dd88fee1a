"""Records of a grid: loaded, trained where allowed, and refused when they are outdated."""

import json
import shutil
from dataclasses import replace

import pytest
import small

from stamp_core.config.decode import ParameterError
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.methods.base.method import DivergedError
from stamp_core.results import records
from workbench.report.metrics import run_metrics
from workbench.report.tables import page
from workbench.workflow import grid


def test_outdated_records_are_named_or_count_as_missing(params, monkeypatch):
    experiment = load_experiment("tiny", "fedavg", params)
    assert grid.load_records(experiment, "0to1", "default") == []
    grid.train_and_save(experiment, "0to1", "default", device="cpu")
    assert len(grid.load_records(experiment, "0to1", "default", outdated=False)) == 2
    with monkeypatch.context() as edited:
        edited.setattr(Experiment, "code", lambda self: "edited")
        assert grid.load_records(experiment, "0to1", "default", outdated=False) == []
    params["settings"]["tiny"]["training"]["lr"] = 0.05
    other = load_experiment("tiny", "fedavg", params)
    assert grid.load_records(other, "0to1", "default", outdated=False) == []
    for profile, command in (("default", "make repro"), ("cifar100", "make cifar100")):
        text = f"tiny-fedavg-0to1 was made with other parameters: run `{command}`"
        grid.train_and_save(experiment, "0to1", profile, device="cpu")
        with pytest.warns(UserWarning, match=f"^{text}$"):
            assert len(grid.load_records(other, "0to1", profile)) == 2
    shutil.rmtree(grid.run_folder(experiment, "0to1", "default") / "1")
    assert grid.load_records(experiment, "0to1", "default") == []  # one seed is missing


def test_records_of_an_older_form_are_refused_and_trained_again(params, monkeypatch):
    experiment = load_experiment("tiny", "fedavg", params)
    with monkeypatch.context() as older:
        older.setattr(records, "FORM", records.FORM - 1)
        grid.train_and_save(experiment, "0", "default", device="cpu")
    text = r"of form 2, not 3: .*train it again \(make repro\)"
    with pytest.raises(records.RecordFormError, match=text):
        grid.load_records(experiment, "0", "default")
    assert grid.load_records(experiment, "0", "default", outdated=False) == []


def test_a_seed_that_diverges_is_left_out_by_name(params, monkeypatch):
    """Seed 0 takes steps that are too long; seed 1 has no images, so that it takes none."""
    params["settings"]["tiny"]["training"]["lr"] = 1e38
    experiment = load_experiment("tiny", "fedavg", params)
    plans = grid.load_plans(experiment.setting, experiment.dataset(), "0to1", "default")
    none = dict.fromkeys(small.everywhere(plans[0]), ())
    changed = {0: plans[0], 1: small.with_train(plans[1], none)}
    monkeypatch.setattr(grid, "load_plans", lambda *_: changed)
    trained = grid.train_and_save(experiment, "0to1", "default", device="cpu")
    loaded = grid.load_records(experiment, "0to1", "default", outdated=False)
    assert [[r.run[2] for r in records] for records in (trained, loaded)] == [[1], [1]]
    assert not any(path.is_dir() for path in grid.RESUME.glob("tiny-fedavg*"))
    assert "Diverged, so without a score: tiny-fedavg, seed 0." in page.describe_runs(loaded)
    assert "no longer finite" in loaded[0].about["diverged"]["0"]
    monkeypatch.setattr(grid, "load_plans", lambda *_: {0: changed[0]})
    with pytest.raises(DivergedError, match="no longer finite"):
        grid.train_and_save(experiment, "0", "default", device="cpu")


def test_the_quick_profile_trains_what_is_missing_the_default_one_refuses(params, trained):
    with pytest.raises(ParameterError) as error:
        grid.load_grid("comparison", "default")
    assert str(error.value) == ("no records of tiny-fedavg-0; make them with `make repro`")
    assert grid.load_grid("comparison", "paper") == [] and not trained
    runs = [record.run for record in grid.load_grid("comparison", "quick")]
    assert runs == [("tiny", method, 0) for method in ("fedavg", "near", "keep_all")]
    grid.load_grid("comparison", "quick")
    assert trained == ["tiny-fedavg", "tiny-near", "tiny-keep_all"]


def test_studies_are_shown_with_the_default_runs(params):
    params["grid"]["method"] = ["fedavg"]
    experiment = load_experiment("tiny", "fedavg", params)
    grid.train_and_save(experiment, "0", "default", device="cpu")
    assert len(grid.load_grid("comparison", "studies")) == 1
    grid.train_and_save(experiment, "0", "studies", device="cpu")
    assert len(grid.load_grid("comparison", "studies")) == 2
    assert len(grid.load_grid("comparison", "default")) == 1


def test_metrics_are_means_over_seeds_of_the_model_a_method_is_compared_by(params, tmp_path):
    for method, model in (("fedavg", "global"), ("local", "personal")):
        experiment = load_experiment("tiny", method, params)
        records = grid.train_and_save(experiment, "0to1", "default", device="cpu")
        saved = grid.save_metrics({experiment.name: records}, "tiny", "default")
        assert json.loads((tmp_path / "data/metrics/tiny.json").read_text()) == saved
        metrics = [run_metrics(r.accuracy(model), r.tests) for r in records]
        for name, value in saved[experiment.name].items():
            assert value == round((metrics[0][name] + metrics[1][name]) / 2, 4)


def test_plans_are_loaded_while_they_fit_the_setting(params):
    experiment = load_experiment("tiny", "fedavg", params)
    dataset = experiment.dataset()
    plans = grid.load_plans(experiment.setting, dataset, "0to1", "default")
    other_seed = grid.load_plans(experiment.setting, dataset, "5", "default")[5]
    renumbered = replace(other_seed, seed=0)
    grid.save_plans({0: renumbered, 1: other_seed}, experiment.setting, "default")
    loaded = grid.load_plans(experiment.setting, dataset, ["0", "0to1"], "default")
    assert loaded == {0: renumbered, 1: plans[1]}  # of the wrong seed: drawn anew
    params["settings"]["tiny"]["split"]["tasks"] = 1
    other = load_experiment("tiny", "fedavg", params)
    drawn = grid.load_plans(other.setting, dataset, "0to1", "default")
    assert [(plan.seed, plan.tasks) for plan in drawn.values()] == [(0, 1), (1, 1)]
