"""STSA (Yuqin-G/STSA): `incremental_train` of methods/STSA.py for three tasks, with types 0 and 1.

Left out: `_fl_train`, which adapts the encoder. The head is compared before it is rounded to
float32; the cosine comes after.
"""

from dataclasses import replace

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws, exchange
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.params import read_params
from stamp_core.config.schema import Split
from stamp_core.data.plan import Plan, Task
from stamp_core.methods.base.registry import resolve_preset
from workbench.methods.stsa import STSA, STSAParams

EXECUTION = Execution("stsa", "STSA", "aaaa006", 1e-12)
ESTIMATED: STSAParams = resolve_preset("stsa_estimated", read_params())[1]
MATRIX = draws(2, 12, 20)  # of the random features
ORDERS = draws(3, 3, 62).argsort(1)  # of each task's images, before they are divided into parts


def images() -> tuple[Tensor, Tensor]:
    """Images and labels of three tasks of two classes.

    Of 20 parts of a class the longest comes last in the released code, so that 41 and 21 images,
    one too many in each class, have the same parts on both sides.
    """
    pixels = np.random.default_rng(0).integers(256, size=(186, 1, 3, 4), dtype=np.uint8)
    labels = torch.arange(6).repeat_interleave(torch.tensor([41, 21] * 3))
    return torch.from_numpy(pixels), labels


def tasks(clients: int) -> tuple[tuple[Task, ...], ...]:
    """The three tasks of each client, whose images are drawn."""
    owners, labels = np.random.default_rng(1).integers(clients, size=186), images()[1].numpy()

    def task(client: int, t: int) -> Task:
        own = np.flatnonzero((owners == client) & (labels // 2 == t))
        return Task((2 * t, 2 * t + 1), None, tuple(own.tolist()))

    return tuple(tuple(task(client, t) for t in range(3)) for client in range(clients))


def train_tasks(params: STSAParams, clients: int) -> dict[str, Tensor]:
    """The server's statistics and head after the three tasks of some clients."""
    (x, y), std = images(), torch.tensor([256 / 255])  # pixels become -0.5 to 0.5
    experiment = small.tiny("stsa")
    dataset = replace(experiment.dataset(), x_train=x, y_train=y, mean=std / 2, std=std)
    method = STSA(replace(params, expansion=20), ClientRuntime(experiment.setting, dataset))
    plan = Plan(Split("file", clients, 3), 0, dataset.digest, tasks(clients), classes=10)
    server, states, *_ = method.initial_states(plan)
    for task in range(3):
        server, states = exchange(method, plan, server, states, task, last=True)
    return {"gram": server["gram"], "products": server["products"], "head": method.head(server)[0]}


def test_statistics_and_head(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = iter(ORDERS)
    monkeypatch.setattr(STSA, "matrix", lambda method, seed: MATRIX)
    monkeypatch.setattr(torch, "randperm", lambda count, generator: next(orders))
    exact = train_tasks(EXECUTION.params, clients=3)
    estimated = train_tasks(ESTIMATED, clients=1)
    EXECUTION.check(exact | {f"estimated_{name}": each for name, each in estimated.items()})
