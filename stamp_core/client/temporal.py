"""Temporal matching: gradients of past tasks, matched with the update of a client round."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.by_class import class_means, sample_balanced
from stamp_core.client.workspace import RoundId, Workspace
from stamp_core.config.decode import invalid, require_above, require_at_least
from stamp_core.matching.gram import Sketch, gram
from stamp_core.matching.match import MatchingParams, MatchResult, match, match_gram


@dataclass(frozen=True)
class TemporalParams(MatchingParams):
    """How gradients represent past tasks; the last (current) one is the client round's update."""

    past: Literal["trajectory", "gradient", "unmoved"] = "trajectory"
    start: Literal["trained", "received"] = "trained"  # the model from which past tasks train
    source: Literal["memory", "prototypes", "mean images", "all data"] = "memory"
    lr: float = 1.0  # received - lr * d
    alone: bool = False  # also match in the first experience, with the own update alone
    tasks: int = 50  # past tasks in one match; of more, a random sample
    images: int = 256  # images of a task per gradient; of more, a random sample
    sketch: bool = False  # match random projections: one gradient at a time in memory

    def __post_init__(self) -> None:
        """Refuse combinations that cannot be matched."""
        super().__post_init__()
        require_above(self, 0, "lr")
        require_at_least(self, 1, "tasks", "images")
        if self.reference == "weighted":
            raise invalid("reference", self.reference, "'mean', 'current' or 'half' in time")
        if self.source in ("prototypes", "mean images") and self.past == "trajectory":
            raise invalid("source", self.source, "'memory' or 'all data', as past is 'trajectory'")
        if self.sketch and self.blocks != "model":
            raise invalid("blocks", self.blocks, "'model', as sketch is true")


StoredImages = tuple[Tensor, Tensor, Tensor]  # images, labels, and the indices of those of one task
StepContext = Callable[[Tensor], AbstractContextManager[None]]  # of an SGD step on these labels


class TemporalMatcher:
    """Matches the update in the live model with gradients of past tasks.

    `stored` gives the images of a task, `context` the context manager of SGD steps on them.
    """

    def __init__(
        self,
        work: Workspace,
        round_id: RoundId,
        params: TemporalParams,
        received: Tensor,
        stored: Callable[[int], StoredImages],
        context: Callable[[int], StepContext],
    ) -> None:
        self.work, self.round_id, self.params = work, round_id, params
        self.received, self.stored, self.context = received, stored, context
        self.trained, self.buffers = work.model.parameters.clone(), work.model.buffers.clone()
        self.current = received - self.trained  # [P], old - new: an ascent direction

    def match(self, tasks: list[int], sgd_steps: int) -> MatchResult:
        """Replace the update of `sgd_steps` steps by the matched one; returns the result."""
        path = sgd_steps * self.work.training.lr  # scales a gradient to such an update
        past = [partial(self.past_gradient, task, path) for task in tasks]
        if self.params.sketch:
            direction, result = self._match_sketches(past)
        else:
            sizes = self.work.layers() if self.params.blocks != "model" else None
            gradients = [*(form() for form in past), self.current]
            direction, result = match(gradients, self.params, sizes=sizes)
        self.work.model.load(self.received - self.params.lr * direction, self.buffers)
        return result

    def _match_sketches(self, past: Sequence[Callable[[], Tensor]]) -> tuple[Tensor, MatchResult]:
        """The match from sketches: each gradient is computed twice, and only one is stored."""
        sketch = Sketch(len(self.current), self.round_id.seed)
        sketches = [sketch(form()) for form in past] + [sketch(self.current)]
        result = match_gram(gram(sketches), self.params)
        *coefficients, own = result.coefficients[0].tolist()
        direction = own * self.current
        for form, coefficient in zip(past, coefficients, strict=True):
            if coefficient:
                direction.add_(form(), alpha=coefficient)
        return direction, result

    def past_gradient(self, task: int, path: float) -> Tensor:
        """What represents a past task in the match.  # [P]

        Minus the update by local epochs on its images, or `path` times the gradient on them.
        """
        if self.params.past == "unmoved":  # with coresets, the public code never trains its copies
            return self.current
        start = self.trained if self.params.start == "trained" else self.received
        self.work.model.load(start, self.buffers)
        if self.params.past == "gradient":
            return self.gradient(task) * path
        epochs = self.work.epochs(self.round_id, *self.stored(task), of=f" of task {task}")
        self.work.fit(epochs, self.context(task))
        return self.received - self.work.model.parameters

    def gradient(self, task: int) -> Tensor:
        """The gradient on the stored images of a task, in evaluation mode.  # [P]"""
        images, labels, indices = self.stored(task)
        generator = self.round_id.generator(f"pictures of task {task}")
        indices = indices[sample_balanced(labels[indices].cpu(), self.params.images, generator)]
        model = self.work.model
        model.module.eval()
        model.gradients.zero_()
        normalised = self.work.normalise(images[indices])
        self.loss(normalised, labels[indices].to(self.work.device)).backward()
        return model.gradients.clone()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy on the images, or on their class means in pixels or in features."""
        classifier = self.work.classifier
        if self.params.source == "prototypes":  # the encoder gets no gradient
            means, classes = class_means(classifier.encode(images).detach(), labels)
            return F.cross_entropy(classifier.head(means), classes)
        if self.params.source == "mean images":
            images, labels = class_means(images, labels)
        return F.cross_entropy(classifier(images), labels)


def sample_tasks(tasks: list[int], count: int, round_id: RoundId) -> list[int]:
    """At most `count` of the tasks at random, ascending."""
    places = torch.randperm(len(tasks), generator=round_id.generator("past tasks"))[:count]
    return sorted(tasks[place] for place in places.tolist())
