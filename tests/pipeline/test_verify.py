"""`stamp verify`: a record that says something wrong of itself is named."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stamp_core import Record, load_experiment, train
from workbench import import_plan, load_plans
from workbench.report.frames import final_score
from workbench.workflow import command
from workbench.workflow.verify import verify_record

NAMES = ("fedavg", "stamp", "fedala", "local", "joint")


@pytest.fixture(scope="module")
def records():
    experiments = {name: load_experiment("tiny", name) for name in NAMES}
    some = experiments["stamp"]
    plans = load_plans(some.setting, some.dataset(), "0")
    return {name: train(each, plans)[0] for name, each in experiments.items()}


def failing(record: Record, folder: Path) -> list[str]:
    """The checks that do not hold for a record, which is saved first: its digest is right."""
    record.save(folder)
    return [check.name for check in verify_record(folder) if not check.holds]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_trained_here_is_verified(name, records, tmp_path):
    records[name].save(tmp_path / "0")
    checks = {check.name: check.found for check in verify_record(tmp_path / "0")}
    assert [*checks] == ["digest", "parameters", "data", "plan", "code", "accuracy"]
    assert failing(records[name], tmp_path / "0") == []
    exact = "there is no global model" if name == "local" else "at most 0.0% from the record"
    assert exact in checks["accuracy"]


def test_a_record_of_an_imported_plan_is_verified_with_its_file(tmp_path, capsys):
    path, experiment = tmp_path / "mine.json", load_experiment("tiny", "fedavg")
    path.write_text('{"clients": [[{"classes": [0, 1, 2]}, {"classes": [5]}]]}')
    train(experiment, {3: import_plan(path, experiment.dataset(), 3)})[3].save(tmp_path / "3")
    assert command.main(["verify", str(tmp_path / "3"), "--plan", str(path)]) == 0
    path.write_text('{"clients": [[{"classes": [0, 1, 2]}, {"classes": [6]}]]}')
    assert [c.name for c in verify_record(tmp_path / "3", path) if not c.holds] == ["plan"]
    capsys.readouterr()
    assert command.main(["verify", str(tmp_path / "3")]) == 1
    assert "split.kind is 'file'" in capsys.readouterr().err


def in_setting(about: dict[str, Any]) -> None:
    about["setting"]["training"]["lr"] = 0.05


def in_plan(about: dict[str, Any]) -> None:
    about["seed"] = 1


def in_code(about: dict[str, Any]) -> None:
    about["identity"]["code"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "name"), [(in_setting, "parameters"), (in_plan, "plan"), (in_code, "code")]
)
def test_another_statement_is_named(change, name, records, tmp_path):
    about = deepcopy(records["stamp"].about)
    change(about)
    assert failing(replace(records["stamp"], about=about), tmp_path / "0") == [name]


def test_a_forged_record_is_named_and_kept_out_of_the_leaderboard(records, tmp_path, capsys):
    """Another accuracy, plan and code, each with a digest that fits, and a changed file."""
    scores = {name: array.copy() for name, array in records["stamp"].scores.items()}
    scores["global"][0, -1, 0, 0] += np.float32(0.1)
    replace(records["stamp"], scores=scores).save(tmp_path / "better/0")
    for change in (in_plan, in_code):
        about = deepcopy(records["stamp"].about)
        change(about)
        replace(records["stamp"], about=about).save(tmp_path / change.__name__ / "0")
    records["fedavg"].save(tmp_path / "changed/0")
    (tmp_path / "changed/0/run.json").open("a").write(" ")
    for name in ("fedavg", "stamp"):
        records[name].save(tmp_path / "runs" / name / "0")
    page = tmp_path / "page.md"
    assert command.main(["leaderboard", str(tmp_path), "--page", str(page)]) == 0
    rows = [line.split(" | ") for line in page.read_text().splitlines() if "| tiny |" in line]
    best = sorted(("fedavg", "stamp"), key=lambda name: -final_score(records[name], "global"))
    assert [row[1].rstrip("‡† ") for row in rows] == best
    named = [line.split(": ")[1:3] for line in capsys.readouterr().err.splitlines()]
    reasons = {Path(folder).parent.name: why.split()[0] for folder, why in named}
    assert reasons == {"better": "accuracy", "in_plan": "plan", "in_code": "code", "changed": "the"}
    assert command.main(["leaderboard", str(tmp_path / "in_code"), "--page", str(page)]) == 1
    assert command.main(["leaderboard", str(tmp_path / "nowhere"), "--page", str(page)]) == 1
