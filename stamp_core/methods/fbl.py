"""FBL (Dong et al., 2023): balanced gradients and class relations against background shift.

It was published for segmentation; on images with labels this is an adaptation, called FBL-C.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_at_least, require_fraction
from stamp_core.coresets.memory import MemoryParams
from stamp_core.methods.base.method import ClientRound, State
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from stamp_core.models.flat import FlatModel

UNSURE = -1  # in place of a pseudo label
SMALLEST_GAP = torch.finfo(torch.float32).eps  # of 1 - p: weights stay defined where p is 1
SMALLEST_SHARE = torch.finfo(torch.float32).tiny  # of a class: its logarithm stays defined
SMALLEST_THRESHOLD = 0.001  # as published
JUMP = 0.6  # of the entropy, at which the published monitor reports a new task


@dataclass(frozen=True)
class FBLParams(RehearsalParams):
    """The parts of FBL; published without exemplars."""

    memory: MemoryParams = field(
        default_factory=lambda: MemoryParams("uniform", exemplars_per_class=0, merge="reservoir")
    )
    # Weights by gradients have the mean 1 in each task's classes; "old": 1 in the current task's.
    weights: Literal["all", "old", "none"] = "all"
    relation: float = 1.0  # weight of the relations between classes
    leak: float = 0.1  # part of the old model's prediction in the target of a new class
    # The old model labels what has no label of an old class: with masks the background, without
    # masks exemplars, whose labels are then not used.
    pseudo: bool = True
    quantile: float = 0.2  # of the entropies of a class, up to which pseudo labels are used
    quantile_step: float = 0.1  # by which it grows in every local epoch of a task
    quantile_limit: float = 0.8
    from_background: bool = True  # with masks: a new class starts as a part of the background

    def __post_init__(self) -> None:
        """Refuse numbers outside their ranges, and parts of rehearsal that have no effect."""
        super().__post_init__()
        require_at_least(self, 0, "relation", "quantile_step")
        require_fraction(self, "leak", "quantile")
        if not self.quantile <= self.quantile_limit <= 1:
            right = f"between quantile = {self.quantile} and 1"
            raise invalid("quantile_limit", self.quantile_limit, right)
        if self.weight is not None or self.anchor:
            name = "anchor" if self.weight is None else "weight"
            raise invalid(name, getattr(self, name), "absent: `weights` has its place")


class FBL(Rehearsal):
    """FedAvg with the model received when a task begins as the teacher of its old classes.

    An image without mask is one sample, an image with a mask one for each pixel.
    """

    Params: ClassVar = FBLParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {
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
        """No old model and no entropy yet."""
        own = {"old": {}, "experience": -1, "epochs": 0, "entropy": -1.0}
        return {**super().init_client(client, server), **own}

    # --- before training

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Keep the received model if the task is new, then local SGD with it as the teacher."""
        state, scratch = client_round.state, client_round.scratch
        scratch |= {name: state[name] for name in ("old", "epochs", "entropy")}
        new = state["experience"] != client_round.experience
        if self.active and len(client_round.indices):
            self.watch(client_round, new)
        if new:
            live = self.model
            vectors = {"parameters": live.parameters, "buffers": live.buffers}
            past = self.active and client_round.experience > 0
            kept = {name: vector.cpu().clone() for name, vector in vectors.items()}
            scratch |= {"old": kept if past else {}, "epochs": 0}
            if (
                client_round.experience
                and self.runtime.dataset.masks
                and self.params.from_background
            ):
                self.start_from_background(client_round)
        if scratch["old"]:
            self.prepare_teacher(client_round)
        return super().train(client_round)

    def watch(self, client_round: ClientRound, new: bool) -> None:
        """Log the received model's mean entropy, and whether it would have told a new task."""
        images = self.runtime.dataset.x_train[client_round.indices]
        p = samples(self.runtime.outputs(images)).softmax(1)
        entropy = float(torch.special.entr(p).sum(1).mean())  # in nats, as published
        jumped = entropy - client_round.scratch["entropy"] > JUMP
        client_round.scratch["entropy"] = entropy
        told = "monitor: hits" if new else "monitor: false alarms"
        client_round.log.numbers |= {"entropy": entropy, told: float(jumped)}

    def start_from_background(self, client_round: ClientRound) -> None:
        """Share the background's part of every prediction among it and the task's classes."""
        head, classes = self.classifier.head, self.current_classes(client_round)
        weight, bias = head.weight, head.bias
        assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
        with torch.no_grad():
            weight[classes] = weight[-1].clone()
            bias[[*classes, self.runtime.classes]] = bias[-1] - math.log(len(classes) + 1)

    def prepare_teacher(self, client_round: ClientRound) -> None:
        """Load the old model, and put into `scratch` what it knows.

        Where every class returns, as with domains, all are old.
        """
        scratch, device = client_round.scratch, self.runtime.device
        past = set(client_round.plan.seen(client_round.client, client_round.experience - 1))
        current = self.current_classes(client_round)
        old = past - set(current)
        background = {self.runtime.classes} if self.runtime.dataset.masks else set()
        scratch["columns"] = torch.tensor(sorted((old or past) | background)).to(device)  # [O]
        scratch["power"] = len(old) / (len(old) + len(current))
        groups = torch.zeros(self.outputs, dtype=torch.int64)  # the background: the first task's
        own = client_round.plan.clients[client_round.client]
        for task, each in reversed(list(enumerate(own[: client_round.experience]))):
            groups[list(each.classes)] = task
        groups[current] = len(own)
        scratch["groups"] = F.one_hot(groups, len(own) + 1).float().to(device)  # [L, G]
        self.teacher.load(scratch["old"]["parameters"], scratch["old"]["buffers"])
        if self.params.pseudo:
            scratch["thresholds"] = self.thresholds(client_round)

    def current_classes(self, client_round: ClientRound) -> list[int]:
        """The classes of the task."""
        return list(client_round.plan.clients[client_round.client][client_round.task].classes)

    def thresholds(self, client_round: ClientRound) -> list[Tensor]:
        """For every epoch each class's largest entropy of a pseudo label.  # [L] each"""
        scratch, params, runtime = client_round.scratch, self.params, self.runtime
        images = runtime.dataset.x_train[client_round.indices]
        if not runtime.dataset.masks:
            images = client_round.state["memory"]["images"][self.past_indices(client_round)]
        if not len(images):
            lowest = torch.full((self.outputs,), SMALLEST_THRESHOLD).to(runtime.device)
            return [lowest] * len(runtime.each_epoch())
        logits = samples(runtime.outputs(images, self.teacher.module).to(runtime.device))
        if runtime.dataset.masks:
            logits = logits[(images[:, -1] == runtime.classes).flatten().to(runtime.device)]
        teacher = logits[:, scratch["columns"]].softmax(1)
        predicted, unsure = scratch["columns"][teacher.argmax(1)].cpu(), entropies(teacher).cpu()
        shares = [
            params.quantile + params.quantile_step * (scratch["epochs"] + epoch)
            for epoch in runtime.each_epoch()
        ]
        found = [
            class_thresholds(unsure, predicted, min(share, params.quantile_limit), self.outputs)
            for share in shares
        ]
        if found and len(unsure):
            used = (unsure <= found[-1][predicted]).float().mean()
            client_round.log.numbers["pseudo labels used"] = float(used)
        return [limits.to(runtime.device) for limits in found]

    # --- training

    def batches(self, client_round: ClientRound) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of rehearsal, with the epoch of each in `scratch`."""
        steps = math.ceil(len(client_round.indices) / self.runtime.training.batch_size)
        for step, batch in enumerate(super().batches(client_round)):
            client_round.scratch["epoch"] = step // steps
            yield batch

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """Weighted cross-entropy of labels and pseudo labels, and the relations of classes."""
        scratch, params = client_round.scratch, self.params
        if "columns" not in scratch:
            return super().loss(client_round, images, labels)
        logits = samples(self.model.module(images))  # [M, L]
        with torch.no_grad():
            teacher = samples(self.teacher.module(images))[:, scratch["columns"]].softmax(1)
            labels = self.pseudo_labels(client_round, teacher, labels)  # [M]
            members = class_members(labels, self.outputs)
            weights = self.compensation(client_round, logits, members)
        losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=UNSURE)
        loss = (weights * losses).mean()
        if params.relation:
            targets = self.relation_targets(client_round, teacher, members)
            relation = relation_loss(logits.softmax(1), targets, members, weights)
            loss = loss + params.relation * relation
        return loss

    def pseudo_labels(self, client_round: ClientRound, teacher: Tensor, labels: Tensor) -> Tensor:
        """Labels, those of the old model where an old class may be hidden, or UNSURE.  # [M]"""
        scratch = client_round.scratch
        if not self.params.pseudo:
            return labels.flatten()
        hidden = labels.flatten() == self.runtime.classes
        if not self.runtime.dataset.masks:
            hidden[len(labels) - len(scratch["soft"]) :] = True
        predicted = scratch["columns"][teacher.argmax(1)]
        limits = scratch["thresholds"][scratch["epoch"]]
        sure = entropies(teacher) <= limits[predicted]
        return torch.where(hidden, predicted.where(sure, UNSURE), labels.flatten())

    def compensation(self, client_round: ClientRound, logits: Tensor, members: Tensor) -> Tensor:
        """Each sample's gap (1 - p)^z, over the mean gap of its task's classes.  # [M]

        0 where the label is UNSURE.
        """
        scratch, used = client_round.scratch, members.any(1)
        if self.params.weights == "none":
            return used.float()
        gaps = 1 - (logits.softmax(1) * members).sum(1)  # [M]
        gaps = gaps.clamp(min=SMALLEST_GAP) ** scratch["power"]
        groups = members @ scratch["groups"]  # [M, G]
        means = gaps @ groups / groups.sum(0).clamp(min=1)  # [G]
        weights: Tensor = gaps / (groups @ means)
        if self.params.weights == "old":  # the last group is that of the current task
            weights = weights.where(groups[:, -1] == 0, 1.0)
        return weights.where(used, 0.0)

    def relation_targets(
        self, client_round: ClientRound, teacher: Tensor, members: Tensor
    ) -> Tensor:
        """The old model's prediction for old classes, of which new ones have a part.  # [M, L]"""
        columns = client_round.scratch["columns"]
        table = torch.eye(self.outputs, device=teacher.device)[columns]  # [O, L]
        spread = teacher @ table  # [M, L], 0 outside the columns
        new = 1 - members @ table.sum(0)[:, None]  # [M, 1]
        targets: Tensor = spread + new * (1 - self.params.leak) * (members - spread)
        return targets

    # --- after training

    def update_state(self, client_round: ClientRound) -> State:
        """The state of rehearsal with the old model, and how long the task has been known."""
        scratch = client_round.scratch
        kept = {name: scratch[name] for name in ("old", "entropy")}
        epochs = scratch["epochs"] + len(self.runtime.each_epoch())
        own = {**kept, "epochs": epochs, "experience": client_round.experience}
        return {**super().update_state(client_round), **own}


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
    return found.clamp(min=SMALLEST_THRESHOLD)


def class_members(labels: Tensor, classes: int) -> Tensor:
    """1 at the class of a sample, all 0 where it is UNSURE.  # [M, L]

    So all shapes depend on the batch alone, and a device does not wait for the labels.
    """
    return (labels[:, None] == torch.arange(classes, device=labels.device)).float()


def relation_loss(p: Tensor, targets: Tensor, members: Tensor, weights: Tensor) -> Tensor:
    """The mean over classes of KL(mean target || mean prediction), weighted.  # p: [M, L]"""
    shares = (members / members.sum(0).clamp(min=1)).T  # [L, M], for means of classes
    logarithms = (shares @ p).clamp(min=SMALLEST_SHARE).log()  # [L, L]
    divergences = F.kl_div(logarithms, shares @ targets, reduction="none").sum(1)  # [L]
    weight = shares @ weights  # [L]; 0 for a class without samples
    loss: Tensor = (weight * divergences).sum() / weight.sum().clamp(min=SMALLEST_SHARE)
    return loss
