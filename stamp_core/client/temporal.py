"""Temporal matching: gradients of past tasks, matched with the update of a client round."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.by_class import sample_balanced
from stamp_core.client.workspace import RoundId, Workspace
from stamp_core.config.decode import invalid, require_above, require_at_least
from stamp_core.matching.match import MatchingParams, MatchResult, match


@dataclass(frozen=True)
class TemporalParams(MatchingParams):
    """How gradients represent past tasks; the last (current) one is the client round's update."""

    past: Literal["trajectory", "gradient", "unmoved"] = "trajectory"
    source: Literal["memory", "all data"] = "memory"
    lr: float = 1.0  # received - lr * d
    alone: bool = False  # also match in the first experience, with the own update alone
    tasks: int = 50  # past tasks in one match; of more, a random sample
    images: int = 256  # images of a task per gradient; of more, a random sample

    def __post_init__(self) -> None:
        """Refuse what cannot be matched."""
        super().__post_init__()
        require_above(self, 0, "lr")
        require_at_least(self, 1, "tasks", "images")
        if self.reference == "weighted":
            raise invalid("reference", self.reference, "'mean' or 'current' in time")


StoredImages = tuple[Tensor, Tensor, Tensor]  # images, labels, and the indices of those of one task


class TemporalMatcher:
    """Matches the update in the live model with gradients of past tasks.

    `stored` gives the images of a task.
    """

    def __init__(
        self,
        work: Workspace,
        round_id: RoundId,
        params: TemporalParams,
        received: Tensor,
        stored: Callable[[int], StoredImages],
    ) -> None:
        self.work, self.round_id, self.params = work, round_id, params
        self.received, self.stored = received, stored
        self.trained, self.buffers = work.model.parameters.clone(), work.model.buffers.clone()
        self.current = received - self.trained  # [P], old - new: an ascent direction

    def match(self, tasks: list[int], sgd_steps: int) -> MatchResult:
        """Replace the update of `sgd_steps` steps by the matched one; returns the result."""
        path = sgd_steps * self.work.training.lr  # scales a gradient to such an update
        gradients = [*(self.past_gradient(task, path) for task in tasks), self.current]
        sizes = self.work.layers() if self.params.blocks == "layers" else None
        direction, result = match(gradients, self.params, sizes=sizes)
        self.work.model.load(self.received - self.params.lr * direction, self.buffers)
        return result

    def past_gradient(self, task: int, path: float) -> Tensor:
        """What represents a past task in the match, formed at the trained model.  # [P]

        Minus the update by local epochs on its images, or `path` times the gradient on them.
        """
        if self.params.past == "unmoved":  # with coresets, the public code never trains its copies
            return self.current
        self.work.model.load(self.trained, self.buffers)
        if self.params.past == "gradient":
            return self.gradient(task) * path
        self.work.fit(self.work.epochs(self.round_id, *self.stored(task), of=f" of task {task}"))
        return self.received - self.work.model.parameters

    def gradient(self, task: int) -> Tensor:
        """The gradient on the stored images of a task, in evaluation mode.  # [P]"""
        images, labels, indices = self.stored(task)
        generator = self.round_id.generator(f"pictures of task {task}")
        indices = indices[sample_balanced(labels[indices].cpu(), self.params.images, generator)]
        model = self.work.model
        model.module.eval()
        model.gradients.zero_()
        targets = self.work.targets(images[indices], labels[indices]).to(self.work.device)
        logits = self.work.classifier(self.work.normalise(images[indices]))
        F.cross_entropy(logits, targets).backward()
        return model.gradients.clone()


def sample_tasks(tasks: list[int], count: int, round_id: RoundId) -> list[int]:
    """At most `count` of the tasks at random, ascending."""
    places = torch.randperm(len(tasks), generator=round_id.generator("past tasks"))[:count]
    return sorted(tasks[place] for place in places.tolist())
