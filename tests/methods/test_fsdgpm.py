"""FS-DGPM: a moved step by hand, weights of columns, and when bases are made."""

from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from by_hand import (
    CLOSE,
    FULL_BATCH,
    Array,
    memory_data,
    softmax_gradient,
    task_data,
    use_softmax_regression,
)
from small import BATCH_NORM, P, kept, plan, run, tiny
from stamp_core.client.workspace import RoundId
from torch import Tensor

from stamp_core.client import subspaces
from stamp_core.core.seeding import generator
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound, Reply
from stamp_core.methods.fsdgpm import FsDgpm

FEW: dict[str, Any] = {"split": {"clients": 2, "tasks": 2, "images_per_class": 20}}
BARE: dict[str, Any] = {"epsilon": 0.0, "increment": 0.0, "clip": None}  # without projection


def arrived(experience: int, **options: Any) -> tuple[Worker, ClientRound]:
    """A client round in the only round of an experience, after one in every experience before."""
    experiment = tiny("fsdgpm", **{"training": {"rounds": 1}, **options})
    worker = small.worker(experiment, plan(experiment))
    return worker, small.arrived(worker, plan(experiment), experience)


def prepared(experience: int = 1, **options: Any) -> tuple[FsDgpm, ClientRound, Tensor, Tensor]:
    """A method with the received model, the bases, and a first batch."""
    worker, client_round = arrived(experience, **options)
    method: Any = worker.method
    method.receive(client_round)
    client_round.indices = method.train_indices(client_round)
    client_round.scratch |= {"removed": [], **method.protected(client_round)}
    images, labels = next(iter(method.batches(client_round)))
    return method, client_round, images, labels


# ------------------------------------------------------------------ the loss at moved weights


def test_a_step_without_a_past_is_that_of_the_gradient_up_the_slope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Softmax regression, one batch, K = 1: θ - lr g(θ + η1 g(θ)), with whole gradients."""
    use_softmax_regression(monkeypatch)
    options: dict[str, Any] = {"inner_steps": 1, "eta1": 0.5, "clip": None}
    worker, client_round = arrived(0, training=FULL_BATCH, **options)
    theta = client_round.message["parameters"].double().numpy()
    x, labels = task_data(client_round, worker)
    up = theta + 0.5 * softmax_gradient(theta, x, labels)
    expected = theta - 0.1 * softmax_gradient(up, x, labels)
    assert np.abs(expected - (theta - 0.1 * softmax_gradient(theta, x, labels))).max() > 1e-4
    reply = worker.method.train_client(client_round)
    np.testing.assert_allclose(reply.message["parameters"], expected, **CLOSE)


def test_inner_steps_follow_each_other_on_parts_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K = 2 on 16 images: θ1 = θ + η1 clamp(g(first 8; θ)), θ2 = θ1 + η1 clamp(g(last 8; θ1)); the
    step is the mean gradient of the whole batch at both, shortened to the length of the clip."""
    use_softmax_regression(monkeypatch)
    method, client_round, images, labels = prepared(0, eta1=2.0, clip=0.05)
    x = images.flatten(1).double().numpy()
    theta, slopes = method.work.model.parameters.double().numpy(), []
    for rows in (slice(0, 8), slice(8, 16)):
        g = softmax_gradient(theta, x[rows], labels[rows])
        assert np.abs(g).max() > 0.05
        theta = theta + 2.0 * g.clip(-0.05, 0.05)
        slopes.append(softmax_gradient(theta, x, labels))
    method.work.model.gradients.zero_()
    method.loss(client_round, images, labels).backward()
    method.correct_gradient(client_round)
    expected = np.mean(slopes, 0)
    assert np.linalg.norm(expected) > 0.05
    expected *= 0.05 / np.linalg.norm(expected)
    np.testing.assert_allclose(method.work.model.gradients, expected, **CLOSE)


def test_steps_of_length_0_and_no_basis_make_it_replay() -> None:
    """Equal gradients are averaged: the last digits differ."""
    options = {"eta1": 0.0, **BARE, **FEW}
    found, expected = run(tiny("fsdgpm", **options)), run(tiny("replay", **FEW))
    for name, value in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=1e-5, err_msg=name)
    still = run(tiny("fsdgpm", inner_steps=0, **BARE, **FEW))
    small.assert_same_weights(still, expected)


def test_the_weights_are_moved_inside_the_protected_spaces() -> None:
    """After the first task; before it they are moved anywhere."""
    for experience in (0, 1):
        method, client_round, images, labels = prepared(experience, eta1=1.0, clip=None)
        offsets, outputs_at = list[Tensor](), method.outputs_at

        def noted(
            offset: Tensor, *rest: Any, of: Any = outputs_at, to: Any = offsets, **more: Any
        ) -> Tensor:
            to.append(offset.detach().clone())
            logits: Tensor = of(offset, *rest, **more)
            return logits

        setattr(method, "outputs_at", noted)  # noqa: B010
        method.loss(client_round, images, labels)
        bases = client_round.scratch["bases"]
        assert len(offsets) == 4 and not offsets[0].any()
        for offset in offsets[1:]:
            rest = offset - subspaces.component(offset, method.layers, bases)
            assert offset.norm() > 1e-2
            assert (rest.norm() < 1e-5 * offset.norm()) == (experience == 1)


def test_only_the_pass_at_the_weights_themselves_updates_running_statistics() -> None:
    """At learning rate 0 with K = 1 and no memory it sees what FedAvg sees."""
    options: dict[str, Any] = {"network": BATCH_NORM, "training": {"lr": 0.0}, **FEW}
    found = run(tiny("fsdgpm", inner_steps=1, memory=kept(0), **options))
    small.assert_same_weights(found, run(tiny(**options)))


# ------------------------------------------------------------------ weights of columns


def test_the_slope_of_lambda_by_its_formula() -> None:
    """K = 1, nothing clipped: dL/dλ_i = η1 <g m_i, G m_i> over outputs, g the gradient of the new
    images at θ, G that of all at the moved θ; the loss's own slope in λ too, by differences."""
    method, client_round, images, labels = prepared(1, inner_steps=1, eta1=0.3, clip=None)
    new = len(labels) - len(client_round.scratch["soft"])
    theta, experiment = method.work.model.parameters.clone(), tiny("fsdgpm")
    net = small.network(experiment, theta)
    g = small.slope(net, F.cross_entropy(net(images[:new]), labels[:new]))
    bases = client_round.scratch["bases"]
    inside = subspaces.component(g, method.layers, bases, others=g)
    net = small.network(experiment, theta + 0.3 * inside)
    joint = small.slope(net, F.cross_entropy(net(images), labels))
    method.loss(client_round, images, labels).backward()
    expected = torch.cat(
        [
            0.3 * ((layer.matrix(g) @ bases[n]) * (layer.matrix(joint) @ bases[n])).sum(0)
            for n, layer in method.layers.items()
        ]
    )
    found = client_round.scratch["lambdas"].grad
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    assert len(found) == sum(basis.shape[1] for basis in bases.values()) > 10 and found.any()


def test_lambda_is_the_share_of_a_column_that_is_removed() -> None:
    """0: nothing; 1: GPM's projection; between: G - sum_i λ_i (G m_i) m_i'."""
    method, client_round, *_ = prepared(1, clip=None)
    model, bases = method.work.model, client_round.scratch["bases"]
    count = len(client_round.scratch["lambdas"])
    g = torch.randn(P, generator=generator("gradient"))
    for lambdas in (torch.zeros(count), torch.ones(count), torch.linspace(0, 1, count)):
        client_round.scratch["lambdas"] = lambdas
        model.gradients.copy_(g)
        method.correct_gradient(client_round)
        start = 0
        for name, layer in method.layers.items():
            expected = layer.matrix(g).clone()
            for column in bases[name].T:
                inside = layer.matrix(g) @ column
                expected -= lambdas[start] * torch.outer(inside, column)
                start += 1
            torch.testing.assert_close(layer.matrix(model.gradients), expected)
        assert start == count and torch.equal(model.gradients, g) == (not lambdas.any())


def test_a_column_is_released_where_gradients_agree() -> None:
    """The slope is positive there: λ falls, and rises again where they are opposed, in [0, 1]."""
    method, *_ = prepared(0, eta2=0.5, clip=None)
    slope = torch.tensor([0.4, -0.4, 4.0, -4.0])
    assert method.stepped(torch.full((4,), 0.5), slope).tolist() == pytest.approx([0.3, 0.7, 0, 1])


def test_the_step_of_lambda_is_clipped_by_its_length() -> None:
    method, *_ = prepared(0, eta2=0.1, clip=2.0)
    found = method.stepped(torch.full((2,), 0.5), torch.tensor([3.0, 4.0]))
    assert found.tolist() == pytest.approx([0.5 - 0.1 * 2 * 0.6, 0.5 - 0.1 * 2 * 0.8])


@pytest.mark.parametrize("start", [-1.0, 0.0, 0.3, 1.0])
def test_the_published_weights_do_not_move(start: float) -> None:
    """σ(10 λ) has one fixed point near 1, 0.9999546, where its slope is 0.00045: it is reached from
    anywhere, and a step of at most 0.01 x 2 ends between σ(9.7995) and σ(10.1995)."""
    method, *_ = prepared(0, soft="published", eta2=0.01, clip=2.0)
    lambdas = torch.tensor([start])
    for step in range(60):
        slope = torch.tensor([1e3 if step % 2 else -1e3])
        lambdas = method.stepped(lambdas, slope)
        if start == 1 or step > 50:
            assert 0.99994 < lambdas.item() < 0.99997


def test_published_weights_are_those_of_no_weights_up_to_a_ten_thousandth() -> None:
    records = [run(tiny("fsdgpm", soft=soft, **FEW)) for soft in ("off", "published")]
    lambdas = [record.history[-1]["notes"]["lambda"] for record in records]
    assert lambdas[0] == 1 and 0.99994 < lambdas[1] < 0.99996
    one, other = (record.weights["head.weight"] for record in records)
    assert 0 < np.abs(one - other).max() < 1e-3


def test_learnt_weights_release_columns_at_a_large_learning_rate() -> None:
    record = run(tiny("fsdgpm", eta2=100.0, **FEW))
    assert 0 < record.history[-1]["notes"]["lambda"] < 0.9


# ------------------------------------------------------------------ from round to round


def space(r: Array, epsilon: float) -> Array:
    """M M' of the fewest left singular vectors that hold a share epsilon of the squares."""
    u, s, _ = np.linalg.svd(r, full_matrices=False)
    k = int(np.argmax(np.cumsum(s**2) / (s**2).sum() >= epsilon)) + 1
    return np.asarray(u[:, :k] @ u[:, :k].T)


@pytest.mark.parametrize(("experience", "epsilon"), [(1, 0.8), (2, 0.9)])
def test_bases_are_those_of_all_exemplars_by_hand(
    experience: int, epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax regression: R has the columns (x, 1); epsilon is 0.8, and 0.1 more for two tasks."""
    use_softmax_regression(monkeypatch)
    options: dict[str, Any] = {"epsilon": 0.8, "increment": 0.1, "images": 1000}
    worker, client_round = arrived(experience, **options)
    rows = [memory_data(client_round, worker, task)[0] for task in range(experience)]
    r = np.c_[np.concatenate(rows), np.ones(40 * experience)].T
    reply = worker.method.train_client(client_round)
    basis = reply.state["bases"]["head"].double().numpy()
    np.testing.assert_allclose(basis @ basis.T, space(r, epsilon), rtol=0, atol=1e-5)
    assert reply.log.numbers["filled"] == pytest.approx(basis.shape[1] / 65)


def test_few_exemplars_give_few_columns() -> None:
    """One exemplar of each of two classes: at most two directions in a linear layer."""
    _, client_round, *_ = prepared(1, memory=kept(1), epsilon=1.0)
    bases = client_round.scratch["bases"]
    assert 0 < bases["head"].shape[1] <= 2 and bases["encoder.1"].shape[1] == 2


def rounds(*each: tuple[int, int, bool], **options: Any) -> list[tuple[ClientRound, Reply]]:
    """Client 0's rounds (experience, round, last), each with another received model."""
    experiment = tiny("fsdgpm", **options)
    plan_ = plan(experiment)
    worker, results = small.worker(experiment, plan_), []
    server, states, *_ = worker.initial_states(0)
    state = states[0]
    for number, place in enumerate(each):
        message = worker.method.broadcast(server, 0)
        message = {**message, "parameters": message["parameters"] + number / 100}
        client_round = ClientRound(RoundId(0, 0, *place), plan_, state, message)
        reply = worker.method.train_client(client_round)
        results.append((client_round, reply))
        state = reply.state
    return results


def test_bases_and_lambda_live_for_one_task() -> None:
    """Made in its first round, λ from 1, and kept to its end with what λ has learnt."""
    places = [(0, 0, True), (1, 0, False), (1, 1, True), (2, 0, False)]
    results = rounds(*places, eta2=100.0)
    states = [reply.state for _, reply in results]
    assert not any(basis.shape[1] for basis in states[0]["bases"].values())
    for name in ("encoder.1", "head"):
        assert torch.equal(states[1]["bases"][name], states[2]["bases"][name])
        assert states[3]["bases"][name].shape != states[2]["bases"][name].shape
    seconds = ["basis" in reply.log.seconds for _, reply in results]
    assert seconds == [True, True, False, True]
    assert 0 < states[1]["lambdas"].mean() < 1
    assert not torch.equal(states[2]["lambdas"], states[1]["lambdas"])
    one = rounds(*places[:2], eta2=0.0)[-1][1].state["lambdas"]
    assert (one == 1).all() and len(one) == len(states[1]["lambdas"])


def test_a_returning_task_is_not_protected_from_itself() -> None:
    """In the second cycle the bases are of the exemplars of the other task."""
    split = {**FEW["split"], "cycles": 2}
    results = rounds((0, 0, True), (1, 0, True), (2, 0, True), split=split, epsilon=1.0)
    before, after = results[1][0].state["memory"], results[2][0].state["memory"]
    assert (before["tasks"] == 0).all() and set(after["tasks"].tolist()) == {0, 1}
    client_round, reply = results[2]
    method = small.worker(tiny("fsdgpm", split=split, epsilon=1.0), client_round.plan).method
    assert isinstance(method, FsDgpm)
    method.receive(client_round)
    own = after["images"][after["tasks"] == 1]
    read = subspaces.layer_inputs(method.work, method.layers, own)["encoder.1"]
    share = reply.state["bases"]["encoder.1"].double()
    torch.testing.assert_close(share @ (share.T @ read), read, rtol=1e-4, atol=1e-2)
    other = subspaces.layer_inputs(method.work, method.layers, after["images"])["encoder.1"]
    assert (share @ (share.T @ other) - other).norm() > 0.01 * other.norm()


def test_a_run_is_resumed_with_lambda(tmp_path: Any) -> None:
    """States on disk come back bit-identical."""
    experiment = tiny("fsdgpm", eta2=100.0, **FEW)
    small.assert_same(run(experiment, resume=tmp_path), run(experiment))


def test_a_client_keeps_memory_bases_and_lambda() -> None:
    """4 d bytes for a column and 4 for its λ; the model alone is sent."""
    split = {**FEW["split"], "clients": 1}
    record, replay = (run(tiny(kind, split=split)) for kind in ("fsdgpm", "replay"))
    for row, other in zip(record.history, replay.history, strict=True):
        notes, total = row["notes"], 0
        for name, d in (("encoder.1", 65), ("head", 33)):
            total += 4 * round(notes[f"filled {name}"] * d) * (d + 1)
        assert row["disk"] - other["disk"] == total and row["bytes"] == other["bytes"]
    assert record.history[-1]["notes"]["filled"] > 0
    drift = run(tiny("fsdgpm", split=split, drift=True)).history
    assert drift[-1]["disk"] - record.history[-1]["disk"] == 4 * P
    assert drift[-1]["notes"]["drift"] < 0.5 and "drift" not in drift[-2]["notes"]


# ------------------------------------------------------------------ parameters
