"""FedAvg, FedProx, fine-tuned FedAvg and joint training against naive references in NumPy."""

from typing import Any

import numpy as np
import pytest
import reference
from reference import CONFIGURATIONS, Array, FedAvgReference, Numbers, State, Visit


class FedProxReference(FedAvgReference):
    """The loss has mu / 2 |θ - received|^2."""

    def step_gradient(
        self, visit: Visit, theta: Array, x: Array, y: Numbers, state: State
    ) -> Array:
        """Cross-entropy and the proximal term."""
        return self.gradient(theta, x, y) + self.params.mu * (theta - self.theta)


class JointReference(FedAvgReference):
    """One learner, as client 0, on all images of all clients and tasks."""

    def chosen(self, clients: list[int]) -> list[int]:
        """The one learner."""
        return [0]

    def indices(self, client: int, task: int) -> Numbers:
        """Every image once."""
        pairs = [(u, t) for u in range(len(self.plan.clients)) for t in range(self.plan.tasks)]
        found = [self.plan.train_indices(self.data, *pair).numpy() for pair in pairs]
        return np.unique(np.concatenate(found))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    ("kind", "naive", "params"),
    [
        ("fedavg", FedAvgReference, {"server_lr": 1.5}),
        ("fedprox", FedProxReference, {"mu": 0.7}),
        ("fedavg_tuned", FedAvgReference, {}),
        ("joint", JointReference, {}),
    ],
)
def test_whole_runs_are_those_of_the_reference(
    kind: str, naive: type[FedAvgReference], params: dict[str, Any], configuration: str
) -> None:
    reference.compare(kind, configuration, naive, **params)
