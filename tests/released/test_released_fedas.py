"""FedAS (PFLlib): `FedAS` of serveras.py trains two `clientAS` for two rounds, and
`set_parameters` of clientas.py, which has 0.01 for `align_lr`, aligns the result.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import small
import torch
from executed import Execution, federation

from stamp_core.client.runtime import RoundId

FEDAS = Execution("fedas", "PFLlib", "d832e76", 1e-6)
SAMPLES = (16,), (32,)  # of the clients: whole batches of alignment
TRAINING = {"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.1}
FEATURES = 4
BASE = 64 * FEATURES + FEATURES


def test_two_rounds_and_an_alignment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiment, plan = federation(monkeypatch, FEDAS, TRAINING, FEATURES, SAMPLES)
    experiment = replace(experiment, params=replace(FEDAS.params, align_lr=0.01))
    record = small.run(experiment, plan, resume=tmp_path)
    states = small.saved(experiment, tmp_path)["clients"]
    parameters = torch.cat([torch.from_numpy(each).flatten() for each in record.weights.values()])
    method = small.worker(experiment, plan).method
    personal = []
    for client, state in enumerate(states):
        round_id, sent = RoundId(0, client, 0, 1, last=True), {"base": parameters[:BASE]}
        method.load_personal_model(method.client_round(round_id, plan, state, sent))
        personal.append(method.model.parameters.clone())
    trained = torch.stack([torch.cat([state["base"], state["head"]]) for state in states])
    FEDAS.check({"global": parameters, "trained": trained, "aligned": torch.stack(personal)})
