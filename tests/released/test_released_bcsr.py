"""BCSR (MingruiLiu-ML-Lab/Bilevel-Coreset-Selection-via-Regularization): `coreset_select` of
core/bcsr_coreset.py with p for its softmax(p), and `update_sample_weights` of
core/bcsr_training.py, a single gradient, with softmax(p).

Ours is without regulariser and past exemplars, which have no effect there.
"""

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.config.params import read_params
from stamp_core.config.schema import Network
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection.base import TaskData
from stamp_core.methods.base.registry import resolve_preset
from stamp_core.models.networks import build_network
from workbench.selection import bcsr

BCSR = Execution("bcsr", "BCSR", "8e5359c", 1e-12)
PRESET: bcsr.Options = resolve_preset("keep_bcsr", read_params())[1].memory.options
OPTIONS = replace(PRESET, beta=0.0, past_weight=0.0)
Space = Literal["all", "head"]
SHAPE, FEATURES, CLASSES, N = (2, 2, 3), 5, 4, 17
LAYERS = [(FEATURES, 12), (FEATURES,), (CLASSES, FEATURES), (CLASSES,)]
IMAGE_WEIGHTS = draws(9, N).softmax(0)  # at which the gradient is compared


def weights() -> list[Tensor]:
    return [0.4 * draws(1 + i, *shape) for i, shape in enumerate(LAYERS)]


def samples(seed: int, n: int) -> tuple[Tensor, Tensor]:
    labels = np.random.default_rng(seed).integers(CLASSES, size=n)
    return draws(seed, n, *SHAPE), torch.from_numpy(labels)


def make_task(space: Space) -> TaskData:
    network = build_network(Network("mlp", FEATURES), SHAPE, CLASSES, seed=0).double()
    values = torch.cat([part.flatten() for part in weights()])
    learner = Learner(network, torch.clone, values, torch.empty(0))
    options = replace(OPTIONS, space=space)
    return TaskData(*samples(5, N), samples(6, 7), 2, options, learner, torch.Generator())


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
    for space in get_args(Space):
        task = make_task(space)
        ours[f"{space}_gradient"] = softmax_gradient(task)
        ours[f"{space}_weights"] = bcsr._optimise_weights(task, torch.arange(N))
        assert not task.events  # the learning rate was not lowered
    BCSR.check(ours)
