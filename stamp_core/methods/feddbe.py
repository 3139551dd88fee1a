"""FedDBE (Zhang et al., 2023): a personal feature offset and mean regularisation."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import invalid, require_at_least
from stamp_core.data.split import Plan
from stamp_core.methods.base.method import (
    ClientRound,
    FedAvgParams,
    InitialStates,
    Log,
    Message,
    Method,
    Reply,
    State,
)


@dataclass(frozen=True)
class FedDBEParams(FedAvgParams):
    """The two parts: the personalised representation bias (offset) and the mean regularisation."""

    # κ of FedDBE: weight of mean regularisation; off by default, as published.
    feddbe_kappa: float = 0.0
    momentum: float = 0.1  # μ: share of a batch in the running mean of the features
    trained: bool = True  # train the offset; otherwise there is none
    refresh: Literal["never", "task"] = "never"  # published: the global mean is that of task 0

    def __post_init__(self) -> None:
        """Refuse a negative weight and a momentum outside [0, 1]."""
        super().__post_init__()
        require_at_least(self, 0, "feddbe_kappa", "momentum")
        if self.momentum > 1:
            raise invalid("momentum", self.momentum, "at most 1")


class FedDBE(Method):
    """FedAvg whose clients train head(encoder(x) + offset) with an offset of their own (F numbers).

    The regulariser keeps each client's running mean of the features near the global mean.
    """

    Params: ClassVar = FedDBEParams
    models = ("global", "personal", "local")
    fedavg_equivalent: ClassVar[dict[str, Any]] = {"feddbe_kappa": 0.0, "trained": False}
    group = "personalised"

    def initial_states(self, plan: Plan) -> InitialStates:
        """The initial states, with the global mean from a warm-up where it is used."""
        initial = super().initial_states(plan)
        if not self.params.feddbe_kappa:
            return initial
        rounds = [self.warm_up(plan, u, initial.server) for u in range(len(plan.clients))]
        rounds = [client_round for client_round in rounds if "mean" in client_round.scratch]
        if not rounds:
            return initial
        means = [client_round.scratch["mean"].cpu() for client_round in rounds]
        mean = self.runtime.average(means, [float(len(r.indices)) for r in rounds])
        clients = [{**state, "shared": mean.clone()} for state in initial.clients]
        down, up = mean.nbytes * len(clients), mean.nbytes * len(rounds)
        return InitialStates(initial.server, clients, down, up)

    def warm_up(self, plan: Plan, client: int, server: State) -> ClientRound:
        """A client round without offset and regulariser, of which only the mean is used.

        In the published code the running statistics of the warm-up persist; here they do not.
        """
        round_id = RoundId(plan.seed, client, 0, -1)  # a round of its own: its own random draws
        client_round = ClientRound(round_id, plan, {}, self.broadcast(server, client))
        super().train_client(client_round)
        return client_round

    def broadcast(self, server: State, client: int) -> Message:
        """The model, and a renewed mean until the client has replied."""
        message = super().broadcast(server, client)
        if "mean" in server and client not in server["informed"]:
            message["mean"] = server["mean"]
        return message

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The averages of the models and, after the last round of a task, of the means."""
        averaged = super().aggregate(server, replies, log)
        senders = [reply for reply in replies if "mean" in reply.message]
        if senders:
            samples = [float(reply.samples) for reply in senders]
            mean = self.runtime.average([reply.message["mean"] for reply in senders], samples)
            return {**averaged, "mean": mean, "informed": []}
        if "mean" not in server:
            return averaged
        informed = {*server["informed"], *(reply.client for reply in replies)}
        return {**averaged, "informed": sorted(informed)}

    def init_client(self, client: int, server: State) -> State:
        """An offset of zero."""
        weight, _ = self.classifier.head.parameters()  # [classes, F]
        return {"offset": torch.zeros(weight.shape[1])} if self.params.trained else {}

    def train_client(self, client_round: ClientRound) -> Reply:
        """The client round; afterwards the live model has the offset, the sent one does not."""
        reply = super().train_client(client_round)
        self.add_offset(reply.state)
        return reply

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model; store the offset and the global mean."""
        super().receive(client_round)
        shared = client_round.message.get("mean", client_round.state.get("shared"))
        if shared is not None:
            client_round.scratch["shared"] = shared.to(self.runtime.device)
        if "offset" in client_round.state:
            offset = client_round.state["offset"].clone().to(self.runtime.device)
            client_round.scratch["offset"] = offset.requires_grad_()

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy with the offset, and the mean regularisation."""
        features = self.classifier.encode(images)
        offset = client_round.scratch.get("offset")
        logits = self.classifier.head(features if offset is None else features + offset)
        loss = F.cross_entropy(logits, labels)
        if self.params.feddbe_kappa:
            loss = loss + self.params.feddbe_kappa * self.regulariser(client_round, features)
        return loss

    def regulariser(self, client_round: ClientRound, features: Tensor) -> Tensor:
        """The mean over j of (m_j - shared_j)^2 / 2, where m is the running mean of features.

        It updates m. It is 0 in the warm-up, where there is no global mean yet.
        """
        mu = self.params.momentum  # m starts at 0 in every round, without bias correction
        before = client_round.scratch.get("mean", torch.zeros_like(features[0]))
        mean = (1 - mu) * before + mu * features.mean(0)  # [F]
        client_round.scratch["mean"] = mean.detach()
        gap = mean - client_round.scratch.get("shared", mean)
        result: Tensor = gap.square().mean() / 2
        return result

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Take an SGD step on the offset, without momentum or weight decay."""
        if "offset" in client_round.scratch:
            offset = client_round.scratch["offset"]
            offset.data.add_(offset.grad, alpha=-self.runtime.training.lr)
            offset.grad = None

    def update_state(self, client_round: ClientRound) -> State:
        """The trained offset and the latest global mean."""
        scratch = client_round.scratch
        names = [name for name in ("shared", "offset") if name in scratch]
        state: State = {name: scratch[name].detach().cpu().clone() for name in names}
        return {**super().update_state(client_round), **state}

    def upload(self, client_round: ClientRound) -> Message:
        """The model and, in the last round of a task, the running mean."""
        message = super().upload(client_round)
        if self.params.refresh == "task" and client_round.last and "mean" in client_round.scratch:
            message["mean"] = client_round.scratch["mean"].cpu()
        return message

    def load_personal_model(self, client_round: ClientRound) -> None:
        """Load the received model with the client's offset."""
        super().receive(client_round)
        self.add_offset(client_round.state)

    def add_offset(self, state: State) -> None:
        """Add the offset to the live model: to its bias, as the head is linear."""
        if "offset" in state:
            weight, bias = self.classifier.head.parameters()
            bias.data.add_(weight.data @ state["offset"].to(bias.device))
