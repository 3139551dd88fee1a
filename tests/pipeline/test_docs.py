"""The complete files in README.md and docs/ work where they are put."""

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import small
from pfllib import client, write_folder
from PIL import Image

from stamp_core import Record, load_dataset, load_experiment, train
from stamp_core.config.params import read_params
from stamp_core.core import paths
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.registry import get_method
from workbench import import_plan, load_plans

PAGES = [paths.ROOT / "README.md", *sorted((paths.ROOT / "docs").glob("*.md"))]
FILE = re.compile(
    r"This is all\s+of\s+`workbench/([\w/]+)/(\w+)\.py`[^`]*?```python\n(.*?)```", re.S
)
FILES = {
    (folder, name): code
    for page in PAGES
    for folder, name, code in FILE.findall(page.read_text("utf-8"))
}

LOADS = re.compile(  # but for the accountant, whose package is an extra
    r"from (stamp_core|workbench)(?!\.studies\.accountant)\b|values = |\w+ = load_experiment\("
)
PLANS = (paths.ROOT / "docs" / "plans.md").read_text("utf-8")


def blocks(language: str, text: str = PLANS) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def named(folder: str) -> list[str]:
    return [name for place, name in FILES if place == folder]


@pytest.fixture(autouse=True)
def added(tmp_path, monkeypatch):
    """All files of the pages are in the package during a test; no cache or download is shared."""
    for (folder, name), code in FILES.items():
        package = importlib.import_module(f"workbench.{folder.replace('/', '.')}")
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.py").write_text(code)
        if str(place) not in package.__path__:
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(place)])
    monkeypatch.setattr(Experiment, "files", lambda experiment: [])
    monkeypatch.setattr("stamp_core.core.fingerprint.combined_fingerprint", lambda *files: "")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(paths, "RAW", tmp_path)
    yield
    for folder, name in FILES:
        sys.modules.pop(f"workbench.{folder.replace('/', '.')}.{name}", None)


def run(kind: str, **preset: Any) -> Record:
    """One seed of the setting `tiny` with a method and some of its parameters."""
    params = read_params()
    params["methods"]["example"] = {"kind": kind, **preset}
    experiment = load_experiment("tiny", "example", params)
    return train(experiment, load_plans(experiment.setting, experiment.dataset(), "0"), 1, "cpu")[0]


def differ(one: Record, other: Record) -> bool:
    return any((value != other.weights[name]).any() for name, value in one.weights.items())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_import_what_there_is_and_load_their_experiments(page):
    for code in map(dedent, blocks("python", page.read_text("utf-8"))):
        found: dict[str, Any] = {}
        for node in ast.walk(ast.parse(code)):
            text = ast.unparse(node) if isinstance(node, ast.ImportFrom | ast.Assign) else ""
            if LOADS.match(text):
                exec(text, found)


def test_every_kind_of_extension_has_a_complete_file():
    assert {folder for folder, _ in FILES} == {"methods", "selection", "sources"}


@pytest.mark.parametrize("name", named("methods"))
def test_a_method_is_fedavg_with_its_neutral_parameters_only(name):
    fedavg = run("fedavg")
    small.assert_same_weights(run(name, **get_method(name).fedavg_equivalent or {}), fedavg)
    assert differ(run(name), fedavg)


@pytest.mark.parametrize("name", named("selection"))
def test_a_rule_selects_other_exemplars_than_a_random_choice(name):
    memory = {"exemplars_per_class": 3, "merge": "reservoir"}
    random = run("replay", memory={**memory, "selection": "uniform"})
    chosen = run("replay", memory={**memory, "selection": name})
    assert chosen.history[-1]["disk"] == random.history[-1]["disk"]
    assert differ(chosen, random)


def test_stripes_are_learnable_images():
    dataset = load_dataset({"source": "stripes", "noise": 0.5})
    assert dataset.x_train.shape == (1000, 1, 12, 12) and len(dataset.classes) == 10


def test_a_table_names_image_files(tmp_path):
    for value in range(4):
        Image.fromarray(np.full((40, 50, 3), value, np.uint8)).save(tmp_path / f"{value}.png")
    rows = ["file,label,subset", "0.png,a,train", "1.png,b,train", "2.png,a,test", "3.png,b,test"]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    dataset = load_dataset({"source": "table", "root": ".", "size": 8})
    assert dataset.x_train[:, 0, 0, 0].tolist() == [0, 1] and dataset.classes == ("a", "b")


def test_the_page_on_plans_runs_as_it_stands(tmp_path, monkeypatch):
    """All but the part that needs Flower Datasets, beside the files that it speaks of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAMP_PROGRESS", "none")
    dataset = load_dataset({"source": "digits"})
    parts = [range(0, 600), range(600, 1200)]
    write_folder(
        Path("PFLlib/dataset/Digits"), [client(dataset, own, [own[0] // 6]) for own in parts]
    )
    images = {"x": dataset.x_train.flip(0).numpy(), "y": dataset.y_train.flip(0).numpy()}
    np.savez("hub.npz", **images)
    Path("parts.json").write_text(json.dumps({p: [*own] for p, own in enumerate(parts)}))
    np.save("class_order.npy", np.stack([np.random.default_rng(u).permutation(10) for u in (0, 1)]))
    (listed,), (table,) = blocks("json"), blocks("text")
    Path("mine.json").write_text(listed)
    Path("mine.csv").write_text(table)
    found: dict[str, Any] = {**images, "load_plans": load_plans}
    plans = []
    for code in blocks("python"):
        if "flwr_datasets" not in code:
            exec(code, found)
            plans.append(found.get("plan"))
    *_, drawn, ordered, pfllib, flwr = plans
    assert {*found["records"]} == {0, 1} and (found["rows"] == np.arange(1347)[::-1]).all()
    assert import_plan("ours.json", dataset) == drawn
    assert import_plan("pfllib.json", dataset) == pfllib
    assert [len(plan.clients) for plan in (ordered, pfllib, flwr)] == [2, 2, 2]
    assert import_plan("mine.csv", dataset).clients[1][1].train == (10, 15)
