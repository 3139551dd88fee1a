"""BCSR (MingruiLiu-ML-Lab/Bilevel-Coreset-Selection-via-Regularization): `coreset_select` of
core/bcsr_coreset.py with p for its softmax(p), and `update_sample_weights` of
core/bcsr_training.py, a single gradient, with softmax(p).

Ours is without regulariser and past exemplars, which have no effect there.
"""

from dataclasses import replace

import rules
import torch
from executed import Execution, draws
from rules import preset, samples
from torch import Tensor

from stamp_core.coresets.selection.base import TaskData
from workbench.selection import bcsr

BCSR = Execution("bcsr", "BCSR", "8e5359c", 1e-12)
OPTIONS: bcsr.Options = replace(preset("bcsr"), beta=0.0, past_weight=0.0)
SHAPE, FEATURES, CLASSES, N = (2, 2, 3), 5, 4, 17
IMAGE_WEIGHTS = draws(9, N).softmax(0)  # at which the gradient is compared


def make_task(space: str) -> TaskData:
    own, past = (samples(seed, CLASSES, n, *SHAPE) for seed, n in ((5, N), (6, 7)))
    return rules.make_task(own, past, 2, replace(OPTIONS, space=space), FEATURES, 0.4)


def softmax_gradient(task: TaskData) -> Tensor:
    """Of the outer loss by p, where the inner loss has softmax(p)."""
    proxy = bcsr._Proxy(task.learner, task.options.space)
    losses = proxy.losses(proxy.inputs(task.images, task.labels))
    p = IMAGE_WEIGHTS.clone().requires_grad_()
    parts = p.softmax(0) @ losses, losses.mean(), p, proxy.parameters
    gradient = bcsr._implicit_gradient(*parts, OPTIONS.proxy_lr, bcsr.NEUMANN_TERMS)
    return gradient / (N * OPTIONS.proxy_lr)


def test_weights_and_a_gradient() -> None:
    ours = {}
    for space in ("all", "head"):
        task = make_task(space)
        ours[f"{space}_gradient"] = softmax_gradient(task)
        ours[f"{space}_weights"] = bcsr._optimise_weights(task, torch.arange(N))
        assert not task.events  # the learning rate was not lowered
    BCSR.check(ours)
