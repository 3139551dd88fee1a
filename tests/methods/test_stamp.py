"""STAMP and FedOMG against naive references in NumPy, and what else STAMP promises."""

import math
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import (
    GROWING,
    Array,
    FedAvgReference,
    Numbers,
    RehearsalReference,
    Reply,
    State,
    Visit,
    softmax,
)
from scipy.optimize import minimize
from small import BATCH_NORM, kept, network, normalised, plan, run, slope, tiny
from torch import Tensor

from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import DivergedError
from stamp_core.methods.stamp import prototype_loss
from stamp_core.methods.stamp import temporal as temporal_module

NOTHING = "temporal matching: nothing is remembered"
WIDE = {"kind": "mlp", "features": 128}  # two layers of more than 1024 parameters
MEMORY = kept(4)


def best_direction(g: Array, g0: Array, radius: float) -> Array:
    """The d with |d - g0| <= radius |g0| and the largest min_i <g_i, d>, by a general solver.

    Its dual is the least g_w · g0 + radius |g0| |g_w| among mixtures g_w of the gradients.
    """
    size = radius * np.linalg.norm(g0)
    products, linear = g @ g.T, g @ g0
    scale = np.abs(products).max()

    def value(w: Array) -> float:
        return float(w @ linear + size * np.sqrt(w @ products @ w)) / scale

    def slopes(w: Array) -> Array:
        return (linear + size * products @ w / np.sqrt(w @ products @ w)) / scale

    options = {"ftol": 1e-16, "maxiter": 1000}
    one = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
    starts = [np.full(len(g), 1 / len(g)), *(0.8 * np.eye(len(g)) + 0.2 / len(g))]
    found = [
        minimize(value, w, jac=slopes, bounds=[(0, 1)] * len(g), constraints=one, options=options)
        for w in starts
    ]
    mixture = min(found, key=lambda each: each.fun).x @ g
    return g0 + size * mixture / np.linalg.norm(mixture)


def matched(g: Array, params: Any, samples: Array, sizes: list[int] | None = None) -> Array:
    """The matched direction of gradients [K, P], block by block where sizes are given."""
    norms = np.linalg.norm(g, axis=1)
    current = norms[-1]
    if params.normalise != "none":
        target = norms.mean() if params.normalise == "mean" else current
        g = g * (target / norms)[:, None]
    mean, own = np.full(len(g), 1 / len(g)), np.eye(len(g))[-1]
    weights = {"mean": mean, "current": own}
    if params.reference == "weighted":
        weights["weighted"] = samples / samples.sum()
    if params.reference == "halves":
        others = np.append(samples[:-1] / samples[:-1].sum(), 0)
        weights["halves"] = (own + others) / 2
    g0 = weights[params.reference] @ g
    blocks = np.split(np.arange(g.shape[1]), np.cumsum(sizes)[:-1] if sizes else [])
    d = np.concatenate([best_direction(g[:, b], g0[b], params.kappa) for b in blocks])
    lengths = {
        "free": np.linalg.norm(d),
        "1+kappa": np.linalg.norm(d) / (1 + params.kappa),
        "1+kappa^2": np.linalg.norm(d) / (1 + params.kappa**2),
        "reference": np.linalg.norm(g0),
        "current": current,
    }
    return d * (lengths[params.length] / np.linalg.norm(d))


class FedOMGReference(FedAvgReference):
    def layers(self, params: Any) -> list[int] | None:
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        return [sum(sizes[:2]), sum(sizes[2:])] if params.blocks == "layers" else None

    def aggregate(self, replies: list[Reply]) -> None:
        params = self.params.spatial
        if params is None:
            return super().aggregate(replies)
        updates = np.stack([self.theta - reply.theta for reply in replies])
        samples = np.array([float(reply.samples) for reply in replies])
        direction = matched(updates, params, samples, self.layers(params))
        self.theta = self.theta - self.params.server_lr * direction
        return None


class StampReference(FedOMGReference, RehearsalReference):
    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """Cross-entropy on the batch with its exemplars, and the prototypical loss."""
        past = next(state["next"])
        if len(past) and self.params.temporal is not None and self.params.temporal.every == 1:
            return self.matched_gradient(theta, x, y, past, state)
        x, y = np.concatenate([x, self.x[past]]), np.concatenate([y, self.y[past]])
        gradient = self.gradient(theta, x, y)
        if not self.params.prototype:
            return gradient
        return gradient + self.prototype_gradient(theta, x, y)

    def matched_gradient(
        self, theta: Array, x: Array, y: Numbers, past: Numbers, state: State
    ) -> Array:
        """The match of the gradients of the exemplars of each task and of the new images."""
        params = self.params.temporal
        by_task = [past[np.isin(past, own)] for own in state["memory"].values()]
        by_task = [own for own in by_task if len(own)]
        gradients = [self.gradient(theta, self.x[own], self.y[own]) for own in by_task]
        current = self.gradient(theta, x, y)
        if self.params.prototype:
            current = current + self.prototype_gradient(theta, x, y)
        images = np.array([*(float(len(own)) for own in by_task), float(len(x))])
        stacked = np.stack([*gradients, current])
        return params.lr * matched(stacked, params, images, self.layers(params))

    def prototype_gradient(self, theta: Array, x: Array, y: Numbers) -> Array:
        slopes = self.params.prototype * prototype_slopes(self.features(theta, x), y)[1]
        return self.backward(theta, x, np.zeros((len(x), self.classes)), slopes)

    def alternating(self, visit: Visit, theta: Array) -> Array:
        """Per batch a step of the encoder on prototypes, then one of the head on cross-entropy."""
        encoder = np.arange(len(theta)) < sum(int(np.prod(shape)) for shape in self.shapes[:2])
        velocities = [np.zeros_like(theta), np.zeros_like(theta)]
        for batch in self.batches(visit):
            x, y = self.x[batch], self.y[batch]
            steps = (encoder, self.prototype_gradient), (~encoder, self.gradient)
            for k, (part, gradient) in enumerate(steps):
                slope = np.where(part, gradient(theta, x, y), 0)
                velocities[k] = self.training.momentum * velocities[k] + slope
                theta = theta - self.lr * velocities[k]
        return theta

    def sgd(self, visit: Visit, theta: Array, state: State) -> Array:
        state["next"] = iter(self.replayed(visit, state))
        plain = self.alternating(visit, theta) if self.params.alternate else None
        params = self.params.temporal
        past = self.past_tasks(visit, state)
        if params is None or not past or not len(visit.indices) or params.every == 1:
            return super().sgd(visit, theta, state) if plain is None else plain
        draws = {task: self.draw(visit, f"pictures of task {task}") for task, _ in past}
        batches = self.batches(visit)
        every = params.every or len(batches)
        for start in range(0, len(batches), every):
            segment = batches[start : start + every]
            trained = self.descend(theta, segment, lambda *at: self.step_gradient(*at, state))
            trained = trained if plain is None else plain
            length = len(segment) * self.lr
            gradients = [
                self.past_gradient(visit, theta, trained, length, draws[task], task, images)
                for task, images in past
            ]
            stacked = np.stack([*gradients, theta - trained])
            used = [min(len(images), params.images) for _, images in past]
            images = np.array([*used, sum(map(len, segment))], float)
            theta = theta - params.lr * matched(stacked, params, images, self.layers(params))
        return theta

    def past_tasks(self, visit: Visit, state: State) -> list[tuple[int, Numbers]]:
        params = self.params.temporal
        found = state["memory"]
        if params is not None and params.source == "all data":
            met = range(visit.experience)
            found = {e: self.indices(visit.client, e % self.plan.tasks) for e in met}
        else:
            found = {task: own for task, own in found.items() if task != visit.task}
        tasks = sorted(task for task, own in found.items() if len(own))
        order = torch.randperm(len(tasks), generator=self.draw(visit, "past tasks"))
        chosen = sorted(tasks[place] for place in order[: params.tasks if params else 0].tolist())
        return [(task, found[task]) for task in chosen]

    def past_gradient(
        self,
        visit: Visit,
        received: Array,
        trained: Array,
        length: float,
        draw: torch.Generator,
        task: int,
        images: Numbers,
    ) -> Array:
        """The update of SGD on a task's images, their gradient, or the update itself."""
        params = self.params.temporal
        if params.past == "unmoved":
            return received - trained
        if params.past == "trajectory":
            batches = self.batches(visit, f" of task {task}", images)
            return received - self.descend(trained, batches, self.gradient)
        order = torch.randperm(len(images), generator=draw)
        by_class: dict[int, list[int]] = {}
        for image in images[order.numpy()]:
            by_class.setdefault(int(self.y[image]), []).append(int(image))
        turns = [(turn, image) for each in by_class.values() for turn, image in enumerate(each)]
        place = {image: k for k, image in enumerate(images[order.numpy()].tolist())}
        turns.sort(key=lambda each: (each[0], place[each[1]]))
        chosen = np.array([image for _, image in turns[: params.images]])
        return length * self.gradient(trained, self.x[chosen], self.y[chosen])


def prototype_slopes(z: Array, y: Numbers) -> tuple[float, Array]:
    """The prototypical loss of features and its slopes [N, D], image by image.

    Of the n > 1 images of a class the first ceil(n / 2) are averaged to a prototype p; the loss of
    each other one is -log softmax(-|z - p|^2) at its class.
    """
    members = {label: np.flatnonzero(y == label) for label in np.unique(y)}
    support = {k: own[: math.ceil(len(own) / 2)] for k, own in members.items() if len(own) > 1}
    prototypes = {label: z[own].mean(0) for label, own in support.items()}
    queries = [(label, i) for label in support for i in members[label][len(support[label]) :]]
    loss, slopes = 0.0, np.zeros_like(z)
    for own, i in queries:
        away = {label: z[i] - p for label, p in prototypes.items()}
        shares = softmax(np.array([[-(v @ v) for v in away.values()]]))[0]
        loss -= math.log(shares[list(away).index(own)]) / len(queries)
        for share, (label, v) in zip(shares, away.items(), strict=True):
            slope_ = 2 * v * ((label == own) - share) / len(queries)
            slopes[i] += slope_
            slopes[support[label]] -= slope_ / len(support[label])
    return loss, slopes


SERVED: dict[str, dict[str, Any]] = {
    "by samples": {"spatial": {"normalise": "mean", "length": "reference"}, "server_lr": 1.5},
    "free": {"spatial": {"reference": "mean", "normalise": "none", "kappa": 0.8, "length": "free"}},
    "by layers": {"spatial": {"blocks": "layers", "length": "1+kappa^2"}, "network": WIDE},
}
PARTS: dict[str, dict[str, Any]] = {
    "trajectories": {"temporal": {"normalise": "current", "length": "current"}},
    "gradients": {"temporal": {"past": "gradient", "images": 5, "length": "free"}},
    "one of all": {
        "temporal": {"source": "all data", "tasks": 1, "lr": 0.5, "reference": "current"}
    },
    "unmoved, by layers": {"temporal": {"past": "unmoved", "blocks": "layers"}, "network": WIDE},
    "in steps": {
        "temporal": {"every": 1, "past": "gradient", "reference": "weighted", "lr": 0.8},
        "ratio": 1.0,
    },
    "in steps, with prototypes": {
        "temporal": {"every": 1, "past": "gradient", "reference": "halves", "length": "current"},
        "ratio": 0.5,
        "prototype": 0.02,
    },
    "every two steps": {
        "temporal": {"every": 2, "past": "gradient", "images": 5, "reference": "weighted"},
        "ratio": 1.0,
    },
    "all": {
        "spatial": {"normalise": "mean", "length": "1+kappa"},
        "temporal": {"normalise": "current", "length": "reference"},
        "prototype": 0.02,
        "ratio": 0.5,
    },
}


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize("params", SERVED.values(), ids=SERVED)
def test_fedomg_is_the_reference(params, configuration):
    reference.compare("fedomg", configuration, FedOMGReference, **params)


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize("params", PARTS.values(), ids=PARTS)
def test_stamp_is_the_reference(params, configuration):
    reference.compare("stamp", configuration, StampReference, memory=MEMORY, **params)


def test_alternating_losses_are_the_reference():
    training = {"momentum": 0.9, "epochs": 2}
    params = {"training": training, "prototype": 0.05, "alternate": True, "memory": MEMORY}
    reference.compare("stamp", "plain", StampReference, **params)


def test_large_distances_do_not_overflow():
    """Squared distances of 1e10 and more: exponentials without a shift would give 0 / 0."""
    features = 1e5 * torch.randn(4, 3, generator=generator("features")).requires_grad_()
    loss = prototype_loss(features, torch.tensor([0, 0, 1, 1]))
    (gradient,) = torch.autograd.grad(loss, features)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


def test_without_past_tasks_temporal_matching_is_fedavg_bit_for_bit():
    """With a single task; and with an empty memory, which is logged by each of the four clients."""
    temporal = {"kappa": 0.5}
    for split, events in (({"tasks": 1}, 2 * [{}]), ({}, [{}, {}, *4 * [{NOTHING: 4}]])):
        memory = {"exemplars_per_class": 0}
        record = run(tiny("stamp", split=split, memory=memory, temporal=temporal))
        small.assert_same_weights(record, run(tiny(split=split)))
        assert [entry["events"] for entry in record.history] == events
        assert all(entry["notes"] == {} for entry in record.history)


@pytest.mark.parametrize("past", ["trajectory", "gradient"])
def test_divergence_is_an_error_and_not_matched_away(past):
    """Weights that are not finite on a later task are no gradient to be dropped."""
    temporal = {"past": past, "kappa": 0.5}
    diverging = tiny("stamp", training={"lr": 1e38}, memory=MEMORY, temporal=temporal)
    whole = plan(diverging)
    worker, calm = (small.worker(each, whole) for each in (diverging, tiny("stamp", memory=MEMORY)))
    with pytest.raises(DivergedError, match=r"client 0, experience 1, round 0: .*training\.lr"):
        worker.method.train_client(small.arrived(calm, whole, 1))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_dropped_and_counted(bad, monkeypatch):
    """An exemplar whose forward pass overflows excludes its task, nothing else."""
    task_gradient = temporal_module.task_gradient

    def overflowing(*arguments: Any) -> Tensor:
        return task_gradient(*arguments) + (bad if 0 in arguments[1].indices else 0.0)

    monkeypatch.setattr(temporal_module, "task_gradient", overflowing)
    record = run(tiny("stamp", memory=MEMORY, temporal={"past": "gradient", "kappa": 0.0}))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    event = "temporal matching: a gradient was dropped"
    counts = [entry["events"].get(event, 0) for entry in record.history]
    assert counts == [0, 0, 4, 4, 4, 4]  # at all four clients
    notes = record.history[-1]["notes"]
    assert (notes["temporal dropped"], notes["temporal gradient count"]) == (1, 3)


@pytest.mark.parametrize("past", ["gradient", "trajectory"])
def test_past_gradients_start_from_the_buffers_of_local_training(past):
    """Gradients in evaluation mode; SGD steps with the batch's statistics, but for the last batch
    of one of ten images, which has none. At radius 0 the matched update is the mean of the past one
    and the client's own. The buffers that are sent are those of local training.
    """
    temporal = {"past": past, "kappa": 0.0, "length": "free"}
    options: dict[str, Any] = {"network": BATCH_NORM, "training": {"batch_size": 9}}
    experiment = tiny("stamp", memory=kept(5), temporal=temporal, **options)
    worker, plain = (
        small.worker(each, plan(experiment))
        for each in (experiment, tiny("stamp", memory=kept(5), **options))
    )
    client_round = small.arrived(plain, plan(experiment), 1)
    local = plain.method.train_client(client_round)
    message = worker.method.train_client(client_round).message
    received, trained = client_round.message["parameters"], local.message["parameters"]
    assert torch.equal(message["buffers"], local.message["buffers"])
    net = network(experiment, trained).eval()
    norm = net.encoder[1]
    norm.running_mean.copy_(message["buffers"][:4])
    norm.running_var.copy_(message["buffers"][4:])
    memory = client_round.state["memory"]
    images, labels = normalised(experiment, memory["images"]), memory["labels"]
    assert len(labels) == 10
    if past == "gradient":
        expected = 0.1 * local.sgd_steps * slope(net, F.cross_entropy(net(images), labels))
    else:
        order = generator(0, 0, 1, 0, "order of task 0")
        for batch in torch.randperm(10, generator=order).split(9):
            norm.train(len(batch) > 1)
            step = slope(net, F.cross_entropy(net(images[batch]), labels[batch]))
            weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach() - 0.1 * step
            torch.nn.utils.vector_to_parameters(weights, net.parameters())
        expected = received - weights
    found = 2 * (received - message["parameters"]) - (received - trained)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    assert expected.norm() > 1e-3


def test_matching_after_more_steps_than_a_round_has_is_matching_once_bit_for_bit():
    temporal = {"past": "gradient", "kappa": 0.5}
    once = run(tiny("stamp", memory=MEMORY, temporal=temporal))
    rarely = run(tiny("stamp", memory=MEMORY, temporal={**temporal, "every": 1000}))
    small.assert_same_weights(once, rarely)
