"""FedCIL: `FedCL` of serverpFedCL.py trains two `UserpFedCL` on five tasks, without consolidation.

So it calls `WGAN.train_a_batch_all` of generator/model.py. It gets a discriminator like ours, steps
of SGD for it, and one draw of noise a step. Here every step is adversarial.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws, photographs
from torch import Tensor, nn

from stamp_core.client import runtime
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.decode import build
from stamp_core.config.schema import Network
from stamp_core.data.plan import Plan
from stamp_core.engine.worker import Worker
from stamp_core.methods.base.method import Log
from stamp_core.models.networks import build_network
from workbench.methods import fedcil
from workbench.methods.fedcil import acgan

FEDCIL = Execution("fedcil", "FedCIL", "c439de0", 1e-10)
NOISE, WIDTH = 100, 384  # of the released generator
TASKS, SAMPLES = 5, (16, 24)  # of the clients, in each task
TRAINING = {"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.05}


def normalise(pixels: Tensor) -> Tensor:
    return pixels.double() / 127.5 - 1


def inputs(classes: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Labels and noise of a round's generated images."""
    draw = np.random.default_rng(len(classes))
    labels = torch.tensor(classes)[draw.integers(len(classes), size=count)]
    return labels, draws(len(classes), count, NOISE)


def draw_inputs(classes: Tensor, size: Sequence[int], *_: object) -> tuple[Tensor, Tensor]:
    return inputs(classes.nonzero().flatten().tolist(), size[0])


def networks() -> dict[str, nn.Module]:
    """The initial ones: classifier, adversarial head and generator."""
    encoder = build(Network, {"kind": "mlp", "features": 32}, "network")
    modules: dict[str, nn.Module] = {
        "parameters": build_network(encoder, (3, 32, 32), 10, 0),
        "adversarial_head": nn.Linear(32, 1),
        "generator": acgan.Generator((3, 32, 32), 10 + NOISE, WIDTH),
    }
    tensors = [each for module in modules.values() for each in module.double().parameters()]
    for seed, each in enumerate(tensors):
        each.data = draws(seed, *each.shape) / (each[0].numel() ** 0.5)
    return modules


def update(name: str, end: Tensor) -> Tensor:
    """How the server's network has changed: at most 50 numbers of each tensor."""
    start = list(networks()[name].parameters())
    parts = zip(end.split([each.numel() for each in start]), start, strict=True)
    return torch.cat([(own - p.flatten())[:: len(own) // 50 + 1] for own, p in parts]).detach()


def federation(patch: pytest.MonkeyPatch) -> tuple[Worker, Plan]:
    """A worker in float64 with the weights and draws of both sides, and its plan."""
    split = {"clients": len(SAMPLES), "tasks": TASKS}
    experiment = small.tiny("fedcil", split=split, training=TRAINING)
    changes = {"width": WIDTH, "noise": NOISE, "every": 1, "consolidation": 0}
    experiment = replace(experiment, params=replace(FEDCIL.params, **changes))
    half = torch.full((3,), 0.5)  # mean and deviation: pixels become -1..1
    dataset = replace(experiment.dataset(), mean=half, std=half)
    patch.setattr(small, "dataset", lambda spec: dataset)
    plan = photographs(patch, experiment, SAMPLES)
    patch.setattr(runtime, "build_network", lambda *_: networks()["parameters"])
    patch.setattr(acgan, "build_seeded", lambda build, seed, name: networks()[name])
    patch.setattr(ClientRuntime, "normalise", lambda self, pixels: normalise(pixels))
    patch.setattr(fedcil, "draw_inputs", draw_inputs)
    return small.worker(experiment, plan), plan


def test_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, plan = federation(monkeypatch)
    method: Any = worker.method
    method.acgan.chunk = TRAINING["batch_size"]  # of replayed images that are normalised at once
    server, states, *_ = worker.initial_states(0)
    for experience, round_ in product(range(TASKS), range(2)):
        replies = []
        for client, state in enumerate(states):
            round_id = RoundId(0, client, experience, round_, last=round_ == 1)
            sent = method.broadcast(server, client)
            replies.append(method.train_client(method.client_round(round_id, plan, state, sent)))
        states = [reply.state for reply in replies]
        server = method.aggregate(server, replies, Log())
    FEDCIL.check({name: update(name, server[name]) for name in networks()})
