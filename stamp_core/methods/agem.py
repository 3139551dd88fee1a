"""A-GEM (Chaudhry et al., 2019): no step may increase the mean loss on the memory."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from stamp_core.config.decode import require_at_least
from stamp_core.matching.projection import project_gradient
from stamp_core.methods.base.method import ClientRound
from stamp_core.methods.base.projection import apply_projection
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams


@dataclass(frozen=True)
class AGemParams(RehearsalParams):
    """What is kept in memory, and how much of it gives the reference gradient."""

    ratio: float = 0.0  # exemplars are not trained on
    reference: int = 128  # exemplars for the reference gradient; published: 256

    def __post_init__(self) -> None:
        """Refuse an empty reference."""
        super().__post_init__()
        require_at_least(self, 1, "reference")


class AGem(Rehearsal):
    """FedAvg whose clients project a gradient that conflicts with the memory's."""

    Params: ClassVar = AGemParams

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Remove the conflict with the gradient on a sample of exemplars of other tasks."""
        past, scratch = self.past_indices(client_round), client_round.scratch
        if not len(past):
            return
        generator = scratch.setdefault("reference", client_round.round_id.generator("reference"))
        sample = past[torch.randperm(len(past), generator=generator)[: self.params.reference]]
        with client_round.log.clock("agem"):
            reference = self.memory_gradient(client_round, sample)
            projection = project_gradient(self.work.model.gradients, [reference])
        apply_projection(self, client_round, projection, "agem")
