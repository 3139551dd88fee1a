"""GLFC (Dong et al., 2022), LGA (Dong et al., 2023): compensated gradients, an old global model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.by_class import class_means, first_per_class
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative, NonNegativeInt, Positive
from stamp_core.core.arithmetic import distances, sqrt
from stamp_core.coresets.selection.base import Candidates
from stamp_core.coresets.selection.herding import choose
from stamp_core.methods.base.method import ClientRound, Message, State
from stamp_core.models.flat import FlatModel
from workbench.methods.base.exemplar_lists import ExemplarLists, empty_lists
from workbench.methods.base.task_server import TaskContext, unpack_bits
from workbench.methods.glfc.proxy import OLD, ProxyParams, ProxyServer

SMALLEST_GAP = torch.finfo(torch.float32).eps  # of 1 - p: weights stay defined where p is 1
LOG_OFFSET = 1e-5  # in the entropy, as published


@dataclass(frozen=True)
class GLFCParams(ProxyParams):
    """The parts of GLFC; LGA has other `groups`, weights of 1 and a `proxy_init`."""

    loss: Literal["binary", "cross_entropy"] = "binary"  # of labels; the second is FedAvg's
    columns: Literal["known", "all"] = "known"  # of binary losses: classes reported so far, or all
    # of the loss; published: a local learning rate of 2, so 2 / training.lr
    scale: Positive = 1.0
    # Groups of classes in each of which an image's weight has the mean 1: past classes and current
    # ones, or those of each past task and the current ones (LGA, with weights in distillation too).
    groups: Literal["none", "old_new", "tasks"] = "old_new"
    new_weight: Positive = 0.5  # of the loss of labels, where there is an old model; LGA: 1
    exemplars: NonNegativeInt = 2000  # of all classes together, M
    signal: Literal["entropy", "oracle"] = "entropy"  # of a new task; oracle: it is always known
    threshold: NonNegative = 1.2  # of the entropy's increase

    def __post_init__(self) -> None:
        if self.loss == "cross_entropy" and (self.groups != "none" or self.old_weight):
            raise invalid("loss", self.loss, "'binary' unless groups is none and old_weight 0")


class KnownTasks(TypedDict):
    """What a client knows of its tasks."""

    learnt: Tensor  # int64 [L], in the how manieth task, from 0; -1 if not yet
    current: Tensor  # bool [L], the classes of the latest task
    waiting: Tensor  # bool [L], those of the task before, until there is a signal
    entropy: float  # of the received model on the task's images
    old: Message  # the old model, if there is one


@dataclass
class GLFCContext(TaskContext):
    known: KnownTasks
    signal: bool  # of a new task
    columns: Tensor  # int64 [K], the classes in the loss
    groups: Tensor | None  # [L, G], of which each class is a member
    distilled: Tensor | None  # bool [L], the classes that have the old model's outputs as targets


class GLFC(ProxyServer):
    """FedAvg with weights by groups of classes and distillation from the best old global model.

    Where a client detects a new task, it adds the classes of the task before to those learnt,
    changes to the newest old model and sends gradients of its prototypes.
    """

    Params: ClassVar = GLFCParams
    fedavg_equivalent: ClassVar = {
        "loss": "cross_entropy",
        "groups": "none",
        "old_weight": 0.0,
        "exemplars": 0,
        "signal": "oracle",
    }
    group = "continual"

    def __init__(self, params: GLFCParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.one_hot = torch.eye(runtime.classes, device=runtime.device)
        if params.old_weight:  # a second live model, loaded before each use
            self.teacher = FlatModel(runtime.network(seed=0).to(runtime.device).eval())

    def init_client(self, client: int, server: State) -> State:
        none = torch.zeros(self.runtime.classes, dtype=torch.bool)
        known: KnownTasks = {
            "learnt": torch.full((self.runtime.classes,), -1),
            "current": none,
            "waiting": none.clone(),
            "entropy": 0.0,
            "old": {},
        }
        memory = empty_lists(self.runtime.dataset.x_train)
        return {"memory": memory, "known": known, "experiences": []}

    def start(self, client_round: ClientRound) -> GLFCContext:
        announced = self.announced(client_round)
        known, signal = self.detect_task(client_round, announced)
        if signal:
            announced = {"past": announced["past"]}  # the old model is known now
        columns = known["current"] | self.past_classes(announced) | (self.params.columns == "all")
        return GLFCContext(
            announced,
            known,
            signal,
            columns.nonzero().flatten().to(self.runtime.device),
            self.groups(known),
            self.load_teacher(client_round, known),
        )

    def detect_task(self, client_round: ClientRound, announced: Message) -> tuple[KnownTasks, bool]:
        """What the client knows of its tasks now, and whether it has detected a new one."""
        before: KnownTasks = client_round.state["known"]
        known: KnownTasks = {**before}
        signal = client_round.first
        if signal:
            known["waiting"] = known["current"]
            known["current"] = self.current_classes(client_round)
        if self.params.signal == "entropy" and client_round.classes:  # else it has nothing new
            known["entropy"] = self.entropy(client_round, known["entropy"])
            signal = known["entropy"] - before["entropy"] > self.params.threshold
        if signal:
            learnt = known["learnt"]
            known["learnt"] = torch.where(known["waiting"], learnt.max() + 1, learnt)
            known["waiting"] = torch.zeros_like(known["waiting"])
            old = {k.removeprefix(OLD): v for k, v in announced.items() if k.startswith(OLD)}
            known["old"] = old or known["old"]
        return known, signal

    def entropy(self, client_round: ClientRound, before: float) -> float:
        if not len(client_round.indices):
            return before
        p = self.runtime.outputs(self.runtime.train_images(client_round.indices)[0]).softmax(1)
        entropy = float(-(p * (p + LOG_OFFSET).log()).sum(1).mean())
        client_round.log.numbers["entropy"] = entropy
        return entropy

    def groups(self, known: KnownTasks) -> Tensor | None:
        """The group of each class, one-hot; None if all images have one weight.  # [L, G]"""
        learnt = known["learnt"]
        if self.params.groups == "none" or not (learnt >= 0).any():
            return None
        own = learnt + 1 if self.params.groups == "tasks" else (learnt >= 0).long()
        return F.one_hot(own.masked_fill(known["current"], 0)).float().to(self.runtime.device)

    def load_teacher(self, client_round: ClientRound, known: KnownTasks) -> Tensor | None:
        """Load the old model; the classes that are distilled from it, if any.  # bool [L]"""
        old = known["old"]
        if not old:
            return None
        distilled = unpack_bits(old["classes"], self.runtime.classes) & ~known["current"]
        if not distilled.any():
            return None
        buffers = client_round.state.get("buffers", old.get("buffers", self.runtime.untrained))
        self.teacher.load(old["parameters"], buffers)
        return distilled.to(self.runtime.device)

    def batches(self, client_round: ClientRound, context: GLFCContext) -> Iterator[Batch]:
        used = self.learnt_elsewhere(client_round, context)
        if not used.any() or not self.sample_count(client_round, context):
            return super().batches(client_round, context)
        images, labels = self.runtime.train_images(client_round.indices)
        images = torch.cat([images, client_round.state["memory"]["images"][used].to(images)])
        labels = torch.cat([labels, client_round.state["memory"]["labels"][used].to(labels)])
        return self.runtime.epochs(client_round, images, labels, torch.arange(len(labels)))

    def sample_count(self, client_round: ClientRound, context: GLFCContext) -> int:
        if client_round.classes:
            return len(client_round.indices)
        return int(self.learnt_elsewhere(client_round, context).sum())

    def learnt_elsewhere(self, client_round: ClientRound, context: GLFCContext) -> Tensor:
        """Which exemplars are those of other tasks whose classes are learnt.  # bool [m]"""
        memory: ExemplarLists = client_round.state["memory"]
        learnt = context.known["learnt"][memory["labels"]] >= 0
        return learnt & (memory["tasks"] != client_round.task)

    def loss(self, batch: Batch, context: GLFCContext) -> Tensor:
        """The mean over images and columns of weighted binary cross-entropies, or FedAvg's loss."""
        if self.params.loss == "cross_entropy":
            loss: Tensor = self.params.scale * super().loss(batch, context)
            return loss
        logits = self.model.module(batch.images)  # [n, L]
        targets = self.one_hot[batch.targets]  # [n, L]
        weights = self.compensation(logits.detach(), batch.targets, context)  # [n, 1]
        if context.distilled is not None:
            old = self.old_targets(batch.images, targets, context.distilled)
            weights, targets = self.add_distillation(weights, targets, old)
        targets = targets[:, context.columns]
        weights = (self.params.scale * weights).expand_as(targets)
        return F.binary_cross_entropy_with_logits(logits[:, context.columns], targets, weights)

    def compensation(self, logits: Tensor, labels: Tensor, context: GLFCContext) -> Tensor:
        """Each image's gap, over the mean gap of its group in the batch.  # [n, 1]

        A gap is 1 - p; with groups of tasks, (1 - p) ** (past / (past + 1)).
        """
        if context.groups is None:
            return torch.ones(len(labels), 1, device=logits.device)
        gaps = logits.gather(1, labels[:, None]).neg().sigmoid().clamp(min=SMALLEST_GAP)  # [n, 1]
        if self.params.groups == "tasks":
            past = int(context.known["learnt"].max()) + 1
            gaps = sqrt(gaps) if past == 1 else gaps ** (past / (past + 1))  # ** 0.5 is MKL's root
        members = context.groups[labels]  # [n, G]
        means = (gaps * members).sum(0) / members.sum(0).clamp(min=1)  # [G]
        weights: Tensor = gaps / (members * means).sum(1, keepdim=True)
        return weights

    def old_targets(self, images: Tensor, targets: Tensor, distilled: Tensor) -> Tensor:
        with torch.no_grad():
            outputs = self.teacher.module(images).sigmoid()
        return torch.where(distilled, outputs, targets)

    def add_distillation(
        self, weights: Tensor, targets: Tensor, old_targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The weights and targets of the loss of labels and that of distillation together.

        Cross-entropies are linear in targets: those of y with weight a and of y' with weight b are
        together that of (a y + b y') / (a + b) with weight a + b.
        """
        shared = weights if self.params.groups == "tasks" else torch.ones_like(weights)
        new = self.params.new_weight * weights
        old = self.params.old_weight * shared
        return new + old, (new * targets + old * old_targets) / (new + old)

    def update_state(self, client_round: ClientRound, context: GLFCContext) -> State:
        state = {**super().update_state(client_round, context), "known": context.known}
        if self.params.exemplars and self.is_due(client_round):
            with client_round.log.clock("exemplars"):
                state["memory"] = self.updated_memory(client_round, context)
        return {**state, "experiences": client_round.recorded}

    def updated_memory(self, client_round: ClientRound, context: GLFCContext) -> ExemplarLists:
        """A herded list for each class of this task, and those of other tasks that are learnt.

        All have an equal share of the budget. Where a class returns, its exemplars from both tasks
        stay. A list that must become shorter loses the exemplars that were chosen last.
        """
        stay = self.learnt_elsewhere(client_round, context)
        lists = {name: part[stay] for name, part in client_round.state["memory"].items()}
        images = self.runtime.dataset.x_train[client_round.indices]
        labels = self.runtime.dataset.y_train[client_round.indices]
        keys = (lists["tasks"] << 32) + lists["labels"]
        classes = labels.unique().tolist()
        share = self.params.exemplars // max(1, len(keys.unique()) + len(classes))
        kept = first_per_class(keys, share)
        features = self.normalised_features(images)
        herded = [_herd(images, labels, features, label, share) for label in classes]
        chosen = torch.cat([labels[:0], *herded])
        tasks = torch.full_like(chosen, client_round.task)
        new = {"images": images[chosen], "labels": labels[chosen], "tasks": tasks}
        return {name: torch.cat([lists[name][kept], new[name]]) for name in new}

    def normalised_features(self, images: Tensor) -> Tensor:
        return F.normalize(self.runtime.outputs(images, self.classifier.encode))

    def upload(self, client_round: ClientRound, context: GLFCContext) -> Message:
        message = super().upload(client_round, context)
        asked = self.params.proxy == "dlg" and self.params.old_weight > 0 and context.signal
        if not asked or not len(client_round.indices):
            return message
        with client_round.log.clock("prototypes"):
            images, labels = self.perturbed_prototypes(client_round, context.columns)
            gradients = self.encoder(client_round.seed).gradients(images, labels)
        return {**message, "gradients": gradients.cpu()}

    def perturbed_prototypes(
        self, client_round: ClientRound, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The image nearest to each class's mean feature, perturbed by SGD, and the classes."""
        data = self.runtime.dataset
        images = data.x_train[client_round.indices]
        labels = data.y_train[client_round.indices]
        features = self.normalised_features(images)
        means, classes = class_means(features, labels)
        apart = distances(means, features)  # [classes, n]
        nearest = apart.masked_fill(classes[:, None] != labels, torch.inf).argmin(1)
        pixels = images[nearest].to(self.runtime.device) / 255
        classes = classes.to(self.runtime.device)
        targets = self.one_hot[classes][:, columns]
        module = self.model.module.eval()
        for _ in range(self.params.perturb_steps):
            pixels.requires_grad_()
            logits = module(self.runtime.normalise(255 * pixels))[:, columns]
            each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            slope = torch.autograd.grad(each.mean(1).sum(), pixels)[0]
            pixels = pixels.detach() - self.params.perturb_lr * slope
        return pixels, classes


def _herd(images: Tensor, labels: Tensor, features: Tensor, label: int, count: int) -> Tensor:
    """Indices of the images of one class that herding chooses, in order of choice.  # [count]"""
    own = (labels == label).nonzero().flatten()
    mean = features[own].double().mean(0)
    unused = torch.Generator()  # herding draws nothing
    candidates = Candidates(images[own], features[own], mean, torch.zeros_like(mean), count, unused)
    return own[choose(candidates)]
