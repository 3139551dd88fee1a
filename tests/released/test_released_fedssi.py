"""FedSSI in its limit (aimagelab/mammoth): `SI` of models/si.py learns two tasks.

A surrogate that nothing pulls back is SI's own model while that has no penalty: the importance of
the second task is recorded without one (c = 0). Gradients are too small to be clipped there.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws, train_on_images
from torch import Tensor

from stamp_core.client import runtime
from stamp_core.data.plan import Plan, Task

SSI = Execution("fedssi", "mammoth", "e75a491", 2e-6)
PARAMS = replace(SSI.params, lam=1 - 1e-9)
SAMPLES = 40, 24  # of the tasks
TRAINING = {"rounds": 1, "epochs": 1, "batch_size": 4, "lr": 0.2}
SPLIT = {"clients": 1, "tasks": 2}
FEATURES = 6


def weights() -> Tensor:
    """The initial parameters of encoder and head."""
    return draws(1, 64 * FEATURES + FEATURES + FEATURES * 10 + 10).float() / 5


def test_two_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = {"kind": "mlp", "features": FEATURES}
    experiment = small.tiny("fedssi", split=SPLIT, training=TRAINING, network=network)
    experiment = replace(experiment, params=PARAMS)
    drawn = train_on_images(monkeypatch, experiment, sum(SAMPLES))
    monkeypatch.setattr(runtime, "build_network", lambda *_: small.network(experiment, weights()))
    parts = torch.arange(sum(SAMPLES)).split(SAMPLES)
    tasks = tuple(Task(tuple(range(10)), train=tuple(part.tolist())) for part in parts)
    plan = Plan(experiment.setting.split, 0, drawn.digest, (tasks,), 10)
    record = small.run(experiment, plan, resume=tmp_path)
    (state,) = small.saved(experiment, tmp_path)["clients"]
    parameters = np.concatenate([each.ravel() for each in record.weights.values()])
    SSI.check({"parameters": parameters, "importance": state["omega"]})
