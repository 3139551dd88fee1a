"""FedALA: local aggregation by hand, the window, convergence, and what is left unchanged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, P, plan, run, tiny
from torch import Tensor, nn

from stamp_core.client.scoring import score
from stamp_core.client.workspace import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.methods.base.method import ClientRound, Method, State
from stamp_core.methods.fedala import NOT_CONVERGED, FedALA
from stamp_core.models import networks as models

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}
HEAD = 32 * 10 + 10
EVERY = 4  # tensors of the small network
SIZES = {1: 10, 2: HEAD, EVERY: P}  # numbers in its last tensors


def prepared(experiment: Any, **changes: Any) -> tuple[FedALA, Plan, State, Tensor]:
    """Method, plan, a state with random own tensors and weights, and the server's model."""
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    draw, count = generator("own"), len(states[0]["own"])
    own = states[0]["own"] + 0.1 * torch.randn(count, generator=draw)
    drawn = {"own": own, "weights": torch.rand(count, generator=draw), "settled": True}
    assert isinstance(worker.method, FedALA)
    return worker.method, plan_, {**states[0], **drawn, **changes}, server["parameters"]


def received(
    method: FedALA, plan_: Plan, state: State, sent: Tensor, experience: int = 0, round_: int = 0
) -> ClientRound:
    """A round of client 0 after local aggregation; the result is in the live model."""
    round_id = RoundId(0, 0, experience, round_)
    client_round = ClientRound(round_id, plan_, state, {"parameters": sent})
    method.receive(client_round)
    return client_round


# --- by hand


def softmax_gradient(theta: Any, x: Any, y: Any) -> Any:
    """The gradient of the mean cross-entropy of softmax regression.  # [10, 65]"""
    z = np.exp(x @ theta.T)
    return (z / z.sum(1, keepdims=True) - np.eye(10)[y]).T @ x / len(y)


def test_two_rounds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression z = W x + b with full batches; all of theta = (W b) is aggregated.

    Round 1: own and received model coincide, so it is FedAvg: own_u = theta - eta dL_u(theta), and
    theta is their mean by samples. Round 2: hat = own + (theta - own) * w with w = 1 at first. As
    d hat / d w = theta - own, element by element, dL/dw = dL/d hat * (theta - own), and w becomes
    clip(w - eta_w dL/dw, 0, 1), for two epochs, with eta_w = 200 / 0.1 = 2000. Then an SGD step
    from hat, and the mean.
    """
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))
    split, training = {"clients": 2, "tasks": 1}, {"rounds": 2, "batch_size": 1000}
    params = {"lr_product": 200.0, "share": 1.0, "max_epochs": 2}
    experiment = tiny("fedala", split=split, training=training, **params)
    dataset, whole = experiment.dataset(), plan(experiment)
    few = whole.train_indices(dataset, 0, 0)[:7]
    plan_ = small.with_train(whole, {(0, 0): tuple(few.tolist())})
    head = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0).head
    theta = np.hstack([p.detach().double().numpy().reshape(10, -1) for p in head.parameters()])

    data, inside = [], 0
    for u in range(2):
        own = plan_.train_indices(dataset, u, 0).numpy()
        x = dataset.x_train.numpy()[own].reshape(-1, 64) / 255
        x = np.hstack([(x - float(dataset.mean)) / float(dataset.std), np.ones((len(own), 1))])
        data.append((x, dataset.y_train.numpy()[own]))
    sizes = [len(y) for _, y in data]
    owns = [theta - 0.1 * softmax_gradient(theta, *each) for each in data]
    theta = np.average(owns, 0, sizes)
    hats = []
    for own, each in zip(owns, data, strict=True):
        w = np.ones_like(theta)
        for _ in range(2):
            hat = own + (theta - own) * w
            w = np.clip(w - 2000.0 * softmax_gradient(hat, *each) * (theta - own), 0, 1)
        inside += int(((w > 0) & (w < 1)).sum())
        assert (w == 0).any() and (w == 1).any()
        hats.append(own + (theta - own) * w)
    assert inside > 100
    ends = [hat - 0.1 * softmax_gradient(hat, *each) for hat, each in zip(hats, data, strict=True)]
    theta = np.average(ends, 0, sizes)

    record = run(experiment, plan_)
    np.testing.assert_allclose(record.weights["head.weight"], theta[:, :-1], **CLOSE)
    np.testing.assert_allclose(record.weights["head.bias"], theta[:, -1], **CLOSE)
    assert [row["events"] for row in record.history] == [{}, {NOT_CONVERGED: 2}]


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("tensors", SIZES)
def test_weights_are_learnt_batch_by_batch_on_the_current_task(
    tensors: int, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the second task, from weights learnt before: one epoch, the first time several; the
    mixture is updated after each batch, and an epoch returns the loss of its last batch. W's
    learning rate is 0.5 / 0.1 = 5."""
    losses, expected, epoch = list[float](), list[float](), FedALA.epoch

    def recorded(self: FedALA, *args: Any) -> float:
        losses.append(epoch(self, *args))
        return losses[-1]

    monkeypatch.setattr(FedALA, "epoch", recorded)
    experiment = tiny("fedala", lr_product=0.5, share=1.0, tensors=tensors, max_epochs=3)
    method, plan_, state, sent = prepared(experiment, settled=settled)
    client_round = received(method, plan_, state, sent, experience=1)

    cut, dataset = P - SIZES[tensors], experiment.dataset()
    own, w = state["own"], state["weights"].clone()
    task = plan_.train_indices(dataset, 0, 1)
    for _ in range(1 if settled else 3):
        for batch in task.split(16):
            net = small.network(experiment, torch.cat([sent[:cut], own + (sent[cut:] - own) * w]))
            logits = net(small.normalised(experiment, dataset.x_train[batch]))
            loss = F.cross_entropy(logits, dataset.y_train[batch])
            w = (w - 5.0 * small.slope(net, loss)[cut:] * (sent[cut:] - own)).clamp(0, 1)
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(own) == SIZES[tensors] and len(task) > 32
    torch.testing.assert_close(client_round.scratch["weights"], w, **CLOSE)
    mixture = torch.cat([sent[:cut], own + (sent[cut:] - own) * w])
    torch.testing.assert_close(method.work.model.parameters, mixture, **CLOSE)
    assert torch.equal(method.work.model.parameters[:cut], sent[:cut])
    assert not torch.allclose(w, state["weights"], atol=1e-3)
    assert client_round.log.numbers["mixing weight"] == pytest.approx(float(w.mean()), abs=1e-6)


@pytest.mark.parametrize("slower", [2, 20])
def test_the_first_step_of_the_weights_does_not_depend_on_the_local_learning_rate(
    slower: int,
) -> None:
    """An update 1 / c as long, as a local learning rate 1 / c as large leaves it, has the same
    step of W to first order: eta_w G (theta - own) with c eta_w and (theta - own) / c.

    Here from an own model that differs by 1e-3 from the received one, or by 1e-3 / c.
    """
    steps = []
    for lr, scale in ((0.1, 1.0), (0.1 / slower, 1.0 / slower)):
        training = {"lr": lr, "batch_size": 1000}
        experiment = tiny("fedala", lr_product=0.01, share=1.0, training=training)
        method, plan_, state, sent = prepared(experiment, weights=torch.full((HEAD,), 0.5))
        draw = torch.randn(HEAD, generator=generator("difference"))
        state = {**state, "own": sent[-HEAD:] + 1e-3 * scale * draw}
        steps.append(received(method, plan_, state, sent, 1).scratch["weights"] - 0.5)
    assert float(steps[0].abs().max()) > 1e-5
    torch.testing.assert_close(steps[1], steps[0], rtol=0.02, atol=1e-6)


# --- weights of 0 and of 1


def test_with_weights_of_1_and_no_steps_of_w_the_model_is_received_bit_for_bit() -> None:
    """Although own and received model differ."""
    method, plan_, state, sent = prepared(tiny("fedala", lr_product=0.0, tensors=EVERY))
    client_round = received(method, plan_, {**state, "weights": torch.ones(P)}, sent, experience=1)
    assert torch.equal(method.work.model.parameters, sent)
    assert client_round.log.numbers == {"mixing epochs": 1, "mixing weight": 1.0}


@pytest.mark.parametrize("tensors", SIZES)
def test_with_weights_of_0_the_aggregated_tensors_are_the_own_ones(tensors: int) -> None:
    method, plan_, state, sent = prepared(tiny("fedala", lr_product=0.0, tensors=tensors))
    state["weights"] = torch.zeros(SIZES[tensors])
    received(method, plan_, state, sent, experience=1)
    expected = torch.cat([sent[: P - SIZES[tensors]], state["own"]])
    assert torch.equal(method.work.model.parameters, expected)
    assert not torch.equal(expected, sent)


def test_all_tensors_with_weights_of_0_are_local_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control `local`, bit for bit: every client goes on from its own model."""
    init_client = FedALA.init_client

    def without(self: FedALA, client: int, server: State) -> State:
        state = init_client(self, client, server)
        return {**state, "weights": torch.zeros_like(state["weights"])}

    monkeypatch.setattr(FedALA, "init_client", without)
    experiment, local = tiny("fedala", lr_product=0.0, tensors=EVERY), tiny("local")
    run(experiment, resume=tmp_path)
    run(local, resume=tmp_path)
    states, expected = (small.saved(each, tmp_path)["clients"] for each in (experiment, local))
    for state, other in zip(states, expected, strict=True):
        assert torch.equal(state["own"], other["parameters"])


def test_a_single_client_is_fedavg_bit_for_bit() -> None:
    """The average is its own model, so there is nothing to aggregate."""
    split, training = {"clients": 1}, {"momentum": 0.9, "weight_decay": 0.01}
    record = run(tiny("fedala", split=split, training=training))
    small.assert_same_weights(record, run(tiny(split=split, training=training)))
    assert all(row["notes"] == row["events"] == {} for row in record.history)
    np.testing.assert_array_equal(record.accuracy("personal"), record.accuracy("global"))


# --- convergence


@pytest.mark.parametrize(
    ("losses", "most", "epochs", "events"),
    [
        ([1.0] * 50, 50, 11, []),  # ten losses are not yet more than ten
        ([9.0, *[1.0] * 50], 50, 11, []),  # only the last ten of eleven count
        ([1.0, 9.0, *[1.0] * 50], 50, 12, []),
        ([float(k) for k in range(20)] + [1.0] * 50, 50, 30, []),
        ([1.0, 1.19] * 50, 50, 11, []),  # a deviation of 0.095
        ([1.0, 1.21] * 50, 50, 50, [NOT_CONVERGED]),  # of 0.105
        ([1.0] * 50, 11, 11, []),  # converged in the last permitted epoch
        ([1.0] * 50, 10, 10, [NOT_CONVERGED]),
    ],
)
def test_the_first_time_ends_when_ten_losses_hardly_differ(
    losses: list[float], most: int, epochs: int, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their deviation, divided by ten and not by nine, is below 0.1; or after max_epochs."""
    rest = iter(losses)
    monkeypatch.setattr(FedALA, "epoch", lambda *args: next(rest))
    method, plan_, state, sent = prepared(tiny("fedala", max_epochs=most), settled=False)
    client_round = received(method, plan_, state, sent, round_=1)
    assert client_round.log.numbers["mixing epochs"] == epochs
    assert client_round.log.events == events and client_round.scratch["settled"]
    assert client_round.log.seconds["mixing"] > 0


def test_a_client_without_images_learns_no_weights_and_its_first_time_is_still_to_come() -> None:
    method, plan_, state, sent = prepared(tiny("fedala"), settled=False)
    client_round = received(method, small.with_train(plan_, {(0, 1): ()}), state, sent, 1)
    assert torch.equal(client_round.scratch["weights"], state["weights"])
    assert not client_round.scratch["settled"]
    assert client_round.log.numbers == {} and client_round.log.events == []
    mixture = torch.lerp(state["own"], sent[-HEAD:], state["weights"])
    assert torch.equal(method.work.model.parameters[-HEAD:], mixture)


# --- the window


def windows(plan_: Plan, experiment: Any, experience: int = 0) -> Iterator[list[int]]:
    """The window of each of 20 rounds of client 0, as positions in its list of images."""
    method = small.worker(experiment, plan_).method
    assert isinstance(method, FedALA)
    own = plan_.train_indices(experiment.dataset(), 0, experience % plan_.tasks).tolist()
    for round_ in range(20):
        window = method.window(ClientRound(RoundId(0, 0, experience, round_), plan_, {}, {}))
        yield [own.index(i) for i in window.tolist()]


@pytest.mark.parametrize("experience", [0, 1, 4])
def test_the_window_is_a_part_of_the_current_tasks_list(experience: int) -> None:
    """0.8 of it in one piece, anywhere: each position is taken by some round."""
    experiment = tiny("fedala", split={"cycles": 2})
    count = len(plan(experiment).train_indices(experiment.dataset(), 0, experience % 3))
    starts = set()
    for window in windows(plan(experiment), experiment, experience):
        assert window == list(range(window[0], window[0] + int(0.8 * count)))
        starts.add(window[0])
    assert len(starts) > 4 and max(starts) <= count - int(0.8 * count)
    short = tiny("fedala", share=0.99, split={"images_per_class": 1, "cycles": 2})
    assert {tuple(window) for window in windows(plan(short), short)} == {(0,), (1,)}


def test_a_random_window_takes_as_many_from_all_over_the_list() -> None:
    experiment = tiny("fedala", window="random")
    count = len(plan(experiment).train_indices(experiment.dataset(), 0, 0))
    samples = list(windows(plan(experiment), experiment))
    for window in samples:
        assert len(set(window)) == len(window) == int(0.8 * count) and window != sorted(window)
        assert max(window) - min(window) >= len(window)  # not contiguous
    assert len({tuple(window) for window in samples}) == 20


@pytest.mark.parametrize(("share", "images", "size"), [(0.1, 1, 1), (0.1, 3, 1), (1.0, 9, 9)])
def test_a_window_has_at_least_one_image_and_at_most_all(
    share: float, images: int, size: int
) -> None:
    experiment = tiny("fedala", share=share)
    own = plan(experiment).train_indices(experiment.dataset(), 0, 0)[:images]
    plan_ = small.with_train(plan(experiment), {(0, 0): tuple(own.tolist())})
    assert {len(window) for window in windows(plan_, experiment)} == {size}


# --- from round to round


def rounds(experiment: Any) -> list[tuple[State, ClientRound, State]]:
    """Client 0's two rounds on each of two tasks: former state, client round, new state."""
    plan_, results = plan(experiment), []
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    state = states[0]
    for experience, round_ in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sent = {"parameters": server["parameters"] + 0.02 * (experience + round_)}
        round_id = RoundId(0, 0, experience, round_, round_ == 1)
        client_round = ClientRound(round_id, plan_, state, sent)
        reply = worker.method.train_client(client_round)
        assert torch.equal(reply.state["own"], reply.message["parameters"][-HEAD:])
        results.append((state, client_round, reply.state))
        state = reply.state
    return results


def test_weights_are_kept_from_round_to_round_and_task_to_task() -> None:
    (before, _, first), *later = rounds(tiny("fedala", lr_product=0.1))
    assert torch.equal(before["weights"], torch.ones(HEAD)) and not before["settled"]
    assert torch.equal(first["weights"], before["weights"]) and not first["settled"]
    for state, client_round, after in later:
        assert torch.equal(after["weights"], client_round.scratch["weights"])
        assert client_round.log.numbers["mixing epochs"] == (1 if state["settled"] else 11)
        assert not torch.equal(after["weights"], state["weights"]) and after["settled"]
    slow = rounds(tiny("fedala", lr_product=1e-10))  # so slow that weights keep their first value
    assert all(torch.allclose(after["weights"], torch.ones(HEAD)) for _, _, after in slow)


@pytest.mark.parametrize(("refresh", "epochs"), [("kept", [11, 1, 1]), ("task", [11, 11, 1])])
def test_a_new_task_may_learn_its_weights_from_the_start(refresh: str, epochs: list[int]) -> None:
    results = rounds(tiny("fedala", refresh=refresh, lr_product=0.1))
    assert [each.log.numbers["mixing epochs"] for _, each, _ in results[1:]] == epochs
    still = tiny("fedala", refresh=refresh, lr_product=0.0)
    method, plan_, state, sent = prepared(still, experience=0)
    for experience, restart in ((0, False), (1, refresh == "task")):
        client_round = received(method, plan_, state, sent, experience, round_=1)
        expected = torch.ones(HEAD) if restart else state["weights"]
        assert torch.equal(client_round.scratch["weights"], expected)


def test_the_personal_model_is_the_mixture_before_training() -> None:
    """The model that the client's next round would start from; the global one is the server's."""
    experiment = tiny("fedala", lr_product=5.0)
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    arrived, method = small.arrived(worker, plan_, 1), worker.method
    noise = 0.05 * torch.randn(P, generator=generator("away"))
    sent = {"parameters": arrived.message["parameters"] + noise}
    client_round = ClientRound(arrived.round_id, plan_, arrived.state, sent)
    assert method.models == ("global", "personal", "local")
    scores = worker.evaluate_client(arrived.round_id, arrived.state, sent, personal=True)
    mixture = worker.work.model.parameters.clone()
    method.receive(client_round)
    assert torch.equal(worker.work.model.parameters, mixture)
    assert not torch.equal(mixture[-HEAD:], sent["parameters"][-HEAD:])
    assert torch.equal(mixture[:-HEAD], sent["parameters"][:-HEAD])
    assert torch.equal(score(worker.work, plan_, [0], 1).nan_to_num(), scores.nan_to_num())
    Method.receive(method, client_round)
    assert torch.equal(worker.work.model.parameters, sent["parameters"])


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_learning_the_weights_changes_no_running_statistics(policy: str) -> None:
    experiment = tiny("fedala", network=BATCH_NORM, training={"buffers": policy}, tensors=4)
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    arrived = small.arrived(worker, plan_, 1)
    sent = {**arrived.message, "parameters": arrived.message["parameters"] + 0.1}
    worker.work.model.module.train()  # as the training of another client leaves it
    worker.method.receive(ClientRound(arrived.round_id, plan_, arrived.state, sent))
    start = sent.get("buffers", worker.work.untrained)
    assert torch.equal(worker.work.model.buffers, arrived.state.get("buffers", start))
    assert not torch.equal(worker.work.model.parameters, sent["parameters"])


# --- refused parameters


def test_more_tensors_than_the_model_has_are_refused() -> None:
    experiment = tiny("fedala", tensors=EVERY + 1)
    with pytest.raises(ParameterError, match="tensors is 5; it must be at most 4: the model has"):
        small.worker(experiment)
    assert small.worker(tiny("fedala", tensors=EVERY)).method is not None
