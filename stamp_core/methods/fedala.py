"""FedALA (Zhang et al., 2023): adaptive local aggregation of the received and the own model."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.personalisation import plain_batches
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_above, require_at_least
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Method, State
from stamp_core.models.flat import flatten_like

RECENT = 10  # epochs whose losses decide whether the weights have converged
NOT_CONVERGED = "aggregation weights: not converged within max_epochs"


@dataclass(frozen=True)
class FedALAParams(FedAvgParams):
    """Which tensors are aggregated locally, and how the weights W are learnt."""

    # η_w x training.lr, published: 1.0 x 0.005. W is learnt at η_w = lr_product / training.lr: its
    # gradient is that of the loss times received - own, a difference between updates, which is
    # proportional to training.lr (to first order), so the steps of W do not depend on it.
    lr_product: float = 0.005
    share: float = 0.8  # s: W is learnt on a window of this share of the client's images
    window: Literal["contiguous", "random"] = "contiguous"  # lists are by class: it omits classes
    tensors: int = 2  # p, from the last; the paper counts layers, the public code tensors
    threshold: float = 0.1  # of the deviation of recent losses; the paper's 0.01 may never be met
    max_epochs: int = 50  # until W converges for the first time; the public code has no limit
    refresh: Literal["kept", "task"] = "kept"  # "task": each new task starts from W = 1

    def __post_init__(self) -> None:
        """Refuse an empty set of tensors and a window that is empty or larger than the list."""
        super().__post_init__()
        require_at_least(self, 0, "lr_product")
        require_above(self, 0, "share", "threshold")
        require_at_least(self, 1, "tensors", "max_epochs")
        if self.share > 1:
            raise invalid("share", self.share, "above 0 and at most 1")


class FedALA(Method):
    """FedAvg whose clients start from own + W * (received - own), W in [0, 1] per element.

    Where W is 1 this is exactly the received model.
    """

    Params: ClassVar = FedALAParams
    models = ("global", "personal", "local")  # personal: after local aggregation, before training
    fedavg_equivalent: ClassVar[dict[str, Any]] = {"lr_product": 0.0}
    group = "personalised"

    def __init__(self, params: FedALAParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        tensors = runtime.model.tensors
        if params.tensors > len(tensors):
            most = f"at most {len(tensors)}: the model has no more"
            raise invalid("tensors", params.tensors, most)
        self.tensors = tensors[-params.tensors :]
        self.size = sum(tensor.numel() for tensor in self.tensors)  # M

    def init_client(self, client: int, server: State) -> State:
        """The initial model as the own one, and W = 1: all is taken from the server."""
        own = server["parameters"][-self.size :].clone()
        return {"own": own, "weights": torch.ones_like(own), "settled": False, "experience": -1}

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model, then aggregate its last tensors with the own ones."""
        super().receive(client_round)
        state, device = client_round.state, self.runtime.device
        restart = self.params.refresh == "task" and state["experience"] != client_round.experience
        weights = torch.ones_like(state["weights"]) if restart else state["weights"].clone()
        client_round.scratch["weights"] = weights.to(device)  # [M]
        client_round.scratch["settled"] = state["settled"] and not restart
        own, live = state["own"].to(device), self.model.parameters[-self.size :]
        if not torch.equal(own, live):  # equal tensors need no aggregation
            with client_round.log.clock("mixing"):
                self.learn_weights(client_round, own, live.clone())

    def learn_weights(self, client_round: ClientRound, own: Tensor, received: Tensor) -> None:
        """Learn W on the window: until it converges the first time, then one epoch per round."""
        weights, first = client_round.scratch["weights"], not client_round.scratch["settled"]
        self.model.parameters[-self.size :] = torch.lerp(own, received, weights)
        window, losses = self.window(client_round), list[float]()
        if not len(window):
            return
        epochs, threshold = self.params.max_epochs if first else 1, self.params.threshold
        while len(losses) < epochs and not _converged(losses, threshold):
            losses.append(self.epoch(window, own, received, weights))
        if first and not _converged(losses, threshold):
            client_round.log.events.append(NOT_CONVERGED)
        client_round.scratch["settled"] = True
        client_round.log.numbers["mixing epochs"] = len(losses)
        client_round.log.numbers["mixing weight"] = float(weights.mean())

    def epoch(self, window: Tensor, own: Tensor, received: Tensor, weights: Tensor) -> float:
        """One epoch of SGD on W alone; returns the loss of the last batch."""
        runtime, training = self.runtime, self.runtime.training
        lr = self.params.lr_product / training.lr  # not 0: then own and received model are equal
        for images, labels in plain_batches(runtime, window, training.batch_size):
            loss = F.cross_entropy(runtime.model.module.eval()(images), labels)  # fixed statistics
            slopes = torch.autograd.grad(loss, self.tensors)
            gradient = flatten_like(slopes, self.tensors)  # [M]
            weights.sub_(lr * gradient * (received - own)).clamp_(0, 1)
            runtime.model.parameters[-self.size :] = torch.lerp(own, received, weights)
        return float(loss.detach())

    def window(self, client_round: ClientRound) -> Tensor:
        """The training images of the current task on which W is learnt.  # [n]"""
        indices, draw = self.train_indices(client_round), client_round.round_id.generator("window")
        if self.params.window == "random":
            indices = indices[torch.randperm(len(indices), generator=draw)]
        count = min(len(indices), max(1, math.floor(self.params.share * len(indices))))
        start = int(torch.randint(len(indices) - count + 1, (1,), generator=draw))
        return indices[start : start + count]

    def update_state(self, client_round: ClientRound) -> State:
        """The last tensors after training, and W."""
        scratch, own = client_round.scratch, self.model.parameters[-self.size :]
        return {
            **super().update_state(client_round),
            "own": own.cpu().clone(),
            "weights": scratch["weights"].cpu().clone(),
            "settled": scratch["settled"],
            "experience": client_round.experience,
        }


def _converged(losses: list[float], threshold: float) -> bool:
    """Whether there are more than `RECENT` losses and the last ones hardly differ."""
    return len(losses) > RECENT and bool(np.std(losses[-RECENT:]) < threshold)
