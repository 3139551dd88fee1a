"""GPM (Saha et al., 2021): no step in the subspace of layers' inputs in past tasks."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from stamp_core.client import subspaces
from stamp_core.client.runtime import ClientRuntime
from stamp_core.client.subspaces import Bases
from stamp_core.config.decode import require_at_least
from stamp_core.methods.base.drift import log_drift, received
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Group, Method, State


@dataclass(frozen=True)
class GpmParams(FedAvgParams):
    """How large the protected subspaces are, and what is protected."""

    epsilon: float = 0.95  # share of the squares of a layer's inputs that its basis must hold
    increment: float = 0.003  # added to it for every task learnt before
    images: int = 125  # of a task, from which the bases are made
    # Each gradient, or the whole update after free training.
    project: Literal["step", "update"] = "step"
    # The one head: like every layer | rows of the client's past classes are fixed | not protected.
    head: Literal["project", "mask", "free"] = "project"
    # A column of the weights' matrix, for an input of 1 | fixed after the first task | free.
    bias: Literal["joint", "freeze", "free"] = "joint"
    # Start from the received model | where it acts on past inputs, from the client's own past.
    receive: Literal["global", "protect"] = "global"
    # Log which share of the global update lies in the protected subspaces: the client keeps the
    # received model for that.
    drift: bool = False

    def __post_init__(self) -> None:
        """Refuse negative shares and bases of no image."""
        super().__post_init__()
        require_at_least(self, 0, "epsilon", "increment")
        require_at_least(self, 1, "images")


class Gpm(Method):
    """FedAvg whose clients project their gradients onto the complement of their past inputs.

    The average of such updates is orthogonal to a client's past only where all clients have the
    same past. State: "bases" (of each layer), "tasks" (for which a column was added) and, if past
    outputs are restored, "outputs" (of a layer for each column, as an input).
    """

    Params: ClassVar = GpmParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {"epsilon": 0.0, "increment": 0.0}
    group: ClassVar[Group] = "continual"

    def __init__(self, params: GpmParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        head = params.head == "project"
        self.layers = subspaces.find_layers(runtime, joint=params.bias == "joint", head=head)
        if params.receive == "protect":
            self.models = ("global", "personal", "local")

    def init_client(self, client: int, server: State) -> State:
        """Bases without columns; `experiences` lists those whose inputs have been added."""
        bases = {name: torch.zeros(layer.shape[1], 0) for name, layer in self.layers.items()}
        tasks = {name: torch.zeros(0, dtype=torch.int32) for name in bases}
        return {"bases": bases, "tasks": tasks, "experiences": []}

    # --- training

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model, on request with the own outputs for other tasks' inputs."""
        super().receive(client_round)
        self.restore(client_round.state, client_round.task)

    def load_personal_model(self, client_round: ClientRound) -> None:
        """Load the received model with the own outputs for the inputs of all tasks."""
        super().receive(client_round)
        self.restore(client_round.state)

    def restore(self, state: State, task: int = -1) -> None:
        """Give the live layers the outputs that they had for the columns of tasks but `task`.

        Outputs are kept only with `receive: protect`.
        """
        if "outputs" not in state:
            return
        vector, bases = self.model.parameters, self.columns(state, "bases", task)
        for name, outputs in self.columns(state, "outputs", task).items():
            layer, basis = self.layers[name], bases[name]
            weight = layer.matrix(vector)
            layer.write(vector, weight + (outputs - weight @ basis) @ basis.T)

    def columns(self, state: State, kind: str, task: int) -> Bases:
        """What is kept for each column that was not added for `task`, on the device."""
        others = {n: kept[:, state["tasks"][n] != task] for n, kept in state[kind].items()}
        return {n: kept.contiguous().to(self.runtime.device) for n, kept in others.items()}

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD, of which every step or the whole update is projected."""
        scratch, log = client_round.scratch, client_round.log
        bases = self.columns(client_round.state, "bases", client_round.task)
        if not subspaces.has_columns(bases):
            return super().train(client_round)
        if self.params.drift:
            log_drift(client_round, self.layers, bases)
        scratch |= {"bases": bases, "fixed": self.fixed(client_round), "removed": []}
        start = self.model.parameters.clone()
        losses = super().train(client_round)
        if self.params.project == "update":
            end = self.model.parameters
            end.sub_(self.removed(client_round, end - start))
        if scratch["removed"]:
            log.numbers["removed"] = float(torch.stack(scratch["removed"]).mean())
        return losses

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Take the protected part from the gradient, and from what weight decay will add to it."""
        if "bases" in client_round.scratch and self.params.project == "step":
            step = subspaces.descent_direction(self.runtime)
            self.model.gradients.sub_(self.removed(client_round, step))

    def removed(self, client_round: ClientRound, step: Tensor) -> Tensor:
        """The protected part of a step, whose share of the length is noted.  # [P]"""
        scratch = client_round.scratch
        inside = subspaces.component(step, self.layers, scratch["bases"])
        inside = torch.where(scratch["fixed"], step, inside)
        scratch["removed"].append(inside.norm() / step.norm())
        return inside

    def fixed(self, client_round: ClientRound) -> Tensor:
        """Which parameters do not move once anything is protected.  # bool [P]

        Those of normalisation and, as the parameters say, biases and rows of the head.
        """
        fixed = torch.ones(len(self.model.parameters), dtype=torch.bool)
        for name, layer in subspaces.find_layers(self.runtime).items():
            fixed[layer.weight] = False
            if layer.bias is not None:
                fixed[layer.bias] = self.params.bias == "freeze" and name in self.layers
            if name == "head" and self.params.head == "mask":
                past = self.past_classes(client_round)
                fixed[layer.weight].view(self.runtime.classes, -1)[past] = True
                fixed[layer.bias][past] = True
        return fixed.to(self.runtime.device)

    def past_classes(self, client_round: ClientRound) -> list[int]:
        """The classes of the client's other tasks so far that are not in the current one."""
        tasks = client_round.plan.clients[client_round.client]
        past = {label for task in self.past_tasks(client_round) for label in tasks[task].classes}
        return sorted(past - set(tasks[client_round.task].classes))

    def past_tasks(self, client_round: ClientRound) -> set[int]:
        """The other tasks whose inputs are in the bases."""
        experiences, tasks = client_round.state["experiences"], client_round.plan.tasks
        return {each % tasks for each in experiences} - {client_round.task}

    # --- the bases

    def update_state(self, client_round: ClientRound) -> State:
        """The state with the task's inputs in the bases, made after training in the last round.

        Where clients may miss the last round, they are also made in their first round of the task.
        """
        state, training = super().update_state(client_round), self.runtime.training
        if self.params.drift:
            state = {**state, **received(client_round)}
        first = client_round.experience not in state["experiences"]
        may_miss = training.participation < 1 or training.dropout > 0
        if len(client_round.indices) and (client_round.last or (first and may_miss)):
            with client_round.log.clock("basis"):
                state = self.remember(client_round, state)
        client_round.log.numbers |= subspaces.filled(self.layers, state["bases"])
        return state

    def remember(self, client_round: ClientRound, state: State) -> State:
        """The state with bases of the inputs at the trained model; the task's own are replaced."""
        indices, task = client_round.indices, client_round.task
        order = torch.randperm(len(indices), generator=client_round.round_id.generator("basis"))
        images = self.runtime.dataset.x_train[indices[order[: self.params.images]]]
        inputs = subspaces.layer_inputs(self.runtime, self.layers, images)
        learnt = len(self.past_tasks(client_round))
        epsilon = min(1.0, self.params.epsilon + learnt * self.params.increment)
        bases, tasks, outputs = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for name, held in self.columns(state, "bases", task).items():
            basis = subspaces.grow(held.double(), inputs[name], epsilon).float()
            others = state["tasks"][name][state["tasks"][name] != task]
            new = basis.shape[1] - len(others)
            tasks[name] = torch.cat([others, torch.full((new,), task, dtype=torch.int32)])
            bases[name] = basis.cpu()
            outputs[name] = (self.layers[name].matrix(self.model.parameters) @ basis).cpu()
        experiences = sorted({*state["experiences"], client_round.experience})
        state = {**state, "bases": bases, "tasks": tasks, "experiences": experiences}
        return {**state, "outputs": outputs} if self.params.receive == "protect" else state
