"""FedDBE against a naive reference in NumPy; the warm-up, what is sent, resumed runs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
from reference import GROWING, Array, FedAvgReference, Numbers, Reply, State, Visit, softmax
from small import BATCH_NORM, P, run, tiny

from stamp_core.methods.base.method import DivergedError, Log
from stamp_core.methods.base.method import Reply as MethodReply

BOTH = {"feddbe_kappa": 5.0, "refresh": "task"}
FEW = {"images_per_class": 20}


class FedDBEReference(FedAvgReference):
    """The logits are W2 (h + b_u) + b2; the running mean m of h is held near the global one s."""

    shared: Array | None = None  # s
    warm = False  # whether the warm-up is running

    def first_state(self, client: int) -> State:
        """An offset of 0."""
        return {"offset": np.zeros(self.shapes[0][0])} if self.params.trained else {}

    def start(self) -> None:
        """The warm-up: a round of its own, of which only the means of features are used."""
        if not self.params.feddbe_kappa:
            return
        self.warm = True
        visits = [Visit(u, 0, -1, 0, False, self.indices(u, 0)) for u in range(len(self.clients))]
        self.renew([self.local(visit, {}) for visit in visits if len(visit.indices)])
        self.warm = False

    def renew(self, replies: list[Reply]) -> None:
        self.shared = self.mean([reply.sent["mean"] for reply in replies], replies)

    def local(self, visit: Visit, state: State) -> Reply:
        """Local training; the mean is sent where it is used."""
        state["_mean"] = np.zeros(self.shapes[0][0])
        reply = super().local(visit, state)
        if not self.warm and self.shared is not None:
            state["shared"] = self.shared
        return replace(reply, sent={"mean": state["_mean"], "last": visit.last})

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """The gradient with respect to θ, after a step of the running mean and the offset."""
        _, _, w2, b2 = self.parts(theta)
        h = self.features(theta, x)
        moved = h + state.get("offset", 0)
        g = (softmax(moved @ w2.T + b2) - np.eye(self.classes)[y]) / len(y)
        mu = self.params.momentum
        mean = state["_mean"] = (1 - mu) * state["_mean"] + mu * h.mean(0)
        back = g @ w2
        if "offset" in state:
            state["offset"] = state["offset"] - self.lr * back.sum(0)
        if not self.warm and self.shared is not None:  # kappa mean_j (m_j - s_j)^2 / 2
            gap = self.params.feddbe_kappa * (mean - self.shared) / len(mean)
            back = back + gap * mu / len(y)
        back = back * (h > 0)
        pieces = [back.T @ x, back.sum(0), g.T @ moved, g.sum(0)]
        return np.concatenate([piece.ravel() for piece in pieces])

    def aggregate(self, replies: list[Reply]) -> None:
        """FedAvg's average; the global mean may be renewed after a task."""
        super().aggregate(replies)
        if replies[0].sent["last"] and self.params.refresh == "task" and self.params.feddbe_kappa:
            self.renew(replies)


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(
    "params",
    [{**BOTH, "momentum": 0.3}, {"feddbe_kappa": 20.0, "trained": False}, {"server_lr": 0.5}],
    ids=["both", "regulariser", "offset"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration, tmp_path):
    kind = FedDBEReference
    record, naive, _ = reference.compare("feddbe", configuration, kind, tmp_path, **params)

    def logits(client: int, x: Array) -> Array:
        _, _, w2, b2 = naive.parts(naive.theta)
        offset = naive.clients[client].get("offset", 0)
        return (naive.features(naive.theta, x) + offset) @ w2.T + b2

    reference.assert_personal_scores(record, naive, logits)


def test_the_warm_up_changes_nothing_but_the_mean():
    """With a negligible regulariser the run is FedAvg bit for bit: random draws, weights, running
    statistics and velocities of the warm-up are its own."""
    training = {"momentum": 0.9, "participation": 0.75, "shift": 1, "buffers": "shared"}
    options: dict[str, Any] = {"network": BATCH_NORM, "split": FEW, "training": training}
    record = run(tiny("feddbe", feddbe_kappa=1e-30, trained=False, **options))
    small.assert_same_weights(record, run(tiny(**options)))


def test_a_warm_up_that_diverges_is_named():
    experiment = tiny("feddbe", training={"lr": 1e38}, feddbe_kappa=1.0)
    with pytest.raises(DivergedError, match=r"client 0, .*round -1: .*training\.lr"):
        run(experiment)


@pytest.mark.parametrize("refresh", ["never", "task"])
def test_without_images_in_the_warm_up_there_is_no_regulariser(refresh):
    """The mean is undefined, not zero, until a later task has given one."""
    experiment = tiny("feddbe", feddbe_kappa=5.0, refresh=refresh)
    empty = small.with_train(small.plan(experiment), {(u, 0): () for u in range(4)})
    record = run(experiment, empty)
    without = run(tiny("feddbe"), empty)
    np.testing.assert_array_equal(record.accuracy()[1], without.accuracy()[1])
    same = all(np.array_equal(record.weights[n], without.weights[n]) for n in without.weights)
    assert same == (refresh == "never")


def test_the_local_model_has_the_offset_that_is_not_sent():
    experiment = tiny("feddbe")
    plan = small.plan(experiment)
    worker = small.worker(experiment, plan)
    client_round = small.arrived(worker, plan, experience=1)
    reply = worker.method.train_client(client_round)
    assert reply.local is not None
    sent = small.network(experiment, reply.message["parameters"]).head
    scored = small.network(experiment, reply.local.parameters).head
    weight = sent.get_parameter("weight")
    expected = sent.get_parameter("bias") + weight @ reply.state["offset"]
    assert scored.get_parameter("weight").equal(weight) and reply.state["offset"].any()
    np.testing.assert_allclose(scored.get_parameter("bias").detach(), expected.detach(), rtol=1e-5)


def test_a_client_that_has_not_replied_is_sent_the_mean_again():
    """A message may have been lost with the client that it was sent to."""
    experiment = tiny("feddbe", **BOTH)
    worker = small.worker(experiment, small.plan(experiment))
    method = worker.method
    server = worker.initial_states(0)[0]

    def answer(client: int, samples: int, *mean: float) -> MethodReply:
        message = {"parameters": torch.zeros(P)}
        message |= {"mean": torch.tensor(mean)} if mean else {}
        return MethodReply(client, {}, message, samples, 1, 0.0)

    def receivers(state: State) -> list[int]:
        return [u for u in range(4) if "mean" in method.broadcast(state, u)]

    assert receivers(server) == []
    renewed = method.aggregate(server, [answer(1, 1, 3.0), answer(2, 3, 7.0), answer(3, 0)], Log())
    assert renewed["mean"].tolist() == [6.0] and receivers(renewed) == [0, 1, 2, 3]
    later = method.aggregate(renewed, [answer(0, 5), answer(2, 0)], Log())
    assert receivers(later) == [1, 3] and receivers(renewed) == [0, 1, 2, 3]
    last = method.aggregate(later, [answer(1, 5), answer(2, 5)], Log())
    assert receivers(last) == receivers(method.aggregate(last, [], Log())) == [3]
    again = method.aggregate(last, [answer(0, 2, 8.0)], Log())
    assert again["mean"].tolist() == [8.0] and receivers(again) == [0, 1, 2, 3]
