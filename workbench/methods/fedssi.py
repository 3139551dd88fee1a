"""FedSSI (Li et al., 2025): synaptic intelligence, measured along a personalised surrogate."""

import math
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative, OpenFraction, Positive
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Method, State

UNVERIFIED = "importance: the constants could not be verified against the paper"
MISSED = "importance: the last round of a task was missed, the task has no importance"
OVERSHOT = "importance: the penalty overshoots, training.lr x fedssi_alpha x importance is above 1"


@dataclass(frozen=True)
class FedSSIParams(FedAvgParams):
    """How importance is measured and changes are penalised; no code was published."""

    # λ, from third parties: the surrogate's proximal weight is (1 - λ) / (2 λ)
    lam: OpenFraction = 0.1
    fedssi_alpha: NonNegative = 0.1  # α of FedSSI, from third parties: weight of the penalty
    epsilon: Positive = 0.1  # damping of the importance, as in synaptic intelligence

    @property
    def pull(self) -> float:
        return (1 - self.lam) / (2 * self.lam)


@dataclass
class FedSSIContext(StepContext):
    """What the steps read besides their batches: nothing before there is an importance."""

    omega: Tensor | None  # [P]
    anchor: Tensor | None  # [P]


class FedSSI(Method):
    """FedAvg with a penalty by importance Ω for past tasks, at unverified constants."""

    Params: ClassVar = FedSSIParams
    fedavg_equivalent: ClassVar = {"fedssi_alpha": 0.0}
    group = "continual"
    graph_safe = True

    def __init__(self, params: FedSSIParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        lr = runtime.training.lr
        if lr * params.pull >= 2:  # SGD on the surrogate would diverge
            least = f"above {lr / (4 + lr):.4g}, so that training.lr x (1 - lam) / (2 lam)"
            raise invalid("lam", params.lam, f"{least} is below 2")

    def init_client(self, client: int, server: State) -> State:
        """No importance Ω yet, and none missed; with one the "anchor" of the task [P]."""
        return {"experiences": [], "measured": True}

    def start(self, client_round: ClientRound) -> FedSSIContext:
        state = client_round.state
        if client_round.first:
            self.log_start(client_round, state)
        if "omega" not in state:
            return FedSSIContext(None, None)
        first = client_round.first
        anchor = client_round.message["parameters"] if first else state["anchor"]
        device = self.runtime.device
        return FedSSIContext(state["omega"].to(device), anchor.to(device, copy=True))

    def log_start(self, client_round: ClientRound, state: State) -> None:
        latest = max(state["experiences"], default=-1)
        missed = client_round.experience - 1 - latest + (not state["measured"])
        client_round.log.events += [MISSED] * missed
        strength = self.runtime.lr * self.params.fedssi_alpha
        if "omega" in state and strength * state["omega"].max() > 1:
            client_round.log.events.append(OVERSHOT)

    def correct_gradient(self, batch: Batch, context: FedSSIContext) -> None:
        """Add the gradient of fedssi_alpha * sum(omega * (theta - anchor)^2)."""
        if context.omega is not None and context.anchor is not None:
            drift = self.model.parameters - context.anchor
            weight = 2 * self.params.fedssi_alpha
            self.model.gradients.addcmul_(context.omega, drift, value=weight)

    def update_state(self, client_round: ClientRound, context: FedSSIContext) -> State:
        log = client_round.log
        state = super().update_state(client_round, context)
        state = {**state, "experiences": client_round.recorded, "measured": client_round.last}
        if context.anchor is not None:
            state["anchor"] = context.anchor.cpu()
        if client_round.last and len(client_round.indices):  # the last access to the task's images
            with log.clock("importance"):
                state["omega"] = state.get("omega", 0) + self.importance(client_round, context)
            log.numbers["importance mean"] = float(state["omega"].mean())
            log.numbers["importance largest"] = float(state["omega"].max())
            log.events.append(UNVERIFIED)
        return state

    def importance(self, client_round: ClientRound, context: FedSSIContext) -> Tensor:
        """The path integral of each parameter over its squared displacement; on the CPU.  # [P]

        The live model is restored. Below the bound on lam no path integral is negative (up to
        rounding): whether to clamp at 0, which the sources leave open, makes no difference.
        """
        trained = self.local_model(context)
        self.receive(client_round)
        start = self.model.parameters.clone()
        integral = self.train_surrogate(client_round, context, start)
        displacement = self.model.parameters - start
        self.model.load(*trained)
        omega: Tensor = integral.clamp(min=0) / (displacement.square() + self.params.epsilon)
        self.require_finite(omega, client_round)
        return omega.cpu()

    def train_surrogate(
        self, client_round: ClientRound, context: FedSSIContext, start: Tensor
    ) -> Tensor:
        """Train the surrogate for an epoch; the path integrals, -sum g * dv.  # [P]"""
        model = self.model
        training = self.runtime.training
        integral = torch.zeros_like(start)
        indices = client_round.indices
        steps = math.ceil(len(indices) / training.batch_size)
        batches = self.runtime.endless_batches(client_round, indices, "surrogate")
        for batch in islice(batches, steps):
            self.runtime.start_step(len(batch))
            self.loss(batch, context).backward()
            step = model.gradients.add(model.parameters - start, alpha=self.params.pull)
            step.mul_(-self.runtime.lr)  # of the proximal term too, which would diverge without lr
            integral.addcmul_(model.gradients, step, value=-1)
            model.parameters.add_(step)
        return integral
