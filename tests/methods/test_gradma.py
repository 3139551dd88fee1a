"""GradMA against a naive reference in NumPy, and what a run does not show."""

from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
from active_sets import best_active_set
from reference import CONFIGURATIONS, Array, FedAvgReference, Numbers, Reply, State, Visit
from small import BATCH_NORM, P, plan, run, tiny

from stamp_core.engine import trees
from stamp_core.methods.base.method import Log
from stamp_core.methods.base.method import Reply as MethodReply
from workbench.methods.gradma import GradMA

WORKER: dict[str, Any] = {"server": False}
SERVER: dict[str, Any] = {"worker": False, "beta1": 0.5}
NO_ROOM = "gradma server: no room to remember a client"


class GradMAReference(FedAvgReference):
    def start(self) -> None:
        self.momentum = np.zeros_like(self.theta)
        self.memory: dict[int, Array] = {}
        self.counts: dict[int, int] = {}
        self.no_room: list[int] = []

    def corrected(self, vector: Array, memory: list[Array], rho: float) -> Array:
        """The vector with the least change such that <g, v> >= rho |g| |vector|, by blocks."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        cuts = np.cumsum(sizes)[:-1] if self.params.scope == "tensor" else []
        blocks = []
        for part in np.split(np.arange(len(vector)), cuts):
            rows = [g[part] for g in memory if np.linalg.norm(g[part]) > 0]
            v = vector[part]
            g = np.stack(rows) if rows else np.zeros((0, len(v)))
            slopes = g @ v - rho * np.linalg.norm(g, axis=1) * np.linalg.norm(v)
            change = best_active_set(g @ g.T, slopes) @ g if (slopes < 0).any() else 0
            blocks.append(v + change)
        return np.concatenate(blocks)

    def sgd(self, visit: Visit, theta: Array, state: State) -> Array:
        state["received"] = state["previous"] = theta
        return super().sgd(visit, theta, state)

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """The gradient without conflicts with those at two earlier points and the displacement."""
        decay = self.training.weight_decay
        gradient = self.gradient(theta, x, y)
        points = [state["received"]]
        if not np.array_equal(state["previous"], state["received"]):
            points.append(state["previous"])
        memory = [self.gradient(at, x, y) + decay * at for at in points]
        memory.append(theta - state["received"])
        state["previous"] = theta
        if not self.params.worker:
            return gradient
        step = gradient + decay * theta
        return gradient + self.corrected(step, memory, self.params.worker_rho) - step

    def aggregate(self, replies: list[Reply]) -> None:
        """A step along the momentum, without conflicts with the updates of remembered clients."""
        if not self.params.server:
            return super().aggregate(replies)
        updates = {reply.client: self.theta - reply.theta for reply in replies}
        mean = self.mean(list(updates.values()), replies)
        momentum = self.params.beta1 * self.momentum + mean
        self.no_room.append(0)
        for client, update in updates.items():
            if self.make_room(client, set(updates)):
                self.memory[client] = self.memory.get(client, 0) + update
                self.counts[client] = self.counts.get(client, 0) + 1
        self.momentum = self.corrected(momentum, list(self.memory.values()), self.params.server_rho)
        self.memory = {u: self.params.beta2 * update for u, update in self.memory.items()}
        self.theta = self.theta - self.params.server_lr * self.momentum
        return None

    def make_room(self, client: int, present: set[int]) -> bool:
        """Whether a client can be remembered: the absent one that took part least gives way."""
        if client in self.memory or len(self.memory) < self.params.remembered:
            return True
        absent = [(self.counts[u], u) for u in self.memory if u not in present]
        if not absent:
            self.no_room[-1] += 1
            return False
        _, forgotten = min(absent)
        del self.memory[forgotten], self.counts[forgotten]
        return True


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        WORKER,
        {**WORKER, "scope": "tensor"},
        {**WORKER, "worker_rho": 0.1},
        {**SERVER, "beta2": 0.5, "server_lr": 0.7, "server_rho": 0.2},
        {**SERVER, "remembered": 2, "beta2": 0.5},
        {"beta1": 0.5, "scope": "tensor"},
    ],
    ids=str,
)
def test_gradma_is_the_reference(params, configuration):
    record, naive, _ = reference.compare("gradma", configuration, GradMAReference, **params)
    full = [entry["events"].get(NO_ROOM, 0) for entry in record.history if entry["sgd_steps"]]
    assert full == (naive.no_room or [0] * len(full))
    assert (sum(full) > 0) == (params.get("remembered") == 2)


@pytest.mark.parametrize("scope", ["model", "tensor"])
@pytest.mark.parametrize("training", [{}, {"weight_decay": 0.3, "momentum": 0.9}], ids=str)
def test_the_first_step_is_plain_bit_for_bit(scope, training):
    full_batch = {**training, "batch_size": 1000}
    record = run(tiny("gradma", training=full_batch, scope=scope, **WORKER))
    small.assert_same_weights(record, run(tiny(training=full_batch)))
    assert all(entry["notes"] == {"gradma corrected": 0.0} for entry in record.history)


def test_gradients_at_other_points_are_of_the_same_function():
    """At the received model the gradient there is the live one, with batch normalisation too."""
    experiment = tiny("gradma", network=BATCH_NORM)
    worker = small.worker(experiment, plan(experiment))
    client_round = small.arrived(worker, plan(experiment), 0)
    method: Any = worker.method
    context = small.started(method, client_round)
    batch = next(method.batches(client_round, context))
    worker.runtime.start_step(len(batch))
    method.loss(batch, context).backward()
    gradient = method.gradient_at(context.received, batch, context)
    torch.testing.assert_close(gradient, method.model.gradients, rtol=0, atol=1e-7)
    assert method.model.gradients.abs().max() > 1e-3


def test_a_gradient_that_is_not_finite_is_logged_and_not_used(monkeypatch):
    monkeypatch.setattr(GradMA, "gradient_at", lambda self, *rest: torch.full((P,), torch.nan))
    record = run(tiny("gradma", **WORKER))
    small.assert_same_weights(record, run(tiny()))
    for entry in record.history:
        assert entry["events"] == {"gradma: not finite, not corrected": entry["sgd_steps"]}


def test_a_full_memory_forgets_the_absent_client_that_took_part_least(tmp_path):
    """Of equals the one with the lowest number, and 10 is above 9; who returns starts anew. The
    memory comes back from a file in the same order of clients."""
    method = small.worker(tiny("gradma", remembered=3, beta2=0.5)).method
    state = method.init_server(0)
    ones = torch.ones_like(state["parameters"])
    found = []
    for clients in [(2, 9, 10), (9,), (5,), (10, 11), (5, 9), (12,), (2, 10)]:
        replies = [
            MethodReply(client, {}, {"parameters": client * ones}, 1, 1, 0.0) for client in clients
        ]
        state = method.aggregate(state, replies, Log())
        assert state["memory"].keys() == state["counts"].keys()
        found.append({int(client): count for client, count in state["counts"].items()})
    assert found == [
        {2: 1, 9: 1, 10: 1},
        {2: 1, 9: 2, 10: 1},
        {9: 2, 10: 1, 5: 1},
        {9: 2, 10: 2, 11: 1},
        {9: 3, 10: 2, 5: 1},
        {9: 3, 10: 2, 12: 1},
        {9: 3, 10: 3, 2: 1},
    ]
    trees.write_tree(tmp_path / "server.safetensors", state, {})
    again, _ = trees.read_tree(tmp_path / "server.safetensors")
    assert list(again["memory"]) == ["9", "10", "2"]
    small.assert_equal_trees(again, state)
