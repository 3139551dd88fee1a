"""GEM (Lopez-Paz and Ranzato, 2017): no step may increase the loss of any past task."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.config.limits import NonNegative
from stamp_core.methods.base.method import ClientRound, Log
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from workbench.methods.base.gradient_projection import (
    Corrections,
    exemplar_gradient,
    project_gradient,
)


@dataclass(frozen=True)
class GemParams(RehearsalParams):
    """What is kept in memory, and how the quadratic program over past tasks is relaxed."""

    ratio: NonNegative = 0.0  # exemplars are not trained on
    # least multiplier; published: 0.5, which also adds tasks without conflict
    margin: NonNegative = 0.0
    # Added to the diagonal of the Gram matrix, as published: the shorter the gradients of past
    # tasks, the less of a conflict is removed.
    ridge: NonNegative = 1e-3


@dataclass
class GemContext(StepContext):
    past: list[tuple[Tensor, Tensor]]  # exemplars of each past task
    corrections: Corrections
    log: Log


class Gem(Rehearsal):
    """FedAvg whose clients project a gradient that conflicts with that of a past task."""

    Params: ClassVar = GemParams

    def start(self, client_round: ClientRound) -> GemContext:
        images, labels = self.exemplars_on_device(client_round)
        past = [
            (self.runtime.normalise(images[own]), labels[own].to(self.runtime.device))
            for own in self.past_exemplars(client_round).values()
        ]
        return GemContext(past, Corrections(), client_round.log)

    def finish(self, client_round: ClientRound, context: GemContext) -> None:
        context.corrections.log(client_round.log, "gem")

    def correct_gradient(self, batch: Batch, context: GemContext) -> None:
        if not context.past:
            return
        gradients, params = self.model.gradients, self.params
        with context.log.clock("gem"):
            past = [exemplar_gradient(self.runtime, *each) for each in context.past]
            projection = project_gradient(gradients, past, ridge=params.ridge, margin=params.margin)
        context.corrections.apply(gradients, projection)
