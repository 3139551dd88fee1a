"""Sweeps train what has no records and nothing else; rows may say that they are like others."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import small

from stamp_core import config, engine, experiments, grid, methods, paths, source, sweeps
from stamp_core.config import ParameterError
from stamp_core.methods import overlaid, preset, row

SWEEP: dict[str, Any] = {
    "label": "radius",
    "setting": "tiny",
    "method": "near",
    "seeds": "0to1",
    "keys": ["methods.near.spatial.kappa", "methods.near.temporal.kappa"],
    "values": [0.0, 0.5],
}
SHARED: dict[str, Any] = {
    "data": small.DATA,
    "split": {**small.SPLIT, "tasks": 2, "order": "common", "alpha": 1.0},
    "network": small.NETWORK,
    "training": {**small.TRAINING, "rounds": 1},
}
ALPHAS: dict[str, Any] = {
    **{"label": "Dirichlet", "key": "settings.{setting}.split.alpha", "seeds": "0"},
    **{"method": ["fedavg", "kept"], "beside": []},
}
PARAMS: dict[str, Any] = {
    "grid": {"setting": ["tiny"], "method": ["fedavg", "near"], "seeds": ["0"]},
    "ablation": {"setting": ["tiny"], "method": ["sam"], "seeds": ["0"]},
    "sweeps": {"kappa": SWEEP},
    "tiny": {"setting": ["tiny"], "method": ["fedavg"], "seeds": ["0"]},
    "tiny_sweeps": {},
    "budgets": {
        **{"label": "pictures", "key": "methods.{method}.memory.per_class"},
        **{"setting": ["tiny", "other"], "method": ["kept", "herded"], "beside": ["fedavg", "sam"]},
        **{"seeds": "0to1", "values": {"tiny": [1, 2], "other": [3]}},
    },
    "tiny_budgets": {
        **{"label": "pictures", "key": "methods.{method}.memory.per_class"},
        **{"setting": ["tiny"], "method": ["kept"], "beside": ["fedavg"]},
        **{"seeds": "0", "values": {"tiny": [2]}},
    },
    "alphas": {**ALPHAS, "setting": ["shared"], "values": {"shared": [0.5, 1.0]}},
    "tiny_alphas": {**ALPHAS, "setting": ["shared"], "values": {"shared": [2.0]}},
    "paper": {"setting": [], "method": [], "seeds": []},
    "paper_alphas": {
        **{**ALPHAS, "setting": ["far", "farther"], "method": ["fedavg"]},
        "values": {"far": [0.5], "farther": [0.5, 1.0]},
    },
    "settings": {
        "tiny": {
            "data": small.DATA,
            "split": {**small.SPLIT, "tasks": 2, "images_per_class": 5},
            "network": small.NETWORK,
            "training": {**small.TRAINING, "rounds": 1},
        },
        "other": {
            "data": small.DATA,
            "split": small.SPLIT,
            "network": small.NETWORK,
            "training": small.TRAINING,
        },
        "shared": SHARED,
        "far": {**SHARED},
        "farther": {**SHARED},
    },
    "methods": {
        "fedavg": {"step": 1.0},
        "replay": {},
        "kept": {"kind": "replay", "memory": {"rule": "uniform", "per_class": 9}},
        "herded": {"like": "kept", "memory": {"rule": "herding"}},
        "near": {
            "kind": "stamp",
            "memory": {"per_class": 3},
            "spatial": {"kappa": 0.25, "softmax": {"rounds": 7, "rate": 2.0}},
            "temporal": {"kappa": 0.25},
        },
        "sam": {"like": "near", "temporal": None},
        "nearer": {"like": "sam", "spatial": {"softmax": {"rounds": 9}}},
    },
}


@pytest.fixture
def params(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Parameters of a project in an empty folder, which a test may change."""
    made = deepcopy(PARAMS)
    monkeypatch.setattr(config, "read", lambda: deepcopy(made))
    for module in (sweeps, grid):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(grid, "RESUME", tmp_path / "resume")
    monkeypatch.setattr(paths, "SOURCE", tmp_path / "source")
    (tmp_path / "source").mkdir()
    return made


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The methods of the experiments that are trained."""
    names: list[str] = []
    train = engine.train

    def noted(cell: experiments.Experiment, *rest: Any) -> Any:
        names.append(cell.method)
        return train(cell, *rest)

    monkeypatch.setattr(engine, "train", noted)
    yield names


# ------------------------------------------------------------------ what a sweep is made of


def cells(**changes: Any) -> dict[str, experiments.Experiment]:
    """The experiments of a sweep with some changes."""
    params = {**deepcopy(PARAMS), "sweeps": {"kappa": {**SWEEP, **changes}}}
    return sweeps.cells("kappa", params)


def test_all_keys_get_each_value_and_everything_else_stays() -> None:
    found = cells()
    assert list(found) == ["0.0", "0.5"]
    own = experiments.experiment("tiny", "near", deepcopy(PARAMS))
    for value, cell in found.items():
        assert cell.method == f"near-kappa-{value}"
        assert cell.params.spatial.kappa == cell.params.temporal.kappa == float(value)
        expected, resolved = own.resolved(), cell.resolved()
        for part in ("spatial", "temporal"):
            expected["method"][part]["kappa"] = float(value)
        expected["method"]["name"] = cell.method
        assert resolved == expected


def test_a_setting_can_be_swept() -> None:
    found = cells(keys=["settings.tiny.training.rate"], values=[0.1, 0.2])
    assert [cell.setting.training.rate for cell in found.values()] == [0.1, 0.2]


def test_a_row_that_is_like_another_can_be_swept() -> None:
    """What it does not say itself comes from there; the other row stays as it is."""
    key = "methods.nearer.spatial.softmax.rate"
    found = cells(method="nearer", keys=[key], values=[5.0])["5.0"].params
    assert (found.spatial.softmax.rate, found.spatial.softmax.rounds) == (5.0, 9)
    assert (found.spatial.kappa, found.temporal) == (0.25, None)


def test_a_sweep_leaves_the_parameters_as_they_are() -> None:
    params = deepcopy(PARAMS)
    sweeps.cells("kappa", params)
    assert params == PARAMS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"keys": ["methods.near.spatial.kapa"]},
            "methods.near.spatial: 'kapa' is unknown; did you mean 'kappa'? known: ",
        ),
        (
            {"keys": ["methods.near.spatal.kappa"]},
            "methods.near: 'spatal' is unknown; did you mean 'spatial'? known: ",
        ),
        (
            {"keys": ["settings.tiny.training.rat"]},
            "settings.tiny.training: 'rat' is unknown; did you mean 'rate'? known: ",
        ),
        (
            {"keys": ["methods.near.spatial.kappa", "methods.sam.spatial.kappa"]},
            "sweeps.kappa.keys is ['methods.near.spatial.kappa', 'methods.sam.spatial.kappa']; "
            "it must be a list of keys under settings.tiny. or methods.near.",
        ),
        (
            {"keys": ["settings.other.training.rate"]},
            "sweeps.kappa.keys is ['settings.other.training.rate']; "
            "it must be a list of keys under settings.tiny. or methods.near.",
        ),
        (
            {"keys": ["methods.nearer.step"]},
            "sweeps.kappa.keys is ['methods.nearer.step']; "
            "it must be a list of keys under settings.tiny. or methods.near.",
        ),
        (
            {"keys": []},
            "sweeps.kappa.keys is []; "
            "it must be a list of keys under settings.tiny. or methods.near.",
        ),
        ({"keys": "methods.near.step"}, "sweeps.kappa.keys is 'methods.near.step'; it must be a "),
        ({"values": []}, "sweeps.kappa.values is []; it must be a list that is not empty"),
        ({"values": 0.5}, "sweeps.kappa.values is 0.5; it must be a list that is not empty"),
        ({"values": None}, "sweeps.kappa.values is None; it must be a list that is not empty"),
        ({"values": [-1]}, "methods.near.spatial.kappa is -1.0; it must be at least 0"),
        ({"values": ["0.5"]}, "methods.near.spatial.kappa is '0.5'; it must be a number, written"),
        (
            {"seeds": "2to1"},
            "sweeps.kappa.seeds is '2to1'; it must be a number such as '3' or a rising range",
        ),
        (
            {"setting": "tny", "keys": ["methods.near.step"]},
            "settings 'tny' is unknown; did you mean 'tiny'? known: far, farther, other, ",
        ),
        (
            {"method": "replya", "keys": ["settings.tiny.training.rate"]},
            "methods 'replya' is unknown; did you mean 'replay'? known: ",
        ),
        (
            {"keys": ["methods.near.spatail.kappa"]},
            "methods.near: 'spatail' is unknown; did you mean 'spatial'? known: ",
        ),
        ({"colour": "red"}, "sweeps.kappa: 'colour' is unknown; known: keys, label, method, seeds"),
    ],
    ids=str,
)
def test_a_slip_in_a_sweep_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        cells(**changes)
    assert str(error.value).startswith(f"params.yaml: {message}")


def test_a_sweep_of_another_section_is_looked_up_there() -> None:
    with pytest.raises(ParameterError, match=r"tiny_sweeps 'kappa' is unknown; known: $"):
        sweeps.cells("kappa", deepcopy(PARAMS), "tiny_sweeps")


def test_the_sweeps_of_the_project_are_right() -> None:
    params = config.read()
    for section in sweeps.SECTIONS:
        for name, block in sweeps.blocks(params, section).items():
            assert list(sweeps.cells(name, params, section)) == [str(v) for v in block["values"]]


def test_the_papers_alphas_are_those_of_the_desk() -> None:
    """At the same values, in settings whose clients share their tasks; the desk has few methods."""
    params = config.read()
    desk, paper = (sweeps.crossed(params, of) for of in ("alphas", "paper_alphas"))
    assert {"fedavg", "replay", "stamp"} <= set(desk.method) <= set(paper.method)
    for found in (desk, paper):
        assert {tuple(found.values[name]) for name in found.setting} == {(0.1, 1.0, 10.0, 100.0)}
        assert all(config.setting(name).split.alpha for name in found.setting)


# ------------------------------------------------------------------ what is run


def test_a_value_that_has_records_is_not_trained_again(
    params: dict[str, Any], trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A new value is trained alone, one that is taken out goes with its records."""
    first = sweeps.run("kappa", "data")
    assert trained == ["near-kappa-0.0", "near-kappa-0.5"] and list(first) == ["0.0", "0.5"]
    assert [record.cell for record in first["0.5"]] == [
        ("tiny", "near-kappa-0.5", 0),
        ("tiny", "near-kappa-0.5", 1),
    ]
    runs = sweeps.ROOT / "data/sweeps/kappa/runs"
    before = {file: file.stat().st_mtime_ns for file in runs.rglob("*") if file.is_file()}
    trained.clear()
    capsys.readouterr()
    again = sweeps.run("kappa", "data")
    assert trained == [] and capsys.readouterr().out == "kappa 0.0: kept\nkappa 0.5: kept\n"
    assert before == {file: file.stat().st_mtime_ns for file in runs.rglob("*") if file.is_file()}
    for value, records in again.items():
        for one, other in zip(records, first[value], strict=True):
            small.assert_same(one, other)

    params["sweeps"]["kappa"]["values"] = [0.5, 1]
    third = sweeps.run("kappa", "data")
    assert trained == ["near-kappa-1"] and list(third) == ["0.5", "1"]
    said = capsys.readouterr().out
    assert "kappa 0.5: kept\n" in said and "kappa 1: trained\n" in said
    assert {folder.name for folder in runs.iterdir()} == {
        "tiny-near-kappa-0.5-0to1",
        "tiny-near-kappa-1-0to1",
    }


def test_changed_parameters_are_trained_again(params: dict[str, Any], trained: list[str]) -> None:
    """Of the method, also where it takes them from elsewhere, or of the setting; not others."""
    sweeps.run("kappa", "data")
    both = ["near-kappa-0.0", "near-kappa-0.5"]
    changes: list[tuple[list[str], Any, list[str]]] = [
        (["methods", "near", "memory", "per_class"], 2, both),
        (["settings", "tiny", "training", "rate"], 0.05, both),
        (["settings", "tiny", "split", "images_per_class"], 4, both),
        (["methods", "near", "spatial", "kappa"], 0.9, []),  # which is what the sweep sets
        (["methods", "fedavg", "step"], 0.9, []),
        (["settings", "other", "training", "rate"], 0.05, []),
        (["sweeps", "kappa", "label"], "κ", []),
    ]
    for path, value, expected in changes:
        trained.clear()
        sweeps.put(params, path, value)
        records = sweeps.run("kappa", "data")
        assert trained == expected, path
        assert all(len(each) == 2 for each in records.values())


def test_edited_code_is_trained_again(
    params: dict[str, Any], trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps.run("kappa", "data")
    trained.clear()
    monkeypatch.setattr(experiments.Experiment, "code", lambda self: "edited")
    sweeps.run("kappa", "data")
    assert trained == ["near-kappa-0.0", "near-kappa-0.5"]


def test_other_seeds_are_trained_and_the_old_ones_go(
    params: dict[str, Any], trained: list[str]
) -> None:
    sweeps.run("kappa", "data")
    params["sweeps"]["kappa"]["seeds"] = "1"
    trained.clear()
    sweeps.run("kappa", "data")
    assert len(trained) == 2
    names = {folder.name for folder in (sweeps.ROOT / "data/sweeps/kappa/runs").iterdir()}
    assert names == {"tiny-near-kappa-0.0-1", "tiny-near-kappa-0.5-1"}


def test_all_sweeps_are_gathered_and_a_missing_value_is_named(
    params: dict[str, Any], trained: list[str]
) -> None:
    sweeps.run("kappa", "data")
    trained.clear()
    found = sweeps.gather("data")
    assert trained == [] and {name: list(each) for name, each in found.items()} == {
        "kappa": ["0.0", "0.5"]
    }
    params["sweeps"]["kappa"]["values"] = [0.0, 0.5, 0.75, 1.0]
    with pytest.raises(ParameterError) as error:
        sweeps.gather("data")
    assert str(error.value) == (
        "no records of sweep kappa at 0.75, 1.0; make them with `dvc repro sweep@kappa`"
    )


def test_another_section_is_gathered_with_its_own_values(params: dict[str, Any]) -> None:
    """Not with those that a sweep of the same name has in `sweeps`."""
    params["tiny_sweeps"] = {"kappa": {**SWEEP, "seeds": "0", "values": [0.125]}}
    sweeps.run("kappa", "data", "tiny_sweeps")
    assert list(sweeps.gather("data", "tiny_sweeps")["kappa"]) == ["0.125"]


def test_notebooks_compute_the_tiny_sweeps_themselves(
    params: dict[str, Any], trained: list[str]
) -> None:
    params["tiny_sweeps"] = {"kappa": {**SWEEP, "seeds": "0", "values": [0.125]}}
    found = sweeps.gather(grid.TINY, "tiny_sweeps")
    assert trained == ["near-kappa-0.125"] and list(found["kappa"]) == ["0.125"]
    sweeps.gather(grid.TINY, "tiny_sweeps")
    assert len(trained) == 1


def test_captions_name_the_value_that_changes_nothing(params: dict[str, Any]) -> None:
    """0.25 is what the row says of both radii; of the other sweep no value is."""
    params["sweeps"]["kappa"]["values"] = [0.0, 0.25, 0.5]
    key = "settings.tiny.training.rate"
    params["sweeps"]["rate"] = {**SWEEP, "label": "rate", "keys": [key], "values": [0.2]}
    assert sweeps.captions() == {"kappa": ("radius", "0.25"), "rate": ("rate", "")}


def test_put_makes_the_blocks_that_are_missing() -> None:
    tree: dict[str, Any] = {"a": None, "b": {"c": 1, "d": 2}}
    sweeps.put(tree, ["a", "x", "y"], 3)
    sweeps.put(tree, ["b", "c"], 4)
    assert tree == {"a": {"x": {"y": 3}}, "b": {"c": 4, "d": 2}}


# ------------------------------------------------------------------ records that are outdated


def test_outdated_records_are_named_or_count_as_missing(params: dict[str, Any]) -> None:
    cell = experiments.experiment("tiny", "fedavg", params)
    assert grid.load(cell, "0to1", "data") == []
    grid.run(cell, "0to1", "data", 1, "cpu")
    assert len(grid.load(cell, "0to1", "data", outdated=False)) == 2
    sweeps.put(params, ["settings", "tiny", "training", "rate"], 0.05)
    other = experiments.experiment("tiny", "fedavg", params)
    assert grid.load(other, "0to1", "data", outdated=False) == []
    with pytest.warns(UserWarning, match=r"tiny-fedavg-0to1 was made with other parameters: run"):
        assert len(grid.load(other, "0to1", "data")) == 2
    (grid.run_folder("tiny", "fedavg", "0to1", "data") / "1" / "run.json").unlink()
    assert grid.load(cell, "0to1", "data") == []  # one seed is not there


# ------------------------------------------------------------------ rows like others


def test_what_a_row_says_lies_over_the_row_it_is_like() -> None:
    """At any depth and over several rows; what none of them says is left out."""
    assert row("nearer", PARAMS) == {
        "kind": "stamp",
        "memory": {"per_class": 3},
        "spatial": {"kappa": 0.25, "softmax": {"rounds": 9, "rate": 2.0}},
        "temporal": None,
    }
    _, found = preset("nearer", PARAMS)
    assert (found.spatial.softmax.rounds, found.spatial.softmax.rate) == (9, 2.0)
    assert (found.memory.per_class, found.temporal) == (3, None)


def test_a_row_without_a_kind_is_what_it_is_called_also_to_those_like_it() -> None:
    rows = {"methods": {"replay": {"ratio": 0.5}, "more": {"like": "replay", "step": 2.0}}}
    kind, found = preset("more", rows)
    assert kind is methods.get("replay") and (found.ratio, found.step) == (0.5, 2.0)


def test_null_turns_a_block_off_and_a_block_turns_it_on_again() -> None:
    rows = deepcopy(PARAMS["methods"])
    rows["again"] = {"like": "sam", "temporal": {"kappa": 0.125}}
    _, found = preset("again", {"methods": rows})
    assert found.temporal.kappa == 0.125 and found.temporal.step == 1.0


def test_rows_stay_as_they_are() -> None:
    rows = deepcopy(PARAMS)
    row("nearer", rows)
    assert rows == PARAMS


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        ({"a": {"like": "a"}}, "a", "methods.a.like is 'a'; it must be a row that is not like"),
        (
            {"a": {"like": "b"}, "b": {"like": "c"}, "c": {"like": "a"}},
            "b",
            "methods.b.like is 'b'; it must be a row that is not like itself",
        ),
        (
            {"a": {"like": "b"}, "b": {"like": "c"}, "c": {"like": "b"}},
            "a",
            "methods.a.like is 'b'; it must be a row that is not like itself",
        ),
        ({"abc": {}, "d": {"like": "abd"}}, "d", "methods 'abd' is unknown; did you mean 'abc'? "),
    ],
    ids=str,
)
def test_a_row_like_itself_or_like_nothing_is_named(
    rows: dict[str, Any], name: str, message: str
) -> None:
    with pytest.raises(ParameterError) as error:
        row(name, {"methods": rows})
    assert str(error.value).startswith(f"params.yaml: {message}")


def test_overlaying_by_hand() -> None:
    """Leaves of the second tree win; a block over a leaf, and a leaf over a block, replace it."""
    base = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {"g": 4}, "h": 5}
    found = overlaid(base, {"b": {"d": {"e": 6, "x": 7}}, "f": None, "h": {"i": 8}, "k": [9]})
    assert found == {
        "a": 1,
        "b": {"c": 2, "d": {"e": 6, "x": 7}},
        "f": None,
        "h": {"i": 8},
        "k": [9],
    }
    assert base == {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {"g": 4}, "h": 5}


# ------------------------------------------------------------------ what stages depend on


def notes() -> dict[str, str]:
    """What the first stage writes about every stage, by its file's name."""
    source.write()
    files = (paths.SOURCE / "code").glob("*.json")
    return {file.stem: file.read_text() for file in files}


def test_a_note_changes_with_the_row_it_is_like_and_no_other(params: dict[str, Any]) -> None:
    before = notes()
    assert before.keys() == {"split", "compare", *(f"train-{name}" for name in params["methods"])}
    changes: list[tuple[list[str], Any, set[str]]] = [
        (["methods", "near", "memory", "per_class"], 4, {"near", "sam", "nearer"}),
        (["methods", "near", "temporal", "kappa"], 0.125, {"near"}),  # the others have none
        (["methods", "near", "spatial", "softmax", "rounds"], 8, {"near", "sam"}),
        (["methods", "nearer", "step"], 0.5, {"nearer"}),
        (["methods", "fedavg", "step"], 0.5, {"fedavg"}),
        (["settings", "tiny", "training", "rate"], 0.05, set()),  # DVC sees those by itself
        (["sweeps", "kappa", "values"], [0.25], set()),
    ]
    for path, value, expected in changes:
        sweeps.put(params, path, value)
        after = notes()
        changed = {name for name, text in after.items() if text != before[name]}
        assert changed == {f"train-{name}" for name in expected}, path
        before = after


def test_a_note_names_the_rule_by_which_pictures_are_chosen(params: dict[str, Any]) -> None:
    """No import tells of a file that is found by its name."""
    file = "stamp_core/coresets/k_centre.py"
    assert file not in json.loads(notes()["train-near"])["code"]
    sweeps.put(params, ["methods", "near", "memory", "rule"], "k_centre")
    assert file in json.loads(notes()["train-near"])["code"]


def test_a_slip_in_a_sweep_is_refused_before_anything_is_written(
    params: dict[str, Any], tmp_path: Path
) -> None:
    params["sweeps"]["kappa"]["keys"] = ["methods.near.spatial.kapa"]
    with pytest.raises(ParameterError, match="did you mean 'kappa'"):
        source.write()
    assert not list((tmp_path / "source").iterdir())


def test_settings_of_sweeps_are_checked_with_their_pictures_but_not_the_papers(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tiny` is in a grid and checked there; the paper's pictures need not be here."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(source, "fits", lambda name, seed, params: asked.append((name, seed)))
    source.write()
    assert asked == [("other", 0), ("shared", 0)]
    sweeps.put(params, ["settings", "farther", "data"], {"source": "digits", "wide": 3})
    with pytest.raises(ParameterError, match=r"farther\.data: 'wide' is unknown"):
        source.write()


def test_a_plan_that_cannot_be_drawn_is_refused_before_anything_runs(
    params: dict[str, Any],
) -> None:
    sweeps.put(params, ["settings", "shared", "split", "classes_per_task"], 6)
    with pytest.raises(ParameterError, match=r"settings\.shared: .* it must be at most 10"):
        source.write()


# ------------------------------------------------------------------ crossed sections


def test_a_crossed_section_is_a_sweep_of_each_setting_and_method() -> None:
    found = sweeps.blocks(PARAMS, "budgets")
    assert list(found) == ["tiny-kept", "tiny-herded", "other-kept", "other-herded"]
    cells = sweeps.cells("tiny-herded", deepcopy(PARAMS), "budgets")
    assert {value: cell.params.memory.per_class for value, cell in cells.items()} == {
        "1": 1,
        "2": 2,
    }
    assert {cell.params.memory.rule for cell in cells.values()} == {"herding"}
    assert list(sweeps.cells("other-kept", deepcopy(PARAMS), "budgets")) == ["3"]
    assert sweeps.blocks(PARAMS, "sweeps") == PARAMS["sweeps"]


def test_a_method_can_have_values_of_its_own() -> None:
    params = deepcopy(PARAMS)
    params["budgets"]["values"]["other"] = {"herded": [0, 3, 10**6], "others": [3]}
    found = {name: block["values"] for name, block in sweeps.blocks(params, "budgets").items()}
    assert found == {
        **{"tiny-kept": [1, 2], "tiny-herded": [1, 2]},
        **{"other-kept": [3], "other-herded": [0, 3, 10**6]},
    }
    params["budgets"]["values"]["other"] = {"herded": [4], "kept": [5]}
    assert sweeps.blocks(params, "budgets")["other-kept"]["values"] == [5]


def test_a_crossed_section_can_change_a_number_of_its_settings() -> None:
    """And no other of that setting, and nothing of the method but its name."""
    assert list(sweeps.blocks(PARAMS, "alphas")) == ["shared-fedavg", "shared-kept"]
    cells = sweeps.cells("shared-kept", deepcopy(PARAMS), "alphas")
    for value, alpha in {"0.5": 0.5, "1.0": 1.0}.items():
        expected = experiments.experiment("shared", "kept", deepcopy(PARAMS)).resolved()
        expected["setting"]["split"]["alpha"] = alpha
        expected["method"]["name"] = f"kept-shared-kept-{value}"
        assert cells[value].resolved() == expected
    assert len(cells) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"values": {"tiny": [1]}},
            "params.yaml: budgets.values.other is None; it must be a list of numbers",
        ),
        ({"values": {"tiny": [], "other": [1]}}, "budgets.tiny-kept.values is []; it must be a li"),
        (
            {"values": {"tiny": [1], "other": {"kept": [1]}}},
            "params.yaml: budgets.values.other is {'kept': [1]}; it must be a list of numbers, or "
            "one for methods by name and one for all others",
        ),
        (
            {"values": {"tiny": [1], "other": {"kep": [1], "others": [1]}}},
            "values.other 'kep' is unknown; did you mean 'kept'? known: herded, kept, others",
        ),
        (
            {"key": "methods.{methd}.step"},
            "budgets.key is 'methods.{methd}.step'; it must be a key under "
            "settings.{setting}. or methods.{method}.",
        ),
        ({"key": "methods.{method}.memory.per_clas"}, "'per_clas' is unknown; did you mean 'per_c"),
        ({"beside": ["fedavg", "kept"]}, "beside is ['kept']; it must be in grid.method or abl"),
        ({"method": ["kepd"]}, "params.yaml: methods 'kepd' is unknown; did you mean 'kept'?"),
        ({"values": {"tiny": ["x"], "other": [1]}}, "per_class is 'x'; it must be a whole num"),
        ({"settings": []}, "params.yaml: budgets: 'settings' is unknown; did you mean 'setting'?"),
    ],
    ids=str,
)
def test_slips_in_a_crossed_section_are_refused(changes: dict[str, Any], message: str) -> None:
    params = deepcopy(PARAMS)
    params["budgets"] |= changes
    with pytest.raises(ParameterError, match=re.escape(message)):
        for name in sweeps.blocks(params, "budgets"):
            sweeps.cells(name, params, "budgets")


def test_each_kind_is_kept_and_gathered_in_a_place_of_its_own(
    params: dict[str, Any], trained: list[str]
) -> None:
    sweeps.run("tiny-kept", "data", "budgets")
    assert trained == ["kept-tiny-kept-1", "kept-tiny-kept-2"]
    assert (sweeps.ROOT / "data/budgets/tiny-kept/runs").is_dir()
    with pytest.raises(ParameterError) as error:
        sweeps.gather("data", "budgets")
    assert str(error.value) == (
        "no records of sweep tiny-herded at 1, 2; make them with `dvc repro budget@tiny-herded`"
    )
    params["budgets"] |= {"setting": ["tiny"], "method": ["kept"]}
    found = sweeps.gather("data", "budgets")
    assert len(trained) == 2 and list(found["tiny-kept"]) == ["1", "2"]
    cells = [record.cell[1:] for record in sweeps.records(found)]
    assert cells == [(f"kept-tiny-kept-{value}", seed) for value in (1, 2) for seed in (0, 1)]


def test_plans_are_those_of_each_alpha_and_missing_ones_have_their_stage(
    params: dict[str, Any],
) -> None:
    found = sweeps.run("shared-fedavg", "data", "alphas")
    assert (sweeps.ROOT / "data/alphas/shared-fedavg/runs").is_dir()
    shares = {
        value: [config.plain(record.about["setting"]["split"])["alpha"] for record in records]
        for value, records in found.items()
    }
    assert shares == {"0.5": [0.5], "1.0": [1.0]}
    hashes = {record.about["identity"]["plan"] for records in found.values() for record in records}
    assert len(hashes) == 2
    with pytest.raises(ParameterError) as error:
        sweeps.gather("data", "alphas")
    assert str(error.value) == (
        "no records of sweep shared-kept at 0.5, 1.0; make them with `dvc repro alpha@shared-kept`"
    )


def test_of_the_papers_those_are_gathered_that_are_there(params: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as error:
        sweeps.gather("data/paper", "paper_alphas")
    assert str(error.value) == (
        "no records of sweep far-fedavg at 0.5; make them with `make paper SETTING=far`"
    )
    sweeps.run("far-fedavg", "data/paper", "paper_alphas")
    assert (sweeps.ROOT / "data/paper/alphas/far-fedavg/runs").is_dir()
    assert list(sweeps.gather("data/paper", "paper_alphas")) == ["far-fedavg"]
    params["paper_alphas"]["values"]["farther"] = [0.5]
    sweeps.run("farther-fedavg", "data/paper", "paper_alphas")
    params["paper_alphas"]["values"]["farther"] = [0.5, 1.0]  # of which one is missing
    assert list(sweeps.gather("data/paper", "paper_alphas")) == ["far-fedavg"]


def test_notebooks_compute_the_tiny_alphas_themselves(
    params: dict[str, Any], trained: list[str]
) -> None:
    found = sweeps.gather(grid.TINY, "tiny_alphas")
    assert trained == ["fedavg-shared-fedavg-2.0", "kept-shared-kept-2.0"]
    assert list(found) == ["shared-fedavg", "shared-kept"]
    assert (sweeps.ROOT / grid.TINY / "alphas/shared-kept/runs").is_dir()


def test_captions_of_a_crossed_section_are_those_of_its_sweeps(params: dict[str, Any]) -> None:
    assert sweeps.captions("alphas") == {
        "shared-fedavg": ("Dirichlet", "1.0"),
        "shared-kept": ("Dirichlet", "1.0"),
    }


def test_what_stands_beside_is_trained_by_another_grid(params: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="no records of train@tiny-fedavg-0to1; make them"):
        sweeps.beside("data", "budgets")
    found = sweeps.beside(grid.TINY, "tiny_budgets")  # in a notebook it is computed
    assert [record.cell for record in found] == [("tiny", "fedavg", 0)]
    assert sweeps.beside("data", "alphas") == []
    params["tiny_budgets"] |= {"setting": ["other", "tiny"], "values": {"other": [2], "tiny": [2]}}
    found = sweeps.beside(grid.TINY, "tiny_budgets")  # no grid trains the other setting
    assert [record.cell for record in found] == [("tiny", "fedavg", 0)]
