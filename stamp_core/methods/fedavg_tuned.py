"""Control: FedAvg whose clients fine-tune the global model before they are evaluated."""

import math
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

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
    fedavg_equivalent: ClassVar = {}
    group = "control"

    def load_personal_model(self, client_round: ClientRound) -> None:
        self.receive(client_round)
        indices = client_round.indices
        steps = self.params.ft_epochs * math.ceil(len(indices) / self.runtime.training.batch_size)
        batches = self.runtime.endless_batches(client_round, indices, "personal")
        self.runtime.fit(islice(batches, steps))
