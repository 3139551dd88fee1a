"""FedALA (Zhang et al., 2023): every client mixes what it receives with its own last model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import above, at_least, wrong
from stamp_core.methods import Group, Method, ServerStep, State, Turn
from stamp_core.vectors import flatten
from stamp_core.workspace import Workspace

RECENT = 10  # epochs whose losses say whether the mixing weights have settled
UNSETTLED = "mixing: the weights had not settled when their first time was cut off"


@dataclass(frozen=True)
class Mixture(ServerStep):
    """What is mixed, and how the mixing weights are learnt."""

    rate: float = 1.0  # of the mixing weights
    share: float = 0.8  # of the client's pictures: the window that they are learnt on
    window: Literal["contiguous", "random"] = "contiguous"  # in a list by class that omits classes
    tensors: int = 2  # from the end; in the paper layers, in the code tensors: weight and bias
    threshold: float = 0.1  # deviation of recent losses; the code's: 0.01 as in the paper may fail
    most: int = 50  # epochs of the first time, which in the published loop may never end
    refresh: Literal["kept", "task"] = "kept"  # "task": a new task learns its weights afresh

    def __post_init__(self) -> None:
        """Refuse a mixture of nothing, and a window without pictures or larger than the list."""
        super().__post_init__()
        at_least(self, 0, "rate")
        above(self, 0, "share", "threshold")
        at_least(self, 1, "tensors", "most")
        if self.share > 1:
            raise wrong("share", self.share, "above 0 and at most 1")


class FedALA(Method):
    """FedAvg whose clients start from an element-wise mixture learnt on their own pictures."""

    Params: ClassVar = Mixture
    models = ("global", "personal", "local")  # personal: the mixture, before training
    neutral: ClassVar[dict[str, Any]] = {"rate": 0.0}
    group: ClassVar[Group] = "personalised"

    def __init__(self, params: Mixture, work: Workspace) -> None:
        super().__init__(params, work)
        every = list(work.model.module.parameters())
        if params.tensors > len(every):
            raise wrong("tensors", params.tensors, f"at most {len(every)}: the model has no more")
        self.mixed = every[-params.tensors :]
        self.size = sum(tensor.numel() for tensor in self.mixed)  # M

    def new_client(self, client: int, server: State) -> State:
        """The initial model as its own, and weights that take all from the server."""
        own = server["parameters"][-self.size :].clone()
        return {"own": own, "weights": torch.ones_like(own), "settled": False, "step": -1}

    def receive(self, turn: Turn) -> None:
        """Put the mixture into the live model, and its weights into the notes."""
        super().receive(turn)
        device, state = self.work.device, turn.state
        afresh = self.params.refresh == "task" and state["step"] != turn.visit.step
        weights = torch.ones_like(state["weights"]) if afresh else state["weights"].clone()
        turn.notes["settled"] = state["settled"] and not afresh
        turn.notes["weights"] = weights.to(device)  # [M]
        own, live = state["own"].to(device), self.work.model.parameters[-self.size :]
        if not torch.equal(own, live):  # else there is nothing to mix
            with turn.log.clock("mixing"):
                self.mix(turn, own, live.clone())

    def mix(self, turn: Turn, own: Tensor, received: Tensor) -> None:
        """Learn the mixing weights on the window: one epoch, the first time until they settle."""
        self.blend(own, received, turn.notes["weights"])
        window, losses, first = self.window(turn), list[float](), not turn.notes["settled"]
        if not len(window):
            return
        most = self.params.most if first else 1
        while len(losses) < most and not settled(losses, self.params.threshold):
            losses.append(self.epoch(window, own, received, turn.notes["weights"]))
        if first and not settled(losses, self.params.threshold):
            turn.log.events.append(UNSETTLED)
        turn.notes["settled"] = True
        turn.log.numbers["mixing epochs"] = len(losses)
        turn.log.numbers["mixing weight"] = float(turn.notes["weights"].mean())

    def epoch(self, window: Tensor, own: Tensor, received: Tensor, weights: Tensor) -> float:
        """Descend once over the window, in the weights alone; the loss of the last batch."""
        for pictures, labels in self.look_at(window):
            # In evaluation mode: what lies below the mixed tensors, running statistics too, stays.
            loss = F.cross_entropy(self.work.model.module.eval()(pictures), labels)
            slope = flatten(torch.autograd.grad(loss, self.mixed))  # [M]
            weights.sub_(self.params.rate * slope * (received - own)).clamp_(0, 1)
            self.blend(own, received, weights)
        return float(loss.detach())

    def blend(self, own: Tensor, received: Tensor, weights: Tensor) -> None:
        """Put own + weights * (received - own) into the live model; 1 is exactly `received`."""
        self.work.model.parameters[-self.size :] = torch.lerp(own, received, weights)

    def window(self, turn: Turn) -> Tensor:
        """Which of the client's pictures the weights are learnt on.  # [n]

        Always of the current task: the public port to continual learning keeps those of the first.
        """
        own, draw = self.examples(turn), turn.visit.generator("window")
        if self.params.window == "random":
            own = own[torch.randperm(len(own), generator=draw)]
        count = min(len(own), max(1, math.floor(self.params.share * len(own))))
        start = int(torch.randint(len(own) - count + 1, (1,), generator=draw))
        return own[start : start + count]

    def look_at(self, window: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The pictures of the window as they are, in order, in batches."""
        work = self.work
        for batch in window.split(work.setting.training.batch):
            pictures, labels = work.examples(batch)
            yield work.normalise(pictures), labels

    def remember(self, turn: Turn) -> State:
        """The mixed tensors after training, and the weights; the rest comes from the server."""
        own = self.work.model.parameters[-self.size :].cpu().clone()
        kept = {"own": own, "weights": turn.notes["weights"].cpu().clone()}
        now = {"settled": turn.notes["settled"], "step": turn.visit.step}
        return {**super().remember(turn), **kept, **now}


def settled(losses: list[float], threshold: float) -> bool:
    """Whether more than `RECENT` epochs are over and the losses of the last ones hardly differ."""
    return len(losses) > RECENT and bool(np.std(losses[-RECENT:]) < threshold)
