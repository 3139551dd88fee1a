"""CSReL (RuilinTong/CSReL-Coreset-CL): `RhoSelectionAgent.incremental_selection` of
coreset_selection/selection_agent.py, with the training of its reference model.

All classes are ranked together, as in the published runs on task sequences.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
from workbench.selection import csrel

CSREL = Execution("csrel", "CSReL", "4257b4e", 1e-12)
PRESET: csrel.Options = resolve_preset("keep_csrel", read_params())[1].memory.options
OPTIONS = replace(PRESET, balanced=False)
SHAPE, FEATURES, CLASSES, PER_CLASS = (2, 2, 3), 8, 3, 16
LAYERS = [(FEATURES, 12), (FEATURES,), (CLASSES, FEATURES), (CLASSES,)]
TOTAL = CLASSES * PER_CLASS  # a quarter more at a time, in the end above a batch of 32
LABELS = torch.arange(75) % CLASSES


def images() -> Tensor:
    return draws(5, len(LABELS), *SHAPE)


def weights() -> list[Tensor]:
    return [0.4 * draws(1 + i, *shape) for i, shape in enumerate(LAYERS)]


def epochs() -> Iterator[Tensor]:
    """The orders of images in the epochs of the reference model."""
    for seed in range(OPTIONS.reference_epochs):
        yield torch.from_numpy(np.random.default_rng(seed).permutation(len(LABELS)))


def batches(count: int) -> Tensor:
    """Indices in a coreset of `count` images for all batches of the selection model."""
    size = (OPTIONS.train_steps, OPTIONS.batch_size)
    return torch.from_numpy(np.random.default_rng(count).integers(count, size=size))


def make_task() -> TaskData:
    network = build_network(Network("mlp", FEATURES), SHAPE, CLASSES, seed=0).double()
    for parameter, value in zip(network.parameters(), weights(), strict=True):
        parameter.data = value
    learner = Learner(network, torch.clone, torch.zeros(1), torch.empty(0))
    past = images()[:0], LABELS[:0]
    return TaskData(images(), LABELS, past, PER_CLASS, OPTIONS, learner, torch.Generator())


def test_the_images_and_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    orders, scores, rank = epochs(), list[Tensor](), csrel._rank

    def recording_rank(values: Tensor, *others: Any) -> Tensor:
        scores.append(values)
        return rank(values, *others)

    monkeypatch.setattr(torch, "randperm", lambda n, generator: next(orders))
    monkeypatch.setattr(torch, "randint", lambda n, size, generator: batches(n))
    monkeypatch.setattr(csrel, "_rank", recording_rank)
    task = make_task()
    proposal = csrel.propose(task)
    chosen = (proposal.images[:TOTAL, None] == task.images).flatten(2).all(2).nonzero()[:, 1]
    ranked = [values[part] for values, part in zip(scores, chosen.chunk(len(scores)), strict=True)]
    CSREL.check({"images": chosen, "scores": torch.cat(ranked)})
