"""GEM: one step by hand, its equalities, and what its ridge and its margin do."""

from typing import Any

import numpy as np
import pytest
import small
import torch
from small import BATCH_NORM, P, kept, plan, run, tiny
from test_agem import WHOLE, linear, own, past, softmax_slope
from test_projection import Array, best_face
from torch import Tensor

from stamp_core.config import ParameterError
from stamp_core.coresets.memory import Keep, of_task
from stamp_core.executor import Worker
from stamp_core.methods import Turn
from stamp_core.methods.agem import AGem
from stamp_core.methods.gem import Constraints, Gem


def at_step(step: int, **params: Any) -> tuple[Worker, Turn]:
    """A client's turn of one step of gradient descent, with 14 pictures of each earlier task."""
    cell = tiny("gem", training=WHOLE, memory=kept(7), **params)
    here = small.worker(cell, plan(cell))
    return here, small.arrived(here, plan(cell), step)


def slopes(here: Worker, turn: Turn, tasks: int) -> tuple[Array, Array, Array]:
    """The received model, the gradient there [650] and those of the earlier tasks [K, 650]."""
    theta = turn.message["parameters"].double().numpy()
    rows = [softmax_slope(theta, *past(turn, here, task)) for task in range(tasks)]
    return theta, softmax_slope(theta, *own(turn, here)), np.stack(rows)


# ------------------------------------------------------------------ by hand


@pytest.mark.parametrize("params", [{}, {"ridge": 0.0}, {"ridge": 5.0}, {"margin": 0.5}], ids=str)
def test_one_step_by_hand(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """g on the third task, g_k on what is kept of the first two: theta - eta (g + M'v), where v
    is the best of all active sets of min 0.5 v'(M M' + eps) v + (M g)'v over v >= margin."""
    linear(monkeypatch)
    here, turn = at_step(2, **params)
    theta, g, rows = slopes(here, turn, 2)
    assert (rows @ g < 0).all()
    matrix = rows @ rows.T + params.get("ridge", 1e-3) * np.eye(2)
    v = best_face(matrix, rows @ g, params.get("margin", 0.0))
    expected = theta - 0.1 * (g + v @ rows)
    reply = here.method.local(turn)
    np.testing.assert_allclose(reply.message["parameters"], expected, rtol=0, atol=1e-6)
    assert reply.log.numbers == {"gem corrected": 1.0} and reply.log.events == []
    assert np.abs(v @ rows).max() > 1e-2 and reply.log.seconds["gem"] > 0


def test_each_past_task_is_a_constraint_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two opposed tasks, which a mean would hide: neither is led up."""
    linear(monkeypatch)
    here, turn = at_step(2, ridge=0.0)
    g = torch.tensor(slopes(here, turn, 2)[1], dtype=torch.float32)
    side = torch.zeros_like(g)
    side[-1] = 10 * g.norm()
    rows = {0: -g + side, 1: -g - side}

    def fake(self: Gem, turn: Turn, places: Tensor) -> Tensor:
        (task,) = turn.state["memory"]["tasks"][places].unique().tolist()
        return rows[task]

    monkeypatch.setattr(Gem, "slope", fake)
    here.method.local(turn)
    found = here.work.model.gradients
    for row in rows.values():
        assert float(row @ found) >= -1e-6 * float(row.norm() * g.norm())


# ------------------------------------------------------------------ equalities


def test_with_one_past_task_and_no_ridge_it_is_agem() -> None:
    """Two tasks, and a reference of all that is kept of the other one."""
    split = {"tasks": 2}
    gem = run(tiny("gem", split=split, ridge=0.0))
    agem = run(tiny("agem", split=split, reference=1000))
    softer = run(tiny("gem", split=split, ridge=1.0))
    for name, value in gem.weights.items():
        np.testing.assert_allclose(value, agem.weights[name], rtol=0, atol=1e-5, err_msg=name)
    assert np.abs(gem.weights["head.weight"] - softer.weights["head.weight"]).max() > 1e-3


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_tasks_that_agree_change_no_bit(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the margin: nothing is added where no task is violated."""
    monkeypatch.setattr(Gem, "slope", lambda self, *rest: self.work.model.gradients * factor)
    record = run(tiny("gem", margin=0.5))
    small.assert_same_weights(record, run(tiny()))
    assert all(row["notes"].get("gem corrected", 0.0) == 0 for row in record.history)


def test_a_past_task_that_is_not_finite_is_named_and_the_step_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Gem, "slope", lambda self, *rest: torch.full((P,), torch.nan))
    record = run(tiny("gem"))
    small.assert_same_weights(record, run(tiny()))
    for row in record.history:
        named = {"gem: not finite, left as it was": row["steps"]}
        assert row["events"] == (named if row["step"] else {})


# ------------------------------------------------------------------ what holds after every step


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_no_step_of_a_run_leads_up_a_past_task(
    ridge: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a ridge <g_k, g> >= 0; with one, <g_k, g + M'v> >= -eps v_k, so that a task may be
    led up a little where its multiplier is above 0. All other pictures are looked at, by task."""
    slope, correct = AGem.slope, Gem.correct
    rows: list[Tensor] = []
    looked: list[Tensor] = []
    least: list[float] = []

    def noted(self: Gem, turn: Turn, places: Tensor) -> Tensor:
        looked.append(places)
        rows.append(slope(self, turn, places))
        return rows[-1]

    def checked(self: Gem, turn: Turn) -> None:
        rows.clear()
        looked.clear()
        live = self.work.model.gradients
        before = live.clone()
        correct(self, turn)
        tasks = [each for each in range(3) if each != turn.task and each < max(turn.visit.step, 1)]
        if not turn.visit.step:
            assert not rows and torch.equal(live, before)
            return
        memory = turn.state["memory"]
        for places, task in zip(looked, tasks, strict=True):
            assert torch.equal(places, of_task(memory, task))
        for row in rows:
            least.append(float(row @ live / (row.norm() * before.norm())))

    monkeypatch.setattr(Gem, "slope", noted)
    monkeypatch.setattr(Gem, "correct", checked)
    run(tiny("gem", ridge=ridge))
    assert len(least) > 200
    assert min(least) > -1e-5 if ridge == 0 else -0.9 < min(least) < -1e-2


def test_in_a_second_cycle_all_other_tasks_are_past(monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[int, set[int]] = {}

    def noted(self: Gem, turn: Turn, places: Tensor) -> Tensor:
        met.setdefault(turn.visit.step, set()).update(
            turn.state["memory"]["tasks"][places].tolist()
        )
        return torch.zeros(P)

    monkeypatch.setattr(Gem, "slope", noted)
    run(tiny("gem", split={"cycles": 2}, memory=kept(5)))
    assert met == {1: {0}, 2: {0, 1}, 3: {1, 2}, 4: {0, 2}, 5: {0, 1}}


def test_nothing_else_is_sent_and_no_picture_is_mixed_in() -> None:
    record, plain = run(tiny("gem", memory=kept(5))), run(tiny())
    assert [row["bytes"] for row in record.history] == [row["bytes"] for row in plain.history]
    assert [row["steps"] for row in record.history] == [row["steps"] for row in plain.history]
    assert [row["disk"] for row in record.history] == [80, 880, 880, 1680, 1680, 2480]


def test_past_tasks_do_not_move_the_statistics_of_batch_normalisation() -> None:
    """At rate 0 they are those of FedAvg bit for bit."""
    few = {"network": BATCH_NORM, "split": {"images_per_class": 20}, "training": {"rate": 0}}
    small.assert_same_weights(run(tiny("gem", **few)), run(tiny(**few)))


def test_it_forgets_less_than_fedavg_and_the_margin_less_still() -> None:
    runs = run(tiny("gem", margin=0.5)), run(tiny("gem")), run(tiny())
    best, good, none = (each.accuracy()[-1, :, 0].mean() for each in runs)
    assert best > good > none + 0.1


# ------------------------------------------------------------------ parameters


def test_the_defaults() -> None:
    found = Constraints()
    assert (found.step, found.ratio, found.margin, found.ridge) == (1.0, 0.0, 0.0, 1e-3)
    assert found.memory == Keep(rule="uniform", per_class=20, space="off")
    assert Gem.group == "continual" and Gem.neutral == {"memory": {"per_class": 0}}
    assert Gem.models == ("global", "local")


@pytest.mark.parametrize(
    ("key", "value"), [("margin", -0.5), ("ridge", -1.0), ("ratio", -1.0), ("step", 0.0)], ids=str
)
def test_what_cannot_be_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"{key} is {value}"):
        tiny("gem", **{key: value})
