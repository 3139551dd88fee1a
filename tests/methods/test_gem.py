"""A-GEM and GEM: one step by hand, what holds after every step, and what the memory is used for."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from active_sets import best_active_set
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
from stamp_core.client.workspace import Workspace
from torch import Tensor

from stamp_core.coresets.memory import task_indices
from stamp_core.engine.executor import Worker
from stamp_core.matching.projection import project_gradient
from stamp_core.methods.agem import AGem, remove_conflict
from stamp_core.methods.base.method import ClientRound, DivergedError
from stamp_core.methods.base.projection import exemplar_gradient
from stamp_core.methods.gem import Gem

BOTH = pytest.mark.parametrize("kind", ["agem", "gem"])


def fake_exemplar_gradient(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    """Replace the gradient on exemplars."""
    for kind in ("agem", "gem"):
        monkeypatch.setattr(f"stamp_core.methods.{kind}.exemplar_gradient", fake)


def task_of(client_round: ClientRound, labels: Tensor) -> int:
    """The task of exemplars with these labels."""
    memory = client_round.state["memory"]
    (task,) = memory["tasks"][torch.isin(memory["labels"], labels)].unique().tolist()
    return int(task)


def arrived(kind: str, experience: int, **options: Any) -> tuple[Worker, ClientRound]:
    """A client round of one SGD step, with 14 exemplars of each earlier task."""
    training = {**FULL_BATCH, **options.pop("training", {})}
    experiment = tiny(kind, training=training, memory=kept(7), **options)
    worker = small.worker(experiment, plan(experiment))
    return worker, small.arrived(worker, plan(experiment), experience)


def gradients(worker: Worker, client_round: ClientRound) -> tuple[Array, Array, Array]:
    """The received model, the gradient there [650] and those of the earlier tasks [K, 650]."""
    theta = client_round.message["parameters"].double().numpy()
    past = [
        softmax_gradient(theta, *memory_data(client_round, worker, task))
        for task in range(client_round.experience)
    ]
    return theta, softmax_gradient(theta, *task_data(client_round, worker)), np.stack(past)


# ------------------------------------------------------------------ by hand


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_one_step_of_agem_by_hand(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With g on the second task and r on the memory of the first, g.r < 0, as each lowers the
    logits of the other's classes: theta - lr (g - (g.r / r.r) r + decay theta)."""
    use_softmax_regression(monkeypatch)
    training = {"weight_decay": decay, "momentum": 0.9 if decay else 0.0}
    worker, client_round = arrived("agem", 1, training=training)
    theta, g, (r,) = gradients(worker, client_round)
    assert g @ r < -0.1 and len(client_round.state["memory"]["labels"]) == 14
    expected = theta - 0.1 * (g - (g @ r) / (r @ r) * r + decay * theta)
    reply = worker.method.train_client(client_round)
    np.testing.assert_allclose(reply.message["parameters"], expected, **CLOSE)
    assert np.abs(expected - (theta - 0.1 * (g + decay * theta))).max() > 1e-3
    assert reply.log.numbers == {"agem corrected": 1.0} and reply.log.events == []
    assert reply.log.seconds["agem"] > 0


@pytest.mark.parametrize("params", [{}, {"ridge": 0.0}, {"ridge": 5.0}, {"margin": 0.5}], ids=str)
def test_one_step_of_gem_by_hand(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With g on the third task and the rows of M on the memory of the first two: theta - lr (g +
    M'v), v the best of all active sets of min 0.5 v'(M M' + ridge) v + (M g)'v, v >= margin."""
    use_softmax_regression(monkeypatch)
    worker, client_round = arrived("gem", 2, **params)
    theta, g, past = gradients(worker, client_round)
    assert (past @ g < 0).all()
    matrix = past @ past.T + params.get("ridge", 1e-3) * np.eye(2)
    v = best_active_set(matrix, past @ g, params.get("margin", 0.0))
    reply = worker.method.train_client(client_round)
    expected = theta - 0.1 * (g + v @ past)
    np.testing.assert_allclose(reply.message["parameters"], expected, **CLOSE)
    assert reply.log.numbers == {"gem corrected": 1.0} and reply.log.events == []
    assert np.abs(v @ past).max() > 1e-2 and reply.log.seconds["gem"] > 0


def test_each_past_task_is_a_constraint_of_gem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conflicting past tasks, whose mean would hide it: the step conflicts with neither."""
    use_softmax_regression(monkeypatch)
    worker, client_round = arrived("gem", 2, ridge=0.0)
    g = torch.tensor(gradients(worker, client_round)[1], dtype=torch.float32)
    side = torch.zeros_like(g)
    side[-1] = 10 * g.norm()
    past = {0: -g + side, 1: -g - side}

    def fake(work: Workspace, images: Tensor, labels: Tensor) -> Tensor:
        return past[task_of(client_round, labels)]

    fake_exemplar_gradient(monkeypatch, fake)
    worker.method.train_client(client_round)
    for each in past.values():
        product = float(each @ worker.work.model.gradients)
        assert product >= -1e-6 * float(each.norm() * g.norm())


def test_with_one_past_task_and_no_ridge_gem_is_agem() -> None:
    """Two tasks, and a reference of all exemplars of the other one."""
    split = {"tasks": 2}
    gem = run(tiny("gem", split=split, ridge=0.0)).weights
    agem = run(tiny("agem", split=split, reference=1000)).weights
    softer = run(tiny("gem", split=split, ridge=1.0)).weights
    for name, value in gem.items():
        np.testing.assert_allclose(value, agem[name], rtol=0, atol=1e-5, err_msg=name)
    assert np.abs(gem["head.weight"] - softer["head.weight"]).max() > 1e-3


@pytest.mark.parametrize("length", [1e-30, 1.0, 1e20])
@pytest.mark.parametrize("share", [0.1, 1e6, -0.1])
def test_the_closed_form_of_agem_is_the_minimum_of_gems_program(
    share: float, length: float
) -> None:
    """For any length of the reference, from little conflict to opposite directions, and none."""
    gradient, noise = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    noise -= (noise @ gradient) / (gradient @ gradient) * gradient
    reference = length * (noise / share - gradient * math.copysign(1.0, share))
    added, product = remove_conflict(gradient, reference)
    program = project_gradient(gradient, [reference]).added
    assert float(product) == pytest.approx(float(reference.double() @ gradient.double()))
    if share < 0:
        assert not added.any() and program is None
    else:
        assert program is not None
        torch.testing.assert_close(added, program, rtol=1e-9, atol=1e-12)
        assert added.norm() > 0.05 * gradient.norm()


# ------------------------------------------------------------------ what holds after every step


def test_no_step_of_agem_conflicts_with_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """g.r is 0 up to rounding where it was below, and without a conflict no bit changes."""
    correct = AGem.correct_gradient
    references: list[Tensor] = []
    conflicts: list[bool] = []

    def noted(work: Workspace, images: Tensor, labels: Tensor) -> Tensor:
        references.append(exemplar_gradient(work, images, labels))
        return references[-1]

    def checked(self: AGem, client_round: ClientRound) -> None:
        live, count = self.work.model.gradients, len(references)
        before, weights = live.clone(), self.work.model.parameters.clone()
        correct(self, client_round)
        assert torch.equal(weights, self.work.model.parameters)
        if len(references) == count:
            assert not client_round.experience and torch.equal(live, before)
            return
        r = references[-1].double()
        conflicts.append(bool(r @ before.double() < 0))
        if conflicts[-1]:
            assert abs(float(r @ live.double())) <= 1e-6 * float(before.norm() * r.norm())
        else:
            assert torch.equal(live, before)

    fake_exemplar_gradient(monkeypatch, noted)
    monkeypatch.setattr(AGem, "correct_gradient", checked)
    record = run(tiny("agem"))
    assert 0.2 < np.mean(conflicts) < 1
    assert all(entry["notes"] == {} for entry in record.history[:2])
    shares = [entry["notes"]["agem corrected"] for entry in record.history[2:]]
    # a mean over 4 clients with about as many steps each
    assert np.mean(shares) == pytest.approx(np.mean(conflicts), abs=0.01)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_no_step_of_gem_conflicts_with_a_past_task(
    ridge: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a ridge <g_k, g> >= 0; with one, <g_k, g + M'v> >= -ridge v_k, which allows a small
    conflict where the multiplier is above 0. All exemplars are used, task by task."""
    correct = Gem.correct_gradient
    past: list[tuple[Tensor, Tensor, Tensor]] = []
    cosines: list[float] = []

    def noted(work: Workspace, images: Tensor, labels: Tensor) -> Tensor:
        past.append((images, labels, exemplar_gradient(work, images, labels)))
        return past[-1][-1]

    def checked(self: Gem, client_round: ClientRound) -> None:
        past.clear()
        live, memory = self.work.model.gradients, client_round.state["memory"]
        before = live.clone()
        correct(self, client_round)
        assert len(past) == client_round.experience and (past or torch.equal(live, before))
        for task, (images, labels, each) in enumerate(past):
            indices = task_indices(memory, task)
            assert torch.equal(images, self.work.normalise(memory["images"][indices]))
            assert torch.equal(labels, memory["labels"][indices])
            cosines.append(float(each @ live / (each.norm() * before.norm())))

    fake_exemplar_gradient(monkeypatch, noted)
    monkeypatch.setattr(Gem, "correct_gradient", checked)
    run(tiny("gem", ridge=ridge))
    assert len(cosines) > 200
    assert min(cosines) > -1e-5 if ridge == 0 else -0.9 < min(cosines) < -1e-2


@pytest.mark.parametrize(
    ("kind", "factor", "params"),
    [
        ("agem", 1.0, {}),
        ("agem", 0.0, {}),
        ("gem", 1.0, {"margin": 0.5}),
        ("gem", 0.0, {"margin": 0.5}),
    ],
)
def test_without_conflicts_it_is_fedavg_bit_for_bit(
    kind: str, factor: float, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory's gradient is the live one, or zero; a margin adds nothing either."""
    fake_exemplar_gradient(monkeypatch, lambda work, *rest: work.model.gradients * factor)
    record = run(tiny(kind, **params))
    small.assert_same_weights(record, run(tiny()))
    assert all(entry["notes"].get(f"{kind} corrected", 0.0) == 0 for entry in record.history)


def test_an_opposite_reference_stops_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, client_round = arrived("agem", 1, training={"batch_size": 16})
    fake_exemplar_gradient(monkeypatch, lambda work, *rest: work.model.gradients * -3)
    after = worker.method.train_client(client_round).message["parameters"]
    torch.testing.assert_close(after, client_round.message["parameters"], rtol=0, atol=1e-7)


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_memory_gradient_that_is_not_finite_is_logged_and_not_used(
    kind: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_exemplar_gradient(monkeypatch, lambda *rest: torch.full((P,), bad))
    record = run(tiny(kind))
    small.assert_same_weights(record, run(tiny()))
    for entry in record.history:
        events = {f"{kind}: not finite, not corrected": entry["sgd_steps"]}
        assert entry["events"] == (events if entry["experience"] else {})


@BOTH
def test_divergence_is_an_error(kind: str) -> None:
    _, client_round = arrived(kind, 1)
    diverging, _ = arrived(kind, 0, training={"lr": 1e38, "batch_size": 16})
    where = r"client 0, experience 1, round 0: .*training\.lr"
    with pytest.raises(DivergedError, match=where):
        diverging.method.train_client(client_round)


# ------------------------------------------------------------------ the memory


@pytest.mark.parametrize("reference", [3, 12, 1000])
def test_a_reference_is_a_sample_of_exemplars_of_other_tasks(
    reference: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cycles of three tasks with 10 exemplars each: no exemplar twice, never one of the
    current task, and another sample in most steps of a client round."""
    drawn = AGem.samples
    samples: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def noted(self: AGem, client_round: ClientRound) -> Iterator[Tensor]:
        tasks = client_round.state["memory"]["tasks"]
        others = int((tasks != client_round.task).sum())
        for indices in drawn(self, client_round):
            assert client_round.task not in tasks[indices]
            assert others == (10 if client_round.experience == 1 else 20)
            assert len(indices) == len(indices.unique()) == min(reference, others)
            key = (client_round.client, client_round.experience)
            samples.setdefault(key, []).append(tuple(indices.tolist()))
            yield indices

    monkeypatch.setattr(AGem, "samples", noted)
    run(tiny("agem", split={"cycles": 2}, memory=kept(5), reference=reference))
    assert {experience for _, experience in samples} == {1, 2, 3, 4, 5}
    assert len(set(samples[0, 4])) > len(samples[0, 4]) / 2


def test_in_a_second_cycle_all_other_tasks_are_past(monkeypatch: pytest.MonkeyPatch) -> None:
    past: dict[int, set[int]] = {}

    def noted(self: Gem, client_round: ClientRound) -> None:
        tasks = {task_of(client_round, labels) for _, labels in client_round.scratch["past"]}
        past.setdefault(client_round.experience, set()).update(tasks)

    monkeypatch.setattr(Gem, "correct_gradient", noted)
    run(tiny("gem", split={"cycles": 2}, memory=kept(5)))
    assert past == {0: set(), 1: {0}, 2: {0, 1}, 3: {1, 2}, 4: {0, 2}, 5: {0, 1}}


@BOTH
def test_only_the_model_is_sent_and_no_exemplar_is_trained_on(kind: str) -> None:
    """The disk holds the memory alone: an image is 64 bytes, its label and task 8 each."""
    record, fedavg = run(tiny(kind, memory=kept(5))), run(tiny())
    for key in ("bytes", "sgd_steps"):
        assert [entry[key] for entry in record.history] == [entry[key] for entry in fedavg.history]
    assert [entry["disk"] for entry in record.history] == [80, 880, 880, 1680, 1680, 2480]


def test_gradients_on_exemplars_use_the_running_statistics() -> None:
    """They are those of evaluation mode, and the live gradient is unchanged."""
    work = small.worker(tiny("gem", network=BATCH_NORM)).work
    images, labels = work.normalise(work.dataset.x_train[:30]), work.dataset.y_train[:30]
    work.train_mode(len(labels))
    gradient = exemplar_gradient(work, images, labels)
    assert not work.model.gradients.any()
    F.cross_entropy(work.model.module.eval()(images), labels).backward()
    assert torch.equal(gradient, work.model.gradients) and gradient.any()


@BOTH
def test_exemplars_do_not_change_the_statistics_of_batch_normalisation(kind: str) -> None:
    """At learning rate 0 they are those of FedAvg bit for bit."""
    few = {"network": BATCH_NORM, "split": {"images_per_class": 20}, "training": {"lr": 0}}
    small.assert_same_weights(run(tiny(kind, **few)), run(tiny(**few)))


def test_they_forget_less_than_fedavg_and_gem_with_a_margin_least() -> None:
    experiments = tiny("gem", margin=0.5), tiny("gem"), tiny("agem"), tiny()
    margin, gem, agem, fedavg = (run(e).accuracy()[-1, :, 0].mean() for e in experiments)
    assert margin > gem > fedavg + 0.1 and agem > fedavg + 0.1


# ------------------------------------------------------------------ parameters
