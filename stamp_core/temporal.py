"""Temporal matching: past tasks as directions, matched with the way a client has just gone."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import above, at_least, wrong
from stamp_core.matching import Matched, Matching, match, solve
from stamp_core.rows import Sketch, gram
from stamp_core.vectors import Descent
from stamp_core.workspace import Visit, Workspace


@dataclass(frozen=True)
class Temporal(Matching):
    """How the past becomes rows; the last row is the way gone in this visit."""

    past: Literal["trajectory", "gradient", "unmoved"] = "trajectory"
    start: Literal["trained", "received"] = "trained"  # the model at which the past is looked at
    source: Literal["memory", "prototypes", "mean pictures", "all data"] = "memory"
    step: float = 1.0  # how far the client goes along the matched direction
    alone: bool = False  # match on the first task as well, where there is nothing to match with
    tasks: int = 50  # past tasks in one match; of more, so many are drawn at random
    pictures: int = 256  # of a task behind one gradient; of more, so many are drawn
    rows: Literal["held", "sketched"] = "held"  # sketched: never two rows in memory

    def __post_init__(self) -> None:
        """Refuse what cannot be matched."""
        super().__post_init__()
        above(self, 0, "step")
        at_least(self, 1, "tasks", "pictures")
        if self.reference == "weighted":
            raise wrong("reference", self.reference, "'mean', 'current' or 'half' in time")
        if self.source in ("prototypes", "mean pictures") and self.past == "trajectory":
            raise wrong("source", self.source, "'memory' or 'all data', as past is 'trajectory'")
        if self.rows == "sketched" and self.blocks != "model":
            raise wrong("blocks", self.blocks, "'model', as rows are sketched")


Stored = tuple[Tensor, Tensor, Tensor]  # pictures, labels and which of them are a task's
Mixing = Callable[[Tensor], AbstractContextManager[None]]  # what a step on these labels is within


class Past:
    """A client's past tasks as directions, from the model as a visit's training has left it."""

    def __init__(
        self,
        work: Workspace,
        visit: Visit,
        temporal: Temporal,
        received: Tensor,
        stored: Callable[[int], Stored],
        mixing: Callable[[int], Mixing] = lambda task: lambda labels: nullcontext(),
    ) -> None:
        self.work, self.visit, self.temporal = work, visit, temporal
        self.received, self.stored, self.mixing = received, stored, mixing
        self.trained, self.buffers = work.model.parameters.clone(), work.model.buffers.clone()
        self.current = received - self.trained  # [P], downhill as a gradient

    def match(self, tasks: list[int], steps: int) -> Matched:
        """Replace the way gone in `steps` steps by the matched one; what matching found."""
        length = steps * self.work.setting.training.rate  # what a gradient comes to in such a way
        rows = [partial(self.row, task, length) for task in tasks]
        if self.temporal.rows == "sketched":
            direction, found = self.streamed(rows)
        else:
            held = [row() for row in rows]
            sizes = self.work.layers() if self.temporal.blocks != "model" else None
            direction, found = match([*held, self.current], self.temporal, sizes=sizes)
        self.work.model.load(self.received - self.temporal.step * direction, self.buffers)
        return found

    def streamed(self, rows: Sequence[Callable[[], Tensor]]) -> tuple[Tensor, Matched]:
        """The match from sketches of the rows: each row is formed twice, one at a time."""
        sketch = Sketch(len(self.current), self.visit.seed)
        sketches = [sketch(row()) for row in rows] + [sketch(self.current)]
        found = solve(gram(sketches), self.temporal)
        *shares, own = found.coefficients[0].tolist()
        direction = own * self.current
        for row, share in zip(rows, shares, strict=True):
            if share:
                direction.add_(row(), alpha=share)
        return direction, found

    def row(self, task: int, length: float) -> Tensor:
        """Where a past task points from here: a downhill direction.  # [P]"""
        if self.temporal.past == "unmoved":  # the public code with coresets: its copies stay put
            return self.current
        start = self.trained if self.temporal.start == "trained" else self.received
        self.work.model.load(start, self.buffers)
        if self.temporal.past == "gradient":
            return self.gradient(task) * length
        self.descend(task)
        return self.received - self.work.model.parameters

    def gradient(self, task: int) -> Tensor:
        """The gradient on what is stored of a task, in evaluation mode.  # [P]"""
        pictures, labels, chosen = self.stored(task)
        draw = self.visit.generator(f"pictures of task {task}")
        chosen = chosen[balanced(labels[chosen].cpu(), self.temporal.pictures, draw)]
        model = self.work.model
        model.module.eval()
        model.gradients.zero_()
        normal, known = self.work.normalise(pictures[chosen]), labels[chosen].to(self.work.device)
        self.loss(normal, known).backward()
        return model.gradients.clone()

    def loss(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy on the pictures, or on their class means in pixels or in features."""
        module = self.work.classifier
        if self.temporal.source == "prototypes":  # the encoder gets no gradient
            means, classes = class_means(module.encode(pictures).detach(), labels)
            return F.cross_entropy(module.head(means), classes)
        if self.temporal.source == "mean pictures":
            pictures, labels = class_means(pictures, labels)
        return F.cross_entropy(module(pictures), labels)

    def descend(self, task: int) -> None:
        """SGD on what is stored of a task, for as many epochs as a visit has."""
        work, (stored, known, chosen) = self.work, self.stored(task)
        descent, mixing = Descent(work.model, work.setting.training), self.mixing(task)
        for pictures, labels in work.epochs(self.visit, stored, known, chosen, f" of task {task}"):
            work.train_mode(len(labels))
            work.model.gradients.zero_()
            with mixing(labels):
                F.cross_entropy(work.model.module(pictures), labels).backward()
            descent.step()


def balanced(labels: Tensor, most: int, draw: torch.Generator) -> Tensor:
    """The places of at most so many labels: all, or as many of each class as there are.  # [n]

    Every class gives one picture, then every class that has another gives a second one.
    """
    if len(labels) <= most:
        return torch.arange(len(labels))
    mixed = torch.randperm(len(labels), generator=draw)
    by_class = mixed[labels[mixed].argsort(stable=True)]  # mixed inside each class
    sizes = labels.unique(return_counts=True)[1]
    nth = torch.empty_like(mixed)  # of its class, in the mixed order
    nth[by_class] = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    found: Tensor = mixed[nth[mixed].argsort(stable=True)[:most]]
    return found


def class_means(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each class and the classes, rising.  # [L, ...], [L]"""
    classes, own = labels.unique(return_inverse=True)
    members = F.one_hot(own).to(values.dtype).T  # [L, N]
    means = (members / members.sum(1, keepdim=True)) @ values.flatten(1)
    return means.view(-1, *values.shape[1:]), classes


def drawn(tasks: list[int], most: int, visit: Visit) -> list[int]:
    """The tasks, or `most` of them at random, rising."""
    places = torch.randperm(len(tasks), generator=visit.generator("past tasks"))[:most]
    return sorted(tasks[place] for place in places.tolist())
