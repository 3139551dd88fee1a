"""Copies between host and device, and values that the host waits for, counted on a pretend device.

In a process of its own: torch must know the device before the first backward pass.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partialmethod
from typing import NamedTuple
from unittest.mock import patch

import torch

from benchmarks import Row, section
from benchmarks.pretend import DEVICE, Counts, pretending, register
from stamp_core.data.split import make_plan
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import Run, train
from stamp_core.methods.base.registry import method_names
from stamp_core.results.records import Record, history_total

HEAD = "| method | up | back | waits | up, an epoch |"
ROUND_HEAD = "| method | up | back | waits | last: up | back | waits |"


class Counted(NamedTuple):
    """What has crossed in a run, with its SGD steps and its client rounds."""

    counts: Counts
    steps: int
    rounds: int


def cost(counts: Counts, record: Record) -> Counted:
    """What a run has cost."""
    steps, rounds = (history_total(record.history, key) for key in ("sgd_steps", "completed"))
    return Counted(counts, int(steps), int(rounds))


def counted_run(experiment: Experiment, **changes: int) -> Counted:
    """The cost of a run of one seed with changes of its training."""
    training = replace(experiment.setting.training, **changes)
    experiment = replace(experiment, setting=replace(experiment.setting, training=training))
    plan = make_plan(experiment.setting.split, experiment.dataset(), seed=0)
    with pretending() as counts:
        record = train(experiment, {0: plan}, device=DEVICE)[0]
    return cost(counts, record)


def per_step(experiment: Experiment, base: Counted) -> Counts:
    """What one more SGD step costs: smaller batches give more steps of the same epochs."""
    finer = counted_run(experiment, batch_size=experiment.setting.training.batch_size // 2)
    return _difference(finer.counts, base.counts, finer.steps - base.steps)


def per_epoch(experiment: Experiment, base: Counted) -> Counts:
    """What one more epoch of a client round costs, with its steps."""
    longer = counted_run(experiment, epochs=2 * experiment.setting.training.epochs)
    return _difference(longer.counts, base.counts, base.rounds)


class RoundCost(NamedTuple):
    """What has crossed in one round of all clients, with its SGD steps."""

    counts: Counts
    steps: int
    last: bool  # of an experience: with the selection of exemplars and the evaluation


@contextmanager
def each_round(counts: Counts) -> Iterator[list[RoundCost]]:
    """A context in which the cost of every round is added to the list."""
    costs, train_round = list[RoundCost](), Run.train_round

    def counted(self: Run, experience: int, round_: int) -> None:
        before = astuple(counts)
        train_round(self, experience, round_)
        found = Counts(*(now - then for now, then in zip(astuple(counts), before, strict=True)))
        steps = int(self.state["history"][-1]["sgd_steps"])
        costs.append(RoundCost(found, steps, round_ == self.training.rounds - 1))

    with patch.object(Run, "train_round", partialmethod(counted)):
        yield costs


def outside_steps(experiment: Experiment, step: Counts, last: bool) -> Counts:
    """What crosses in a round beside its SGD steps, each of cost `step`: the mean of rounds."""
    plan = make_plan(experiment.setting.split, experiment.dataset(), seed=0)
    with pretending() as counts, each_round(counts) as costs:
        train(experiment, {0: plan}, device=DEVICE)
    costs = [cost for cost in costs if cost.last == last]
    sums = [sum(values) for values in zip(*(astuple(cost.counts) for cost in costs), strict=True)]
    steps = sum(cost.steps for cost in costs)
    pairs = zip(sums, astuple(step), strict=True)
    return Counts(*((whole - steps * each) / len(costs) for whole, each in pairs))


def _difference(more: Counts, less: Counts, by: int) -> Counts:
    """How much more there is of each count, divided; nan where there are no more steps."""
    pairs = zip(astuple(more), astuple(less), strict=True)
    return Counts(*((one - other) / by if by > 0 else math.nan for one, other in pairs))


def small(method: str) -> Experiment:
    """A preset on digits, with augmentation, as short as it can be."""
    experiment = load_experiment("tiny", method)
    setting = experiment.setting
    setting = replace(
        setting,
        split=replace(setting.split, clients=2, tasks=2, images_per_class=16),
        training=replace(setting.training, rounds=1, epochs=1, batch_size=8, shift=1, flip=True),
        diagnostics=replace(setting.diagnostics, angles=False, displacements=False),
    )
    return replace(experiment, setting=setting)


def two_rounds(experiment: Experiment) -> Experiment:
    """The experiment with two rounds of each task, of which one is not the last."""
    training = replace(experiment.setting.training, rounds=2)
    return replace(experiment, setting=replace(experiment.setting, training=training))


def step_costs(methods: Iterable[str]) -> dict[str, tuple[Counts, Counts]]:
    """What one more SGD step and one more epoch cost, by method."""
    bases = {method: counted_run(small(method)) for method in methods}
    return {
        method: (per_step(small(method), base), per_epoch(small(method), base))
        for method, base in bases.items()
    }


def measurements(costs: dict[str, tuple[Counts, Counts]]) -> Iterator[Row]:
    """The counts of methods, of a step."""
    for method, (step, epoch) in costs.items():
        yield method, _texts(*astuple(step), epoch.up)


def round_measurements(costs: dict[str, tuple[Counts, Counts]]) -> Iterator[Row]:
    """The counts of methods, of a round beside its steps."""
    for method, (step, _) in costs.items():
        experiment = two_rounds(small(method))
        each = (outside_steps(experiment, step, last) for last in (False, True))
        yield method, _texts(*(value for counts in each for value in astuple(counts)))


def _texts(*values: float) -> str:
    """Numbers as cells; a dash where there is none."""
    return " | ".join("-" if math.isnan(value) else f"{value:.2f}" for value in values)


def table(methods: Iterable[str]) -> list[str]:
    """The section of benchmarks/results.md."""
    register()
    torch.set_num_threads(1)
    note = (
        "Counted on a pretend device, on digits with augmentation: copies to the device, copies "
        "back, and values that the host waits for, of one more SGD step; copies to the device of "
        "one more epoch."
    )
    costs = step_costs(methods)
    lines = section("## Copies between host and device", note, measurements(costs))
    of_rounds = (
        "The same of a round of two clients beside its SGD steps, and of the last one of a task, "
        "with the selection of exemplars and the evaluation of all models. A dash: the number of "
        "steps does not depend on the batch size, so a step's share is unknown."
    )
    rounds = section("### Of a round", of_rounds, round_measurements(costs))
    return [*_headed(lines, HEAD), *_headed(rounds, ROUND_HEAD)]


def _headed(lines: list[str], head: str) -> list[str]:
    """The lines of a section with another head of the table."""
    heads = {"| what | result |": head, "|---|---|": "|---" * (head.count("|") - 1) + "|"}
    return [heads.get(line, line) for line in lines]


if __name__ == "__main__":
    print("\n".join(table(sys.argv[1:] or method_names())))
