"""The paper's settings: what they take, and that one command trains and shows them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
import torch
from test_pipeline import Project

from stamp_core import config, estimate, paper, split
from stamp_core.config import ParameterError
from stamp_core.estimate import Needs, Speed
from stamp_core.experiments import Experiment
from stamp_core.vectors import Descent
from stamp_core.workspace import Workspace

NEEDS = Needs(steps=10, hours=1.0, all_hours=2.0, memory=4 * 10**9, disk=3 * 10**9)


def work(cell: Experiment) -> Workspace:
    return Workspace(cell.setting, cell.images())


# ------------------------------------------------------------------ what it takes


def test_steps_are_those_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = small.tiny("fedavg")
    plan = split.make(cell.setting.split, cell.images(), seed=0)
    taken, step = [0], Descent.step

    def counted(self: Descent) -> None:
        taken[0] += 1
        step(self)

    monkeypatch.setattr(Descent, "step", counted)
    small.run(cell)
    assert estimate.training_steps(plan, work(cell)) == taken[0] > 6 * 4  # rounds x clients


def test_pictures_judged_are_everybodys_once_and_each_clients_own_after_every_step() -> None:
    cell = small.tiny("fedavg")
    images = cell.images()
    plan = split.make(cell.setting.split, images, seed=0)
    own = [{label for task in client for label in task.classes} for client in plan.clients]
    count = {label: int((images.y_test == label).sum()) for label in range(10)}
    everybody = sum(count[label] for label in set().union(*own))
    each = sum(count[label] for labels in own for label in labels)
    assert estimate.judged_pictures(plan, work(cell)) == 3 * (everybody + each)


def test_steps_are_timed_and_leave_the_weights_alone() -> None:
    here = work(small.tiny("fedavg"))
    before = here.model.parameters.clone()
    speed = estimate.time_steps(here)
    assert torch.equal(here.model.parameters, before)
    assert 0 < speed.seconds < 1 and speed.parameters == small.P
    assert 10**7 < speed.memory < 10**11


def test_what_is_needed_is_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg keeps two vectors a client; replay so many pictures of each class it has met."""
    cells = [small.tiny("fedavg"), small.tiny("replay", memory={"per_class": 7})]
    speed = Speed(seconds=3.6, memory=10**9, parameters=small.P)
    monkeypatch.setattr(estimate, "time_steps", lambda _: speed)
    monkeypatch.setattr(estimate, "training_steps", lambda *_: 2000)
    monkeypatch.setattr(estimate, "judged_pictures", lambda *_: 3 * 16 * 1000)
    monkeypatch.setattr(estimate, "relative", lambda: {"fedavg": 1.0, "replay": 2.5})
    plan = split.make(cells[0].setting.split, cells[0].images(), seed=0)
    named = [
        SimpleNamespace(method=m, params=c.params)
        for m, c in zip(("fedavg", "replay"), cells, strict=True)
    ]
    found = estimate.needs(named, plan, work(cells[0]), workers=2)  # type: ignore[arg-type]
    assert found.hours == pytest.approx(1.5)  # (2000 + 1000) steps of 3.6 s by two processes
    assert found.all_hours == pytest.approx(1.5 * 3.5) and found.steps == 2000
    held = 4 * 2 * 4 * small.P
    pictures = 7 * sum(len(plan.seen(u, 3)) for u in range(4)) * 64
    assert found.memory == 2 * 10**9 + max(held, pictures) and found.disk == 3 * max(held, pictures)


def test_other_methods_are_compared_with_fedavg_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(estimate, "ROOT", tmp_path)
    (tmp_path / "figures").mkdir()
    rows = {"fedavg": {"client_seconds": {"mean": 2.0}}, "stamp": {"client_seconds": {"mean": 5.0}}}
    (tmp_path / "figures/summary.json").write_text(json.dumps({"glyphs": rows}))
    assert estimate.relative() == {"fedavg": 1.0, "stamp": 2.5}
    (tmp_path / "figures/summary.json").write_text("{}")
    assert estimate.relative() == {"fedavg": 1.0}


def test_too_little_memory_or_disk_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = {"memory": 5 * 10**9, "disk": 5 * 10**9}
    monkeypatch.setattr(
        estimate.psutil, "virtual_memory", lambda: SimpleNamespace(available=free["memory"])
    )
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: SimpleNamespace(free=free["disk"]))
    estimate.refuse_lack(NEEDS, "one")
    free["memory"] = 10**9
    message = "settings.one needs about 4.0 GB of memory, 1.0 GB are free: lower settings.one.netw"
    with pytest.raises(ParameterError, match=re.escape(message)):
        estimate.refuse_lack(NEEDS, "one")
    free.update(memory=5 * 10**9, disk=10**9)
    with pytest.raises(OSError, match=re.escape("settings.one needs about 3.0 GB in")):
        estimate.refuse_lack(NEEDS, "one")


# ------------------------------------------------------------------ what is run


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The notebooks that would have been executed, by their names as executed."""
    found: list[str] = []

    def execute(notebook: str, name: str, /, **_: str) -> str:
        found.append(f"{notebook} {name}")
        return name if "failing" in name else ""

    monkeypatch.setattr(paper, "execute", execute)
    monkeypatch.setattr(paper, "estimated", lambda *_: NEEDS)
    monkeypatch.setattr(estimate, "refuse_lack", lambda *_: None)
    monkeypatch.setattr(paper, "done", lambda cell: cell[1] == "stamp")
    cells = [("one", method, "0") for method in ("fedavg", "failing", "stamp", "replay")]
    monkeypatch.setattr(config, "cells", lambda name: iter(cells))
    monkeypatch.setattr(paper, "alphas", lambda name: [f"{name}-fedavg"])
    return found


def test_what_is_done_is_kept_and_a_failure_leaves_the_others_standing(
    ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert paper.main("one") == 1
    trained = [name for name in ran if name.startswith("2_train")]
    assert trained == [
        f"2_train paper-train-one-{method}-0" for method in ("fedavg", "failing", "replay")
    ]
    assert ran[-1] == "5_sweep paper-sweep-one-fedavg"  # nothing is shown of half a setting
    assert "failed: the tracebacks are in paper-train-one-failing-0" in capsys.readouterr().out


def test_an_estimate_trains_nothing(ran: list[str]) -> None:
    assert paper.main("one", train_it=False) == 0 and not ran


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(
        ParameterError, match="'cifar100_c3' is unknown; did you mean 'cifar100_c2'"
    ):
        paper.main("cifar100_c3")


def test_every_setting_of_the_paper_is_one_of_params_yaml() -> None:
    params = config.read()
    cells = list(config.cells("paper", params))
    assert {setting for setting, _, _ in cells} <= params["settings"].keys()
    assert {method for _, method, _ in cells} <= params["methods"].keys()
    assert len({seeds for _, _, seeds in cells}) == 5


def test_settings_with_alpha_are_trained_at_other_values_too() -> None:
    values, seeds, methods = 4, 5, config.read()["paper_alphas"]["method"]
    assert [name.partition("-")[2] for name in paper.alphas("cifar10_alpha")] == methods
    assert paper.trainings("cifar10_alpha-fedavg") == values * seeds
    assert paper.alphas("cifar100_c2") == []


def test_one_command_trains_a_setting_shows_it_and_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    project = Project(tmp_path / "project")
    values = project.read()
    values["paper"] = {"setting": ["tiny"], "method": ["fedavg", "stamp"], "seeds": [0]}
    values["paper_alphas"] |= {"setting": [], "values": {}}
    project.write(values)
    said = project.run("python", "-m", "stamp_core.paper", "tiny", "--estimate")
    assert "FedAvg takes" in said and not (project.root / "data/paper").exists()
    project.run("python", "-m", "stamp_core.paper", "tiny")
    for name in ("accuracy.png", "results.md"):
        assert (project.root / "figures/paper/tiny" / name).exists()
    assert (project.root / "figures/paper/paper.md").exists()
    record = project.root / "data/paper/runs/tiny-stamp-0/0/run.json"
    before = record.stat().st_mtime_ns
    assert "paper-train" not in project.run("python", "-m", "stamp_core.paper", "tiny")
    assert record.stat().st_mtime_ns == before
