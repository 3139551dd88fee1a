"""Bytes that a round moves when clients run elsewhere: with their states, and with their names.

Calls and results are packed as for a Ray worker, and run in this process.
"""

import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import Row, section
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.split import make_plan
from stamp_core.engine.executor import dumps
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import Run
from stamp_core.engine.worker import Worker
from workbench.workflow.synthetic import published_dataset, synthetic_data

MB = 1e6


class CountingExecutor:
    """Runs every call here after it was packed, and counts the bytes there and back."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.there, self.back = worker, 0, 0

    def map(self, work: Callable[..., Any], each: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The results for each of the arguments, in order."""
        return [self.run(dumps((work, arguments))) for arguments in each]

    def run(self, packed: bytes) -> Any:
        """The result of a packed call, packed and unpacked."""
        work, arguments = pickle.loads(packed)
        result = dumps(work(self.worker, *arguments))
        self.there, self.back = self.there + len(packed), self.back + len(result)
        return pickle.loads(result)

    def close(self) -> None:
        """Do nothing: there are no other processes."""


class Short(Experiment):
    """An experiment on four random images of each class, of the shape that its source has."""

    def dataset(self) -> ImageDataset:
        """The images, for training and tests."""
        whole = published_dataset(self.setting.data)
        return synthetic_data(whole, len(whole.classes), 4 * len(whole.classes))


def two_clients(method: str) -> Experiment:
    """A method with ResNet-18 on images as CIFAR-100's: two clients with few of them."""
    experiment = load_experiment("cifar100_c2", method)
    setting = experiment.setting
    split = replace(setting.split, clients=2, tasks=2)
    training = replace(setting.training, rounds=3, epochs=1, batch_size=8)
    setting = replace(setting, split=split, training=training)
    return Short(setting, method, experiment.kind, experiment.params)


def moved(method: str, resume: Path | None) -> tuple[int, int, int]:
    """Bytes of a middle round to the workers and back, and of the states that clients keep."""
    experiment = two_clients(method)
    plan = make_plan(experiment.setting.split, experiment.dataset(), seed=0)
    worker = Worker(experiment, {0: plan}, "cpu", resume)
    executor = CountingExecutor(worker)
    run = Run(experiment, plan, worker, executor, resume)
    run.train_round(0, 0)
    executor.there = executor.back = 0
    run.train_round(0, 1)
    files = [] if resume is None else [*resume.rglob("states/*.safetensors")]
    return executor.there, executor.back, sum(file.stat().st_size for file in files)


def measurements() -> Iterator[Row]:
    """A round of two clients with its states in the messages, and on a shared file system."""
    for method in ("fedavg", "fedas"):
        for name in ("states travel", "states are files"):
            with tempfile.TemporaryDirectory() as folder:
                resume = Path(folder) if name == "states are files" else None
                there, back, kept = (count / MB for count in moved(method, resume))
            text = f"{there:.1f} MB there, {back:.1f} MB back; states on disk {kept:.1f} MB"
            yield f"{method}, {name}", text


def table() -> list[str]:
    """The section of benchmarks/results.md."""
    torch.set_num_threads(1)
    note = (
        "Calls and results of one round of two clients, packed as for Ray: ResNet-18 on images of "
        "32 x 32, 100 classes."
    )
    return section("## Bytes of a round between machines", note, measurements())


if __name__ == "__main__":
    print("\n".join(table()))
