"""Control: FedAvg whose clients keep some random pictures of each class and mix them in."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stamp_core.config import at_least
from stamp_core.methods import Method, ServerStep, State, Turn
from stamp_core.seeding import generator
from stamp_core.workspace import augment


@dataclass(frozen=True)
class Memory(ServerStep):
    """What is kept and how much of it is mixed in."""

    per_class: int = 20  # pictures kept of each class of each task
    ratio: float = 1.0  # remembered pictures in a batch, as a multiple of its new ones

    def __post_init__(self) -> None:
        """Refuse negative memories."""
        super().__post_init__()
        at_least(self, 0, "per_class", "ratio")


class Replay(Method):
    """Experience replay on every client (Chaudhry et al., 2019: "tiny episodic memories")."""

    Params: ClassVar = Memory
    neutral: ClassVar[dict[str, Any]] = {"per_class": 0}

    def new_client(self, client: int, server: State) -> State:
        """An empty memory."""
        images = self.work.images
        return {
            "pictures": images.x_train[:0].clone(),  # uint8 [M, C, H, W]
            "labels": images.y_train[:0].clone(),  # [M]
            "tasks": images.y_train[:0].clone(),  # [M]: where each came from
        }

    def batches(self, turn: Turn) -> Iterator[tuple[Tensor, Tensor]]:
        """Each batch of the task with remembered pictures of earlier tasks behind it."""
        memory = turn.state
        past = (memory["tasks"] != turn.task).nonzero().flatten()
        draw = turn.visit.generator("replay")
        for pictures, labels in super().batches(turn):
            count = min(len(past), round(self.params.ratio * len(labels)))
            if count:
                pick = past[torch.randperm(len(past), generator=draw)[:count]]
                changed = augment(memory["pictures"][pick], self.work.setting.training, draw)
                old = self.work.normalise(changed)
                pictures = torch.cat([pictures, old])
                labels = torch.cat([labels, memory["labels"][pick].to(labels.device)])
            yield pictures, labels

    def remember(self, turn: Turn) -> State:
        """The memory with random pictures of this task, chosen on its first visit."""
        state = super().remember(turn)
        if self.params.per_class == 0 or turn.task in state["tasks"]:
            return state
        keep = self.choose(turn)
        images = self.work.images
        return {
            **state,
            "pictures": torch.cat([state["pictures"], images.x_train[keep]]),
            "labels": torch.cat([state["labels"], images.y_train[keep]]),
            "tasks": torch.cat([state["tasks"], torch.full_like(keep, turn.task)]),
        }

    def choose(self, turn: Turn) -> Tensor:
        """At most `per_class` random training pictures of each class of the task."""
        draw = generator(turn.visit.seed, turn.visit.client, turn.task, "memory")
        shuffled = turn.indices[torch.randperm(len(turn.indices), generator=draw)]
        labels = self.work.images.y_train[shuffled]
        kept = [shuffled[labels == label][: self.params.per_class] for label in labels.unique()]
        return torch.cat(kept) if kept else turn.indices
