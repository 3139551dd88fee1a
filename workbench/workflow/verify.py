"""Verification of a record from its own files: what it says of itself is computed again.

The final accuracies follow from the final weights, the plan from the split and the seed. What came
before the last experience, and what it cost, is computed again by training alone.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stamp_core.client.scoring import count_tests, score
from stamp_core.config.decode import convert, invalid
from stamp_core.config.limits import NonNegativeInt
from stamp_core.config.params import require_name
from stamp_core.core.arithmetic import arithmetic
from stamp_core.data.loading import find_source, load_dataset
from stamp_core.data.plan import Plan
from stamp_core.data.split import make_plan
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import train
from stamp_core.engine.worker import Worker
from stamp_core.results.metrics import final_accuracy, micro_average
from stamp_core.results.records import Record, load_record
from workbench.exchange import import_plan
from workbench.report.text import plain

ROUNDING = 0.01  # share of test images that another kind of processor may predict otherwise
VARYING = ("torch", "device", "layout", "arithmetic")  # parts of an identity that a machine decides
# What a record that was forged can raise.
MALFORMED = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    *(OSError, MemoryError),
)


class Check(NamedTuple):
    """What was checked, whether it holds, what was found, and the value that was computed."""

    name: str
    holds: bool
    found: str
    value: float = np.nan


def one_line(error: BaseException) -> str:
    """An error of `MALFORMED` in one line."""
    named = isinstance(error, ValueError | OSError)
    kind = "" if named else f"it is malformed: {type(error).__name__}: "
    return (kind + " ".join(str(error).split()))[:500]


def read_record(folder: Path) -> Record:
    """The record in `folder`, whose files are plain ones: a pipe would wait."""
    for path in folder.iterdir():
        if not path.is_file():
            raise ValueError(f"{path} must be a plain file")
    return load_record(folder)


def verify_record(folder: Path, plan_file: Path | None = None, again: bool = False) -> list[Check]:
    """The checks of the record in `folder`."""
    return check_record(read_record(folder), plan_file, again)


def check_record(record: Record, plan_file: Path | None = None, again: bool = False) -> list[Check]:
    """The checks of a loaded record up to one that does not hold; `again` trains it at last.

    The plan is drawn unless there is a file. Digests are compared before data are read or made.
    """
    checks = list[Check]()
    for check in _checks(record, plan_file, again):
        checks.append(check)
        if not check.holds:
            break
    return checks


def _checks(record: Record, plan_file: Path | None, again: bool) -> Iterator[Check]:
    experiment, own = experiment_of(record), record.about["identity"]
    split = experiment.setting.split
    seed: Any = convert(record.about["seed"], NonNegativeInt, "seed")
    _check_shapes(record, (split.tasks * split.cycles, split.clients, split.tasks))
    yield Check("digest", True, "that of the files")
    now = experiment.identity(Plan(split, seed, own["data"], (), 0), "cpu")
    for name in sorted(now.keys() - {*VARYING, "data", "plan"}, reverse=True):
        yield _same(name, own, now)
    dataset = load_dataset(experiment.setting.data, make=_is_drawn(experiment))
    yield _same("data", own, {"data": dataset.digest})
    if plan_file is None:
        plan = make_plan(split, dataset, seed)
    else:
        plan = import_plan(plan_file, dataset, seed)
    yield _same("plan", own, {"plan": plan.hash})
    yield _accuracy_check(record, experiment, plan)
    if again:
        yield _training_check(record, experiment, plan)


def experiment_of(record: Record) -> Experiment:
    """The experiment that a record says it is of."""
    setting, method = dict(record.about["setting"]), dict(record.about["method"])
    names = setting.pop("name"), method.pop("name")
    for name in names:
        require_name("the record of", name)
    blocks = {"settings": {names[0]: setting}, "methods": {names[1]: method}}
    return load_experiment(*names, {**blocks, "file": "the record"})


def _check_shapes(record: Record, shape: tuple[int, ...]) -> None:
    """Validate the sizes of scores [E, U, T] by the split, before a plan of these sizes is made."""
    found = record.scores["global"].shape[-3:]
    if found != shape or record.tests.shape != shape[1:]:
        raise invalid("the shape of the global scores", found, f"{shape} with as many tests")


def _is_drawn(experiment: Experiment) -> bool:
    """Whether data are drawn here. Others must be in the cache: a record starts no download."""
    source, _ = find_source(experiment.setting.data)
    read = any(hasattr(source, hook) for hook in ("inputs", "listing", "write"))
    return not read and "torchvision" not in source.PACKAGES


def _same(name: str, own: Mapping[str, str], now: Mapping[str, str]) -> Check:
    same, found = own[name] == now[name], plain(own[name][:12])
    return Check(name, same, found if same else f"{found}, here {now[name][:12]}")


def _accuracy_check(record: Record, experiment: Experiment, plan: Plan) -> Check:
    worker = Worker(experiment, {plan.seed: plan}, "cpu")
    if "global" not in worker.method.models:
        return Check("accuracy", True, "not checked: there is no global model")
    if not record.weights:
        return Check("accuracy", False, "weights of the global model are missing")
    weights = {name: torch.from_numpy(value) for name, value in record.weights.items()}
    worker.runtime.model.module.load_state_dict(weights)
    clients = list(range(len(plan.clients)))
    again = score(worker.runtime, plan, clients, plan.experiences - 1, True).double().numpy()
    stored = record.scores["global"][: len(again), -1]
    tests = count_tests(worker.runtime, plan, clients).numpy()
    off = float(np.nanmax(np.abs(again - stored), initial=0.0))
    holds = off <= ROUNDING and np.array_equal(tests, record.tests)
    holds &= np.array_equal(np.isnan(again), np.isnan(stored))
    mean = final_accuracy(micro_average(again[:1], tests))
    found = f"{mean:.1%} again, at most {off:.1%} from the record in a task"
    return Check("accuracy", holds, found, mean)


def same_results(one: Record, other: Record) -> bool:
    """Whether two records have the same weights and accuracies, bit for bit."""
    mine, theirs = ({**each.weights, **each.scores} for each in (one, other))
    return mine.keys() == theirs.keys() and all(
        np.array_equal(value, theirs[name], equal_nan=True) for name, value in mine.items()
    )


def _training_check(record: Record, experiment: Experiment, plan: Plan) -> Check:
    """Whether training again gives the same weights and scores, bit for bit."""
    again = train(experiment, {plan.seed: plan})[plan.seed]
    same = same_results(record, again)
    own = [plain(record.about["identity"][name]) for name in ("torch", "arithmetic")]
    made, here = " and ".join(own), f"{torch.__version__} and {arithmetic()}"
    others = f"other weights or scores; made with torch and arithmetic {made}, here {here}"
    return Check("training", same, "weights and scores again, bit for bit" if same else others)
