"""VR-MCL (Wu et al., 2024): steps along the meta-gradient of a look-ahead, with less variance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from stamp_core.client.lookahead import LookAhead, clamped, clip_norm
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_above, require_at_least, require_fraction
from stamp_core.methods.base.distillation import masked_cross_entropy
from stamp_core.methods.base.method import ClientRound, State
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from stamp_core.methods.base.task_server import class_mask
from stamp_core.models.flat import FlatSGD, split_like

LONG = "look-ahead: first-order steps as long as the SGD steps, at which little is learnt"


@dataclass(frozen=True)
class VrMclParams(RehearsalParams):
    """What is kept in memory, how the client looks ahead, and how variance is reduced."""

    weight: float | None = 0.5  # of the exemplars in the meta-loss
    inner_steps: int = 4  # K, each on a part of the batch; 0: no look-ahead
    inner_lr: float = 0.1  # α of VR-MCL, learning rate of these steps
    second_order: bool = True  # false: the gradients of these steps are constants
    r: float = 0.15  # share of the last step's error that is kept; 0: no variance reduction
    # What a client takes to its next round: nothing | the last direction, as if it were of the
    # received model | and the weights that it is of.
    carry: Literal["none", "momentum", "both"] = "none"
    # Classes in the softmax: all | the client's so far | as published: the task's in inner steps,
    # of the meta-loss all but the past ones for new images, the client's so far for exemplars.
    mask: Literal["none", "own", "published"] = "none"
    clip: float | None = None  # of the meta-gradient's length, and of numbers of inner steps

    def __post_init__(self) -> None:
        """Refuse negative numbers, a limit of 0, and masks where all logits are compared."""
        super().__post_init__()
        require_at_least(self, 0, "inner_steps", "inner_lr")
        require_fraction(self, "r")
        if self.clip is not None:
            require_above(self, 0, "clip")
        if self.mask != "none" and (self.anchor or self.memory.soft):
            raise invalid(
                "mask", self.mask, "'none', as the loss compares the logits of all classes"
            )


class VrMcl(Rehearsal):
    """Rehearsal whose SGD follows d = h(θ) + r (d' - h(θ')), with θ' and d' of the step before.

    h is the gradient of the meta-loss through `inner_steps` SGD steps on the new images of a
    batch; both h are of the same batch, so that the noise of its exemplars cancels.
    """

    Params: ClassVar = VrMclParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {
        "memory": {"exemplars_per_class": 0},
        "inner_steps": 0,
        "r": 0.0,
    }

    def __init__(self, params: VrMclParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.look_ahead = LookAhead(runtime)

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD along d, which starts as the client left it if it is carried over."""
        state, scratch, log = client_round.state, client_round.scratch, client_round.log
        scratch |= {"cosines": [], "ratios": [], "masks": self.class_masks(client_round)}
        carried = [name for name in ("d", "theta") if name in state]
        scratch |= {name: state[name].to(self.runtime.device) for name in carried}
        model, losses = self.model, list[Tensor]()
        sgd = FlatSGD(model, self.runtime.training)
        for images, labels in self.batches(client_round):
            scratch["batch"] = images, labels
            loss, h = self.meta_gradient(client_round, model.parameters, update_norms=True)
            model.gradients.copy_(self.direction(client_round, h))
            sgd.step()
            losses.append(loss)
        if scratch["cosines"]:
            log.numbers["cosine"] = float(torch.stack(scratch["cosines"]).mean())
            log.numbers["length"] = float(torch.stack(scratch["ratios"]).mean())
        first_order = self.params.inner_steps and not self.params.second_order
        if losses and first_order and self.params.inner_lr >= self.runtime.training.lr:
            log.events.append(LONG)
        return losses

    # --- the meta-gradient

    def meta_gradient(
        self, client_round: ClientRound, theta: Tensor, update_norms: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The mean loss after each inner step from `theta`, and its clipped gradient h.  # [], [P]

        Backwards step by step: in one backward pass through all steps the order of sums is not
        the same on every device. The first loss updates running statistics if it is told to.
        """
        params, (images, labels) = self.params, client_round.scratch["batch"]
        new = len(labels) - len(client_round.scratch.get("soft", ()))
        parts = max(1, params.inner_steps)
        steps, losses, slopes = list[tuple[Tensor, Tensor]](), list[Tensor](), list[Tensor]()
        for part, own in zip(images[:new].chunk(parts), labels[:new].chunk(parts), strict=True):
            if params.inner_steps:  # a batch is in random order
                steps.append(self.inner_slope(client_round, theta, part, own))
                theta = theta - params.inner_lr * steps[-1][1].detach()
            loss, slope = self.slope(client_round, theta, update_norms and not losses)
            losses.append(loss)
            slopes.append(slope)
        h = self.through(steps, slopes) if steps else slopes[0]
        clip_norm(h, params.clip)
        return torch.stack(losses).mean(), h

    def inner_slope(
        self, client_round: ClientRound, theta: Tensor, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`theta` as a leaf, and the gradient of new images there as its function.  # [P], [P]"""
        masks, start = client_round.scratch["masks"], theta.detach().clone().requires_grad_()
        logits = self.look_ahead(self.tensors(start), images)
        loss = masked_cross_entropy(logits, labels, masks["inner"] if masks else None)
        (gradient,) = grad(loss, start, create_graph=self.params.second_order)
        return start, clamped(gradient, self.params.clip)

    def through(self, steps: list[tuple[Tensor, Tensor]], slopes: list[Tensor]) -> Tensor:
        """The gradient of the mean loss, given the slopes after each inner step.  # [P]

        A step maps x to x - inner_lr g(x): its transposed derivative is I - inner_lr H(x).
        """
        total = torch.zeros_like(slopes[0])
        for (start, gradient), slope in zip(reversed(steps), reversed(slopes), strict=True):
            total = total + slope
            if self.params.second_order:
                total = total - self.params.inner_lr * grad(gradient, start, total)[0]
        return total / len(slopes)

    def slope(
        self, client_round: ClientRound, theta: Tensor, update_norms: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss of new images and exemplars at some weights, and its gradient.  # [], [P]"""
        theta = theta.detach().clone().requires_grad_()
        loss = self.loss_at(client_round, self.tensors(theta), update_norms)
        return loss.detach(), grad(loss, theta)[0]

    def loss_at(
        self, client_round: ClientRound, tensors: Sequence[Tensor], update_norms: bool
    ) -> Tensor:
        """The loss of new images and exemplars at these tensors."""
        images, labels = client_round.scratch["batch"]
        logits = self.look_ahead(tensors, images, update_norms)
        if masks := client_round.scratch["masks"]:
            past = len(client_round.scratch.get("soft", ()))
            rows = [masks["new"].expand(len(labels) - past, -1), masks["past"].expand(past, -1)]
            logits = logits.masked_fill(~torch.cat(rows), -torch.inf)
        return self.weighted_loss(client_round, logits, labels)

    def tensors(self, theta: Tensor) -> list[Tensor]:
        """The parameters as views of a vector."""
        return list(split_like(theta, self.model.tensors))

    def class_masks(self, client_round: ClientRound) -> dict[str, Tensor]:
        """The classes that inner steps and both parts of the meta-loss compare; {}: all."""
        if self.params.mask == "none":
            return {}
        plan, client, count = client_round.plan, client_round.client, self.runtime.classes
        current = class_mask(plan.clients[client][client_round.task].classes, count)
        seen = class_mask(plan.seen(client, client_round.experience), count)
        masks = {"inner": seen, "new": seen, "past": seen}
        if self.params.mask == "published":
            masks |= {"inner": current, "new": current | ~seen}
        return {name: mask.to(self.runtime.device) for name, mask in masks.items()}

    # --- variance reduction

    def direction(self, client_round: ClientRound, h: Tensor) -> Tensor:
        """d = h + r (d' - h(θ')), with d' and θ' of the step before, if there was one.  # [P]"""
        scratch, r, d = client_round.scratch, self.params.r, h
        if not r:
            return h
        if "d" in scratch:
            before = h
            if "theta" in scratch:
                before = self.meta_gradient(client_round, scratch["theta"])[1]
            d = h + r * (scratch["d"] - before)
            scratch["cosines"].append(F.cosine_similarity(d, h, 0))
            scratch["ratios"].append(d.norm() / h.norm())
        scratch |= {"theta": self.model.parameters.clone(), "d": d}
        return d

    def update_state(self, client_round: ClientRound) -> State:
        """The state with the memory, and what the client takes to its next round."""
        state, scratch = super().update_state(client_round), client_round.scratch
        names = {"none": (), "momentum": ("d",), "both": ("d", "theta")}[self.params.carry]
        return {**state, **{name: scratch[name].cpu() for name in names if name in scratch}}
