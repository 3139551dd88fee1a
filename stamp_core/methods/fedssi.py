"""FedSSI (Li et al., 2025): synaptic intelligence, measured along a personalised surrogate."""

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from stamp_core.client.personalisation import endless_batches
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_above, require_at_least, require_fraction
from stamp_core.methods.base.method import ClientRound, DivergedError, FedAvgParams, Method, State

UNVERIFIED = "importance: the constants could not be verified against the paper"
MISSED = "importance: the last round of a task was missed, the task has no importance"
OVERSHOT = "importance: the penalty overshoots, training.lr x fedssi_alpha x importance is above 1"


@dataclass(frozen=True)
class FedSSIParams(FedAvgParams):
    """How the importance of parameters is measured, and how strongly changes are penalised.

    No default is verified: the authors published no code, and third parties disagree.
    """

    lam: float = 0.1  # λ, from third parties: the surrogate's proximal weight is (1 - λ) / (2 λ)
    fedssi_alpha: float = 0.1  # α of FedSSI, from third parties: weight of the penalty
    steps: int | None = None  # SGD steps of the surrogate, in no source; null: one epoch
    epsilon: float = 0.1  # damping of the importance, as in synaptic intelligence

    def __post_init__(self) -> None:
        """Refuse parameters that measure nothing or divide by zero."""
        super().__post_init__()
        require_above(self, 0, "lam", "epsilon")
        require_fraction(self, "lam")
        require_at_least(self, 0, "fedssi_alpha")
        if self.steps is not None:
            require_at_least(self, 1, "steps")

    @property
    def pull(self) -> float:
        """q(λ), the proximal weight that ties the surrogate to the global model."""
        return (1 - self.lam) / (2 * self.lam)


class FedSSI(Method):
    """FedAvg with a penalty by importance Ω for past tasks, at unverified constants."""

    Params: ClassVar = FedSSIParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {"fedssi_alpha": 0.0}
    group = "continual"
    captures, step_inputs = True, ("omega", "anchor")

    def __init__(self, params: FedSSIParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        lr = runtime.training.lr
        if lr * params.pull >= 2:  # SGD on the surrogate would diverge
            least = f"above {lr / (4 + lr):.4g}, so that training.lr x (1 - lam) / (2 lam)"
            raise invalid("lam", params.lam, f"{least} is below 2")

    def init_client(self, client: int, server: State) -> State:
        """No importance yet, and none missed."""
        return {"experience": -1, "measured": True}

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model; the first one of a task is the anchor of the penalty."""
        super().receive(client_round)
        state, anchor = client_round.state, client_round.state.get("anchor")
        if state["experience"] != client_round.experience:
            anchor = client_round.message["parameters"].clone()
            missed = client_round.experience - 1 - state["experience"] + (not state["measured"])
            client_round.log.events += [MISSED] * missed
            largest = state["omega"].max() if "omega" in state else 0
            if self.runtime.training.lr * self.params.fedssi_alpha * largest > 1:
                client_round.log.events.append(OVERSHOT)
        if "omega" in state:
            held = {"omega": state["omega"], "anchor": anchor}
            client_round.scratch |= {name: held[name].to(self.runtime.device) for name in held}

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Add the gradient of fedssi_alpha * sum(omega * (theta - anchor)^2)."""
        omega, model = client_round.scratch.get("omega"), self.model
        if omega is not None:
            drift = model.parameters - client_round.scratch["anchor"]
            model.gradients.addcmul_(omega, drift, value=2 * self.params.fedssi_alpha)

    def update_state(self, client_round: ClientRound) -> State:
        """The anchor and, after the last round of a task, Ω with the importance of the task."""
        log = client_round.log
        state = {**super().update_state(client_round), "measured": client_round.last}
        state["experience"] = client_round.experience
        if "anchor" in client_round.scratch:
            state["anchor"] = client_round.scratch["anchor"].cpu()
        if client_round.last and len(client_round.indices):  # the last access to the task's images
            with log.clock("importance"):
                state["omega"] = state.get("omega", 0) + self.importance(client_round).cpu()
            log.numbers["importance mean"] = float(state["omega"].mean())
            log.numbers["importance largest"] = float(state["omega"].max())
            log.events.append(UNVERIFIED)
        return state

    def importance(self, client_round: ClientRound) -> Tensor:
        """The path integral of each parameter over its squared displacement; the model is restored.

        Below the bound on lam no path integral is negative (up to rounding): whether to clamp at
        0, which the sources leave open, makes no difference.
        """
        model = self.model
        trained, buffers = model.parameters.clone(), model.buffers.clone()
        super().receive(client_round)
        start = model.parameters.clone()
        integral = self.train_surrogate(client_round, start)
        displacement = model.parameters - start
        model.load(trained, buffers)
        omega: Tensor = integral.clamp(min=0) / (displacement.square() + self.params.epsilon)
        if not omega.isfinite().all():
            raise DivergedError(client_round.round_id, self.runtime.setting)
        return omega  # [P]

    def train_surrogate(self, client_round: ClientRound, start: Tensor) -> Tensor:
        """Train the surrogate in the live model; returns the path integral, -sum g * dv.  # [P]"""
        runtime, model, indices = self.runtime, self.model, client_round.indices
        training, integral = runtime.training, torch.zeros_like(start)
        steps = self.params.steps or math.ceil(len(indices) / training.batch_size)
        batches = endless_batches(runtime, client_round.round_id, indices, "surrogate")
        for images, labels in islice(batches, steps):
            runtime.train_mode(len(labels))
            model.gradients.zero_()
            self.loss(client_round, images, labels).backward()
            step = model.gradients.add(model.parameters - start, alpha=self.params.pull)
            step.mul_(-training.lr)  # of the proximal term too, which would diverge without lr
            integral.addcmul_(model.gradients, step, value=-1)
            model.parameters.add_(step)
        return integral
