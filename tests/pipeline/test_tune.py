"""Tuning: as many candidates for every method, on seeds that no other table shows."""

import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import at_setting, parse_seeds, read_setting
from stamp_core.core.paths import ROOT
from stamp_core.methods.base.registry import override, resolve_preset
from workbench.report.tables.tuning import edges_of, write_tuning
from workbench.report.text import DASH
from workbench.workflow import tune
from workbench.workflow.profiles import read_profile

TUNING: dict[str, Any] = {
    "setting": ["tiny"],
    "seeds": "0to1",
    "explored": {"sam": [{"spatial.kappa": 0.75}]},
    "candidates": {
        "near": [
            {"spatial.kappa": 0.0, "server_lr": 1.5},
            {"spatial.kappa": 0.5, "server_lr": 1.0},
        ],
        "kept": [{"server_lr": 1.0}, {"server_lr": 1e30}],
    },
}


@pytest.fixture
def tuning(params, tmp_path, monkeypatch):
    """The tuning file of the project in an empty folder, written when it is read."""
    changeable = deepcopy(TUNING)
    monkeypatch.setattr(tune, "ROOT", tmp_path)
    monkeypatch.setattr(tune, "read_profile", lambda profile: deepcopy(params))
    monkeypatch.setattr(tune, "read_yaml", lambda path: deepcopy(changeable))
    return changeable


def test_a_candidate_changes_its_keys_and_nothing_else(params, tuning):
    """A nested value stays with its candidate, also where presets share a block by `extends`."""
    tuning["candidates"] = {"near": [{"spatial.kappa": 0.9, "server_lr": 2.0}]}
    tuning["explored"] = {"sam": [{"server_lr": 1.5}]}
    first, *others = tune.candidate_experiments(tune.read_tuning())
    assert (first.method, first.sweep) == ("near", ("tuning", "spatial.kappa 0.9, server_lr 2.0"))
    preset = resolve_preset("near", params)[1]
    spatial = replace(preset.spatial, kappa=0.9)
    assert first.params == replace(preset, spatial=spatial, server_lr=2.0)
    for experiment in others:
        preset = resolve_preset(experiment.method, params)[1]
        assert experiment.params == replace(preset, server_lr=1.5)


def test_the_best_mean_accuracy_is_chosen_and_current_records_are_kept(tuning, trained, tmp_path):
    tune.tune(workers=1)
    table = pd.read_csv(tmp_path / "figures" / "tuning.csv")
    assert len(trained) == len(table) == 5
    assert not table[table.kind == "explored"].chosen.any()  # it is in a table of its own
    for _, rows in table[table.kind == "tuning"].groupby("method"):
        assert rows.chosen.tolist() == (rows["mean"] == rows["mean"].max()).tolist()
    assert table[table.method == "kept"]["mean"].notna().tolist() == [True, False]
    _, candidates, explored = page_parts(tmp_path)
    assert "| kept | server_lr 1e+30 | diverges | diverges |" in candidates
    assert "| near | spatial.kappa 0.5, server_lr 1.0 |" in candidates
    assert "| sam | spatial.kappa 0.75 |" in explored and "| near |" not in explored
    trained.clear()
    tune.tune(workers=1)
    assert trained == ["tiny-kept-tuning-server_lr 1e+30"]


def test_a_better_candidate_of_the_extended_list_is_chosen(tuning, trained, tmp_path):
    """Only new candidates are trained, and a candidate that has left the file leaves the page."""
    tune.tune(workers=1)
    tuning["extended"] = {"kept": [{"server_lr": 0.01}], "near": tuning["candidates"]["near"][:1]}
    tuning["candidates"]["near"][0] = {"spatial.kappa": 0.0, "server_lr": 1e30}
    trained.clear()
    tune.tune(workers=1, new=True)
    assert len(trained) == 3
    table = pd.read_csv(tmp_path / "figures" / "tuning.csv")
    assert len(table) == 7
    for _, rows in table[table.kind != "explored"].groupby("method"):
        assert rows.chosen.tolist() == (rows["mean"] == rows["mean"].max()).tolist()
    assert len(page_lines(tmp_path, "near")) == 3


def test_a_method_is_tuned_for_one_setting_alone(params, tuning, tmp_path):
    """The table has no value for the other, and the best there is chosen; then for the other."""
    params["settings"]["other"] = deepcopy(params["settings"]["tiny"])
    tuning["setting"] = ["tiny", "other"]
    file = tmp_path / "figures" / "tuning.csv"
    tune.tune(workers=1)
    together = pd.read_csv(file)
    tune.tune(workers=1, only=["near"], setting="other")
    table = pd.read_csv(file)
    near, kept = (table[table.method == method] for method in ("near", "kept"))
    assert near.tiny.isna().all() and kept.tiny.notna().any()
    assert near.chosen.tolist() == (near.other == near.other.max()).tolist()
    assert all(f" | {DASH} | " in line for line in page_lines(tmp_path, "near"))
    tune.tune(workers=1, only=["near"], setting="tiny")
    alone = pd.read_csv(file)
    alone = alone[alone.method == "near"]
    assert alone.setting.tolist() == ["other"] * 2 + ["tiny"] * 2
    assert alone[alone.setting == "other"].equals(near.set_index(alone.index[:2]))
    best = [f"| {DASH} | other, tiny |" in line for line in page_lines(tmp_path, "near")]
    assert best == near.chosen.tolist()  # both settings are the same
    tune.tune(workers=1, only=["near"])  # together again: the rows for one setting go
    assert_frame_equal(sorted_rows(pd.read_csv(file)), sorted_rows(together))
    with pytest.raises(ParameterError, match="setting 'tniy' is unknown; did you mean 'tiny'"):
        tune.tune(workers=1, setting="tniy")


def page_parts(folder: Path) -> list[str]:
    """What was chosen, the candidates, and the explored ones if there are any."""
    return (folder / "figures" / "tuning.md").read_text().split("\n## ")


def page_lines(folder: Path, method: str) -> list[str]:
    _, *parts = page_parts(folder)
    lines = [line for part in parts for line in part.split("\n")]
    return [line for line in lines if line.startswith(f"| {method} |")]


def sorted_rows(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values(["kind", "method", "candidate"], ignore_index=True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seeds", "8to10", "seeds is '8to10'; it must be below 10: the others are for reporting"),
        ("candidates", {"near": [{}], "kept": [{}, {}]}, "the same number for every method"),
        (
            "candidates",
            {"near": [{"server_lr": 1.5}, {"ratio": 0.5, "server_lr": 1.0}]},
            r"candidates.near is {'server_lr': 1.5}; it must be with ratio, which another",
        ),
    ],
)
def test_unequal_chances_are_refused(tuning, key, value, message):
    tuning[key] = value
    with pytest.raises(ParameterError, match=message):
        tune.read_tuning()


@pytest.mark.parametrize("kind", ["extended", "explored"])
def test_a_value_chosen_for_the_setting_stands_in_for_no_candidate(params, tuning, kind):
    """Left out, `server_lr` would be the chosen one; `ratio`, which no candidate varies, may be."""
    params["chosen"] = {"tiny": {"near": {"server_lr": 1.5, "ratio": 0.5}}}
    assert list(tune.candidate_experiments(tune.read_tuning()))
    tuning[kind] = {"near": [{"spatial.kappa": 0.9}]}
    right = r"near is {'spatial.kappa': 0.9}; it must be with server_lr, of which tiny has"
    with pytest.raises(ParameterError, match=f"params/tuning.yaml: {right}"):
        list(tune.candidate_experiments(tune.read_tuning()))


@pytest.mark.parametrize("name", tune.FILES)
def test_presets_have_the_chosen_values(name):
    """Those of tuning.csv, which `make tune` writes; on the settings that it was tuned on."""
    tuning = tune.read_tuning(name)
    assert list(tune.candidate_experiments(tuning, name))  # each names what was chosen
    table = pd.read_csv(ROOT / tune.FOLDERS[name] / "tuning.csv")
    chosen = table[table.chosen].drop_duplicates(["method", "setting"])
    if name == "default":  # on photographs not all are tuned yet
        assert set(chosen.method) == set(tuning.candidates)
    for row in chosen.to_dict("records"):
        method = row["method"]
        (values,) = [
            each
            for each in tuning.methods(row["kind"])[method]
            if tune.candidate_name(each) == row["candidate"]
        ]
        for setting in (each for each in tuning.setting if pd.notna(row.get(each))):
            params = at_setting(read_profile(tuning.profile), setting)
            found, right = (
                resolve_preset(method, each) for each in (params, override(params, method, values))
            )
            assert found == right, (method, setting)


@pytest.mark.parametrize(
    ("chosen", "edges"),
    [
        ("a 2, b 1.5, c x", []),
        ("a 1, b 1.5, c x", ["smallest a"]),
        ("a 3.5, b 2.0", ["largest a", "largest b"]),
        ("b 1.5", []),
        ("a 2, b 0.0", []),  # below 0 there is nothing
        ("a 2, d 7", []),  # of which one number was tried
    ],
)
def test_an_edge_has_candidates_on_one_side_alone(chosen, edges):
    others = ["a 1, b 1.5, c x", "a 2, b 0.0, c null", "a 3.5, b 2.0", "b 0.0"]
    assert [*edges_of(chosen, [chosen, *others])] == edges


def test_what_is_better_among_explored_candidates_is_named(tuning, trained, tmp_path):
    tuning["explored"] = {"kept": [{"server_lr": 0.9}]}
    tuning["candidates"]["kept"] = [{"server_lr": 1e-9}, {"server_lr": 1e30}]  # it learns nothing
    tune.tune(workers=1)
    chosen, *_ = page_parts(tmp_path)
    (line,) = (each for each in chosen.split("\n") if each.startswith("| kept |"))
    assert line.startswith("| kept | all | 3 | server_lr 1e-09 |")
    assert line.endswith("| smallest server_lr | server_lr 0.9 |")


@pytest.mark.parametrize("name", tune.FILES)
def test_the_page_of_tuning_is_what_its_file_makes(name, tmp_path):
    tuning, folder = tune.read_tuning(name), ROOT / tune.FOLDERS[name]
    shutil.copy(folder / "tuning.csv", tmp_path)
    write_tuning([], [], parse_seeds(tuning.seeds), tmp_path, tuning.known)
    for name in ("tuning.csv", "tuning.md"):
        assert (tmp_path / name).read_text() == (folder / name).read_text(), name


@pytest.mark.parametrize("setting", ["cifar100_c2_small", "cifar100_c20_small"])
def test_methods_that_keep_images_keep_as_many_on_photographs(setting):
    """Twenty of each class, or as many for all classes of a client together."""
    params = at_setting(read_profile("cifar100"), setting)
    split = read_setting(setting, params).split
    every = 20 * split.tasks * split.classes_per_task
    kept = set()
    methods = {*params["grid"]["method"], *tune.read_tuning("cifar100").candidates}
    for method in methods - {"keep_all"}:
        preset = resolve_preset(method, params)[1]
        per_class = getattr(getattr(preset, "memory", None), "exemplars_per_class", 0)
        total = getattr(preset, "exemplars", getattr(preset, "cache", 0))
        if per_class or total:  # neither has FedAvg, nor stamp_code, which reads past images again
            assert (per_class, total) in ((20, 0), (0, every)), method
            kept.add(method)
    assert {"replay", "stamp", "glfc"} <= kept
