"""BCSR: an independent version of the whole rule, and the parts that it cannot judge."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rule_tasks import BATCH_NORM, MLP, Array, generator, indices_of, random_learner, random_samples
from rule_tasks import bcsr_task as make_task
from torch import Tensor
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection.base import TaskData
from workbench.selection import bcsr

torch.set_num_threads(1)  # as in training
LOWERED = "bcsr: the proxy's learning rate was lowered"
NOT_FINITE = "bcsr: a loss is not finite"


class Exact:
    """Per-image losses, gradients and Hessians of a network as functions of its parameters."""

    def __init__(self, learner: Learner, head: bool) -> None:
        self.learner = learner
        learner.load_client_weights()
        self.values = {n: p.detach().clone() for n, p in learner.network.named_parameters()}
        self.names = list(self.values)[-2:] if head else list(self.values)
        self.start = torch.cat([self.values[name].flatten() for name in self.names])

    def losses(self, theta: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        sizes = [self.values[name].numel() for name in self.names]
        pieces = zip(self.names, theta.split(sizes), strict=True)
        values = self.values | {name: v.view_as(self.values[name]) for name, v in pieces}
        inputs = (self.learner.normalise(images),)
        logits = functional_call(self.learner.network, values, inputs)
        return F.cross_entropy(logits, labels, reduction="none")

    def gradients(self, theta: Tensor, images: Tensor, labels: Tensor) -> Array:
        return jacobian(lambda theta: self.losses(theta, images, labels), theta).numpy()

    def hessian(self, theta: Tensor, p: Array, images: Tensor, labels: Tensor) -> Array:
        weights = torch.from_numpy(p)
        return hessian(lambda theta: weights @ self.losses(theta, images, labels), theta).numpy()


def nearest_on_simplex(v: Array) -> Array:
    low, high = v.min() - 1, v.max()
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if np.maximum(v - level, 0).sum() > 1 else (low, level)
    return np.asarray(np.maximum(v - high, 0))


def defined_weights(task: TaskData, batch: Tensor, draws: torch.Generator) -> Array:
    """The weights of a batch, with whole Hessians; the learning rate is halved until all is calm.

    Calm is a mean loss of at most ten times the first one, after every step.
    """
    options, n = task.options, len(batch)
    own = task.images[batch], task.labels[batch]
    exact = Exact(task.learner, options.space == "head")
    sample = torch.randperm(len(task.past[1]), generator=draws)[: options.batch_size]
    past = [part[sample] for part in task.past]
    total = task.exemplars_per_class * len(set(task.labels.tolist()))
    count = min(n, math.ceil(total * n / len(task.labels)))
    state = draws.get_state()
    lr = options.proxy_lr
    while True:
        draws.set_state(state)
        theta, p = exact.start, np.full(n, 1 / n)
        limit, highest = 10 * float(exact.losses(theta, *own).mean()), 0.0
        for _ in range(options.outer_steps):
            for _ in range(options.inner_steps):
                theta = theta - lr * torch.from_numpy(p @ exact.gradients(theta, *own))
                highest = max(highest, float(exact.losses(theta, *own).mean()))
            if not highest <= limit:
                break
            gradients = exact.gradients(theta, *own)
            v = gradients.mean(0)
            if len(sample):
                v = v + options.past_weight * exact.gradients(theta, *past).mean(0)
            step = np.eye(len(v)) - lr * exact.hessian(theta, p, *own)
            gradient = -lr * gradients @ (v + step @ (v + step @ (v + step @ v)))
            z = torch.randn(n, generator=draws, dtype=torch.float64).numpy()
            noisy = [p + options.smoothing * np.roll(z, shift) for shift in range(n)]
            among = np.concatenate([np.argsort(-values)[:count] for values in noisy])
            gradient -= options.beta * np.bincount(among, minlength=n) / n
            p = nearest_on_simplex(p - options.weights_lr / n * gradient)
        else:
            return p
        lr /= 2


def defined_order(task: TaskData, seed: int) -> list[int]:
    """All images, sampled without replacement by their weights, whose mean is 1 in each batch."""
    draws = generator(seed)
    order = torch.randperm(len(task.labels), generator=draws)
    weights = np.zeros(len(order))
    for batch in order.tensor_split(math.ceil(len(order) / task.options.batch_size)):
        weights[batch] = len(batch) * defined_weights(task, batch, draws)
    times = torch.empty(len(order), dtype=torch.float64).exponential_(generator=draws).numpy()
    with np.errstate(divide="ignore"):
        return order[np.argsort(times / weights[order], kind="stable")].tolist()


# A learning rate at which the first step diverges; one at which only later ones do, on the few
# images that the first step leaves with weight.
FIRST: dict[str, Any] = {"proxy_lr": 3e4}
LATER: dict[str, Any] = {"proxy_lr": 10.0, "weights_lr": 100.0, "beta": 30.0, "smoothing": 0.5}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"past": 0},
    {"beta": 0.0},
    {"past_weight": 5.0, "batch_size": 8},
    {"inner_steps": 3, "proxy_lr": 0.4},
    {"outer_steps": 2, "beta": 0.7, "smoothing": 0.05},
    {"weights_lr": 60.0, "exemplars_per_class": 50},
    {"space": "head"},
    {"space": "head", "batch_size": 5},
    FIRST,
    LATER,
]


def weights_of(task: TaskData) -> Array:
    return bcsr._optimise_weights(task, torch.arange(len(task.labels))).numpy()


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_the_rule_is_its_definition(options, seed):
    """The weights of one batch, and the order of the whole task in several."""
    make = partial(make_task, **{"past": 20, "seed": seed, **options})
    task = make()
    weights = weights_of(task)
    assert task.events == [LOWERED] * (options in (FIRST, LATER))
    assert np.abs(weights - 1 / 13).max() > 1e-3
    expected = defined_weights(make(), torch.arange(13), generator(seed))
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9)
    task = make()
    assert indices_of(bcsr.propose(task), task) == defined_order(make(), seed)


@pytest.mark.parametrize("space", ["all", "head"])
def test_normalisation_keeps_its_running_statistics(space):
    """An image's loss is its own, and of the head alone nothing else is trained."""
    options = {"network": BATCH_NORM, "shape": (1, 8, 8), "space": space, "outer_steps": 2}
    task = make_task(11, past=5, **options)
    weights, learner = weights_of(task), task.learner
    assert torch.equal(learner.model.buffers, learner.client_weights[1])
    moved = learner.model.parameters != learner.client_weights[0]
    head = sum(p.numel() for p in learner.network.head.parameters())
    assert moved[-head:].any() and bool(moved[:-head].any()) == (space == "all")
    expected = defined_weights(task, torch.arange(11), generator())
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9)


def test_if_the_proxy_always_diverges_the_weights_are_equal(monkeypatch):
    monkeypatch.setattr(bcsr, "DIVERGENCE", 0)
    task = make_task()
    np.testing.assert_array_equal(weights_of(task), np.full(13, 1 / 13))
    assert task.events == ["bcsr: the proxy diverged"]


def test_an_image_without_a_finite_loss_comes_last_and_changes_nothing():
    """Even after those without weight; the others are weighted as if it were not there."""
    images, labels = random_samples(14, (1, 2, 2))
    images[[4, 9], 0, 0, 0] = 255
    finite = torch.tensor([i for i in range(14) if i not in (4, 9)])
    task = replace(make_task(beta=0.0), images=images, labels=labels)
    order = indices_of(bcsr.propose(task), task)
    assert set(order[-2:]) == {4, 9} and task.events == [NOT_FINITE]
    alone = weights_of(replace(task, images=images[finite], labels=labels[finite]))
    positive, zero = finite[alone > 0].tolist(), finite[alone == 0].tolist()
    assert set(order[: len(positive)]) == set(positive) and 0 < len(zero) < 11


@pytest.mark.parametrize("space", ["all", "head"])
@pytest.mark.parametrize("scale", [math.inf, 1e200, 1e100, 0.0])
def test_a_network_with_extreme_weights_proposes_all_images(scale, space):
    learner = random_learner(MLP, (1, 2, 2), torch.float64, scale)
    task = replace(make_task(space=space), learner=learner)
    assert sorted(indices_of(bcsr.propose(task), task)) == list(range(13))
    assert (NOT_FINITE in task.events) == (scale not in (0.0, 1e100))
