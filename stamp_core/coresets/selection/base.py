"""The interface of selection rules, which decide which exemplars of a class are kept.

A rule is a file that defines `choose(candidates)` or `propose(task)`, and, if it has parameters, a
frozen dataclass `Options`: docs/selection_rule.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stamp_core.config.decode import build, unknown_name
from stamp_core.core.plugins import SELECTION, find_modules, load_module, more_elsewhere
from stamp_core.coresets.learner import Learner


@dataclass(frozen=True)
class NoOptions:
    """The options of a rule without parameters."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Images of one class, of which `choose` returns `count` distinct indices, the first first."""

    images: Tensor  # uint8 [N, C, H, W]
    features: Tensor  # float32 [N, D], of the current encoder in evaluation mode
    prototype: Tensor  # float64 [D], running mean p of the class's features, old and new
    exemplar_mean: Tensor  # float64 [D], of exemplars kept in addition to these; 0 if none
    exemplars_per_class: int
    generator: torch.Generator

    @property
    def count(self) -> int:
        """How many images to choose: `exemplars_per_class`, or all if there are fewer."""
        return min(self.exemplars_per_class, len(self.features))


@dataclass(frozen=True, eq=False)
class Proposal:
    """The output of `propose`: exemplars, of which the first of each class are kept."""

    images: Tensor  # uint8 [n, C, H, W]
    labels: Tensor  # int64 [n]
    soft: Tensor  # float32 [n, classes] logits of a teacher, or [n, 0]


@dataclass(frozen=True, eq=False)
class TaskData:
    """A client's data of one task, sorted by content, and a network that `propose` may train."""

    images: Tensor  # uint8 [N, C, H, W]
    labels: Tensor  # int64 [N]
    past: tuple[Tensor, Tensor]  # images and labels of the exemplars of other tasks
    exemplars_per_class: int
    options: Any  # the rule's Options
    learner: Learner  # with the client's weights after training
    generator: torch.Generator
    events: list[str] = field(default_factory=list)  # append warnings for the run's record

    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.learner.inputs(self.images, self.labels)

    def proposal(self, order: Tensor) -> Proposal:
        """The task's images in the order of some indices, with hard labels."""
        order = order.cpu()
        return hard_label_proposal(self.images[order], self.labels[order])


def hard_label_proposal(images: Tensor, labels: Tensor) -> Proposal:
    """A proposal without soft labels."""
    return Proposal(images, labels, torch.empty(len(labels), 0))


def selection_rules() -> list[str]:
    """The names of all rules: the files of SELECTION."""
    return sorted(find_modules(SELECTION))


def rule_options(rule: str, values: Mapping[str, Any]) -> Any:
    """The checked options of a rule."""
    return build(getattr(load_rule(rule), "Options", NoOptions), values, "options")


def proposes(rule: str) -> bool:
    """Whether a rule selects from whole tasks, with `propose`."""
    return hasattr(load_rule(rule), "propose")


def needs_features(rule: str) -> bool:
    """Whether features have to be computed for a rule."""
    return not proposes(rule) and rule != "uniform"


def choose_exemplars(rule: str, candidates: Candidates) -> Tensor:
    """Indices of the candidates that a rule chooses, of its own proposal the first.  # [count]"""
    if proposes(rule):
        return torch.arange(candidates.count)
    indices: Tensor = load_rule(rule).choose(candidates)
    return indices


def propose_exemplars(rule: str, task: TaskData) -> Proposal:
    """What a rule proposes for a task, independent of the order of the task's images."""
    order = _content_order(task.images, task.labels)
    ordered = replace(task, images=task.images[order], labels=task.labels[order])
    proposal: Proposal = load_rule(rule).propose(ordered)
    return proposal


@cache
def load_rule(rule: str) -> ModuleType:
    """The module of a rule."""
    if rule not in selection_rules():
        raise unknown_name("selection", rule, selection_rules(), more_elsewhere())
    return load_module(SELECTION, rule)


def _content_order(images: Tensor, labels: Tensor) -> Tensor:
    """Indices that sort images by class, then by their pixels as bytes.  # [N]"""
    pixels = np.ascontiguousarray(images.flatten(1).numpy())
    as_bytes = pixels.view(np.dtype((np.void, pixels.shape[1]))).ravel()
    by_pixels = torch.from_numpy(as_bytes.argsort(kind="stable"))
    return by_pixels[labels[by_pixels].argsort(stable=True)]
