"""FBL (JiahuaDong/FISS): `init_new_classifier` of myNetwork.py and `Trainer.train` of train.py.

With this project's network. Relations, entropy, soft labels, POD and the factor of confident pixels
are left out, thresholds are given, new classes weigh 1, and z counts the background as a class.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.client.runtime import RoundId
from stamp_core.data.plan import Plan, Task

FBL = Execution("fbl_scenes", "FISS", "dbacc52", 1e-12)
CLASSES, BACKGROUND = (1, 2, 0), 3  # a class in each task
NETWORK = {"kind": "fcn", "channels": [2, 2], "features": 3}
TRAINING = {"lr": 0.5, "epochs": 2, "batch_size": 4}
Z = 3 / 4
ORDERS = [torch.from_numpy(np.random.default_rng(k).permutation(6)) for k in (3, 4)]  # of epochs
THRESHOLDS = 0.8 + 0.1 * draws(5, 2, 4)  # of each epoch and class: parts of the largest entropy


def scenes() -> Tensor:
    """Six images, about a third of whose pixels show the last task's class, with their masks."""
    draw = np.random.default_rng(1)
    pixels = draw.integers(256, size=(6, 1, 8, 8))
    masks = draw.choice([CLASSES[2], BACKGROUND, BACKGROUND], (6, 1, 8, 8))
    return torch.from_numpy(np.concatenate([pixels, masks], 1).astype(np.uint8))


def worker(patch: pytest.MonkeyPatch) -> tuple[Any, Plan]:
    """A method that has the drawn scenes, and one client with three tasks."""
    x = scenes()
    y = torch.full((len(x),), CLASSES[2])
    names = ("0", "1", "2")
    data = replace(
        small.tiny().dataset(), x_train=x, y_train=y, domain_train=0 * y, classes=names, masks=True
    )
    patch.setattr(small, "dataset", lambda _: data)
    split = {"clients": 1, "classes_per_task": 1}
    experiment = small.tiny("fbl", split=split, training=TRAINING, network=NETWORK)
    experiment = replace(experiment, params=replace(FBL.params, relation=0.0, weights="old"))
    tasks = tuple(Task((label,)) for label in CLASSES)
    plan = replace(small.plan(experiment), clients=(tasks,))
    return small.worker(experiment, plan).method, plan


@pytest.mark.usefixtures("double")
def test_a_local_update_of_a_third_task(monkeypatch: pytest.MonkeyPatch) -> None:
    method, plan = worker(monkeypatch)
    past, left = method.old_classes, iter(ORDERS)
    given = {"power": Z, "thresholds": iter(THRESHOLDS.repeat_interleave(2, 0))}
    monkeypatch.setattr(method, "old_classes", lambda *args: replace(past(*args), **given))
    monkeypatch.setattr(method.runtime, "normalise", lambda images: images[:, :1] / 64 - 2)
    monkeypatch.setattr(torch, "randperm", lambda n, **_: next(left) if n else torch.arange(n))
    state, message = method.init_client(0, {}), {"parameters": 0.7 * draws(2, 399)}
    reply = method.train_client(method.client_round(RoundId(0, 0, 2, 0), plan, state, message))
    FBL.check({**reply.message, "loss": [reply.loss]})
