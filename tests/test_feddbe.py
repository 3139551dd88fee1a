"""FedDBE: an offset that is a client's own, a mean that all features keep to, and who knows it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from small import BATCH_NORM, BN_B, BN_P, P, plan, run, tiny
from torch import Tensor, nn

from stamp_core import engine, models
from stamp_core.config import ParameterError
from stamp_core.executor import Worker
from stamp_core.methods import DivergedError, Log, Method, Reply, State, Turn
from stamp_core.methods.feddbe import Bias, FedDBE
from stamp_core.metrics import Array
from stamp_core.seeding import generator
from stamp_core.split import Plan
from stamp_core.vectors import average
from stamp_core.workspace import Visit

FEATURES = 32  # of the small network
BOTH: dict[str, Any] = {"kappa": 5.0, "momentum": 0.5, "refresh": "task"}
ONE_BATCH = {"rounds": 1, "batch": 1000}
FEW = {"images_per_class": 20}


def begun(cell: Any, plan_: Plan) -> tuple[Worker, State, list[State]]:
    """A worker, and what everybody knows before the first round."""
    here = small.worker(cell, plan_)
    server, states, *_ = here.begin(plan_.seed)
    return here, server, states


def visited(here: Worker, visit: Visit, server: State, state: State) -> Reply:
    """A client's visit."""
    sent = here.method.broadcast(server, visit.client)
    return here.attend(visit, state, sent).reply


# ------------------------------------------------------------------ by hand


class ByHand:
    """Two linear layers h = A x + a, logits = V (h + z) + c, and a client's epochs on them."""

    def __init__(self, cell: Any, plan_: Plan) -> None:
        net = models.build(cell.setting.network, (1, 8, 8), 10, seed=0)
        self.start = [p.detach().double().numpy() for p in net.parameters()]
        self.cell, self.plan, self.images = cell, plan_, cell.images()

    def epoch(
        self, client: int, round_: int, theta: list[Array], z: Array, mean: Array | None
    ) -> tuple[list[Array], Array, Array]:
        """Weights, offset and running mean after one epoch; without `mean` neither z nor pull."""
        a_matrix, a, v, c = (part.copy() for part in theta)
        z, m, images = z.copy(), np.zeros(3), self.images
        own = self.plan.train_indices(images, client, 0)
        draw = generator(0, client, 0, round_, "order")
        for batch in own[torch.randperm(len(own), generator=draw)].split(6):
            x = images.x_train[batch].numpy().reshape(-1, 64) / 255
            x = (x - float(images.mean)) / float(images.std)
            h = x @ a_matrix.T + a
            m = 0.75 * m + 0.25 * h.mean(0)
            e = np.exp((h + z) @ v.T + c)
            g = e / e.sum(1, keepdims=True) - np.eye(10)[images.y_train[batch].numpy()]
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
    """Two clients with 7 and 13 pictures in batches of 6; F = 3 features, mu = 1/4, kappa = 2.

    With G = (softmax - onehot) / n  [n, 10]: dL/dV = G^T (h + z), dL/dc = sum G, dL/dz = sum G V,
    and dL/dh = G V + kappa mu (m - shared) / (F n), as m = (1 - mu) m' + mu mean h and the
    regulariser is kappa / F sum_j (m_j - shared_j)^2 / 2; dL/dA = (dL/dh)^T x, dL/da = sum dL/dh.
    m is 0 at the beginning of each round; z goes on; shared is the mean of m, by samples, of
    epochs without z and regulariser from the first weights, which are then forgotten.
    """

    def two_layers(network: Any, shape: Any) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), 3

    monkeypatch.setitem(models.ENCODERS, "mlp", two_layers)
    training = {"rounds": 2, "batch": 6}
    split = {"clients": 2, "tasks": 1}
    cell = tiny("feddbe", split=split, training=training, kappa=2.0, momentum=0.25)
    whole, count = plan(cell), (7, 13)
    own = [whole.train_indices(cell.images(), u, 0)[: count[u]].tolist() for u in range(2)]
    plan_ = small.with_train(whole, {(u, 0): tuple(own[u]) for u in range(2)})
    hand, nothing = ByHand(cell, plan_), np.zeros(3)

    means = [hand.epoch(u, -1, hand.start, nothing, None)[2] for u in range(2)]
    shared = (7 * means[0] + 13 * means[1]) / 20
    theta, offsets = hand.start, [nothing, nothing]
    for round_ in range(2):
        ends = [hand.epoch(u, round_, theta, offsets[u], shared) for u in range(2)]
        theta = [(7 * one + 13 * two) / 20 for one, two in zip(ends[0][0], ends[1][0], strict=True)]
        offsets = [end[1] for end in ends]

    record = run(cell, plan_, resume=tmp_path)
    for found, expected in zip(record.weights.values(), theta, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    for u, state in enumerate(small.saved(cell, tmp_path)["clients"]):
        np.testing.assert_allclose(state["offset"], offsets[u], rtol=0, atol=1e-6)
        np.testing.assert_allclose(state["shared"], shared, rtol=0, atol=1e-6)
    assert np.abs(offsets[0]).min() > 1e-3


# ------------------------------------------------------------------ the warm-up


def test_the_warm_up_leaves_nothing_behind_but_the_mean() -> None:
    """With a regulariser too small to count, the run is FedAvg bit for bit: the warm-ups' draws,
    weights, running statistics and velocities are their own."""
    training = {"momentum": 0.9, "dropout": 0.3, "shift": 1, "buffers": "shared"}
    options: dict[str, Any] = {"network": BATCH_NORM, "split": FEW, "training": training}
    record = run(tiny("feddbe", kappa=1e-30, trained=False, **options))
    small.assert_same_weights(record, run(tiny(**options)))
    small.assert_same_weights(record, run(tiny("feddbe", trained=False, **options)))


@pytest.mark.parametrize("momentum", [1.0, 0.1])
def test_the_running_mean_of_one_batch_is_its_share_of_the_batch_mean(momentum: float) -> None:
    """m = (1 - mu) 0 + mu mean h; with mu 1 it is the mean itself."""
    cell = tiny("feddbe", training=ONE_BATCH, kappa=1.0, momentum=momentum)
    plan_ = plan(cell)
    here, server, _ = begun(cell, plan_)
    method, own = here.method, plan_.train_indices(cell.images(), 1, 0)
    net = small.network(cell, server["parameters"])
    expected = net.encoder(small.normalised(cell, cell.images().x_train[own])).mean(0)
    found = method.warm_up(plan_, 1, server).notes["mean"]  # type: ignore[attr-defined]
    torch.testing.assert_close(found, momentum * expected.detach(), rtol=0, atol=1e-6)


def test_the_shared_mean_is_that_of_the_clients_exactly() -> None:
    """By samples; who has no pictures sends none and is told, who has one picture counts once."""
    cell = tiny("feddbe", **BOTH)
    plan_ = small.awkward(cell)
    here, server, states = begun(cell, plan_)
    ends = [here.method.warm_up(plan_, u, server) for u in (0, 1, 3)]  # type: ignore[attr-defined]
    samples = [float(len(plan_.train_indices(cell.images(), u, 0))) for u in (0, 1, 3)]
    expected = average([end.notes["mean"] for end in ends], samples)
    assert samples[0] == 1 and expected.abs().max() > 0.1
    for state in states:
        assert torch.equal(state["shared"], expected)
    assert here.begin(0)[2:] == (4 * 4 * FEATURES, 3 * 4 * FEATURES)
    assert run(cell, plan_).about["setup"]["up"] == 3 * 4 * FEATURES


def test_without_a_regulariser_nobody_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FedDBE, "warm_up")
    cell = tiny("feddbe", refresh="task")
    here, _, states = begun(cell, plan(cell))
    assert all(state.keys() == {"offset"} for state in states)
    assert here.begin(0)[2:] == (0, 0)
    for row in run(cell).history:
        assert row["bytes"] == {"down": 16 * P, "up": 16 * P}
        assert row["disk"] == 4 * FEATURES


def test_a_warm_up_that_diverges_is_named() -> None:
    cell = tiny("feddbe", training={"rate": 1e38}, kappa=1.0)
    with pytest.raises(DivergedError, match=r"client 0, step 0, round -1: .*training\.rate"):
        begun(cell, plan(cell))


@pytest.mark.parametrize("refresh", ["never", "task"])
def test_where_nobody_had_a_picture_there_is_no_mean_to_keep_to(refresh: str) -> None:
    """Undefined, not zero: as without a regulariser, until a later task has brought one."""
    cell = tiny("feddbe", kappa=5.0, refresh=refresh)
    empty = small.with_train(plan(cell), {(u, 0): () for u in range(4)})
    _, server, states = begun(cell, empty)
    assert all(state.keys() == {"offset"} for state in states) and "mean" not in server
    record, without = run(cell, empty), run(tiny("feddbe"), empty)
    np.testing.assert_array_equal(record.accuracy()[1], without.accuracy()[1])
    same = all(np.array_equal(record.weights[n], without.weights[n]) for n in without.weights)
    assert same == (refresh == "never")


# ------------------------------------------------------------------ the offset


def random_offsets(count: int) -> list[Tensor]:
    """Offsets that are not zero."""
    draw = generator("offsets")
    return [torch.randn(FEATURES, generator=draw) for _ in range(count)]


def weights(net: nn.Module) -> Tensor:
    """The head's matrix.  # [10, F]"""
    found: Tensor = dict(net.named_parameters())["head.weight"].detach()
    return found


def test_a_personal_model_is_the_global_one_with_a_constant_on_its_logits() -> None:
    """V (h + z) + c = (V h + c) + V z; the model in training is that one."""
    cell = tiny("feddbe")
    plan_ = plan(cell)
    here, server, _ = begun(cell, plan_)
    (z,) = random_offsets(1)
    turn = Turn(Visit(0, 0, 0, 1, True), plan_, {"offset": z}, here.method.broadcast(server, 0))
    pictures = cell.images().x_test[:50]
    Method.receive(here.method, turn)
    plain = here.work.outputs(pictures)
    here.method.receive_personal(turn)
    constant = here.work.outputs(pictures) - plain
    net = small.network(cell, server["parameters"])
    expected = weights(net) @ z
    torch.testing.assert_close(constant, expected.expand(50, 10), rtol=0, atol=1e-5)
    assert expected.abs().max() > 0.1
    x, y = small.normalised(cell, pictures), cell.images().y_test[:50]
    as_scored = nn.functional.cross_entropy(here.work.model.module(x), y)
    here.method.receive(turn)
    torch.testing.assert_close(here.method.loss(turn, x, y), as_scored, rtol=0, atol=1e-6)


def test_the_local_model_is_scored_with_the_offset_that_is_not_sent() -> None:
    """After a visit the live model's bias is the sent one + V z, all else is what was sent."""
    cell = tiny("feddbe", **BOTH)
    here, server, states = begun(cell, plan(cell))
    reply = visited(here, Visit(0, 0, 0, 1, True), server, states[0])
    left, sent = here.work.model.parameters, reply.message["parameters"]
    net = small.network(cell, sent)
    shift = weights(net) @ reply.state["offset"]
    assert torch.equal(left[:-10], sent[:-10]) and shift.abs().max() > 1e-3
    torch.testing.assert_close(left[-10:], sent[-10:] + shift, rtol=0, atol=1e-6)


def test_offsets_never_leave_their_clients() -> None:
    """Without a step the server's model is the same bit for bit whoever has which offset, and with
    steps nothing has the size of an offset but the mean."""
    cell = tiny("feddbe", training={"epochs": 0, "weight_decay": 0.1})
    offsets, after = random_offsets(4), []
    for order in ((0, 1, 2, 3), (2, 3, 1, 0)):
        here, server, _ = begun(cell, plan(cell))
        given: list[State] = [{"offset": offsets[k]} for k in order]
        replies = [visited(here, Visit(0, u, 0, 0), server, given[u]) for u in range(4)]
        after.append(here.method.aggregate(server, replies, Log()))
        for reply, state in zip(replies, given, strict=True):
            assert torch.equal(reply.state["offset"], state["offset"])
            assert reply.message.keys() == {"parameters"}
    small.assert_equal_trees(after[0], after[1])
    small.assert_equal_trees(after[0]["parameters"], server["parameters"])


def test_an_offset_goes_on_from_task_to_task_by_plain_sgd() -> None:
    """z - rate dL/dz in one batch, whatever momentum and weight decay the network has."""
    training = {**ONE_BATCH, "momentum": 0.9, "weight_decay": 0.1}
    cell = tiny("feddbe", training=training)
    plan_ = plan(cell)
    here, server, _ = begun(cell, plan_)
    net, z = small.network(cell, server["parameters"]), random_offsets(1)[0]
    for step in range(3):
        own = plan_.train_indices(cell.images(), 0, step)
        x, y = small.normalised(cell, cell.images().x_train[own]), cell.images().y_train[own]
        free = z.clone().requires_grad_()
        (g,) = torch.autograd.grad(
            nn.functional.cross_entropy(net.head(net.encoder(x) + free), y), free
        )
        found = visited(here, Visit(0, 0, step, 0, True), server, {"offset": z}).state["offset"]
        torch.testing.assert_close(found, z - 0.1 * g, rtol=0, atol=1e-6)
        assert g.abs().max() > 1e-3
        z = found


def test_a_client_without_pictures_keeps_its_offset() -> None:
    cell = tiny("feddbe", training={"weight_decay": 0.1}, **BOTH)
    plan_ = small.awkward(cell)
    here, server, states = begun(cell, plan_)
    (z,) = random_offsets(1)
    reply = visited(here, Visit(0, 2, 0, 1, True), server, {**states[2], "offset": z})
    assert torch.equal(reply.state["offset"], z) and "mean" not in reply.message


# ------------------------------------------------------------------ the mean of later tasks


def test_the_running_mean_starts_anew_in_every_round() -> None:
    """Two rounds at rate 0 end with the same mean: mu mean h, not (2 mu - mu^2) mean h."""
    cell = tiny("feddbe", training={"rate": 0, "batch": 1000}, **BOTH)
    here, server, states = begun(cell, plan(cell))
    first = visited(here, Visit(0, 0, 0, 0, True), server, states[0])
    second = visited(here, Visit(0, 0, 0, 1, True), server, first.state)
    found = [reply.message["mean"] for reply in (first, second)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
    assert first.message["mean"].abs().max() > 0.01


def rounds(here: Worker, plan_: Plan) -> Iterator[tuple[Visit, State, list[State], list[Reply]]]:
    """Each round of a run of two rounds a task: its last visit, who knew what, the replies."""
    server, states, *_ = here.begin(0)
    for step in range(plan_.steps):
        for round_ in range(2):
            visits = [Visit(0, u, step, round_, round_ == 1) for u in range(4)]
            replies = [visited(here, v, server, states[v.client]) for v in visits]
            before, known = server, states
            server = here.method.aggregate(server, replies, Log())
            states = [reply.state for reply in replies]
            yield visits[-1], before, known, replies


def test_the_mean_is_renewed_at_the_end_of_a_task_and_sent_once() -> None:
    """The average of what the clients' last rounds end with; everybody has it a round later."""
    cell = tiny("feddbe", **BOTH)
    plan_ = plan(cell)
    shared = begun(cell, plan_)[2][0]["shared"]
    for visit, _, _, replies in rounds(small.worker(cell, plan_), plan_):
        assert all(torch.equal(reply.state["shared"], shared) for reply in replies)
        assert all(("mean" in reply.message) == visit.last for reply in replies)
        if visit.last:
            samples = [float(reply.samples) for reply in replies]
            renewed = average([reply.message["mean"] for reply in replies], samples)
            assert not torch.equal(renewed, shared)
            shared = renewed


def test_means_are_paid_for_in_the_rounds_in_which_they_travel() -> None:
    """Up in the last of two rounds of a task, down in the first of the next; the first is told in
    the warm-up, and without a refresh that is all."""
    for row in run(tiny("feddbe", **BOTH)).history:
        down = FEATURES if row["round"] == 0 and row["step"] else 0
        up = FEATURES if row["round"] == 1 else 0
        assert row["bytes"] == {"down": 16 * (P + down), "up": 16 * (P + up)}
        assert row["disk"] == 2 * 4 * FEATURES
    record = run(tiny("feddbe", kappa=5.0))
    assert all(row["bytes"] == {"down": 16 * P, "up": 16 * P} for row in record.history)
    both = {"down": 16 * FEATURES, "up": 16 * FEATURES}
    assert {key: record.about["setup"][key] for key in both} == both


def answer(client: int, samples: int, *values: float) -> Reply:
    """A client's answer in the last round of a task; without values it has no mean."""
    message = {"parameters": torch.zeros(P)}
    if values:
        message["mean"] = torch.tensor(values)
    return Reply(client, {}, message, samples, 1, 0.0)


def test_who_has_not_answered_is_sent_the_mean_again() -> None:
    """A message may have been lost with the client that it went to."""
    here, server, _ = begun(tiny("feddbe", **BOTH), plan(tiny()))

    def told(state: State) -> list[int]:
        return [u for u in range(4) if "mean" in here.method.broadcast(state, u)]

    method = here.method
    assert told(server) == []
    renewed = method.aggregate(server, [answer(1, 1, 3.0), answer(2, 3, 7.0), answer(3, 0)], Log())
    assert renewed["mean"].tolist() == [6.0] and told(renewed) == [0, 1, 2, 3]
    later = method.aggregate(renewed, [answer(0, 5), answer(2, 0)], Log())
    assert told(later) == [1, 3] and told(renewed) == [0, 1, 2, 3]
    last = method.aggregate(later, [answer(1, 5), answer(2, 5)], Log())
    assert told(last) == [3]
    assert told(method.aggregate(last, [], Log())) == [3]
    again = method.aggregate(last, [answer(0, 2, 8.0)], Log())
    assert again["mean"].tolist() == [8.0] and told(again) == [0, 1, 2, 3]


class Stop(Exception):
    """Ends a training between two rounds."""


def test_a_run_with_renewed_means_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after each of its rounds, with clients that drop out and miss the mean."""
    training = {"participation": 0.75, "dropout": 0.3, "buffers": "local"}
    cell = tiny("feddbe", network=BATCH_NORM, split=FEW, training=training, **BOTH)
    unbroken = run(cell)
    sent = [row["bytes"]["down"] / 4 - BN_P * row["asked"] for row in unbroken.history]
    assert 0 < sent[5] < sent[4]
    done, save = [0], engine.Run.save

    def saved(one: engine.Run) -> None:
        save(one)
        done[0] += 1
        if one.state["next"] < one.rounds:
            raise Stop

    monkeypatch.setattr(engine.Run, "save", saved)
    for _ in range(5):
        with pytest.raises(Stop):
            run(cell, resume=tmp_path)
    small.assert_same(run(cell, resume=tmp_path), unbroken)
    assert done == [6]


# ------------------------------------------------------------------ as a whole


def spread(cell: Any, kappa: float) -> float:
    """How far features of client 0's task are, in the mean, from the shared one after a visit."""
    cell = replace(cell, params=replace(cell.params, kappa=kappa))
    plan_ = plan(cell)
    here, server, states = begun(cell, plan_)
    reply = visited(here, Visit(0, 0, 0, 0), server, states[0])
    own = plan_.train_indices(cell.images(), 0, 0)
    net = small.network(cell, reply.message["parameters"])
    features = net.encoder(small.normalised(cell, cell.images().x_train[own]))
    return float((features.mean(0) - states[0]["shared"]).detach().norm())


def test_the_regulariser_keeps_features_near_the_shared_mean() -> None:
    cell = tiny("feddbe", momentum=1.0)
    loose, firm = spread(cell, 1e-30), spread(cell, 5.0)
    assert firm < loose / 2


def test_every_part_changes_the_model() -> None:
    """None of the switches is a dummy."""
    parts: list[dict[str, Any]] = [
        {"trained": False},
        {},
        {"kappa": 5.0, "trained": False},
        {"kappa": 5.0},
        {"kappa": 20.0},
        {"kappa": 5.0, "momentum": 1.0},
        {"kappa": 5.0, "refresh": "task"},
        {"step": 0.5},
    ]
    found = [run(tiny("feddbe", **each)).weights for each in parts]
    for k, one in enumerate(found):
        for other in found[:k]:
            assert np.abs(one["head.weight"] - other["head.weight"]).max() > 1e-4, parts[k]


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_both_halves_do_no_harm_to_clients_with_next_to_nothing(network: dict[str, Any]) -> None:
    """One picture, one class, none at all, with a mean that is renewed."""
    cell = tiny("feddbe", network=network, split=FEW, training={"dropout": 0.3}, **BOTH)
    record = run(cell, small.awkward(cell))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    for model in ("global", "personal"):
        assert np.isfinite(record.accuracy(model)).all()
    difference = record.accuracy("global") - record.accuracy("personal")
    assert np.abs(difference[-1, 3]).max() > 0 and (difference[-1, 2] == 0).all()


def test_shared_buffers_are_paid_for_beside_the_mean() -> None:
    cell = tiny("feddbe", network=BATCH_NORM, split=FEW, **BOTH)
    row = run(cell).history[1]
    assert row["bytes"] == {"down": 16 * (BN_P + BN_B), "up": 16 * (BN_P + BN_B + 8)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kappa": -1.0}, "kappa is -1.0; it must be at least 0"),
        ({"kappa": float("nan")}, "kappa is nan; it must be at least 0"),
        ({"momentum": -0.1}, "momentum is -0.1; it must be at least 0"),
        ({"momentum": 1.5}, "momentum is 1.5; it must be at most 1"),
        ({"step": 0.0}, "step is 0.0; it must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        Bias(**values)  # type: ignore[arg-type]
    assert str(error.value) == message
    assert Bias(momentum=0.0).momentum == 0 and Bias(momentum=1.0).momentum == 1


def test_a_refresh_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ParameterError, match="refresh 'round' is unknown; known: never, task"):
        tiny("feddbe", refresh="round")
