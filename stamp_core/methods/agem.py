"""A-GEM (Chaudhry et al., 2019): no step may increase the mean loss on the memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stamp_core.config.decode import require_at_least
from stamp_core.matching.projection import NOT_FINITE
from stamp_core.methods.base.method import ClientRound
from stamp_core.methods.base.projection import exemplar_gradient, log_projection
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
        """Local SGD; all samples are drawn before, and what they did is read after."""
        products: list[Tensor] = []
        client_round.scratch |= {"samples": self.samples(client_round), "products": products}
        losses = super().train(client_round)
        if products:
            found = torch.stack(products).cpu()
            finite = found.isfinite()
            corrected = float((finite & (found < 0)).double().mean())
            troubles = [NOT_FINITE] * int((~finite).sum())
            log_projection(client_round.log, "agem", corrected, troubles)
        return losses

    def samples(self, client_round: ClientRound) -> Iterator[Tensor]:
        """For every step indices of random exemplars of other tasks.  # [m] each"""
        past, draw = self.past_indices(client_round), client_round.round_id.generator("reference")
        steps = self.work.batch_sizes(len(client_round.indices))
        if not steps or not len(past):
            return iter(())
        orders = [torch.randperm(len(past), generator=draw)[: self.params.reference] for _ in steps]
        indices = past[torch.stack(orders)].to(self.remembered(client_round)[0].device)
        return iter(indices)

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Remove the conflict with the gradient on a sample of exemplars of other tasks."""
        sample = next(client_round.scratch["samples"], None)
        if sample is None:
            return
        images, labels = self.remembered(client_round)
        gradient = self.work.model.gradients
        with client_round.log.clock("agem"):
            inputs = self.work.normalise(images[sample])
            reference = exemplar_gradient(self.work, inputs, labels[sample])
            added, product = remove_conflict(gradient, reference)
            gradient.add_(added)
        client_round.scratch["products"].append(product)


def remove_conflict(gradient: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """What leads to the nearest vector with <reference, vector> >= 0, in closed form.

    It is 0 if <reference, gradient>, the second result, is at least 0 or not finite. The host does
    not wait for it.  # float64 [P], []
    """
    r = reference.double()
    product = r @ gradient.double()
    conflict = (product < 0) & (product > -math.inf)
    return r.mul_(-product / (r @ r)).masked_fill_(~conflict, 0.0), product
