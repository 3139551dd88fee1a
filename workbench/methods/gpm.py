"""GPM (Saha et al., 2021): no step in the subspace of layers' inputs in past tasks."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.limits import NonNegative, PositiveInt
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Group, Method, State
from workbench.methods.base import subspaces
from workbench.methods.base.subspaces import Bases


@dataclass(frozen=True)
class GpmParams(FedAvgParams):
    """How large the protected subspaces are, and what is protected."""

    # share of the squares of a layer's inputs that its basis must hold
    epsilon: NonNegative = 0.95
    increment: NonNegative = 0.003  # added to it for every task learnt before
    images: PositiveInt = 125  # of a task, from which the bases are made
    # each gradient, or the whole update after free training
    project: Literal["step", "update"] = "step"
    # Log which share of the global update lies in the protected subspaces: the client keeps the
    # received model for that.
    drift: bool = False


@dataclass
class GpmContext(StepContext):
    bases: Bases  # of other tasks, on the device
    removed: list[Tensor]  # the protected share of each step's length


class Gpm(Method):
    """FedAvg whose clients project their gradients onto the complement of their past inputs."""

    Params: ClassVar = GpmParams
    fedavg_equivalent: ClassVar = {"epsilon": 0.0, "increment": 0.0}
    group: ClassVar[Group] = "continual"

    def __init__(self, params: GpmParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.layers = subspaces.find_layers(runtime)
        self.normalisation = torch.ones_like(self.model.parameters).bool()  # [P], where it is
        for layer in self.layers.values():
            layer.write(self.normalisation, torch.zeros(layer.shape))

    def init_client(self, client: int, server: State) -> State:
        bases = subspaces.empty_bases(self.layers)
        tasks = {name: torch.zeros(0, dtype=torch.int32) for name in bases}  # of each column
        # "received": to measure drift, the last received model, by its experience
        return {"bases": bases, "tasks": tasks, "experiences": [], "received": {}}

    def start(self, client_round: ClientRound) -> GpmContext:
        return GpmContext(self.other_columns(client_round), [])

    def other_columns(self, client_round: ClientRound) -> Bases:
        state = client_round.state
        bases = {n: m[:, state["tasks"][n] != client_round.task] for n, m in state["bases"].items()}
        return {name: basis.contiguous().to(self.runtime.device) for name, basis in bases.items()}

    def finish(self, client_round: ClientRound, context: GpmContext) -> None:
        if subspaces.has_columns(context.bases):
            self.log_drift(client_round, context.bases)
            if self.params.project == "update":
                end, start = self.model.parameters, client_round.message["parameters"]
                end.sub_(self.protected_part(end - start.to(end.device), context))
        if context.removed:
            client_round.log.numbers["removed"] = float(torch.stack(context.removed).mean())

    def correct_gradient(self, batch: Batch, context: GpmContext) -> None:
        if self.params.project == "step" and subspaces.has_columns(context.bases):
            step = subspaces.descent_direction(self.runtime)
            self.model.gradients.sub_(self.protected_part(step, context))

    def protected_part(self, step: Tensor, context: GpmContext) -> Tensor:
        """The protected part of a step, whose share of the length is noted.  # [P]"""
        fixed = step.where(self.normalisation, 0.0)
        inside = subspaces.component(step, self.layers, context.bases, fixed)
        context.removed.append(inside.norm() / step.norm())
        return inside

    def log_drift(self, client_round: ClientRound, bases: Bases) -> None:
        """Log the protected share of the global update since a round with the same bases."""
        before = client_round.state["received"].get(str(client_round.experience))
        if before is None:
            return
        move = (client_round.message["parameters"] - before).to(self.runtime.device)
        parts = {name: layer.matrix(move) for name, layer in self.layers.items()}
        inside = torch.cat([(part @ bases[name]).flatten() for name, part in parts.items()])
        whole = torch.cat([part.flatten() for part in parts.values()])
        client_round.log.numbers["drift"] = float(inside.norm() / whole.norm())

    def update_state(self, client_round: ClientRound, context: GpmContext) -> State:
        state = super().update_state(client_round, context)
        if self.params.drift:
            received = client_round.message["parameters"].clone()
            state = {**state, "received": {str(client_round.experience): received}}
        if len(client_round.indices) and self.is_due(client_round):
            with client_round.log.clock("basis"):
                state = {**state, **self.remember(client_round, context)}
        client_round.log.numbers |= subspaces.filled(self.layers, state["bases"])
        return state

    def remember(self, client_round: ClientRound, context: GpmContext) -> State:
        """The bases with the task's inputs at the trained model; its former ones are replaced."""
        state = client_round.state
        task = client_round.task
        draw = client_round.generator("basis")
        order = torch.randperm(len(client_round.indices), generator=draw)[: self.params.images]
        images = self.runtime.dataset.x_train[client_round.indices[order]]
        learnt = {each % client_round.plan.tasks for each in state["experiences"]} - {task}
        epsilon = self.params.epsilon + len(learnt) * self.params.increment
        grown = subspaces.grown_bases(self.runtime, self.layers, context.bases, images, epsilon)
        tasks = dict[str, Tensor]()
        for name, basis in grown.items():
            others = state["tasks"][name][state["tasks"][name] != task]
            tasks[name] = F.pad(others, (0, basis.shape[1] - len(others)), value=task)
        bases = {name: basis.cpu() for name, basis in grown.items()}
        return {"bases": bases, "tasks": tasks, "experiences": client_round.recorded}
