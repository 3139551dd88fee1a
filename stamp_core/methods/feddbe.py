"""FedDBE (Zhang et al., 2023): the features' bias as a client's own offset, their mean held."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import at_least, wrong
from stamp_core.methods import (
    Beginning,
    Group,
    Log,
    Message,
    Method,
    Reply,
    ServerStep,
    State,
    Turn,
)
from stamp_core.split import Plan
from stamp_core.vectors import average
from stamp_core.workspace import Visit


@dataclass(frozen=True)
class Bias(ServerStep):
    """The two halves: an offset that stays with the client, a mean that all features keep to."""

    kappa: float = 0.0  # weight of the mean's regulariser; the published default leaves it off
    momentum: float = 0.1  # share of a batch in the running mean of the features
    trained: bool = True  # the offset; false leaves it at zero
    refresh: Literal["never", "task"] = "never"  # published: the mean is that of task 0 for ever

    def __post_init__(self) -> None:
        """Refuse a negative weight and what is no share."""
        super().__post_init__()
        at_least(self, 0, "kappa", "momentum")
        if self.momentum > 1:
            raise wrong("momentum", self.momentum, "at most 1")


class FedDBE(Method):
    """FedAvg whose clients learn head(encoder(x) + z), with z their own (F numbers)."""

    Params: ClassVar = Bias
    models = ("global", "personal", "local")
    neutral: ClassVar[dict[str, Any]] = {"kappa": 0.0, "trained": False}
    group: ClassVar[Group] = "personalised"

    # --- the server

    def begin(self, plan: Plan) -> Beginning:
        """The first states; all are given the mean feature of the clients' warm-ups, if read."""
        begun = super().begin(plan)
        if not self.params.kappa:
            return begun
        ends = [self.warm_up(plan, client, begun.server) for client in range(len(begun.clients))]
        ends = [turn for turn in ends if "mean" in turn.notes]
        if not ends:  # nobody has a picture
            return begun
        mean = average([t.notes["mean"].cpu() for t in ends], [float(len(t.indices)) for t in ends])
        clients = [{**state, "shared": mean.clone()} for state in begun.clients]
        each = mean.nbytes
        return Beginning(begun.server, clients, down=each * len(clients), up=each * len(ends))

    def warm_up(self, plan: Plan, client: int, server: State) -> Turn:
        """A client's turn before all others, without an offset; only its mean is taken up.

        The running statistics of published warm-ups stay behind; here they go with the weights.
        """
        visit = Visit(plan.seed, client, 0, -1)  # a round of its own, so with draws of its own
        turn = Turn(visit, plan, {}, self.broadcast(server, client))
        super().local(turn)
        return turn

    def broadcast(self, server: State, client: int) -> Message:
        """The model, with the mean for whoever has not answered since it was renewed."""
        message = super().broadcast(server, client)
        if "mean" in server and client not in server["informed"]:
            message["mean"] = server["mean"]
        return message

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The average of the models and, after the last round of a task, of the means."""
        after = super().aggregate(server, replies, log)
        told = [reply for reply in replies if "mean" in reply.message]
        if told:
            samples = [float(reply.samples) for reply in told]
            mean = average([reply.message["mean"] for reply in told], samples)
            return {**after, "mean": mean, "informed": []}
        if "mean" not in server:
            return after
        informed = {*server["informed"], *(reply.client for reply in replies)}
        return {**after, "informed": sorted(informed)}

    # --- a client

    def new_client(self, client: int, server: State) -> State:
        """An offset of zero."""
        features = self.head()[0].shape[1]
        return {"offset": torch.zeros(features)} if self.params.trained else {}

    def local(self, turn: Turn) -> Reply:
        """The turn; what is scored afterwards has the offset, what was sent has not."""
        reply = super().local(turn)
        self.shift(reply.state)
        return reply

    def receive(self, turn: Turn) -> None:
        """Put the received model into the live one, with the offset beside it."""
        super().receive(turn)
        shared = turn.message.get("mean", turn.state.get("shared"))
        if shared is not None:
            turn.notes["shared"] = shared.to(self.work.device)
        if "offset" in turn.state:
            offset = turn.state["offset"].clone().to(self.work.device)
            turn.notes["offset"] = offset.requires_grad_()

    def loss(self, turn: Turn, pictures: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy beside the offset, and the distance of the running mean from the global."""
        features = self.work.classifier.encode(pictures)
        offset = turn.notes.get("offset")
        logits = self.work.classifier.head(features if offset is None else features + offset)
        loss = F.cross_entropy(logits, labels)
        if self.params.kappa:
            loss = loss + self.params.kappa * self.away(turn, features)
        return loss

    def away(self, turn: Turn, features: Tensor) -> Tensor:
        """The mean over j of (m_j - shared_j)^2 / 2, where m is the running mean of features.

        m takes this batch in and is noted; 0 in the warm-up, which knows no shared mean.
        """
        share = self.params.momentum  # m starts at 0 in every round and is not corrected for it
        before = turn.notes.get("mean", torch.zeros_like(features[0]))
        mean = (1 - share) * before + share * features.mean(0)  # [F]
        turn.notes["mean"] = mean.detach()
        away = mean - turn.notes.get("shared", mean)
        distance: Tensor = away.square().mean() / 2
        return distance

    def correct(self, turn: Turn) -> None:
        """Take the offset's own step, by plain SGD whatever the network's."""
        if "offset" in turn.notes:
            offset = turn.notes["offset"]
            offset.data.add_(offset.grad, alpha=-self.work.setting.training.rate)
            offset.grad = None

    def remember(self, turn: Turn) -> State:
        """The offset as training left it and the mean as it was last heard of."""
        names = [name for name in ("shared", "offset") if name in turn.notes]
        kept: State = {name: turn.notes[name].detach().cpu().clone() for name in names}
        return {**super().remember(turn), **kept}

    def upload(self, turn: Turn) -> Message:
        """The model and, in the last round of a task, the running mean."""
        message = super().upload(turn)
        if self.params.refresh == "task" and turn.visit.last and "mean" in turn.notes:
            message["mean"] = turn.notes["mean"].cpu()
        return message

    # --- evaluation

    def receive_personal(self, turn: Turn) -> None:
        """Put the received model with the client's offset into the live one."""
        super().receive(turn)
        self.shift(turn.state)

    def shift(self, state: State) -> None:
        """Move the live model's bias by what its linear head makes of the offset."""
        if "offset" in state:
            weight, bias = self.head()
            bias.add_(weight @ state["offset"].to(bias.device))

    def head(self) -> tuple[Tensor, Tensor]:
        """The live head's weight and bias, as views.  # [classes, F], [classes]"""
        vector, classes = self.work.model.parameters[self.work.base :], self.work.classes
        return vector[:-classes].view(classes, -1), vector[-classes:]
