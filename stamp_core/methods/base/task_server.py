"""A server that knows the experience and the classes learnt so far, from what clients report."""

from collections.abc import Iterable

import torch
from torch import Tensor

from stamp_core.data.split import Plan
from stamp_core.methods.base.method import (
    ClientRound,
    InitialStates,
    Log,
    Message,
    Method,
    Reply,
    State,
)

PREFIX = "announced "  # of the parts of a message that a client keeps for the experience


class TaskServer(Method):
    """FedAvg whose server counts rounds and learns from the clients which classes have come up.

    In its first round of an experience a client reports the classes of its task and receives those
    learnt before, with the `announcement`, and keeps both until the next one. State of the server:
    "round" (since the start), "experiences" (of the run), "classes" (reported so far), "past"
    (reported before the running experience), "informed" (clients that have the announcement).
    """

    def initial_states(self, plan: Plan) -> InitialStates:
        """The first states; the server's with the counters, and without any class."""
        states = super().initial_states(plan)
        none = torch.zeros(self.runtime.classes, dtype=torch.bool)
        counters = {"seed": plan.seed, "round": 0, "experiences": plan.experiences}
        known = {"classes": none, "past": none.clone(), "informed": []}
        return states._replace(server={**states.server, **counters, **known})

    # --- the server

    def announcement(self, server: State) -> Message:
        """What a client receives once in an experience, besides the classes learnt before it."""
        return {}

    def broadcast(self, server: State, client: int) -> Message:
        """The global model and, the first time in an experience, the announcement."""
        message = super().broadcast(server, client)
        if client in server["informed"]:
            return message
        announced = {"past": pack_bits(server["past"]), **self.announcement(server)}
        return {**message, **{PREFIX + name: value for name, value in announced.items()}}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The mean of the models, the reported classes, and the end of an experience if due."""
        state = {**super().aggregate(server, replies, log)}
        reports = [reply.message["classes"] for reply in replies if "classes" in reply.message]
        classes = state["classes"].clone()
        for report in reports:
            classes |= unpack_bits(report, len(classes))
        informed = sorted({*server["informed"], *(reply.client for reply in replies)})
        state |= {"classes": classes, "informed": informed, "round": server["round"] + 1}
        if state["round"] % self.runtime.training.rounds:
            return state
        return self.end_experience(state, log)

    def end_experience(self, server: State, log: Log) -> State:
        """The server's state after the last round of an experience.

        Personal models are evaluated after it: what is announced then is for the next experience.
        """
        return {**server, "past": server["classes"], "informed": []}

    def is_over(self, server: State) -> bool:
        """Whether all experiences of the run have been trained."""
        done: bool = server["round"] == server["experiences"] * self.runtime.training.rounds
        return done

    # --- a client

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model; what is announced is in `scratch["announced"]`."""
        super().receive(client_round)
        message = client_round.message.items()
        new = {key.removeprefix(PREFIX): v.clone() for key, v in message if key.startswith(PREFIX)}
        client_round.scratch["announced"] = new or client_round.state.get("announced", {})

    def past_classes(self, client_round: ClientRound) -> Tensor:
        """Which classes any client had reported before this experience.  # bool [L]"""
        announced = client_round.scratch["announced"]
        return unpack_bits(announced["past"], self.runtime.classes)

    def current_classes(self, client_round: ClientRound) -> Tensor:
        """Of which classes the client has images in its task.  # bool [L]"""
        labels = self.runtime.dataset.y_train[self.train_indices(client_round)]
        return class_mask(labels.unique().tolist(), self.runtime.classes)

    def update_state(self, client_round: ClientRound) -> State:
        """The client's state with what was announced."""
        state = super().update_state(client_round)
        return {**state, "announced": client_round.scratch["announced"]}

    def upload(self, client_round: ClientRound) -> Message:
        """The trained model and, in the client's first round of an experience, its classes."""
        message = super().upload(client_round)
        if PREFIX + "past" not in client_round.message:
            return message
        return {**message, "classes": pack_bits(self.current_classes(client_round))}


def class_mask(classes: Iterable[int], count: int) -> Tensor:
    """Which of `count` classes are in `classes`.  # bool [L]"""
    mask = torch.zeros(count, dtype=torch.bool)
    mask[list(classes)] = True
    return mask


def pack_bits(mask: Tensor) -> Tensor:
    """A mask as bytes of eight bits, the first class in the lowest bit.  # uint8 [ceil(L / 8)]"""
    padded = torch.zeros(-(-len(mask) // 8) * 8, dtype=torch.uint8)
    padded[: len(mask)] = mask
    weights = 2 ** torch.arange(8, dtype=torch.uint8)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits` for a mask of `count` classes.  # bool [L]"""
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[:count].bool()
