"""A-GEM (Chaudhry et al., 2019): no step may increase the mean loss on the memory."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stamp_core.config.decode import require_at_least
from stamp_core.matching.projection import NOT_FINITE, Projection
from stamp_core.methods.base.method import ClientRound
from stamp_core.methods.base.projection import apply_projection, exemplar_gradient
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

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD, whose steps draw their exemplars from one generator."""
        generator = client_round.round_id.generator("reference")
        client_round.scratch |= {"past": self.past_indices(client_round), "generator": generator}
        return super().train(client_round)

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Remove the conflict with the gradient on a sample of exemplars of other tasks."""
        if not len(client_round.scratch["past"]):
            return
        images, labels = self.remembered(client_round)
        sample = self.sample(client_round).to(images.device)
        with client_round.log.clock("agem"):
            inputs = self.work.normalise(images[sample])
            reference = exemplar_gradient(self.work, inputs, labels[sample])
            projection = remove_conflict(self.work.model.gradients, reference)
        apply_projection(self, client_round, projection, "agem")

    def sample(self, client_round: ClientRound) -> Tensor:
        """Indices of a random sample of exemplars of other tasks.  # [m]"""
        past: Tensor = client_round.scratch["past"]
        order = torch.randperm(len(past), generator=client_round.scratch["generator"])
        return past[order[: self.params.reference]]


def remove_conflict(gradient: Tensor, reference: Tensor) -> Projection:
    """The difference to the nearest vector with <reference, vector> >= 0, in closed form."""
    r = reference.double()
    product, square = float(r @ gradient.double()), float(r @ r)
    if not math.isfinite(product + square):
        return Projection(None, (NOT_FINITE,))
    return Projection(r.mul_(-product / square) if product < 0 else None)
