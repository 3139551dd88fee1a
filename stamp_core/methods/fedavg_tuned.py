"""Control: FedAvg whose clients fine-tune the global model before they are evaluated."""

from dataclasses import dataclass
from typing import Any, ClassVar

from stamp_core.client.personalisation import epoch_batches
from stamp_core.config.decode import require_at_least
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Method


@dataclass(frozen=True)
class FedAvgTunedParams(FedAvgParams):
    """How long clients fine-tune."""

    ft_epochs: int = 1  # epochs of local SGD on the client's current task, at evaluation only

    def __post_init__(self) -> None:
        """Refuse a negative number of epochs."""
        super().__post_init__()
        require_at_least(self, 0, "ft_epochs")


class FedAvgTuned(Method):
    """FedAvg; a client's personal model is the global one after plain fine-tuning."""

    Params: ClassVar = FedAvgTunedParams
    models = ("global", "personal", "local")
    neutral: ClassVar[dict[str, Any]] = {}
    group = "control"

    def load_personal_model(self, client_round: ClientRound) -> None:
        """Load the global model and fine-tune it as in local training."""
        self.receive(client_round)
        address, indices = client_round.round_id, self.train_indices(client_round)
        batches = epoch_batches(self.work, address, indices, "personal", self.params.ft_epochs)
        self.work.fit(batches)
