"""VR-MCL (Wu et al., 2024): steps along the meta-gradient of a look-ahead, with less variance."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.limits import Fraction, NonNegative, NonNegativeInt, Positive
from stamp_core.methods.base.method import ClientRound
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from stamp_core.models.flat import split_like
from workbench.methods.base.lookahead import LookAhead, new_parts

LONG = "look-ahead: first-order steps as long as the SGD steps, at which little is learnt"


@dataclass(frozen=True)
class VrMclParams(RehearsalParams):
    """What is kept in memory, how the client looks ahead, and how variance is reduced."""

    weight: NonNegative | None = 0.5  # of the exemplars in the meta-loss
    inner_steps: NonNegativeInt = 4  # K, each on a part of the batch; 0: no look-ahead
    inner_lr: NonNegative = 0.1  # α of VR-MCL, learning rate of these steps
    second_order: bool = True  # false: the gradients of these steps are constants
    clip: Positive | None = None  # largest norm of h, as released: 1 or 2; null: any
    r: Fraction = 0.15  # share of the last step's error that is kept; 0: no variance reduction


@dataclass
class VrMclContext(StepContext):
    theta: Tensor | None = None  # θ', the weights before the last step  # [P]
    d: Tensor | None = None  # d', its direction  # [P]
    cosines: list[Tensor] = field(default_factory=list)  # of each d and h
    ratios: list[Tensor] = field(default_factory=list)  # of their lengths


class VrMcl(Rehearsal):
    """Rehearsal whose SGD follows d = h(θ) + r (d' - h(θ')), with θ' and d' of the step before.

    h is the gradient of the meta-loss through `inner_steps` SGD steps on the new images of a
    batch; both h are of the same batch, so that the noise of its exemplars cancels. A client round
    starts with d = h: the average that a client receives is no next iterate of its own.
    """

    Params: ClassVar = VrMclParams
    fedavg_equivalent: ClassVar = {"memory": {"exemplars_per_class": 0}, "inner_steps": 0, "r": 0.0}

    def __init__(self, params: VrMclParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.look_ahead = LookAhead(runtime)

    def start(self, client_round: ClientRound) -> VrMclContext:
        return VrMclContext()

    def finish(self, client_round: ClientRound, context: VrMclContext) -> None:
        log = client_round.log
        if context.cosines:
            log.numbers["cosine"] = float(torch.stack(context.cosines).mean())
            log.numbers["length"] = float(torch.stack(context.ratios).mean())
        first_order = self.params.inner_steps and not self.params.second_order
        trained = self.sample_count(client_round, context) > 0
        if trained and first_order and self.params.inner_lr >= self.runtime.training.lr:
            log.events.append(LONG)

    def step(self, batch: Batch, context: VrMclContext) -> Tensor:
        loss, h = self.meta_gradient(batch, context, self.model.parameters, update_norms=True)
        self.model.gradients.copy_(self.direction(batch, context, h))
        self.runtime.sgd.step()
        return loss

    def direction(self, batch: Batch, context: VrMclContext, h: Tensor) -> Tensor:
        """d = h + r (d' - h(θ')), with d' and θ' of the step before, if there was one.  # [P]"""
        r = self.params.r
        if not r:
            return h
        d = h
        if context.d is not None and context.theta is not None:
            before = self.meta_gradient(batch, context, context.theta)[1]
            d = h + r * (context.d - before)
            context.cosines.append(F.cosine_similarity(d, h, 0))
            context.ratios.append(d.norm() / h.norm())
        context.theta = self.model.parameters.clone()
        context.d = d
        return d

    # --- the meta-gradient

    def meta_gradient(
        self, batch: Batch, context: VrMclContext, theta: Tensor, update_norms: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The mean loss after each inner step from `theta`, and its gradient h.  # [], [P]

        Backwards step by step: in one backward pass through all steps the order of sums is not
        the same on every device. The first loss updates running statistics if it is told to.
        """
        params = self.params
        steps = list[tuple[Tensor, Tensor]]()
        losses = list[Tensor]()
        slopes = list[Tensor]()
        for images, targets in new_parts(batch, max(1, params.inner_steps)):
            if params.inner_steps:
                steps.append(self.inner_slope(theta, images, targets))
                theta = theta - params.inner_lr * steps[-1][1].detach()
            loss, slope = self.slope(batch, context, theta, update_norms and not losses)
            losses.append(loss)
            slopes.append(slope)
        h = self.through(steps, slopes) if steps else slopes[0]
        if params.clip is not None:
            h = h * (params.clip / h.norm()).clamp(max=1)
        return torch.stack(losses).mean(), h

    def inner_slope(self, theta: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`theta` as a leaf, and the gradient of new images there as its function.  # [P], [P]"""
        start = theta.detach().clone().requires_grad_()
        logits = self.look_ahead(split_like(start, self.model.tensors), images)
        loss = F.cross_entropy(logits, labels)
        return start, grad(loss, start, create_graph=self.params.second_order)[0]

    def slope(
        self, batch: Batch, context: VrMclContext, theta: Tensor, update_norms: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss of new images and exemplars at some weights, and its gradient.  # [], [P]"""
        theta = theta.detach().clone().requires_grad_()
        tensors = split_like(theta, self.model.tensors)
        logits = self.look_ahead(tensors, batch.images, update_norms)
        loss = self.weighted_loss(logits, batch, context)
        return loss.detach(), grad(loss, theta)[0]

    def through(self, steps: list[tuple[Tensor, Tensor]], slopes: list[Tensor]) -> Tensor:
        """The gradient of the mean loss, given the slopes after each inner step.  # [P]"""
        total = torch.zeros_like(slopes[0])
        for (start, gradient), slope in zip(reversed(steps), reversed(slopes), strict=True):
            total = total + slope
            if self.params.second_order:
                total = total - self.params.inner_lr * grad(gradient, start, total)[0]
        return total / len(slopes)
