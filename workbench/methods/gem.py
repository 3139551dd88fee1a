"""GEM (Lopez-Paz and Ranzato, 2017): no step may increase the loss of any past task."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.config.decode import require_at_least
from stamp_core.methods.base.method import ClientRound, Log
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalContext, RehearsalParams
from workbench.methods.base.gradient_projection import (
    Corrections,
    exemplar_gradient,
    project_gradient,
)


@dataclass(frozen=True)
class GemParams(RehearsalParams):
    """What is kept in memory, and how the quadratic program over past tasks is relaxed."""

    ratio: float = 0.0  # exemplars are not trained on
    margin: float = 0.0  # least multiplier; published: 0.5, which also adds tasks without conflict
    # Added to the diagonal of the Gram matrix, as published: the shorter the gradients of past
    # tasks, the less of a conflict is removed.
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        """Validate the numbers."""
        super().__post_init__()
        require_at_least(self, 0, "margin", "ridge")


@dataclass
class GemContext(RehearsalContext):
    past: list[tuple[Tensor, Tensor]]  # exemplars of each past task
    corrections: Corrections
    log: Log


class Gem(Rehearsal):
    """FedAvg whose clients project a gradient that conflicts with that of a past task.

    The published code keeps the last images of a task and masks the classes of other tasks; here
    the memory holds exemplars of each class and there is one head. A step costs an additional
    backward pass for every past task, on all of its exemplars.
    """

    Params: ClassVar = GemParams

    def start(self, client_round: ClientRound) -> GemContext:
        """The exemplars of each past task are normalised only once."""
        images, labels = self.exemplars_on_device(client_round)
        past = [
            (self.runtime.normalise(images[own]), labels[own].to(self.runtime.device))
            for own in self.past_exemplars(client_round).values()
        ]
        anchors = self.anchors_on_device(client_round)
        return GemContext(anchors, past, Corrections(), client_round.log)

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
