"""Trainings with plans from elsewhere: those of the plans themselves, bit for bit."""

import json
from dataclasses import replace

import pytest
from small import assert_same, plan, run, tiny

from stamp_core.config.decode import ParameterError
from stamp_core.config.schema import Split
from stamp_core.engine.train import train
from workbench.exchange import export_plan, import_plan

# Each client has images of all six classes, so the classes of a client are cut as they were drawn.
SHARED = {"clients": 3, "tasks": 2, "classes_per_task": 3, "order": "given", "alpha": 100.0}


def test_a_training_with_an_imported_plan_is_that_with_the_plan(tmp_path):
    experiment = tiny("stamp", split=SHARED, training={"rounds": 1}, spatial={})
    drawn = plan(experiment)
    export_plan(drawn, experiment.dataset(), tmp_path / "plan.csv")
    imported = import_plan(tmp_path / "plan.csv", experiment.dataset())
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
