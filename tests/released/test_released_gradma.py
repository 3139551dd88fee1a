"""GradMA (lkyddd/GradMA): a federation of `ServerManager` and `ClientManager` of
experiments/horizontal/GradMA/manager.py, and `QP_project_op` of lightfed/tools/model.py.

Its solver's tolerances were set to 1e-15, from 1e-7, at which the difference is 2e-5. There is one
program per tensor; biases were named as weights, as by their names they are left out of decay.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import RoundId
from stamp_core.methods.base.method import ClientRound, Log
from workbench.methods.base.gradient_projection import project_gradient

GRADMA = Execution("gradma", "GradMA", "495792e", 3e-11)
PARAMS = replace(GRADMA.params, scope="tensor", remembered=3)
SHAPES = ((3, 64), (3,), (10, 3), (10,))
TRAINING = {"lr": 0.1, "weight_decay": 0.05}
CHOSEN = ((0, 1), (0, 2), (1, 3), (0, 3), (2, 3))  # in the end 1 is forgotten, 2 is back
SIZES = (4, 16, 8, 3)  # of clients' batches


def batches(each: ClientRound, _: object) -> Iterator[Batch]:
    """A client's ten batches, the same in each round; clients have classes of their own."""
    client, size = each.client, SIZES[each.client]
    labels = 2 * client + np.random.default_rng(client).integers(0, 2, (10, size))
    return map(Batch, draws(4, 10, max(SIZES), 1, 8, 8)[:, :size], torch.from_numpy(labels))


def federation(patch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, Any], Log]]:
    """The server's states after rounds of clients with ten steps each."""
    network, params = {**small.NETWORK, "features": 3}, vars(PARAMS)
    experiment = small.tiny("gradma", training=TRAINING, network=network, **params)
    plan = small.plan(experiment)
    method = small.worker(experiment, plan).method
    patch.setattr(method, "batches", batches)
    patch.setattr(method, "sample_count", lambda each, _: 10 * SIZES[each.client])
    server = method.init_server(0)
    server["parameters"] = small.flat([0.3 * draws(k, *each) for k, each in enumerate(SHAPES)])
    for number, chosen in enumerate(CHOSEN):
        message, log = method.broadcast(server, 0), Log()
        rounds = [RoundId(0, client, 0, number) for client in chosen]
        arrived = [method.client_round(each, plan, {}, message) for each in rounds]
        server = method.aggregate(server, [method.train_client(each) for each in arrived], log)
        assert all(each.log.numbers["gradma corrected"] > 0.5 for each in arrived)
        yield server, log


@pytest.mark.usefixtures("double")
def test_a_federation_and_a_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rounds of two of four clients, and the program with a bound of its own."""
    vector, rows = draws(20, 40), draws(21, 4, 40)
    rows[:2] -= 0.5 * vector
    added = project_gradient(vector, list(rows), rho=0.2).added
    assert added is not None
    states = list(federation(monkeypatch))
    assert any(log.numbers["gradma server corrected"] for _, log in states)
    GRADMA.check(
        {
            "models": torch.stack([server["parameters"] for server, _ in states]),
            "momentum": states[-1][0]["momentum"],
            "projected": vector + added,
        }
    )
