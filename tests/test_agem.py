"""A-GEM: one step by hand, when it changes nothing, and what a reference may look at."""

from typing import Any

import numpy as np
import pytest
import small
import torch
from numpy.typing import NDArray
from small import BATCH_NORM, P, kept, plan, run, tiny
from torch import Tensor, nn

from stamp_core import models
from stamp_core.config import ParameterError
from stamp_core.coresets.memory import Keep
from stamp_core.executor import Worker
from stamp_core.methods import DivergedError, Turn
from stamp_core.methods.agem import AGem, Reference

Array = NDArray[np.float64]
WHOLE = {"rounds": 1, "batch": 1000}  # one step a visit


def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the network softmax regression: weights [10, 64] and then biases [10]."""
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))


def seen(here: Worker, pictures: Tensor) -> Array:
    """uint8 pictures as the network sees them.  # [n, 64]"""
    x = pictures.numpy().reshape(-1, 64) / 255
    return (x - float(here.work.images.mean)) / float(here.work.images.std)


def softmax_slope(vector: Array, x: Array, labels: Tensor) -> Array:
    """The gradient of the mean cross-entropy of n pictures, [650].

    With z = W x + b and G = (softmax(z) - onehot) / n it is dL/dW = G^T X, dL/db = sum_n G.
    """
    z = np.exp(x @ vector[:640].reshape(10, 64).T + vector[640:])
    g = (z / z.sum(1, keepdims=True) - np.eye(10)[labels.numpy()]) / len(labels)
    return np.concatenate([(g.T @ x).ravel(), g.sum(0)])


def own(turn: Turn, here: Worker) -> tuple[Array, Tensor]:
    """All pictures of a turn's task, as the network sees them, and their labels."""
    images = here.work.images
    indices = turn.plan.train_indices(images, turn.visit.client, turn.task)
    return seen(here, images.x_train[indices]), images.y_train[indices]


def past(turn: Turn, here: Worker, *tasks: int) -> tuple[Array, Tensor]:
    """What is remembered of some tasks."""
    memory = turn.state["memory"]
    chosen = torch.isin(memory["tasks"], torch.tensor(tasks))
    return seen(here, memory["pictures"][chosen]), memory["labels"][chosen]


# ------------------------------------------------------------------ by hand


def test_one_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """g on all pictures of the second task, r on all that is kept of the first, g.r < 0 as each
    pushes the classes of the other down: theta - eta (g - (g.r / r.r) r)."""
    linear(monkeypatch)
    cell = tiny("agem", training=WHOLE, memory=kept(7))
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 1)
    theta = turn.message["parameters"].double().numpy()
    g, r = (softmax_slope(theta, *each) for each in (own(turn, here), past(turn, here, 0)))
    assert g @ r < -0.1 and len(past(turn, here, 0)[0]) == 14
    expected = theta - 0.1 * (g - (g @ r) / (r @ r) * r)
    reply = here.method.local(turn)
    np.testing.assert_allclose(reply.message["parameters"], expected, rtol=0, atol=1e-6)
    assert np.abs(expected - (theta - 0.1 * g)).max() > 1e-3
    assert reply.log.numbers == {"agem corrected": 1.0} and reply.log.events == []
    assert reply.log.seconds["agem"] > 0


def test_decay_and_momentum_come_after_the_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of theta - eta (x + lambda theta), x the corrected gradient."""
    linear(monkeypatch)
    training = {**WHOLE, "weight_decay": 0.5, "momentum": 0.9}
    cell = tiny("agem", training=training, memory=kept(7))
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 1)
    theta = turn.message["parameters"].double().numpy()
    g, r = (softmax_slope(theta, *each) for each in (own(turn, here), past(turn, here, 0)))
    assert g @ r < -0.1
    expected = theta - 0.1 * (g - (g @ r) / (r @ r) * r + 0.5 * theta)
    found = here.method.local(turn).message["parameters"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


# ------------------------------------------------------------------ what holds after every step


def test_no_step_of_a_run_leads_up_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """g.r >= 0 up to rounding, and 0 where it was below; where it was not, not a bit is changed."""
    slope, correct = AGem.slope, AGem.correct
    rows: list[Tensor] = []
    cases: list[bool] = []

    def noted(self: AGem, turn: Turn, places: Tensor) -> Tensor:
        rows.append(slope(self, turn, places))
        return rows[-1]

    def checked(self: AGem, turn: Turn) -> None:
        live, count = self.work.model.gradients, len(rows)
        before, weights = live.clone(), self.work.model.parameters.clone()
        correct(self, turn)
        assert torch.equal(weights, self.work.model.parameters)
        if len(rows) == count:
            assert not turn.visit.step and torch.equal(live, before)
            return
        r, size = rows[-1].double(), float(before.norm() * rows[-1].norm())
        cases.append(bool(r @ before.double() < 0))
        if cases[-1]:
            assert abs(float(r @ live.double())) <= 1e-6 * size
        else:
            assert torch.equal(live, before)

    monkeypatch.setattr(AGem, "slope", noted)
    monkeypatch.setattr(AGem, "correct", checked)
    record = run(tiny("agem"))
    assert 0.2 < np.mean(cases) < 1
    shares = [row["notes"]["agem corrected"] for row in record.history[2:]]
    assert all(row["notes"] == {} for row in record.history[:2])
    # 4 clients, each with about as many steps
    assert np.mean(shares) == pytest.approx(np.mean(cases), abs=0.01)


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_a_reference_that_agrees_or_is_nothing_changes_no_bit(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the gradient itself, or zeros."""
    monkeypatch.setattr(AGem, "slope", lambda self, *rest: self.work.model.gradients * factor)
    record = run(tiny("agem"))
    small.assert_same_weights(record, run(tiny()))
    assert all(row["notes"].get("agem corrected", 0.0) == 0 for row in record.history)


def test_a_reference_that_is_the_opposite_stops_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AGem, "slope", lambda self, *rest: self.work.model.gradients * -3)
    here = small.worker(tiny("agem"), plan(tiny("agem")))
    turn = small.arrived(here, plan(tiny("agem")), 1)
    after = here.method.local(turn).message["parameters"]
    torch.testing.assert_close(after, turn.message["parameters"], rtol=0, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_is_named_and_not_used(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AGem, "slope", lambda self, *rest: torch.full((P,), bad))
    record = run(tiny("agem"))
    small.assert_same_weights(record, run(tiny()))
    for row in record.history:
        named = {"agem: not finite, left as it was": row["steps"]}
        assert row["events"] == (named if row["step"] else {})


def test_divergence_is_still_an_error() -> None:
    cell = tiny("agem", training={"rate": 1e38})
    calm = small.worker(tiny("agem"), plan(cell))
    turn = small.arrived(calm, plan(cell), 1)
    with pytest.raises(DivergedError, match=r"client 0, step 1, round 0: .*training\.rate"):
        small.worker(cell, plan(cell)).method.local(turn)


# ------------------------------------------------------------------ the memory


@pytest.mark.parametrize("reference", [3, 12, 1000])
def test_a_reference_looks_at_so_many_pictures_of_other_tasks(
    reference: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two cycles of three tasks, of which 10 pictures each are kept: of all there are, no
    picture twice, others at another step of a visit, and never one of the current task."""
    looked: list[tuple[int, int, list[int], int]] = []

    def noted(self: AGem, turn: Turn, places: Tensor) -> Tensor:
        tasks = turn.state["memory"]["tasks"]
        assert turn.task not in tasks[places]
        others = int((tasks != turn.task).sum())
        looked.append((turn.visit.client, turn.visit.step, places.tolist(), others))
        return torch.zeros(P)

    monkeypatch.setattr(AGem, "slope", noted)
    run(tiny("agem", split={"cycles": 2}, memory=kept(5), reference=reference))
    assert {step for _, step, _, _ in looked} == {1, 2, 3, 4, 5}
    for _, step, places, others in looked:
        assert others == {1: 10}.get(step, 20)
        assert len(set(places)) == len(places) == min(reference, others)
    visit = [tuple(places) for client, step, places, _ in looked if (client, step) == (0, 4)]
    assert len(set(visit)) > len(visit) / 2


def test_nothing_else_is_sent_and_no_picture_is_mixed_in() -> None:
    """The disk holds the memory alone: a picture is 64 bytes, its label and task 8 each."""
    record = run(tiny("agem", memory=kept(5)))
    plain = run(tiny())
    assert [row["bytes"] for row in record.history] == [row["bytes"] for row in plain.history]
    assert [row["steps"] for row in record.history] == [row["steps"] for row in plain.history]
    assert [row["disk"] for row in record.history] == [80, 880, 880, 1680, 1680, 2480]


def test_references_do_not_move_the_statistics_of_batch_normalisation() -> None:
    """At rate 0 they are those of FedAvg bit for bit."""
    few = {"network": BATCH_NORM, "split": {"images_per_class": 20}, "training": {"rate": 0}}
    small.assert_same_weights(run(tiny("agem", **few)), run(tiny(**few)))


def test_it_forgets_less_than_fedavg() -> None:
    left = [run(tiny(kind)).accuracy()[-1, :, 0].mean() for kind in ("agem", "fedavg")]
    assert left[0] > left[1] + 0.1


# ------------------------------------------------------------------ parameters


def test_the_defaults() -> None:
    found = Reference()
    assert (found.step, found.ratio, found.reference) == (1.0, 0.0, 128)
    assert found.memory == Keep(rule="uniform", per_class=20, space="off")
    assert AGem.group == "continual" and AGem.models == ("global", "local")


@pytest.mark.parametrize(
    ("key", "value"), [("reference", 0), ("ratio", -1.0), ("step", 0.0)], ids=str
)
def test_what_cannot_be_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"{key} is {value}"):
        tiny("agem", **{key: value})
