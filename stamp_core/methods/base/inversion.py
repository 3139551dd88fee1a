"""Data-free replay: the server inverts its model into images, and clients distil from them."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.batches import augment
from stamp_core.client.by_class import first_per_class
from stamp_core.config.decode import require_above, require_at_least
from stamp_core.config.schema import Training
from stamp_core.core.seeding import address, generator
from stamp_core.methods.base.distillation import (
    agreeing_divergence,
    masked_cross_entropy,
    soft_cross_entropy,
    softened_divergence,
)
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Group, Log, Message, State
from stamp_core.methods.base.task_server import TaskServer
from stamp_core.models.flat import FlatModel, FlatSGD
from stamp_core.models.inversion import MappedClassifier, NormStatistics, Outputs
from stamp_core.models.networks import set_train_mode

BETAS = (0.5, 0.999)  # of Adam on a generator
STUDENT_TEMPERATURE, STUDENT_MOMENTUM = 20.0, 0.9  # of the student's distillation and its SGD
FEWEST_LEVELS = 1.0  # mean deviation of a pixel over the images, below which they are all alike

NO_STATISTICS = "synthesis: the server has no statistics of batch normalisation to match"
NOT_FINITE = "synthesis: a generator diverged, its synthesis round was ended"
STUDENT_DIVERGED = "synthesis: the student diverged, its term was left out"
ALIKE = "synthesis: the images are nearly all alike"
NO_IMAGES = "synthesis: no image is finite, the next experience has no replay"


@dataclass(frozen=True)
class InversionParams(FedAvgParams):
    """How images are synthesised after an experience, and how clients distil from them."""

    kd: float = 25.0  # weight of distillation; 0: no images are synthesised
    temperature: float = 2.0  # of distillation
    ce_classes: Literal["new", "all"] = "new"  # cross-entropy omits those in distillation, or none
    replay_batch_size: int | None = None  # null: one pass over the set in every local epoch
    images: int = 8000  # of the synthetic set
    synthesis_batch_size: int = 256  # images of a synthesis round
    latent: int = 256  # inputs of the generator
    generator_width: int = 64  # channels of its last hidden layer
    generator_steps: int = 10  # of Adam in a synthesis round
    generator_lr: float = 0.002
    statistics_weight: float = 10.0  # of matching the statistics of batch normalisation
    label_weight: float = 0.5  # of the teacher's cross-entropy on the labels
    adversarial_weight: float = 1.0  # of the disagreement of teacher and student
    warmup: int = 20  # synthesis rounds before the student is trained
    student_steps: int = 400  # of SGD in a synthesis round
    student_lr: float = 0.2
    student_weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        """Refuse negative weights, empty sets and generators without inputs or steps."""
        super().__post_init__()
        weights = "kd", "statistics_weight", "adversarial_weight", "student_weight_decay"
        require_at_least(self, 0, *weights, "warmup")
        require_above(self, 0, "temperature", "label_weight", "generator_lr", "student_lr")
        sizes = "images", "latent", "generator_width", "generator_steps", "student_steps"
        require_at_least(self, 1, *sizes)
        require_at_least(self, 2, "synthesis_batch_size")  # generators use batch statistics
        if self.replay_batch_size is not None:
            require_at_least(self, 1, "replay_batch_size")

    @property
    def saved_rounds(self) -> int:
        """The synthesis rounds whose images are needed for the set."""
        return math.ceil(self.images / self.synthesis_batch_size)


class Inversion(TaskServer):
    """FedAvg whose server synthesises images of all classes learnt so far after an experience.

    In the next one every client receives them once, with the model as a frozen teacher, and
    distils from it on the images of classes that are not in its task.
    """

    Params: ClassVar[type[Any]] = InversionParams
    group: ClassVar[Group] = "continual"
    synthesis: ClassVar[type["Synthesis"]]

    # --- the server

    def init_server(self, seed: int) -> State:
        """The initial weights, and nothing to replay."""
        return {**super().init_server(seed), "replay": {}}

    def announcement(self, server: State) -> Message:
        """The synthetic set and the teacher."""
        return dict(server["replay"])

    def end_experience(self, server: State, log: Log) -> State:
        """The server's state with a new synthetic set, if another experience will use it."""
        state = super().end_experience(server, log)
        if not self.params.kd or self.is_over(state) or not state["past"].any():
            return state
        with log.clock("synthesis"):
            images, labels = self.synthesis(self, state, log).run()
        if not len(images):
            log.events.append(NO_IMAGES)
            return {**state, "replay": {}}
        teacher = {"teacher": self.teacher_vector(state)}
        if self.shares_buffers():
            teacher["teacher buffers"] = state["buffers"]
        small = torch.uint8 if self.runtime.classes <= 256 else torch.int16
        return {**state, "replay": {"images": images, "labels": labels.to(small), **teacher}}

    def teacher_vector(self, server: State) -> Tensor:
        """The parameters of a `MappedClassifier` with the server's model.  # [P]"""
        parameters: Tensor = server["parameters"]
        return parameters

    def feature_map(self, *seed: int | str) -> nn.Module:
        """A map of features with the initial weights of `seed`; here they stay as they are."""
        return nn.Identity()

    def frozen_teacher(self, parameters: Tensor, buffers: Tensor) -> MappedClassifier:
        """A network of its own with these vectors, in evaluation mode and without gradients."""
        network = MappedClassifier(copy.deepcopy(self.classifier), self.feature_map())
        FlatModel(network.to(self.runtime.device)).load(parameters, buffers)
        return network.eval().requires_grad_(False)

    def memory_samples(self, server: State, client: State, count: int) -> dict[str, Tensor]:
        """The first `count` synthetic images of each class, with their labels."""
        if not server["replay"]:
            return {}
        images, labels = server["replay"]["images"], server["replay"]["labels"].long()
        indices = first_per_class(labels, count)
        return {"images": images[indices], "labels": labels[indices]}

    # --- a client

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model; `scratch["network"]` also maps its features."""
        super().receive(client_round)
        client_round.scratch["network"] = MappedClassifier(self.classifier, nn.Identity())

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD; with distillation if any synthetic image is of a class of another task."""
        scratch, announced = client_round.scratch, client_round.scratch["announced"]
        past = self.past_classes(client_round) & ~self.current_classes(client_round)
        if self.params.ce_classes == "new" and past.any():
            scratch["ce classes"] = ~past.to(self.runtime.device)  # [L]
        if "images" in announced and len(client_round.indices):
            images = announced["images"][past[announced["labels"].long()]]
            if len(images):
                scratch["kd classes"] = past.nonzero().flatten().to(self.runtime.device)  # [K]
                buffers = announced.get("teacher buffers", self.model.buffers)
                scratch["teacher"] = self.frozen_teacher(announced["teacher"], buffers)
                scratch["replay"] = self.replay_batches(client_round, images)
        return super().train(client_round)

    def replay_batches(self, client_round: ClientRound, images: Tensor) -> Iterator[Tensor]:
        """Augmented batches of synthetic images without end.  # [N, C, H, W]"""
        training, draw = self.runtime.training, client_round.round_id.generator("replay")
        steps = math.ceil(len(client_round.indices) / training.batch_size)  # of a local epoch
        size = self.params.replay_batch_size or math.ceil(len(images) / steps)
        read = self.runtime.reader(images.to(self.runtime.device), torch.arange(len(images)))
        while True:
            order = torch.randperm(len(images), generator=draw)
            yield from map(read, self.runtime.draw(order.split(size), draw))

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of new images and, where there is replay, of a batch of synthetic ones."""
        scratch = client_round.scratch
        if "replay" not in scratch:
            return self.new_loss(client_round, scratch["network"](images), labels)
        replay = next(scratch["replay"])
        # one mode for both passes: the backward pass may compute parts of them again
        self.runtime.train_mode(min(len(images), len(replay)))
        loss = self.new_loss(client_round, scratch["network"](images), labels)
        weight, kd = self.loss_weights(client_round)
        return weight * loss + kd * self.replay_loss(client_round, replay)

    def loss_weights(self, client_round: ClientRound) -> tuple[float, float]:
        """The weights of the loss of new images and of distillation."""
        return 1.0, self.params.kd

    def new_loss(self, client_round: ClientRound, outputs: Outputs, labels: Tensor) -> Tensor:
        """Cross-entropy on the task, among all classes or without those in distillation."""
        return masked_cross_entropy(outputs[0], labels, client_round.scratch.get("ce classes"))

    def replay_loss(self, client_round: ClientRound, images: Tensor) -> Tensor:
        """The loss of a batch of synthetic images."""
        with torch.no_grad():
            teacher = client_round.scratch["teacher"](images)
        student = client_round.scratch["network"](images)
        return self.distillation_loss(student, teacher, client_round.scratch["kd classes"])

    def distillation_loss(self, student: Outputs, teacher: Outputs, classes: Tensor) -> Tensor:
        """Distillation over past classes that are not in the client's task."""
        pair = student[0][:, classes], teacher[0][:, classes]
        return soft_cross_entropy(*pair, self.params.temperature)


class Synthesis(ABC):
    """The synthesis of images from a teacher, by a generator that is trained in rounds.

    Every round trains it on one batch of labels and keeps the images of the step with the lowest
    loss. After `warmup` rounds a student with random initial weights learns from all kept images;
    from then on the generator also looks for images on which it differs from the teacher.
    """

    first_saved = 0  # the first round whose images enter the set

    def __init__(self, method: Inversion, server: State, log: Log) -> None:
        self.method, self.runtime, self.params, self.log = (
            method,
            method.runtime,
            method.params,
            log,
        )
        seed = server["seed"], server["round"]
        self.draw = generator(*seed, "synthesis")
        self.classes = server["past"].nonzero().flatten()  # [K]
        self.columns = self.classes.to(self.runtime.device)
        self.teacher = method.frozen_teacher(method.teacher_vector(server), server["buffers"])
        self.generator = FlatModel(self.new_generator(server, *seed).to(self.runtime.device))
        self.generator.parameters.grad = self.generator.gradients  # for torch's optimiser
        self.statistics = self.matched_statistics()
        self.student: FlatModel | None = None  # of a MappedClassifier
        self.student_ready = False  # trained at least once
        if self.params.adversarial_weight:
            self.student = self.new_student(*seed)
            self.sgd = FlatSGD(self.student, self.student_training())

    @abstractmethod
    def new_generator(self, server: State, *seed: int) -> nn.Module:
        """A generator with random initial weights."""

    def new_student(self, *seed: int) -> FlatModel:
        """A student with random initial weights."""
        classifier = self.runtime.network(address(*seed, "student"))
        network = MappedClassifier(classifier, self.method.feature_map(*seed, "student's map"))
        return FlatModel(network.to(self.runtime.device))

    def student_training(self) -> Training:
        """How the student is trained: with constants of its own."""
        lr, weight_decay = self.params.student_lr, self.params.student_weight_decay
        own = {"lr": lr, "momentum": STUDENT_MOMENTUM, "weight_decay": weight_decay}
        return replace(self.runtime.training, **own)

    def matched_statistics(self) -> NormStatistics | None:
        """The statistics of the teacher's batch normalisations, if the server has them."""
        classifier = self.teacher.classifier
        if not self.params.statistics_weight:
            return None
        if not classifier.norms or not self.method.shares_buffers():
            self.log.events.append(NO_STATISTICS)
            return None
        classifier.micro_batch_size = None  # statistics are those of a whole batch
        return NormStatistics(classifier.norms)

    def run(self) -> tuple[Tensor, Tensor]:
        """The synthetic set and its labels, on the CPU.  # uint8 [n, C, H, W], int64 [n]"""
        pool = self.runtime.dataset.x_train[:0].to(self.runtime.device)
        labels = self.classes[:0]
        for round_ in range(self.first_saved + self.params.saved_rounds):
            targets = self.draw_targets(self.params.synthesis_batch_size)
            images = self.train_generator(targets.to(self.runtime.device))
            if images is not None and round_ >= self.first_saved:
                pool = torch.cat([pool, images.mul(255).round().to(torch.uint8)])
                labels = torch.cat([labels, self.classes[targets]])
            if self.student and len(pool) and round_ >= self.params.warmup:
                self.train_student(self.student, pool)
        pool, labels = pool[: self.params.images], labels[: self.params.images]
        if len(pool):
            self.examine(pool, labels)
        return pool.cpu(), labels

    def draw_targets(self, count: int) -> Tensor:
        """The labels of a batch as places in `classes`, drawn uniformly.  # [N]"""
        return torch.randint(len(self.classes), (count,), generator=self.draw)

    def prepare(self, images: Tensor) -> Tensor:
        """Images from 0 to 255, augmented and normalised as in local training."""
        return self.runtime.normalise(augment(images, self.runtime.training, self.draw))

    @torch.no_grad()
    def examine(self, images: Tensor, labels: Tensor) -> None:
        """Record how many images the teacher classifies as their labels, and a collapse."""
        parts = images.split(self.params.synthesis_batch_size)
        outputs = [self.logits(self.teacher(self.runtime.normalise(part))) for part in parts]
        predicted = self.classes[torch.cat(outputs).argmax(1).cpu()]
        self.log.numbers["synthesis accuracy"] = float((predicted == labels).double().mean())
        if images.float().std(0, correction=0).mean() < FEWEST_LEVELS:
            self.log.events.append(ALIKE)

    def logits(self, outputs: Outputs) -> Tensor:
        """The logits of the classes learnt so far, among which all losses are.  # [N, K]"""
        return outputs[0][:, self.columns]

    # --- the generator

    @abstractmethod
    def start_round(self, targets: Tensor) -> tuple[Tensor, torch.optim.Optimizer]:
        """The generator's inputs for a batch, and the optimiser of the round."""

    def train_generator(self, targets: Tensor) -> Tensor | None:
        """The images of the best step of a synthesis round, in [0, 1]; None if no loss is finite.

        A generator that diverges goes back to its weights of before the round.
        """
        before, best, lowest = self.generator.parameters.clone(), None, math.inf
        inputs, optimiser = self.start_round(targets)
        trained = [*self.generator.module.parameters(), *([inputs] if inputs.requires_grad else ())]
        for _ in range(self.params.generator_steps):
            images = self.generator.module(inputs)
            loss = self.generator_loss(images, targets)
            value = float(loss.detach())
            if value < lowest:
                best, lowest = images.detach(), value
            optimiser.zero_grad(set_to_none=False)
            loss.backward(inputs=trained)
            self.after_backward()
            optimiser.step()
        if math.isfinite(value) and self.generator.parameters.isfinite().all():
            self.end_round()
        else:
            self.log.events.append(NOT_FINITE)
            self.generator.load(before)
        return best

    def generator_loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """The loss of images with pixels in [0, 1] for a batch of labels."""
        inputs = self.prepare(images * 255)
        teacher = self.teacher(inputs)
        loss = self.teacher_loss(teacher, targets)
        if self.statistics:
            loss = loss + self.params.statistics_weight * self.statistics.loss()
        if self.student and self.student_ready:
            pair = self.logits(self.student.module(inputs)), self.logits(teacher)
            loss = loss - self.params.adversarial_weight * agreeing_divergence(*pair)
        return loss

    def teacher_loss(self, teacher: Outputs, targets: Tensor) -> Tensor:
        """The teacher's loss on the labels, among the classes learnt so far."""
        weight: float = self.params.label_weight
        return weight * F.cross_entropy(self.logits(teacher), targets)

    def after_backward(self) -> None:  # noqa: B027 - a hook that most do not need
        """Called after the gradient of every step."""

    def end_round(self) -> None:
        """Called after a synthesis round whose losses and weights are finite."""
        if self.statistics:
            self.statistics.end_round()

    # --- the student

    def train_student(self, student: FlatModel, pool: Tensor) -> None:
        """Train the student on the images synthesised so far.  # uint8 [n, C, H, W]"""
        network = student.module
        assert isinstance(network, MappedClassifier)
        for _ in range(self.params.student_steps):
            order = torch.randperm(len(pool), generator=self.draw)
            batch = pool[order[: self.params.synthesis_batch_size].to(pool.device)]
            inputs = self.prepare(batch)
            with torch.no_grad():
                teacher = self.teacher(inputs)
            set_train_mode(network.classifier, update_norms=len(batch) > 1)
            student.gradients.zero_()
            self.student_loss(network(inputs), teacher).backward()
            self.sgd.step()
        network.eval()
        self.student_ready = bool(student.parameters.isfinite().all())
        if not self.student_ready:
            self.student = None
            self.log.events.append(STUDENT_DIVERGED)

    def student_loss(self, student: Outputs, teacher: Outputs) -> Tensor:
        """The student's divergence from the teacher, among the classes learnt so far."""
        pair = self.logits(student), self.logits(teacher)
        return softened_divergence(*pair, STUDENT_TEMPERATURE)
