"""GPM (sahagobinda/GPM): `train_projected`, `get_representation_matrix` and `update_GPM` of
main_cifar100.py for two tasks of a network with a convolution, batch normalisation and one head.

A bias was a column of a weight there, for an input of 1. Left out: the first task, whose basis has
one column fewer there, and test batches normalised by their own statistics. Bases are in float64.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import RoundId
from stamp_core.methods.base.method import ClientRound, Reply

GPM = Execution("gpm", "GPM", "1a238ec", 1e-12)
SHAPES = {"encoder.0": (4, 26), "encoder.5": (8, 17), "head": (10, 9)}  # [W b] of layers
HELD = {"encoder.0": 6, "encoder.5": 4, "head": 3}  # columns of the first task's bases
TASKS, IMAGES, BATCH, EPOCHS, LR = (1, 2), 24, 8, 4, 0.1
MATRICES = [0.3 * draws(k, *shape) for k, shape in enumerate(SHAPES.values())]
WIDTHS = [(name, SHAPES[name][1], held) for name, held in HELD.items()]
BASES = {n: torch.linalg.qr(draws(4 + k, d, held)).Q for k, (n, d, held) in enumerate(WIDTHS)}
# what a basis is seen by: its columns may be turned within their space
PROBES = {name: draws(10 + k, d, 2) for k, (name, d, _) in enumerate(WIDTHS)}


def images() -> tuple[Tensor, Tensor]:
    """Of the second task, then of the third, and labels; with them `increment` adds columns."""
    pixels = np.random.default_rng(47).integers(0, 256, (len(TASKS) * IMAGES, 1, 8, 8))
    labels = np.random.default_rng(8).integers(0, 10, len(TASKS) * IMAGES)
    return torch.from_numpy(pixels).to(torch.uint8), torch.from_numpy(labels)


def normalised(images: Tensor) -> Tensor:
    return images / 64 - 2


def indices(task: int) -> Tensor:
    return torch.arange(IMAGES) + (task - 1) * IMAGES


def batches(each: ClientRound, _: object) -> Iterator[Batch]:
    (x, y), draw = images(), np.random.default_rng(each.task)
    for _ in range(EPOCHS):
        order = torch.from_numpy(draw.permutation(IMAGES))
        for part in indices(each.task)[order].split(BATCH):
            yield Batch(normalised(x[part]), y[part])


def client_rounds(patch: pytest.MonkeyPatch) -> Iterator[Reply]:
    """Two tasks of a client that has bases; in the second it receives its own model."""
    network, training = small.BATCH_NORM, {"lr": LR, "rounds": 1}
    experiment = small.tiny("gpm", network=network, training=training)
    plan = small.plan(experiment)
    method: Any = small.worker(replace(experiment, params=GPM.params), plan).method
    runtime = method.runtime
    patch.setattr(runtime, "normalise", normalised)
    patch.setattr(runtime, "dataset", replace(runtime.dataset, x_train=images()[0]))
    patch.setattr(method, "batches", batches)
    tasks = {name: torch.zeros(held, dtype=torch.int32) for name, held in HELD.items()}
    state = {"bases": BASES, "tasks": tasks, "experiences": [0], "received": {}}
    message = method.broadcast(method.init_server(0), 0)
    for layer, matrix in zip(method.layers.values(), MATRICES, strict=True):
        layer.write(message["parameters"], matrix)
    for task in TASKS:
        arrived = method.client_round(RoundId(0, 0, task, 0, True), plan, state, message)
        reply = method.train_client(replace(arrived, indices=indices(task)))
        state, message = reply.state, reply.message
        yield reply


@pytest.mark.usefixtures("double")
def test_two_tasks_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projected training, then the bases with the inputs of the trained layers, twice."""
    replies = list(client_rounds(monkeypatch))
    columns = [[b.shape[1] for b in reply.state["bases"].values()] for reply in replies]
    bases = replies[-1].state["bases"]
    protected = [bases[name] @ (bases[name].T @ probe) for name, probe in PROBES.items()]
    GPM.check(
        {
            "trained": torch.stack([reply.message["parameters"] for reply in replies]),
            "statistics": torch.stack([reply.message["buffers"] for reply in replies]),
            "columns": torch.tensor(columns),
            "protected": torch.cat(protected),
        }
    )
