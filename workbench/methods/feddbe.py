"""FedDBE (Zhang et al., 2023): a personal feature offset and mean regularisation."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import RoundId
from stamp_core.config.limits import NonNegative, UnitInterval
from stamp_core.data.plan import Plan
from stamp_core.methods.base.method import (
    ClientRound,
    FedAvgParams,
    InitialStates,
    LocalModel,
    Log,
    Message,
    Method,
    Reply,
    State,
)

WARM_UP = -1  # the round of the warm-up: its random draws are its own


@dataclass(frozen=True)
class FedDBEParams(FedAvgParams):
    """The two parts: the personalised representation bias (offset) and the mean regularisation."""

    # κ of FedDBE: weight of mean regularisation; off by default, as published.
    feddbe_kappa: NonNegative = 0.0
    momentum: UnitInterval = 0.1  # μ: share of a batch in the running mean of the features
    trained: bool = True  # train the offset; otherwise there is none
    refresh: Literal["never", "task"] = "never"  # published: the global mean is that of task 0


@dataclass
class FedDBEContext(StepContext):
    offset: Tensor | None  # [F], with a gradient
    shared: Tensor | None  # [F]
    mean: Tensor | None = None  # [F], the running mean of the features


class FedDBE(Method):
    """FedAvg whose clients train head(encoder(x) + offset) with an offset of their own (F numbers).

    The regulariser keeps each client's running mean of the features near the global mean, which a
    client remembers as "shared" and the server as "mean", with the clients "informed" since.
    """

    Params: ClassVar = FedDBEParams
    models = ("global", "personal", "local")
    fedavg_equivalent: ClassVar = {"feddbe_kappa": 0.0, "trained": False}
    group = "personalised"

    def initial_states(self, plan: Plan) -> InitialStates:
        initial = super().initial_states(plan)
        if not self.params.feddbe_kappa:
            return initial
        replies = [self.warm_up(plan, u, initial.server) for u in range(len(plan.clients))]
        replies = [reply for reply in self.seal(replies, Log()) if reply.samples]
        if not replies:
            return initial
        mean = self.average("mean", replies)
        clients = [{**state, "shared": mean.clone()} for state in initial.clients]
        down = mean.nbytes * len(clients)
        return InitialStates(initial.server, clients, down, up=mean.nbytes * len(replies))

    def warm_up(self, plan: Plan, client: int, server: State) -> Reply:
        """A client round without offset and regulariser, of which only the mean is used."""
        round_id = RoundId(plan.seed, client, 0, WARM_UP)
        message = super().broadcast(server, client)
        return self.train_client(self.client_round(round_id, plan, {}, message))

    def broadcast(self, server: State, client: int) -> Message:
        message = super().broadcast(server, client)
        if "mean" in server and client not in server["informed"]:
            message["mean"] = server["mean"]
        return message

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        averaged = super().aggregate(server, replies, log)
        senders = [reply for reply in replies if "mean" in reply.message]
        if senders:
            return {**averaged, "mean": self.average("mean", senders), "informed": []}
        if "mean" not in server:
            return averaged
        informed = sorted({*server["informed"], *(reply.client for reply in replies)})
        return {**averaged, "informed": informed}

    def init_client(self, client: int, server: State) -> State:
        return {"offset": torch.zeros(self.classifier.features)} if self.params.trained else {}

    def start(self, client_round: ClientRound) -> FedDBEContext:
        device = self.runtime.device
        offset = client_round.state.get("offset")
        shared = client_round.message.get("mean", client_round.state.get("shared"))
        return FedDBEContext(
            None if offset is None else offset.to(device, copy=True).requires_grad_(),
            None if shared is None else shared.to(device),
        )

    def loss(self, batch: Batch, context: FedDBEContext) -> Tensor:
        features = self.classifier.encode(batch.images)
        moved = features if context.offset is None else features + context.offset
        loss = F.cross_entropy(self.classifier.head(moved), batch.targets)
        if self.params.feddbe_kappa:
            loss = loss + self.params.feddbe_kappa * self.regulariser(features, context)
        return loss

    def regulariser(self, features: Tensor, context: FedDBEContext) -> Tensor:
        """The mean of (m_j - shared_j)^2 / 2, with the running mean m, which it updates."""
        mu = self.params.momentum  # m starts at 0 in every round, without bias correction
        before = torch.zeros_like(features[0]) if context.mean is None else context.mean
        mean = (1 - mu) * before + mu * features.mean(0)  # [F]
        context.mean = mean.detach()
        gap = mean - (mean if context.shared is None else context.shared)
        result: Tensor = gap.square().mean() / 2
        return result

    def correct_gradient(self, batch: Batch, context: FedDBEContext) -> None:
        offset = context.offset
        if offset is not None and offset.grad is not None:
            offset.data.add_(offset.grad, alpha=-self.runtime.lr)
            offset.grad = None

    def update_state(self, client_round: ClientRound, context: FedDBEContext) -> State:
        found = {"shared": context.shared, "offset": context.offset}
        state = {k: v.detach().cpu().clone() for k, v in found.items() if v is not None}
        return {**super().update_state(client_round, context), **state}

    def upload(self, client_round: ClientRound, context: FedDBEContext) -> Message:
        message = super().upload(client_round, context)
        renewed = self.params.refresh == "task" and client_round.last
        wanted = renewed or client_round.round == WARM_UP
        if wanted and context.mean is not None:
            message["mean"] = context.mean.cpu()
        return message

    def local_model(self, context: FedDBEContext) -> LocalModel:
        self.add_offset(context.offset)
        return super().local_model(context)

    def load_personal_model(self, client_round: ClientRound) -> None:
        self.receive(client_round)
        self.add_offset(client_round.state.get("offset"))

    @torch.no_grad()
    def add_offset(self, offset: Tensor | None) -> None:
        if offset is not None:
            weight, bias = self.classifier.head.parameters()
            bias.add_(weight @ offset.to(bias.device))
