"""FedSSI against a naive reference in NumPy; what is logged, and divergence."""

import numpy as np
import pytest
import reference
import small
import torch
from reference import GROWING, Array, FedAvgReference, Numbers, Reply, State, Visit
from small import P, run, tiny

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

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
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
        draw = self.draw(visit, "surrogate")
        for own in self.passes(visit.indices, draw, self.training.batch_size):
            gradient = self.gradient(theta, self.x[own], self.y[own])
            step = -self.lr * (gradient + q * (theta - self.theta))
            decrease = decrease - gradient * step
            theta = theta + step
        assert decrease.min() > -1e-12  # so that it need not be clamped
        return decrease / ((theta - self.theta) ** 2 + self.params.epsilon)


@pytest.mark.parametrize("configuration", GROWING)
def test_whole_runs_are_those_of_the_reference(configuration, tmp_path):
    params = {"fedssi_alpha": 1.0, "lam": 0.2, "epsilon": 0.3}
    _, naive, kept = reference.compare("fedssi", configuration, FedSSIReference, tmp_path, **params)
    assert any("anchor" in state for state in kept)
    for state, own in zip(kept, naive.clients, strict=True):
        assert {"omega", "anchor"} & state.keys() == {"omega", "anchor"} & own.keys()


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
