"""FedSSI against a naive reference in NumPy, with what is logged; divergence."""

from collections import Counter

import numpy as np
import pytest
import reference
import torch
from reference import GROWING, Array, FedAvgReference, Numbers, Reply, State, Visit
from small import P, run, tiny

from stamp_core.methods.base.method import DivergedError
from workbench.methods.fedssi import MISSED, UNVERIFIED, FedSSI


class FedSSIReference(FedAvgReference):
    """Ω is the decrease of the loss along a surrogate's way, over its squared length."""

    def start(self) -> None:
        self.events = Counter[tuple[int, int, str]]()  # by experience and round

    def first_state(self, client: int) -> State:
        """No importance; `experience` is that of the anchor, `complete` if it was to its end."""
        return {"experience": -1, "complete": True, "_anchor": None}

    def local(self, visit: Visit, state: State) -> Reply:
        """Training with the penalty; importance after the last round of a task."""
        at = visit.experience, visit.round
        if state["experience"] != visit.experience:
            state["_anchor"] = self.theta
            missed = visit.experience - 1 - state["experience"] + (not state["complete"])
            self.events[*at, MISSED] += missed
        state |= {"experience": visit.experience, "complete": visit.last}
        if "omega" in state:
            state["anchor"] = state["_anchor"]
        reply = super().local(visit, state)
        if visit.last and len(visit.indices):
            state["omega"] = state.get("omega", 0) + self.importance(visit)
            self.events[*at, UNVERIFIED] += 1
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
    """Also the events: a task is missed once if its last round is, whenever a client is back."""
    kind, params = FedSSIReference, {"fedssi_alpha": 1.0, "lam": 0.2, "epsilon": 0.3}
    record, naive, kept = reference.compare("fedssi", configuration, kind, tmp_path, **params)
    for row in record.history:
        for event in (MISSED, UNVERIFIED):
            count = naive.events[row["experience"], row["round"], event]
            assert row["events"].get(event, 0) == count, event
    assert any("anchor" in state for state in kept)
    for state, own in zip(kept, naive.clients, strict=True):
        assert {"omega", "anchor"} & state.keys() == {"omega", "anchor"} & own.keys()


def test_a_surrogate_that_diverges_is_named(monkeypatch):
    infinite = torch.full((P,), torch.inf)
    monkeypatch.setattr(FedSSI, "train_surrogate", lambda *_: infinite)
    with pytest.raises(DivergedError, match=r"client 0, .*round 1: .*training\.lr"):
        run(tiny("fedssi"))
