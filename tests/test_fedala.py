"""FedALA: the mixture by hand, what it is learnt on, when it stops, and what it leaves alone."""

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

from stamp_core import models
from stamp_core.config import ParameterError
from stamp_core.executor import Worker
from stamp_core.methods import Method, State, Turn
from stamp_core.methods.fedala import UNSETTLED, FedALA
from stamp_core.seeding import generator
from stamp_core.split import Plan
from stamp_core.workspace import Visit

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}
HEAD = 32 * 10 + 10
EVERY = 4  # tensors of the small network
PART = {1: 10, 2: HEAD, EVERY: P}  # how long so many of its last tensors are


def prepared(cell: Any, **changes: Any) -> tuple[FedALA, Plan, State, Tensor]:
    """Method, plan, a state whose own tensors and weights were drawn, and what is received."""
    plan_ = plan(cell)
    here = small.worker(cell, plan_)
    server, states, *_ = here.begin(0)
    draw, count = generator("own"), len(states[0]["own"])
    drawn = {
        "own": states[0]["own"] + 0.1 * torch.randn(count, generator=draw),
        "weights": torch.rand(count, generator=draw),
        "settled": True,
    }
    assert isinstance(here.method, FedALA)
    return here.method, plan_, {**states[0], **drawn, **changes}, server["parameters"]


def received(method: FedALA, plan_: Plan, state: State, sent: Tensor, visit: Visit) -> Turn:
    """A turn after its model was received, in the live model."""
    turn = Turn(visit, plan_, state, {"parameters": sent})
    method.receive(turn)
    return turn


# ------------------------------------------------------------------ by hand


def softmax_slope(theta: Any, x: Any, y: Any) -> Any:
    """The gradient of the mean cross-entropy of softmax regression.  # [10, 65]"""
    z = np.exp(x @ theta.T)
    return (z / z.sum(1, keepdims=True) - np.eye(10)[y]).T @ x / len(y)


def test_two_rounds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression z = W x + b in full batches: all of theta = (W b) is mixed.

    Round 1: own and received model coincide, so it is FedAvg: own_u = theta - eta dL_u(theta), and
    theta is their mean by samples. Round 2: hat = own + (theta - own) * w with w = 1 at first. As
    d hat / d w = theta - own, element by element, dL/dw = dL/d hat * (theta - own), and w becomes
    clip(w - eta_w dL/dw, 0, 1), for two epochs. Then an SGD step from hat, and the mean.
    """
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))
    split, training = {"clients": 2, "tasks": 1}, {"rounds": 2, "batch": 1000}
    cell = tiny("fedala", split=split, training=training, rate=2000.0, share=1.0, most=2)
    images, whole = cell.images(), plan(cell)
    few = whole.train_indices(images, 0, 0)[:7]
    plan_ = small.with_train(whole, {(0, 0): tuple(few.tolist())})
    head = models.build(cell.setting.network, (1, 8, 8), 10, seed=0).head
    theta = np.hstack([p.detach().double().numpy().reshape(10, -1) for p in head.parameters()])

    data, inside = [], 0
    for u in range(2):
        own = plan_.train_indices(images, u, 0).numpy()
        x = images.x_train.numpy()[own].reshape(-1, 64) / 255
        x = np.hstack([(x - float(images.mean)) / float(images.std), np.ones((len(own), 1))])
        data.append((x, images.y_train.numpy()[own]))
    sizes = [len(y) for _, y in data]
    owns = [theta - 0.1 * softmax_slope(theta, *each) for each in data]
    theta = np.average(owns, 0, sizes)
    hats = []
    for own, each in zip(owns, data, strict=True):
        w = np.ones_like(theta)
        for _ in range(2):
            hat = own + (theta - own) * w
            w = np.clip(w - 2000.0 * softmax_slope(hat, *each) * (theta - own), 0, 1)
        inside += int(((w > 0) & (w < 1)).sum())
        assert (w == 0).any() and (w == 1).any()
        hats.append(own + (theta - own) * w)
    assert inside > 100
    ends = [hat - 0.1 * softmax_slope(hat, *each) for hat, each in zip(hats, data, strict=True)]
    theta = np.average(ends, 0, sizes)

    record = run(cell, plan_)
    np.testing.assert_allclose(record.weights["head.weight"], theta[:, :-1], **CLOSE)
    np.testing.assert_allclose(record.weights["head.bias"], theta[:, -1], **CLOSE)
    assert [row["events"] for row in record.history] == [{}, {UNSETTLED: 2}]


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("tensors", PART)
def test_the_weights_descend_batch_by_batch_on_the_current_task(
    tensors: int, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the second task, from weights that were learnt before: hat is built anew after each batch,
    and what is not mixed is the received model's. The first time it is several epochs; what an
    epoch reports is the loss of its last batch."""
    losses, expected, epoch = list[float](), list[float](), FedALA.epoch

    def noting(self: FedALA, *given: Any) -> float:
        losses.append(epoch(self, *given))
        return losses[-1]

    monkeypatch.setattr(FedALA, "epoch", noting)
    cell = tiny("fedala", rate=5.0, share=1.0, tensors=tensors, most=3)
    method, plan_, state, sent = prepared(cell, settled=settled)
    turn = received(method, plan_, state, sent, Visit(0, 0, 1, 0))

    cut, images = P - PART[tensors], cell.images()
    own, w = state["own"], state["weights"].clone()
    task = plan_.train_indices(images, 0, 1)
    for _ in range(1 if settled else 3):
        for batch in task.split(16):
            net = small.network(cell, torch.cat([sent[:cut], own + (sent[cut:] - own) * w]))
            logits = net(small.normalised(cell, images.x_train[batch]))
            loss = F.cross_entropy(logits, images.y_train[batch])
            w = (w - 5.0 * small.slope(net, loss)[cut:] * (sent[cut:] - own)).clamp(0, 1)
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(own) == PART[tensors] and len(task) > 32
    torch.testing.assert_close(turn.notes["weights"], w, **CLOSE)
    mixed = torch.cat([sent[:cut], own + (sent[cut:] - own) * w])
    torch.testing.assert_close(method.work.model.parameters, mixed, **CLOSE)
    assert torch.equal(method.work.model.parameters[:cut], sent[:cut])
    assert not torch.allclose(w, state["weights"], atol=1e-3)
    assert turn.log.numbers["mixing weight"] == pytest.approx(float(w.mean()), abs=1e-6)


# ------------------------------------------------------------------ weights of 0 and of 1


def test_at_rate_zero_a_model_is_received_bit_for_bit_although_there_is_something_to_mix() -> None:
    method, plan_, state, sent = prepared(tiny("fedala", rate=0.0, tensors=EVERY))
    state["weights"] = torch.ones(P)
    turn = received(method, plan_, state, sent, Visit(0, 0, 1, 0))
    assert torch.equal(method.work.model.parameters, sent)
    assert turn.log.numbers == {"mixing epochs": 1, "mixing weight": 1.0}


@pytest.mark.parametrize("tensors", PART)
def test_with_weights_of_zero_the_mixed_tensors_are_never_shared(tensors: int) -> None:
    method, plan_, state, sent = prepared(tiny("fedala", rate=0.0, tensors=tensors))
    state["weights"] = torch.zeros(PART[tensors])
    received(method, plan_, state, sent, Visit(0, 0, 1, 0))
    cut = P - PART[tensors]
    expected = torch.cat([sent[:cut], state["own"]])
    assert torch.equal(method.work.model.parameters, expected)
    assert not torch.equal(expected, sent)


def test_all_tensors_with_weights_of_zero_are_training_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control `local`, bit for bit: every client goes on from its own model."""
    begin = FedALA.new_client

    def without(self: FedALA, client: int, server: State) -> State:
        state = begin(self, client, server)
        return {**state, "weights": torch.zeros_like(state["weights"])}

    monkeypatch.setattr(FedALA, "new_client", without)
    cell, alone = tiny("fedala", rate=0.0, tensors=EVERY), tiny("local")
    run(cell, resume=tmp_path)
    run(alone, resume=tmp_path)
    owns, expected = (small.saved(each, tmp_path)["clients"] for each in (cell, alone))
    for own, state in zip(owns, expected, strict=True):
        assert torch.equal(own["own"], state["parameters"])


def test_a_single_client_has_nothing_to_mix() -> None:
    """The average is its own model: FedAvg bit for bit, and no epoch is spent on weights."""
    split, training = {"clients": 1}, {"momentum": 0.9, "weight_decay": 0.01}
    record = run(tiny("fedala", split=split, training=training))
    small.assert_same_weights(record, run(tiny(split=split, training=training)))
    assert all(row["notes"] == row["events"] == {} for row in record.history)
    np.testing.assert_array_equal(record.scores["personal"], record.scores["global"])


def test_several_clients_are_not_fedavg() -> None:
    record, other = run(tiny("fedala")), run(tiny())
    assert np.abs(record.weights["head.weight"] - other.weights["head.weight"]).max() > 1e-4


def test_weights_stay_between_0_and_1(tmp_path: Path) -> None:
    cell = tiny("fedala", rate=200.0, share=1.0)
    run(cell, resume=tmp_path)
    every = torch.stack([each["weights"] for each in small.saved(cell, tmp_path)["clients"]])
    assert every.min() == 0 and every.max() == 1
    assert ((every > 0) & (every < 1)).sum() > 10


# ------------------------------------------------------------------ when it stops


def noted(losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the epochs of mixing report these losses, one after the other."""
    left = iter(losses)
    monkeypatch.setattr(FedALA, "epoch", lambda *anything: next(left))


@pytest.mark.parametrize(
    ("losses", "epochs"),
    [
        ([1.0] * 50, 11),  # ten losses are not yet more than ten
        ([9.0, *[1.0] * 50], 11),  # the first of eleven is no longer looked at
        ([1.0, 9.0, *[1.0] * 50], 12),
        ([float(k) for k in range(20)] + [1.0] * 50, 30),
        ([1.0, 1.19] * 50, 11),  # a deviation of 0.095
        ([1.0, 1.21] * 50, 50),  # of 0.105
    ],
)
def test_the_first_time_ends_when_ten_losses_hardly_differ(
    losses: list[float], epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their deviation, divided by ten and not by nine, is below 0.1; 50 epochs are the most."""
    noted(losses, monkeypatch)
    method, plan_, state, sent = prepared(tiny("fedala"), settled=False)
    turn = received(method, plan_, state, sent, Visit(0, 0, 0, 1))
    assert turn.log.numbers["mixing epochs"] == epochs and turn.notes["settled"]
    assert turn.log.events == ([UNSETTLED] if epochs == 50 else [])
    assert turn.log.seconds["mixing"] > 0


def test_a_cap_of_the_first_time_that_settles_just_there_is_no_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for most, events in ((11, []), (10, [UNSETTLED])):
        noted([1.0] * most, monkeypatch)
        method, plan_, state, sent = prepared(tiny("fedala", most=most), settled=False)
        turn = received(method, plan_, state, sent, Visit(0, 0, 0, 1))
        assert turn.log.events == events and turn.log.numbers["mixing epochs"] == most


def test_every_later_time_is_one_epoch() -> None:
    """Round 0 has nothing to mix, round 1 is the first time, also at the next tasks one is one."""
    record = run(tiny("fedala", threshold=100.0))
    epochs = [row["notes"].get("mixing epochs") for row in record.history]
    assert epochs == [None, 11, 1, 1, 1, 1]
    assert all(row["events"] == {} for row in record.history)


def test_a_client_without_pictures_learns_no_weights_and_keeps_its_first_time() -> None:
    method, plan_, state, sent = prepared(tiny("fedala"), settled=False)
    empty = small.with_train(plan_, {(0, 1): ()})
    turn = received(method, empty, state, sent, Visit(0, 0, 1, 0))
    assert torch.equal(turn.notes["weights"], state["weights"]) and not turn.notes["settled"]
    assert turn.log.numbers == {} and turn.log.events == []
    mixed = torch.lerp(state["own"], sent[-HEAD:], state["weights"])
    assert torch.equal(method.work.model.parameters[-HEAD:], mixed)


# ------------------------------------------------------------------ the window


def windows(plan_: Plan, cell: Any, step: int = 0) -> Iterator[list[int]]:
    """The places in client 0's list that the window of each of 20 rounds takes, in its order."""
    method = small.worker(cell, plan_).method
    assert isinstance(method, FedALA)
    own = plan_.train_indices(cell.images(), 0, step % plan_.tasks).tolist()
    for round_ in range(20):
        window = method.window(Turn(Visit(0, 0, step, round_), plan_, {}, {}))
        yield [own.index(i) for i in window.tolist()]


@pytest.mark.parametrize("step", [0, 1, 4])
def test_the_window_is_a_part_of_the_current_tasks_list(step: int) -> None:
    """0.8 of it in one piece, anywhere: each place is taken by some round."""
    cell = tiny("fedala", split={"cycles": 2})
    count = len(plan(cell).train_indices(cell.images(), 0, step % 3))
    found = list(windows(plan(cell), cell, step))
    for each in found:
        assert each == list(range(each[0], each[0] + int(0.8 * count)))
    starts = {each[0] for each in found}
    assert len(starts) > 4 and max(starts) <= count - int(0.8 * count)
    short = tiny("fedala", share=0.99, split={"images_per_class": 1, "cycles": 2})
    assert {tuple(each) for each in windows(plan(short), short)} == {(0,), (1,)}


def test_a_random_window_takes_as_many_from_all_over_the_list() -> None:
    cell = tiny("fedala", window="random")
    count = len(plan(cell).train_indices(cell.images(), 0, 0))
    found = list(windows(plan(cell), cell))
    for each in found:
        assert len(set(each)) == len(each) == int(0.8 * count) and each != sorted(each)
        assert max(each) - min(each) >= len(each)  # in no piece of that length
    assert len({tuple(each) for each in found}) == 20


def test_one_picture_is_a_window_and_all_of_them_can_be() -> None:
    cell = tiny("fedala", share=0.1)
    for count in (1, 3):
        own = plan(cell).train_indices(cell.images(), 0, 0)[:count]
        few = small.with_train(plan(cell), {(0, 0): tuple(own.tolist())})
        assert {len(each) for each in windows(few, cell)} == {1}
    whole = tiny("fedala", share=1.0)
    count = len(plan(whole).train_indices(whole.images(), 0, 0))
    assert all(each == list(range(count)) for each in windows(plan(whole), whole))


# ------------------------------------------------------------------ from visit to visit


def turns(cell: Any) -> list[tuple[State, Turn, State]]:
    """Client 0's visits of two rounds on each of two tasks: state before, turn, state after."""
    plan_, found = plan(cell), []
    here = small.worker(cell, plan_)
    server, states, *_ = here.begin(0)
    state = states[0]
    for step, round_ in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sent = {"parameters": server["parameters"] + 0.02 * (step + round_)}
        turn = Turn(Visit(0, 0, step, round_, round_ == 1), plan_, state, sent)
        reply = here.method.local(turn)
        found.append((state, turn, reply.state))
        assert torch.equal(reply.state["own"], reply.message["parameters"][-HEAD:])
        state = reply.state
    return found


def test_weights_are_kept_from_visit_to_visit_and_task_to_task() -> None:
    before, _, first = turns(tiny("fedala"))[0]
    assert torch.equal(before["weights"], torch.ones(HEAD)) and not before["settled"]
    assert torch.equal(first["weights"], before["weights"]) and not first["settled"]
    for state, turn, after in turns(tiny("fedala"))[1:]:
        assert torch.equal(after["weights"], turn.notes["weights"])
        assert turn.log.numbers["mixing epochs"] == (1 if state["settled"] else 11)
        assert not torch.equal(after["weights"], state["weights"]) and after["settled"]
    still = turns(tiny("fedala", rate=1e-9))  # so slow that whatever it starts from is what it has
    assert all(torch.allclose(after["weights"], torch.ones(HEAD)) for _, _, after in still)


@pytest.mark.parametrize(("refresh", "epochs"), [("kept", [11, 1, 1]), ("task", [11, 11, 1])])
def test_a_new_task_may_learn_its_weights_afresh(refresh: str, epochs: list[int]) -> None:
    found = turns(tiny("fedala", refresh=refresh))
    assert [turn.log.numbers["mixing epochs"] for _, turn, _ in found[1:]] == epochs

    method, plan_, state, sent = prepared(tiny("fedala", refresh=refresh, rate=0.0))
    for step, afresh in ((0, False), (1, refresh == "task")):
        turn = received(method, plan_, {**state, "step": 0}, sent, Visit(0, 0, step, 1))
        expected = torch.ones(HEAD) if afresh else state["weights"]
        assert torch.equal(turn.notes["weights"], expected)


def test_a_client_keeps_two_numbers_for_each_mixed_one_and_sends_the_model_alone() -> None:
    for tensors, count in PART.items():
        record = run(tiny("fedala", tensors=tensors))
        assert all(row["disk"] == 4 * 2 * count for row in record.history)
        assert all(row["bytes"] == {"down": 16 * P, "up": 16 * P} for row in record.history)


def test_the_personal_model_is_the_mixture_before_training() -> None:
    """What the client's next visit would start from; and the global one is the server's alone."""
    cell = tiny("fedala", rate=50.0)
    plan_ = plan(cell)
    here = small.worker(cell, plan_)
    turn = small.arrived(here, plan_, 1)
    away = 0.05 * torch.randn(P, generator=generator("away"))
    moved = {"parameters": turn.message["parameters"] + away}
    assert here.method.models == ("global", "personal", "local")
    scored = here.judge_client(turn.visit, turn.state, moved, personal=True)
    mixed = here.work.model.parameters.clone()
    here.method.receive(Turn(turn.visit, plan_, turn.state, moved))
    assert torch.equal(here.work.model.parameters, mixed)
    assert not torch.equal(mixed[-HEAD:], moved["parameters"][-HEAD:])
    assert torch.equal(mixed[:-HEAD], moved["parameters"][:-HEAD])
    assert torch.equal(here.work.score(plan_, [0], 1).nan_to_num(), scored.nan_to_num())
    Method.receive(here.method, Turn(turn.visit, plan_, turn.state, moved))
    assert torch.equal(here.work.model.parameters, moved["parameters"])


def test_the_personal_model_is_scored_beside_the_global_one() -> None:
    record = run(tiny("fedala", rate=50.0))
    assert np.isfinite(record.accuracy("personal")).all()
    assert (record.accuracy("personal") != record.accuracy("global")).any()


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_learning_the_weights_moves_no_running_statistics(policy: str) -> None:
    cell = tiny("fedala", network=BATCH_NORM, training={"buffers": policy}, tensors=4)
    plan_ = plan(cell)
    here = small.worker(cell, plan_)
    turn = small.arrived(here, plan_, 1)
    away = {**turn.message, "parameters": turn.message["parameters"] + 0.1}
    here.work.model.module.train()  # as the training of another client leaves it
    here.method.receive(Turn(turn.visit, plan_, turn.state, away))
    start = away.get("buffers", here.work.untrained)
    assert torch.equal(here.work.model.buffers, turn.state.get("buffers", start))
    assert not torch.equal(here.work.model.parameters, away["parameters"])


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": -1.0}, "rate is -1.0; it must be at least 0"),
        ({"share": 0.0}, "share is 0.0; it must be above 0"),
        ({"share": 1.1}, "share is 1.1; it must be above 0 and at most 1"),
        ({"tensors": 0}, "tensors is 0; it must be at least 1"),
        ({"threshold": 0.0}, "threshold is 0.0; it must be above 0"),
        ({"most": 0}, "most is 0; it must be at least 1"),
        ({"refresh": "round"}, "refresh"),
        ({"window": "all"}, "window"),
        ({"step": 0.0}, "step is 0.0; it must be above 0"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        tiny("fedala", **changes)


def test_more_tensors_than_the_model_has_are_refused() -> None:
    cell = tiny("fedala", tensors=EVERY + 1)
    with pytest.raises(ParameterError, match="tensors is 5; it must be at most 4: the model has"):
        small.worker(cell)
    assert isinstance(small.worker(tiny("fedala", tensors=EVERY)), Worker)
