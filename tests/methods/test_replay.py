"""Rehearsal against a naive reference in NumPy."""

import numpy as np
import pytest
import reference
from reference import GROWING, Array, Numbers, RehearsalReference, State, Visit
from small import kept


class ReplayReference(RehearsalReference):
    def sgd(self, visit: Visit, theta: Array, state: State) -> Array:
        state["next"] = iter(self.replayed(visit, state))
        return super().sgd(visit, theta, state)

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """One mean over all images, or that of new images and of exemplars, 1 to `weight`."""
        past, weight = next(state["next"]), self.params.weight
        if not len(past):
            return self.gradient(theta, x, y)
        if weight is None:
            both = np.concatenate([x, self.x[past]]), np.concatenate([y, self.y[past]])
            return self.gradient(theta, *both)
        of_past = self.gradient(theta, self.x[past], self.y[past])
        return (self.gradient(theta, x, y) + weight * of_past) / (1 + weight)


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(
    "params", [{"ratio": 1.0}, {"ratio": 0.5, "weight": 2.0}], ids=["one mean", "weighted"]
)
def test_replay_is_the_reference(params, configuration):
    reference.compare("replay", configuration, ReplayReference, memory=kept(4), **params)
