"""A-GEM (Chaudhry et al., 2019): no step leads up the mean loss of what is remembered."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import at_least
from stamp_core.methods import Group, Method, Turn
from stamp_core.methods.replay import Rehearsal, Replay
from stamp_core.projection import Correction, correction
from stamp_core.vectors import flatten


@dataclass(frozen=True)
class Reference(Rehearsal):
    """What is kept, and how much of it a step looks at."""

    ratio: float = 0.0  # no remembered picture is trained on
    reference: int = 128  # pictures behind the reference gradient; published: 256

    def __post_init__(self) -> None:
        """Refuse an empty reference."""
        super().__post_init__()
        at_least(self, 1, "reference")


class AGem(Replay):
    """FedAvg whose clients project a gradient that points against the past's."""

    Params: ClassVar[type[Any]] = Reference
    neutral: ClassVar[dict[str, Any]] = {"memory": {"per_class": 0}}
    group: ClassVar[Group] = "continual"

    def correct(self, turn: Turn) -> None:
        """Take from the gradient its part against that on some remembered pictures."""
        past = (turn.state["memory"]["tasks"] != turn.task).nonzero().flatten()
        if len(past):
            draw = turn.notes.setdefault("reference", turn.visit.generator("reference"))
            pick = past[torch.randperm(len(past), generator=draw)[: self.params.reference]]
            with turn.log.clock("agem"):
                found = correction(self.work.model.gradients, [self.slope(turn, pick)])
            take(self, turn, found, "agem")

    def slope(self, turn: Turn, places: Tensor) -> Tensor:
        """The gradient on remembered pictures as they are stored; the live one stays.  # [P]

        In evaluation mode: the past must not move batch normalisation's statistics.
        """
        kept, module = turn.state["memory"], self.work.model.module.eval()
        pictures = self.work.normalise(kept["pictures"][places])
        loss = F.cross_entropy(module(pictures), kept["labels"][places].to(self.work.device))
        return flatten(torch.autograd.grad(loss, list(module.parameters())))


def take(method: Method, turn: Turn, found: Correction, name: str) -> None:
    """Correct the live gradient, and put the share of corrected steps into the record."""
    corrected = turn.notes.setdefault("corrected", [])
    corrected.append(found.added is not None)
    turn.log.numbers[f"{name} corrected"] = sum(corrected) / len(corrected)
    turn.log.events += [f"{name}: {trouble}, left as it was" for trouble in found.troubles]
    if found.added is not None:
        method.work.model.gradients.add_(found.added)
