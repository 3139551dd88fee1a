"""A-GEM (aimagelab/mammoth): ten steps of `AGem.observe` of models/agem.py, with its `Buffer`.

Left out: which exemplars are kept; mammoth keeps one batch of a task.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import RoundId

AGEM = Execution("agem", "mammoth", "e75a491", 1e-12)
SHAPES = ((8, 64), (8,), (10, 8), (10,))
TRAINING = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
STEPS, CURRENT = 10, 1  # the task that is learnt


def integers(seed: int, below: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, below, shape))


BATCHES = list(map(Batch, draws(4, STEPS, 12, 1, 8, 8), integers(5, 3, STEPS, 12)))
MEMORY = {  # 300 exemplars of three tasks, one of which is learnt
    "images": integers(6, 256, 300, 1, 8, 8).to(torch.uint8),
    "labels": integers(7, 10, 300),
    "tasks": integers(8, 3, 300),
}


def orders() -> Iterator[Tensor]:
    """An order of past exemplars for each step: its first ones give the reference gradient."""
    draw, past = np.random.default_rng(9), int((MEMORY["tasks"] != CURRENT).sum())
    return (torch.from_numpy(draw.permutation(past)) for _ in range(STEPS))


@pytest.mark.usefixtures("double")
def test_the_steps_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps with momentum and weight decay; several gradients are projected."""
    experiment = small.tiny("agem", training=TRAINING, network={**small.NETWORK, "features": 8})
    plan = small.plan(experiment)
    method = small.worker(replace(experiment, params=AGEM.params), plan).method
    state = method.init_client(0, {})
    state = {"memory": {**state["memory"], **MEMORY}, "experiences": [0, 2]}
    sent = {"parameters": small.flat([0.3 * draws(k, *each) for k, each in enumerate(SHAPES)])}
    arrived = method.client_round(RoundId(0, 0, CURRENT, 0), plan, state, sent)
    arrived = replace(arrived, indices=torch.arange(STEPS * experiment.setting.training.batch_size))
    drawn = orders()
    monkeypatch.setattr(torch, "randperm", lambda count, generator: next(drawn))
    monkeypatch.setattr(method.runtime, "normalise", lambda images: images / 64 - 2)
    monkeypatch.setattr(method, "batches", lambda *_: iter(BATCHES))
    trained = method.train_client(arrived).message["parameters"]
    assert 0.2 < arrived.log.numbers["agem corrected"] < 1
    AGEM.check({"trained": trained})
