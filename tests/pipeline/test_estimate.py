"""What a setting takes: steps, evaluations, time, memory and disk."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
import torch

from stamp_core.client.workspace import Workspace
from stamp_core.config.decode import ParameterError
from stamp_core.data import split
from stamp_core.engine.experiment import Experiment
from stamp_core.models.flat import FlatSGD
from stamp_core.pipeline import estimate
from stamp_core.pipeline.estimate import Needs, StepCost

NEEDS = Needs(steps=10, hours=1.0, all_hours=2.0, memory=4 * 10**9, disk=3 * 10**9)


def work(experiment: Experiment) -> Workspace:
    return Workspace(experiment.setting, experiment.dataset())


# ------------------------------------------------------------------ what it takes


def test_steps_are_those_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = small.tiny("fedavg")
    plan = split.make_plan(experiment.setting.split, experiment.dataset(), seed=0)
    taken, step = [0], FlatSGD.step

    def counted(self: FlatSGD) -> None:
        taken[0] += 1
        step(self)

    monkeypatch.setattr(FlatSGD, "step", counted)
    small.run(experiment)
    assert estimate.count_steps(plan, work(experiment)) == taken[0] > 6 * 4  # rounds x clients


def test_evaluated_images_are_everybodys_once_and_each_clients_own_per_experience() -> None:
    experiment = small.tiny("fedavg")
    dataset = experiment.dataset()
    plan = split.make_plan(experiment.setting.split, dataset, seed=0)
    own = [{label for task in client for label in task.classes} for client in plan.clients]
    count = {label: int((dataset.y_test == label).sum()) for label in range(10)}
    everybody = sum(count[label] for label in set().union(*own))
    each = sum(count[label] for labels in own for label in labels)
    assert estimate.count_evaluated(plan, work(experiment)) == 3 * (everybody + each)


def test_steps_are_timed_and_leave_the_weights_alone() -> None:
    here = work(small.tiny("fedavg"))
    before = here.model.parameters.clone()
    speed = estimate.time_steps(here)
    assert torch.equal(here.model.parameters, before)
    assert 0 < speed.seconds < 1 and speed.parameters == small.P
    assert 10**7 < speed.memory < 10**11


def test_what_is_needed_is_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg keeps two vectors a client; replay so many images of each class it has met."""
    experiments = [small.tiny("fedavg"), small.tiny("replay", memory={"exemplars_per_class": 7})]
    speed = StepCost(seconds=3.6, memory=10**9, parameters=small.P)
    monkeypatch.setattr(estimate, "time_steps", lambda _: speed)
    monkeypatch.setattr(estimate, "count_steps", lambda *_: 2000)
    monkeypatch.setattr(estimate, "count_evaluated", lambda *_: 3 * 16 * 1000)
    monkeypatch.setattr(estimate, "relative_costs", lambda: {"fedavg": 1.0, "replay": 2.5})
    plan = split.make_plan(experiments[0].setting.split, experiments[0].dataset(), seed=0)
    named = [
        SimpleNamespace(method=m, params=c.params)
        for m, c in zip(("fedavg", "replay"), experiments, strict=True)
    ]
    found = estimate.compute_needs(named, plan, work(experiments[0]), workers=2)  # type: ignore[arg-type]
    assert found.hours == pytest.approx(1.5)  # (2000 + 1000) steps of 3.6 s by two processes
    assert found.all_hours == pytest.approx(1.5 * 3.5) and found.steps == 2000
    held = 4 * 2 * 4 * small.P
    images = 7 * sum(len(plan.seen(u, 3)) for u in range(4)) * 64
    assert found.memory == 2 * 10**9 + max(held, images) and found.disk == 3 * max(held, images)


def test_other_methods_are_compared_with_fedavg_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(estimate, "ROOT", tmp_path)
    (tmp_path / "figures").mkdir()
    rows = {"fedavg": {"client_seconds": {"mean": 2.0}}, "stamp": {"client_seconds": {"mean": 5.0}}}
    (tmp_path / "figures/summary.json").write_text(json.dumps({"glyphs": rows}))
    assert estimate.relative_costs() == {"fedavg": 1.0, "stamp": 2.5}
    (tmp_path / "figures/summary.json").write_text("{}")
    assert estimate.relative_costs() == {"fedavg": 1.0}


def test_too_little_memory_or_disk_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = {"memory": 5 * 10**9, "disk": 5 * 10**9}
    monkeypatch.setattr(
        estimate.psutil, "virtual_memory", lambda: SimpleNamespace(available=free["memory"])
    )
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: SimpleNamespace(free=free["disk"]))
    estimate.refuse_shortage(NEEDS, "one")
    free["memory"] = 10**9
    message = "one needs about 4.0 GB of memory, 1.0 GB are free: lower one.network.micro"
    with pytest.raises(ParameterError, match=re.escape(message)):
        estimate.refuse_shortage(NEEDS, "one")
    free.update(memory=5 * 10**9, disk=10**9)
    with pytest.raises(OSError, match=re.escape("one needs about 3.0 GB in")):
        estimate.refuse_shortage(NEEDS, "one")
