"""FBL (Dong et al., 2023), for masks, and adapted to images: balanced gradients and relations."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import Fraction, NonNegative
from stamp_core.coresets.memory import Memory, MemoryParams
from stamp_core.methods.base.method import ClientRound, State
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from stamp_core.models.flat import FlatModel

UNSURE = -1  # in place of a pseudo label
SMALLEST_GAP = torch.finfo(torch.float32).eps  # of 1 - p: weights stay defined where p is 1
SMALLEST_SHARE = torch.finfo(torch.float32).tiny  # of a class: its logarithm stays defined
SMALLEST_THRESHOLD = 0.001  # as published
QUANTILE = 0.2  # of the entropies of a class, up to which pseudo labels are used
QUANTILE_STEP = 0.1  # by which it grows in every local epoch of a task
QUANTILE_LIMIT = 0.8
ROUNDING = 1e-6  # a quantile may be a sample's own entropy, computed again in another batch
JUMP = 0.6  # of the entropy, at which the published monitor reports a new task


@dataclass(frozen=True)
class FBLParams(RehearsalParams):
    """The parts of FBL; published without exemplars."""

    memory: MemoryParams = field(
        default_factory=lambda: MemoryParams("uniform", exemplars_per_class=0, merge="reservoir")
    )
    # Weights by gradients have the mean 1 in each task's classes; "old": 1 in the current task's.
    weights: Literal["all", "old", "none"] = "all"
    relation: NonNegative = 1.0  # weight of the relations between classes
    leak: Fraction = 0.1  # part of the old model's prediction in the target of a new class
    # The old model labels what has no label of an old class: with masks the background, without
    # masks exemplars, whose labels are then not used.
    pseudo: bool = True
    from_background: bool = True  # with masks: a new class starts as a part of the background

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight is not None:
            raise invalid("weight", self.weight, "absent: `weights` has its place")


class FBLState(TypedDict):  # besides the memory
    old: dict[str, Tensor]  # the model that was received when the task began; {}: none
    experience: int  # in which the client has trained last
    epochs: int  # of local training on the task so far
    entropy: float  # mean of the received model's predictions


@dataclass(frozen=True)
class Past:
    """The old model's classes, and what follows from them for the steps."""

    columns: Tensor  # [O], its outputs that are used: old classes and the background
    groups: Tensor  # float32 [L, G], the task of each output
    power: float  # z, the share of old classes
    thresholds: Iterator[Tensor]  # for every batch each class's largest entropy of a label  # [L]


@dataclass
class FBLContext(StepContext):
    state: FBLState
    past: Past | None  # None: no old model


class FBL(Rehearsal):
    """FedAvg with the model received when a task begins as the teacher of its old classes."""

    Params: ClassVar = FBLParams
    fedavg_equivalent: ClassVar = {
        "weights": "none",
        "relation": 0.0,
        "pseudo": False,
        "from_background": False,
    }
    masks: ClassVar = True

    def __init__(self, params: FBLParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.active = params.weights != "none" or params.relation > 0 or params.pseudo
        self.outputs = runtime.classes + runtime.dataset.masks  # the last one is the background
        if self.active:  # a second live model, loaded before each use
            self.teacher = FlatModel(runtime.network(seed=0).to(runtime.device).eval())

    def init_client(self, client: int, server: State) -> State:
        own = FBLState(old={}, experience=-1, epochs=0, entropy=-1.0)
        return {**super().init_client(client, server), **own}

    def start(self, client_round: ClientRound) -> FBLContext:
        before: FBLState = client_round.state
        experience = client_round.experience
        new = before["experience"] != experience
        old = before["old"]
        entropy = before["entropy"]
        if self.active and len(client_round.indices):
            entropy = self.log_entropy(client_round, new)
        if new:
            live = {"parameters": self.model.parameters, "buffers": self.model.buffers}
            taught = self.active and experience > 0
            old = {name: each.cpu().clone() for name, each in live.items()} if taught else {}
            if experience and self.params.from_background and self.runtime.dataset.masks:
                self.start_from_background(list(client_round.classes))
        epochs = 0 if new else before["epochs"]
        seen = client_round.plan.seen(client_round.client, experience - 1)
        both = old and seen and client_round.classes  # old classes and new ones
        past = self.old_classes(client_round, old, epochs) if both else None
        done = epochs + self.runtime.training.epochs
        state = FBLState(old=old, experience=experience, epochs=done, entropy=entropy)
        return FBLContext(state, past)

    def log_entropy(self, client_round: ClientRound, new: bool) -> float:
        """The received model's mean entropy; log it, and if it would have told a new task."""
        images = self.runtime.dataset.x_train[client_round.indices]
        p = samples(self.runtime.outputs(images)).softmax(1)
        entropy = float(torch.special.entr(p).sum(1).mean())  # in nats, as published
        told = "monitor: hits" if new else "monitor: false alarms"
        jumped = float(entropy - client_round.state["entropy"] > JUMP)
        client_round.log.numbers |= {"entropy": entropy, told: jumped}
        return entropy

    def start_from_background(self, classes: list[int]) -> None:
        """Share the background's part of every prediction among it and the task's classes."""
        weight = self.classifier.head.weight
        bias = self.classifier.head.bias
        assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
        with torch.no_grad():
            weight[classes] = weight[-1].clone()
            bias[[*classes, self.runtime.classes]] = bias[-1] - math.log(len(classes) + 1)

    def old_classes(self, client_round: ClientRound, old: dict[str, Tensor], epochs: int) -> Past:
        """The old model's classes, of which it is the teacher; all, where every class returns."""
        self.teacher.load(old["parameters"], old["buffers"])
        device = self.runtime.device
        seen = set(client_round.plan.seen(client_round.client, client_round.experience - 1))
        current = list(client_round.classes)
        gone = seen - set(current)
        background = {self.runtime.classes} if self.runtime.dataset.masks else set()
        columns = torch.tensor(sorted((gone or seen) | background)).to(device)
        tasks = client_round.plan.clients[client_round.client]
        groups = torch.zeros(self.outputs, dtype=torch.int64)  # the background: the first task's
        for task, each in reversed(list(enumerate(tasks[: client_round.experience]))):
            groups[list(each.classes)] = task
        groups[current] = len(tasks)
        members = F.one_hot(groups, len(tasks) + 1).float().to(device)
        power = len(gone) / (len(gone) + len(current))
        thresholds = self.thresholds(client_round, columns, epochs)
        return Past(columns, members, power, thresholds)

    def thresholds(
        self, client_round: ClientRound, columns: Tensor, epochs: int
    ) -> Iterator[Tensor]:
        """For every batch each class's largest entropy of a pseudo label.  # [L] each"""
        if not self.params.pseudo:
            return iter(())
        entropy, predicted = self.teacher_entropies(client_round, columns)
        limits = list[Tensor]()
        for epoch in range(self.runtime.training.epochs):
            share = min(QUANTILE + QUANTILE_STEP * (epochs + epoch), QUANTILE_LIMIT)
            limits.append(class_thresholds(entropy, predicted, share, self.outputs))
        if limits and len(entropy):
            used = (entropy <= limits[-1][predicted]).float().mean()
            client_round.log.numbers["pseudo labels used"] = float(used)
        on_device = [each.to(self.runtime.device) for each in limits]
        steps = math.ceil(len(client_round.indices) / self.runtime.training.batch_size)
        return (each for each in on_device for _ in range(steps))

    def teacher_entropies(
        self, client_round: ClientRound, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The teacher's entropies where labels are hidden, and its classes there.  # [n], [n]"""
        runtime = self.runtime
        memory: Memory = client_round.state["memory"]
        images = memory["images"][self.past_indices(client_round)]
        if runtime.dataset.masks:
            images = runtime.dataset.x_train[client_round.indices]
        if not len(images):
            return torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        logits = samples(runtime.outputs_there(images, self.teacher.module))
        if runtime.dataset.masks:
            logits = logits[(images[:, -1] == runtime.classes).flatten().to(runtime.device)]
        teacher = logits[:, columns].softmax(1)
        return entropies(teacher).cpu(), columns[teacher.argmax(1)].cpu()

    def loss(self, batch: Batch, context: FBLContext) -> Tensor:
        past = context.past
        if past is None:
            return super().loss(batch, context)
        logits = samples(self.model.module(batch.images))  # [M, L]
        with torch.no_grad():
            teacher = samples(self.teacher.module(batch.images))[:, past.columns].softmax(1)
            labels = self.pseudo_labels(batch, past, teacher)  # [M]
            classes = torch.arange(self.outputs, device=labels.device)
            members = (labels[:, None] == classes).float()  # [M, L], all 0 where UNSURE
            weights = self.compensation(past, logits, members)
        losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=UNSURE)
        loss = (weights * losses).mean()
        if self.params.relation:
            targets = self.relation_targets(past, teacher, members)
            relation = relation_loss(logits.softmax(1), targets, members, weights)
            loss = loss + self.params.relation * relation
        return loss

    def pseudo_labels(self, batch: Batch, past: Past, teacher: Tensor) -> Tensor:
        """Labels, those of the old model where an old class may be hidden, or UNSURE.  # [M]"""
        labels = batch.targets.flatten()
        if not self.params.pseudo:
            return labels
        hidden = labels == self.runtime.classes
        if not self.runtime.dataset.masks:
            hidden[batch.new :] = True
        predicted = past.columns[teacher.argmax(1)]
        sure = entropies(teacher) <= next(past.thresholds)[predicted]
        return torch.where(hidden, predicted.where(sure, UNSURE), labels)

    def compensation(self, past: Past, logits: Tensor, members: Tensor) -> Tensor:
        """Each sample's gap (1 - p)^z over its group's mean; 0 where it is UNSURE.  # [M]"""
        used = members.any(1)
        if self.params.weights == "none":
            return used.float()
        # as released for masks: each class of a pixel has a probability of its own
        p = logits.sigmoid() if self.runtime.dataset.masks else logits.softmax(1)
        gaps = 1 - (p * members).sum(1)  # [M]
        gaps = gaps.clamp(min=SMALLEST_GAP) ** past.power
        groups = members @ past.groups  # [M, G]
        means = gaps @ groups / groups.sum(0).clamp(min=1)  # [G]
        weights: Tensor = gaps / (groups @ means)
        if self.params.weights == "old":  # the last group is that of the current task
            weights = weights.where(groups[:, -1] == 0, 1.0)
        return weights.where(used, 0.0)

    def relation_targets(self, past: Past, teacher: Tensor, members: Tensor) -> Tensor:
        """The old model's prediction for old classes, of which new ones have a part.  # [M, L]"""
        table = torch.eye(self.outputs, device=teacher.device)[past.columns]  # [O, L]
        spread = teacher @ table  # [M, L], 0 outside the columns
        new = 1 - members @ table.sum(0)[:, None]  # [M, 1]
        targets: Tensor = spread + new * (1 - self.params.leak) * (members - spread)
        return targets

    def update_state(self, client_round: ClientRound, context: FBLContext) -> State:
        return {**super().update_state(client_round, context), **context.state}


def samples(maps: Tensor) -> Tensor:
    """A row for each image, or for each pixel.  # [N, L] or [N, L, H, W] -> [M, L]"""
    return maps.movedim(1, -1).flatten(0, -2)


def entropies(probabilities: Tensor) -> Tensor:
    """The entropy along dimension 1, as a part of its maximum.  # [M, O] -> [M]"""
    largest = math.log(max(2, probabilities.shape[1]))
    parts: Tensor = torch.special.entr(probabilities).sum(1) / largest
    return parts


def class_thresholds(entropy: Tensor, predicted: Tensor, share: float, classes: int) -> Tensor:
    """The quantile of the entropies at which each class is predicted, at least 0.001.  # [L]"""
    found = torch.zeros(classes, device=entropy.device)
    for label in predicted.unique().tolist():
        found[label] = torch.quantile(entropy[predicted == label], share)
    return found.clamp(min=SMALLEST_THRESHOLD) + ROUNDING


def relation_loss(p: Tensor, targets: Tensor, members: Tensor, weights: Tensor) -> Tensor:
    """The mean over classes of KL(mean target || mean prediction), weighted.  # p: [M, L]"""
    shares = (members / members.sum(0).clamp(min=1)).T  # [L, M], for means of classes
    logarithms = (shares @ p).clamp(min=SMALLEST_SHARE).log()  # [L, L]
    divergences = F.kl_div(logarithms, shares @ targets, reduction="none").sum(1)  # [L]
    weight = shares @ weights  # [L]; 0 for a class without samples
    loss: Tensor = (weight * divergences).sum() / weight.sum().clamp(min=SMALLEST_SHARE)
    return loss
