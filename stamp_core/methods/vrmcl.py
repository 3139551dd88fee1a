"""VR-MCL (Wu et al., 2024): steps along the meta-gradient of a look-ahead, with less variance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from stamp_core.client.lookahead import LookAhead, clamped, clip_norm
from stamp_core.client.workspace import Workspace
from stamp_core.config.decode import invalid, require_above, require_at_least, require_fraction
from stamp_core.methods.base.distillation import masked_cross_entropy
from stamp_core.methods.base.method import ClientRound, State
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from stamp_core.methods.base.task_server import class_mask
from stamp_core.models.flat import split_like

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
    neutral: ClassVar[dict[str, Any]] = {
        "memory": {"exemplars_per_class": 0},
        "inner_steps": 0,
        "r": 0.0,
    }

    def __init__(self, params: VrMclParams, work: Workspace) -> None:
        super().__init__(params, work)
        self.look_ahead = LookAhead(work)

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD along d, which starts as the client left it if it is carried over."""
        state, scratch, device = client_round.state, client_round.scratch, self.work.device
        scratch |= {"cosines": [], "ratios": [], "masks": self.masks(client_round)}
        scratch |= {name: state[name].to(device) for name in ("d", "theta") if name in state}
        losses = super().train(client_round)
        log, params = client_round.log, self.params
        if scratch["cosines"]:
            log.numbers["cosine"] = float(torch.stack(scratch["cosines"]).mean())
            log.numbers["length"] = float(torch.stack(scratch["ratios"]).mean())
        first_order = params.inner_steps and not params.second_order
        if losses and first_order and params.inner_lr >= self.work.training.lr:
            log.events.append(LONG)
        return losses

    # --- the meta-loss

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """The meta-loss at the live weights."""
        client_round.scratch["batch"] = images, labels
        tensors = [each.view_as(each) for each in self.work.model.tensors]  # no leaves
        return self.meta_loss(client_round, tensors, update_norms=True)

    def meta_loss(
        self, client_round: ClientRound, tensors: Sequence[Tensor], update_norms: bool = False
    ) -> Tensor:
        """The mean of the losses of new images and exemplars after each inner step from `tensors`.

        The first of these passes updates running statistics if it is told to.
        """
        scratch, inner_steps = client_round.scratch, self.params.inner_steps
        images, labels = scratch["batch"]
        new = len(labels) - len(scratch.get("exemplars", ()))
        if not inner_steps:
            return self.loss_at(client_round, tensors, update_norms)
        losses = list[Tensor]()
        parts = images[:new].chunk(inner_steps)  # a batch is in random order
        for part, own in zip(parts, labels[:new].chunk(inner_steps), strict=True):
            tensors = self.inner_step(client_round, tensors, part, own)
            losses.append(self.loss_at(client_round, tensors, update_norms and not losses))
        return torch.stack(losses).mean()

    def inner_step(
        self, client_round: ClientRound, tensors: Sequence[Tensor], images: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """The tensors after one SGD step on new images."""
        params, masks = self.params, client_round.scratch["masks"]
        logits = self.look_ahead(tensors, images)
        loss = masked_cross_entropy(logits, labels, masks["inner"] if masks else None)
        gradients = grad(loss, tensors, create_graph=params.second_order)
        steps = [params.inner_lr * clamped(each, params.clip) for each in gradients]
        return [tensor - step for tensor, step in zip(tensors, steps, strict=True)]

    def loss_at(
        self, client_round: ClientRound, tensors: Sequence[Tensor], update_norms: bool
    ) -> Tensor:
        """The loss of new images and exemplars at these tensors."""
        images, labels = client_round.scratch["batch"]
        logits = self.look_ahead(tensors, images, update_norms)
        if masks := client_round.scratch["masks"]:
            past = len(client_round.scratch.get("exemplars", ()))
            rows = [masks["new"].expand(len(labels) - past, -1), masks["past"].expand(past, -1)]
            logits = logits.masked_fill(~torch.cat(rows), -torch.inf)
        return self.weighted_loss(client_round, logits, labels)

    def masks(self, client_round: ClientRound) -> dict[str, Tensor]:
        """The classes that inner steps and both parts of the meta-loss compare; {}: all."""
        if self.params.mask == "none":
            return {}
        plan, client, count = client_round.plan, client_round.client, self.work.classes
        current = class_mask(plan.clients[client][client_round.task].classes, count)
        seen = class_mask(plan.seen(client, client_round.experience), count)
        masks = {"inner": seen, "new": seen, "past": seen}
        if self.params.mask == "published":
            masks |= {"inner": current, "new": current | ~seen}
        return {name: mask.to(self.work.device) for name, mask in masks.items()}

    # --- variance reduction

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Replace the meta-gradient h by the direction d."""
        model, scratch, r = self.work.model, client_round.scratch, self.params.r
        clip_norm(model.gradients, self.params.clip)
        if not r:
            return
        if "d" in scratch:
            h = model.gradients.clone()
            earlier = (
                self.meta_gradient(client_round, scratch["theta"]) if "theta" in scratch else h
            )
            model.gradients.add_(scratch["d"] - earlier, alpha=r)
            scratch["cosines"].append(F.cosine_similarity(model.gradients, h, 0))
            scratch["ratios"].append(model.gradients.norm() / h.norm())
        scratch |= {"theta": model.parameters.clone(), "d": model.gradients.clone()}

    def meta_gradient(self, client_round: ClientRound, theta: Tensor) -> Tensor:
        """The clipped gradient of the batch's meta-loss at other weights.  # [P]"""
        theta = theta.clone().requires_grad_()
        tensors = list(split_like(theta, self.work.model.tensors))
        (gradient,) = grad(self.meta_loss(client_round, tensors), theta)
        clip_norm(gradient, self.params.clip)
        return gradient

    def update_state(self, client_round: ClientRound) -> State:
        """The state with the memory, and what the client takes to its next round."""
        state, scratch = super().update_state(client_round), client_round.scratch
        names = {"none": (), "momentum": ("d",), "both": ("d", "theta")}[self.params.carry]
        return {**state, **{name: scratch[name].cpu() for name in names if name in scratch}}
