"""FedProx (Li et al., 2020): a proximal term keeps local models near the received model."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_at_least
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Method


@dataclass(frozen=True)
class FedProxParams(FedAvgParams):
    """The weight of the proximal term."""

    mu: float = 0.01  # of the authors' optimiser; their runs use 0.001 to 1, by data set

    def __post_init__(self) -> None:
        """Validate the weight."""
        super().__post_init__()
        require_at_least(self, 0, "mu")


@dataclass
class FedProxContext(StepContext):
    received: Tensor  # [P]


class FedProx(Method):
    """FedAvg with mu / 2 times the squared distance from the received model in the loss."""

    Params: ClassVar = FedProxParams
    fedavg_equivalent: ClassVar = {"mu": 0.0}
    graph_safe = True

    def __init__(self, params: FedProxParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        lr = runtime.training.lr
        if params.mu * lr >= 2:  # every step would increase the distance
            raise invalid("mu", params.mu, f"below 2 / training.lr = {2 / lr:g}")

    def start(self, client_round: ClientRound) -> FedProxContext:
        return FedProxContext(client_round.message["parameters"].to(self.runtime.device))

    def correct_gradient(self, batch: Batch, context: FedProxContext) -> None:
        if self.params.mu:
            displacement = self.model.parameters - context.received
            self.model.gradients.add_(displacement, alpha=self.params.mu)
