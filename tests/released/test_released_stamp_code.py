"""STAMP (FCL): `FedSTGM` of serverstgm.py trains three `clientSTGM` on three tasks in turn.

Also `stgm_low` and `tgm_low` alone, `prototypical_loss` of protonet_utils.py and
`metric_average_forgetting`. Left out: exactly 50 gradients, an incomplete batch.
"""

from dataclasses import replace

import pytest
import small
import torch
from executed import Execution, changes, draws, exchange, order, photographs
from torch import Tensor, nn

from stamp_core.client import runtime
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import build
from stamp_core.config.schema import Network
from stamp_core.matching.match import match
from stamp_core.methods.stamp import prototype_loss
from stamp_core.models.networks import Classifier, build_network
from workbench.report.metrics import average_forgetting

STAMP = Execution("stamp_code", "FCL", "f2dc209", 1e-7)  # rounding decides which iterate is best
TASKS = 3
SAMPLES = 16, 8, 24  # of the clients, in each task
TRAINING = {"rounds": 1, "epochs": 2, "batch_size": 8, "lr": 0.05}
NETWORK = {"kind": "cnn", "channels": [32, 64], "features": 512}


def network(*_: object) -> Classifier:
    net = build_network(build(Network, NETWORK, "network"), (3, 32, 32), 10, 0).double()
    nn.utils.vector_to_parameters(draws(1, 878538) / 25, net.parameters())
    return net


def trained(patch: pytest.MonkeyPatch) -> Tensor:
    """The parameters of the global model after all tasks, in float64."""
    split = {"clients": len(SAMPLES), "tasks": TASKS}
    experiment = small.tiny("stamp", split=split, training=TRAINING, network=NETWORK)
    experiment = replace(experiment, params=STAMP.params)
    plan = photographs(patch, experiment, SAMPLES)
    patch.setattr(runtime, "build_network", network)
    # rounding in float32 grows from step to step, where ReLU has its kinks
    patch.setattr(ClientRuntime, "normalise", lambda _, pixels: pixels.double() / 255)
    method = small.worker(experiment, plan).method
    server, states, *_ = method.initial_states(plan)
    for task in range(TASKS):
        server, states = exchange(method, plan, server, states, task)
    parameters: Tensor = server["parameters"]
    return parameters


def test_a_training_and_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conflicting gradients of unequal lengths; 40 features of each class, half of them support."""
    rows, z = list(draws(2, 12, 20) * draws(3, 12, 1).exp() / 10), draws(4, 120, 6)
    loss = prototype_loss(z.requires_grad_(), order(120) % 3)
    STAMP.check(
        {
            "update": changes(trained(monkeypatch), network()),
            "server": match(rows, STAMP.params.spatial)[0],
            "client": match(rows, STAMP.params.temporal)[0],
            "prototypical": loss.item(),
            "slopes": torch.autograd.grad(loss, z)[0],
            "forgetting": average_forgetting(draws(5, 6, 6).sigmoid().numpy()),
        }
    )
