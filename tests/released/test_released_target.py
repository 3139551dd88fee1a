"""TARGET (zj-jayzhang): `data_generation`, then `incremental_train` of methods/target.py.

Left out there: crops and mirroring, the student's schedule and its passes over the pool (each batch
is drawn from all of it), the earlier start of the adversarial term, pixels that are rounded down.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws, exchange
from torch import Tensor, nn

from stamp_core.client import runtime
from stamp_core.data.plan import Plan, Task
from stamp_core.engine.worker import Worker
from stamp_core.methods.base.method import Log, State
from stamp_core.models.networks import build_network
from workbench.methods import target

TARGET = Execution("target", "TARGET", "78cb9c0", 1e-12)
PAST, NEW = (1, 3, 4, 6, 9), (0, 2, 5, 7, 8)  # classes, in their order there
IMAGES = 24  # of each of two clients
SPLIT = {"clients": 2, "tasks": 2}
NETWORK = {"kind": "cnn", "channels": [3, 4], "features": 10, "norm": "batch"}
PARAMETERS = 706  # of NETWORK
SIZES = {"images": 96, "synthesis_batch_size": 16, "generator_width": 4}  # six rounds of synthesis
TRAINING = {"rounds": 2, "epochs": 2, "batch_size": 4}
SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}  # those in `_local_finetune`
MEANS, VARIANCES = draws(4, 7), draws(5, 7).abs() + 0.5  # of the model's two normalisations
STATISTICS = torch.cat([MEANS[:3], VARIANCES[:3], MEANS[3:], VARIANCES[3:]])
MEAN, DEVIATION = (0.5, 0.4, 0.6), (0.25, 0.3, 0.2)  # of the channels


def images() -> tuple[Tensor, Tensor]:
    """Images of 0..255 and new labels of both clients, one client after the other."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(256, size=(2 * IMAGES, 3, 16, 16), dtype=np.uint8)
    return torch.from_numpy(pixels), torch.tensor(NEW)[draw.integers(len(NEW), size=2 * IMAGES)]


def weights(seed: int, count: int) -> Tensor:
    """The server's model (seed 1), the student (2), the generator and the student's map (3)."""
    return 0.4 * draws(seed, count)


class Recorded:
    """What torch draws on both sides: a sequence for each function and number of rows."""

    def __init__(self) -> None:
        self.calls = Counter[tuple[str, int]]()

    def seed(self, function: str, rows: int) -> int:
        self.calls[function, rows] += 1
        return 1000 * rows + self.calls[function, rows]

    def randn(self, *size: Any, generator: object = None) -> Tensor:
        shape = torch.empty(*size).shape
        return draws(self.seed("randn", shape[0]), *shape)

    def randint(self, high: int, size: tuple[int], generator: object = None) -> Tensor:
        draw = np.random.default_rng(self.seed("randint", *size))
        return torch.from_numpy(draw.integers(high, size=size))

    def randperm(self, rows: int, generator: object = None) -> Tensor:
        return draws(self.seed("randperm", rows), rows).argsort()


def filled(module: nn.Module, seed: int) -> nn.Module:
    parameters = list(module.parameters())
    nn.utils.vector_to_parameters(weights(seed, len(small.flat(parameters))), parameters)
    return module


def feed(patch: pytest.MonkeyPatch, code: ModuleType, recorded: Recorded) -> None:
    """Have a method's module take what is recorded, and its initial weights from `weights`."""
    patch.setattr(runtime, "build_network", lambda *args: filled(build_network(*args), 2))
    patch.setattr(code, "build_seeded", lambda build, *_: filled(build(), 3))
    for name in ("randn", "randint", "randperm"):
        patch.setattr(torch, name, getattr(recorded, name))


def clients(execution: Execution, training: Mapping[str, Any], patch: pytest.MonkeyPatch) -> Worker:
    """Two clients, who have images of the second task."""
    x, y = images()
    params = {**vars(execution.params), **SIZES, "server_lr": 1.0}
    experiment = small.tiny(execution.name, SPLIT, {**TRAINING, **training}, NETWORK, **params)
    mean, std = torch.tensor(MEAN), torch.tensor(DEVIATION)
    drawn = replace(experiment.dataset(), x_train=x, y_train=y, mean=mean, std=std)
    patch.setattr(small, "dataset", lambda spec: drawn)
    parts = torch.arange(len(y)).view(2, -1).tolist()
    tasks = tuple((Task(PAST, train=()), Task(NEW, train=tuple(part))) for part in parts)
    plan = Plan(experiment.setting.split, 0, drawn.digest, tasks, 10)
    return small.worker(experiment, plan)


def federation(
    execution: Execution,
    training: Mapping[str, Any],
    code: ModuleType,
    patch: pytest.MonkeyPatch,
    **own: Tensor,
) -> Iterator[State]:
    """The server's states after the synthesis at the end of a task, and the rounds of the next."""
    worker = clients(execution, training, patch)
    feed(patch, code, Recorded())
    server, states, *_ = worker.initial_states(0)
    server = {**server, **own, "round": TRAINING["rounds"], "buffers": STATISTICS}
    server["parameters"] = weights(1, PARAMETERS)
    server["classes"][list(PAST)] = True
    method: Any = worker.method
    server = method.end_experience(server, Log())
    yield server
    for number in range(TRAINING["rounds"]):
        server, states = exchange(method, worker.plans[0], server, states, 1, number)
        yield server


@pytest.mark.usefixtures("double")
def test_a_synthesis_and_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    synthesised, first, last = federation(TARGET, SGD, target, monkeypatch)
    TARGET.check(
        {
            "images": synthesised["replay"]["images"][::12],
            "parameters": last["parameters"],
            "buffers": torch.stack([first["buffers"], last["buffers"]]),
        }
    )
