"""AF-FCL (zaocan666/AF-FCL): `UserPreciseFCL.train` of FLAlgorithms/users/userPreciseFCL.py, and
`log_prob_and_noise` and `sample` of its flow.

With this project's network, and SGD for the classifier. Credibility is that of the samples' noise
there too; no variance is below the bound.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import RoundId
from workbench.methods import affcl
from workbench.methods.base.task_server import class_mask, pack_bits

AFFCL = Execution("affcl", "AF-FCL", "b2bf13e", 1e-12)
PARAMS = replace(AFFCL.params, theta=0.2, flow_layers=4, flow_hidden=4, flow_every=1)
FEATURES = 6
PARAMETERS, FLOW = 460, 1016
TRAINING = {"lr": 0.1, "momentum": 0.5}
PAST, LEARNT, CURRENT = (1, 2, 7), (1, 2, 3, 5, 7, 8, 9), (3, 8)
REVERSED = torch.arange(FEATURES).flip(0)
ORDERS = torch.stack([REVERSED, REVERSED, *(draws(k, FEATURES).argsort() for k in (10, 11))])
LABELS = torch.from_numpy(np.random.default_rng(20).choice(CURRENT, (3, 12)))
BATCHES = list(map(Batch, draws(21, 3, 12, 1, 8, 8), LABELS))


def networks(seed: int) -> dict[str, Tensor]:
    """A classifier and a flow."""
    return {"parameters": 0.3 * draws(seed, PARAMETERS), "flow": 0.4 * draws(seed + 1, FLOW)}


def drawn(classes: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Labels of a mask of classes and noise, for all batches."""
    chosen = classes.nonzero().flatten()
    places = np.random.default_rng(len(chosen)).integers(len(chosen), size=36)
    return chosen[places], draws(30 + len(chosen), 36, FEATURES)


def prepared(patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The method, with these permutations, batches and draws, and a plan."""
    patch.setattr(affcl, "draw_inputs", drawn)
    network = {"kind": "mlp", "features": FEATURES}
    experiment = small.tiny("affcl", training=TRAINING, network=network, **vars(PARAMS))
    plan = small.plan(experiment)
    method: Any = small.worker(experiment, plan).method
    patch.setattr(method, "batches", lambda *_: iter(BATCHES))
    for flow in (method.flow.module, method.last_flow.module):
        flow.orders.copy_(ORDERS)
        flow.inverse.copy_(ORDERS.argsort(1))
    return method, plan


@pytest.mark.usefixtures("double")
def test_a_local_update_of_a_later_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of flow, head and classifier; then noise, density and samples of the flow."""
    method, plan = prepared(monkeypatch)
    past, learnt = (pack_bits(class_mask(classes, 10)) for classes in (PAST, LEARNT))
    state = {"announced": {"past": past}, "last": networks(2)}
    message = {**networks(0), "learnt": learnt}
    arrived = method.client_round(RoundId(0, 0, 1, 1), plan, state, message)
    assert arrived.classes == CURRENT
    reply = method.train_client(arrived)
    assert not reply.log.events
    labels, noise = drawn(class_mask(LEARNT, 10))
    with torch.no_grad():
        own, density = method.flow.module(draws(40, 36, FEATURES), labels)
        samples = method.flow.module.sample(noise, labels)
    of_flow = {"noise": own, "density": density, "samples": samples}
    AFFCL.check({**reply.message, "loss": [reply.loss], **of_flow})
