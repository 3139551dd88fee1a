"""Images synthesised from a classifier, by a generator that is trained in rounds."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.batches import augment
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.limits import NonNegative, NonNegativeInt, Positive, PositiveInt, at_least
from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import FedAvgParams, Log
from stamp_core.models.flat import FlatModel, FlatSGD
from stamp_core.models.networks import Classifier, set_train_mode
from workbench.adam import FlatAdam
from workbench.methods.base.distillation import agreeing_divergence, softened_divergence

STUDENT_TEMPERATURE = 20.0  # of the student's distillation
LABEL_WEIGHT = 0.5  # of the teacher's cross-entropy on the labels
STUDENT_MOMENTUM = 0.9  # of its SGD
STATISTICS_MOMENTUM = 0.9  # share of earlier synthesis rounds in the matched statistics
FEWEST_LEVELS = 1.0  # mean deviation of a pixel over the images, below which they are all alike

NO_STATISTICS = "synthesis: the server has no statistics of batch normalisation to match"
NOT_FINITE = "synthesis: a generator diverged, its synthesis round was ended"
STUDENT_DIVERGED = "synthesis: the student diverged, its term was left out"
ALIKE = "synthesis: the images are nearly all alike"

Outputs = tuple[Tensor, Tensor]  # of a MappedClassifier: logits [N, classes], features [N, A]


@dataclass(frozen=True)
class SynthesisParams(FedAvgParams):
    """How images are synthesised after an experience."""

    images: PositiveInt = 8000  # of the synthetic set
    synthesis_batch_size: Annotated[int, at_least(2)] = 256  # images of a synthesis round
    latent: PositiveInt = 256  # inputs of the generator
    generator_width: PositiveInt = 64  # channels of its last hidden layer
    generator_steps: PositiveInt = 10  # of Adam in a synthesis round
    generator_lr: Positive = 0.002  # of Adam
    statistics_weight: NonNegative = 10.0  # of matching the statistics of batch normalisation
    adversarial_weight: NonNegative = 1.0  # of the disagreement of teacher and student
    warmup: NonNegativeInt = 20  # synthesis rounds before the student is trained
    student_steps: PositiveInt = 400  # of SGD in a synthesis round
    student_lr: Positive = 0.2  # of its SGD
    student_weight_decay: NonNegative = 1e-4  # in its SGD

    @property
    def saved_rounds(self) -> int:
        return math.ceil(self.images / self.synthesis_batch_size)


class MappedClassifier(nn.Module):
    """A classifier that also returns its features in another space."""

    def __init__(self, classifier: Classifier, feature_map: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier
        self.feature_map = feature_map

    def forward(self, images: Tensor) -> Outputs:
        """Logits and mapped features."""  # [N, C, H, W] -> [N, classes], [N, A]
        features = self.classifier.encode(images)
        return self.classifier.head(features), self.feature_map(features)


class NormStatistics:
    """The distance of a batch from the running statistics of a network's batch normalisations.

    After the first synthesis round the statistics of a batch are mixed with an average of those
    of the rounds before: single batches are too small to have the statistics of all images.
    """

    def __init__(self, norms: Sequence[Any]) -> None:
        self.batch: dict[Any, Tensor] = {}  # [2, C] means and variances of the last pass
        self.average: dict[Any, Tensor] = {}  # the same, over synthesis rounds
        self.running = {norm: torch.stack([norm.running_mean, norm.running_var]) for norm in norms}
        for norm in norms:
            norm.register_forward_pre_hook(self._record)

    def _record(self, norm: Any, inputs: tuple[Tensor]) -> None:
        """A forward hook: the mean and the variance of each channel of a layer's input."""
        x = inputs[0].float()
        variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        self.batch[norm] = torch.stack([mean, variance])

    def loss(self) -> Tensor:
        """The Euclidean distances of means and of variances, summed over layers."""
        gaps = [self._mixed(norm) - running for norm, running in self.running.items()]
        return torch.stack([gap.norm(dim=1).sum() for gap in gaps]).sum()

    def end_round(self) -> None:
        """Take the last batch of a synthesis round into the average."""
        self.average = {norm: self._mixed(norm).detach() for norm in self.batch}

    def _mixed(self, norm: Any) -> Tensor:
        """The statistics of the last batch, mixed with the average if there is one.  # [2, C]"""
        if norm not in self.average:
            return self.batch[norm]
        return torch.lerp(self.batch[norm], self.average[norm], STATISTICS_MOMENTUM)


@dataclass(frozen=True)
class Source:
    """What images are synthesised from."""

    seed: tuple[int, int]  # of the run, and its round
    classes: Tensor  # int64 [K], learnt so far
    teacher: MappedClassifier  # frozen
    student: MappedClassifier | None  # with random weights; None without the adversarial term
    has_statistics: bool  # whether the server has those of batch normalisation


class Synthesis(ABC):
    """The synthesis of images from a teacher, by a generator that is trained in rounds.

    Every round trains it on one batch of labels and keeps the images of the step with the lowest
    loss. After `warmup` rounds a student with random initial weights learns from all kept images;
    from then on the generator also looks for images on which it differs from the teacher.
    """

    first_saved = 0  # the first round whose images enter the set

    def __init__(
        self, runtime: ClientRuntime, params: Any, source: Source, generator_: nn.Module, log: Log
    ) -> None:
        self.runtime = runtime
        self.params = params
        self.log = log
        self.draw = generator(*source.seed, "synthesis")
        self.classes = source.classes  # [K]
        self.columns = self.classes.to(runtime.device)
        self.teacher = source.teacher
        self.generator = FlatModel(generator_.to(runtime.device))
        self.statistics = self.matched_statistics(source.has_statistics)
        self.student = self.student_sgd(source.student) if source.student else None
        self.student_ready = False  # trained at least once

    def matched_statistics(self, known: bool) -> NormStatistics | None:
        classifier = self.teacher.classifier
        if not self.params.statistics_weight:
            return None
        if not classifier.norms or not known:
            self.log.events.append(NO_STATISTICS)
            return None
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
        pool = pool[: self.params.images]
        labels = labels[: self.params.images]
        if len(pool):
            self.examine(pool, labels)
        return pool.cpu(), labels

    def draw_targets(self, count: int) -> Tensor:
        return torch.randint(len(self.classes), (count,), generator=self.draw)

    def prepare(self, images: Tensor) -> Tensor:
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
    def start_round(self, targets: Tensor) -> tuple[Tensor, list[FlatAdam]]:
        """The generator's inputs for a batch, and the optimisers of what the round trains."""

    def train_generator(self, targets: Tensor) -> Tensor | None:
        """The images of a synthesis round's best step, in [0, 1]; None without a finite loss."""
        before = self.generator.parameters.clone()
        best = None
        lowest = math.inf
        inputs, optimisers = self.start_round(targets)
        for _ in range(self.params.generator_steps):
            images = self.generator.module(inputs)
            loss = self.generator_loss(images, targets)
            value = float(loss.detach())
            if value < lowest:
                best = images.detach()
                lowest = value
            for adam in optimisers:
                adam.model.gradients.zero_()
            loss.backward(inputs=[each for adam in optimisers for each in adam.model.tensors])
            self.after_backward()
            for adam in optimisers:
                adam.step()
        if math.isfinite(value) and self.generator.parameters.isfinite().all():
            self.end_round()
        else:
            self.log.events.append(NOT_FINITE)
            self.generator.load(before)
        return best

    def generator_loss(self, images: Tensor, targets: Tensor) -> Tensor:
        inputs = self.prepare(images * 255)
        teacher = self.teacher(inputs)
        loss = self.teacher_loss(teacher, targets)
        if self.statistics:
            loss = loss + self.params.statistics_weight * self.statistics.loss()
        if self.student and self.student_ready:
            pair = self.logits(self.student.model.module(inputs)), self.logits(teacher)
            loss = loss - self.params.adversarial_weight * agreeing_divergence(*pair)
        return loss

    def teacher_loss(self, teacher: Outputs, targets: Tensor) -> Tensor:
        return LABEL_WEIGHT * F.cross_entropy(self.logits(teacher), targets)

    def after_backward(self) -> None:  # noqa: B027 - a hook that most do not need
        """Called after the gradient of every step."""

    def end_round(self) -> None:
        """Called after a synthesis round whose losses and weights are finite."""
        if self.statistics:
            self.statistics.end_round()

    # --- the student

    def student_sgd(self, student: MappedClassifier) -> FlatSGD:
        """The SGD of the student, with constants of its own."""
        training = replace(
            self.runtime.training,
            lr=self.params.student_lr,
            schedule="constant",
            lr_end=None,
            momentum=STUDENT_MOMENTUM,
            weight_decay=self.params.student_weight_decay,
        )
        return FlatSGD(FlatModel(student.to(self.runtime.device)), training)

    def train_student(self, sgd: FlatSGD, pool: Tensor) -> None:
        network: Any = sgd.model.module
        for _ in range(self.params.student_steps):
            order = torch.randperm(len(pool), generator=self.draw)
            batch = pool[order[: self.params.synthesis_batch_size].to(pool.device)]
            inputs = self.prepare(batch)
            with torch.no_grad():
                teacher = self.teacher(inputs)
            set_train_mode(network.classifier, update_norms=len(batch) > 1)
            sgd.model.gradients.zero_()
            self.student_loss(network(inputs), teacher).backward()
            sgd.step()
        network.eval()
        self.student_ready = bool(sgd.model.parameters.isfinite().all())
        if not self.student_ready:
            self.student = None
            self.log.events.append(STUDENT_DIVERGED)

    def student_loss(self, student: Outputs, teacher: Outputs) -> Tensor:
        pair = self.logits(student), self.logits(teacher)
        return softened_divergence(*pair, STUDENT_TEMPERATURE)
