"""FedSSI against a naive reference in NumPy; what is logged, and refused parameters."""

import numpy as np
import pytest
import small
import states
import torch
from reference import GROWING, Array, FedAvgReference, Numbers, Reply, State, Visit
from small import BATCH_NORM, P, run, tiny

from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.methods.base.method import DivergedError
from workbench.methods.fedssi import MISSED, UNVERIFIED, FedSSI


class FedSSIReference(FedAvgReference):
    """Ω is the decrease of the loss along a surrogate's way, over its squared length."""

    def first_state(self, client: int) -> State:
        """No importance; `experience` is that of the anchor."""
        return {"experience": -1, "_anchor": None}

    def local(self, visit: Visit, state: State) -> Reply:
        """Training with the penalty; importance after the last round of a task."""
        if state["experience"] != visit.experience:
            state["_anchor"] = self.theta
        state["experience"] = visit.experience
        if "omega" in state:
            state["anchor"] = state["_anchor"]
        reply = super().local(visit, state)
        if visit.last and len(visit.indices):
            state["omega"] = state.get("omega", 0) + self.importance(visit)
        return reply

    def step_gradient(
        self, visit: Visit, theta: Array, x: Array, y: Numbers, state: State
    ) -> Array:
        """Cross-entropy and alpha Ω (θ - anchor)^2."""
        gradient = self.gradient(theta, x, y)
        if "omega" in state:
            drift = theta - state["anchor"]
            gradient = gradient + 2 * self.params.fedssi_alpha * state["omega"] * drift
        return gradient

    def importance(self, visit: Visit) -> Array:
        """One epoch of SGD on the loss and q |θ - start|^2 / 2; the loss decreases by -g dθ."""
        theta = self.theta
        decrease = np.zeros_like(theta)
        q = (1 - self.params.lam) / (2 * self.params.lam)
        order = torch.randperm(len(visit.indices), generator=self.draw(visit, "surrogate"))
        shuffled = visit.indices[order.numpy()]
        size = self.training.batch_size
        for place in range(0, len(shuffled), size):
            own = shuffled[place : place + size]
            gradient = self.gradient(theta, self.x[own], self.y[own])
            step = -self.lr * (gradient + q * (theta - self.theta))
            decrease = decrease - gradient * step
            theta = theta + step
        assert decrease.min() > -1e-12  # so that it need not be clamped
        return decrease / ((theta - self.theta) ** 2 + self.params.epsilon)


@pytest.mark.parametrize("configuration", GROWING)
def test_whole_runs_are_those_of_the_reference(configuration, tmp_path):
    params = {"fedssi_alpha": 1.0, "lam": 0.2, "epsilon": 0.3}
    _, kept, naive = states.compare("fedssi", configuration, FedSSIReference, tmp_path, **params)
    assert any("anchor" in state for state in kept)
    for state, own in zip(kept, naive.clients, strict=True):
        assert {"omega", "anchor"} & state.keys() == {"omega", "anchor"} & own.keys()


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_measuring_changes_neither_the_reply_nor_the_live_model(policy):
    """Statistics of batch normalisation too: those of training are sent or kept."""
    training = {"buffers": policy, "momentum": 0.9}
    experiment = tiny("fedssi", network=BATCH_NORM, training=training)
    plan = small.plan(experiment)
    worker = small.worker(experiment, plan)
    server, clients, *_ = worker.initial_states(0)
    sent = worker.method.broadcast(server, 0)
    found = []
    for last in (False, True):
        round_id = RoundId(0, 0, 0, 0, last)
        client_round = worker.method.client_round(round_id, plan, clients[0], sent)
        reply = worker.method.train_client(client_round)
        found.append((reply, worker.runtime.model.parameters.clone()))
    (without, before), (measured, after) = found
    small.assert_equal_trees(without.message, measured.message)
    assert torch.equal(before, after) and "omega" in measured.state
    small.assert_equal_trees(without.state.get("buffers"), measured.state.get("buffers"))


def test_a_surrogate_that_diverges_is_named(monkeypatch):
    infinite = torch.full((P,), torch.inf)
    monkeypatch.setattr(FedSSI, "train_surrogate", lambda *_: infinite)
    with pytest.raises(DivergedError, match=r"client 0, .*round 1: .*training\.lr"):
        run(tiny("fedssi"))


def test_missed_tasks_are_counted_once_each():
    """A task is missed if its last round is: in the experience after, or the next attended."""
    experiment = tiny("fedssi", training={"participation": 0.5, "rounds": 3}, fedssi_alpha=1.0)
    record = run(experiment)
    events = [row["events"] for row in record.history]
    naive = FedSSIReference(experiment, small.plan(experiment))
    expected = [0] * len(events)
    latest = dict.fromkeys(range(4), (-1, True))  # experience, whether its last round was completed
    for row in range(len(events)):
        for visit in naive.visits(*divmod(row, 3)):
            experience, complete = latest[visit.client]
            if experience != visit.experience:
                expected[row] += visit.experience - 1 - experience + (not complete)
            latest[visit.client] = (visit.experience, visit.last)
    assert [each.get(MISSED, 0) for each in events] == expected and sum(expected) > 2
    for row, each in zip(record.history, events, strict=True):
        assert each.get(UNVERIFIED, 0) == (row["completed"] if row["round"] == 2 else 0)


@pytest.mark.parametrize(
    ("lr", "lam", "least"), [(0.1, 0.02, 0.02439), (0.5, 0.11, 0.1111), (0.0, 1e-9, None)]
)
def test_a_surrogate_that_would_diverge_is_refused(lr, lam, least):
    """eta (1 - lam) / (2 lam) is 2 at lam = eta / (4 + eta): 1 / 41 at 0.1, and 1 / 9 at 0.5."""
    if least is not None:
        right = rf"lam is {lam}; it must be above {least}, so that training.lr x \(1 - lam\) / \(2"
        with pytest.raises(ParameterError, match=right):
            small.worker(tiny("fedssi", training={"lr": lr}, lam=lam))
    small.worker(tiny("fedssi", training={"lr": lr}, lam=least * 1.001 if least else lam))
