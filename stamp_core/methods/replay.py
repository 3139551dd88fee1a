"""Control: FedAvg whose clients keep some pictures of each class and mix them in."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import above, at_least, wrong
from stamp_core.coresets import (
    Proposal,
    Task,
    as_they_are,
    looks_at_features,
    memory,
    propose,
    proposes,
)
from stamp_core.coresets.memory import Keep, Memory
from stamp_core.learner import Learner
from stamp_core.methods import Group, Method, ServerStep, State, Turn
from stamp_core.seeding import generator
from stamp_core.temporal import balanced
from stamp_core.workspace import augment, first_of_each


@dataclass(frozen=True)
class Rehearsal(ServerStep):
    """What is kept, and how and how much of it is mixed in."""

    memory: Keep = field(default_factory=lambda: Keep(rule="uniform", space="off"))
    ratio: float = 1.0  # remembered pictures in a batch, as a multiple of its new ones
    balanced: bool = False  # of each class as many, instead of pictures at random
    # Of the remembered pictures' mean loss, that of the new ones has 1; null: one mean over both.
    weight: float | None = None
    temperature: float = 1.0  # at which soft labels are compared with answers

    def __post_init__(self) -> None:
        """Refuse negative shares, and soft labels that nothing would look at."""
        super().__post_init__()
        at_least(self, 0, "ratio")
        above(self, 0, "temperature")
        if self.weight is not None:
            at_least(self, 0, "weight")
        if self.weight is None and self.ratio and self.memory.soft:
            raise wrong("weight", None, f"a number: {self.memory.rule} makes soft labels")


class Replay(Method):
    """Experience replay on every client (Chaudhry et al., 2019: "tiny episodic memories")."""

    Params: ClassVar = Rehearsal
    neutral: ClassVar[dict[str, Any]] = {"memory": {"per_class": 0}}
    group: ClassVar[Group] = "control"

    def new_client(self, client: int, server: State) -> State:
        """An empty memory."""
        soft = self.params.memory.soft
        kept = memory.empty(self.work.images.x_train, self.work.classes, soft)
        return {"memory": kept, "step": -1}

    # --- remembered pictures in training

    def batches(self, turn: Turn) -> Iterator[tuple[Tensor, Tensor]]:
        """Each batch of the task with remembered pictures of other tasks behind it."""
        kept = turn.state["memory"]
        past = (kept["tasks"] != turn.task).nonzero().flatten()
        draw = turn.visit.generator("replay")
        for pictures, labels in super().batches(turn):
            count = min(len(past), round(self.params.ratio * len(labels)))
            pick = turn.notes["remembered"] = self.pick(kept, past, count, draw)
            if count:
                changed = augment(kept["pictures"][pick], self.work.setting.training, draw)
                old = self.work.normalise(changed)
                pictures = torch.cat([pictures, old])
                labels = torch.cat([labels, kept["labels"][pick].to(labels.device)])
            yield pictures, labels

    def pick(self, kept: Memory, past: Tensor, count: int, draw: torch.Generator) -> Tensor:
        """So many of the places `past`, at random or as many of each class as there are."""
        if self.params.balanced:
            places = balanced(kept["labels"][past], count, draw)
        else:
            places = torch.randperm(len(past), generator=draw)[:count]
        return past[places]

    def loss(self, turn: Turn, pictures: Tensor, labels: Tensor) -> Tensor:
        """The loss of new and remembered pictures."""
        return self.error(turn, self.work.model.module(pictures), labels)

    def error(self, turn: Turn, answers: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy in one mean, or those of new and old pictures in shares 1 to `weight`.

        Their sum would make steps longer than those of a client without a memory.
        """
        places, weight = turn.notes.get("remembered", ()), self.params.weight
        if weight is None or not len(places):
            return F.cross_entropy(answers, labels)
        new = len(labels) - len(places)
        old = self.past_error(answers[new:], labels[new:], turn.state["memory"]["soft"][places])
        loss: Tensor = (F.cross_entropy(answers[:new], labels[:new]) + weight * old) / (1 + weight)
        return loss

    def past_error(self, answers: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
        """Cross-entropy, or how far answers are from soft labels at the temperature T.

        Times T^2, as gradients shrink by it: SGD would hardly move for T = 30 as published (for
        AdamW, which scales its steps itself).
        """
        if not soft.shape[1]:
            return F.cross_entropy(answers, labels)
        T: float = self.params.temperature
        given, wanted = ((x / T).log_softmax(1) for x in (answers, soft.to(answers.device)))
        return T**2 * F.kl_div(given, wanted, reduction="batchmean", log_target=True)

    # --- what is remembered

    def remember(self, turn: Turn) -> State:
        """The memory with this task, chosen in the last round, when the encoder has learnt it.

        Where a client may be missed it takes the task up on the first visit as well.
        """
        state = super().remember(turn)
        first = state["step"] != turn.visit.step
        now = turn.visit.last or (first and self.may_be_missed())
        if self.params.memory.per_class == 0 or not now:
            return state
        with turn.log.clock("coreset"):
            kept = self.chosen(turn, first)
        return {**state, "memory": kept, "step": turn.visit.step}

    def exhibit(self, state: State, count: int) -> dict[str, Tensor]:
        """The first so many pictures of each class in a client's memory, with their labels."""
        kept: Memory = state["memory"]
        places = first_of_each(kept["labels"], count)
        return {"pictures": kept["pictures"][places], "labels": kept["labels"][places]}

    def may_be_missed(self) -> bool:
        """Whether a client may not be there in the last round of a task."""
        training = self.work.setting.training
        return training.participation < 1 or training.dropout > 0

    def chosen(self, turn: Turn, first: bool) -> Memory:
        """The memory after the task's classes, each taken up or, if `first` is past, anew."""
        kept: Memory = turn.state["memory"]
        labels = self.work.images.y_train[turn.indices]
        made = self.proposal(turn, labels) if proposes(self.params.memory.rule) else None
        for label in labels.unique().tolist():
            met = int((labels == label).sum())
            again = int(kept["seen"][label]) > (0 if first else met)
            if first and again:
                turn.log.events.append("memory: a class was met again")
            if first and met < self.params.memory.per_class:
                turn.log.events.append("memory: a class has fewer pictures than may be kept")
            if first or not again:  # one met before was merged once: its older pictures are gone
                offered = made or self.pictures_of(turn, labels, label)
                before = kept if first else without(kept, label)
                kept = self.take_up(before, label, met, offered, turn)
        return kept

    def pictures_of(self, turn: Turn, labels: Tensor, label: int) -> Proposal:
        """The client's pictures of one class: a whole task may be more than fits into memory."""
        own = labels == label
        return as_they_are(self.work.images.x_train[turn.indices[own]], labels[own])

    def proposal(self, turn: Turn, labels: Tensor) -> Proposal:
        """What the rule itself proposes to remember of the task."""
        pictures, keep = self.work.images.x_train[turn.indices], self.params.memory
        if not len(labels):
            return as_they_are(pictures, labels)
        visit, model, kept = turn.visit, self.work.model, turn.state["memory"]
        network = self.work.network(visit.seed).to(self.work.device)
        learner = Learner(network, self.work.normalise, model.parameters, model.buffers)
        others = kept["tasks"] != turn.task
        past = kept["pictures"][others], kept["labels"][others]
        draw = generator(visit.seed, visit.client, visit.step, "memory")
        told = (keep.per_class, keep.options, learner, draw, turn.log.events)
        return propose(keep.rule, Task(pictures, labels, past, *told))

    def take_up(self, kept: Memory, label: int, met: int, proposal: Proposal, turn: Turn) -> Memory:
        """The memory after a class of the task, of which the client has met so many pictures."""
        visit, keep = turn.visit, self.params.memory
        draw = generator(visit.seed, visit.client, visit.step, f"memory of class {label}")
        old = self.features(kept["pictures"][kept["labels"] == label])
        features = self.features(proposal.pictures[proposal.labels == label])
        new = memory.of_class(proposal, label, turn.task, features)
        return memory.update(kept, label, new, met, old, keep, draw)

    def features(self, pictures: Tensor) -> Tensor:
        """What the encoder makes of pictures, in evaluation mode, if the rule looks.  # [N, D]"""
        if not looks_at_features(self.params.memory.rule):
            return torch.zeros(len(pictures), 0)
        return self.work.outputs(pictures, self.work.classifier.encode)


def without(kept: Memory, label: int) -> Memory:
    """The memory as if a class had never been met."""
    others = kept["labels"] != label
    seen = kept["seen"].clone()
    seen[label] = 0
    names = ("pictures", "labels", "tasks", "soft")
    return {**{name: kept[name][others] for name in names}, "seen": seen}
