"""Control: FedAvg whose clients keep some pictures of each class and mix them in."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from stamp_core.config import at_least
from stamp_core.coresets import BLIND, memory
from stamp_core.coresets.memory import Keep, Memory
from stamp_core.methods import Group, Method, ServerStep, State, Turn
from stamp_core.seeding import generator
from stamp_core.workspace import augment


@dataclass(frozen=True)
class Rehearsal(ServerStep):
    """What is kept and how much of it is mixed in."""

    memory: Keep = field(default_factory=lambda: Keep(rule="uniform", space="off"))
    ratio: float = 1.0  # remembered pictures in a batch, as a multiple of its new ones

    def __post_init__(self) -> None:
        """Refuse negative shares."""
        super().__post_init__()
        at_least(self, 0, "ratio")


class Replay(Method):
    """Experience replay on every client (Chaudhry et al., 2019: "tiny episodic memories")."""

    Params: ClassVar = Rehearsal
    neutral: ClassVar[dict[str, Any]] = {"memory": {"per_class": 0}}
    group: ClassVar[Group] = "control"

    def new_client(self, client: int, server: State) -> State:
        """An empty memory."""
        return {"memory": memory.empty(self.work.images.x_train, self.work.classes), "step": -1}

    def batches(self, turn: Turn) -> Iterator[tuple[Tensor, Tensor]]:
        """Each batch of the task with remembered pictures of other tasks behind it."""
        kept = turn.state["memory"]
        past = (kept["tasks"] != turn.task).nonzero().flatten()
        draw = turn.visit.generator("replay")
        for pictures, labels in super().batches(turn):
            count = min(len(past), round(self.params.ratio * len(labels)))
            if count:
                pick = past[torch.randperm(len(past), generator=draw)[:count]]
                changed = augment(kept["pictures"][pick], self.work.setting.training, draw)
                old = self.work.normalise(changed)
                pictures = torch.cat([pictures, old])
                labels = torch.cat([labels, kept["labels"][pick].to(labels.device)])
            yield pictures, labels

    def remember(self, turn: Turn) -> State:
        """The memory with this task: taken up on the first visit, so that a client that is not
        asked again has it, and chosen anew in the last round, when the encoder has learnt it."""
        state = super().remember(turn)
        first = state["step"] != turn.visit.step
        if self.params.memory.per_class == 0 or not (first or turn.visit.last):
            return state
        with turn.log.clock("coreset"):
            return {**state, "memory": self.chosen(turn, first), "step": turn.visit.step}

    def chosen(self, turn: Turn, first: bool) -> Memory:
        """The memory after the task's classes, each taken up or, if `first` is past, anew."""
        kept: Memory = turn.state["memory"]
        labels = self.work.images.y_train[turn.indices]
        for label in labels.unique().tolist():
            own = turn.indices[labels == label]
            again = int(kept["seen"][label]) > (0 if first else len(own))
            if first and again:
                turn.log.events.append("memory: a class was met again")
            if first:
                kept = self.take_up(kept, label, own, turn)
            elif not again:  # one met before was merged once: its older pictures are gone
                kept = self.take_up(without(kept, label), label, own, turn)
        return kept

    def take_up(self, kept: Memory, label: int, own: Tensor, turn: Turn) -> Memory:
        """The memory after a class of the task, of which the client has the pictures `own`."""
        visit = turn.visit
        pictures = self.work.images.x_train[own]
        draw = generator(visit.seed, visit.client, visit.step, f"memory of class {label}")
        old = self.features(kept["pictures"][kept["labels"] == label])
        features, keep = self.features(pictures), self.params.memory
        return memory.update(kept, label, turn.task, pictures, features, old, keep, draw)

    def features(self, pictures: Tensor) -> Tensor:
        """What the encoder makes of pictures, in evaluation mode, if the rule looks.  # [N, D]"""
        if self.params.memory.rule in BLIND:
            return torch.zeros(len(pictures), 0)
        return self.work.outputs(pictures.to(self.work.device), self.work.classifier.encoder)


def without(kept: Memory, label: int) -> Memory:
    """The memory as if a class had never been met."""
    others = kept["labels"] != label
    seen = kept["seen"].clone()
    seen[label] = 0
    return {**{name: kept[name][others] for name in ("pictures", "labels", "tasks")}, "seen": seen}
