"""`stamp verify`: a record that says something wrong of itself is named."""

import hashlib
import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stamp_core import Record, load_experiment, train
from stamp_core.core import paths, vision
from workbench import import_plan, load_plans
from workbench.report.frames import final_score
from workbench.workflow import command
from workbench.workflow.leaderboard import verify_all, write_leaderboard
from workbench.workflow.verify import experiment_of, verify_record

Change = Callable[[Record], Record]
NAMES = ("fedavg", "stamp", "fedala", "local", "joint")


@pytest.fixture(scope="module")
def records():
    experiments = {name: load_experiment("tiny", name) for name in NAMES}
    some = experiments["stamp"]
    plans = load_plans(some.setting, some.dataset(), "0")
    return {name: train(each, plans)[0] for name, each in experiments.items()}


@pytest.mark.parametrize("name", NAMES)
def test_what_was_trained_here_is_verified(name, records, tmp_path):
    records[name].save(tmp_path / "0")
    checks = verify_record(tmp_path / "0")
    names = ["digest", "parameters", "code", "data", "plan", "accuracy"]
    assert [check.name for check in checks if check.holds] == names and len(checks) == 6
    exact = "there is no global model" if name == "local" else "at most 0.0% from the record"
    assert exact in checks[-1].found


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


def stated(*path: str, value: Any) -> Change:
    """What sets a value that a record says of itself, with the digest of parameters that fits."""

    def change(record: Record) -> Record:
        block = about = deepcopy(record.about)
        for key in path[:-1]:
            block = block[key]
        block[path[-1]] = value
        changed = replace(record, about=about)
        if path[0] in ("setting", "method"):
            text = json.dumps(experiment_of(changed).resolved(), sort_keys=True)
            about["identity"]["parameters"] = hashlib.sha256(text.encode()).hexdigest()
        return changed

    return change


def scored(by: float, experiences: slice, **more: Any) -> Change:
    """What changes every global accuracy of some experiences."""

    def change(record: Record) -> Record:
        scores = {name: array.copy() for name, array in record.scores.items()}
        scores["global"][:, experiences] += np.float32(by)
        return replace(record, scores=scores, **more)

    return change


def replaced_rate(record: Record) -> Record:
    about = deepcopy(record.about)
    about["setting"]["training"]["lr"] = 0.05
    return replace(record, about=about)


def reshaped(record: Record) -> Record:
    return replace(record, weights={k: v[None] for k, v in record.weights.items()})


CLIENTS = ("setting", "split", "clients")
MARKUP = "x|<script>alert(1)</script> [a](javascript:b)\n| forged | http://a.b"
FORGED: dict[str, tuple[Change, str]] = {  # and why it is refused; "": shown as it is computed
    "no weights, all right": (scored(1, slice(None), weights={}), "weights of the global model"),
    "10 points more": (scored(0.1, slice(-1, None)), "accuracy "),
    "another seed": (stated("seed", value=1), "plan "),
    "another code": (stated("identity", "code", value="0" * 64), "code "),
    "another rate": (replaced_rate, "parameters "),
    "0.99 points more": (scored(0.0099, slice(-1, None)), ""),
    "no forgetting": (scored(-1, slice(-1)), ""),
    "costs": (lambda r: replace(r, history=[{**h, "images": 0} for h in r.history]), ""),
    "device": (lambda r: replace(r, environment={"device": MARKUP, "cores": 2}), ""),
    "weights of another method": (stated("method", "name", value="mine"), "has the weights of"),
    "sweep with markup": (stated("sweep", value=["a", MARKUP]), "the name of a record is"),
    "a copy": (lambda r: r, "seed 0 is in "),
    "weights of another shape": (reshaped, "size mismatch"),
    "scores of another shape": (lambda r: replace(r, tests=r.tests[:1]), "the shape of"),
    "a seed of text": (stated("seed", value="0"), "seed is '0'"),
    "no setting": (lambda r: replace(r, about={"seed": 0}), "malformed: KeyError"),
    "a list": (lambda r: replace(r, about=["seed"]), "malformed: TypeError"),
    "a history of text": (lambda r: replace(r, history=[{"images": "x"}]), "malformed: "),
    "a download": (stated("setting", "data", value={"source": "cifar100"}), "cifar100 must be in"),
    "many clients": (stated(*CLIENTS, value=99_999), "the shape of the global scores"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forgery_costs_its_own_row_or_shows_what_is_computed(
    name, records, tmp_path, monkeypatch
):
    monkeypatch.setattr(vision, "load_torchvision", lambda: pytest.fail("a download"))
    monkeypatch.setattr(paths, "RAW", tmp_path)  # where there are no images
    change, why = FORGED[name]
    honest, forged, other = (tmp_path / each / "0" for each in ("honest", "forged", "other"))
    records["fedavg"].save(other)
    records["stamp"].save(honest)
    change(records["stamp"]).save(forged)
    twin = name in ("a copy", "weights of another method")
    table, refused = verify_all([honest, forged, other] if twin else [forged, other])
    if why:
        assert why in refused[forged] and "\n" not in refused[forged]
        assert sorted(table.method) == ["fedavg", "stamp"][: 1 + (name == "a copy")]
        return
    claimed = ["machine", "images"]
    expected = verify_all([honest, other])[0]
    assert table.drop(columns=claimed).equals(expected.drop(columns=claimed)) and not refused
    page = write_leaderboard(table, tmp_path / "page.md").read_text()
    assert page.count("\n") == 8 and not re.search(r"<|\[|://|forgetting", page)


def test_the_page_has_what_verifies_and_the_rest_is_named(records, tmp_path, capsys):
    for name in ("fedavg", "stamp", "changed"):
        records["fedavg" if name == "changed" else name].save(tmp_path / name / "0")
    (tmp_path / "changed/0/run.json").open("a").write(" ")
    page = tmp_path / "page.md"
    assert command.main(["leaderboard", str(tmp_path), "--page", str(page)]) == 0
    rows = [line.split(" | ") for line in page.read_text().splitlines() if "| tiny |" in line]
    best = sorted(("fedavg", "stamp"), key=lambda name: -final_score(records[name], "global"))
    assert [row[1].rstrip("‡† ") for row in rows] == best
    assert f"{tmp_path}/changed/0: the record in" in capsys.readouterr().err
    for folder in ("changed", "nowhere"):
        assert command.main(["leaderboard", str(tmp_path / folder), "--page", str(page)]) == 1


def test_training_again_compares_bits(records, tmp_path, capsys):
    record = records["fedavg"]
    almost = {name: value * np.float32(1 + 1e-6) for name, value in record.weights.items()}
    record.save(tmp_path / "sound")
    replace(record, weights=almost).save(tmp_path / "almost")
    words = ["verify", "--train", str(tmp_path / "sound"), str(tmp_path / "almost")]
    assert command.main(words) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "  training  " in line]
    assert [line.split()[2] for line in lines] == ["ok", "NO"]
