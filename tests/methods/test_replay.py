"""Rehearsal against a naive reference in NumPy."""

import numpy as np
import pytest
import reference
from reference import GROWING, Array, Numbers, RehearsalReference, State, Visit


class ReplayReference(RehearsalReference):
    def sgd(self, visit: Visit, theta: Array, state: State) -> Array:
        state["next"] = iter(self.replayed(visit, state))
        return super().sgd(visit, theta, state)

    def step_gradient(
        self, visit: Visit, theta: Array, x: Array, y: Numbers, state: State
    ) -> Array:
        """One mean over all images, or that of new images and of exemplars, 1 to `weight`."""
        past, weight = next(state["next"]), self.params.weight
        if not len(past):
            return self.gradient(theta, x, y)
        if weight is None:
            both = np.concatenate([x, self.x[past]]), np.concatenate([y, self.y[past]])
            return self.gradient(theta, *both)
        of_past = self.gradient(theta, self.x[past], self.y[past])
        if self.params.anchor:
            of_past = of_past + self.params.anchor * self.anchor_gradient(theta, past, state)
        return (self.gradient(theta, x, y) + weight * of_past) / (1 + weight)

    def anchor_gradient(self, theta: Array, past: Numbers, state: State) -> Array:
        """The gradient of the mean squared distance of logits from those of their class."""
        away = self.logits(theta, self.x[past]) - state["anchors"][self.y[past]]
        return self.backward(theta, self.x[past], 2 * away / away.size)

    def local(self, visit: Visit, state: State) -> reference.Reply:
        """With anchors: the mean logits of each class when its task is remembered."""
        before = set(state.get("experiences", ()))
        reply = super().local(visit, state)
        anchors = state.setdefault("anchors", np.zeros((self.classes, self.classes)))
        may_miss = self.training.participation < 1 or self.training.clients_per_round
        if visit.last or (may_miss and visit.experience not in before):
            for label in np.unique(self.y[visit.indices]):
                own = visit.indices[self.y[visit.indices] == label]
                anchors[label] = self.logits(reply.theta, self.x[own]).mean(0)
        return reply


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(
    "params", [{"ratio": 1.0}, {"ratio": 0.5, "weight": 2.0}], ids=["one mean", "weighted"]
)
def test_replay_is_the_reference(params, configuration):
    memory = {"selection": "uniform", "merge": "reservoir", "exemplars_per_class": 4}
    reference.compare("replay", configuration, ReplayReference, memory=memory, **params)


@pytest.mark.parametrize("configuration", GROWING)
def test_anchored_replay_is_the_reference(configuration):
    memory = {"selection": "uniform", "merge": "reservoir", "exemplars_per_class": 4}
    params = {"ratio": 1.0, "weight": 1.0, "anchor": 0.5}
    reference.compare("replay", configuration, ReplayReference, memory=memory, **params)
