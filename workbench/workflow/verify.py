"""Verification of a record from its own files: what it says of itself is computed again.

The final accuracies follow from the final weights, the plan from the split and the seed. What came
before the last experience is guarded by the digest alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from stamp_core.client.scoring import score
from stamp_core.data.plan import Plan
from stamp_core.data.split import make_plan
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.worker import Worker
from stamp_core.results.records import Record, load_record
from workbench.exchange import import_plan

ROUNDING = 0.01  # share of test images that another kind of processor may predict otherwise


class Check(NamedTuple):
    """What was checked, whether it holds, and what was found."""

    name: str
    holds: bool
    found: str


def verify_record(folder: Path, plan_file: Path | None = None) -> list[Check]:
    """Every check of the record in `folder`; ValueError if its digest does not fit its files."""
    return check_record(load_record(folder), plan_file)


def check_record(record: Record, plan_file: Path | None = None) -> list[Check]:
    """Every check of a loaded record; the plan is drawn again unless there is a file."""
    experiment = experiment_of(record)
    dataset, seed = experiment.dataset(), record.about["seed"]
    if plan_file is None:
        plan = make_plan(experiment.setting.split, dataset, seed)
    else:
        plan = import_plan(plan_file, dataset, seed)
    digest = Check("digest", True, "that of the files")
    checks = [digest, *_identity_checks(record, experiment, plan)]
    if all(check.holds for check in checks[:4]):  # else other images would be scored
        checks.append(_accuracy_check(record, experiment, plan))
    return checks


def experiment_of(record: Record) -> Experiment:
    """The experiment that a record says it is of."""
    setting, method = dict(record.about["setting"]), dict(record.about["method"])
    names = setting.pop("name"), method.pop("name")
    blocks = {"settings": {names[0]: setting}, "methods": {names[1]: method}}
    return load_experiment(*names, {**blocks, "file": "the record"})


def _identity_checks(record: Record, experiment: Experiment, plan: Plan) -> Iterator[Check]:
    own = record.about["identity"]
    now = experiment.identity(plan, own["device"].split()[0])
    for name in ("parameters", "data", "plan", "code"):
        same = own[name] == now[name]
        yield Check(name, same, f"{own[name][:12]}" + ("" if same else f", here {now[name][:12]}"))


def _accuracy_check(record: Record, experiment: Experiment, plan: Plan) -> Check:
    if not record.weights:
        return Check("accuracy", True, "not checked: there is no global model")
    worker = Worker(experiment, {plan.seed: plan}, "cpu")
    weights = {name: torch.from_numpy(value) for name, value in record.weights.items()}
    worker.runtime.model.module.load_state_dict(weights)
    clients = list(range(len(plan.clients)))
    again = score(worker.runtime, plan, clients, plan.experiences - 1, True).numpy()
    stored = record.scores["global"][: len(again), -1]
    undefined = np.isnan(again)
    off = float(np.nanmax(np.abs(again - stored), initial=0.0))
    holds = bool((undefined == np.isnan(stored)).all()) and off <= ROUNDING
    mean = float(np.nanmean(again[0]))
    found = f"{mean:.1%} again, at most {off:.1%} from the record in a task"
    return Check("accuracy", holds, found)
