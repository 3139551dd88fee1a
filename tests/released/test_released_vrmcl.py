"""VR-MCL (WuYichen-97/Meta-Continual-Learning-Revisited-ICLR2024): `observe` of models/vrmcl.py.

Its learning rates stay as they are and all classes are one task, so that none is masked. Sums over
32 new images and as many exemplars make its meta-loss 3/4 of ours: `s_lr` is 4/3 of `lr`, and
`grad_clip_norm` 3/4 of `clip`, at which no inner gradient is clipped.
"""

from dataclasses import replace
from itertools import cycle

import pytest
import small
import torch
from executed import Execution, draws, images, rehearse
from torch import Tensor

EXECUTION = Execution("vrmcl", "Meta-Continual-Learning-Revisited", "19aaa96", 1e-6)
PAST, NEW = 40, 4 * 32  # images
ORDERS = draws(1, 4, PAST).argsort(1)  # of the memory: the first 32 are in a batch
# weights and biases of two layers, with which some meta-gradients are clipped
WEIGHTS = 0.3 * draws(20, 8, 64), 0.3 * draws(21, 8), draws(22, 10, 8), draws(23, 10)


def train_round(second_order: bool) -> Tensor:
    """The model after a client's round of four batches in its second task."""
    x, y = images(PAST + NEW)
    network, training = {"kind": "mlp", "features": 8}, {"batch_size": 32, "lr": 0.1}
    experiment = small.tiny("vrmcl", training=training, network=network)
    mean, std = torch.tensor([[128 / 255], [96 / 255]])
    data = replace(experiment.dataset(), x_train=x, y_train=y, mean=mean, std=std)
    params = replace(EXECUTION.params, second_order=second_order)
    tasks = (torch.arange(PAST + NEW) >= PAST).long()
    reply = rehearse(replace(experiment, params=params), data, tasks, 1, small.flat(WEIGHTS))
    return reply.message["parameters"]


def test_four_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    left = cycle(ORDERS)
    monkeypatch.setattr(
        torch, "randperm", lambda n, **_: next(left) if n == PAST else torch.arange(n)
    )
    EXECUTION.check({"second": train_round(True), "first": train_round(False)})
