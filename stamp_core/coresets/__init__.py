"""What to remember of a class. A rule is a file in this folder; memory and MixStyle go with it.

A file with `choose` looks at the features of one class and gives back indices; one with `propose`
looks at a whole task with a network of its own and gives back pictures, chosen or made.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stamp_core.config import build, unknown
from stamp_core.learner import Learner

COMPANIONS = {"memory", "mixstyle"}  # files of this folder that are no rules


@dataclass(frozen=True)
class NoOptions:
    """For rules without parameters."""


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


@dataclass(frozen=True, eq=False)
class Proposal:
    """Pictures to remember of a task: of each class those count that stand first."""

    pictures: Tensor  # uint8 [n, C, H, W]
    labels: Tensor  # int64 [n]
    soft: Tensor  # float32 [n, classes] logits of a teacher, or [n, 0]


@dataclass(frozen=True, eq=False)
class Task:
    """All that a client has of a task, for a rule that looks at more than features of a class."""

    pictures: Tensor  # uint8 [N, C, H, W]
    labels: Tensor  # int64 [N]
    past: tuple[Tensor, Tensor]  # pictures and labels remembered of other tasks
    per_class: int
    options: Any  # the rule's Options
    learner: Learner  # with the weights that training has left
    draw: torch.Generator
    events: list[str] = field(default_factory=list)  # out of the ordinary, for the run's record

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Pictures and labels as the learner takes them, on its device."""
        return as_inputs(self.learner, self.pictures, self.labels)

    def past_inputs(self) -> tuple[Tensor, Tensor]:
        """The remembered pictures of other tasks and their labels, likewise."""
        return as_inputs(self.learner, *self.past)

    def best(self, order: Tensor) -> Proposal:
        """The task's own pictures, the first of `order` first."""
        order = order.cpu()
        return as_they_are(self.pictures[order], self.labels[order])


def as_they_are(pictures: Tensor, labels: Tensor) -> Proposal:
    """Pictures with nothing but their labels."""
    return Proposal(pictures, labels, torch.empty(len(labels), 0))


def as_inputs(learner: Learner, pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures and labels as the learner takes them, on its device."""
    inputs = learner.normalise(pictures)
    return inputs, labels.to(inputs.device)


def rules() -> list[str]:
    """The rules there are: one per file of this folder."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - COMPANIONS)


def file(rule: str) -> ModuleType:
    """The module of a rule."""
    if rule not in rules():
        raise unknown("rule", rule, rules())
    return importlib.import_module(f"{__name__}.{rule}")


def options(rule: str, values: Mapping[str, Any]) -> Any:
    """The checked options of a rule: its file's `Options`, if it has any."""
    return build(getattr(file(rule), "Options", NoOptions), values, "options")


def get(rule: str) -> Callable[[Candidates], Tensor]:
    """The function `choose` of the file `rule`: distinct indices in the order of choice.

    Of what a rule has proposed itself the first are chosen.
    """
    choose: Callable[[Candidates], Tensor] = getattr(file(rule), "choose", first)
    return choose


def proposes(rule: str) -> bool:
    """Whether a rule looks at whole tasks."""
    return hasattr(file(rule), "propose")


def looks_at_features(rule: str) -> bool:
    """Whether features have to be computed for a rule."""
    return not proposes(rule) and rule != "uniform"


def propose(rule: str, task: Task) -> Proposal:
    """What a rule proposes to remember of a task, whatever the order of the task's pictures."""
    order = canonical(task.pictures, task.labels)
    sorted_task = replace(task, pictures=task.pictures[order], labels=task.labels[order])
    proposal: Proposal = file(rule).propose(sorted_task)
    return proposal


def canonical(pictures: Tensor, labels: Tensor) -> Tensor:
    """The order of pictures by their class and then by their values, whatever theirs was.  # [N]"""
    values = np.ascontiguousarray(pictures.flatten(1).numpy())
    whole = values.view(np.dtype((np.void, values.shape[1]))).ravel()  # compared byte by byte
    by_values = torch.from_numpy(whole.argsort(kind="stable"))
    return by_values[labels[by_values].argsort(stable=True)]


def first(candidates: Candidates) -> Tensor:
    """The pictures that stand first."""
    return torch.arange(candidates.places)


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
