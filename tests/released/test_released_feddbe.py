"""FedDBE (PFLlib): `FedDBE` of serverdbe.py trains three `clientDBE`: the warm-up, two rounds."""

from pathlib import Path

import numpy as np
import pytest
import small
from executed import Execution, federation

DBE = Execution("feddbe", "PFLlib", "d832e76", 1e-6)
SAMPLES = (8,), (16,), (12,)  # of the clients
TRAINING = {"rounds": 2, "epochs": 2, "batch_size": 4, "lr": 0.1}
FEATURES = 6


def test_the_warm_up_and_two_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiment, plan = federation(monkeypatch, DBE, TRAINING, FEATURES, SAMPLES)
    record = small.run(experiment, plan, resume=tmp_path)
    states = small.saved(experiment, tmp_path)["clients"]
    DBE.check(
        {
            "parameters": np.concatenate([each.ravel() for each in record.weights.values()]),
            "global_mean": states[0]["shared"],
            "offsets": np.stack([state["offset"] for state in states]),
        }
    )
