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
from executed import Execution, changes, draws, exchange, photographs
from torch import Tensor, nn

from stamp_core.client import runtime
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import build
from stamp_core.config.schema import Network
from stamp_core.data.plan import Plan
from stamp_core.models.networks import build_network
from workbench.methods import fedcil
from workbench.methods.fedcil import acgan

FEDCIL = Execution("fedcil", "FedCIL", "c439de0", 1e-10)
NOISE, WIDTH = 100, 384  # of the released generator
TASKS, SAMPLES = 5, (16, 24)  # of the clients, in each task
TRAINING = {"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.05}


def draw_inputs(mask: Tensor, size: Sequence[int], *_: object) -> tuple[Tensor, Tensor]:
    """Labels and noise of a round's generated images."""
    classes = mask.nonzero().flatten()
    draw = np.random.default_rng(len(classes))
    labels = classes[draw.integers(len(classes), size=size[0])]
    return labels, draws(len(classes), size[0], NOISE)


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


def federation(patch: pytest.MonkeyPatch) -> tuple[Any, Plan]:
    """The method in float64 with the weights and draws of both sides, and its plan."""
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
    patch.setattr(ClientRuntime, "normalise", lambda _, pixels: pixels.double() / 127.5 - 1)
    patch.setattr(fedcil, "draw_inputs", draw_inputs)
    return small.worker(experiment, plan).method, plan


def test_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    method, plan = federation(monkeypatch)
    method.acgan.chunk = TRAINING["batch_size"]  # of replayed images that are normalised at once
    server, states, *_ = method.initial_states(plan)
    for experience, round_ in product(range(TASKS), range(2)):
        server, states = exchange(method, plan, server, states, experience, round_, round_ == 1)
    FEDCIL.check({name: changes(server[name], initial) for name, initial in networks().items()})
