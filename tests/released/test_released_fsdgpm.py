"""FS-DGPM (danruod/FS-DGPM): `observe` of model/fsdgpm.py, for four batches after `set_gpm_by_svd`.

`update_opt_lambda` came before each of them, as else a copy of λ is stepped: once with the released
sigmoid, once with a clamp in its place, as in the preset. Biases were columns, for inputs of 1.
"""

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.schema import Split
from stamp_core.data.plan import Plan, Task
from workbench.methods.fsdgpm import FsDgpm, FsDgpmParams

EXECUTION = Execution("fsdgpm", "FS-DGPM", "8cc57ae", 1e-6)
ORDERS = draws(2, 5, 10).argsort(1)  # of the memory: for the bases, for the draw of each batch
TASKS = torch.arange(3).repeat_interleave(torch.tensor([5, 5, 31]))  # ten exemplars, new images


def images() -> tuple[Tensor, Tensor]:
    """Images, which become numbers from -2 to 2, and labels: two classes of each task."""
    draw = np.random.default_rng(0)
    pixels = torch.from_numpy(draw.integers(256, size=(41, 1, 3, 4), dtype=np.uint8))
    return pixels, 2 * TASKS + torch.from_numpy(draw.integers(2, size=41))


def weights() -> list[Tensor]:
    """Of two layers with their biases as last columns."""
    return [0.8 * draws(99, 8, 13), 0.8 * draws(1099, 10, 9)]


def train_round(params: FsDgpmParams, task: int) -> tuple[Tensor, Tensor]:
    """The model and λ after a client's round in a task, with all images of those before it."""
    (x, y), std = images(), torch.tensor([64 / 255])
    network, training = {"kind": "mlp", "features": 8}, {"batch_size": 8}
    setting = small.tiny("fsdgpm", network=network, training=training).setting
    dataset = replace(small.tiny().dataset(), x_train=x, y_train=y, mean=2 * std, std=std)
    method = FsDgpm(params, ClientRuntime(setting, dataset))
    own = [tuple(part.tolist()) for part in torch.arange(41).split((5, 5, 31))]
    tasks = tuple(Task((2 * t, 2 * t + 1), None, own[t]) for t in range(3))
    plan = Plan(Split("file", 1, 3), 0, dataset.digest, (tasks,), classes=10)
    state, past = method.init_client(0, {}), task > TASKS
    state["memory"] |= {"images": x[past], "labels": y[past], "tasks": TASKS[past]}
    state["memory"]["soft"] = torch.zeros(int(past.sum()), 0)
    parameters = torch.cat([torch.cat([w[:, :-1].flatten(), w[:, -1]]) for w in weights()])
    sent = {"parameters": parameters.float(), "buffers": torch.zeros(0)}
    reply = method.train_client(method.client_round(RoundId(0, 0, task, 0), plan, state, sent))
    return reply.message["parameters"], reply.state["lambdas"]


def test_steps_of_the_first_and_third_task(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = cycle(ORDERS)

    def order(count: int, generator: torch.Generator) -> Tensor:
        return next(orders) if count == 10 else torch.arange(count)

    monkeypatch.setattr(torch, "randperm", order)
    params = EXECUTION.params
    first, _ = train_round(params, task=0)
    published, lambdas = train_round(replace(params, soft="published"), task=2)
    found = {"first": first, "published": published, "lambdas_published": lambdas}
    learnt, lambdas = train_round(params, task=2)
    EXECUTION.check({**found, "learnt": learnt, "lambdas_learnt": lambdas})
