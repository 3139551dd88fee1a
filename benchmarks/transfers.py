"""Copies between host and device, and values that the host waits for, counted on a pretend device.

In a process of its own: torch must know the device before the first backward pass.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import astuple, replace
from typing import NamedTuple

import torch

from benchmarks import Row, section
from benchmarks.pretend import DEVICE, Counts, pretending, register
from stamp_core.data.split import make_plan
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import train
from stamp_core.methods.base.registry import method_names
from stamp_core.results.records import Record, history_total

HEAD = "| method | up | back | waits | up, an epoch |"


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


def _difference(more: Counts, less: Counts, by: int) -> Counts:
    """How much more there is of each count, divided."""
    pairs = zip(astuple(more), astuple(less), strict=True)
    return Counts(*((one - other) / max(1, by) for one, other in pairs))


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


def measurements(methods: Iterable[str]) -> Iterator[Row]:
    """The counts of some methods."""
    for method in methods:
        base = counted_run(small(method))
        step, epoch = per_step(small(method), base), per_epoch(small(method), base)
        yield method, " | ".join(f"{value:.2f}" for value in (*astuple(step), epoch.up))


def table(methods: Iterable[str]) -> list[str]:
    """The section of benchmarks/results.md."""
    register()
    torch.set_num_threads(1)
    note = (
        "Counted on a pretend device, on digits with augmentation: copies to the device, copies "
        "back, and values that the host waits for, of one more SGD step; copies to the device of "
        "one more epoch."
    )
    lines = section("## Copies between host and device", note, measurements(methods))
    heads = {"| what | result |": HEAD, "|---|---|": "|---|---|---|---|---|"}
    return [heads.get(line, line) for line in lines]


if __name__ == "__main__":
    print("\n".join(table(sys.argv[1:] or method_names())))
