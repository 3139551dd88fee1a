"""OCS (jaehong31/OCS): `train_single_step` and `train_ocs_single_step` of
core/train_methods_cifar.py, a first and a later task.

At a learning rate of 0, as one model scores all our batches; the final shuffle is left out.
"""

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.config.params import read_params
from stamp_core.config.schema import Network
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection.base import TaskData
from stamp_core.methods.base.registry import resolve_preset
from stamp_core.models.networks import build_network
from workbench.selection import ocs

OCS = Execution("ocs", "OCS", "b8cd9f8", 1e-11)  # of scores up to 1,000, the weight tau
OPTIONS: ocs.Options = resolve_preset("keep_ocs", read_params())[1].memory.options
Space = Literal["all", "head"]
SHAPE, FEATURES, CLASSES = (2, 3, 4), 6, 5
LAYERS = [(FEATURES, 24), (FEATURES,), (CLASSES, FEATURES), (CLASSES,)]
STREAM = torch.from_numpy(np.random.default_rng(0).permutation(53))  # batches of 20, 20, 13


def weights() -> list[Tensor]:
    return [0.5 * draws(1 + i, *shape) for i, shape in enumerate(LAYERS)]


def samples(seed: int, n: int) -> tuple[Tensor, Tensor]:
    labels = np.random.default_rng(seed).integers(CLASSES, size=n)
    return draws(seed, n, *SHAPE), torch.from_numpy(labels)


def make_task(gradients: Space, past: int) -> TaskData:
    network = build_network(Network("mlp", FEATURES), SHAPE, CLASSES, seed=0).double()
    values = torch.cat([part.flatten() for part in weights()])
    learner = Learner(network, torch.clone, values, torch.empty(0))
    options = replace(OPTIONS, gradients=gradients)
    return TaskData(*samples(5, 53), samples(6, past), 2, options, learner, torch.Generator())


def proposed(task: TaskData) -> Tensor:
    """The indices of the images."""
    proposal = ocs.propose(task)
    return (proposal.images[:, None] == task.images).flatten(2).all(2).nonzero()[:, 1]


def test_scores_and_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randperm", lambda n, generator: STREAM)
    ours = {}
    for gradients in get_args(Space):
        for past in (0, 20):
            task, case = make_task(gradients, past), f"{gradients}_{past}"
            ours[f"{case}_scores"] = ocs._stream_scores(task, STREAM)
            ours[f"{case}_candidates"] = proposed(task)[:30].sort().values
    OCS.check(ours)
