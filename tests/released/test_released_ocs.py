"""OCS (jaehong31/OCS): `train_single_step` and `train_ocs_single_step` of
core/train_methods_cifar.py, a first and a later task.

At a learning rate of 0, as one model scores all our batches; the final shuffle is left out.
"""

from dataclasses import replace

import numpy as np
import pytest
import rules
import torch
from executed import Execution
from rules import preset, samples

from stamp_core.coresets.selection.base import TaskData
from workbench.selection import ocs

OCS = Execution("ocs", "OCS", "b8cd9f8", 1e-11)  # of scores up to 1,000, the weight tau
OPTIONS: ocs.Options = preset("ocs")
SHAPE, FEATURES, CLASSES = (2, 3, 4), 6, 5
STREAM = torch.from_numpy(np.random.default_rng(0).permutation(53))  # batches of 20, 20, 13


def make_task(gradients: str, past: int) -> TaskData:
    own, old = (samples(seed, CLASSES, n, *SHAPE) for seed, n in ((5, 53), (6, past)))
    return rules.make_task(own, old, 2, replace(OPTIONS, gradients=gradients), FEATURES, 0.5)


def test_scores_and_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randperm", lambda n, generator: STREAM)
    ours = {}
    for gradients in ("all", "head"):
        for past in (0, 20):
            task, case = make_task(gradients, past), f"{gradients}_{past}"
            ours[f"{case}_scores"] = ocs._stream_scores(task, STREAM)
            ours[f"{case}_candidates"] = rules.indices(ocs.propose(task), task)[:30].sort().values
    OCS.check(ours)
