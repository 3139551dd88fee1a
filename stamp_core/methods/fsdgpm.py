"""FS-DGPM (Deng et al., 2021): gradient projection with replay at weights moved up the loss."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from stamp_core.client import subspaces
from stamp_core.client.lookahead import LookAhead, clamped, clip_norm
from stamp_core.client.runtime import ClientRuntime
from stamp_core.client.subspaces import Bases
from stamp_core.config.decode import require_above, require_at_least
from stamp_core.methods.base.drift import log_drift, received
from stamp_core.methods.base.method import ClientRound, State
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from stamp_core.models.flat import flatten_like, split_like

TAU = 10.0  # of the released sigmoid


@dataclass(frozen=True)
class FsDgpmParams(RehearsalParams):
    """What is kept in memory, how far the weights are moved, and what is protected."""

    inner_steps: int = 2  # K, each on a part of the batch; 0: the weights are not moved
    eta1: float = 0.01  # η1, learning rate of these steps up the loss
    # The weights λ of the columns: all 1 | as released, where they stay at 0.99995 | learnt.
    soft: Literal["off", "published", "clamp"] = "clamp"
    eta2: float = 0.01  # η2, learning rate of λ; below 10 hardly any column is released
    epsilon: float = 0.95  # share of the squares of a layer's inputs that its basis must hold
    increment: float = 0.003  # added to it for every past task after the first one
    images: int = 125  # of the memory, from which the bases are made
    clip: float | None = 2.0  # of lengths of gradients, and of numbers of the steps up the loss
    # Log which share of the global update lies in the protected subspaces: the client keeps the
    # received model for that.
    drift: bool = False

    def __post_init__(self) -> None:
        """Refuse negative numbers, bases of no image and a limit of 0."""
        super().__post_init__()
        require_at_least(self, 0, "inner_steps", "eta1", "eta2", "epsilon", "increment")
        require_at_least(self, 1, "images")
        if self.clip is not None:
            require_above(self, 0, "clip")


class FsDgpm(Rehearsal):
    """Rehearsal at weights moved up the loss inside the protected subspaces, then projected.

    In their first round of a task, clients make the bases anew from the received model and their
    exemplars of other tasks; λ is 1 then and is learnt until the next task. The first-order form:
    the steps up the loss are constants, except in λ.
    """

    Params: ClassVar = FsDgpmParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {
        "memory": {"exemplars_per_class": 0},
        "inner_steps": 0,
        "epsilon": 0.0,
        "increment": 0.0,
        "clip": None,
    }

    def __init__(self, params: FsDgpmParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.layers, self.look_ahead = subspaces.find_layers(runtime), LookAhead(runtime)

    # --- the bases

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD with the bases of the task and their λ."""
        scratch, log = client_round.scratch, client_round.log
        scratch |= {"removed": [], **self.protected(client_round)}
        if self.params.drift and subspaces.has_columns(scratch["bases"]):
            log_drift(client_round, self.layers, scratch["bases"])
        losses = super().train(client_round)
        if scratch["removed"]:
            log.numbers["removed"] = float(torch.stack(scratch["removed"]).mean())
            log.numbers["lambda"] = float(scratch["lambdas"].mean())
        return losses

    def protected(self, client_round: ClientRound) -> State:
        """The bases of other tasks' inputs and λ, made in the client's first round of a task."""
        state, device = client_round.state, self.runtime.device
        if state.get("protected") == client_round.experience:
            bases = {name: basis.to(device) for name, basis in state["bases"].items()}
            return {"bases": bases, "lambdas": state["lambdas"].to(device)}
        with client_round.log.clock("basis"):
            bases = self.new_bases(client_round)
        columns = sum(basis.shape[1] for basis in bases.values())
        return {"bases": bases, "lambdas": torch.ones(columns, device=device)}

    def new_bases(self, client_round: ClientRound) -> Bases:
        """Bases of the live model's inputs for exemplars of other tasks; without any no columns."""
        memory, past = client_round.state["memory"], self.past_indices(client_round)
        device, layers = self.runtime.device, self.layers
        bases = {
            name: torch.zeros(each.shape[1], 0, device=device) for name, each in layers.items()
        }
        if not len(past):
            return bases
        order = torch.randperm(len(past), generator=client_round.round_id.generator("basis"))
        images = memory["images"][past[order[: self.params.images]]]
        later = len(memory["tasks"][past].unique()) - 1
        epsilon = min(1.0, self.params.epsilon + later * self.params.increment)
        inputs = subspaces.layer_inputs(self.runtime, layers, images)
        return {
            name: subspaces.grow(basis.double(), inputs[name], epsilon).float()
            for name, basis in bases.items()
        }

    def update_state(self, client_round: ClientRound) -> State:
        """The state with the memory, and the bases of the task with their λ."""
        state, scratch = super().update_state(client_round), client_round.scratch
        if self.params.drift:
            state = {**state, **received(client_round)}
        bases = {name: basis.cpu() for name, basis in scratch["bases"].items()}
        client_round.log.numbers |= subspaces.filled(self.layers, bases)
        kept = {"bases": bases, "lambdas": scratch["lambdas"].detach().cpu()}
        return {**state, **kept, "protected": client_round.experience}

    # --- a step

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """The mean of the losses of new images and exemplars at the weights after each inner step.

        Only the pass on the first part, at the weights themselves, updates running statistics.
        """
        if not self.params.inner_steps:
            return super().loss(client_round, images, labels)
        params, scratch = self.params, client_round.scratch
        scratch["lambdas"] = scratch["lambdas"].detach().requires_grad_(params.soft != "off")
        new = len(labels) - len(scratch.get("soft", ()))
        tensors, losses = self.model.tensors, list[Tensor]()
        offset = torch.zeros_like(self.model.parameters)
        parts = images[:new].chunk(params.inner_steps)  # a batch is in random order
        for part, own in zip(parts, labels[:new].chunk(params.inner_steps), strict=True):
            logits = self.outputs_at(offset.detach(), part, update_norms=not losses)
            slopes = grad(F.cross_entropy(logits, own), tensors)
            gradient = flatten_like(slopes, tensors)
            allowed = self.component(client_round, gradient, others=gradient)
            offset = offset + params.eta1 * clamped(allowed, params.clip)
            logits = self.outputs_at(offset, images)
            losses.append(self.weighted_loss(client_round, logits, labels))
        return torch.stack(losses).mean()

    def outputs_at(self, offset: Tensor, images: Tensor, update_norms: bool = False) -> Tensor:
        """Logits of the live model moved by `offset`.  # [N, classes]"""
        tensors = self.model.tensors
        moved = [a + b for a, b in zip(tensors, split_like(offset, tensors), strict=True)]
        return self.look_ahead(moved, images, update_norms)

    def component(
        self, client_round: ClientRound, vector: Tensor, others: Tensor | None = None
    ) -> Tensor:
        """The part of a vector in the protected subspaces, each column times its λ.  # [P]"""
        bases, lambdas = client_round.scratch["bases"], client_round.scratch["lambdas"]
        weights = dict(zip(bases, lambdas.split([b.shape[1] for b in bases.values()]), strict=True))
        return subspaces.component(vector, self.layers, bases, weights, others)

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Clip the gradient, step λ, and take the protected part from the gradient."""
        gradients, scratch = self.model.gradients, client_round.scratch
        clip_norm(gradients, self.params.clip)
        if not len(scratch["lambdas"]):
            return
        if (slope := scratch["lambdas"].grad) is not None:
            scratch["lambdas"] = self.stepped(scratch["lambdas"].detach(), slope)
        step = subspaces.descent_direction(self.runtime)
        inside = self.component(client_round, step)
        scratch["removed"].append(inside.norm() / step.norm())
        gradients.sub_(inside)

    def stepped(self, lambdas: Tensor, slope: Tensor) -> Tensor:
        """λ after a step down the loss.  # [k of all layers]"""
        clip_norm(slope, self.params.clip)
        lambdas = lambdas - self.params.eta2 * slope
        return (
            torch.sigmoid(TAU * lambdas) if self.params.soft == "published" else lambdas.clamp(0, 1)
        )
