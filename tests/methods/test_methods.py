"""Every method is FedAvg with neutral parameters, and keeps the contract that others rely on."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from by_hand import (
    CLOSE,
    FULL_BATCH,
    softmax_gradient,
    task_data,
    two_number_reply,
    use_softmax_regression,
)
from small import ALWAYS, BATCH_NORM, BN_B, BN_P, P, first, plan, run, tiny, whole, with_train
from stamp_core.client.workspace import RoundId
from torch import nn

from stamp_core.config.schema import Network
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan, Task
from stamp_core.engine.executor import ClientResult, Worker
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.trees import Store
from stamp_core.methods.base import registry
from stamp_core.methods.base.method import ClientRound, Log, Method, State
from stamp_core.models import networks as models
from stamp_core.results.metrics import Accuracies
from stamp_core.results.records import Record

EVERY = registry.method_names()
WITHOUT_NEUTRAL = {"joint", "local"}  # bounds and controls that are no variant of FedAvg
POLICIES = ("shared", "local", "frozen")
FEW = {"images_per_class": 10}  # 2 classes are a whole batch and a smaller one
HARD: dict[str, Any] = {
    "participation": 0.7,
    "dropout": 0.3,
    "momentum": 0.9,
    "shift": 1,
    "flip": True,
    "epochs": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"split": {"images_per_class": 40}},
    "hard": {"network": BATCH_NORM, "split": {"cycles": 2, **FEW}, "training": HARD},
    "own": {"network": BATCH_NORM, "split": FEW, "training": {**HARD, "buffers": "local"}},
}


# ------------------------------------------------------------------ what holds for all methods


@cache
def fedavg(setting: str) -> Record:
    """The record of FedAvg."""
    return run(tiny(**SETTINGS[setting]))


def neutral(kind: str) -> dict[str, Any]:
    """The parameters that make a method FedAvg."""
    return dict(registry.get_method(kind).neutral or {})


def test_only_bounds_and_controls_have_no_neutral_parameters() -> None:
    assert {kind for kind in EVERY if registry.get_method(kind).neutral is None} == WITHOUT_NEUTRAL


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", sorted(set(EVERY) - WITHOUT_NEUTRAL))
def test_with_neutral_parameters_a_method_is_fedavg_bit_for_bit(kind: str, setting: str) -> None:
    record = run(tiny(kind, **SETTINGS[setting], **neutral(kind)))
    expected = fedavg(setting)
    small.assert_same_weights(record, expected)
    for model in ("initial", "global", "local"):  # a method may have a personal one too
        np.testing.assert_array_equal(record.scores[model], expected.scores[model], model)


@pytest.mark.parametrize(
    ("network", "training"),
    [(small.NETWORK, {}), (BATCH_NORM, {"participation": 0.5, "dropout": 0.3})],
    ids=["mlp", "cnn and dropout"],
)
@pytest.mark.parametrize("kind", EVERY)
def test_clients_with_few_or_no_images_do_no_harm(
    kind: str, training: dict[str, Any], network: dict[str, Any]
) -> None:
    """One image, one class, no image: weights, losses and accuracies stay finite."""
    experiment = whole(kind, network=network, split=FEW, training=training)
    record = run(experiment, small.awkward(experiment))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert all(entry["loss"] is None or np.isfinite(entry["loss"]) for entry in record.history)
    assert any(entry["loss"] for entry in record.history)
    for model in {"global", "personal"} & set(registry.get_method(kind).models):
        accuracy = record.accuracy(model, "task")
        assert ((accuracy >= 0) & (accuracy <= 1)).all(), model


class Trained(NamedTuple):
    """A client round that took place."""

    server: State
    given: list[Any]  # state and message
    before: list[Any]  # copies of the two, taken beforehand
    client_round: ClientRound  # with these copies
    result: ClientResult


def client_rounds(worker: Worker, plan_: Plan) -> Iterator[Trained]:
    """The client rounds of one round of every experience."""
    server, states, *_ = worker.initial_states(plan_.seed)
    for experience in range(plan_.experiences):
        replies = []
        for client in worker.method.participants(list(range(len(states))), server):
            round_id = RoundId(plan_.seed, client, experience, 0, last=True)
            given = [states[client], worker.method.broadcast(server, client)]
            before = small.copied(given)
            result = worker.train_client(round_id, *given)
            yield Trained(server, given, before, ClientRound(round_id, plan_, *before), result)
            states[client] = result.reply.state
            replies.append(result.reply)
        server = worker.method.aggregate(server, replies, Log())


def test_a_client_without_images_takes_no_step() -> None:
    """Not even with weight decay: its own model is the initial one."""
    experiment = tiny("local", training={"weight_decay": 0.1})
    worker = small.worker(experiment, small.awkward(experiment))
    for each in client_rounds(worker, small.awkward(experiment)):
        after, start = each.result.reply.state["parameters"], each.server["parameters"]
        empty = each.client_round.client == 2
        assert torch.equal(after, start) == (each.result.reply.sgd_steps == 0) == empty


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", EVERY)
def test_a_client_round_depends_on_its_arguments_and_shares_no_memory(
    kind: str, policy: str, tmp_path: Path
) -> None:
    """It depends neither on the live model of before nor on other random draws; its state and its
    message share no memory with the live model; the state comes back unchanged from a store."""
    experiment = whole(kind, network=BATCH_NORM, split=FEW, training={"buffers": policy})
    worker, store = small.worker(experiment, plan(experiment)), Store(tmp_path)
    model = worker.work.model
    vectors = (model.parameters, model.gradients, model.buffers)
    live = {vector.untyped_storage().data_ptr() for vector in vectors}
    for each in client_rounds(worker, plan(experiment)):
        reply = each.result.reply
        for name, tensor in small.tensors([reply.state, reply.message]):
            assert not tensor.numel() or tensor.untyped_storage().data_ptr() not in live, name
        small.assert_equal_trees(store.get(store.put(reply.state).digest), reply.state)
        for vector in vectors:
            vector.fill_(7)
        torch.manual_seed(each.client_round.client)
        drawn = torch.get_rng_state()
        again = worker.train_client(each.client_round.round_id, *each.before)
        assert torch.equal(torch.get_rng_state(), drawn), "drawn from the global generator"
        small.assert_equal_trees(again.reply.state, reply.state)
        small.assert_equal_trees(again.reply.message, reply.message)
        small.assert_equal_trees(again.scores, each.result.scores)


@pytest.mark.parametrize("kind", EVERY)
def test_arguments_are_not_written_to(kind: str) -> None:
    """Neither a client round nor aggregation changes server, state or message in place."""
    experiment = whole(kind, network=BATCH_NORM, split=FEW)
    worker = small.worker(experiment, plan(experiment))
    servers: list[tuple[State, State]] = []
    for each in client_rounds(worker, plan(experiment)):
        servers.append((each.server, small.copied(each.server)))
        worker.method.receive(
            ClientRound(each.client_round.round_id, each.client_round.plan, *each.given)
        )
        worker.work.model.parameters.fill_(7)
        small.assert_equal_trees(each.given, each.before)
    for server, before in servers:
        small.assert_equal_trees(server, before)


@pytest.mark.parametrize("kind", sorted(set(EVERY) - {"joint", "local", "fedcil"}))
def test_the_order_of_clients_does_not_matter(kind: str) -> None:
    """In the second experience, with memories in use; sums differ in their last digits at most.

    FedCIL's server draws images of the clients' generators one after the other: that order counts.
    """
    experiment = whole(kind, split=FEW)
    worker = small.worker(experiment, plan(experiment))
    rounds = client_rounds(worker, plan(experiment))
    second = [each for each in rounds if each.client_round.experience == 1]
    replies, server = [each.result.reply for each in second], second[0].server
    ordered, reverse = (
        worker.method.aggregate(server, list(each), Log()) for each in (replies, replies[::-1])
    )
    torch.testing.assert_close(reverse["parameters"], ordered["parameters"], **CLOSE)


# ------------------------------------------------------------------ FedAvg


@pytest.mark.parametrize(
    "training",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.01, "epochs": 2, "batch_size": 50}],
    ids=str,
)
def test_one_client_is_plain_sgd_bit_for_bit(training: dict[str, Any]) -> None:
    """A single client's average is its own model; each client round starts a new optimiser."""
    experiment = tiny(split={"clients": 1}, training=training)
    dataset, plan_, t = experiment.dataset(), plan(experiment), experiment.setting.training
    normalise = small.worker(experiment, plan_).work.normalise
    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    for task in range(3):
        own = plan_.train_indices(dataset, 0, task)
        for round_ in range(2):
            sgd = torch.optim.SGD(net.parameters(), t.lr, t.momentum, 0, t.weight_decay)
            order = generator(0, 0, task, round_, "order")
            for _ in range(t.epochs):
                for batch in own[torch.randperm(len(own), generator=order)].split(t.batch_size):
                    sgd.zero_grad()
                    logits = net(normalise(dataset.x_train[batch]))
                    F.cross_entropy(logits, dataset.y_train[batch]).backward()
                    sgd.step()
    record = run(experiment, plan_)
    for name, value in net.named_parameters():
        assert record.weights[name].tobytes() == value.detach().numpy().tobytes(), name


def test_one_round_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression, one full batch per client, so theta_u = theta - lr g_u(theta).

    The server's model is sum_u n_u theta_u / sum_u n_u.
    """
    use_softmax_regression(monkeypatch)
    experiment = tiny(split={"clients": 2, "tasks": 1}, training=FULL_BATCH)
    whole = plan(experiment)
    seven = whole.train_indices(experiment.dataset(), 0, 0)[:7].tolist()
    uneven = with_train(whole, {(0, 0): tuple(seven)})
    worker = small.worker(experiment, uneven)
    total, mean = 0, np.zeros(650)
    for client in range(2):
        client_round = small.arrived(worker, uneven, 0, client)
        x, labels = task_data(client_round, worker)
        theta = client_round.message["parameters"].double().numpy()
        mean += len(x) * (theta - 0.1 * softmax_gradient(theta, x, labels))
        total += len(x)
    weights = run(experiment, uneven).weights
    np.testing.assert_allclose(weights["head.weight"].ravel(), mean[:640] / total, **CLOSE)
    np.testing.assert_allclose(weights["head.bias"], mean[640:] / total, **CLOSE)


def test_equal_clients_average_to_any_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one order of batches for all, four clients with client 0's data are client 0."""
    monkeypatch.setattr(
        RoundId, "generator", lambda v, purpose: generator(v.seed, v.experience, v.round, purpose)
    )
    experiment = tiny()
    whole = plan(experiment)
    equal = replace(whole, clients=whole.clients[:1] * 4)
    small.assert_same_weights(run(experiment, equal), run(experiment, first(whole, 1)))


def test_a_client_without_images_has_no_weight() -> None:
    """Four clients, the last one empty, train the same model as the first three alone."""
    experiment = tiny()
    whole = plan(experiment)
    empty = with_train(whole, {(3, t): () for t in range(3)})
    small.assert_same_weights(run(experiment, empty), run(experiment, first(whole, 3)))


def test_at_learning_rate_zero_the_model_stays() -> None:
    """Six averages of four copies of one model are that model."""
    record = run(tiny(training={"lr": 0}))
    for name, value in initial().items():
        assert record.weights[name].tobytes() == value.tobytes(), name


def initial(network: Network | None = None) -> dict[str, Accuracies]:
    """The weights and buffers that a run of seed 0 starts from."""
    net = models.build_network(network or tiny().setting.network, (1, 8, 8), 10, seed=0)
    return {name: value.numpy() for name, value in net.state_dict().items()}


def averaging_server(server_lr: float) -> tuple[Method, State]:
    """A server that averages, at theta = (1, 2) with buffers (5, 5)."""
    method = small.worker(tiny(network=BATCH_NORM, server_lr=server_lr)).method
    return method, {"parameters": torch.tensor([1.0, 2.0]), "buffers": torch.tensor([5.0, 5.0])}


@pytest.mark.parametrize(
    ("server_lr", "expected"), [(0.5, [2.25, 1.5]), (1, [3.5, 1]), (2, [6, 0])]
)
def test_the_servers_learning_rate_by_hand(server_lr: float, expected: list[float]) -> None:
    """avg = (1 (2, 4) + 3 (4, 0)) / 4 = (3.5, 1), theta + server_lr (avg - theta); buffers: 2
    avg. A reply without samples must not count, whatever its values.
    """
    method, server = averaging_server(server_lr)
    values = [(1, 2.0, 4.0), (0, float("nan"), float("inf")), (3, 4.0, 0.0)]
    after = method.aggregate(server, [two_number_reply(0, *each) for each in values], Log())
    assert after["parameters"].tolist() == expected
    assert after["buffers"].tolist() == [7, 2]
    assert server["parameters"].tolist() == [1, 2]


def test_without_replies_the_server_stays() -> None:
    method, server = averaging_server(server_lr=2)
    assert method.aggregate(server, [], Log()) is server
    assert method.aggregate(server, [two_number_reply(0, 0, 1, 1)], Log()) is server


def test_the_order_of_replies_does_not_matter() -> None:
    """Sums in float64 differ at most in the last digit of float32."""
    method, server = averaging_server(server_lr=1)
    numbers = generator("permutation")
    replies = [
        two_number_reply(0, n, *torch.randn(1000, generator=numbers).tolist())
        for n in (1, 10, 99, 270)
    ]
    first, *others = (
        method.aggregate(server, list(each), Log())["parameters"] for each in permutations(replies)
    )
    for mean in others:
        torch.testing.assert_close(mean, first, **CLOSE)


# ------------------------------------------------------------------ local and joint


def test_local_is_fedavg_of_each_client_alone() -> None:
    """A federation in which only client u has images trains u's own model."""
    experiment = tiny("local")
    whole, record = plan(experiment), run(experiment)
    for u in range(4):
        others = {(v, t): () for v, t in small.everywhere(whole) if v != u}
        alone = run(tiny(), with_train(whole, others))
        np.testing.assert_array_equal(
            record.scores["personal"][:3, :, u],
            alone.scores["global"][:3, :, u],  # the nearest mean is scored for global models
        )


def test_local_sends_nothing_and_has_no_global_model() -> None:
    record = run(tiny("local"))
    assert all(entry["bytes"] == {"down": 0, "up": 0} for entry in record.history)
    assert all(entry["disk"] == 4 * P for entry in record.history)
    assert np.isnan(record.scores["global"]).all() and np.isnan(record.scores["local"]).all()
    assert record.weights == {}


def union(experiment: Experiment, whole: Plan) -> Plan:
    """One client with the images of all clients and tasks, in each of three tasks."""
    dataset = experiment.dataset()
    every = {
        i for u, t in small.everywhere(whole) for i in whole.train_indices(dataset, u, t).tolist()
    }
    task = Task(tuple(range(10)), train=tuple(sorted(every)))
    return replace(first(whole, 1), clients=((task,) * 3,))


@pytest.mark.parametrize("dropout", [0.0, ALWAYS])
def test_joint_is_one_learner_on_the_union(dropout: float) -> None:
    """Images that several clients hold count once, and the learner never drops out."""
    experiment = tiny("joint", training={"dropout": dropout, "participation": 0.5})
    record = run(experiment)
    alone = run(tiny(), union(experiment, plan(experiment)))
    small.assert_same_weights(record, alone)
    for entry in record.history:
        assert entry["participants"] == entry["completed"] == 1
        assert entry["bytes"] == {"down": 4 * P, "up": 4 * P}
    assert np.isnan(record.scores["personal"]).all() and np.isnan(record.scores["local"]).all()
    assert np.isfinite(record.accuracy()).all()


# ------------------------------------------------------------------ batch normalisation


BUFFERS = ("encoder.1.running_mean", "encoder.1.running_var")


def with_buffers(kind: str, policy: str, **training: Any) -> Experiment:
    """A network with batch normalisation and a policy for its buffers."""
    return tiny(kind, network=BATCH_NORM, split=FEW, training={"buffers": policy, **training})


@pytest.mark.parametrize("kind", ["fedavg", "joint"])
@pytest.mark.parametrize("policy", POLICIES)
def test_buffers_follow_the_policy(policy: str, kind: str) -> None:
    """Shared ones are averaged; local ones stay with the clients; frozen ones never change.

    The learner of `joint` is client and server in one: its local buffers are the server's too.
    """
    experiment = with_buffers(kind, policy)
    record, start = run(experiment), initial(experiment.setting.network)
    moved = [not np.array_equal(record.weights[name], start[name]) for name in BUFFERS]
    assert moved == [policy == "shared" or (policy, kind) == ("local", "joint")] * 2
    assert np.isfinite(record.accuracy()).all()


@pytest.mark.parametrize(
    ("policy", "each"), [("shared", BN_P + BN_B), ("local", BN_P), ("frozen", BN_P)]
)
def test_buffers_cost_bytes_where_they_are_sent(policy: str, each: int) -> None:
    record = run(with_buffers("fedavg", policy))
    assert all(entry["bytes"] == {"down": 16 * each, "up": 16 * each} for entry in record.history)
    disk = 4 * BN_B if policy == "local" else 0
    assert all(entry["disk"] == disk for entry in record.history)


def test_shared_buffers_are_averaged_by_samples() -> None:
    """One full batch each at learning rate 0 makes a running mean 0.9 x 0 + 0.1 x the batch's."""
    experiment = with_buffers("fedavg", "shared", lr=0, rounds=1, batch_size=1000)
    whole, dataset = plan(experiment), experiment.dataset()
    plan_ = with_train(first(whole, 2), {(0, 0): whole.clients[0][0].train[:7]})
    worker, mean = small.worker(experiment, plan_), torch.zeros(4)
    convolution = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0).encoder[0]
    for client, weight in ((0, 7 / 27), (1, 20 / 27)):
        own = plan_.train_indices(dataset, client, 0)
        maps = convolution(worker.work.normalise(dataset.x_train[own])).detach()
        mean += weight * 0.1 * maps.mean((0, 2, 3))
    server, states, *_ = worker.initial_states(0)
    sent = worker.method.broadcast(server, 0)
    replies = [worker.train_client(RoundId(0, u, 0, 0), states[u], sent).reply for u in range(2)]
    after = worker.method.aggregate(server, replies, Log())
    torch.testing.assert_close(after["buffers"][:4], mean, **CLOSE)


def test_frozen_normalisation_is_the_identity_also_in_training() -> None:
    """Its buffers are those of an untrained network: mean 0, variance 1."""
    experiment = with_buffers("fedavg", "frozen")
    worker = small.worker(experiment, plan(experiment))
    for _ in client_rounds(worker, plan(experiment)):
        assert worker.work.model.buffers.tolist() == [0.0] * 4 + [1.0] * 4


def accuracies(net: nn.Module, worker: Worker, plan_: Plan, client: int) -> list[float]:
    """The accuracy of a network on a client's test images of each task."""
    dataset, shares = worker.work.dataset, []
    for task in range(plan_.tasks):
        test = plan_.test_indices(dataset, client, task)
        predicted = net(worker.work.normalise(dataset.x_test[test])).argmax(1)
        shares.append(float((predicted == dataset.y_test[test]).double().mean()))
    return shares


@pytest.mark.parametrize(("kind", "model"), [("fedavg", "global"), ("local", "personal")])
def test_local_buffers_are_used_with_their_client(kind: str, model: str, tmp_path: Path) -> None:
    """Each client's last accuracies follow from the last weights with its own buffers."""
    experiment = with_buffers(kind, "local")
    plan_ = plan(experiment)
    worker, record = small.worker(experiment, plan_), run(experiment, plan_, resume=tmp_path)
    state = small.saved(experiment, tmp_path)
    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0).eval()
    without = []
    for u, own in enumerate(state["clients"]):
        weights = own if kind == "local" else state["server"]
        nn.utils.vector_to_parameters(weights["parameters"], net.parameters())
        without += accuracies(net, worker, plan_, u)
        net.encoder[1].running_mean.copy_(own["buffers"][:4])
        net.encoder[1].running_var.copy_(own["buffers"][4:])
        expected = pytest.approx(accuracies(net, worker, plan_, u), abs=1e-6)
        assert record.accuracy(model)[-1, u] == expected
        net.encoder[1].reset_running_stats()
    assert not np.allclose(record.accuracy(model)[-1].flatten(), without)  # so buffers matter
