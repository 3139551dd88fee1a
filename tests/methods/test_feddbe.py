"""FedDBE against a naive reference in NumPy; the warm-up, what is sent, resumed runs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import reference
import small
import torch
from reference import GROWING, Array, FedAvgReference, Numbers, Reply, State, Visit, softmax
from small import BATCH_NORM, P, run, tiny

from stamp_core.methods.base.method import DivergedError


class FedDBEReference(FedAvgReference):
    """The logits are W2 (h + b_u) + b2; the running mean m of h is held near the global one s."""

    shared: Array | None = None  # s
    warm = False  # whether the warm-up is running

    def first_state(self, client: int) -> State:
        return {"offset": np.zeros(self.shapes[0][0])} if self.params.trained else {}

    def start(self) -> None:
        """The warm-up: a round of its own, of which only the means of features are used."""
        self.informed = set(range(len(self.clients)))  # clients that have got s
        self.resent = Counter[tuple[int, int]]()  # how often it is sent in a round
        if not self.params.feddbe_kappa:
            return
        self.warm = True
        visits = [Visit(u, 0, -1, 0, False, self.indices(u, 0)) for u in range(len(self.clients))]
        self.renew([self.local(visit, {}) for visit in visits if len(visit.indices)])
        self.warm = False

    def renew(self, replies: list[Reply]) -> None:
        self.shared = self.mean([reply.sent["mean"] for reply in replies], replies)

    def local(self, visit: Visit, state: State) -> Reply:
        if visit.client not in self.informed:
            self.informed.add(visit.client)
            self.resent[visit.experience, visit.round] += 1
        state["_mean"] = np.zeros(self.shapes[0][0])
        reply = super().local(visit, state)
        if not self.warm and self.shared is not None:
            state["shared"] = self.shared
        return replace(reply, sent={"mean": state["_mean"], "last": visit.last})

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """The gradient with respect to θ, after a step of the running mean and the offset."""
        h = self.features(theta, x)
        moved = h + state.get("offset", 0)
        g = (softmax(self.outputs(theta, moved)) - np.eye(self.classes)[y]) / len(y)
        mu = self.params.momentum
        mean = state["_mean"] = (1 - mu) * state["_mean"] + mu * h.mean(0)
        back = g @ self.parts(theta)[2]
        if "offset" in state:
            state["offset"] = state["offset"] - self.lr * back.sum(0)
        if not self.warm and self.shared is not None:  # kappa mean_j (m_j - s_j)^2 / 2
            gap = self.params.feddbe_kappa * (mean - self.shared) / len(mean)
            back = back + gap * mu / len(y)
        back = back * (h > 0)
        pieces = [back.T @ x, back.sum(0), g.T @ moved, g.sum(0)]
        return np.concatenate([piece.ravel() for piece in pieces])

    def aggregate(self, replies: list[Reply]) -> None:
        super().aggregate(replies)
        if replies[0].sent["last"] and self.params.refresh == "task" and self.params.feddbe_kappa:
            self.renew(replies)
            self.informed = set()


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(
    "params",
    [
        {"feddbe_kappa": 5.0, "refresh": "task", "momentum": 0.3},
        {"feddbe_kappa": 20.0, "trained": False},
        {"server_lr": 0.5},
    ],
    ids=["both", "regulariser", "offset"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration, tmp_path):
    kind = FedDBEReference
    record, naive, _ = reference.compare("feddbe", configuration, kind, tmp_path, **params)
    for row in record.history:  # a client gets a new mean once, when it next takes part
        means = naive.resent[row["experience"], row["round"]]
        assert row["bytes"]["down"] == 4 * (P * row["participants"] + 32 * means)
    assert bool(naive.resent) == ("refresh" in params)

    def logits(client: int, x: Array) -> Array:
        offset = naive.clients[client].get("offset", 0)
        return naive.outputs(naive.theta, naive.features(naive.theta, x) + offset)

    reference.assert_personal_scores(record, naive, logits)


def test_the_warm_up_changes_nothing_but_the_mean():
    """With a negligible regulariser the run is FedAvg bit for bit: random draws, weights, running
    statistics and velocities of the warm-up are its own."""
    training = {"momentum": 0.9, "participation": 0.75, "shift": 1, "buffers": "shared"}
    options = {"images_per_class": 20}, training, BATCH_NORM
    record = run(tiny("feddbe", *options, feddbe_kappa=1e-30, trained=False))
    small.assert_same_weights(record, run(tiny("fedavg", *options)))


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
    reply = worker.method.train_client(small.arrived(worker, plan, experience=1))
    weights = reply.message["parameters"], reply.local.parameters
    sent, scored = (small.network(experiment, each) for each in weights)
    x = small.normalised(experiment, experiment.dataset().x_test)
    torch.testing.assert_close(scored(x), sent.head(sent.encoder(x) + reply.state["offset"]))
    assert reply.state["offset"].any()
