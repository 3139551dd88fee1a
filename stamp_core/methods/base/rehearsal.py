"""Rehearsal: every client keeps exemplars of its classes and mixes them into local training."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.by_class import class_means, first_per_class, sample_balanced
from stamp_core.client.workspace import Workspace
from stamp_core.config.decode import invalid, require_at_least
from stamp_core.core.devices import storage_device
from stamp_core.core.seeding import generator
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.memory import (
    Memory,
    MemoryParams,
    class_samples,
    empty_memory,
    update_memory,
)
from stamp_core.coresets.selection.base import (
    Proposal,
    TaskData,
    hard_label_proposal,
    needs_features,
    propose_exemplars,
    proposes,
)
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Group, Method, State


@dataclass(frozen=True)
class RehearsalParams(FedAvgParams):
    """What is kept in memory, and how local training uses exemplars."""

    memory: MemoryParams = field(
        default_factory=lambda: MemoryParams(selection="uniform", merge="reservoir")
    )
    ratio: float = 1.0  # exemplars in a batch, as a multiple of its new images
    balanced: bool = False  # sample exemplars evenly over classes instead of uniformly
    # The loss is (new + weight * exemplars) / (1 + weight), each a mean; null: one mean over all.
    weight: float | None = None
    # Weight of the squared distance between exemplars' logits and the mean logits of their class
    # when it was learnt: dark experience replay (Buzzega et al., 2020) with one anchor per class.
    anchor: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative weights, and soft labels that no loss would use."""
        super().__post_init__()
        require_at_least(self, 0, "ratio", "anchor")
        if self.weight is not None:
            require_at_least(self, 0, "weight")
        if self.weight is None and self.ratio and self.memory.soft:
            raise invalid("weight", None, f"a number: {self.memory.selection} makes soft labels")
        if self.weight is None and self.anchor:
            raise invalid("weight", None, "a number, as anchor is above 0")


class Rehearsal(Method):
    """FedAvg whose clients keep exemplars; the base of all methods with such a memory."""

    Params: ClassVar = RehearsalParams
    neutral: ClassVar = {"memory": {"exemplars_per_class": 0}}
    group: ClassVar[Group] = "continual"
    captures = True
    step_inputs = ("soft", "anchors")
    step_parts = (*Method.step_parts, "weighted_loss", "exemplar_loss")

    def __init__(self, params: Any, work: Workspace) -> None:
        super().__init__(params, work)
        rule = params.memory.selection
        if work.dataset.masks and (params.anchor or proposes(rule)):
            key = "anchor" if params.anchor else "memory.selection"
            value = params.anchor or rule
            raise invalid(key, value, "one that needs no labels of images, as the data have masks")

    def init_client(self, client: int, server: State) -> State:
        """An empty memory; `experiences` lists those whose tasks have been added to it."""
        soft = self.params.memory.soft
        memory = empty_memory(self.work.dataset.x_train, self.work.classes, soft)
        anchors = {"anchors": torch.zeros(2 * [self.work.classes])} if self.params.anchor else {}
        return {"memory": memory, **anchors, "experiences": []}

    # --- exemplars in training

    def past_indices(self, client_round: ClientRound) -> Tensor:
        """Indices of the exemplars of other tasks.  # [m]"""
        memory: Memory = client_round.state["memory"]
        return (memory["tasks"] != client_round.task).nonzero().flatten()

    def batches(self, client_round: ClientRound) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the task, each followed by exemplars of other tasks.

        `scratch` has the exemplars' soft labels, of which hard ones have no columns.
        """
        memory, past = client_round.state["memory"], self.past_indices(client_round)
        scratch, device = client_round.scratch, self.work.device
        if self.params.anchor:
            scratch["anchors"] = client_round.state["anchors"].to(device)
        generator, known = client_round.round_id.generator("replay"), memory["labels"][past]
        sizes = self.work.batch_sizes(len(client_round.indices))
        samples = self.work.draw(
            (self.draw_exemplars(known, size, generator) for size in sizes), generator
        )
        remembered = self.remembered(client_round)
        places = past.to(remembered[0].device)
        read = self.work.reader(remembered[0], places)
        target = self.work.target_reader(*remembered, places)
        soft = memory["soft"][past].to(device)
        for (images, labels), drawn in zip(super().batches(client_round), samples, strict=True):
            scratch["soft"] = soft[drawn.places]
            if len(drawn.places):
                images = torch.cat([images, read(drawn)])
                labels = torch.cat([labels, target(drawn)])
            yield images, labels

    def draw_exemplars(self, labels: Tensor, new: int, generator: torch.Generator) -> Tensor:
        """Places of the exemplars that a batch with so many new images gets.  # [m]

        `labels` are those of all exemplars of other tasks.
        """
        count = min(len(labels), round(self.params.ratio * new))
        if self.params.balanced:
            return sample_balanced(labels, count, generator)
        return torch.randperm(len(labels), generator=generator)[:count]

    def remembered(self, client_round: ClientRound) -> tuple[Tensor, Tensor]:
        """Images and labels of the memory, on the device in a client round if there is room."""
        images, labels = (client_round.state["memory"][name] for name in ("images", "labels"))
        if storage_device(images, self.work.device) != self.work.device:
            return images, labels
        pairs = {"images": images, "labels": labels}.items()
        moved, stored = (self.on_device(client_round, name, values) for name, values in pairs)
        return moved, stored

    def on_device(self, client_round: ClientRound, name: str, values: Tensor) -> Tensor:
        """Values of the client's state on the device, where they are moved once in a round."""
        moved: dict[str, Tensor] = client_round.scratch.setdefault("on device", {})
        if name not in moved:
            moved[name] = values.to(self.work.device)
        return moved[name]

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of new images and exemplars."""
        return self.weighted_loss(client_round, self.work.model.module(images), labels)

    def weighted_loss(self, client_round: ClientRound, logits: Tensor, labels: Tensor) -> Tensor:
        """One mean cross-entropy, or those of new images and exemplars weighted 1 to `weight`.

        The weights sum to 1: otherwise steps would be longer than those without a memory.
        """
        soft, weight = client_round.scratch.get("soft", ()), self.params.weight
        if weight is None or not len(soft):
            return F.cross_entropy(logits, labels)
        new = len(labels) - len(soft)
        past = self.exemplar_loss(logits[new:], labels[new:], soft)
        if self.params.anchor:
            anchors = client_round.scratch["anchors"][labels[new:]]
            past = past + self.params.anchor * F.mse_loss(logits[new:], anchors)
        loss: Tensor = (F.cross_entropy(logits[:new], labels[:new]) + weight * past) / (1 + weight)
        return loss

    def exemplar_loss(self, logits: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
        """Cross-entropy, or the Kullback-Leibler divergence from soft labels."""
        if not soft.shape[1]:
            return F.cross_entropy(logits, labels)
        student, teacher = logits.log_softmax(1), soft.log_softmax(1)
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True)

    # --- the memory

    def update_state(self, client_round: ClientRound) -> State:
        """The state with this task in memory, selected after training in the last round.

        Where clients may miss the last round, they also select in their first round of the task.
        """
        state, training = super().update_state(client_round), self.work.training
        first = client_round.experience not in state["experiences"]
        may_miss = training.participation < 1 or training.dropout > 0
        due = client_round.last or (first and may_miss)
        if self.params.memory.exemplars_per_class == 0 or not due:
            return state
        with client_round.log.clock("coreset"):
            memory = self.updated_memory(client_round, first)
        experiences = sorted({*state["experiences"], client_round.experience})
        if self.params.anchor:
            state = {**state, "anchors": self.updated_anchors(client_round)}
        return {**state, "memory": memory, "experiences": experiences}

    def updated_anchors(self, client_round: ClientRound) -> Tensor:
        """The mean logits of every class, those of the task's by the trained model.  # [L, L]"""
        indices, data = client_round.indices, self.work.dataset
        logits = self.work.outputs(self.work.train_images(indices)[0])
        means, classes = class_means(logits, data.y_train[indices])
        anchors: Tensor = client_round.state["anchors"].index_copy(0, classes, means)
        return anchors

    def updated_memory(self, client_round: ClientRound, first: bool) -> Memory:
        """The memory with the task's classes; unless `first`, they replace an earlier selection."""
        memory: Memory = client_round.state["memory"]
        reservoir = self.params.memory.merge == "reservoir"
        if self.repeats_task(client_round) and (reservoir or not first):
            return memory  # its images were merged before
        labels = self.work.dataset.y_train[client_round.indices]
        whole = proposes(self.params.memory.selection)
        task_proposal = self.propose_task(client_round, labels) if whole else None
        for label in labels.unique().tolist():
            count = int((labels == label).sum())
            returned = int(memory["seen"][label]) > (0 if first else count)
            if first and returned:
                client_round.log.events.append("memory: a class was met again")
            if first and count < self.params.memory.exemplars_per_class:
                client_round.log.events.append("memory: a class has fewer images than may be kept")
            if first or not returned:  # the older exemplars of such a class are merged already
                proposal = task_proposal or self.propose_class(client_round, labels, label)
                before = memory if first else _without_class(memory, label)
                memory = self._add_class(client_round, before, label, count, proposal)
        return memory

    def repeats_task(self, client_round: ClientRound) -> bool:
        """Whether the task was added to the memory in an earlier cycle."""
        added, own = client_round.state["experiences"], client_round.experience
        tasks = {each % client_round.plan.tasks for each in added if each != own}
        return client_round.task in tasks

    def propose_class(self, client_round: ClientRound, labels: Tensor, label: int) -> Proposal:
        """The client's images of one class: a whole task may be too large for memory."""
        own = labels == label
        images = self.work.dataset.x_train[client_round.indices[own]]
        return hard_label_proposal(images, labels[own])

    def propose_task(self, client_round: ClientRound, labels: Tensor) -> Proposal:
        """What a selection rule that trains on whole tasks proposes to remember."""
        images, params = self.work.dataset.x_train[client_round.indices], self.params.memory
        if not len(labels):
            return hard_label_proposal(images, labels)
        model, memory = self.work.model, client_round.state["memory"]
        network = self.work.network(client_round.seed).to(self.work.device)
        learner = Learner(network, self.work.normalise, model.parameters, model.buffers)
        others = memory["tasks"] != client_round.task
        past = memory["images"][others], memory["labels"][others]
        generator = self._memory_generator(client_round, "memory")
        limit, events = params.exemplars_per_class, client_round.log.events
        task = TaskData(images, labels, past, limit, params.options, learner, generator, events)
        return propose_exemplars(params.selection, task)

    def _add_class(
        self, client_round: ClientRound, memory: Memory, label: int, count: int, proposal: Proposal
    ) -> Memory:
        """The memory with one class of the task, of which the client has `count` images."""
        generator = self._memory_generator(client_round, f"memory of class {label}")
        old = self._features(memory["images"][memory["labels"] == label])
        features = self._features(proposal.images[proposal.labels == label])
        new = class_samples(proposal, label, client_round.task, features)
        return update_memory(memory, label, new, count, old, self.params.memory, generator)

    def _memory_generator(self, client_round: ClientRound, purpose: str) -> torch.Generator:
        """A generator with the same draws in every round of an experience."""
        return generator(client_round.seed, client_round.client, client_round.experience, purpose)

    def _features(self, images: Tensor) -> Tensor:
        """Features by the encoder in evaluation mode, if the rule uses them.  # [N, D]

        Of an image with a mask they are the means of its maps.
        """
        if not needs_features(self.params.memory.selection):
            return torch.zeros(len(images), 0)
        features = self.work.outputs(images, self.work.classifier.encode)
        return features.flatten(2).mean(2) if self.work.dataset.masks else features

    def memory_samples(self, server: State, client: State, count: int) -> dict[str, Tensor]:
        """The first `count` exemplars of each class in a client's memory, with their labels."""
        memory: Memory = client["memory"]
        indices = first_per_class(memory["labels"], count)
        return {name: memory[name][indices] for name in ("images", "labels")}


def _without_class(memory: Memory, label: int) -> Memory:
    """The memory without the exemplars of a class, its count of seen images set to 0."""
    others = memory["labels"] != label
    seen = memory["seen"].clone()
    seen[label] = 0
    names = ("images", "labels", "tasks", "soft")
    return {**{name: memory[name][others] for name in names}, "seen": seen}
