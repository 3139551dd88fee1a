"""The contract of all methods: FedAvg where they promise it, and what the engine relies on."""

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import small
import torch
from small import BATCH_NORM, BN_B, BN_P, P, first, plan, run, tiny, whole, with_train
from torch import nn

from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.config.schema import Privacy, Split
from stamp_core.core.seeding import generator
from stamp_core.data.plan import Plan, Task
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.privacy import share_noisy_mean
from stamp_core.engine.trees import Store, flatten, tree_digest
from stamp_core.engine.worker import ClientResult, Worker
from stamp_core.methods.base import registry
from stamp_core.methods.base.method import ClientRound, Log, State
from stamp_core.models import networks as models
from stamp_core.results.records import Record

EVERY = registry.method_names()
STATISTICS = {"class_gaussians", "nearest_class_mean", "stsa"}  # whose clients take no step
# Bounds, controls and methods of statistics: they are no variant of FedAvg.
NEVER_FEDAVG = {"joint", "local", *STATISTICS}
POLICIES = ("shared", "local", "frozen")
FEW = {"images_per_class": 10}  # 2 classes are a whole batch and a smaller one
HARD: dict[str, Any] = {
    "participation": 0.7,
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


@cache
def fedavg(setting: str) -> Record:
    return run(tiny(**SETTINGS[setting]))


def equivalent(kind: str) -> dict[str, Any] | None:
    parameters = registry.get_method(kind).fedavg_equivalent
    return None if parameters is None else dict(parameters)


def test_only_bounds_controls_and_statistics_are_never_fedavg():
    assert {kind for kind in EVERY if equivalent(kind) is None} == NEVER_FEDAVG


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", sorted(set(EVERY) - NEVER_FEDAVG))
def test_with_equivalent_parameters_a_method_is_fedavg_bit_for_bit(kind, setting):
    record = run(tiny(kind, **SETTINGS[setting], **(equivalent(kind) or {})))
    expected = fedavg(setting)
    small.assert_same_weights(record, expected)
    for model in ("initial", "global", "local"):  # a method may have a personal one too
        np.testing.assert_array_equal(record.scores[model], expected.scores[model], model)


@pytest.mark.parametrize(
    ("network", "training"),
    [(small.NETWORK, {}), (BATCH_NORM, {"participation": 0.5})],
    ids=["mlp", "cnn, half of the clients"],
)
@pytest.mark.parametrize("kind", EVERY)
def test_clients_with_few_or_no_images_do_no_harm(kind, training, network):
    """One image, one class, no image: weights, losses and accuracies stay finite."""
    experiment = whole(kind, network=network, split=FEW, training=training)
    record = run(experiment, small.awkward(experiment))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert all(entry["loss"] is None or np.isfinite(entry["loss"]) for entry in record.history)
    assert any(entry["loss"] for entry in record.history) == (kind not in STATISTICS)
    for model in {"global", "personal"} & set(registry.get_method(kind).models):
        accuracy = record.accuracy(model, "task")
        assert ((accuracy >= 0) & (accuracy <= 1)).all(), model


@pytest.mark.parametrize("kind", EVERY)
def test_tasks_may_have_different_numbers_of_classes(kind):
    """One to four classes, of which some return: of a plan from elsewhere, with 12 images each."""
    classes = (((3,), (0, 1, 5, 9), (2, 4)), ((0, 1, 2), (7,), (1, 8)), ((9,), (4, 5), (4, 6, 7)))
    experiment = whole(kind, training={"rounds": 1})
    dataset = experiment.dataset()
    labels = dataset.y_train.tolist()
    images = {label: [i for i, y in enumerate(labels) if y == label][:12] for label in range(10)}
    clients = tuple(
        tuple(Task(task, None, tuple(sorted(i for c in task for i in images[c]))) for task in own)
        for own in classes
    )
    record = run(experiment, Plan(Split("file", 3, 3), 0, dataset.digest, clients, classes=10))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    accuracy = record.accuracy(record.main_model, "task")[-1]  # [U, T]
    assert (accuracy[[0, 1], [0, 1]] == 1).all()  # the only class of its task
    assert ((accuracy >= 0) & (accuracy <= 1)).all()


@pytest.mark.parametrize("kind", EVERY)
def test_clients_without_a_part_in_a_task_do_no_harm(kind):
    """Nor do those that join later: weights and losses stay finite, and all joined take part."""
    split = {"joining": 1, "old_share": 0.4, "order": "common", "classes_per_client": 1, **FEW}
    training = {"schedule": "exponential", "lr_end": 0.01}
    experiment = whole(kind, network=BATCH_NORM, split=split, training=training)
    record = run(experiment)
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert all(entry["loss"] is None or np.isfinite(entry["loss"]) for entry in record.history)
    if kind != "joint":  # which selects on its own
        counts = [entry["participants"] for entry in record.history]
        assert counts == [2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("neutral", [False, True], ids=["whole", "as FedAvg"])
@pytest.mark.parametrize("kind", EVERY)
def test_a_server_averages_if_its_method_says_so(kind, neutral):
    """With the mean of all models in the place of each its next state is the same.

    Methods that upload anything else are refused where it matters.
    """
    experiment = tiny(kind, split=FEW, **equivalent(kind) or {}) if neutral else whole(kind)
    worker = small.worker(experiment, plan(experiment))
    method, (server, states, *_) = worker.method, worker.initial_states(0)
    messages = [method.broadcast(server, client) for client in range(3)]
    ids = [RoundId(0, client, 0, 0, last=True) for client in range(3)]
    rounds = zip(ids, states[:3], messages, strict=True)
    replies = [worker.train_client(*each).reply for each in rounds]
    if all(reply.message.keys() == {"parameters"} for reply in replies):
        own = [replace(reply, samples=1) for reply in replies]
        silent = Privacy(1.0, 0.0, "central")
        mean = share_noisy_mean(worker.runtime, silent, own, generator("no noise"))
        nexts = [method.aggregate(server, each, Log()) for each in (own, mean)]
        one, other = (tree_digest(*flatten(state)) for state in nexts)
        assert method.averages == (one == other)


class Trained(NamedTuple):
    server: State
    given: list[Any]  # state and message
    before: list[Any]  # copies of the two, taken beforehand
    client_round: ClientRound  # with these copies
    result: ClientResult


def client_rounds(worker: Worker, plan_: Plan) -> Iterator[Trained]:
    server, states, *_ = worker.initial_states(plan_.seed)
    for experience in range(plan_.experiences):
        replies = []
        for client in worker.method.participants(list(range(len(states))), server):
            round_id = RoundId(plan_.seed, client, experience, 0, last=True)
            given = [states[client], worker.method.broadcast(server, client)]
            before = deepcopy(given)
            result = worker.train_client(round_id, *given)
            client_round = worker.method.client_round(round_id, plan_, *before)
            yield Trained(server, given, before, client_round, result)
            states[client] = result.reply.state
            replies.append(result.reply)
        server = worker.method.aggregate(server, replies, Log())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", EVERY)
def test_a_client_round_is_a_function_of_its_arguments(kind, policy, tmp_path):
    """It depends neither on the live model of before nor on other random draws. Neither it nor the
    server writes to what it is given, and no part of its reply is in the live model's memory. The
    state comes back unchanged from a store.
    """
    experiment = whole(kind, network=BATCH_NORM, split=FEW, training={"buffers": policy})
    worker = small.worker(experiment, plan(experiment))
    store = Store(tmp_path)
    model = worker.runtime.model
    vectors = (model.parameters, model.gradients, model.buffers)
    live = {vector.untyped_storage().data_ptr() for vector in vectors}
    servers: list[tuple[State, State]] = []
    for each in client_rounds(worker, plan(experiment)):
        reply = each.result.reply
        servers.append((each.server, deepcopy(each.server)))
        for name, tensor in small.tensors([reply.state, reply.message]):
            assert not tensor.numel() or tensor.untyped_storage().data_ptr() not in live, name
        small.assert_equal_trees(store.get(store.put(reply.state).digest), reply.state)
        for vector in vectors:
            vector.fill_(7)
        small.assert_equal_trees(each.given, each.before)
        torch.manual_seed(each.client_round.client)
        drawn = torch.get_rng_state()
        again = worker.train_client(each.client_round, *each.before)
        assert torch.equal(torch.get_rng_state(), drawn), "drawn from the global generator"
        small.assert_equal_trees(again.reply.state, reply.state)
        small.assert_equal_trees(again.reply.message, reply.message)
        small.assert_equal_trees(again.scores, each.result.scores)
        assert (again.reply.loss, again.reply.log.images) == (reply.loss, reply.log.images)
    for server, before in servers:
        small.assert_equal_trees(server, before)


@pytest.mark.parametrize("kind", sorted(set(EVERY) - {"joint", "local", "fedcil"}))
def test_the_order_of_clients_does_not_matter(kind):
    """In the second experience, with memories in use; sums differ in their last digits at most.

    FedCIL's server draws images of the clients' generators one after the other: that order counts.
    """
    experiment = whole(kind, split=FEW)
    worker = small.worker(experiment, plan(experiment))
    rounds = client_rounds(worker, plan(experiment))
    second = [each for each in rounds if each.client_round.experience == 1]
    replies = [each.result.reply for each in second]
    ordered, reverse = (
        worker.method.aggregate(second[0].server, list(each), Log())["parameters"]
        for each in (replies, replies[::-1])
    )
    torch.testing.assert_close(reverse, ordered, rtol=0, atol=1e-6)


@pytest.mark.parametrize("replies", ["none", "empty"])
@pytest.mark.parametrize("kind", sorted(set(EVERY) - {"joint", "local"}))
def test_a_round_without_trained_models_leaves_the_model_unchanged(kind, replies):
    experiment = whole(kind, split=FEW)
    plan_ = with_train(plan(experiment), dict.fromkeys(small.everywhere(plan(experiment)), ()))
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    sent = worker.method.broadcast(server, 0)
    empty = worker.train_client(RoundId(0, 0, 0, 0), states[0], sent).reply
    assert empty.samples == empty.sgd_steps == 0
    after = worker.method.aggregate(server, [] if replies == "none" else [empty], Log())
    assert torch.equal(after["parameters"], server["parameters"])


def test_local_training_is_that_of_a_federation_of_each_client_alone():
    """Also in its personal scores; a client without images takes no step, despite weight decay."""
    experiment = tiny("local", training={"weight_decay": 0.1})
    whole_ = with_train(plan(experiment), {(3, task): () for task in range(3)})
    record = run(experiment, whole_)
    for u in range(4):
        others = {(v, t): () for v, t in small.everywhere(whole_) if v != u}
        alone = run(tiny(training={"weight_decay": 0.1}), with_train(whole_, others))
        np.testing.assert_array_equal(
            record.scores["personal"][:3, :, u],
            alone.scores["global"][:3, :, u],  # the nearest mean is scored for global models
        )
    assert all(entry["bytes"] == {"down": 0, "up": 0} for entry in record.history)
    assert all(entry["disk"] == 4 * P for entry in record.history)
    assert np.isnan(record.scores["global"]).all() and np.isnan(record.scores["local"]).all()
    assert record.weights == {}


def test_the_joint_learner_is_client_and_server_in_one():
    """It is never left out; it has no local model."""
    record = run(tiny("joint", training={"participation": 0.5}))
    assert len(record.history) == small.ROUNDS
    for entry in record.history:
        assert entry["participants"] == entry["completed"] == 1
        assert entry["bytes"] == {"down": 4 * P, "up": 4 * P}
    assert np.isnan(record.scores["personal"]).all() and np.isnan(record.scores["local"]).all()


def at(lr: float, **params: float) -> dict[str, Any]:
    return {"training": {"lr": lr}, **params}


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "message"),
    [
        ("fedala", {"tensors": 4}, {"tensors": 5}, "tensors is 5; it must be at most 4: the model"),
        # a proximal term that increases the distance
        ("fedprox", at(0.1, mu=19.8), at(0.1, mu=20.0), "mu is 20.0; it must be below 2 / train"),
        ("fedprox", at(0.5, mu=3.96), at(0.5, mu=5.0), "below 2 / training.lr = 4"),
        ("fedprox", at(0.0, mu=1e6), at(0.1, mu=1e6), "below 2 / training.lr = 20"),
        # a surrogate that would diverge: its lr (1 - lam) / (2 lam) is 2 at lam = lr / (4 + lr)
        ("fedssi", at(0.1, lam=1.001 / 41), at(0.1, lam=0.02), "lam is 0.02; it must be above 0.0"),
        ("fedssi", at(0.5, lam=1.001 / 9), at(0.5, lam=0.11), "above 0.1111, so that training.lr"),
        ("fedssi", at(0.0, lam=1e-9), at(0.1, lam=1e-9), "above 0.02439, so that training.lr x ("),
        ("gpm", {}, {"network": {"kind": "swin_t"}}, "network.kind is 'swin_t'; it must be anoth"),
        # a pull that would diverge: a step of 0.1 along 2 c (w - target) overshoots at c = 10
        ("pfeddil", {"migration": 9.9}, {"migration": 10.0}, "migration is 10.0; it must be below"),
    ],
)
def test_values_that_cannot_work_are_refused(kind, right, wrong, message):
    small.worker(tiny(kind, **right))
    with pytest.raises(ParameterError, match=re.escape(message)):
        small.worker(tiny(kind, **wrong))


BUFFERS = ("encoder.1.running_mean", "encoder.1.running_var")


def with_buffers(kind: str, policy: str, **training: Any) -> Experiment:
    return tiny(kind, network=BATCH_NORM, split=FEW, training={"buffers": policy, **training})


@pytest.mark.parametrize("kind", ["fedavg", "joint"])
@pytest.mark.parametrize("policy", POLICIES)
def test_buffers_follow_the_policy(policy, kind):
    """Shared ones are averaged; local ones stay with the clients; frozen ones never change.

    The learner of `joint` is client and server in one: its local buffers are the server's too.
    Only those that are sent cost bytes, only those that stay cost space.
    """
    experiment = with_buffers(kind, policy)
    record = run(experiment)
    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    start = net.state_dict()
    moved = [not np.array_equal(record.weights[name], start[name]) for name in BUFFERS]
    sent = policy == "shared" or (policy, kind) == ("local", "joint")
    assert moved == [sent] * 2
    assert np.isfinite(record.accuracy()).all()
    each = 4 * (BN_P + BN_B * sent) * (4 if kind == "fedavg" else 1)
    assert all(entry["bytes"] == {"down": each, "up": each} for entry in record.history)
    disk = 4 * BN_B if policy == "local" else 0
    assert all(entry["disk"] == disk for entry in record.history)


@pytest.mark.parametrize("server_lr", [0.5, 1.0])
def test_shared_buffers_are_averaged_by_samples(server_lr):
    """The server's learning rate is that of the parameters alone."""
    experiment = tiny(network=BATCH_NORM, split=FEW, server_lr=server_lr)
    whole_ = plan(experiment)
    plan_ = with_train(first(whole_, 2), {(0, 0): whole_.clients[0][0].train[:7]})
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    sent = worker.method.broadcast(server, 0)
    replies = [worker.train_client(RoundId(0, u, 0, 0), states[u], sent).reply for u in range(2)]
    after = worker.method.aggregate(server, replies, Log())
    one, other = (reply.message["buffers"] for reply in replies)
    torch.testing.assert_close(after["buffers"], (7 * one + 20 * other) / 27, rtol=0, atol=1e-6)


def accuracies(net: nn.Module, worker: Worker, plan_: Plan, client: int) -> list[float]:
    dataset, shares = worker.runtime.dataset, []
    for task in range(plan_.tasks):
        test = plan_.test_indices(dataset, client, task)
        predicted = net(worker.runtime.normalise(dataset.x_test[test])).argmax(1)
        shares.append(float((predicted == dataset.y_test[test]).double().mean()))
    return shares


@pytest.mark.parametrize(("kind", "model"), [("fedavg", "global"), ("local", "personal")])
def test_local_buffers_are_used_with_their_client(kind, model, tmp_path):
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
