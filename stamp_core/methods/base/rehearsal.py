"""Rehearsal: a client keeps exemplars of its classes and mixes them into local training."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext, append_exemplars
from stamp_core.client.by_class import sample_balanced
from stamp_core.client.runtime import BatchReader, ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative
from stamp_core.core.devices import storage_device
from stamp_core.core.seeding import generator
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.memory import (
    Memory,
    MemoryParams,
    class_samples,
    empty_memory,
    past_tasks,
    update_memory,
)
from stamp_core.coresets.selection.base import (
    Proposal,
    TaskData,
    hard_label_proposal,
    load_rule,
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
    ratio: NonNegative = 1.0  # exemplars in a batch, as a multiple of its new images
    balanced: bool = False  # sample exemplars evenly over classes instead of uniformly
    # The loss is (new + weight * exemplars) / (1 + weight), each a mean; null: one mean over all.
    weight: NonNegative | None = None

    def __post_init__(self) -> None:
        for name, neutral in (("weight", None), ("balanced", False)):
            if not self.ratio and getattr(self, name) != neutral:
                right = f"{neutral}, as ratio is 0: no batch has exemplars"
                raise invalid(name, getattr(self, name), right)
        if self.weight is None and self.ratio and self.memory.soft:
            raise invalid("weight", None, f"a number: {self.memory.selection} makes soft labels")


class Rehearsal(Method):
    """FedAvg whose clients keep exemplars; the base of all methods with such a memory."""

    Params: ClassVar = RehearsalParams
    fedavg_equivalent: ClassVar = {"memory": {"exemplars_per_class": 0}}
    group: ClassVar[Group] = "continual"
    graph_safe = True
    step_parts = (*Method.step_parts, "weighted_loss", "exemplar_loss")

    def __init__(self, params: Any, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        rule = params.memory.selection
        if runtime.dataset.masks and proposes(rule):
            right = "one that needs no labels of images, as the data have masks"
            raise invalid("memory.selection", rule, right)
        if runtime.has_features and hasattr(load_rule(rule), "IMAGES"):
            raise invalid("memory.selection", rule, "one that makes no images: these are features")

    def init_client(self, client: int, server: State) -> State:
        soft = self.params.memory.soft
        memory = empty_memory(self.runtime.dataset.x_train, self.runtime.classes, soft)
        return {"memory": memory, "experiences": []}  # those whose tasks are in memory

    def past_indices(self, client_round: ClientRound) -> Tensor:
        """Indices of the exemplars of other tasks.  # [m]"""
        memory: Memory = client_round.state["memory"]
        return (memory["tasks"] != client_round.task).nonzero().flatten()

    def past_exemplars(self, client_round: ClientRound) -> dict[int, Tensor]:
        """Indices of the exemplars of each other task.  # [m] each"""
        memory: Memory = client_round.state["memory"]
        past = past_tasks(memory, client_round.task)
        return {task: (memory["tasks"] == task).nonzero().flatten() for task in past}

    def batches(self, client_round: ClientRound, context: Any) -> Iterator[Batch]:
        """The batches of the task with exemplars; of a client without a part, exemplars alone."""
        if not client_round.classes:
            memory, past = client_round.state["memory"], self.past_indices(client_round)
            return self.runtime.epochs(client_round, memory["images"], memory["labels"], past)
        new = super().batches(client_round, context)
        return map(append_exemplars, new, self.exemplar_batches(client_round))

    def sample_count(self, client_round: ClientRound, context: Any) -> int:
        alone = not client_round.classes
        return len(self.past_indices(client_round) if alone else client_round.indices)

    def exemplar_batches(self, client_round: ClientRound) -> Iterator[Batch]:
        """The exemplars of other tasks for each batch of the task; none without any."""
        memory: Memory = client_round.state["memory"]
        past = self.past_indices(client_round)
        labels, device = memory["labels"][past], self.runtime.device
        soft = memory["soft"][past].to(device) if memory["soft"].shape[1] else None
        tasks = memory["tasks"][past].to(device)
        read = BatchReader(self.runtime, memory["images"], memory["labels"], past, soft, tasks)
        draw = client_round.generator("replay")
        sizes = self.runtime.batch_sizes(len(client_round.indices))
        return read.batches((self.draw_exemplars(labels, n, draw) for n in sizes), draw)

    def draw_exemplars(self, labels: Tensor, new: int, draw: torch.Generator) -> Tensor:
        """Indices of exemplars, of all with these labels, for so many new images.  # [m]"""
        count = min(len(labels), round(self.params.ratio * new))
        if self.params.balanced:
            return sample_balanced(labels, count, draw)
        return torch.randperm(len(labels), generator=draw)[:count]

    def exemplars_on_device(self, client_round: ClientRound) -> tuple[Tensor, Tensor]:
        """Images and labels of the memory, on the device if there is room."""
        memory: Memory = client_round.state["memory"]
        device = storage_device(memory["images"], self.runtime.device)
        return memory["images"].to(device), memory["labels"].to(device)

    def loss(self, batch: Batch, context: Any) -> Tensor:
        return self.weighted_loss(self.model.module(batch.images), batch, context)

    def weighted_loss(self, logits: Tensor, batch: Batch, context: StepContext) -> Tensor:
        """One mean cross-entropy, or those of new images and exemplars; weights sum to 1."""
        weight = self.params.weight
        if weight is None or not batch.exemplars:
            return F.cross_entropy(logits, batch.targets)
        targets = batch.targets[batch.new :]
        past = self.exemplar_loss(logits[batch.new :], targets, batch.soft)
        new = F.cross_entropy(logits[: batch.new], batch.targets[: batch.new])
        loss: Tensor = (new + weight * past) / (1 + weight)
        return loss

    def exemplar_loss(self, logits: Tensor, labels: Tensor, soft: Tensor | None) -> Tensor:
        if soft is None:
            return F.cross_entropy(logits, labels)
        student = logits.log_softmax(1)
        return F.kl_div(student, soft.log_softmax(1), reduction="batchmean", log_target=True)

    # --- the memory

    def update_state(self, client_round: ClientRound, context: Any) -> State:
        state = super().update_state(client_round, context)
        if not self.params.memory.exemplars_per_class or not self.is_due(client_round):
            return state
        with client_round.log.clock("coreset"):
            memory = self.updated_memory(client_round)
        return {**state, "memory": memory, "experiences": client_round.recorded}

    def updated_memory(self, client_round: ClientRound) -> Memory:
        """The memory with the task's classes, which replace an earlier selection of the task."""
        memory: Memory = client_round.state["memory"]
        first = client_round.first
        reservoir = self.params.memory.merge == "reservoir"
        if self.repeats_task(client_round) and (reservoir or not first):
            return memory  # its images were merged before
        labels = self.runtime.dataset.y_train[client_round.indices]
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
        others = {*client_round.state["experiences"]} - {client_round.experience}
        return client_round.task in {each % client_round.plan.tasks for each in others}

    def propose_class(self, client_round: ClientRound, labels: Tensor, label: int) -> Proposal:
        """The client's images of one class: a whole task may be too large for memory."""
        of_class = labels == label
        images = self.runtime.dataset.x_train[client_round.indices[of_class]]
        return hard_label_proposal(images, labels[of_class])

    def propose_task(self, client_round: ClientRound, labels: Tensor) -> Proposal:
        images = self.runtime.dataset.x_train[client_round.indices]
        if not len(labels):
            return hard_label_proposal(images, labels)
        params = self.params.memory
        memory: Memory = client_round.state["memory"]
        network = self.runtime.network(client_round.seed).to(self.runtime.device)
        model = self.model
        learner = Learner(network, self.runtime.normalise, model.parameters, model.buffers)
        others = memory["tasks"] != client_round.task
        task = TaskData(
            images,
            labels,
            (memory["images"][others], memory["labels"][others]),
            params.exemplars_per_class,
            params.options,
            learner,
            self._memory_generator(client_round, "memory"),
            client_round.log.events,
        )
        proposal = propose_exemplars(params.selection, task)
        client_round.log.images += network.images_backpropagated
        return proposal

    def _add_class(
        self, client_round: ClientRound, memory: Memory, label: int, count: int, proposal: Proposal
    ) -> Memory:
        """The memory with one class of the task, of which the client has `count` images."""
        draw = self._memory_generator(client_round, f"memory of class {label}")
        old = self._features(memory["images"][memory["labels"] == label])
        features = self._features(proposal.images[proposal.labels == label])
        new = class_samples(proposal, label, client_round.task, features)
        return update_memory(memory, label, new, count, old, self.params.memory, draw)

    def _memory_generator(self, client_round: ClientRound, purpose: str) -> torch.Generator:
        """A generator with the same draws in every round of an experience."""
        return generator(client_round.seed, client_round.client, client_round.experience, purpose)

    def _features(self, images: Tensor) -> Tensor:
        """Features by the encoder, of maps their means, if the rule uses them.  # [N, D]"""
        if not needs_features(self.params.memory.selection):
            return torch.zeros(len(images), 0)
        features = self.runtime.outputs(images, self.classifier.encode)
        return features.flatten(2).mean(2) if self.runtime.dataset.masks else features

    def remembered(self, server: State, client: State) -> Any:
        return client["memory"]


def _without_class(memory: Memory, label: int) -> Memory:
    """The memory without the exemplars of a class, its count of seen images set to 0."""
    others = memory["labels"] != label
    seen = memory["seen"].clone()
    seen[label] = 0
    names = ("images", "labels", "tasks", "soft")
    return {**{name: memory[name][others] for name in names}, "seen": seen}
