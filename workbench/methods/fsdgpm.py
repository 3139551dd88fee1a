"""FS-DGPM (Deng et al., 2021): gradient projection with replay at weights moved up the loss."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.limits import NonNegative, NonNegativeInt, Positive, PositiveInt
from stamp_core.coresets.memory import Memory
from stamp_core.methods.base.method import ClientRound, State
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from stamp_core.models.flat import flatten_like, split_like
from workbench.methods.base import subspaces
from workbench.methods.base.lookahead import LookAhead, new_parts
from workbench.methods.base.subspaces import Bases

TAU = 10.0  # of the released sigmoid


@dataclass(frozen=True)
class FsDgpmParams(RehearsalParams):
    """What is kept in memory, how far the weights are moved, and what is protected."""

    inner_steps: NonNegativeInt = 2  # K, each on a part of the batch; 0: the weights are not moved
    eta1: NonNegative = 0.01  # η1, learning rate of these steps up the loss
    # The weights λ of the columns: all 1 | as released, where they stay at 0.99995 | learnt.
    soft: Literal["off", "published", "clamp"] = "clamp"
    eta2: NonNegative = 0.01  # η2, learning rate of λ; below 10 hardly any column is released
    # share of the squares of a layer's inputs that its basis must hold
    epsilon: NonNegative = 0.95
    increment: NonNegative = 0.003  # added to it for every past task after the first one
    images: PositiveInt = 125  # of the memory, from which the bases are made
    # of lengths of gradients, and of numbers of the steps up the loss
    clip: Positive | None = 2.0


@dataclass
class FsDgpmContext(StepContext):
    bases: Bases  # of other tasks, on the device
    lambdas: Tensor  # [columns of all layers], of the latest step
    removed: list[Tensor]  # the protected share of each step's length


class FsDgpm(Rehearsal):
    """Rehearsal at weights moved up the loss inside the protected subspaces, then projected.

    In their first round of a task, clients make the bases anew from the received model and their
    exemplars of other tasks; λ is 1 then and is learnt until the next task. The first-order form:
    the steps up the loss are constants, except in λ.
    """

    Params: ClassVar = FsDgpmParams
    fedavg_equivalent: ClassVar = {
        "memory": {"exemplars_per_class": 0},
        "inner_steps": 0,
        "epsilon": 0.0,
        "increment": 0.0,
        "clip": None,
    }

    def __init__(self, params: FsDgpmParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.layers = subspaces.find_layers(runtime)
        self.look_ahead = LookAhead(runtime)

    def init_client(self, client: int, server: State) -> State:
        bases = subspaces.empty_bases(self.layers)
        own = {"bases": bases, "lambdas": torch.ones(0)}  # λ of the columns of all layers
        # "protected": the experience for which the bases were made; -1: none
        return {**super().init_client(client, server), "protected": -1, **own}

    def start(self, client_round: ClientRound) -> FsDgpmContext:
        state = client_round.state
        device = self.runtime.device
        if state["protected"] == client_round.experience:
            bases = {name: basis.to(device) for name, basis in state["bases"].items()}
            lambdas = state["lambdas"].to(device)
        else:
            with client_round.log.clock("basis"):
                bases = self.new_bases(client_round)
            lambdas = torch.ones(sum(each.shape[1] for each in bases.values()), device=device)
        return FsDgpmContext(bases, lambdas, [])

    def new_bases(self, client_round: ClientRound) -> Bases:
        """Bases of the live model's inputs for exemplars of other tasks; without any no columns."""
        memory: Memory = client_round.state["memory"]
        empty = subspaces.empty_bases(self.layers, self.runtime.device)
        past = self.past_indices(client_round)
        if not len(past):
            return empty
        order = torch.randperm(len(past), generator=client_round.generator("basis"))
        images = memory["images"][past[order[: self.params.images]]]
        later = len(memory["tasks"][past].unique()) - 1
        epsilon = self.params.epsilon + later * self.params.increment
        return subspaces.grown_bases(self.runtime, self.layers, empty, images, epsilon)

    def finish(self, client_round: ClientRound, context: FsDgpmContext) -> None:
        if context.removed:
            client_round.log.numbers["removed"] = float(torch.stack(context.removed).mean())
            client_round.log.numbers["lambda"] = float(context.lambdas.mean())

    def update_state(self, client_round: ClientRound, context: FsDgpmContext) -> State:
        bases = {name: basis.cpu() for name, basis in context.bases.items()}
        client_round.log.numbers |= subspaces.filled(self.layers, bases)
        lambdas = context.lambdas.detach().cpu()
        own = {"protected": client_round.experience, "bases": bases, "lambdas": lambdas}
        return {**super().update_state(client_round, context), **own}

    def loss(self, batch: Batch, context: FsDgpmContext) -> Tensor:
        """The mean loss of new images and exemplars at the weights after each inner step."""
        params = self.params
        if not params.inner_steps:
            return super().loss(batch, context)
        context.lambdas = context.lambdas.detach().requires_grad_(params.soft != "off")
        tensors = self.model.tensors
        losses = list[Tensor]()
        offset = torch.zeros_like(self.model.parameters)
        for images, targets in new_parts(batch, params.inner_steps):
            logits = self.outputs_at(offset.detach(), images, update_norms=not losses)
            gradient = flatten_like(grad(F.cross_entropy(logits, targets), tensors), tensors)
            allowed = self.protected_part(gradient, context, others=gradient)
            if params.clip is not None:
                allowed = allowed.clamp(-params.clip, params.clip)
            offset = offset + params.eta1 * allowed
            logits = self.outputs_at(offset, batch.images)
            losses.append(self.weighted_loss(logits, batch, context))
        return torch.stack(losses).mean()

    def outputs_at(self, offset: Tensor, images: Tensor, update_norms: bool = False) -> Tensor:
        """Logits of the live model moved by `offset`.  # [N, classes]"""
        tensors = self.model.tensors
        moved = [a + b for a, b in zip(tensors, split_like(offset, tensors), strict=True)]
        return self.look_ahead(moved, images, update_norms)

    def protected_part(self, vector: Tensor, context: FsDgpmContext, others: Tensor) -> Tensor:
        """The part of a vector in the protected subspaces, each column times its λ.  # [P]"""
        bases = context.bases
        lambdas = context.lambdas.split([basis.shape[1] for basis in bases.values()])
        weights = dict(zip(bases, lambdas, strict=True))
        return subspaces.component(vector, self.layers, bases, others, weights)

    def correct_gradient(self, batch: Batch, context: FsDgpmContext) -> None:
        gradients = self.model.gradients
        self.clip(gradients)
        if not len(context.lambdas):
            return
        if (slope := context.lambdas.grad) is not None:
            self.clip(slope)
            lambdas = context.lambdas.detach() - self.params.eta2 * slope
            published = self.params.soft == "published"
            context.lambdas = torch.sigmoid(TAU * lambdas) if published else lambdas.clamp(0, 1)
        step = subspaces.descent_direction(self.runtime)
        inside = self.protected_part(step, context, others=torch.zeros_like(step))
        context.removed.append(inside.norm() / step.norm())
        gradients.sub_(inside)

    def clip(self, vector: Tensor) -> None:
        if self.params.clip is not None:
            vector.mul_((self.params.clip / vector.norm()).clamp(max=1))
