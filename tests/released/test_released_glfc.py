"""GLFC (conditionWang/FCIL): `update_new_set`, `train` and `proto_grad_sharing` of src/GLFC.py,
`gradient2label` and `reconstruction` of src/ProxyServer.py.

Without weight decay of prototypes, with L-BFGS steps of length 1 that all lead nearer. No image is
herded twice there either, and the model that chooses exemplars is the one that is received.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.client.runtime import RoundId
from stamp_core.data.plan import Plan, Task
from workbench.methods.base.task_server import class_mask, pack_bits
from workbench.methods.glfc import GLFCParams
from workbench.methods.glfc.gradients import GradientEncoder, reconstruct

GLFC = Execution("glfc", "FCIL", "11e161a", 1e-12)
LR, DECAY = 0.1, 1e-5
EARLIER, LATER = (0, 2, 3), (5, 6, 8, 9)  # classes of the client's tasks, of five each
SHAPES = ((8, 64), (8,), (10, 8), (10,))  # of the classifier's parameters
ENCODER = ((12, 25), (12,), *2 * [(12, 300), (12,)], (10, 48), (10,))
STEPS = 5  # of L-BFGS
PIXELS = np.random.default_rng(40).integers(256, size=(120, 1, 8, 8), dtype=np.uint8)
LABELS = torch.arange(10).repeat_interleave(12)
START = 0.5 + 0.1 * draws(60, len(LATER), 1, 8, 8)  # of reconstructions: near grey
# in which two epochs take the 48 images of the task and, counted on, the exemplars
ORDERS = [torch.from_numpy(np.random.default_rng(k).permutation(60)) for k in (50, 51)]


def weights(seed: int) -> list[Tensor]:
    """A classifier's parameters."""
    return [0.3 * draws(10 * seed + k, *shape) for k, shape in enumerate(SHAPES)]


def worker(params: GLFCParams, patch: pytest.MonkeyPatch) -> tuple[Any, Plan]:
    """A method that has the drawn images and encoder, and one client with two tasks."""
    drawn = {"x_train": torch.from_numpy(PIXELS), "y_train": LABELS, "domain_train": 0 * LABELS}
    data = replace(small.tiny().dataset(), **drawn)
    patch.setattr(small, "dataset", lambda _: data)
    experiment = small.tiny(
        "glfc",
        split={"clients": 1, "tasks": 2},
        training={"epochs": 2, "lr": LR, "weight_decay": DECAY * params.scale},
        network={"kind": "mlp", "features": 8},
        **vars(params),
    )
    plan = replace(small.plan(experiment), clients=((Task(EARLIER), Task(LATER)),))
    method = small.worker(experiment, plan).method
    encoder = GradientEncoder((1, 8, 8), 10, 0, method.runtime.device)
    encoder.parts = [0.3 * draws(30 + k, *shape) for k, shape in enumerate(ENCODER)]
    patch.setattr(method, "encoder", lambda _: encoder)
    patch.setattr(method.runtime, "normalise", lambda pixels: pixels / 255)
    return method, plan


def client_round(preset: GLFCParams, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A second task's first round: exemplars, local update, gradients, then the proxy's work."""
    # the released perturbation at a learning rate of LR * scale
    params = replace(preset, exemplars=12, perturb_steps=50, perturb_lr=LR * preset.scale / 10)
    method, plan = worker(params, patch)
    received, old = (small.flat(weights(seed)) for seed in (0, 1))
    message = {"parameters": received, "announced past": pack_bits(class_mask((), 10))}
    address = RoundId(0, 0, 0, 0, last=True)
    first = method.client_round(address, plan, method.init_client(0, {}), message)
    state = method.update_state(first, small.started(method, first))
    known = {"parameters": old, "classes": pack_bits(class_mask(range(5), 10))}
    message |= {f"announced old {name}": value for name, value in known.items()}
    left = iter(ORDERS)
    patch.setattr(torch, "randperm", lambda *_, **__: next(left))
    reply = method.train_client(method.client_round(RoundId(0, 0, 1, 0), plan, state, message))
    gradients = reply.message["gradients"]
    labels = method.encoder(0).recover_labels(gradients)
    found, distances = reconstruct(method.encoder(0), gradients, labels, START.clone(), STEPS)
    return {
        "exemplars": state["memory"]["images"],
        "parameters": reply.message["parameters"],
        "loss": [reply.loss / params.scale],
        "gradients": gradients[:, ::40],
        "labels": labels,
        "images": found,
        "distances": distances,
    }


@pytest.mark.usefixtures("double")
def test_a_client_round(monkeypatch: pytest.MonkeyPatch) -> None:
    GLFC.check(client_round(GLFC.params, monkeypatch))
