"""FedSSI (Li et al., 2025): synaptic intelligence, measured along a personalised surrogate."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stamp_core.config import above, at_least, fraction, wrong
from stamp_core.methods import DivergedError, Group, Method, ServerStep, State, Turn
from stamp_core.workspace import Workspace, augment

UNVERIFIED = "importance: its constants could not be verified against the paper"
MISSED = "importance: the last round of a task was missed, nothing is held of it"
OVERSHOT = "importance: the penalty overshoots, training.rate x alpha x importance is above 1"


@dataclass(frozen=True)
class Synapses(ServerStep):
    """How what a task needed is measured, and how strongly it is held."""

    # Not one of these numbers is verified: the authors published no code, third parties disagree.
    lam: float = 0.1  # of third parties: the surrogate is pulled by (1 - lam) / (2 lam)
    alpha: float = 0.1  # of third parties: weight of the penalty
    steps: int | None = None  # of the surrogate; no source says how many. null: one epoch
    epsilon: float = 0.1  # beside the squared way of a parameter, as in synaptic intelligence

    def __post_init__(self) -> None:
        """Refuse what would measure nothing or divide by it."""
        super().__post_init__()
        above(self, 0, "lam", "epsilon")
        fraction(self, "lam")
        at_least(self, 0, "alpha")
        if self.steps is not None:
            at_least(self, 1, "steps")

    @property
    def pull(self) -> float:
        """q(lam), how strongly the surrogate is tied to the global model."""
        return (1 - self.lam) / (2 * self.lam)


class FedSSI(Method):
    """FedAvg whose clients hold each parameter by how much it has mattered to their past tasks."""

    Params: ClassVar = Synapses
    neutral: ClassVar[dict[str, Any]] = {"alpha": 0.0}
    group: ClassVar[Group] = "continual"

    def __init__(self, params: Synapses, work: Workspace) -> None:
        super().__init__(params, work)
        rate = work.setting.training.rate
        if rate * params.pull >= 2:  # the surrogate would leave the global model behind, swinging
            least = f"above {rate / (4 + rate):.4g}, so that training.rate x (1 - lam) / (2 lam)"
            raise wrong("lam", params.lam, f"{least} is below 2")

    def new_client(self, client: int, server: State) -> State:
        """No importance yet, and nothing missed."""
        return {"step": -1, "measured": True}

    def receive(self, turn: Turn) -> None:
        """Take up the received model; the first one of a task is what the task is held to."""
        super().receive(turn)
        state, anchor = turn.state, turn.state.get("anchor")
        if state["step"] != turn.visit.step:
            anchor = turn.message["parameters"].clone()
            missed = turn.visit.step - 1 - state["step"] + (not state["measured"])
            turn.log.events += [MISSED] * missed
            if self.overshoots(turn):
                turn.log.events.append(OVERSHOT)
        if "omega" in state:
            held = {"omega": state["omega"], "anchor": anchor}
            turn.notes |= {name: value.to(self.work.device) for name, value in held.items()}

    def overshoots(self, turn: Turn) -> bool:
        """Whether a step of the penalty alone leads further away from the anchor than it was."""
        largest = turn.state["omega"].max() if "omega" in turn.state else 0
        return bool(self.work.setting.training.rate * self.params.alpha * largest > 1)

    def correct(self, turn: Turn) -> None:
        """Add the slope of alpha * sum(omega * (theta - anchor)^2) to the gradient."""
        if "omega" in turn.notes:
            away = self.work.model.parameters - turn.notes["anchor"]
            strength = 2 * self.params.alpha
            self.work.model.gradients.addcmul_(turn.notes["omega"], away, value=strength)

    def remember(self, turn: Turn) -> State:
        """The anchor and, at the end of a task, the importance with that of the task."""
        state = {**super().remember(turn), "step": turn.visit.step, "measured": turn.visit.last}
        if "anchor" in turn.notes:
            state["anchor"] = turn.notes["anchor"].cpu()
        if turn.visit.last and len(turn.indices):  # now, while the task's pictures are at hand
            with turn.log.clock("importance"):
                state["omega"] = state.get("omega", 0) + self.importance(turn).cpu()
            turn.log.numbers["importance mean"] = float(state["omega"].mean())
            turn.log.numbers["importance largest"] = float(state["omega"].max())
            turn.log.events.append(UNVERIFIED)
        return state

    def importance(self, turn: Turn) -> Tensor:
        """What each parameter did for the task, by the way it went for it.  # [P]

        The live model is left as it was, with its buffers.
        """
        model = self.work.model
        trained, buffers = model.parameters.clone(), model.buffers.clone()
        super().receive(turn)
        start = model.parameters.clone()
        gained = self.descend(turn, start)
        moved = model.parameters - start
        model.load(trained, buffers)
        # Below the bound on lam no sum of plain steps is negative, rounding apart: whether to cut
        # off at 0, which the sources leave open, makes no difference.
        found: Tensor = gained.clamp(min=0) / (moved.square() + self.params.epsilon)
        if not found.isfinite().all():
            raise DivergedError(turn.visit, self.work.setting)
        return found

    def descend(self, turn: Turn, start: Tensor) -> Tensor:
        """Train the surrogate in the live model; by how much each parameter lowered the loss."""
        model, gained = self.work.model, torch.zeros_like(start)
        for pictures, labels in self.again(turn):
            self.work.train_mode(len(labels))
            model.gradients.zero_()
            self.loss(turn, pictures, labels).backward()
            way = model.gradients.add(model.parameters - start, alpha=self.params.pull)
            way.mul_(-self.work.setting.training.rate)  # the pull too: as it is, it would diverge
            gained.addcmul_(model.gradients, way, value=-1)
            model.parameters.add_(way)
        return gained

    def again(self, turn: Turn) -> Iterator[tuple[Tensor, Tensor]]:
        """The task's pictures in batches, as often as the surrogate takes steps."""
        work, training = self.work, self.work.setting.training
        draw = turn.visit.generator("surrogate")
        left = self.params.steps or math.ceil(len(turn.indices) / training.batch)
        while left:
            shuffled = turn.indices[torch.randperm(len(turn.indices), generator=draw)]
            for batch in shuffled.split(training.batch)[:left]:
                pictures, labels = work.examples(batch)
                yield work.normalise(augment(pictures, training, draw)), labels
                left -= 1
