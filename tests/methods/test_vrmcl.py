"""VR-MCL: whole runs against one backward pass through all inner steps; its two passes agree."""

import math
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import CONFIGURATIONS, Array, Numbers, RehearsalReference, State, Visit
from small import BATCH_NORM, kept, plan, run, tiny
from torch import Tensor

from workbench.methods.vrmcl import LONG


class VrMclReference(RehearsalReference):
    """SGD along d = h + r (d' - h'), h the derivative of the mean loss after each inner step."""

    def start(self) -> None:
        self.lengths: list[float] = []

    def sgd(self, visit: Visit, theta: Array, state: State) -> Array:
        state["next"] = iter(self.replayed(visit, state))
        state["before"] = None
        return super().sgd(visit, theta, state)

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        past = next(state["next"])
        rows = (x, y), (self.x[past], self.y[past])
        h = d = self.meta_gradient(theta, *rows)
        if state["before"] and self.params.r:
            old_d, old_theta = state["before"]
            d = h + self.params.r * (old_d - self.meta_gradient(old_theta, *rows))
            self.lengths.append(float(np.linalg.norm(d) / np.linalg.norm(h)))
        state["before"] = d, theta
        return d

    def meta_gradient(
        self, theta: Array, new: tuple[Array, Numbers], past: tuple[Array, Numbers]
    ) -> Array:
        start = torch.tensor(theta, requires_grad=True)
        params, weights, losses = self.params, start, list[Tensor]()
        count = max(1, params.inner_steps)
        size = -(-len(new[1]) // count)
        for first in range(0, len(new[1]), size):
            if params.inner_steps:
                rows = slice(first, first + size)
                loss = self.loss(weights, new[0][rows], new[1][rows])
                (g,) = torch.autograd.grad(loss, weights, create_graph=True)
                weights = weights - params.inner_lr * (g if params.second_order else g.detach())
            losses.append(self.loss(weights, *new))
            if len(past[1]):
                weight = params.weight
                both = losses[-1] + weight * self.loss(weights, *past)
                losses[-1] = both / (1 + weight)
        torch.stack(losses).mean().backward()
        assert start.grad is not None
        clip = params.clip or math.inf
        return start.grad.numpy() * min(1, clip / float(start.grad.norm()))

    def loss(self, theta: Tensor, x: Array, y: Numbers) -> Tensor:
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        pieces = zip(theta.split(sizes), self.shapes, strict=True)
        w1, b1, w2, b2 = (piece.view(shape) for piece, shape in pieces)
        logits = (torch.tensor(x) @ w1.T + b1).relu() @ w2.T + b2
        return F.cross_entropy(logits, torch.tensor(y))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"inner_steps": 3, "r": 0.5},
        {"inner_steps": 2, "second_order": False, "weight": 2.0, "clip": 0.5},
        {"inner_steps": 0, "r": 0.8},
    ],
    ids=["second order", "first order", "no look-ahead"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration):
    params = {"memory": kept(4), "inner_lr": 0.2, **params}
    record, naive, _ = reference.compare("vrmcl", configuration, VrMclReference, **params)
    if "plain" in configuration:  # as many steps in every client round
        logged = np.mean([row["notes"]["length"] for row in record.history])
        assert logged == pytest.approx(np.mean(naive.lengths), abs=1e-4)


def test_without_look_ahead_and_recursion_it_is_replay_bit_for_bit():
    plain = {"inner_steps": 0, "r": 0.0, "weight": None}
    small.assert_same_weights(run(tiny("vrmcl", **plain)), run(tiny("replay")))


def test_of_the_same_batch_again_the_direction_is_the_meta_gradient_bit_for_bit(monkeypatch):
    """At learning rate 0 and one batch per epoch d' - h(θ') is 0 for every r: a second pass with
    other images, order or mode would not cancel. Only the first pass at the weights themselves
    updates running statistics: they are those of replay."""
    monkeypatch.setattr(torch, "randperm", lambda count, generator=None: torch.arange(count))
    training = {"batch_size": 1000, "epochs": 3, "lr": 0.0}
    options: dict[str, Any] = {
        "training": training,
        "split": {"clients": 2, "images_per_class": 20},
        "network": BATCH_NORM,
    }
    record = run(tiny("vrmcl", r=0.8, inner_lr=0.0, **options))
    small.assert_same_weights(record, run(tiny("replay", **options)))
    for row in record.history:
        assert row["notes"]["length"] == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"second_order": False, "inner_lr": 0.1}, [LONG]),
        ({"second_order": False, "inner_lr": 0.02}, []),
        ({"inner_lr": 0.1}, []),
    ],
    ids=str,
)
def test_long_first_order_steps_are_an_event(options, expected):
    experiment = tiny("vrmcl", **options)
    worker = small.worker(experiment, plan(experiment))
    arrived = small.arrived(worker, plan(experiment), 0)
    assert worker.method.train_client(arrived).log.events == expected
