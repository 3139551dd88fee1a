"""STAMP: spatio-temporal gradient matching, with past tasks remembered by prototypical coresets."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative
from stamp_core.coresets.memory import Memory, MemoryParams, past_tasks
from stamp_core.matching.match import MatchResult, match_gram
from stamp_core.methods.base.method import ClientRound, Log
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from stamp_core.methods.base.server_matching import ServerMatching, SpatialParams, log_matches
from stamp_core.methods.stamp.temporal import (
    PastTask,
    SeparateGradients,
    TemporalParams,
    Update,
    batch_groups,
    match_past_tasks,
    sample_tasks,
    segments,
)
from stamp_core.models.flat import FlatSGD, flatten_like
from stamp_core.models.group_gradients import GroupGradients, group_gradients, in_one_pass


@dataclass(frozen=True)
class StampParams(RehearsalParams):
    """The parts of STAMP; null or 0 turns one off, and with all off it is FedAvg."""

    memory: MemoryParams = field(default_factory=MemoryParams)  # prototypical coresets, PCS
    ratio: NonNegative = 0.0  # exemplars mixed into batches: not in the paper
    spatial: SpatialParams | None = None  # matching on the server, SAM
    temporal: TemporalParams | None = None  # matching on the client, TAM
    prototype: NonNegative = 0.0  # weight of the prototypical loss, added to cross-entropy
    alternate: bool = False  # as the public code: encoder by prototypes, then head by cross-entropy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternate and not self.prototype:
            raise invalid("prototype", self.prototype, "above 0, as alternate is true")
        if self.temporal is None or self.temporal.every is None:
            return
        if self.temporal.source == "memory" and not self.memory.exemplars_per_class:
            raise invalid("memory.exemplars_per_class", 0, "above 0, as temporal.every is set")
        if self.temporal.in_steps:
            self._check_batches()

    def _check_batches(self) -> None:
        """Validate that a batch can be divided into tasks with one cross-entropy each."""
        if not self.ratio:
            raise invalid("ratio", self.ratio, "above 0, as temporal.every is 1")
        if self.memory.soft:
            right = "a rule that keeps labels, as temporal.every is 1"
            raise invalid("memory.selection", self.memory.selection, right)
        if self.weight is not None:
            right = "null, as temporal.every is 1: temporal.reference weighs exemplars"
            raise invalid("weight", self.weight, right)
        if self.alternate:
            raise invalid("alternate", True, "false, as temporal.every is 1")


@dataclass
class StampContext(StepContext):
    encoder_sgd: FlatSGD | None  # with alternating losses
    matches: list[MatchResult]  # of temporal matching
    log: Log


class Stamp(ServerMatching, Rehearsal):
    """Spatio-temporal gradient matching with network-free prototypes."""

    Params: ClassVar = StampParams
    fedavg_equivalent: ClassVar = {}
    masks: ClassVar = True
    graph_safe = True

    def __init__(self, params: StampParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        if params.alternate and runtime.training.weight_decay:  # a batch takes two steps
            raise invalid("alternate", True, "false, as training.weight_decay is set")
        if params.prototype and runtime.dataset.masks:
            raise invalid("prototype", params.prototype, "0, as the data have masks")
        self.in_steps = params.temporal is not None and params.temporal.in_steps
        whole = params.temporal is not None and params.temporal.blocks == "model"
        # Whether one backward pass gives the gradients of all groups of a batch.
        self.one_pass = whole and not params.prototype and in_one_pass(self.classifier)
        # A second optimiser is no tensor, and matching is solved on the CPU.
        self.graph_safe = not params.alternate and not self.in_steps

    def start(self, client_round: ClientRound) -> StampContext:
        sgd = self.runtime.new_sgd(self.model) if self.params.alternate else None
        return StampContext(sgd, [], client_round.log)

    def train(self, client_round: ClientRound, context: StampContext) -> list[Tensor]:
        if self.params.temporal is None or self.in_steps:
            return super().train(client_round, context)
        return self.train_in_segments(client_round, context, self.params.temporal)

    def finish(self, client_round: ClientRound, context: StampContext) -> None:
        log_matches(client_round.log, "temporal", context.matches)

    def train_in_segments(
        self, client_round: ClientRound, context: StampContext, params: TemporalParams
    ) -> list[Tensor]:
        runtime = self.runtime
        past = self.past_tasks(client_round, params)
        images = runtime.batch_sizes(len(client_round.indices))  # new ones, of each step
        if client_round.experience and images and not past:
            client_round.log.events.append("temporal matching: nothing is remembered")
        if not client_round.classes or (not past and not params.alone):
            return super().train(client_round, context)
        losses = list[Tensor]()
        for batches in segments(self.batches(client_round, context), params.every):
            start = self.model.parameters.clone()
            of_segment = runtime.run_steps(self.step, batches, context, self.graph_safe)
            update = Update(start, images[len(losses) :][: len(of_segment)])
            losses += of_segment
            finite = bool(self.model.parameters.isfinite().all())  # else matching would hide it
            if of_segment and finite:
                with client_round.log.clock("temporal"):
                    result = match_past_tasks(runtime, client_round, params, update, past)
                context.matches.append(result)
        return losses

    def past_tasks(self, client_round: ClientRound, params: TemporalParams) -> dict[int, PastTask]:
        """Stored images of other tasks, or of a sample; "all data": of earlier experiences."""
        if params.source == "all data":
            images, labels = self.runtime.x_train, self.runtime.y_train
            plan, client = client_round.plan, client_round.client
            past = range(client_round.experience)
            indices = {e: self.train_indices(plan, client, e % plan.tasks) for e in past}
        else:
            images, labels = self.exemplars_on_device(client_round)
            indices = self.past_exemplars(client_round)
        found = sorted(task for task, own in indices.items() if len(own))
        draws = {task: client_round.generator(f"pictures of task {task}") for task in found}
        chosen = sample_tasks(found, params.tasks, client_round)
        return {task: PastTask(images, labels, indices[task], draws[task]) for task in chosen}

    def past_indices(self, client_round: ClientRound) -> Tensor:
        """Indices of the exemplars of other tasks, of a sample if steps match them.  # [m]"""
        indices = super().past_indices(client_round)
        if not self.in_steps:
            return indices
        memory: Memory = client_round.state["memory"]
        tasks = past_tasks(memory, client_round.task)
        chosen = sample_tasks(tasks, self.params.temporal.tasks, client_round)
        return indices[torch.isin(memory["tasks"][indices], torch.tensor(chosen))]

    def step(self, batch: Batch, context: Any) -> Tensor:
        """One SGD step on a batch, along the matched gradient if tasks are matched in steps."""
        if not self.in_steps or not batch.exemplars:
            return super().step(batch, context)
        self.runtime.start_step(len(batch))
        groups = batch_groups(batch)
        images = torch.tensor([len(group) for group in groups])
        temporal: TemporalParams = self.params.temporal
        found = self.group_gradients(batch, groups)
        with context.log.clock("temporal"):  # certified by the Gram matrix: a pass takes too long
            result = match_gram(found.gram(), temporal, images)
            self.model.gradients.copy_(found.weighted(temporal.lr * result.coefficients))
        context.matches.append(result)
        self.runtime.sgd.step()
        return found.losses @ images.to(found.losses) / len(batch)

    def group_gradients(
        self, batch: Batch, groups: list[Tensor]
    ) -> GroupGradients | SeparateGradients:
        if self.one_pass:
            order, sizes = torch.cat(groups), [len(group) for group in groups]
            images, targets = batch.images[order], batch.targets[order]
            return group_gradients(self.classifier, images, targets, sizes)
        blocks = self.runtime.layers() if self.params.temporal.blocks == "layers" else None
        return SeparateGradients(*self.backward_passes(batch, groups), blocks)

    def backward_passes(self, batch: Batch, groups: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Mean loss and gradient of each group; norms need the whole batch.  # [K], K of [P]"""
        tensors = self.model.tensors
        whole = self.classifier.encode(batch.images) if self.classifier.norms else None
        losses, gradients = list[Tensor](), list[Tensor]()
        for group in groups:
            encoded = self.classifier.encode(batch.images[group]) if whole is None else whole[group]
            loss = F.cross_entropy(self.classifier.classify(encoded), batch.targets[group])
            losses.append(loss.detach())
            if self.params.prototype and group is groups[-1]:
                prototypical = prototype_loss(encoded, batch.targets[group])
                loss = loss + self.params.prototype * prototypical
            slopes = torch.autograd.grad(loss, tensors, retain_graph=whole is not None)
            gradients.append(flatten_like(slopes, tensors))
        return torch.stack(losses), gradients

    def loss(self, batch: Batch, context: StampContext) -> Tensor:
        if not self.params.prototype:
            return super().loss(batch, context)
        if context.encoder_sgd is not None:
            self.step_encoder(batch, context.encoder_sgd)
            features = self.classifier.encode(batch.images).detach()
            return self.weighted_loss(self.classifier.head(features), batch, context)
        features = self.classifier.encode(batch.images)
        prototypical: Tensor = self.params.prototype * prototype_loss(features, batch.targets)
        return prototypical + self.weighted_loss(self.classifier.head(features), batch, context)

    def step_encoder(self, batch: Batch, sgd: FlatSGD) -> None:
        loss = prototype_loss(self.classifier.encode(batch.images), batch.targets)
        (self.params.prototype * loss).backward()
        sgd.step()
        self.model.gradients.zero_()


def prototype_loss(features: Tensor, labels: Tensor) -> Tensor:
    """The loss of prototypical networks (Snell et al., 2017) inside a batch.

    The mean of d(z, p_y) + log sum_l exp(-d(z, p_l)) over the queries z, d = squared distance. Of
    the n images of a class in the batch the first ceil(n / 2) are its support, whose mean is the
    prototype p_l; the others are queries. A class with one image is ignored. Without queries the
    loss is 0. All shapes depend on N alone, so that a device never waits for the labels: each class
    is represented by its first image.
    """
    same = labels[:, None] == labels  # [N, N]
    rank, count = same.tril().sum(1), same.sum(1)  # [N]; the rank in the class begins with 1
    support = (rank <= (count + 1) // 2) & (count > 1)
    query = (count > 1) & ~support
    z = features - features.detach().mean(0)  # a common shift of all changes rounding alone
    members = (same & support).to(z.dtype)  # [N, N]
    prototypes = members @ z / members.sum(1, keepdim=True).clamp(min=1)  # [N, D], of own classes
    similarities = 2 * z @ prototypes.T - prototypes.square().sum(1)  # |z|^2 - d(z, p)
    first = support & (rank == 1)
    logits = similarities.masked_fill(~first, torch.finfo(z.dtype).min)
    losses = F.cross_entropy(logits, same.int().argmax(1), reduction="none")
    loss: Tensor = losses.where(query, 0.0).sum() / query.sum().clamp(min=1)
    return loss
