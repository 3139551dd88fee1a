"""FedProx (Li et al., 2020): a proximal term keeps local models near the received model."""

from dataclasses import dataclass
from typing import ClassVar

from stamp_core.client.workspace import Workspace
from stamp_core.config.decode import invalid, require_at_least
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Method


@dataclass(frozen=True)
class FedProxParams(FedAvgParams):
    """The weight of the proximal term."""

    mu: float = 0.01  # of the authors' optimiser; their runs use 0.001 to 1, by data set

    def __post_init__(self) -> None:
        """Refuse a negative weight."""
        super().__post_init__()
        require_at_least(self, 0, "mu")


class FedProx(Method):
    """FedAvg with mu / 2 times the squared distance from the received model in the loss."""

    Params: ClassVar = FedProxParams
    neutral: ClassVar = {"mu": 0.0}
    captures, step_inputs = True, ("received",)

    def __init__(self, params: FedProxParams, work: Workspace) -> None:
        super().__init__(params, work)
        lr = work.training.lr
        if params.mu * lr >= 2:  # every step would increase the distance
            raise invalid("mu", params.mu, f"below 2 / training.lr = {2 / lr:g}")

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model and store it for the proximal term."""
        super().receive(client_round)
        client_round.scratch["received"] = client_round.message["parameters"].to(self.work.device)

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Add the proximal term's gradient, mu times the displacement from the received model."""
        if self.params.mu:
            displacement = self.work.model.parameters - client_round.scratch["received"]
            self.work.model.gradients.add_(displacement, alpha=self.params.mu)
