"""Re-Fed: whole runs against NumPy, gradient norms of single images, what a client keeps."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import CONFIGURATIONS, Array, FedAvgReference, Numbers, Reply, State, Visit, softmax
from small import BATCH_NORM, plan, run, tiny

from stamp_core.core.seeding import generator
from workbench.methods.base import sample_cache
from workbench.methods.base.sample_cache import LOST, NOT_FINITE, OMITTED

FEW = {"images_per_class": 20}  # 40 images in a task


class ReFedReference(FedAvgReference):
    """Training on the task and a cache of indices, chosen by importance when a task comes."""

    def start(self) -> None:
        self.events = {LOST: 0, OMITTED: 0}

    def first_state(self, client: int) -> State:
        return {"cache": np.empty(0, np.int64), "tasks": np.empty(0, np.int64), "last": -1}

    def local(self, visit: Visit, state: State) -> Reply:
        new = visit.experience not in (0, state["last"])
        if new and self.params.cache:
            self.events[LOST] += visit.experience - 1 - max(state["last"], 0)
            task = (visit.experience - 1) % self.plan.tasks
            offered, tasks = self.joined(self.indices(visit.client, task), task, state)
            chosen = self.choose(visit, offered, state)
            state["cache"], state["tasks"] = offered[chosen], tasks[chosen]
        state["last"] = visit.experience
        trained = self.joined(visit.indices, visit.task, state)[0] if len(visit.indices) else []
        theta = self.sgd(replace(visit, indices=np.array(trained)), self.theta, state)
        return Reply(visit.client, theta, len(visit.indices))

    def joined(self, indices: Numbers, task: int, state: State) -> tuple[Numbers, Numbers]:
        others = state["tasks"] != task
        tasks = np.r_[np.full(len(indices), task), state["tasks"][others]]
        return np.r_[indices, state["cache"][others]], tasks

    def choose(self, visit: Visit, offered: Numbers, state: State) -> list[int]:
        """Places by decreasing score; with `balance` the best of each class, then the second."""
        if len(offered) <= self.params.cache:
            return list(range(len(offered)))
        order = np.argsort(-self.scores(visit, offered, state), kind="stable")
        labels = self.y[offered]
        if self.params.balance == "class":
            place = [int((labels[order[:i]] == labels[n]).sum()) for i, n in enumerate(order)]
            order = order[np.argsort(place, kind="stable")]
        chosen = order[: self.params.cache]
        self.events[OMITTED] += len(set(labels)) - len(set(labels[chosen]))
        return [int(n) for n in chosen]

    def scores(self, visit: Visit, offered: Numbers, state: State) -> Array:
        return self.importance(self.x[offered], self.y[offered])

    def importance(self, x: Array, y: Numbers) -> Array:
        """Sum of gradient norms over p along the informative model, tied to the received one."""
        params = self.params
        v, total = self.theta, np.zeros(len(y))
        for p in range(1, params.steps + 1):
            h, w2 = self.features(v, x), self.parts(v)[2]
            errors = softmax(self.logits(v, x)) - np.eye(self.classes)[y]
            squares = (errors**2).sum(1) * ((h**2).sum(1) + 1)
            if params.score == "full":
                hidden = (errors @ w2) * (h > 0)
                squares = squares + (hidden**2).sum(1) * ((x**2).sum(1) + 1)
            total = total + np.sqrt(squares) / p
            q = (1 - params.lam) / (2 * params.lam)
            v = v - params.pim_lr * (self.gradient(v, x, y) + q * (v - self.theta))
        return total


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"cache": 12, "lam": 0.4, "pim_lr": 0.5, "steps": 3},
        {"cache": 30, "score": "head", "balance": "class", "steps": 2, "pim_lr": 0.2},
        {"cache": 1000},
    ],
    ids=["by importance", "balanced", "all"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration):
    record, naive, _ = reference.compare("refed", configuration, ReFedReference, **params)
    for text, count in naive.events.items():
        assert sum(row["events"].get(text, 0) for row in record.history) == count


def test_images_of_a_task_are_lost_if_the_next_one_is_missed():
    """A client holds them until the next task but one; of tasks before its first one none."""
    training = {"rounds": 1, "participation": 0.5}
    experiment = tiny("refed", split={**FEW, "tasks": 5}, training=training, cache=15, steps=1)
    record, naive = run(experiment), ReFedReference(experiment, plan(experiment))
    naive.run()
    assert sum(events(record, LOST)) == naive.events[LOST] > 0


def refed(**options: Any) -> tuple[Any, dict[str, Any]]:
    """The method on 40 images per task, and those of client 0's first task."""
    experiment = tiny("refed", **{"split": FEW, **options})
    whole = plan(experiment)
    method: Any = small.worker(experiment, whole).method
    empty = method.init_client(0, {})["cache"]
    indices = whole.train_indices(method.runtime.dataset, 0, 0)
    return method, method.local_set(indices, 0, empty)


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
@pytest.mark.parametrize("score", ["full", "head"])
def test_norms_are_those_of_single_images_in_any_order_and_portion(score, network, monkeypatch):
    method, samples = refed(network=network, score=score)
    classifier = method.classifier
    method.model.buffers.uniform_(0.5, 1.5, generator=generator("buffers"))
    buffers = method.model.buffers.clone()
    before = classifier.images_backpropagated
    actual = method.gradient_norms(samples)
    assert classifier.images_backpropagated - before == (40 if score == "full" else 0)
    weights = list((classifier.eval() if score == "full" else classifier.head).parameters())
    for norm, (images, labels) in zip(actual, method.parts(samples, 1), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(classifier(images), labels), weights)
        expected = torch.cat([g.flatten() for g in gradients]).norm()
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
    order = torch.randperm(40, generator=generator("order"))
    monkeypatch.setattr(sample_cache, "GRADIENTS", 3 * len(method.model.parameters))
    monkeypatch.setattr(method.runtime, "chunk", 7)
    shuffled = method.gradient_norms({name: values[order] for name, values in samples.items()})
    torch.testing.assert_close(shuffled, actual[order], rtol=1e-5, atol=1e-6)
    assert torch.equal(method.model.buffers, buffers)


def test_scoring_changes_neither_the_live_model_nor_the_statistics():
    method, samples = refed(network=BATCH_NORM, cache=5, pim_lr=0.5)
    vectors = [method.model.parameters, method.model.buffers]
    before = [vector.clone() for vector in vectors]
    experiment = tiny("refed", split=FEW, network=BATCH_NORM)
    whole = plan(experiment)
    method.scores(small.arrived(small.worker(experiment, whole), whole, 1), samples)
    small.assert_equal_trees(vectors, before)


def test_norms_that_are_not_finite_end_the_scoring():
    """A learning rate of 1e38: the second scoring overflows, so the first one decides alone."""
    found = []
    for params in ({"pim_lr": 1e38, "steps": 3}, {"pim_lr": 0.1, "steps": 1}):
        record = run(tiny("refed", split=FEW, cache=5, lam=1.0, **params))
        found.append((record.weights["head.bias"].tobytes(), sum(events(record, NOT_FINITE))))
    (same, count), (weights, none) = found
    assert same == weights and count == 8 and none == 0  # four clients in two experiences


def events(record: Any, text: str) -> list[int]:
    return [row["events"].get(text, 0) for row in record.history]
