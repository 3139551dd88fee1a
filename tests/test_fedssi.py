"""FedSSI: importance by hand and by its identities, the penalty, and what a client keeps."""

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
from stamp_core.methods import DivergedError, Method, Reply, State, Turn
from stamp_core.methods.fedssi import MISSED, OVERSHOT, UNVERIFIED, FedSSI
from stamp_core.seeding import generator
from stamp_core.split import Plan
from stamp_core.workspace import Visit

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


def visited(
    here: Worker, plan_: Plan, visit: Visit, state: State, sent: Tensor
) -> tuple[Turn, Reply]:
    """A turn of a client that is sent a model, with its answer."""
    turn = Turn(visit, plan_, state, {"parameters": sent})
    return turn, here.method.local(turn)


def started(cell: Any) -> tuple[Worker, Plan, Tensor]:
    """A worker, its plan and the initial model."""
    plan_ = plan(cell)
    here = small.worker(cell, plan_)
    return here, plan_, here.begin(0).server["parameters"]


# ------------------------------------------------------------------ by hand


def softmax_slope(theta: Any, x: Any, y: Any) -> Any:
    """The gradient of the mean cross-entropy of softmax regression.  # [10, 65]"""
    z = np.exp(x @ theta.T)
    return (z / z.sum(1, keepdims=True) - np.eye(10)[y]).T @ x / len(y)


def importance(start: Any, x: Any, y: Any) -> Any:
    """Three surrogate steps at lam = 0.2, so q = 2, with eta = 0.1 and eps = 0.3.  # [10, 65]"""
    v, gained = start, np.zeros_like(start)
    for _ in range(3):
        g = softmax_slope(v, x, y)
        after = v - 0.1 * (g + 2.0 * (v - start))
        gained, v = gained - g * (after - v), after
    return np.maximum(gained, 0) / ((v - start) ** 2 + 0.3)


def test_two_tasks_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Softmax regression z = W x + b in full batches, two clients, two tasks of one round.

    Task 0: two steps of plain gradient descent from theta_0, the mean is theta_1, and Omega_u is
    measured from theta_0. Task 1: two steps along dL + 2 alpha Omega_u (theta - theta_1), of which
    the first has no pull; then Omega_u grows by what is measured from theta_1.
    """
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))
    split, training = {"clients": 2, "tasks": 2}, {"rounds": 1, "batch": 1000, "epochs": 2}
    params: dict[str, Any] = {"lam": 0.2, "alpha": 20.0, "steps": 3, "epsilon": 0.3}
    cell = tiny("fedssi", split=split, training=training, **params)
    images, whole = cell.images(), plan(cell)
    few = {(0, t): tuple(whole.train_indices(images, 0, t)[:7].tolist()) for t in range(2)}
    plan_ = small.with_train(whole, few)
    head = models.build(cell.setting.network, (1, 8, 8), 10, seed=0).head
    theta = np.hstack([p.detach().double().numpy().reshape(10, -1) for p in head.parameters()])

    omega, pulled = [np.zeros_like(theta), np.zeros_like(theta)], 0.0
    for task in range(2):
        ends, sizes = [], []
        for u in range(2):
            own = plan_.train_indices(images, u, task).numpy()
            x = images.x_train.numpy()[own].reshape(-1, 64) / 255
            x = np.hstack([(x - float(images.mean)) / float(images.std), np.ones((len(own), 1))])
            y, end = images.y_train.numpy()[own], theta
            for _ in range(2):
                pull = 2 * 20.0 * omega[u] * (end - theta)
                end, pulled = end - 0.1 * (softmax_slope(end, x, y) + pull), np.abs(pull).max()
            omega[u] = omega[u] + importance(theta, x, y)
            ends.append(end)
            sizes.append(len(own))
        theta = np.average(ends, 0, sizes)
    assert pulled > 1e-3

    found = run(cell, plan_, resume=tmp_path).weights
    np.testing.assert_allclose(found["head.weight"], theta[:, :-1], **CLOSE)
    np.testing.assert_allclose(found["head.bias"], theta[:, -1], **CLOSE)
    for u, state in enumerate(small.saved(cell, tmp_path)["clients"]):
        expected = np.concatenate([omega[u][:, :-1].ravel(), omega[u][:, -1]])
        np.testing.assert_allclose(state["omega"], expected, **CLOSE)


# ------------------------------------------------------------------ what importance is


def quadratic(monkeypatch: pytest.MonkeyPatch, slope: float = 1.0, most: int = 10**6) -> list[int]:
    """Make the loss a |theta - 2|^2 / 2 in every coordinate, and 0 after so many batches.

    Gives back the lengths of the batches.
    """
    batches: list[int] = []

    def loss(self: Method, turn: Turn, pictures: Tensor, labels: Tensor) -> Tensor:
        batches.append(len(labels))
        every = nn.utils.parameters_to_vector(self.work.classifier.parameters())
        return (slope if len(batches) <= most else 0.0) * 0.5 * (every - 2).square().sum()

    monkeypatch.setattr(Method, "loss", loss)
    return batches


def descended(cell: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Where client 0's surrogate starts and ends, and what each parameter has gained."""
    here, plan_, start = started(cell)
    turn = Turn(Visit(0, 0, 0, 0, True), plan_, {}, {"parameters": start})
    turn.indices = plan_.train_indices(cell.images(), 0, 0)
    assert isinstance(here.method, FedSSI)
    here.work.model.load(start)
    gained = here.method.descend(turn, start)
    return start, here.work.model.parameters.clone(), gained


def test_the_path_integral_is_the_decrease_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter has a parabola of its own, a (v - 2)^2 / 2: with small steps the sum of
    -g dv is what its loss has lost, to the order of the rate; and the end is known in closed form:
    (v - start) = a (2 - start) (1 - (1 - eta (a + q))^k) / (a + q), with q = 4.5, k = 2000."""
    quadratic(monkeypatch, slope=3.0)
    start, end, gained = descended(tiny("fedssi", training={"rate": 1e-4}, steps=2000))
    loss = [1.5 * (v.double() - 2).square() for v in (start, end)]
    lost = loss[0] - loss[1]
    assert float(lost.min()) > 1
    torch.testing.assert_close(gained.double(), lost, rtol=2e-3, atol=0)
    share = 3 * (1 - (1 - 1e-4 * 7.5) ** 2000) / 7.5
    torch.testing.assert_close(end - start, share * (2 - start), rtol=0, atol=1e-3)


def test_small_lam_ties_the_surrogate_to_the_global_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends near a / (a + q) of the way to its own best: q is 4.5, 0.5 and 0.05."""
    quadratic(monkeypatch)
    ways = []
    for lam, q in ((0.1, 4.5), (0.5, 0.5), (1 / 1.1, 0.05)):
        start, end, _ = descended(tiny("fedssi", lam=lam, steps=200))
        torch.testing.assert_close(end - start, (2 - start) / (1 + q), rtol=0, atol=1e-4)
        ways.append(float((end - start).norm()))
    assert ways == sorted(ways)


def test_at_rate_times_pull_1_a_step_without_gradient_leads_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """q = (1 - lam) / (2 lam) = 10 at lam = 1 / 21, and eta = 0.1."""
    for steps, back in ((1, False), (2, True)):
        quadratic(monkeypatch, most=1)
        start, end, gained = descended(tiny("fedssi", lam=1 / 21, steps=steps))
        assert torch.allclose(end, start, rtol=0, atol=1e-6) == back
        torch.testing.assert_close(gained, 0.1 * (start - 2).square(), rtol=1e-5, atol=0)


def measured(cell: Any) -> Tensor:
    """The importance of client 0's first task."""
    here, plan_, start = started(cell)
    state = here.begin(0).clients[0]
    omega: Tensor = visited(here, plan_, Visit(0, 0, 0, 0, True), state, start)[1].state["omega"]
    return omega


@pytest.mark.parametrize("lam", [0.025, 0.1, 0.5, 0.99])
def test_importance_is_never_negative(lam: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the gradients are. With d = v - start, -g = dv / eta + q d and d' = d + dv:

        sum -g dv = sum dv^2 / eta + q d dv = (1 / eta - q / 2) sum dv^2 + q / 2 d_end^2,

    as 2 d dv = d'^2 - d^2 - dv^2; and eta q < 2. So whether the contribution is cut off at 0, which
    the sources leave open, makes no difference.
    """
    draw, gone = generator("gradients"), [torch.zeros(P)]

    def loss(self: Method, turn: Turn, pictures: Tensor, labels: Tensor) -> Tensor:
        every = nn.utils.parameters_to_vector(self.work.classifier.parameters())
        gone.append(every.detach().clone())
        return (torch.randn(P, generator=draw) * every).sum()

    monkeypatch.setattr(Method, "loss", loss)
    start, end, gained = descended(tiny("fedssi", lam=lam, steps=20))
    squares = torch.stack([*gone[1:], end]).diff(dim=0).square().sum(0)
    q = (1 - lam) / (2 * lam)
    expected = (10 - q / 2) * squares + q / 2 * (end - start).square()
    torch.testing.assert_close(gained, expected, rtol=1e-3, atol=1e-5)
    assert gained.min() >= 0


def test_importance_is_never_negative_in_training(tmp_path: Path) -> None:
    cell = tiny("fedssi", lam=0.03, alpha=0.0, steps=50)
    run(cell, resume=tmp_path)
    every = torch.stack([each["omega"] for each in small.saved(cell, tmp_path)["clients"]])
    assert every.shape == (4, P) and every.min() >= 0 and every.max() > 0.1


def test_importance_is_divided_by_the_squared_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step: dv = -eta g, so Omega = eta g^2 / (eta^2 g^2 + eps)."""
    quadratic(monkeypatch)
    for epsilon in (1e-6, 0.1, 5.0):
        cell = tiny("fedssi", steps=1, epsilon=epsilon)
        squared = (started(cell)[2] - 2).square()
        expected = 0.1 * squared / (0.01 * squared + epsilon)
        torch.testing.assert_close(measured(cell), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(None, [16, 16, 8]), (2, [16, 16]), (7, [16, 16, 8, 16, 16, 8, 16])],
)
def test_the_surrogate_takes_an_epoch_or_so_many_steps(
    steps: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the 40 pictures of the task, each once an epoch, in another order each time."""
    batches = quadratic(monkeypatch)
    cell = tiny("fedssi", steps=steps, split={"images_per_class": 20})
    descended(cell)
    assert batches == expected
    here, plan_, _ = started(cell)
    turn = Turn(Visit(0, 0, 0, 0), plan_, {}, {}, plan_.train_indices(cell.images(), 0, 0))
    assert isinstance(here.method, FedSSI)
    shown = [row for pictures, _ in here.method.again(turn) for row in pictures.flatten(1).tolist()]
    whole = here.work.normalise(cell.images().x_train[turn.indices]).flatten(1).tolist()
    assert shown[:40] != whole[: len(shown)] and shown[:40] != shown[40:80]
    for epoch in (shown[:40], shown[40:80]):
        assert len(epoch) < 40 or sorted(epoch) == sorted(whole)


def test_it_is_measured_on_the_same_loss_with_the_received_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From where the client started in the last round, not from where its training has ended."""
    cell = tiny("fedssi", training={"batch": 1000}, steps=1)
    _, plan_, start = started(cell)
    images, net = cell.images(), small.network(cell, start)
    own = plan_.train_indices(images, 0, 0)
    logits = net(small.normalised(cell, images.x_train[own]))
    g = small.slope(net, F.cross_entropy(logits, images.y_train[own]))
    expected = 0.1 * g.square() / (0.01 * g.square() + 0.1)
    torch.testing.assert_close(measured(cell), expected, **CLOSE)


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_measuring_disturbs_neither_the_answer_nor_the_live_model(policy: str) -> None:
    """The same visit, once as the last of its task and once not: bits of weights and buffers."""
    cell = tiny("fedssi", network=BATCH_NORM, training={"buffers": policy})
    here, plan_ = small.worker(cell, plan(cell)), plan(cell)
    server, states, *_ = here.begin(0)
    sent, found = here.method.broadcast(server, 0), []
    for last in (True, False):
        reply = here.method.local(Turn(Visit(0, 0, 0, 0, last), plan_, states[0], sent))
        model = here.work.model
        found.append((reply, model.parameters.clone(), model.buffers.clone()))
    (measured_, *live), (plain, *untouched) = found
    assert "omega" in measured_.state and "omega" not in plain.state
    small.assert_equal_trees(measured_.message, plain.message)
    small.assert_equal_trees(live, untouched)
    assert torch.equal(live[0], measured_.message["parameters"])
    if policy == "local":
        assert torch.equal(measured_.state["buffers"], live[1])


def test_the_surrogate_is_trained_as_a_client_is_whatever_mode_training_has_left() -> None:
    """Batch normalisation uses the batch, but for the single picture of the last one."""
    cell = tiny("fedssi", network=BATCH_NORM, steps=2)
    plan_, found = plan(cell), []
    here = small.worker(cell, plan_)
    server = here.begin(0).server
    turn = Turn(Visit(0, 0, 0, 0, True), plan_, {}, here.method.broadcast(server, 0))
    turn.indices = plan_.train_indices(cell.images(), 0, 0)[:17]
    assert isinstance(here.method, FedSSI)
    for training in (True, False):
        here.method.receive(Turn(turn.visit, plan_, here.begin(0).clients[0], turn.message))
        here.work.model.module.train(training)
        found.append(here.method.descend(turn, server["parameters"]))
        assert not here.work.classifier.norms[0].training
    assert torch.equal(*found) and torch.isfinite(found[0]).all()


def test_a_surrogate_that_leaves_the_finite_numbers_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parabola of curvature 30 at rate 0.1 doubles the way with each step: the three steps of
    training survive it, the two hundred of the surrogate do not."""
    quadratic(monkeypatch, slope=30.0)
    here, plan_, start = started(tiny("fedssi", lam=0.9, steps=200))
    state = here.begin(0).clients[0]
    visited(here, plan_, Visit(0, 0, 0, 0, False), state, start)
    with pytest.raises(DivergedError, match=r"client 0, step 0, round 0: .*training\.rate"):
        visited(here, plan_, Visit(0, 0, 0, 0, True), state, start)


# ------------------------------------------------------------------ the penalty


def test_the_first_task_is_fedavg_bit_for_bit() -> None:
    split, training = {"tasks": 1}, {"momentum": 0.9, "weight_decay": 0.01}
    record = run(tiny("fedssi", split=split, training=training, alpha=5.0))
    small.assert_same_weights(record, run(tiny(split=split, training=training)))
    assert [row["events"] for row in record.history] == [{}, {UNVERIFIED: 4}]
    assert record.history[1]["notes"]["importance mean"] > 0


def test_without_a_weight_it_is_fedavg_although_importance_is_measured() -> None:
    record = run(tiny("fedssi", alpha=0.0))
    small.assert_same_weights(record, run(tiny()))
    assert [row["events"] for row in record.history] == [{}, {UNVERIFIED: 4}] * 3
    other = run(tiny("fedssi", alpha=2.0))
    with pytest.raises(AssertionError):
        small.assert_same_weights(other, record)


def held(cell: Any, omega: Tensor, **changes: Any) -> State:
    """What a client keeps that has measured its first task."""
    return {"step": 0, "measured": True, "omega": omega, **changes}


def test_an_importance_of_one_is_the_pull_of_fedprox() -> None:
    """2 alpha = mu, in the first round after a task switch, where both hold to the same model."""
    cell = tiny("fedssi", training={"epochs": 2}, alpha=0.25)
    other = tiny("fedprox", training={"epochs": 2}, mu=0.5)
    (here, plan_, start), (there, *_) = started(cell), started(other)
    visit, ones = Visit(0, 0, 1, 0), torch.ones(P)
    _, reply = visited(here, plan_, visit, held(cell, ones), start)
    _, expected = visited(there, plan_, visit, {}, start)
    torch.testing.assert_close(reply.message, expected.message, rtol=0, atol=1e-7)
    _, plain = visited(there, plan_, visit, {}, start)
    zeros = visited(here, plan_, visit, held(cell, torch.zeros(P)), start)[1]
    assert torch.equal(plain.message["parameters"], expected.message["parameters"])
    assert not torch.allclose(zeros.message["parameters"], plain.message["parameters"], atol=1e-4)


@pytest.mark.parametrize("hard", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_it_is_sgd_on_the_loss_with_the_penalty(hard: dict[str, Any]) -> None:
    """torch.optim.SGD on CE + alpha sum_i Omega_i (theta_i - anchor_i)^2, in the second round of a
    task: the anchor is another model than the received one."""
    cell = tiny("fedssi", training={**hard, "epochs": 2}, alpha=0.7)
    here, plan_, start = started(cell)
    draw = generator("anchor")
    omega, away = torch.rand(P, generator=draw), 0.1 * torch.randn(P, generator=draw)
    state = held(cell, omega, step=1, measured=False, anchor=start + away)
    _, reply = visited(here, plan_, Visit(0, 0, 1, 1), state, start)

    images, t, net = cell.images(), cell.setting.training, small.network(cell, start)
    descent = torch.optim.SGD(net.parameters(), t.rate, t.momentum, weight_decay=t.weight_decay)
    own, order = plan_.train_indices(images, 0, 1), generator(0, 0, 1, 1, "order")
    for _ in range(t.epochs):
        for batch in own[torch.randperm(len(own), generator=order)].split(t.batch):
            off = nn.utils.parameters_to_vector(net.parameters()) - (start + away)
            logits = net(small.normalised(cell, images.x_train[batch]))
            loss = F.cross_entropy(logits, images.y_train[batch])
            descent.zero_grad()
            (loss + 0.7 * (omega * off.square()).sum()).backward()
            descent.step()
    expected = nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.testing.assert_close(reply.message["parameters"], expected, **CLOSE)
    assert torch.equal(reply.state["anchor"], start + away)


# ------------------------------------------------------------------ from visit to visit


def told(visits: list[tuple[int, int, bool]], plan_: Plan | None = None) -> list[Any]:
    """Client 0's turns and states after visits (step, round, last), each sent a model of its own:
    the initial one plus a hundredth of how many came before."""
    here, whole, start = started(tiny("fedssi"))
    state, found = here.begin(0).clients[0], []
    for count, visit in enumerate(visits):
        turn, reply = visited(here, plan_ or whole, Visit(0, 0, *visit), state, start + count / 100)
        found.append((turn, reply.state))
        state = reply.state
    return found


def test_a_task_is_held_to_the_model_received_first() -> None:
    """Also where the first rounds of the task were missed; and the last round measures from what
    is received then."""
    start = started(tiny("fedssi"))[2]
    visits = [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True), (2, 1, False), (2, 2, True)]
    found = told(visits)
    anchors = [turn.notes.get("anchor") for turn, _ in found]
    assert anchors[0] is None and anchors[1] is None
    for anchor, count in zip(anchors[2:], (2, 2, 4, 4), strict=True):
        assert torch.equal(anchor, start + count / 100)
    omegas = [state.get("omega") for _, state in found]
    assert omegas[0] is None and torch.equal(omegas[1], omegas[2])
    assert torch.equal(omegas[3], omegas[4]) and not torch.equal(omegas[3], omegas[2])
    assert (omegas[5] >= omegas[3]).all() and (omegas[3] >= omegas[1]).all()
    assert [turn.log.events for turn, _ in found] == [[], [UNVERIFIED]] * 3


def test_importance_adds_up_over_tasks() -> None:
    found = told([(0, 0, True), (1, 0, True)])
    here, plan_, start = started(tiny("fedssi"))
    fresh = here.begin(0).clients[0]
    alone = visited(here, plan_, Visit(0, 0, 1, 0, True), fresh, start + 0.01)[1].state["omega"]
    torch.testing.assert_close(found[1][1]["omega"], found[0][1]["omega"] + alone, rtol=0, atol=0)


def test_a_task_whose_last_round_is_missed_has_no_importance_and_the_record_says_so() -> None:
    """Two of three rounds of task 0 and nothing of task 1, so on task 2 two are missing, once."""
    visits = [(0, 0, False), (0, 1, False), (2, 0, False), (2, 1, False), (2, 2, True)]
    found = told(visits)
    events = [turn.log.events for turn, _ in found]
    assert events == [[], [], [MISSED] * 2, [], [UNVERIFIED]]
    assert all("omega" not in state for _, state in found[:-1])
    assert all("omega" not in turn.notes for turn, _ in found)
    late = told([(1, 0, False)])
    assert late[0][0].log.events == [MISSED]


def test_a_measured_task_before_a_missed_one_is_still_held() -> None:
    found = told([(0, 0, True), (1, 0, False), (2, 0, False), (2, 1, True)])
    assert [turn.log.events for turn, _ in found] == [[UNVERIFIED], [], [MISSED], [UNVERIFIED]]
    omega = found[0][1]["omega"]
    assert torch.equal(found[1][1]["omega"], omega) and torch.equal(found[2][1]["omega"], omega)
    start = started(tiny("fedssi"))[2]
    assert torch.equal(found[2][0].notes["anchor"], start + 0.02)


def test_a_client_without_pictures_measures_nothing_and_misses_nothing() -> None:
    empty = small.with_train(plan(tiny("fedssi")), {(0, 0): ()})
    found = told([(0, 0, True), (1, 0, True)], empty)
    assert [turn.log.events for turn, _ in found] == [[], [UNVERIFIED]]
    assert "omega" not in found[0][1] and "omega" in found[1][1]


def test_dropped_clients_are_counted_in_the_history() -> None:
    training = {"dropout": 0.5}
    record = run(tiny("fedssi", training=training, alpha=1.0))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    counts = [row["events"] for row in record.history]
    assert all(set(each) <= {MISSED, UNVERIFIED} for each in counts)
    assert sum(each.get(MISSED, 0) for each in counts) > 0
    for row in record.history:
        ends = row["round"] == 1
        assert row["events"].get(UNVERIFIED, 0) == (row["answered"] if ends else 0)


@pytest.mark.parametrize(("largest", "events"), [(0.99, []), (1.01, [OVERSHOT])])
def test_a_penalty_that_overshoots_is_named_once_a_task(largest: float, events: list[str]) -> None:
    """A step of the penalty alone takes theta - anchor times 1 - 2 eta alpha Omega."""
    cell = tiny("fedssi", alpha=20.0)
    here, plan_, start = started(cell)
    omega = torch.zeros(P)
    omega[3] = largest / (0.1 * 20.0)
    turn, reply = visited(here, plan_, Visit(0, 0, 1, 0), held(cell, omega), start)
    assert turn.log.events == events
    assert visited(here, plan_, Visit(0, 0, 1, 1), reply.state, start)[0].log.events == []


def test_a_client_keeps_two_models_worth_and_sends_the_model_alone() -> None:
    """Importance after the first task, with the anchor from the second one on."""
    record = run(tiny("fedssi"))
    assert [row["disk"] for row in record.history] == [0, *[4 * P], *4 * [8 * P]]
    assert all(row["bytes"] == {"down": 16 * P, "up": 16 * P} for row in record.history)
    assert all(("importance" in row["seconds"]) == (row["round"] == 1) for row in record.history)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lam": 0.0}, "lam is 0.0; it must be above 0"),
        ({"lam": 1.0}, "lam is 1.0; it must be at least 0 and below 1"),
        ({"alpha": -1.0}, "alpha is -1.0; it must be at least 0"),
        ({"epsilon": 0.0}, "epsilon is 0.0; it must be above 0"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"step": 0.0}, "step is 0.0; it must be above 0"),
    ],
)
def test_what_cannot_measure_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        tiny("fedssi", **changes)


def test_a_surrogate_that_would_swing_away_is_refused() -> None:
    """eta (1 - lam) / (2 lam) is 2 at lam = eta / (4 + eta): 1 / 41 at 0.1, and 1 / 9 at 0.5."""
    right = r"lam is 0.02; it must be above 0.02439, so that training.rate x \(1 - lam\) / \(2 lam"
    with pytest.raises(ParameterError, match=right):
        small.worker(tiny("fedssi", lam=0.02))
    with pytest.raises(ParameterError, match=r"lam is 0.11; it must be above 0.1111"):
        small.worker(tiny("fedssi", training={"rate": 0.5}, lam=0.11))
    small.worker(tiny("fedssi", lam=0.0245))
    small.worker(tiny("fedssi", training={"rate": 0.5}, lam=0.1112))
    small.worker(tiny("fedssi", training={"rate": 0.0}, lam=1e-9))
