"""The flow in a client round: it learns features, and the head learns from its samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime
from stamp_core.core.arithmetic import sqrt
from stamp_core.methods.base.method import Log
from stamp_core.models.flat import FlatModel, FlatSGD
from workbench.adam import FlatAdam
from workbench.methods.base.distillation import soft_cross_entropy
from workbench.methods.base.generators import Pool

MIN_VARIANCE = 0.01  # released: 1e-30, at which one image of a class has weight 4e14
TEMPERATURE = 2.0  # of distillation: probabilities are raised to 1/2 and normalised
DIVERGED = "flow: its density is not finite, the received flow is kept"
CLIPPED = "flow: the gradient on its samples was shortened to replay_clip"
NOT_REPLAYED = "flow: the loss on its samples is not finite, they are not replayed"


@dataclass
class FlowReplay:
    """Steps of the flow on features of images, and of the head on samples of the flow."""

    runtime: ClientRuntime
    params: Any
    flow: FlatModel
    draws: Pool  # labels and noise of samples
    past: Pool | None  # samples of the last task's flow, and their labels
    old_head: nn.Module | None  # of the last task's classifier, for distillation
    moments: Mapping[str, Any]  # of Adam, as received, then as left; empty if the flow has failed
    log: Log

    def __post_init__(self) -> None:
        self.network: Any = self.flow.module
        self.adam = FlatAdam(self.flow, self.params.flow_lr, self.moments)
        # a second optimiser, as published; weights decay in the step on images
        undecayed = replace(self.runtime.training, weight_decay=0.0)
        self.sgd = FlatSGD(self.runtime.model, undecayed, self.runtime.scheduled)
        self.diverged = torch.zeros((), dtype=torch.bool, device=self.runtime.device)
        self.batches = list[tuple[Tensor, Tensor]]()  # features and labels since the last steps
        self.outcomes = list[Tensor]()  # of each replay, see `replay`

    def add(self, features: Tensor, labels: Tensor) -> None:
        self.batches.append((features, labels))
        if len(self.batches) == self.params.flow_every:
            self.take_steps()

    def take_steps(self) -> None:
        features, labels = map(torch.cat, zip(*self.batches, strict=True))
        self.batches.clear()
        with self.log.clock("flow"):
            self.fit_flow(features, labels)
            self.replay(features, labels)

    def fit_flow(self, features: Tensor, labels: Tensor) -> None:
        """One step of the flow on features and, with those, on samples of the last task's flow."""
        count = len(labels)
        if self.past:
            samples, drawn = self.past.take(count)
            features = torch.cat([features, samples])
            labels = torch.cat([labels, drawn])
        density = self.network(features, labels)[1]
        loss = -density[:count].mean()
        if self.past:
            loss = loss - self.params.k_lastflow * density[count:].mean()
        self.diverged = self.diverged | ~loss.isfinite()
        self.flow.gradients.zero_()
        loss.backward()
        self.adam.step()

    def replay(self, features: Tensor, labels: Tensor) -> None:
        """One SGD step of the head alone on samples of the flow, weighted by credibility.

        Its gradient is 0 if it or the loss is not finite or the flow has diverged, and has at most
        the norm `replay_clip`: features of a flow may be of any size.
        """
        params = self.params
        model = self.runtime.model
        drawn, noise = self.draws.take(len(labels))
        with torch.no_grad():
            samples = self.network.sample(noise, drawn)
            weights, density = self.credibility(features, labels, noise, drawn)
        logits = self.runtime.classifier.head(samples)
        each = F.cross_entropy(logits, drawn, reduction="none")
        loss = (weights * each).mean() * ((1 - params.theta) * density + params.theta)
        if self.old_head and params.k_kd_output:
            with torch.no_grad():
                old = self.old_head(samples)
            distance = soft_cross_entropy(logits, old, TEMPERATURE)
            loss = loss + params.k_kd_last * params.k_kd_output * distance
        model.gradients.zero_()
        (params.k_loss_flow * loss).backward()
        norm = model.gradients.norm()
        finite = loss.isfinite() & norm.isfinite()
        usable = ~self.diverged
        taken = finite & usable
        model.gradients.mul_((params.replay_clip / norm).clamp(max=1))
        model.gradients.copy_(model.gradients.where(taken, 0.0))
        self.sgd.step()  # between batches the encoder's gradients are 0
        model.gradients.zero_()
        clipped = taken & (norm > params.replay_clip)
        outcome = [density, weights.mean(), norm, taken, ~finite & usable, clipped]
        self.outcomes.append(torch.stack([each.float() for each in outcome]))

    def credibility(
        self, features: Tensor, labels: Tensor, noise: Tensor, drawn: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The credibility of samples, and the mean density of a batch's features.  # [N], []

        How plausible the noise of a sample is among that of the batch's features of its class: the
        mean over dimensions of the normal density with their mean and variance, at least
        `MIN_VARIANCE`. Without features of the class it is the batch's density.
        """
        own, log_density = self.network(features, labels)  # [n, D], [n]
        density = (log_density / features.shape[1]).exp().mean()  # per feature
        members = F.one_hot(labels, self.runtime.classes).to(own.dtype)  # [n, L]
        counts = members.sum(0)  # [L]
        shares = (members / counts.clamp(min=1)).T  # [L, n]
        means = shares @ own  # [L, D]
        variances = shares @ (own - members @ means).square()
        variance = variances.clamp(min=MIN_VARIANCE)[drawn]  # [N, D]
        exponent = -(noise - means[drawn]).square() / (2 * variance)
        plausible = (exponent.exp() / sqrt(2 * math.pi * variance)).mean(1)
        return plausible.where(counts[drawn] > 0, density), density

    def finish(self, received: Tensor) -> None:
        """Record the means of the replays; a flow that has failed is the received one again."""
        if self.batches:
            self.take_steps()
        if self.outcomes:
            *numbers, used, failed, clipped = torch.stack(self.outcomes, 1).cpu()  # [replays] each
            self.log.events += [NOT_REPLAYED] * int(failed.sum()) + [CLIPPED] * int(clipped.sum())
            names = "flow density", "credibility", "replay gradient"
            for name, values in zip(names, numbers, strict=True):
                if used.any():
                    self.log.numbers[name] = float(values[used > 0].mean())
        failed = bool(self.diverged) or not self.flow.parameters.isfinite().all()
        if failed:
            self.log.events.append(DIVERGED)
            self.flow.load(received)
        self.moments = {} if failed else self.adam.moments()
