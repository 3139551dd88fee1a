"""The training of an AC-GAN: SGD for the discriminator, Adam for the generator."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import ClientRuntime
from workbench.adam import FlatAdam
from workbench.methods.base.distillation import softened_divergence
from workbench.methods.base.generators import BETAS, Pool
from workbench.methods.base.lookahead import constant_statistics
from workbench.methods.fedcil.acgan import Acgan

COLLAPSED = 0.01  # the mean deviation of a pixel over images, in deviations of training pixels
NOT_FINITE = "generator: not finite, its training in this round is discarded"
ALL_EQUAL = "generator: its images are all equal, its training in this round is discarded"


class Teacher(NamedTuple):
    """The server's generator as received, and what its images are made from."""

    parameters: Tensor  # on the device
    draws: Pool  # labels [n], and noise for their images and those of real labels [n, 3, noise]


class Classified(NamedTuple):
    """A part of a batch with the discriminator's outputs."""

    labels: Tensor  # [n]
    logits: Tensor  # [n, L]
    scores: Tensor  # [n]


@dataclass
class AcganTraining:
    """Steps on real and replayed images; one step of `every` is adversarial."""

    runtime: ClientRuntime
    params: Any
    acgan: Acgan
    draws: Pool  # labels and noise of generated images
    moments: Mapping[str, Any] | None  # of Adam, to begin with
    teacher: Teacher | None = None
    every: int = 1

    def __post_init__(self) -> None:
        self.steps = 0
        self.sgd = self.runtime.new_sgd(self.runtime.model)
        self.head_sgd = self.runtime.new_sgd(self.acgan.head)
        self.adam = FlatAdam(self.acgan.generator, self.params.generator_lr, self.moments, BETAS)
        self.images = torch.empty(0)  # of the last adversarial step
        self.generator_loss = torch.empty(0)
        # Whether the generator has given values that are not finite: from then on its images are
        # 0, and so are the weights of their losses. The host does not wait for it.
        self.stopped = torch.zeros((), dtype=torch.bool, device=self.runtime.device)

    def step(self, batch: Batch) -> Tensor:
        adversarial = self.steps % self.every == 0
        self.steps += 1
        return self.adversarial_step(batch) if adversarial else self.plain_step(batch)

    def plain_step(self, batch: Batch) -> Tensor:
        self.runtime.model.gradients.zero_()
        parts = self.classify(batch)
        loss = self.mixed([F.cross_entropy(part.logits, part.labels) for part in parts])
        loss.backward()
        self.sgd.step()
        return loss.detach()

    def adversarial_step(self, batch: Batch) -> Tensor:
        images, labels = self.generate(batch.new)
        usable = (~self.stopped).float()
        self.runtime.model.gradients.zero_()
        self.acgan.head.gradients.zero_()
        parts = self.classify(batch)
        weight = self.params.adversarial * usable
        loss = self.mixed(
            [
                F.cross_entropy(part.logits, part.labels) + weight * F.softplus(-part.scores).mean()
                for part in parts
            ]
        )
        loss = loss + usable * self.generated_loss(images.detach(), labels, parts[0])
        loss.backward()
        self.sgd.step()
        self.head_sgd.step()
        self.train_generator(images, labels)
        return loss.detach()

    def classify(self, batch: Batch) -> list[Classified]:
        outputs = batch.targets, *self.acgan.discriminate(batch.images)
        sizes = [batch.new, batch.exemplars] if batch.exemplars else [batch.new]
        parts = zip(*(each.split(sizes) for each in outputs), strict=True)
        return [Classified(*part) for part in parts]

    def mixed(self, losses: list[Tensor]) -> Tensor:
        new, *replayed = losses
        return torch.lerp(new, replayed[0], self.params.replay) if replayed else new

    def generate(self, count: int) -> tuple[Tensor, Tensor]:
        """Images of the generator, 0 if they are not finite, and the labels asked for."""
        labels, noise = self.draws.take(count)
        images = self.acgan.generate(labels, noise)
        self.stopped = self.stopped | ~images.isfinite().all()
        return images.where(~self.stopped, 0.0), labels

    def generated_loss(self, images: Tensor, labels: Tensor, real: Classified) -> Tensor:
        with constant_statistics(self.runtime):
            logits, scores = self.acgan.discriminate(images)
            loss: Tensor = F.cross_entropy(logits, labels) + F.softplus(scores).mean()
            loss = self.params.adversarial * loss
            if self.teacher is not None:
                consistency = self.consistency_loss(self.teacher, real)
                loss = loss + self.params.consistency * consistency
        return loss

    def consistency_loss(self, teacher: Teacher, real: Classified) -> Tensor:
        """How far the outputs on the teacher's images are from labels, real and own images."""
        shared, noise = teacher.draws.take(len(real.labels))
        like_labels, like_shared, for_own = noise.unbind(1)
        asked = torch.cat([real.labels, shared])
        taught = self.acgan.sample(teacher.parameters, asked, torch.cat([like_labels, like_shared]))
        with torch.no_grad():
            own = self.acgan.generate(shared, for_own)
        images = torch.cat([self.acgan.normalised(taught), own]).where(~self.stopped, 0.0)
        like_real, like_own, of_own = self.acgan.discriminate(images)[0].chunk(3)
        of_real = softened_divergence(real.logits, like_real)
        return of_real + softened_divergence(of_own, like_own) + F.cross_entropy(like_own, shared)

    def train_generator(self, images: Tensor, labels: Tensor) -> None:
        """One step of the generator: its images shall look real and have the labels asked for."""
        generator = self.acgan.generator
        generator.gradients.zero_()
        with constant_statistics(self.runtime):
            logits, scores = self.acgan.discriminate(images)
        loss = F.softplus(-scores).mean() + F.cross_entropy(logits, labels)
        loss.backward(inputs=generator.tensors)
        self.adam.step()
        self.images = images.detach()
        self.generator_loss = loss.detach()

    def numbers(self) -> dict[str, float]:
        """The generator's loss, and how much its images differ, in the last adversarial step."""
        if len(self.images) < 2:
            return {}
        deviation = float(self.images.std(0).mean())
        return {"generator loss": float(self.generator_loss), "generator deviation": deviation}

    def failure(self) -> str | None:
        vectors = (self.acgan.generator.parameters, self.adam.first, self.adam.second)
        if self.stopped or not all(bool(vector.isfinite().all()) for vector in vectors):
            return NOT_FINITE
        if self.numbers().get("generator deviation", math.inf) < COLLAPSED:
            return ALL_EQUAL
        return None
