"""A-GEM (Chaudhry et al., 2019): no step may increase the mean loss on the memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.config.limits import NonNegative, PositiveInt
from stamp_core.methods.base.method import ClientRound, Log
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from workbench.methods.base.gradient_projection import NOT_FINITE, exemplar_gradient, log_projection


@dataclass(frozen=True)
class AGemParams(RehearsalParams):
    """What is kept in memory, and how much of it gives the reference gradient."""

    ratio: NonNegative = 0.0  # exemplars are not trained on
    reference: PositiveInt = 128  # exemplars for the reference gradient; published: 256


@dataclass
class AGemContext(StepContext):
    images: Tensor  # of the memory
    labels: Tensor
    samples: Iterator[Tensor]  # indices of exemplars of other tasks, for each step
    products: list[Tensor]  # <reference, gradient> of each step
    log: Log


class AGem(Rehearsal):
    """FedAvg whose clients project a gradient that conflicts with the memory's."""

    Params: ClassVar = AGemParams

    def start(self, client_round: ClientRound) -> AGemContext:
        images, labels = self.exemplars_on_device(client_round)
        samples = self.samples(client_round, images.device)
        return AGemContext(images, labels, samples, [], client_round.log)

    def samples(self, client_round: ClientRound, device: torch.device) -> Iterator[Tensor]:
        """Indices of random exemplars of other tasks for every step.  # [m] each"""
        past = self.past_indices(client_round)
        steps = self.runtime.batch_sizes(len(client_round.indices))
        if not steps or not len(past):
            return iter(())
        draw = client_round.generator("reference")
        orders = [torch.randperm(len(past), generator=draw)[: self.params.reference] for _ in steps]
        return iter(past[torch.stack(orders)].to(device))

    def finish(self, client_round: ClientRound, context: AGemContext) -> None:
        if context.products:
            found = torch.stack(context.products).cpu()
            finite = found.isfinite()
            corrected = float((finite & (found < 0)).double().mean())
            failures = [NOT_FINITE] * int((~finite).sum())
            log_projection(client_round.log, "agem", corrected, failures)

    def correct_gradient(self, batch: Batch, context: AGemContext) -> None:
        sample = next(context.samples, None)
        if sample is None:
            return
        with context.log.clock("agem"):
            inputs = self.runtime.normalise(context.images[sample])
            reference = exemplar_gradient(self.runtime, inputs, context.labels[sample])
            added, product = remove_conflict(self.model.gradients, reference)
            self.model.gradients.add_(added)
        context.products.append(product)


def remove_conflict(gradient: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """What leads to the nearest vector with <reference, vector> >= 0, in closed form.

    It is 0 if <reference, gradient>, the second result, is at least 0 or not finite. The host does
    not wait for it.  # float64 [P], []
    """
    r = reference.double()
    product = r @ gradient.double()
    conflict = (product < 0) & (product > -math.inf)
    return r.mul_(-product / (r @ r)).masked_fill_(~conflict, 0.0), product
