"""The server that knows experiences and classes: what it learns, when, and what is sent for it."""

import itertools
from typing import Any

import small
import torch
from small import tiny

from stamp_core.client.runtime import RoundId
from stamp_core.methods.base.method import FedAvgParams, Log, Message, State
from stamp_core.results.records import tree_bytes
from workbench.methods.base.task_server import PREFIX, TaskServer


class Announcing(TaskServer):
    def announcement(self, server: Any) -> Message:
        return {"round": torch.tensor(server["round"])}

    def end_experience(self, server: Any, log: Log) -> State:
        log.events.append(f"end at {server['round']}, {'last' if self.is_over(server) else 'not'}")
        return super().end_experience(server, log)


def announcing(rounds: int) -> Any:
    """A worker with this method, in a federation in which client 2 has no image."""
    experiment = tiny(training={"rounds": rounds})
    worker = small.worker(experiment, small.awkward(experiment))
    worker.method = Announcing(FedAvgParams(), worker.runtime)
    return worker


def test_classes_and_announcement_are_sent_once_in_an_experience():
    """10 classes are 2 bytes; the announcement is a number of 8. Client 3 fails in every first
    round: it is told again, reports again, and keeps what it is told until the next experience."""
    worker = announcing(rounds=3)
    server, states, *_ = worker.initial_states(0)
    for experience, round_ in itertools.product(range(2), range(3)):
        replies = []
        for client in range(4):
            message = worker.method.broadcast(server, client)
            told = round_ == 0 or (round_ == 1 and client == 3)
            assert tree_bytes(message) == 4 * small.P + (10 if told else 0)
            address = RoundId(0, client, experience, round_, round_ == 2)
            reply = worker.train_client(address, states[client], message).reply
            assert tree_bytes(reply.message) == 4 * small.P + (2 if told else 0)
            announced = reply.state["announced"]
            assert announced["round"] == 3 * experience + (client == 3 and round_ > 0)
            if told:
                assert announced["round"].data_ptr() != message[PREFIX + "round"].data_ptr()
            if round_ or client != 3:
                states[client] = reply.state
                replies.append(reply)
        server = worker.method.aggregate(server, replies[::-1], Log())


def test_experiences_end_after_their_rounds_with_or_without_replies():
    worker = announcing(rounds=2)
    server = worker.initial_states(0)[0]
    log = Log()
    for _ in range(6):
        server = worker.method.aggregate(server, [], log)
    assert log.events == ["end at 2, not", "end at 4, not", "end at 6, last"]
