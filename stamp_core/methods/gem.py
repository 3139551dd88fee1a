"""GEM (Lopez-Paz and Ranzato, 2017): no step leads up the loss of any past task."""

from dataclasses import dataclass
from typing import ClassVar

from stamp_core.config import at_least
from stamp_core.coresets.memory import of_task, past
from stamp_core.methods import Turn
from stamp_core.methods.agem import AGem, take
from stamp_core.methods.replay import Rehearsal
from stamp_core.projection import correction


@dataclass(frozen=True)
class Constraints(Rehearsal):
    """What is kept, and how the program over the past tasks is softened."""

    ratio: float = 0.0  # no remembered picture is trained on
    margin: float = 0.0  # the least multiplier; published: 0.5, which adds agreeing tasks as well
    # Added to the Gram matrix as it is, as published: the shorter the past's gradients, the less
    # of a conflict is taken away.
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse what has no meaning in the program."""
        super().__post_init__()
        at_least(self, 0, "margin", "ridge")


class Gem(AGem):
    """FedAvg whose clients project a gradient that points against a past task's.

    The published code keeps the last pictures of a task and masks all classes of others; here the
    memory has so many of each class and the head is one. A step costs a backward pass more for
    every past task, on all that is kept of it.
    """

    Params: ClassVar = Constraints

    def correct(self, turn: Turn) -> None:
        """Add to the gradient what it takes to agree with those of all past tasks."""
        kept, softness = turn.state["memory"], self.params
        tasks = past(kept, turn.task)
        if tasks:
            with turn.log.clock("gem"):
                rows = [self.slope(turn, of_task(kept, task)) for task in tasks]
                found = correction(
                    self.work.model.gradients, rows, ridge=softness.ridge, margin=softness.margin
                )
            take(self, turn, found, "gem")
