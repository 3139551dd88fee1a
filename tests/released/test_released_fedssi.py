"""FedSSI in its limit (aimagelab/mammoth): `SI` of models/si.py learns two tasks.

A surrogate that nothing pulls back is SI's own model while that has no penalty: the importance of
the second task is recorded without one (c = 0). Gradients are too small to be clipped there.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small
from executed import Execution, federation

SSI = Execution("fedssi", "mammoth", "e75a491", 2e-6)
PARAMS = replace(SSI.params, lam=1 - 1e-9)
SAMPLES = 40, 24  # of the tasks
TRAINING = {"rounds": 1, "epochs": 1, "batch_size": 4, "lr": 0.2}
FEATURES = 6


def test_two_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiment, plan = federation(monkeypatch, SSI, TRAINING, FEATURES, [SAMPLES])
    experiment = replace(experiment, params=PARAMS)
    record = small.run(experiment, plan, resume=tmp_path)
    (state,) = small.saved(experiment, tmp_path)["clients"]
    parameters = np.concatenate([each.ravel() for each in record.weights.values()])
    SSI.check({"parameters": parameters, "importance": state["omega"]})
