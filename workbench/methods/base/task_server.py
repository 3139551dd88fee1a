"""A server that knows the experience and the classes learnt so far, from what clients report."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stamp_core.client.batches import StepContext
from stamp_core.data.plan import Plan
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


@dataclass
class TaskContext(StepContext):
    announced: Message  # in this experience: "past" and what the method adds


class TaskServer(Method):
    """FedAvg whose server counts rounds and learns from the clients which classes have come up.

    In its first round of an experience a client reports the classes of its task and receives those
    learnt before, with the `announcement`, and keeps both until the next one.
    """

    def initial_states(self, plan: Plan) -> InitialStates:
        states = super().initial_states(plan)
        none = torch.zeros(self.runtime.classes, dtype=torch.bool)
        own = {
            "seed": plan.seed,
            "round": 0,  # since the start
            "experiences": plan.experiences,
            "classes": none,  # [L], reported so far
            "past": none.clone(),  # [L], reported before the running experience
            "informed": [],  # clients that have the announcement of the running experience
        }
        return states._replace(server={**states.server, **own})

    def announcement(self, server: Any) -> Message:
        """What a client receives once in an experience, besides the classes learnt before it."""
        return {}

    def broadcast(self, server: Any, client: int) -> Message:
        message = super().broadcast(server, client)
        if client in server["informed"]:
            return message
        announced = {"past": pack_bits(server["past"]), **self.announcement(server)}
        return {**message, **{PREFIX + name: value for name, value in announced.items()}}

    def aggregate(self, server: Any, replies: list[Reply], log: Log) -> State:
        state: State = {**super().aggregate(server, replies, log)}
        classes = state["classes"].clone()
        for reply in replies:
            if "classes" in reply.message:
                classes |= unpack_bits(reply.message["classes"], len(classes))
        informed = sorted({*server["informed"], *(reply.client for reply in replies)})
        state |= {"classes": classes, "informed": informed, "round": server["round"] + 1}
        return self.end_experience(state, log) if self.is_between(state) else state

    def end_experience(self, server: Any, log: Log) -> State:
        """The server's state after an experience; what is announced then is for the next one."""
        return {**server, "past": server["classes"], "informed": []}

    def is_between(self, server: State) -> bool:
        """Whether the rounds so far are whole experiences."""
        return bool(server["round"] % self.runtime.training.rounds == 0)

    def is_over(self, server: State) -> bool:
        return bool(server["round"] == server["experiences"] * self.runtime.training.rounds)

    def start(self, client_round: ClientRound) -> Any:
        return TaskContext(self.announced(client_round))

    def announced(self, client_round: ClientRound) -> Message:
        """What was announced in this experience: with this message or an earlier one."""
        message = client_round.message.items()
        new = {key.removeprefix(PREFIX): v.clone() for key, v in message if key.startswith(PREFIX)}
        return new or client_round.state.get("announced", {})

    def past_classes(self, announced: Message) -> Tensor:
        return unpack_bits(announced["past"], self.runtime.classes)

    def current_classes(self, client_round: ClientRound) -> Tensor:
        """Of which classes the client has images in its task.  # bool [L]"""
        labels = self.runtime.dataset.y_train[client_round.indices]
        return class_mask(labels.unique().tolist(), self.runtime.classes)

    def update_state(self, client_round: ClientRound, context: Any) -> State:
        state = super().update_state(client_round, context)
        return {**state, "announced": context.announced}

    def upload(self, client_round: ClientRound, context: Any) -> Message:
        message = super().upload(client_round, context)
        if not self.is_announced(client_round):
            return message
        return {**message, "classes": pack_bits(self.current_classes(client_round))}

    def is_announced(self, client_round: ClientRound) -> bool:
        """Whether an experience is announced: the client has completed no round of it."""
        return PREFIX + "past" in client_round.message


def class_mask(classes: Iterable[int], count: int) -> Tensor:
    """Which of `count` classes are in `classes`.  # bool [L]"""
    mask = torch.zeros(count, dtype=torch.bool)
    mask[list(classes)] = True
    return mask


def pack_bits(mask: Tensor) -> Tensor:
    """A mask as bytes of eight bits, the first class in the lowest bit.  # uint8 [ceil(L / 8)]"""
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits` for a mask of `count` classes.  # bool [L]"""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little")).bool()
