"""Data-free replay: the server inverts its model into images, and clients distil from them."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import BatchReader, ClientRuntime
from stamp_core.config.limits import NonNegative, PositiveInt
from stamp_core.core.seeding import address
from stamp_core.methods.base.method import ClientRound, Group, Log, Message, State
from stamp_core.models.flat import FlatModel
from workbench.methods.base.distillation import masked_cross_entropy, soft_cross_entropy
from workbench.methods.base.synthesis import (
    MappedClassifier,
    Outputs,
    Source,
    Synthesis,
    SynthesisParams,
)
from workbench.methods.base.task_server import TaskContext, TaskServer

TEMPERATURE = 2.0  # of distillation
NO_IMAGES = "synthesis: no image is finite, the next experience has no replay"


@dataclass(frozen=True)
class DataFreeParams(SynthesisParams):
    """How images are synthesised after an experience, and how clients distil from them."""

    kd: NonNegative = 25.0  # weight of distillation; 0: no images are synthesised
    ce_classes: Literal["new", "all"] = "new"  # cross-entropy omits those in distillation, or none
    replay_batch_size: PositiveInt | None = None  # null: one pass over the set in every local epoch


@dataclass
class Replay:
    """How a client distils on synthetic images."""

    teacher: MappedClassifier
    classes: Tensor  # [K], past ones that are not in the task
    batches: Iterator[Tensor]  # of images, without end
    new_weight: float  # of the loss of new images
    past_weight: float  # of the loss of synthetic ones


@dataclass
class DataFreeContext(TaskContext):
    ce_classes: Tensor | None  # bool [L], among which cross-entropy is; None: all
    replay: Replay | None


class DataFree(TaskServer, ABC):
    """FedAvg whose server synthesises images of all classes learnt so far after an experience.

    In the next one every client receives them once, with the model as a frozen teacher, and
    distils from it on the images of classes that are not in its task.
    """

    Params: ClassVar[type[Any]] = DataFreeParams
    group: ClassVar[Group] = "continual"
    images: ClassVar = True

    def __init__(self, params: DataFreeParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.network = MappedClassifier(self.classifier, nn.Identity())  # the live model

    def feature_map(self, *seed: int | str) -> nn.Module:
        """A map of features with the initial weights of `seed`; here they stay as they are."""
        return nn.Identity()

    def init_server(self, seed: int) -> State:
        return {**super().init_server(seed), "replay": {}}

    def announcement(self, server: State) -> Any:
        """Once made: "images", "labels", "teacher" and, where shared, "teacher buffers"."""
        return server["replay"]

    def end_experience(self, server: Any, log: Log) -> State:
        """The server's state with a new synthetic set, if another experience will use it."""
        state = super().end_experience(server, log)
        if not self.params.kd or self.is_over(state) or not state["past"].any():
            return state
        with log.clock("synthesis"):
            images, labels = self.synthesis(self.source(state), state, log).run()
        if not len(images):
            log.events.append(NO_IMAGES)
            return {**state, "replay": {}}
        small = torch.uint8 if self.runtime.classes <= 256 else torch.int16
        replay = {"images": images, "labels": labels.to(small), "teacher": self.teacher(state)}
        if self.shares_buffers():
            replay["teacher buffers"] = state["buffers"]
        return {**state, "replay": replay}

    @abstractmethod
    def synthesis(self, source: Source, server: Any, log: Log) -> Synthesis:
        """The method's synthesis."""

    def source(self, server: State) -> Source:
        seed = server["seed"], server["round"]
        student = None
        if self.params.adversarial_weight:
            classifier = self.runtime.network(address(*seed, "student"))
            student = MappedClassifier(classifier, self.feature_map(*seed, "student's map"))
        teacher = self.frozen_teacher(self.teacher(server), server["buffers"])
        classes = server["past"].nonzero().flatten()
        return Source(seed, classes, teacher, student, self.shares_buffers())

    def teacher(self, server: Any) -> Tensor:
        """The parameters of a `MappedClassifier` with the server's model.  # [P], or more"""
        return torch.cat([server[name] for name in ("parameters", *self.extra_networks)])

    def frozen_teacher(self, parameters: Tensor, buffers: Tensor) -> MappedClassifier:
        """A network of its own with these vectors, in evaluation mode and without gradients."""
        network = MappedClassifier(copy.deepcopy(self.classifier), self.feature_map())
        FlatModel(network.to(self.runtime.device)).load(parameters, buffers)
        return network.eval().requires_grad_(False)

    def remembered(self, server: State, client: State) -> Any:
        return server["replay"]

    def start(self, client_round: ClientRound) -> Any:
        announced = self.announced(client_round)
        past = self.past_classes(announced) & ~self.current_classes(client_round)
        masked = self.params.ce_classes == "new" and bool(past.any())
        ce_classes = ~past.to(self.runtime.device) if masked else None
        return DataFreeContext(announced, ce_classes, self.replay(client_round, announced, past))

    def replay(self, client_round: ClientRound, announced: Message, past: Tensor) -> Replay | None:
        if "images" not in announced or not len(client_round.indices):
            return None
        images = announced["images"][past[announced["labels"].long()]]
        if not len(images):
            return None
        buffers = announced.get("teacher buffers", self.model.buffers)
        teacher = self.frozen_teacher(announced["teacher"], buffers)
        classes = past.nonzero().flatten().to(self.runtime.device)
        weights = self.loss_weights(len(classes), len(client_round.classes))
        return Replay(teacher, classes, self.replay_batches(client_round, images), *weights)

    def loss_weights(self, past: int, new: int) -> tuple[float, float]:
        """The weights of the losses of new images and of distillation, by numbers of classes."""
        return 1.0, self.params.kd

    def replay_batches(self, client_round: ClientRound, images: Tensor) -> Iterator[Tensor]:
        """Augmented batches of synthetic images without end.  # [N, C, H, W]"""
        draw = client_round.generator("replay")
        steps = math.ceil(len(client_round.indices) / self.runtime.training.batch_size)
        size = self.params.replay_batch_size or math.ceil(len(images) / steps)  # of a local epoch
        every = torch.arange(len(images))
        reader = BatchReader(self.runtime, images.to(self.runtime.device), every, every)
        while True:
            order = torch.randperm(len(images), generator=draw)
            yield from (batch.images for batch in reader.batches(order.split(size), draw))

    def loss(self, batch: Batch, context: Any) -> Tensor:
        replay: Replay | None = context.replay
        if replay is None:
            return self.new_loss(self.network(batch.images), batch.targets, context)
        images = next(replay.batches)
        new = self.new_loss(self.network(batch.images), batch.targets, context)
        with torch.no_grad():
            teacher = replay.teacher(images)
        self.runtime.train_mode(len(images))
        past = self.distillation_loss(self.network(images), teacher, replay.classes)
        # the backward pass may compute parts of the larger batch again
        self.runtime.train_mode(max(len(batch), len(images)))
        return replay.new_weight * new + replay.past_weight * past

    def new_loss(self, outputs: Outputs, labels: Tensor, context: Any) -> Tensor:
        return masked_cross_entropy(outputs[0], labels, context.ce_classes)

    def distillation_loss(self, student: Outputs, teacher: Outputs, classes: Tensor) -> Tensor:
        """Distillation over past classes that are not in the client's task."""
        pair = student[0][:, classes], teacher[0][:, classes]
        return soft_cross_entropy(*pair, TEMPERATURE)
