"""VR-MCL (WuYichen-97/Meta-Continual-Learning-Revisited-ICLR2024): `observe` of models/vrmcl.py.

Its learning rates stay as they are and all classes are one task, so that none is masked. Sums over
32 new images and as many exemplars make its meta-loss 3/4 of ours: `s_lr` is 4/3 of `lr`, and
`grad_clip_norm` 3/4 of `clip`, at which no inner gradient is clipped.
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
from workbench.methods.vrmcl import VrMcl

EXECUTION = Execution("vrmcl", "Meta-Continual-Learning-Revisited", "19aaa96", 1e-6)
LR = 0.1
PAST, NEW = 40, 4 * 32  # images
ORDERS = draws(1, 4, PAST).argsort(1)  # of the memory: the first 32 are in a batch


def images() -> tuple[Tensor, Tensor]:
    """Exemplars and new images, and labels of ten classes; (pixels - 128) / 96 are the inputs."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(256, size=(PAST + NEW, 1, 8, 8), dtype=np.uint8)
    return torch.from_numpy(pixels), torch.from_numpy(draw.integers(10, size=PAST + NEW))


def weights() -> list[Tensor]:
    """Weights and biases of two layers, with which some meta-gradients are clipped."""
    layers = 0.3 * draws(20, 8, 64), 0.3 * draws(21, 8), draws(22, 10, 8), draws(23, 10)
    return list(layers)


def train_round(second_order: bool) -> Tensor:
    """The model after a client's round of four batches in its second task."""
    x, y = images()
    network, training = {"kind": "mlp", "features": 8}, {"batch_size": 32, "lr": LR}
    setting = small.tiny("vrmcl", network=network, training=training).setting
    mean, std = torch.tensor([[128 / 255], [96 / 255]])
    dataset = replace(small.tiny().dataset(), x_train=x, y_train=y, mean=mean, std=std)
    params = replace(EXECUTION.params, second_order=second_order)
    method = VrMcl(params, ClientRuntime(setting, dataset))
    own = tuple(range(PAST)), tuple(range(PAST, PAST + NEW))
    tasks = tuple(Task(tuple(range(10)), None, each) for each in own)
    plan = Plan(Split("file", 1, 2), 0, dataset.digest, (tasks,), classes=10)
    state, past = method.init_client(0, {}), torch.zeros(PAST, dtype=torch.int64)
    state["memory"] |= {"images": x[:PAST], "labels": y[:PAST], "tasks": past}
    state["memory"]["soft"] = torch.zeros(PAST, 0)
    parameters = torch.cat([each.flatten() for each in weights()]).float()
    sent = {"parameters": parameters, "buffers": torch.zeros(0)}
    reply = method.train_client(method.client_round(RoundId(0, 0, 1, 0), plan, state, sent))
    return reply.message["parameters"]


def test_four_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = cycle(ORDERS)

    def order(count: int, generator: torch.Generator) -> Tensor:
        return next(orders) if count == PAST else torch.arange(count)

    monkeypatch.setattr(torch, "randperm", order)
    EXECUTION.check({"second": train_round(True), "first": train_round(False)})
