"""GLFC (Dong et al., 2022), LGA (Dong et al., 2023): compensated gradients, an old global model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.by_class import first_per_class
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_above, require_at_least
from stamp_core.methods.base.exemplar_lists import ExemplarLists, empty_lists, updated_lists
from stamp_core.methods.base.method import ClientRound, State
from stamp_core.methods.base.proxy_server import OLD, ProxyParams, ProxyServer
from stamp_core.methods.base.task_server import unpack_bits
from stamp_core.models.flat import FlatModel

SMALLEST_GAP = torch.finfo(torch.float32).eps  # of 1 - p: weights stay defined where p is 1
LOG_OFFSET = 1e-5  # in the entropy, as published
DETECTED = ("learnt", "current", "waiting", "entropy", "old")  # what a client knows of its tasks


@dataclass(frozen=True)
class GLFCParams(ProxyParams):
    """The parts of GLFC; LGA has other `groups`, weights of 1 and a `proxy_init`."""

    loss: Literal["binary", "cross_entropy"] = "binary"  # of labels; the second is FedAvg's
    columns: Literal["known", "all"] = "known"  # of binary losses: classes reported so far, or all
    scale: float = 1.0  # of the loss; published: a local learning rate of 2, so 2 / training.lr
    # Groups of classes in each of which an image's weight has the mean 1: past classes and current
    # ones, or those of each past task and the current ones (LGA, with weights in distillation too).
    groups: Literal["none", "old_new", "tasks"] = "old_new"
    new_weight: float = 0.5  # of the loss of labels, where there is an old model; LGA: 1
    exemplars: int = 2000  # of all classes together, M
    signal: Literal["entropy", "oracle"] = "entropy"  # of a new task; oracle: it is always known
    threshold: float = 1.2  # of the entropy's increase

    def __post_init__(self) -> None:
        """Refuse numbers outside their ranges."""
        super().__post_init__()
        require_above(self, 0, "scale", "new_weight")
        require_at_least(self, 0, "exemplars", "threshold")
        if self.loss == "cross_entropy" and (self.groups != "none" or self.old_weight):
            raise invalid("loss", self.loss, "'binary' unless groups is none and old_weight 0")


class GLFC(ProxyServer):
    """FedAvg with weights by groups of classes and distillation from the best old global model.

    Where a client detects a new task, it adds the classes of the task before to those learnt,
    changes to the newest old model and sends gradients of its prototypes.
    """

    Params: ClassVar = GLFCParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {
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
        """No exemplars, no class learnt, no old model."""
        none = torch.zeros(self.runtime.classes, dtype=torch.bool)
        return {
            "memory": empty_lists(self.runtime.dataset.x_train),
            "learnt": torch.full((self.runtime.classes,), -1),  # as the how manieth task, from 0
            "current": none,  # classes of the latest task
            "waiting": none.clone(),  # those of the task before, until there is a signal
            "entropy": 0.0,
            "old": {},
            "experience": -1,
        }

    # --- before training

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Detect a new task, then local SGD on its images and the exemplars of other tasks."""
        self.detect_task(client_round)
        self.prepare_loss(client_round)
        return super().train(client_round)

    def detect_task(self, client_round: ClientRound) -> None:
        """Put into `scratch` what the client knows of its tasks now."""
        state, scratch = client_round.state, client_round.scratch
        new = state["experience"] != client_round.experience
        scratch |= {name: state[name] for name in DETECTED}
        if new:
            scratch |= {"waiting": state["current"], "current": self.current_classes(client_round)}
        scratch["signal"] = new if self.params.signal == "oracle" else self.jumped(client_round)
        if not scratch["signal"]:
            return
        learnt, announced = state["learnt"], scratch["announced"]
        scratch["learnt"] = torch.where(scratch["waiting"], learnt.max() + 1, learnt)
        scratch["waiting"] = torch.zeros_like(scratch["waiting"])
        offered = {k.removeprefix(OLD): v for k, v in announced.items() if k.startswith(OLD)}
        scratch["old"] = offered or state["old"]
        scratch["announced"] = {"past": announced["past"]}

    def jumped(self, client_round: ClientRound) -> bool:
        """Whether the received model's entropy on the task's images has jumped since last round."""
        if not len(client_round.indices):
            return False
        p = self.runtime.outputs(self.runtime.train_images(client_round.indices)[0]).softmax(1)
        entropy = float(-(p * (p + LOG_OFFSET).log()).sum(1).mean())
        client_round.scratch["entropy"] = client_round.log.numbers["entropy"] = entropy
        jump: float = entropy - client_round.state["entropy"]
        return jump > float(self.params.threshold)

    def prepare_loss(self, client_round: ClientRound) -> None:
        """Put into `scratch` the columns and groups of the loss, and load the old model."""
        scratch, params, device = client_round.scratch, self.params, self.runtime.device
        current, learnt, old = scratch["current"], scratch["learnt"], scratch["old"]
        known = current | self.past_classes(client_round) | (params.columns == "all")
        scratch["columns"] = slice(None) if known.all() else known.nonzero().flatten().to(device)
        if params.groups != "none" and (learnt >= 0).any():
            own = learnt + 1 if params.groups == "tasks" else (learnt >= 0).long()
            scratch["groups"] = F.one_hot(own.masked_fill(current, 0)).float().to(device)  # [L, G]
        if not old:
            return
        distilled = unpack_bits(old["classes"], self.runtime.classes) & ~current
        if distilled.any():
            buffers = client_round.state.get("buffers", old.get("buffers", self.runtime.untrained))
            self.teacher.load(old["parameters"], buffers)
            scratch["distilled"] = distilled.to(device)  # [L]

    # --- training

    def batches(self, client_round: ClientRound) -> Iterator[tuple[Tensor, Tensor]]:
        """The local epochs over the task's images and the exemplars of other tasks together."""
        memory, indices = client_round.state["memory"], client_round.indices
        learnt = client_round.scratch["learnt"][memory["labels"]] >= 0
        used = learnt & (memory["tasks"] != client_round.task)
        if not used.any() or not len(indices):
            return super().batches(client_round)
        images, labels = self.runtime.train_images(indices)
        images = torch.cat([images, memory["images"][used].to(images)])
        labels = torch.cat([labels, memory["labels"][used].to(labels)])
        return self.runtime.epochs(client_round.round_id, images, labels, torch.arange(len(labels)))

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """The mean over images and columns of weighted binary cross-entropies, or FedAvg's loss."""
        scratch, params = client_round.scratch, self.params
        if params.loss == "cross_entropy":
            loss: Tensor = params.scale * super().loss(client_round, images, labels)
            return loss
        logits, targets = self.model.module(images), self.one_hot[labels]  # [n, L]
        weights = self.compensation(client_round, logits.detach(), labels)  # [n, 1]
        if "distilled" in scratch:
            weights, targets = self.add_distillation(client_round, images, weights, targets)
        logits, targets = logits[:, scratch["columns"]], targets[:, scratch["columns"]]
        weights = (params.scale * weights).expand_as(targets)
        return F.binary_cross_entropy_with_logits(logits, targets, weights)

    def compensation(self, client_round: ClientRound, logits: Tensor, labels: Tensor) -> Tensor:
        """Each image's gap 1 - p, over the mean gap of its group in the batch.  # [n, 1]"""
        if "groups" not in client_round.scratch:
            return torch.ones(len(labels), 1, device=logits.device)
        gaps = logits.gather(1, labels[:, None]).neg().sigmoid().clamp(min=SMALLEST_GAP)  # [n, 1]
        if self.params.groups == "tasks":
            past = int(client_round.scratch["learnt"].max()) + 1
            gaps = gaps ** (past / (past + 1))
        members = client_round.scratch["groups"][labels]  # [n, G]
        means = (gaps * members).sum(0) / members.sum(0).clamp(min=1)  # [G]
        weights: Tensor = gaps / (members * means).sum(1, keepdim=True)
        return weights

    def add_distillation(
        self, client_round: ClientRound, images: Tensor, weights: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The weights and targets of the loss of labels and that of distillation together.

        In distillation the old model's outputs are the targets of past classes. Cross-entropies are
        linear in targets: those of y with weight a and of y' with weight b are together that of
        (a y + b y') / (a + b) with weight a + b.
        """
        with torch.no_grad():
            outputs = self.teacher.module(images).sigmoid()
        old_targets = torch.where(client_round.scratch["distilled"], outputs, targets)
        shared = weights if self.params.groups == "tasks" else torch.ones_like(weights)
        new, old = self.params.new_weight * weights, self.params.old_weight * shared
        return new + old, (new * targets + old * old_targets) / (new + old)

    def label_losses(self, client_round: ClientRound, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean binary cross-entropy of each image's label over the columns.  # [n]"""
        columns = client_round.scratch["columns"]
        parts = logits[:, columns], self.one_hot[labels][:, columns]
        return F.binary_cross_entropy_with_logits(*parts, reduction="none").mean(1)

    # --- after training

    def update_state(self, client_round: ClientRound) -> State:
        """What the client knows of its tasks and, after the last round of one, its exemplars.

        Where clients may miss the last round, they also choose exemplars in their first round.
        """
        scratch, training = client_round.scratch, self.runtime.training
        known = {name: scratch[name] for name in DETECTED}
        state = {**super().update_state(client_round), **known}
        first = state["experience"] != client_round.experience
        may_miss = training.participation < 1 or training.dropout > 0
        if self.params.exemplars and (client_round.last or (first and may_miss)):
            with client_round.log.clock("exemplars"):
                state["memory"] = self.updated_memory(client_round)
        return {**state, "experience": client_round.experience}

    def updated_memory(self, client_round: ClientRound) -> ExemplarLists:
        """The exemplars of other tasks whose classes are learnt, and those of this task."""
        memory, task, data = client_round.state["memory"], client_round.task, self.runtime.dataset
        learnt = client_round.scratch["learnt"][memory["labels"]] >= 0
        stay = learnt & (memory["tasks"] != task)
        lists = {name: part[stay] for name, part in memory.items()}
        images, labels = data.x_train[client_round.indices], data.y_train[client_round.indices]
        features = self.normalised_features(images)
        return updated_lists(lists, images, labels, features, task, self.params.exemplars)

    def memory_samples(self, server: State, client: State, count: int) -> dict[str, Tensor]:
        """Up to `count` reconstructed images of each class; if there are none, exemplars."""
        if len(server["monitor"]["labels"]):
            return super().memory_samples(server, client, count)
        memory = client["memory"]
        indices = first_per_class(memory["labels"], count)
        return {name: memory[name][indices] for name in ("images", "labels")}
