"""Copies between host and device, and values that the host waits for, counted on a pretend device.

In a process of its own: torch must know the device before the first backward pass.
"""

from collections.abc import Iterator
from dataclasses import astuple, replace

import torch

from benchmarks import Row, section
from benchmarks.pretend import DEVICE, Counts, pretending, register
from stamp_core.data.split import make_plan
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import train
from stamp_core.methods.base.registry import method_names
from stamp_core.results.records import history_total

BATCH_SIZE = 8
HEAD = "| method | up | back | waits | up, an epoch |"


def counted_run(experiment: Experiment, epochs: int, batch_size: int) -> tuple[Counts, int, int]:
    """What crosses in a run of one seed, with its SGD steps and its client rounds."""
    training = replace(experiment.setting.training, epochs=epochs, batch_size=batch_size)
    experiment = replace(experiment, setting=replace(experiment.setting, training=training))
    plan = make_plan(experiment.setting.split, experiment.dataset(), seed=0)
    with pretending() as counts:
        history = train(experiment, {0: plan}, device=DEVICE)[0].history
    return (
        counts,
        int(history_total(history, "sgd_steps")),
        int(history_total(history, "completed")),
    )


def per_step(experiment: Experiment) -> Counts:
    """What one more SGD step costs: smaller batches give more steps of the same epochs."""
    base, steps, _ = counted_run(experiment, 1, BATCH_SIZE)
    finer, more_steps, _ = counted_run(experiment, 1, BATCH_SIZE // 2)
    return _difference(finer, base, more_steps - steps)


def per_epoch(experiment: Experiment) -> Counts:
    """What one more epoch of a client round costs, with its steps."""
    base, _, rounds = counted_run(experiment, 1, BATCH_SIZE)
    longer, _, _ = counted_run(experiment, 2, BATCH_SIZE)
    return _difference(longer, base, rounds)


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
        training=replace(setting.training, rounds=1, shift=1, flip=True),
        diagnostics=replace(setting.diagnostics, angles=False, displacements=False),
    )
    return replace(experiment, setting=setting)


def measurements() -> Iterator[Row]:
    """The counts of every method."""
    for method in method_names():
        step, epoch = per_step(small(method)), per_epoch(small(method))
        yield method, " | ".join(f"{value:.2f}" for value in (*astuple(step), epoch.up))


def table() -> list[str]:
    """The section of benchmarks/results.md."""
    register()
    torch.set_num_threads(1)
    note = (
        "Counted on a pretend device, on digits with augmentation: copies to the device, copies "
        "back, and values that the host waits for, of one more SGD step; copies to the device of "
        "one more epoch."
    )
    lines = section("## Copies between host and device", note, measurements())
    heads = {"| what | result |": HEAD, "|---|---|": "|---|---|---|---|---|"}
    return [heads.get(line, line) for line in lines]


if __name__ == "__main__":
    print("\n".join(table()))
