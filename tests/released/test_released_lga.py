"""LGA (JiahuaDong/LGA): `update_new_set`, `train`, `proto_grad_sharing` and, in a third task,
`efficient_old_class_weight` of LGA.py; `gradient2label` and `reconstruction` of ProxyServer.py.

As for GLFC. All weights are within the bounds that they are clamped to, and the batch of the third
task has no image of the first one there, as later groups would contain it.
"""

import numpy as np
import pytest
import torch
from executed import Execution, draws
from test_released_glfc import client_round, worker
from torch import Tensor

from workbench.methods.base.task_server import class_mask
from workbench.methods.glfc import GLFCContext, KnownTasks

LGA = Execution("lga", "LGA", "867988c", 1e-12)
TASKS = ((0, 2, 3), (4, 6), (8, 9))  # a client's classes, of four each


def weights(patch: pytest.MonkeyPatch) -> Tensor:
    """Those of later tasks' images, in a batch with images of all three."""
    method, _ = worker(LGA.params, patch)
    learnt = torch.full((10,), -1)
    for number, classes in enumerate(TASKS[:2]):
        learnt[list(classes)] = number
    current, waiting = class_mask(TASKS[2], 10), class_mask((), 10)
    known = KnownTasks(learnt=learnt, current=current, waiting=waiting, entropy=0.0, old={})
    context = GLFCContext({}, known, False, torch.arange(10), method.groups(known), None)
    labels = torch.from_numpy(np.random.default_rng(70).choice(np.concatenate(TASKS), 30))
    found: Tensor = method.compensation(0.5 * draws(71, 30, 10), labels, context)
    return found[labels >= TASKS[1][0]]


@pytest.mark.usefixtures("double")
def test_a_client_round_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    third = weights(monkeypatch)
    LGA.check({**client_round(LGA.params, monkeypatch), "weights": third})
