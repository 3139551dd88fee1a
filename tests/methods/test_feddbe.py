"""FedDBE: the personal offset, mean regularisation, and which clients know the global mean."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from small import BATCH_NORM, BN_B, BN_P, P, plan, run, tiny
from torch import Tensor, nn

from stamp_core.client.workspace import RoundId
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine import train as engine
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound, DivergedError, Log, Method, Reply, State
from stamp_core.methods.feddbe import FedDBE
from stamp_core.models import networks as models
from stamp_core.models.flat import weighted_average

FEATURES = 32  # of the small network
BOTH: dict[str, Any] = {"feddbe_kappa": 5.0, "momentum": 0.5, "refresh": "task"}
ONE_BATCH = {"rounds": 1, "batch_size": 1000}
FEW = {"images_per_class": 20}
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


def begun(experiment: Any, plan_: Plan | None = None) -> tuple[Worker, State, list[State]]:
    """A worker, the server's state and the clients' states before the first round."""
    worker = small.worker(experiment, plan_ or plan(experiment))
    server, states, *_ = worker.initial_states(0)
    return worker, server, states


def trained(worker: Worker, round_id: RoundId, server: State, state: State) -> Reply:
    """The reply of a client round."""
    message = worker.method.broadcast(server, round_id.client)
    return worker.train_client(round_id, state, message).reply


# --- by hand


class ByHand:
    """Two linear layers h = A x + a, logits = V (h + z) + c, and a client's epochs on them."""

    def __init__(self, experiment: Any, plan_: Plan) -> None:
        net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
        self.start = [p.detach().double().numpy() for p in net.parameters()]
        self.plan, self.dataset = plan_, experiment.dataset()

    def epoch(
        self, client: int, round_: int, theta: list[Any], z: Any, mean: Any | None
    ) -> tuple[list[Any], Any, Any]:
        """Weights, offset and running mean after an epoch; without `mean` neither z nor pull."""
        a_matrix, a, v, c = (part.copy() for part in theta)
        z, m, dataset = z.copy(), np.zeros(3), self.dataset
        own = self.plan.train_indices(dataset, client, 0)
        draw = generator(0, client, 0, round_, "order")
        for batch in own[torch.randperm(len(own), generator=draw)].split(6):
            x = dataset.x_train[batch].numpy().reshape(-1, 64) / 255
            x = (x - float(dataset.mean)) / float(dataset.std)
            h = x @ a_matrix.T + a
            m = 0.75 * m + 0.25 * h.mean(0)
            e = np.exp((h + z) @ v.T + c)
            g = e / e.sum(1, keepdims=True) - np.eye(10)[dataset.y_train[batch].numpy()]
            g /= len(batch)
            back = g @ v
            pull = 0 if mean is None else 2.0 * 0.25 * (m - mean) / (3 * len(batch))
            a_matrix -= 0.1 * (back + pull).T @ x
            a -= 0.1 * (back + pull).sum(0)
            v -= 0.1 * g.T @ (h + z)
            c -= 0.1 * g.sum(0)
            z -= 0 if mean is None else 0.1 * back.sum(0)
        return [a_matrix, a, v, c], z, m


def test_a_warm_up_and_two_rounds_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two clients with 7 and 13 images in batches of 6; F = 3 features, mu = 1/4, kappa = 2.

    With G = (softmax - onehot) / n  [n, 10]: dL/dV = G^T (h + z), dL/dc = sum G, dL/dz = sum G V,
    and dL/dh = G V + kappa mu (m - shared) / (F n), as m = (1 - mu) m' + mu mean h and the
    regulariser is kappa / F sum_j (m_j - shared_j)^2 / 2; dL/dA = (dL/dh)^T x, dL/da = sum dL/dh.
    m is 0 at the beginning of each round; z goes on; shared is the mean of m, by samples, of
    epochs without z and regulariser from the first weights, which are then discarded.
    """

    def two_layers(network: Any, shape: Any) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), 3

    monkeypatch.setitem(models.ENCODERS, "mlp", two_layers)
    split, training = {"clients": 2, "tasks": 1}, {"rounds": 2, "batch_size": 6}
    experiment = tiny("feddbe", split=split, training=training, feddbe_kappa=2.0, momentum=0.25)
    whole, count = plan(experiment), (7, 13)
    own = [whole.train_indices(experiment.dataset(), u, 0)[: count[u]].tolist() for u in range(2)]
    plan_ = small.with_train(whole, {(u, 0): tuple(own[u]) for u in range(2)})
    hand, zero = ByHand(experiment, plan_), np.zeros(3)

    means = [hand.epoch(u, -1, hand.start, zero, None)[2] for u in range(2)]
    shared = (7 * means[0] + 13 * means[1]) / 20
    theta, offsets = hand.start, [zero, zero]
    for round_ in range(2):
        ends = [hand.epoch(u, round_, theta, offsets[u], shared) for u in range(2)]
        theta = [(7 * one + 13 * two) / 20 for one, two in zip(ends[0][0], ends[1][0], strict=True)]
        offsets = [end[1] for end in ends]

    record = run(experiment, plan_, resume=tmp_path)
    for actual, expected in zip(record.weights.values(), theta, strict=True):
        np.testing.assert_allclose(actual, expected, **CLOSE)
    for u, state in enumerate(small.saved(experiment, tmp_path)["clients"]):
        np.testing.assert_allclose(state["offset"], offsets[u], **CLOSE)
        np.testing.assert_allclose(state["shared"], shared, **CLOSE)
    assert np.abs(offsets[0]).min() > 1e-3


# --- the warm-up


def test_the_warm_up_changes_nothing_but_the_mean() -> None:
    """With a negligible regulariser the run is FedAvg bit for bit: random draws, weights, running
    statistics and velocities of the warm-up are its own."""
    training = {"momentum": 0.9, "dropout": 0.3, "shift": 1, "buffers": "shared"}
    options: dict[str, Any] = {"network": BATCH_NORM, "split": FEW, "training": training}
    record = run(tiny("feddbe", feddbe_kappa=1e-30, trained=False, **options))
    small.assert_same_weights(record, run(tiny(**options)))


def test_the_global_mean_is_that_of_the_clients_by_samples() -> None:
    """A client without images sends none and receives it; one with one image counts once."""
    experiment = tiny("feddbe", **BOTH)
    plan_ = small.awkward(experiment)
    worker, server, states = begun(experiment, plan_)
    assert isinstance(worker.method, FedDBE)
    means = [worker.method.warm_up(plan_, u, server).scratch["mean"] for u in (0, 1, 3)]
    own = [plan_.train_indices(experiment.dataset(), u, 0) for u in (0, 1, 3)]
    expected = weighted_average(means, [float(len(each)) for each in own])
    assert len(own[0]) == 1 and expected.abs().max() > 0.1
    assert all(torch.equal(state["shared"], expected) for state in states)
    assert worker.initial_states(0)[2:] == (4 * 4 * FEATURES, 3 * 4 * FEATURES)
    assert run(experiment, plan_).about["setup"]["up"] == 3 * 4 * FEATURES


def test_without_a_regulariser_there_is_no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FedDBE, "warm_up")
    experiment = tiny("feddbe", refresh="task")
    worker, _, states = begun(experiment)
    assert all(state.keys() == {"offset"} for state in states)
    assert worker.initial_states(0)[2:] == (0, 0)
    for row in run(experiment).history:
        assert row["bytes"] == {"down": 16 * P, "up": 16 * P}
        assert row["disk"] == 4 * FEATURES


def test_a_warm_up_that_diverges_is_named() -> None:
    experiment = tiny("feddbe", training={"lr": 1e38}, feddbe_kappa=1.0)
    with pytest.raises(DivergedError, match=r"client 0, .*round -1: .*training\.lr"):
        begun(experiment)


@pytest.mark.parametrize("refresh", ["never", "task"])
def test_without_images_in_the_warm_up_there_is_no_regulariser(refresh: str) -> None:
    """The mean is undefined, not zero, until a later task has given one."""
    experiment = tiny("feddbe", feddbe_kappa=5.0, refresh=refresh)
    empty = small.with_train(plan(experiment), {(u, 0): () for u in range(4)})
    _, server, states = begun(experiment, empty)
    assert all(state.keys() == {"offset"} for state in states) and "mean" not in server
    record, without = run(experiment, empty), run(tiny("feddbe"), empty)
    np.testing.assert_array_equal(record.accuracy()[1], without.accuracy()[1])
    same = all(np.array_equal(record.weights[n], without.weights[n]) for n in without.weights)
    assert same == (refresh == "never")


# --- the offset


def random_offset(seed: int = 0) -> Tensor:
    """An offset that is not zero."""
    return torch.randn(FEATURES, generator=generator("offsets", seed))


def head_matrix(experiment: Any, parameters: Tensor) -> Tensor:
    """The head's matrix.  # [10, F]"""
    net = small.network(experiment, parameters)
    return net.head.get_parameter("weight").detach()


def test_a_personal_model_adds_a_constant_to_the_logits_of_the_global_one() -> None:
    """V (h + z) + c = (V h + c) + V z; the loss of training is that model's."""
    experiment, z = tiny("feddbe"), random_offset()
    worker, server, _ = begun(experiment)
    method, work, dataset = worker.method, worker.work, experiment.dataset()
    message = method.broadcast(server, 0)
    client_round = ClientRound(RoundId(0, 0, 0, 1), plan(experiment), {"offset": z}, message)
    Method.receive(method, client_round)
    plain = work.outputs(dataset.x_test[:50])
    method.load_personal_model(client_round)
    difference = work.outputs(dataset.x_test[:50]) - plain
    expected = head_matrix(experiment, server["parameters"]) @ z
    torch.testing.assert_close(difference, expected.expand(50, 10), rtol=0, atol=1e-5)
    assert expected.abs().max() > 0.1
    x, y = small.normalised(experiment, dataset.x_test[:50]), dataset.y_test[:50]
    loss = nn.functional.cross_entropy(work.model.module(x), y)
    method.receive(client_round)
    torch.testing.assert_close(method.loss(client_round, x, y), loss, **CLOSE)


def test_the_local_model_has_the_offset_that_is_not_sent() -> None:
    """After a client round the live model's bias is the sent one + V z, all else as sent."""
    experiment = tiny("feddbe", **BOTH)
    worker, server, states = begun(experiment)
    reply = trained(worker, RoundId(0, 0, 0, 1, True), server, states[0])
    live, sent = worker.work.model.parameters, reply.message["parameters"]
    shift = head_matrix(experiment, sent) @ reply.state["offset"]
    assert torch.equal(live[:-10], sent[:-10]) and shift.abs().max() > 1e-3
    torch.testing.assert_close(live[-10:], sent[-10:] + shift, **CLOSE)


def test_offsets_never_leave_their_clients() -> None:
    """Without SGD steps the server's model stays the same whatever the offsets are."""
    experiment = tiny("feddbe", training={"epochs": 0, "weight_decay": 0.1})
    worker, server, _ = begun(experiment)
    replies = []
    for u in range(4):
        replies.append(trained(worker, RoundId(0, u, 0, 0), server, {"offset": random_offset(u)}))
        assert torch.equal(replies[u].state["offset"], random_offset(u))
        assert replies[u].message.keys() == {"parameters"}
    after = worker.method.aggregate(server, replies, Log())
    small.assert_equal_trees(after["parameters"], server["parameters"])


def test_an_offset_is_trained_by_plain_sgd_from_task_to_task() -> None:
    """z - eta dL/dz in one batch, whatever momentum and weight decay the network has."""
    training = {**ONE_BATCH, "momentum": 0.9, "weight_decay": 0.1}
    experiment = tiny("feddbe", training=training)
    dataset, z = experiment.dataset(), random_offset()
    worker, server, _ = begun(experiment)
    net = small.network(experiment, server["parameters"])
    for experience in range(3):
        own = plan(experiment).train_indices(dataset, 0, experience)
        x, y = small.normalised(experiment, dataset.x_train[own]), dataset.y_train[own]
        free = z.clone().requires_grad_()
        loss = nn.functional.cross_entropy(net.head(net.encoder(x) + free), y)
        (g,) = torch.autograd.grad(loss, free)
        reply = trained(worker, RoundId(0, 0, experience, 0, True), server, {"offset": z})
        torch.testing.assert_close(reply.state["offset"], z - 0.1 * g, **CLOSE)
        assert g.abs().max() > 1e-3
        z = reply.state["offset"]


def test_a_client_without_images_keeps_its_offset_and_sends_no_mean() -> None:
    experiment = tiny("feddbe", training={"weight_decay": 0.1}, **BOTH)
    worker, server, states = begun(experiment, small.awkward(experiment))
    state = {**states[2], "offset": random_offset()}
    reply = trained(worker, RoundId(0, 2, 0, 1, True), server, state)
    assert torch.equal(reply.state["offset"], state["offset"]) and "mean" not in reply.message


# --- the mean of later tasks


def rounds(worker: Worker, plan_: Plan) -> Iterator[tuple[bool, list[Reply]]]:
    """Each round of a run of two rounds a task: whether it is the task's last, the replies."""
    server, states, *_ = worker.initial_states(0)
    for experience in range(plan_.experiences):
        for last in (False, True):
            ids = [RoundId(0, u, experience, int(last), last) for u in range(4)]
            replies = [trained(worker, each, server, states[each.client]) for each in ids]
            server = worker.method.aggregate(server, replies, Log())
            states = [reply.state for reply in replies]
            yield last, replies


def test_the_mean_is_renewed_at_the_end_of_a_task() -> None:
    """The average of the running means in the last round; every client has it a round later."""
    experiment = tiny("feddbe", **BOTH)
    shared = begun(experiment)[2][0]["shared"]
    worker = small.worker(experiment, plan(experiment))
    for last, replies in rounds(worker, plan(experiment)):
        assert all(torch.equal(reply.state["shared"], shared) for reply in replies)
        assert all(("mean" in reply.message) == last for reply in replies)
        if last:
            samples = [float(reply.samples) for reply in replies]
            renewed = weighted_average([reply.message["mean"] for reply in replies], samples)
            assert not torch.equal(renewed, shared)
            shared = renewed


def test_means_are_counted_in_the_rounds_in_which_they_are_sent() -> None:
    """Up in the last of two rounds of a task, down in the first of the next; the first one is
    sent in the warm-up, and without a refresh no other. Shared buffers come on top."""
    for row in run(tiny("feddbe", **BOTH)).history:
        down = FEATURES if row["round"] == 0 and row["experience"] else 0
        up = FEATURES if row["round"] == 1 else 0
        assert row["bytes"] == {"down": 16 * (P + down), "up": 16 * (P + up)}
        assert row["disk"] == 2 * 4 * FEATURES
    record = run(tiny("feddbe", feddbe_kappa=5.0))
    assert all(row["bytes"] == {"down": 16 * P, "up": 16 * P} for row in record.history)
    both = {"down": 16 * FEATURES, "up": 16 * FEATURES}
    assert {key: record.about["setup"][key] for key in both} == both
    row = run(tiny("feddbe", network=BATCH_NORM, split=FEW, **BOTH)).history[1]
    assert row["bytes"] == {"down": 16 * (BN_P + BN_B), "up": 16 * (BN_P + BN_B + 8)}


def answer(client: int, samples: int, *mean: float) -> Reply:
    """A client's reply; with a mean in the last round of a task."""
    message = {"parameters": torch.zeros(P)} | ({"mean": torch.tensor(mean)} if mean else {})
    return Reply(client, {}, message, samples, 1, 0.0)


def test_a_client_that_has_not_replied_is_sent_the_mean_again() -> None:
    """A message may have been lost with the client that it was sent to."""
    worker, server, _ = begun(tiny("feddbe", **BOTH))
    method = worker.method

    def receivers(state: State) -> list[int]:
        return [u for u in range(4) if "mean" in method.broadcast(state, u)]

    assert receivers(server) == []
    renewed = method.aggregate(server, [answer(1, 1, 3.0), answer(2, 3, 7.0), answer(3, 0)], Log())
    assert renewed["mean"].tolist() == [6.0] and receivers(renewed) == [0, 1, 2, 3]
    later = method.aggregate(renewed, [answer(0, 5), answer(2, 0)], Log())
    assert receivers(later) == [1, 3] and receivers(renewed) == [0, 1, 2, 3]
    last = method.aggregate(later, [answer(1, 5), answer(2, 5)], Log())
    assert receivers(last) == receivers(method.aggregate(last, [], Log())) == [3]
    again = method.aggregate(last, [answer(0, 2, 8.0)], Log())
    assert again["mean"].tolist() == [8.0] and receivers(again) == [0, 1, 2, 3]


class Stop(Exception):
    """Ends a training between two rounds."""


def test_a_run_with_renewed_means_is_resumed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after each of its rounds, with clients that drop out and miss the mean."""
    training = {"participation": 0.75, "dropout": 0.3, "buffers": "local"}
    experiment = tiny("feddbe", network=BATCH_NORM, split=FEW, training=training, **BOTH)
    unbroken = run(experiment)
    sent = [row["bytes"]["down"] / 4 - BN_P * row["participants"] for row in unbroken.history]
    assert 0 < sent[5] < sent[4]
    saves, save = list[int](), engine.Run.save

    def stopped(one: engine.Run, evaluated: bool, flush: bool) -> None:
        save(one, evaluated, flush)
        saves.append(one.state["next"])
        if 0 < one.state["next"] < one.rounds:
            raise Stop

    monkeypatch.setattr(engine.Run, "save", stopped)
    for _ in range(5):
        with pytest.raises(Stop):
            run(experiment, resume=tmp_path)
    small.assert_same(run(experiment, resume=tmp_path), unbroken)
    assert saves == list(range(7))  # once before the first round


# --- as a whole


def test_every_parameter_changes_the_model() -> None:
    changes: list[dict[str, Any]] = [
        {"trained": False},
        {},
        {"feddbe_kappa": 5.0, "trained": False},
        {"feddbe_kappa": 5.0},
        {"feddbe_kappa": 20.0},
        {"feddbe_kappa": 5.0, "momentum": 1.0},
        {"feddbe_kappa": 5.0, "refresh": "task"},
        {"server_lr": 0.5},
    ]
    weights = [run(tiny("feddbe", **each)).weights["head.weight"] for each in changes]
    for k, one in enumerate(weights):
        for other in weights[:k]:
            assert np.abs(one - other).max() > 1e-4, changes[k]
