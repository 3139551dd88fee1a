"""FedALA (Zhang et al., 2023): adaptive local aggregation of the received and the own model."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative, Positive, PositiveInt, Share
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
    lr_product: NonNegative = 0.005
    share: Share = 0.8  # s: W is learnt on a window of this share of the client's images
    window: Literal["contiguous", "random"] = "contiguous"  # lists are by class: it omits classes
    tensors: PositiveInt = 2  # p, from the last; the paper counts layers, the public code tensors
    # of the deviation of recent losses; the paper's 0.01 may never be met
    threshold: Positive = 0.1
    # until W converges for the first time; the public code has no limit
    max_epochs: PositiveInt = 50
    refresh: Literal["kept", "task"] = "kept"  # "task": each new task starts from W = 1


@dataclass
class FedALAContext(StepContext):
    weights: Tensor  # [M]
    settled: bool


class FedALA(Method):
    """FedAvg whose clients start from own + W * (received - own), W in [0, 1] per element."""

    Params: ClassVar = FedALAParams
    models = ("global", "personal", "local")  # personal: after local aggregation, before training
    fedavg_equivalent: ClassVar = {"lr_product": 0.0}
    group = "personalised"

    def __init__(self, params: FedALAParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        tensors = self.model.tensors
        if params.tensors > len(tensors):
            most = f"at most {len(tensors)}: the model has no more"
            raise invalid("tensors", params.tensors, most)
        self.tensors = tensors[-params.tensors :]
        self.size = sum(tensor.numel() for tensor in self.tensors)  # M

    def init_client(self, client: int, server: State) -> State:
        """The initial model as the own one, and W = 1; "settled" says whether W was learnt once."""
        own = server["parameters"][-self.size :].clone()  # [M], the last tensors after training
        weights = torch.ones_like(own)
        return {"own": own, "weights": weights, "settled": False, "experiences": []}

    def start(self, client_round: ClientRound) -> FedALAContext:
        state = client_round.state
        weights = state["weights"].to(self.runtime.device, copy=True)
        context = FedALAContext(weights, state["settled"])
        if self.params.refresh == "task" and client_round.first:
            context.weights.fill_(1)
            context.settled = False
        own = state["own"].to(self.runtime.device)
        received = self.model.parameters[-self.size :].clone()
        if not torch.equal(own, received):  # equal tensors need no aggregation
            with client_round.log.clock("mixing"):
                self.learn_weights(client_round, context, own, received)
        return context

    def learn_weights(
        self, client_round: ClientRound, context: FedALAContext, own: Tensor, received: Tensor
    ) -> None:
        """Learn W on the window: until it converges the first time, then one epoch per round."""
        weights = context.weights
        self.model.parameters[-self.size :] = torch.lerp(own, received, weights)
        window = self.window(client_round)
        if not len(window):
            return
        losses = list[float]()
        for _ in range(1 if context.settled else self.params.max_epochs):
            losses.append(self.epoch(window, own, received, weights))
            recent = losses[-RECENT:]
            if len(losses) > RECENT and np.std(recent) < self.params.threshold:
                break
        else:
            if not context.settled:
                client_round.log.events.append(NOT_CONVERGED)
        context.settled = True
        client_round.log.numbers["mixing epochs"] = len(losses)
        client_round.log.numbers["mixing weight"] = float(weights.mean())

    def epoch(self, window: Tensor, own: Tensor, received: Tensor, weights: Tensor) -> float:
        training = self.runtime.training
        lr = self.params.lr_product / training.lr  # not 0: then own and received model are equal
        module = self.model.module.eval()  # fixed statistics
        for batch in self.runtime.plain_batches(window, training.batch_size):
            loss = F.cross_entropy(module(batch.images), batch.targets)
            slopes = torch.autograd.grad(loss, self.tensors)
            gradient = flatten_like(slopes, self.tensors)  # [M]
            weights.sub_(lr * gradient * (received - own)).clamp_(0, 1)
            self.model.parameters[-self.size :] = torch.lerp(own, received, weights)
        return float(loss.detach())

    def window(self, client_round: ClientRound) -> Tensor:
        """The training images of the current task on which W is learnt.  # [n]"""
        indices = client_round.indices
        draw = client_round.generator("window")
        if self.params.window == "random":
            indices = indices[torch.randperm(len(indices), generator=draw)]
        count = min(len(indices), max(1, math.floor(self.params.share * len(indices))))
        start = int(torch.randint(len(indices) - count + 1, (1,), generator=draw))
        return indices[start : start + count]

    def update_state(self, client_round: ClientRound, context: FedALAContext) -> State:
        return {
            **super().update_state(client_round, context),
            "own": self.model.parameters[-self.size :].cpu().clone(),
            "weights": context.weights.cpu(),
            "settled": context.settled,
            "experiences": client_round.recorded,
        }

    def load_personal_model(self, client_round: ClientRound) -> None:
        self.receive(client_round)
        self.start(client_round)
