"""GEM (Lopez-Paz and Ranzato, 2017): no step may increase the loss of any past task."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stamp_core.config.decode import require_at_least
from stamp_core.coresets.memory import past_tasks, task_indices
from stamp_core.matching.projection import project_gradient
from stamp_core.methods.base.method import ClientRound
from stamp_core.methods.base.projection import apply_projection, exemplar_gradient
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams


@dataclass(frozen=True)
class GemParams(RehearsalParams):
    """What is kept in memory, and how the quadratic program over past tasks is relaxed."""

    ratio: float = 0.0  # exemplars are not trained on
    margin: float = 0.0  # least multiplier; published: 0.5, which also adds tasks without conflict
    # Added to the diagonal of the Gram matrix, as published: the shorter the gradients of past
    # tasks, the less of a conflict is removed.
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        super().__post_init__()
        require_at_least(self, 0, "margin", "ridge")


class Gem(Rehearsal):
    """FedAvg whose clients project a gradient that conflicts with that of a past task.

    The published code keeps the last images of a task and masks the classes of other tasks; here
    the memory holds exemplars of each class and there is one head. A step costs an additional
    backward pass for every past task, on all of its exemplars.
    """

    Params: ClassVar = GemParams

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD with the exemplars of each past task, which are normalised only once."""
        memory, (images, labels) = client_round.state["memory"], self.remembered(client_round)
        tasks = past_tasks(memory, client_round.task)
        past = [task_indices(memory, task).to(images.device) for task in tasks]
        client_round.scratch["past"] = [
            (self.work.normalise(images[task]), labels[task].to(self.work.device)) for task in past
        ]
        return super().train(client_round)

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Add the smallest change that removes all conflicts with the gradients of past tasks."""
        tasks, params = client_round.scratch["past"], self.params
        if not tasks:
            return
        with client_round.log.clock("gem"):
            past = [exemplar_gradient(self.work, images, labels) for images, labels in tasks]
            projection = project_gradient(
                self.work.model.gradients, past, ridge=params.ridge, margin=params.margin
            )
        apply_projection(self, client_round, projection, "gem")
