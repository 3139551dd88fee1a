"""Temporal matching: gradients of past tasks, matched with the update of a client round."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.by_class import sample_balanced
from stamp_core.client.runtime import ClientRuntime, RoundId
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


@dataclass(frozen=True, eq=False)
class PastTask:
    """The stored images of a past task: images[indices] with labels[indices]."""

    images: Tensor
    labels: Tensor
    indices: Tensor


def match_update(
    runtime: ClientRuntime,
    round_id: RoundId,
    params: TemporalParams,
    received: Tensor,
    tasks: Mapping[int, PastTask],
    sgd_steps: int,
) -> MatchResult:
    """Match the live model's update of so many SGD steps with gradients of past tasks.

    The live model moves from `received` along the matched update.
    """
    model = runtime.model
    trained = model.parameters.clone()
    buffers = model.buffers.clone()
    current = received - trained  # [P], old - new: an ascent direction
    path = sgd_steps * runtime.training.lr  # scales a gradient to such an update
    gradients = []
    for task, stored in tasks.items():
        model.load(trained, buffers)
        if params.past == "unmoved":  # with coresets, the public code never trains its copies
            gradients.append(current)
        elif params.past == "gradient":
            gradients.append(path * task_gradient(runtime, round_id, task, stored, params.images))
        else:
            gradients.append(received - trained_on(runtime, round_id, task, stored))
    sizes = runtime.layers() if params.blocks == "layers" else None
    direction, result = match([*gradients, current], params, sizes=sizes)
    model.load(received - params.lr * direction, buffers)
    return result


def trained_on(runtime: ClientRuntime, round_id: RoundId, task: int, stored: PastTask) -> Tensor:
    """The live parameters after the local epochs on a past task, which are the live ones.  # [P]"""
    images, labels, indices = stored.images, stored.labels, stored.indices
    runtime.fit(runtime.epochs(round_id, images, labels, indices, of=f" of task {task}"))
    return runtime.model.parameters


def task_gradient(
    runtime: ClientRuntime, round_id: RoundId, task: int, stored: PastTask, most: int
) -> Tensor:
    """The live model's gradient on at most so many images of a past task.  # [P]

    In evaluation mode.
    """
    draw = round_id.generator(f"pictures of task {task}")
    labels = stored.labels[stored.indices].cpu()
    indices = stored.indices[sample_balanced(labels, most, draw)]
    images = stored.images[indices]
    runtime.model.module.eval()
    runtime.model.gradients.zero_()
    targets = runtime.targets(images, stored.labels[indices]).to(runtime.device)
    logits = runtime.classifier(runtime.normalise(images))
    F.cross_entropy(logits, targets).backward()
    return runtime.model.gradients.clone()


def sample_tasks(tasks: list[int], count: int, round_id: RoundId) -> list[int]:
    """At most `count` of the tasks at random, ascending."""
    places = torch.randperm(len(tasks), generator=round_id.generator("past tasks"))[:count]
    return sorted(tasks[place] for place in places.tolist())
