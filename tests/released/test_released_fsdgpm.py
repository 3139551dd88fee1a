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
from executed import Execution, draws, rehearse
from torch import Tensor

from workbench.methods.fsdgpm import FsDgpmParams

EXECUTION = Execution("fsdgpm", "FS-DGPM", "8cc57ae", 1e-6)
ORDERS = draws(2, 5, 10).argsort(1)  # of the memory: for the bases, for the draw of each batch
WEIGHTS = 0.8 * draws(99, 8, 13), 0.8 * draws(1099, 10, 9)  # of two layers; last columns: biases
TASKS = torch.arange(3).repeat_interleave(torch.tensor([5, 5, 31]))  # ten exemplars, new images


def images() -> tuple[Tensor, Tensor]:
    """Images, which become numbers from -2 to 2, and labels: two classes of each task."""
    draw = np.random.default_rng(0)
    pixels = torch.from_numpy(draw.integers(256, size=(41, 1, 3, 4), dtype=np.uint8))
    return pixels, 2 * TASKS + torch.from_numpy(draw.integers(2, size=41))


def train_round(params: FsDgpmParams, task: int) -> tuple[Tensor, Tensor]:
    """The model and λ after a client's round in a task, with all images of those before it."""
    (x, y), std = images(), torch.tensor([64 / 255])
    network, training = {"kind": "mlp", "features": 8}, {"batch_size": 8}
    experiment = small.tiny("fsdgpm", training=training, network=network)
    data = replace(experiment.dataset(), x_train=x, y_train=y, mean=2 * std, std=std)
    parameters = small.flat([part for w in WEIGHTS for part in (w[:, :-1], w[:, -1])])
    reply = rehearse(replace(experiment, params=params), data, TASKS, task, parameters)
    return reply.message["parameters"], reply.state["lambdas"]


def test_steps_of_the_first_and_third_task(monkeypatch: pytest.MonkeyPatch) -> None:
    left, params = cycle(ORDERS), EXECUTION.params
    monkeypatch.setattr(
        torch, "randperm", lambda n, **_: next(left) if n == 10 else torch.arange(n)
    )
    first, _ = train_round(params, task=0)
    published, lambdas = train_round(replace(params, soft="published"), task=2)
    found = {"first": first, "published": published, "lambdas_published": lambdas}
    learnt, lambdas = train_round(params, task=2)
    EXECUTION.check({**found, "learnt": learnt, "lambdas_learnt": lambdas})
