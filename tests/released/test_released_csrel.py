"""CSReL (RuilinTong/CSReL-Coreset-CL): `RhoSelectionAgent.incremental_selection` of
coreset_selection/selection_agent.py, with the training of its reference model.

All classes are ranked together, as in the published runs on task sequences.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import rules
import torch
from executed import Execution, draws
from torch import Tensor

from workbench.selection import csrel

CSREL = Execution("csrel", "CSReL", "4257b4e", 1e-12)
OPTIONS: csrel.Options = replace(rules.preset("csrel"), balanced=False)
SHAPE, FEATURES, CLASSES, PER_CLASS = (2, 2, 3), 8, 3, 16
TOTAL = CLASSES * PER_CLASS  # a quarter more at a time, in the end above a batch of 32
N = 75
IMAGES, LABELS = draws(5, N, *SHAPE), torch.arange(N) % CLASSES


def batches(count: int) -> Tensor:
    """Indices in a coreset of `count` images for all batches of the selection model."""
    size = (OPTIONS.train_steps, OPTIONS.batch_size)
    return torch.from_numpy(np.random.default_rng(count).integers(count, size=size))


def test_the_images_and_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = map(np.random.default_rng, range(OPTIONS.reference_epochs))
    scores, rank = list[Tensor](), csrel._rank

    def recording_rank(values: Tensor, *others: Any) -> Tensor:
        scores.append(values)
        return rank(values, *others)

    monkeypatch.setattr(
        torch, "randperm", lambda n, generator: torch.from_numpy(next(epochs).permutation(N))
    )
    monkeypatch.setattr(torch, "randint", lambda n, size, generator: batches(n))
    monkeypatch.setattr(csrel, "_rank", recording_rank)
    own, past = (IMAGES, LABELS), (IMAGES[:0], LABELS[:0])
    task = rules.make_task(own, past, PER_CLASS, OPTIONS, FEATURES, 0.4)
    chosen = rules.indices(csrel.propose(task), task)[:TOTAL]
    ranked = [values[part] for values, part in zip(scores, chosen.chunk(len(scores)), strict=True)]
    CSREL.check({"images": chosen, "scores": torch.cat(ranked)})
