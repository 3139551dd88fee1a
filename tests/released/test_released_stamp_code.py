"""STAMP (FCL): `FedSTGM` of serverstgm.py trains three `clientSTGM` on three tasks in turn.

Also `stgm_low` and `tgm_low` alone, `prototypical_loss` of protonet_utils.py and
`metric_average_forgetting`. Left out: exactly 50 gradients, an incomplete batch.
"""

from dataclasses import replace

import pytest
import small
import torch
from executed import Execution, draws, order, photographs
from torch import Tensor, nn

from stamp_core.client import runtime
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.decode import build
from stamp_core.config.schema import Network
from stamp_core.engine.worker import Worker
from stamp_core.matching.match import match
from stamp_core.methods.base.method import Log
from stamp_core.methods.stamp import prototype_loss
from stamp_core.models.networks import Classifier, build_network
from workbench.report.metrics import average_forgetting

STAMP = Execution("stamp_code", "FCL", "f2dc209", 1e-7)  # rounding decides which iterate is best
TASKS = 3
SAMPLES = 16, 8, 24  # of the clients, in each task
TRAINING = {"rounds": 1, "epochs": 2, "batch_size": 8, "lr": 0.05}
NETWORK = {"kind": "cnn", "channels": [32, 64], "features": 512}


def weights() -> Tensor:
    return draws(1, 878538) / 25


def some(update: Tensor) -> Tensor:
    """At most 50 numbers of each tensor of the network."""
    parts = update.split([parameter.numel() for parameter in network().parameters()])
    return torch.cat([part[:: len(part) // 50 + 1] for part in parts])


def gradients() -> Tensor:
    """Conflicting gradients of unequal lengths, some short.  # [12, 20]"""
    return draws(2, 12, 20) * draws(3, 12, 1).exp() / 10


def features() -> tuple[Tensor, Tensor]:
    """40 features of each of three classes, whose first 20 support the others."""
    return draws(4, 120, 6), order(120) % 3


def accuracies() -> Tensor:
    return draws(5, 6, 6).sigmoid()


def network(*_: object) -> Classifier:
    net = build_network(build(Network, NETWORK, "network"), (3, 32, 32), 10, 0).double()
    nn.utils.vector_to_parameters(weights(), net.parameters())
    return net


def normalise(_: ClientRuntime, pixels: Tensor) -> Tensor:
    """In float64: rounding in float32 grows from step to step, where ReLU has its kinks."""
    return pixels.double() / 255


def federation(patch: pytest.MonkeyPatch) -> Worker:
    """A worker in float64 with the weights, images and orders of both sides."""
    split = {"clients": len(SAMPLES), "tasks": TASKS}
    experiment = small.tiny("stamp", split=split, training=TRAINING, network=NETWORK)
    experiment = replace(experiment, params=STAMP.params)
    plan = photographs(patch, experiment, SAMPLES)
    patch.setattr(runtime, "build_network", network)
    patch.setattr(ClientRuntime, "normalise", normalise)
    return small.worker(experiment, plan)


def trained(worker: Worker) -> Tensor:
    """The parameters of the global model after all tasks."""
    server, states, *_ = worker.initial_states(0)
    for task in range(TASKS):
        sent = worker.method.broadcast(server, 0)
        rounds = [(RoundId(0, client, task, 0), state) for client, state in enumerate(states)]
        replies = [worker.train_client(each, state, sent).reply for each, state in rounds]
        server = worker.method.aggregate(server, replies, Log())
    parameters: Tensor = server["parameters"]
    return parameters


def test_a_training_and_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    (z, labels), rows = features(), list(gradients())
    loss = prototype_loss(z.requires_grad_(), labels)
    STAMP.check(
        {
            "update": some(trained(federation(monkeypatch)) - weights()),
            "server": match(rows, STAMP.params.spatial)[0],
            "client": match(rows, STAMP.params.temporal)[0],
            "prototypical": loss.item(),
            "slopes": torch.autograd.grad(loss, z)[0],
            "forgetting": average_forgetting(accuracies().numpy()),
        }
    )
