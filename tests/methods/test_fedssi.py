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

from stamp_core.client.workspace import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound, DivergedError, Method, Reply, State
from stamp_core.methods.fedssi import MISSED, OVERSHOT, UNVERIFIED, FedSSI
from stamp_core.models import networks as models

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


def trained(
    worker: Worker, plan_: Plan, round_id: RoundId, state: State, sent: Tensor
) -> tuple[ClientRound, Reply]:
    """A client round with its reply."""
    client_round = ClientRound(round_id, plan_, state, {"parameters": sent})
    return client_round, worker.method.train_client(client_round)


def started(experiment: Any) -> tuple[Worker, Plan, Tensor]:
    """A worker, its plan and the initial model."""
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    return worker, plan_, worker.initial_states(0)[0]["parameters"]


# --- by hand


def softmax_gradient(theta: Any, x: Any, y: Any) -> Any:
    """The gradient of the mean cross-entropy of softmax regression.  # [10, 65]"""
    z = np.exp(x @ theta.T)
    return (z / z.sum(1, keepdims=True) - np.eye(10)[y]).T @ x / len(y)


def importance_by_hand(start: Any, x: Any, y: Any) -> Any:
    """Three surrogate steps at lam = 0.2, so q = 2, with eta = 0.1 and eps = 0.3.  # [10, 65]"""
    v, integral = start, np.zeros_like(start)
    for _ in range(3):
        g = softmax_gradient(v, x, y)
        after = v - 0.1 * (g + 2.0 * (v - start))
        integral, v = integral - g * (after - v), after
    return np.maximum(integral, 0) / ((v - start) ** 2 + 0.3)


def test_two_tasks_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Softmax regression z = W x + b in full batches, two clients, two tasks of one round.

    Task 0: two steps of plain gradient descent from theta_0, the mean is theta_1, and Omega_u is
    measured from theta_0. Task 1: two steps along dL + 2 alpha Omega_u (theta - theta_1), of which
    the first has no pull; then Omega_u grows by what is measured from theta_1.
    """
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))
    split, training = {"clients": 2, "tasks": 2}, {"rounds": 1, "batch_size": 1000, "epochs": 2}
    params: dict[str, Any] = {"lam": 0.2, "fedssi_alpha": 20.0, "steps": 3, "epsilon": 0.3}
    experiment = tiny("fedssi", split=split, training=training, **params)
    dataset, whole = experiment.dataset(), plan(experiment)
    few = {(0, t): tuple(whole.train_indices(dataset, 0, t)[:7].tolist()) for t in range(2)}
    plan_ = small.with_train(whole, few)
    head = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0).head
    theta = np.hstack([p.detach().double().numpy().reshape(10, -1) for p in head.parameters()])

    omega, pulled = [np.zeros_like(theta), np.zeros_like(theta)], 0.0
    for task in range(2):
        ends, sizes = [], []
        for u in range(2):
            own = plan_.train_indices(dataset, u, task).numpy()
            x = dataset.x_train.numpy()[own].reshape(-1, 64) / 255
            x = np.hstack([(x - float(dataset.mean)) / float(dataset.std), np.ones((len(own), 1))])
            y, end = dataset.y_train.numpy()[own], theta
            for _ in range(2):
                pull = 2 * 20.0 * omega[u] * (end - theta)
                end, pulled = end - 0.1 * (softmax_gradient(end, x, y) + pull), np.abs(pull).max()
            omega[u] = omega[u] + importance_by_hand(theta, x, y)
            ends.append(end)
            sizes.append(len(own))
        theta = np.average(ends, 0, sizes)
    assert pulled > 1e-3

    actual = run(experiment, plan_, resume=tmp_path).weights
    np.testing.assert_allclose(actual["head.weight"], theta[:, :-1], **CLOSE)
    np.testing.assert_allclose(actual["head.bias"], theta[:, -1], **CLOSE)
    for u, state in enumerate(small.saved(experiment, tmp_path)["clients"]):
        expected = np.concatenate([omega[u][:, :-1].ravel(), omega[u][:, -1]])
        np.testing.assert_allclose(state["omega"], expected, **CLOSE)


# --- the importance of parameters


def quadratic(
    monkeypatch: pytest.MonkeyPatch,
    curvature: float = 1.0,
    most: int = 10**6,
    shown: list[list[float]] | None = None,
) -> list[int]:
    """Make the loss a |theta - 2|^2 / 2 in every coordinate, and 0 after so many batches.

    Returns the list of the lengths of the batches; their images are added to `shown`.
    """
    batches: list[int] = []

    def loss(self: Method, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        batches.append(len(labels))
        if shown is not None:
            shown.extend(images.flatten(1).tolist())
        theta = nn.utils.parameters_to_vector(self.work.classifier.parameters())
        a = curvature if len(batches) <= most else 0.0
        return a * 0.5 * (theta - 2).square().sum()

    monkeypatch.setattr(Method, "loss", loss)
    return batches


def surrogate(experiment: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The start and the end of client 0's surrogate, and its path integral."""
    worker, plan_, start = started(experiment)
    client_round = ClientRound(RoundId(0, 0, 0, 0, True), plan_, {}, {"parameters": start})
    client_round.indices = plan_.train_indices(experiment.dataset(), 0, 0)
    assert isinstance(worker.method, FedSSI)
    worker.work.model.load(start)
    integral = worker.method.train_surrogate(client_round, start)
    return start, worker.work.model.parameters.clone(), integral


def importance(experiment: Any) -> Tensor:
    """The importance of client 0's first task."""
    worker, plan_, start = started(experiment)
    state = worker.initial_states(0)[1][0]
    _, reply = trained(worker, plan_, RoundId(0, 0, 0, 0, True), state, start)
    omega: Tensor = reply.state["omega"]
    return omega


def test_the_path_integral_is_the_decrease_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter has a parabola of its own, a (v - 2)^2 / 2: with small steps the sum of
    -g dv is the decrease of its loss, to the order of eta; and the end is known in closed form:
    (v - start) = a (2 - start) (1 - (1 - eta (a + q))^k) / (a + q), with q = 4.5, k = 2000."""
    quadratic(monkeypatch, curvature=3.0)
    start, end, integral = surrogate(tiny("fedssi", training={"lr": 1e-4}, steps=2000))
    loss = [1.5 * (v.double() - 2).square() for v in (start, end)]
    decrease = loss[0] - loss[1]
    assert float(decrease.min()) > 1
    torch.testing.assert_close(integral.double(), decrease, rtol=2e-3, atol=0)
    share = 3 * (1 - (1 - 1e-4 * 7.5) ** 2000) / 7.5
    torch.testing.assert_close(end - start, share * (2 - start), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("lam", "q"), [(0.1, 4.5), (0.5, 0.5), (1 / 1.1, 0.05)])
def test_a_small_lam_ties_the_surrogate_to_the_global_model(
    lam: float, q: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It converges to start + (optimum - start) a / (a + q) with a = 1."""
    quadratic(monkeypatch)
    start, end, _ = surrogate(tiny("fedssi", lam=lam, steps=200))
    torch.testing.assert_close(end - start, (2 - start) / (1 + q), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("steps", "back"), [(1, False), (2, True)])
def test_with_eta_q_of_1_a_step_without_gradient_leads_back(
    steps: int, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q = (1 - lam) / (2 lam) = 10 at lam = 1 / 21, and eta = 0.1."""
    quadratic(monkeypatch, most=1)
    start, end, integral = surrogate(tiny("fedssi", lam=1 / 21, steps=steps))
    assert torch.allclose(end, start, rtol=0, atol=1e-6) == back
    torch.testing.assert_close(integral, 0.1 * (start - 2).square(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("lam", [0.025, 0.1, 0.5, 0.99])
def test_the_path_integral_is_never_negative(lam: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any gradients. With d = v - start, -g = dv / eta + q d and d' = d + dv:

        sum -g dv = sum dv^2 / eta + q d dv = (1 / eta - q / 2) sum dv^2 + q / 2 d_end^2,

    as 2 d dv = d'^2 - d^2 - dv^2; and eta q < 2. So whether the integral is clamped at 0, which
    the sources leave open, makes no difference.
    """
    draw, path = generator("gradients"), list[Tensor]()

    def loss(self: Method, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        theta = nn.utils.parameters_to_vector(self.work.classifier.parameters())
        path.append(theta.detach().clone())
        return (torch.randn(P, generator=draw) * theta).sum()

    monkeypatch.setattr(Method, "loss", loss)
    start, end, integral = surrogate(tiny("fedssi", lam=lam, steps=20))
    squares = torch.stack([*path, end]).diff(dim=0).square().sum(0)
    q = (1 - lam) / (2 * lam)
    expected = (10 - q / 2) * squares + q / 2 * (end - start).square()
    torch.testing.assert_close(integral, expected, rtol=1e-3, atol=1e-5)
    assert integral.min() >= 0


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 5.0])
def test_importance_is_the_integral_over_the_squared_displacement(
    epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step: dv = -eta g, so Omega = eta g^2 / (eta^2 g^2 + eps)."""
    quadratic(monkeypatch)
    experiment = tiny("fedssi", steps=1, epsilon=epsilon)
    squared = (started(experiment)[2] - 2).square()
    expected = 0.1 * squared / (0.01 * squared + epsilon)
    torch.testing.assert_close(importance(experiment), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("steps", "expected"), [(None, [16, 16, 8]), (2, [16, 16]), (7, [16, 16, 8, 16, 16, 8, 16])]
)
def test_the_surrogate_takes_an_epoch_or_so_many_steps(
    steps: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the 40 images of the task: each once an epoch, in another order each epoch."""
    shown = list[list[float]]()
    batches = quadratic(monkeypatch, shown=shown)
    experiment = tiny("fedssi", steps=steps, split={"images_per_class": 20})
    surrogate(experiment)
    assert batches == expected
    worker, plan_, _ = started(experiment)
    own = plan_.train_indices(experiment.dataset(), 0, 0)
    images = worker.work.normalise(experiment.dataset().x_train[own]).flatten(1).tolist()
    assert shown[:40] != images[: len(shown)] and shown[:40] != shown[40:80]
    for epoch in (shown[:40], shown[40:80]):
        assert len(epoch) < 40 or sorted(epoch) == sorted(images)


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_measuring_changes_neither_the_reply_nor_the_live_model(policy: str) -> None:
    """The same client round, as the last of its task or not: weights and buffers bit for bit."""
    experiment = tiny("fedssi", network=BATCH_NORM, training={"buffers": policy})
    worker, plan_ = small.worker(experiment, plan(experiment)), plan(experiment)
    server, states, *_ = worker.initial_states(0)
    message, actual = worker.method.broadcast(server, 0), []
    for last in (True, False):
        client_round = ClientRound(RoundId(0, 0, 0, 0, last), plan_, states[0], message)
        reply = worker.method.train_client(client_round)
        assert ("omega" in reply.state) == last
        model = worker.work.model
        actual.append([reply.message, model.parameters.clone(), model.buffers.clone()])
        if policy == "local":
            assert torch.equal(reply.state["buffers"], model.buffers)
    small.assert_equal_trees(*actual)
    assert torch.equal(actual[0][1], actual[0][0]["parameters"])


def test_the_surrogate_is_trained_in_training_mode() -> None:
    """Whatever the mode was before. The last batch is a single image, without batch statistics."""
    experiment = tiny("fedssi", network=BATCH_NORM, steps=2)
    worker, plan_, start = started(experiment)
    method, message = worker.method, {"parameters": start}
    client_round = ClientRound(RoundId(0, 0, 0, 0, True), plan_, method.init_client(0, {}), message)
    client_round.indices = plan_.train_indices(experiment.dataset(), 0, 0)[:17]
    assert isinstance(method, FedSSI)
    actual = []
    for training in (True, False):
        method.receive(client_round)
        worker.work.model.module.train(training)
        actual.append(method.train_surrogate(client_round, start))
        assert not worker.work.classifier.norms[0].training
    assert torch.equal(*actual) and torch.isfinite(actual[0]).all()


def test_a_surrogate_that_diverges_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parabola of curvature 30 at a learning rate of 0.1 doubles the error with each step: the
    three steps of training survive it, the two hundred of the surrogate do not."""
    quadratic(monkeypatch, curvature=30.0)
    worker, plan_, start = started(tiny("fedssi", lam=0.9, steps=200))
    state = worker.initial_states(0)[1][0]
    trained(worker, plan_, RoundId(0, 0, 0, 0), state, start)
    with pytest.raises(DivergedError, match=r"client 0, .*round 0: .*training\.lr"):
        trained(worker, plan_, RoundId(0, 0, 0, 0, True), state, start)


# --- the penalty


def test_the_first_task_is_fedavg_bit_for_bit() -> None:
    """With importance measured in its last round."""
    split, training = {"tasks": 1}, {"momentum": 0.9, "weight_decay": 0.01}
    record = run(tiny("fedssi", split=split, training=training, fedssi_alpha=5.0))
    small.assert_same_weights(record, run(tiny(split=split, training=training)))
    assert [row["events"] for row in record.history] == [{}, {UNVERIFIED: 4}]
    assert record.history[1]["notes"]["importance mean"] > 0


def measured(omega: Tensor, **changes: Any) -> State:
    """The state of a client that has measured its first task."""
    return {"experience": 0, "measured": True, "omega": omega, **changes}


@pytest.mark.parametrize("hard", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_training_is_sgd_on_the_loss_with_the_penalty(hard: dict[str, Any]) -> None:
    """torch.optim.SGD on CE + alpha sum_i Omega_i (theta_i - anchor_i)^2, in the second round of a
    task: the anchor is not the received model."""
    experiment = tiny("fedssi", training={**hard, "epochs": 2}, fedssi_alpha=0.7)
    worker, plan_, start = started(experiment)
    draw = generator("anchor")
    omega, anchor = torch.rand(P, generator=draw), start + 0.1 * torch.randn(P, generator=draw)
    state = measured(omega, experience=1, measured=False, anchor=anchor)
    _, reply = trained(worker, plan_, RoundId(0, 0, 1, 1), state, start)

    dataset, t, net = (
        experiment.dataset(),
        experiment.setting.training,
        small.network(experiment, start),
    )
    sgd = torch.optim.SGD(net.parameters(), t.lr, t.momentum, weight_decay=t.weight_decay)
    own, order = plan_.train_indices(dataset, 0, 1), generator(0, 0, 1, 1, "order")
    for _ in range(t.epochs):
        for batch in own[torch.randperm(len(own), generator=order)].split(t.batch_size):
            drift = nn.utils.parameters_to_vector(net.parameters()) - anchor
            logits = net(small.normalised(experiment, dataset.x_train[batch]))
            loss = F.cross_entropy(logits, dataset.y_train[batch])
            sgd.zero_grad()
            (loss + 0.7 * (omega * drift.square()).sum()).backward()
            sgd.step()
    expected = nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.testing.assert_close(reply.message["parameters"], expected, **CLOSE)
    assert torch.equal(reply.state["anchor"], anchor)


# --- from round to round


def sequence(*rounds: tuple[int, int, bool], plan_: Plan | None = None) -> list[Any]:
    """Client 0's rounds (experience, round, last) with their states afterwards.

    The message of the n-th one is the initial model plus n / 100.
    """
    worker, whole, start = started(tiny("fedssi"))
    state, results = worker.initial_states(0)[1][0], []
    for n, each in enumerate(rounds):
        round_id = RoundId(0, 0, *each)
        client_round, reply = trained(worker, plan_ or whole, round_id, state, start + n / 100)
        results.append((client_round, reply.state))
        state = reply.state
    return results


def events(results: list[Any]) -> list[list[str]]:
    """The events of each round."""
    return [client_round.log.events for client_round, _ in results]


def test_the_anchor_of_a_task_is_the_model_received_first() -> None:
    """Also if the first rounds of the task were missed. Importance only grows, at task ends."""
    start = started(tiny("fedssi"))[2]
    ends = [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True), (2, 1, False), (2, 2, True)]
    results = sequence(*ends)
    anchors = [client_round.scratch.get("anchor") for client_round, _ in results]
    assert anchors[0] is None and anchors[1] is None
    for anchor, n in zip(anchors[2:], (2, 2, 4, 4), strict=True):
        assert torch.equal(anchor, start + n / 100)
    omegas = [state.get("omega") for _, state in results]
    assert omegas[0] is None and torch.equal(omegas[1], omegas[2])
    assert torch.equal(omegas[3], omegas[4]) and not torch.equal(omegas[3], omegas[2])
    assert (omegas[5] >= omegas[3]).all() and (omegas[3] >= omegas[1]).all()
    assert events(results) == [[], [UNVERIFIED]] * 3


def test_a_task_whose_last_round_is_missed_has_no_importance_and_is_counted() -> None:
    """Two of three rounds of task 0 and none of task 1, so two are missing on task 2, once."""
    results = sequence((0, 0, False), (0, 1, False), (2, 0, False), (2, 1, False), (2, 2, True))
    assert events(results) == [[], [], [MISSED] * 2, [], [UNVERIFIED]]
    assert all("omega" not in state for _, state in results[:-1])
    assert all("omega" not in client_round.scratch for client_round, _ in results)
    assert events(sequence((1, 0, False))) == [[MISSED]]


def test_a_measured_task_before_a_missed_one_still_has_its_importance() -> None:
    results = sequence((0, 0, True), (1, 0, False), (2, 0, False), (2, 1, True))
    assert events(results) == [[UNVERIFIED], [], [MISSED], [UNVERIFIED]]
    omega = results[0][1]["omega"]
    assert torch.equal(results[1][1]["omega"], omega) and torch.equal(results[2][1]["omega"], omega)
    assert torch.equal(results[2][0].scratch["anchor"], started(tiny("fedssi"))[2] + 0.02)


def test_a_client_without_images_measures_nothing_and_misses_nothing() -> None:
    empty = small.with_train(plan(tiny("fedssi")), {(0, 0): ()})
    results = sequence((0, 0, True), (1, 0, True), plan_=empty)
    assert events(results) == [[], [UNVERIFIED]]
    assert "omega" not in results[0][1] and "omega" in results[1][1]


def test_missed_tasks_are_counted_in_the_history() -> None:
    record = run(tiny("fedssi", training={"dropout": 0.5}, fedssi_alpha=1.0))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert sum(row["events"].get(MISSED, 0) for row in record.history) > 0
    for row in record.history:
        assert set(row["events"]) <= {MISSED, UNVERIFIED}
        measured = row["completed"] if row["round"] == 1 else 0
        assert row["events"].get(UNVERIFIED, 0) == measured


@pytest.mark.parametrize(("largest", "expected"), [(0.99, []), (1.01, [OVERSHOT])])
def test_a_penalty_that_overshoots_is_named_once_a_task(largest: float, expected: Any) -> None:
    """A step of the penalty alone multiplies theta - anchor by 1 - 2 eta alpha Omega."""
    worker, plan_, start = started(tiny("fedssi", fedssi_alpha=20.0))
    omega = torch.zeros(P)
    omega[3] = largest / (0.1 * 20.0)
    first, reply = trained(worker, plan_, RoundId(0, 0, 1, 0), measured(omega), start)
    second, _ = trained(worker, plan_, RoundId(0, 0, 1, 1), reply.state, start)
    assert first.log.events == expected and second.log.events == []


def test_a_client_keeps_two_vectors_and_sends_the_model() -> None:
    """Importance after the first task, and the anchor from the second one on."""
    record = run(tiny("fedssi"))
    assert [row["disk"] for row in record.history] == [0, *[4 * P], *4 * [8 * P]]
    assert all(row["bytes"] == {"down": 16 * P, "up": 16 * P} for row in record.history)
    assert all(("importance" in row["seconds"]) == (row["round"] == 1) for row in record.history)


# --- refused parameters


@pytest.mark.parametrize(
    ("lr", "lam", "least"), [(0.1, 0.02, 0.02439), (0.5, 0.11, 0.1111), (0.0, 1e-9, None)]
)
def test_a_surrogate_that_would_diverge_is_refused(
    lr: float, lam: float, least: float | None
) -> None:
    """eta (1 - lam) / (2 lam) is 2 at lam = eta / (4 + eta): 1 / 41 at 0.1, and 1 / 9 at 0.5."""
    if least is not None:
        right = rf"lam is {lam}; it must be above {least}, so that training.lr x \(1 - lam\) / \(2"
        with pytest.raises(ParameterError, match=right):
            small.worker(tiny("fedssi", training={"lr": lr}, lam=lam))
    small.worker(tiny("fedssi", training={"lr": lr}, lam=least * 1.001 if least else lam))
