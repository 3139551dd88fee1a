"""What to remember of a class. A rule is a file in this folder; memory and MixStyle go with it."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stamp_core.config import unknown

COMPANIONS = {"memory", "mixstyle"}  # files of this folder that are no rules
BLIND = {"uniform"}  # rules that look at no features: none need be computed


@dataclass(frozen=True, eq=False)
class Candidates:
    """The pictures of one class among which a rule chooses."""

    pictures: Tensor  # uint8 [N, C, H, W]
    features: Tensor  # float32 [N, D], of the current encoder in evaluation mode
    prototype: Tensor  # float64 [D], the running mean p of all features of the class, old and new
    kept: Tensor  # float64 [D], mean feature of what stays remembered besides; zeros if nothing
    count: int
    draw: torch.Generator

    @property
    def places(self) -> int:
        """How many pictures a rule chooses: `count`, or all of them where there are fewer."""
        return min(self.count, len(self.features))


def rules() -> list[str]:
    """The rules there are: one per file of this folder."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - COMPANIONS)


def get(rule: str) -> Callable[[Candidates], Tensor]:
    """The function `choose` of the file `rule`: distinct indices in the order of choice."""
    if rule not in rules():
        raise unknown("rule", rule, rules())
    choose: Callable[[Candidates], Tensor] = importlib.import_module(f"{__name__}.{rule}").choose
    return choose


def prototype(features: Tensor, kept: Tensor, seen: int) -> Tensor:
    """The mean feature of `seen` earlier pictures, whose mean is `kept`, and the new ones.  # [D]

    Pictures with a feature that is no finite number are left out; of nothing, the mean is 0.
    """
    finite = features[comparable(features)].double()  # [n, D]
    return (seen * kept + finite.sum(0)) / max(seen + len(finite), 1)


def comparable(features: Tensor) -> Tensor:
    """Which pictures have finite features; rules that compare choose the others last.  # [N]"""
    return features.isfinite().all(1)


def distances(features: Tensor, point: Tensor, room: Tensor) -> Tensor:
    """Squared distances of features from a point; `room` [N, D] is overwritten.  # [N]

    A fresh difference for every picture chosen would take longer than all sums.
    """
    return torch.sub(features, point, out=room).square_().sum(1)


def largest(scores: Tensor, count: int) -> Tensor:
    """The places of the largest scores, ties to the lowest place.  # [count]

    Scores that agree to six decimals are a tie: what is left are errors of the solver.
    """
    return scores.round(decimals=6).argsort(descending=True, stable=True)[:count]
