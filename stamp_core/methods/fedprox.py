"""FedProx (Li et al., 2020): FedAvg whose clients are pulled towards the model they received."""

from dataclasses import dataclass
from typing import Any, ClassVar

from stamp_core.config import at_least, wrong
from stamp_core.methods import Method, ServerStep, Turn
from stamp_core.workspace import Workspace


@dataclass(frozen=True)
class Pull(ServerStep):
    """How strong the pull is."""

    mu: float = 0.01  # of the authors' optimiser; their runs take 0.001 to 1, by data set

    def __post_init__(self) -> None:
        """Refuse a push."""
        super().__post_init__()
        at_least(self, 0, "mu")


class FedProx(Method):
    """FedAvg with mu / 2 times the squared distance from the received model in the loss."""

    Params: ClassVar = Pull
    neutral: ClassVar[dict[str, Any]] = {"mu": 0.0}

    def __init__(self, params: Pull, work: Workspace) -> None:
        super().__init__(params, work)
        rate = work.setting.training.rate
        if params.mu * rate >= 2:  # each step would leave the received model further behind
            raise wrong("mu", params.mu, f"below 2 / training.rate = {2 / rate:g}")

    def receive(self, turn: Turn) -> None:
        """Take up the received model and note it for the pull."""
        super().receive(turn)
        turn.notes["received"] = turn.message["parameters"].to(self.work.device)

    def correct(self, turn: Turn) -> None:
        """Add mu times the way from the received model to the gradient."""
        if self.params.mu:
            away = self.work.model.parameters - turn.notes["received"]
            self.work.model.gradients.add_(away, alpha=self.params.mu)
