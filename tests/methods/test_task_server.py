"""The server that knows experiences and classes: what it learns, when, and what is sent for it."""

import itertools

import small
import torch
from small import plan, tiny
from stamp_core.client.workspace import RoundId
from test_methods import client_rounds

from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import FedAvgParams, Log, Message, State
from stamp_core.methods.base.task_server import PREFIX, TaskServer, pack_bits, unpack_bits
from stamp_core.results.records import tree_bytes


def server_worker(**training: object) -> Worker:
    """A worker whose method is the base itself."""
    experiment = tiny(training={"rounds": 1, **training})
    worker = small.worker(experiment, plan(experiment))
    worker.method = TaskServer(FedAvgParams(), worker.work)
    return worker


def test_bits_come_back_and_take_an_eighth() -> None:
    for count in (1, 8, 9, 100):
        mask = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
        assert torch.equal(unpack_bits(pack_bits(mask), count), mask)
    assert pack_bits(mask).nbytes == 13  # 100 classes


def test_past_classes_are_those_of_the_experiences_before() -> None:
    """By hand from the plan: the union over clients of all earlier tasks."""
    worker = server_worker()
    plan_ = worker.plans[0]
    for each in client_rounds(worker, plan_):
        receiving = each.client_round
        worker.method.receive(receiving)
        earlier = {
            label
            for client in range(len(plan_.clients))
            for label in plan_.seen(client, receiving.experience - 1)
        }
        assert set(worker.method.past_classes(receiving).nonzero().flatten().tolist()) == earlier
        own = set(plan_.clients[receiving.client][receiving.task].classes)
        assert set(worker.method.current_classes(receiving).nonzero().flatten().tolist()) == own


class Announcing(TaskServer):
    """A server that announces its round, and notes the ends of experiences."""

    def announcement(self, server: State) -> Message:
        return {"round": torch.tensor(server["round"])}

    def end_experience(self, server: State, log: Log) -> State:
        log.events.append(f"end at {server['round']}, {'last' if self.is_over(server) else 'not'}")
        return super().end_experience(server, log)


def test_classes_and_announcement_are_sent_once_in_an_experience() -> None:
    """10 classes are 2 bytes; the announcement is a number of 8. Client 3 fails in every first
    round: it is told again, reports again, and keeps what it is told until the next experience."""
    worker = server_worker(rounds=3)
    worker.method = Announcing(FedAvgParams(), worker.work)
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
            announced = reply.state["announced"]["round"]
            assert announced == 3 * experience + (client == 3 and round_ > 0)
            assert not told or announced.data_ptr() != message[PREFIX + "round"].data_ptr()
            if round_ or client != 3:
                states[client] = reply.state
                replies.append(reply)
        server = worker.method.aggregate(server, replies[::-1], Log())


def test_experiences_end_after_their_rounds_with_or_without_replies() -> None:
    worker = server_worker(rounds=2)
    worker.method = Announcing(FedAvgParams(), worker.work)
    server, _, *_ = worker.initial_states(0)
    log = Log()
    for _ in range(6):
        before = small.copied(server)
        after = worker.method.aggregate(server, [], log)
        small.assert_equal_trees(server, before)
        server = after
    assert log.events == ["end at 2, not", "end at 4, not", "end at 6, last"]


def test_a_class_of_which_nobody_has_images_is_not_reported() -> None:
    """Client 1 has images of one class of its task, client 2 of none."""
    experiment = tiny(training={"rounds": 1})
    plan_ = small.awkward(experiment)
    worker = small.worker(experiment, plan_)
    worker.method = TaskServer(FedAvgParams(), worker.work)
    for each in client_rounds(worker, plan_):
        reported = unpack_bits(each.result.reply.message["classes"], 10)
        own = experiment.dataset().y_train[worker.method.train_indices(each.client_round)]
        assert set(reported.nonzero().flatten().tolist()) == set(own.tolist())
