"""Tasks of a client for selection rules, and what these propose."""

from typing import Any

import numpy as np
import torch
from executed import draws
from torch import Tensor

from stamp_core.config.params import read_params
from stamp_core.config.schema import Network
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection.base import Proposal, TaskData
from stamp_core.methods.base.registry import resolve_preset
from stamp_core.models.networks import build_network

Samples = tuple[Tensor, Tensor]


def preset(rule: str) -> Any:
    """The options of a rule in its preset."""
    return resolve_preset(f"keep_{rule}", read_params())[1].memory.options


def samples(seed: int, classes: int, *shape: int) -> Samples:
    labels = np.random.default_rng(seed).integers(classes, size=shape[0])
    return draws(seed, *shape), torch.from_numpy(labels)


def make_task(
    own: Samples, past: Samples, per_class: int, options: Any, features: int, scale: float
) -> TaskData:
    """With an MLP whose weights and biases are so many times draws of seeds 1, 2, 3, 4."""
    shape = tuple(own[0].shape[1:])
    built = build_network(Network("mlp", features), shape, int(own[1].max()) + 1, seed=0).double()
    for seed, part in enumerate(built.parameters(), 1):
        part.data = scale * draws(seed, *part.shape)
    values = torch.nn.utils.parameters_to_vector(built.parameters()).detach()
    learner = Learner(built, torch.clone, values, torch.empty(0))
    return TaskData(*own, past, per_class, options, learner, torch.Generator())


def indices(proposal: Proposal, task: TaskData) -> Tensor:
    """Of the proposed images in the task."""
    return (proposal.images[:, None] == task.images).flatten(2).all(2).nonzero()[:, 1]
