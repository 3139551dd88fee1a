"""Temporal matching: gradients of past tasks, matched with the update of the current one.

`every` says when: once a round, after local training (null); after so many SGD steps; or, with 1,
inside every step, where the gradients are those of a batch's new images and of its exemplars, task
by task.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.by_class import sample_balanced
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.decode import invalid
from stamp_core.config.limits import Positive, PositiveInt
from stamp_core.matching.gram import combine, gram
from stamp_core.matching.match import MatchingParams, MatchResult, match


@dataclass(frozen=True)
class TemporalParams(MatchingParams):
    """When past tasks are matched and how gradients represent them; the last one is current."""

    # SGD steps; null: once a round, after them; 1: inside each step
    every: PositiveInt | None = None
    # what represents a past task: an update by local epochs, one gradient, a model never trained
    past: Literal["trajectory", "gradient", "unmoved"] = "trajectory"
    source: Literal["memory", "all data"] = "memory"  # images of past tasks
    lr: Positive = 1.0  # received - lr * d
    alone: bool = False  # also match in the first experience, with the own update alone
    tasks: PositiveInt = 50  # past tasks in one match; of more, a random sample
    images: PositiveInt = 256  # images of a task per gradient; of more, a random sample

    def __post_init__(self) -> None:
        if self.every is None:
            return
        if self.past != "gradient":
            right = "'gradient', as every is set: the others need local epochs of their own"
            raise invalid("past", self.past, right)
        if self.every == 1 and self.source != "memory":
            raise invalid("source", self.source, "'memory', as every is 1: a batch has exemplars")

    @property
    def in_steps(self) -> bool:
        return self.every == 1


@dataclass(frozen=True, eq=False)
class PastTask:
    """The stored images of a past task: images[indices] with labels[indices]."""

    images: Tensor
    labels: Tensor
    indices: Tensor
    draw: torch.Generator  # of the images of each gradient


# --- between steps


def segments(batches: Iterable[Batch], every: int | None) -> Iterator[Iterable[Batch]]:
    """The batches between two matches: all of them, or as many as `every` says, the last fewer."""
    if every is None:
        yield batches
        return
    remaining = iter(batches)
    while segment := list(islice(remaining, every)):
        yield segment


@dataclass(frozen=True, eq=False)
class Update:
    """What SGD steps have done to the live model."""

    start: Tensor  # [P], before them
    images: list[int]  # new ones of each step


def match_past_tasks(
    runtime: ClientRuntime,
    round_id: RoundId,
    params: TemporalParams,
    update: Update,
    tasks: Mapping[int, PastTask],
) -> MatchResult:
    """Move the live model from the start of an update along its match with past tasks."""
    model = runtime.model
    trained = model.parameters.clone()
    buffers = model.buffers.clone()
    current = update.start - trained  # [P], old - new: an ascent direction
    path = len(update.images) * runtime.lr  # scales a gradient to such an update
    gradients = []
    for task, stored in tasks.items():
        model.load(trained, buffers)
        if params.past == "unmoved":  # with coresets, the public code never trains its copies
            gradients.append(current)
        elif params.past == "gradient":
            gradients.append(path * task_gradient(runtime, stored, params.images))
        else:
            gradients.append(update.start - trained_on(runtime, round_id, task, stored))
    images = [min(len(stored.indices), params.images) for stored in tasks.values()]
    weights = torch.tensor([*images, sum(update.images)])
    sizes = runtime.layers() if params.blocks == "layers" else None
    direction, result = match([*gradients, current], params, weights, sizes)
    model.load(update.start - params.lr * direction, buffers)
    return result


def trained_on(runtime: ClientRuntime, round_id: RoundId, task: int, stored: PastTask) -> Tensor:
    """The live parameters after the local epochs on a past task, which are the live ones.  # [P]"""
    images, labels, indices = stored.images, stored.labels, stored.indices
    runtime.fit(runtime.epochs(round_id, images, labels, indices, of=f" of task {task}"))
    return runtime.model.parameters


def task_gradient(runtime: ClientRuntime, stored: PastTask, most: int) -> Tensor:
    """The gradient on at most so many images of a past task, in evaluation mode.  # [P]"""
    labels = stored.labels[stored.indices].cpu()
    indices = stored.indices[sample_balanced(labels, most, stored.draw)]
    images = stored.images[indices]
    runtime.model.module.eval()
    runtime.model.gradients.zero_()
    targets = runtime.targets(images, stored.labels[indices]).to(runtime.device)
    logits = runtime.classifier(runtime.normalise(images))
    F.cross_entropy(logits, targets).backward()
    return runtime.model.gradients.clone()


def sample_tasks(tasks: list[int], count: int, round_id: RoundId) -> list[int]:
    """At most `count` of the tasks at random, ascending."""
    order = torch.randperm(len(tasks), generator=round_id.generator("past tasks"))[:count]
    return sorted(tasks[index] for index in order.tolist())


# --- inside a step


def batch_groups(batch: Batch) -> list[Tensor]:
    """Indices of the exemplars of each task in a batch, and at last those of its new images."""
    assert batch.tasks is not None
    new = torch.arange(batch.new, device=batch.tasks.device)
    groups = [(batch.tasks == task).nonzero().flatten() for task in batch.tasks.unique()]
    return [*(group + batch.new for group in groups), new]


@dataclass(frozen=True, eq=False)
class SeparateGradients:
    """The mean loss of each of K groups of images, and its gradient by a pass of its own."""

    losses: Tensor  # [K]
    vectors: list[Tensor]  # K of [P]
    sizes: list[int] | None  # of the blocks that are matched separately

    def gram(self) -> Tensor:
        return gram(self.vectors, self.sizes)

    def weighted(self, coefficients: Tensor) -> Tensor:
        return combine(self.vectors, coefficients, self.sizes)
