"""Trainings with plans from elsewhere: those of the plans themselves, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pfllib import client, write_folder
from small import assert_same, plan, run, tiny

from stamp_core.config.decode import ParameterError
from stamp_core.config.schema import Split
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan
from stamp_core.engine.train import train
from workbench.exchange import export_plan, import_plan
from workbench.exchange.partitions import find_images, import_flwr, import_pfllib

# Each client has images of all six classes, so the classes of a client are cut as they were drawn.
SHARED = {"clients": 3, "tasks": 2, "classes_per_task": 3, "order": "given", "alpha": 100.0}


def client_images(plan: Plan) -> list[list[int]]:
    return [[i for task in own for i in task.train or ()] for own in plan.clients]


def by_table(plan: Plan, dataset: ImageDataset, folder: Path) -> Plan:
    export_plan(plan, dataset, folder / "plan.csv")
    return import_plan(folder / "plan.csv", dataset)


def by_pfllib(plan: Plan, dataset: ImageDataset, folder: Path) -> Plan:
    parts = [client(dataset, part) for part in client_images(plan)]
    return import_pfllib(write_folder(folder / "Set", parts), dataset, tasks=2)


def by_flwr(plan: Plan, dataset: ImageDataset, folder: Path) -> Plan:
    theirs = torch.randperm(len(dataset.y_train), generator=torch.Generator().manual_seed(0))
    row = {ours: place for place, ours in enumerate(theirs.tolist())}
    parts = {u: [row[i] for i in part] for u, part in enumerate(client_images(plan))}
    (folder / "parts.json").write_text(json.dumps(parts))
    rows = find_images(dataset, dataset.x_train[theirs].numpy(), dataset.y_train[theirs].numpy())
    return import_flwr(folder / "parts.json", dataset, tasks=2, rows=rows)


@pytest.mark.parametrize("way", [by_table, by_pfllib, by_flwr])
def test_a_training_with_an_imported_plan_is_that_with_the_plan(way, tmp_path):
    experiment = tiny("stamp", split=SHARED, training={"rounds": 1}, spatial={})
    drawn = plan(experiment)
    imported = way(drawn, experiment.dataset(), tmp_path)
    assert imported.hash != drawn.hash and imported.split.kind == "file"
    record = run(experiment, imported)
    assert_same(record, run(experiment, drawn))
    split = record.about["setting"]["split"]  # of the plan, not of the setting
    assert (split["kind"], split["clients"], split["tasks"]) == ("file", 3, 2)


def test_the_setting_takes_the_numbers_of_clients_and_tasks_from_the_plan(tmp_path):
    tasks = [{"classes": [3]}, {"classes": [0, 1, 2]}, {"classes": [4, 5]}, {"classes": [9]}]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"clients": [tasks, tasks[::-1]]}))
    experiment = tiny(training={"rounds": 1})  # four clients with three tasks
    record = run(experiment, import_plan(path, experiment.dataset()))
    assert record.accuracy().shape == (4, 2, 4)
    counts = [(experiment.dataset().y_test == label).sum().item() for label in range(10)]
    assert record.tests[0].tolist() == [sum(counts[c] for c in t["classes"]) for t in tasks]


def test_plans_of_different_splits_are_not_one_experiment():
    experiment = tiny()
    first, second = (replace(plan(experiment), seed=seed) for seed in (0, 1))
    split = Split("file", clients=4, tasks=3)
    with pytest.raises(
        ParameterError, match=r"the split of a plan is .*'file'.* that of the others"
    ):
        train(experiment, {0: first, 1: replace(second, split=split)})
