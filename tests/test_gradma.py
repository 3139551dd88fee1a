"""GradMA: steps of a client and rounds of the server by hand, and when it is FedAvg."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from small import BATCH_NORM, P, plan, run, tiny
from test_agem import linear, seen, softmax_slope
from test_projection import best_face
from torch import Tensor

from stamp_core import checkpoint
from stamp_core.config import ParameterError
from stamp_core.executor import Worker
from stamp_core.methods import DivergedError, Log, Method, Reply, State, Turn
from stamp_core.methods.gradma import GradMA, Memories

WORKER: dict[str, Any] = {"server": False}
SERVER: dict[str, Any] = {"worker": False}


def arrived(**options: Any) -> tuple[Worker, Turn]:
    """A client's first turn."""
    cell = tiny("gradma", **options)
    here = small.worker(cell, plan(cell))
    return here, small.arrived(here, plan(cell), 0)


# ------------------------------------------------------------------ a client


@pytest.mark.parametrize(
    ("rate", "decay", "carry"),
    [(0.1, 0.0, {"drift"}), (1.0, 0.0, {"old", "first", "drift"}), (1.0, 0.3, {"old", "first"})],
)
def test_five_steps_by_hand(
    rate: float, decay: float, carry: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five batches of softmax regression. The first step is plain: its rows are g, g and 0. At
    the second the iterate before is the received model x0: the rows are g(x0) twice, of which one
    is enough here, and x1 - x0. Then they are g(x_{k-1}), g(x0) and x_k - x0. All gradients are on
    the step's batch and with decay; x <- x - eta (g + v'rows), v the best of all active sets.
    """
    linear(monkeypatch)
    training = {"rounds": 1, "batch": 8, "rate": rate, "weight_decay": decay}
    here, turn = arrived(split={"images_per_class": 20}, training=training, **WORKER)
    indices = turn.plan.train_indices(here.work.images, 0, 0)
    start = before = x = turn.message["parameters"].double().numpy()
    order = torch.randperm(40, generator=turn.visit.generator("order"))
    carried, corrected = set[str](), 0
    for step, batch in enumerate(indices[order].split(8)):
        data = seen(here, here.work.images.x_train[batch]), here.work.images.y_train[batch]
        g, old, first = (softmax_slope(at, *data) + decay * at for at in (x, before, start))
        rows = {"old": old, "first": first, "drift": x - start}
        names = [["first"], ["first", "drift"], ["old", "first", "drift"]][min(step, 2)]
        matrix = np.stack([rows[name] for name in names])
        v = best_face(matrix @ matrix.T, matrix @ g)
        carried |= {name for name, each in zip(names, v, strict=True) if each > 1e-3}
        corrected += int(v.any())
        before, x = x, x - rate * (g + v @ matrix)
    reply = here.method.local(turn)
    assert carried == carry
    np.testing.assert_allclose(reply.message["parameters"], x, rtol=0, atol=2e-6)
    assert reply.log.numbers == {"gradma corrected": corrected / 5} and reply.log.events == []
    assert reply.log.seconds["gradma"] > 0 and reply.state == {}


@pytest.mark.parametrize("scope", ["model", "tensor"])
@pytest.mark.parametrize("training", [{}, {"weight_decay": 0.3, "momentum": 0.9}], ids=str)
def test_the_first_step_is_plain_bit_for_bit(scope: str, training: dict[str, Any]) -> None:
    """Two rows that are the gradient and one of zeros."""
    whole = {**training, "batch": 1000}
    record = run(tiny("gradma", training=whole, scope=scope, **WORKER))
    small.assert_same_weights(record, run(tiny(training=whole)))
    assert all(row["notes"] == {"gradma corrected": 0.0} for row in record.history)


@pytest.mark.parametrize("training", [{}, {"weight_decay": 0.3}], ids=str)
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_every_step_of_a_run_agrees_with_what_came_before(
    scope: str, training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With decay: the whole step but for momentum. Tensor by tensor it agrees in each of them."""
    slope, correct = GradMA.slope, GradMA.correct
    rows: list[Tensor] = []
    points: list[Tensor] = []
    least: list[float] = []

    def noted(self: GradMA, turn: Turn, point: Tensor) -> Tensor:
        points.append(point.clone())
        rows.append(slope(self, turn, point))
        return rows[-1]

    def checked(self: GradMA, turn: Turn) -> None:
        iterates = turn.notes.setdefault("iterates", [turn.message["parameters"]])
        here = self.work.model.parameters.clone()
        rows.clear()
        points.clear()
        correct(self, turn)
        assert torch.equal(self.work.model.parameters, here)
        assert torch.equal(points[0], iterates[-1]) and torch.equal(points[1], iterates[0])
        decay = self.work.setting.training.weight_decay
        result = self.work.model.gradients + decay * here
        drift = here - iterates[0]
        sizes = self.sizes() or [P]
        for row in (*rows, drift):
            for a, x in zip(row.double().split(sizes), result.double().split(sizes), strict=True):
                size = float(a.norm() * x.norm())
                least.append(float(a @ x) / size if size else 0.0)
        iterates.append(here)

    monkeypatch.setattr(GradMA, "slope", noted)
    monkeypatch.setattr(GradMA, "correct", checked)
    run(tiny("gradma", training={"rounds": 1, **training}, scope=scope, **WORKER))
    assert len(least) > 300 and min(least) > -1e-5


def test_the_scopes_differ_and_rho_asks_for_more() -> None:
    found = [
        run(tiny("gradma", **WORKER, **each)).weights["head.weight"]
        for each in ({}, {"scope": "tensor"}, {"worker_rho": 0.1}, {"server_rho": 0.1})
    ]
    for other in found[1:3]:
        assert np.abs(found[0] - other).max() > 1e-3
    np.testing.assert_array_equal(found[0], found[3])  # which is the server's alone


def test_a_client_is_held_back_by_its_drift() -> None:
    """No step leads farther from the received model to first order, so clients end nearer to it."""
    ways = []
    for kind in ("gradma", "fedavg"):
        cell = tiny(kind)
        here = small.worker(cell, plan(cell))
        turn = small.arrived(here, plan(cell), 0)
        after = here.method.local(turn).message["parameters"]
        ways.append(float((after - turn.message["parameters"]).norm()))
    assert ways[0] < 0.7 * ways[1]


@pytest.mark.parametrize("buffers", ["shared", "local", "frozen"])
def test_gradients_elsewhere_do_not_move_the_statistics_of_batch_normalisation(
    buffers: str,
) -> None:
    """At rate 0 they are those of FedAvg bit for bit, also after batches of one."""
    few: dict[str, Any] = {"network": BATCH_NORM, "split": {"images_per_class": 17}}
    cell, plain = (
        tiny(kind, **few, training={"rate": 0, "batch": 11, "buffers": buffers})
        for kind in ("gradma", "fedavg")
    )
    small.assert_same_weights(run(cell), run(plain))


def test_gradients_elsewhere_are_of_the_same_function() -> None:
    """At the received model the gradient there is the live one, with batch normalisation too."""
    cell = tiny("gradma", network=BATCH_NORM)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 0)
    method, work = here.method, here.work
    assert isinstance(method, GradMA)
    method.receive(turn)
    turn.indices = method.examples(turn)
    batch = next(method.batches(turn))
    work.train_mode(16)
    work.model.gradients.zero_()
    method.loss(turn, *batch).backward()
    here_too = method.slope(turn, turn.message["parameters"])
    torch.testing.assert_close(here_too, work.model.gradients, rtol=0, atol=1e-7)
    assert work.model.gradients.abs().max() > 1e-3


def test_a_gradient_elsewhere_that_is_not_finite_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GradMA, "slope", lambda self, *rest: torch.full((P,), torch.nan))
    record = run(tiny("gradma", **WORKER))
    small.assert_same_weights(record, run(tiny()))
    for row in record.history:
        assert row["events"] == {"gradma: not finite, left as it was": row["steps"]}


def test_divergence_is_still_an_error() -> None:
    here, turn = arrived(training={"rate": 1e38})
    with pytest.raises(DivergedError, match=r"client 0, step 0, round 0: .*training\.rate"):
        here.method.local(turn)


# ------------------------------------------------------------------ the server


def reply(client: int, samples: int, *values: float) -> Reply:
    """A client's answer with weights and buffers of two numbers each."""
    vector = torch.tensor(values, dtype=torch.float32)
    return Reply(client, {}, {"parameters": vector, "buffers": vector * 2}, samples, 1, 0.0)


def server(**params: Any) -> tuple[Method, State]:
    """A server at (1, 2) with buffers (5, 5)."""
    method = small.worker(tiny("gradma", network=BATCH_NORM, **params)).method
    start = {"parameters": torch.tensor([1.0, 2.0]), "buffers": torch.tensor([5.0, 5.0])}
    return method, {**start, "momentum": torch.zeros(2), "memory": {}, "counts": {}}


def test_two_rounds_of_the_server_by_hand() -> None:
    """theta (1, 2), step 2, beta1 0.5, beta2 0.25. First the ways are D_0 = (4, 0) of 1 sample and
    D_1 = (0, 8) of 3: m = (1, 6) agrees with both, theta = (1, 2) - 2 (1, 6) = (-1, -10).

    Then only 1 answers, and D_1 = (-2, -2): m = (0.5, 3) + (-2, -2) = (-1.5, 1); the memory is
    G_0 = (1, 0) and G_1 = (0, 2) + (-2, -2) = (-2, 0). Only x = (0, y) agrees with both: the
    momentum is (0, 1), theta = (-1, -12). Remembered are (0.25, 0) and (-0.5, 0).
    """
    method, state = server(step=2.0, beta1=0.5, beta2=0.25)
    first, log = method.aggregate(state, [reply(0, 1, -3, 2), reply(1, 3, 1, -6)], Log()), Log()
    assert first["parameters"].tolist() == [-1, -10] and first["momentum"].tolist() == [1, 6]
    assert {c: row.tolist() for c, row in first["memory"].items()} == {"0": [1, 0], "1": [0, 2]}
    assert first["counts"] == {"0": 1, "1": 1} and first["buffers"].tolist() == [0, -8]
    second = method.aggregate(first, [reply(1, 3, 1, -8)], log)
    np.testing.assert_allclose(second["parameters"], [-1, -12], atol=1e-6)
    np.testing.assert_allclose(second["momentum"], [0, 1], atol=1e-6)
    assert {c: r.tolist() for c, r in second["memory"].items()} == {"0": [0.25, 0], "1": [-0.5, 0]}
    assert second["counts"] == {"0": 1, "1": 2} and second["buffers"].tolist() == [2, -16]
    assert log.numbers == {"gradma server corrected": 1.0} and log.events == []
    assert log.seconds["gradma server"] > 0
    assert state["memory"] == {} and first["momentum"].tolist() == [1, 6]  # as they were


def test_the_servers_rho_by_hand() -> None:
    """One client, way (4, 0) and then (0, 1), beta2 above 0 by so little that the rest is lost: at
    rho 0.5 the momentum 0.5 (4, 0) + (0, 1) has to keep a cosine with the row (0, 1)."""
    method, state = server(beta1=0.5, server_rho=0.5)
    state = method.aggregate(state, [reply(0, 1, -3, 2)], Log())
    assert state["momentum"].tolist() == [4, 0]
    state = method.aggregate(state, [reply(0, 1, -3, 1)], Log())
    np.testing.assert_allclose(state["momentum"], [2, 5**0.5 / 2], atol=1e-6)


def test_a_client_that_says_nothing_does_not_count() -> None:
    method, state = server()
    nothing = reply(1, 0, float("nan"), float("inf"))
    after = method.aggregate(state, [reply(0, 1, 0, 0), nothing], Log())
    assert after["memory"].keys() == {"0"} and after["parameters"].tolist() == [0, 0]
    for replies in ([], [nothing]):
        assert method.aggregate(state, replies, Log()) is state


def rounds(
    method: Method, state: State, *answering: tuple[int, ...]
) -> Iterator[tuple[State, list[str]]]:
    """The server's state after each round, with what was out of the ordinary."""
    for clients in answering:
        log = Log()
        state = method.aggregate(state, [reply(c, 1, 0.0, 1.0) for c in clients], log)
        yield state, log.events


def test_of_a_full_memory_the_absent_client_that_took_part_least_is_forgotten() -> None:
    """Of equals the one with the lowest number, and 10 is above 9; who comes back starts anew."""
    method, state = server(remembered=3, beta2=0.5)
    every = [(2, 9, 10), (9,), (5,), (10, 11), (5, 9), (12,), (2, 10)]
    found = [state["counts"] for state, _ in rounds(method, state, *every)]
    assert found == [
        {"2": 1, "9": 1, "10": 1},
        {"2": 1, "9": 2, "10": 1},
        {"9": 2, "10": 1, "5": 1},
        {"9": 2, "10": 2, "11": 1},
        {"9": 3, "10": 2, "5": 1},
        {"9": 3, "10": 2, "12": 1},
        {"9": 3, "10": 3, "2": 1},
    ]
    assert all(s["memory"].keys() == s["counts"].keys() for s, _ in rounds(method, state, *every))


def test_where_all_remembered_clients_take_part_a_new_one_is_not_remembered() -> None:
    """It counts in the mean all the same, and it is said."""
    method, state = server(remembered=2)
    (_, calm), (after, events) = rounds(method, state, (0, 3), (0, 1, 3))
    assert calm == [] and events == ["gradma server: no room to remember a client"]
    assert after["counts"] == {"0": 2, "3": 2} and list(after["memory"]) == ["0", "3"]
    method, state = server(remembered=0)
    ((after, events),) = rounds(method, state, (0, 1))
    assert after["memory"] == after["counts"] == {} and events == []


def test_what_the_server_remembers_comes_back_from_a_file(tmp_path: Path) -> None:
    """With client 10 behind client 9, as it was."""
    method, state = server(beta2=0.5)
    *_, (after, _) = rounds(method, state, (9, 10), (10, 2))
    checkpoint.save(tmp_path / "server.safetensors", after, {})
    again = checkpoint.load(tmp_path / "server.safetensors", {})
    assert again is not None and list(again["memory"]) == ["9", "10", "2"]
    small.assert_equal_trees(again, after)


def test_the_server_corrects_tensor_by_tensor() -> None:
    """Each tensor agrees with the memory on its own, which the whole vector may hide."""
    cell = tiny("gradma", scope="tensor", worker=False)
    method = small.worker(cell).method
    assert isinstance(method, GradMA)
    draw = torch.Generator().manual_seed(0)
    start, push = torch.zeros(P), torch.randn(P, generator=draw)
    row = torch.randn(P, generator=draw) - 0.5 * push
    state = {"parameters": start, "buffers": torch.zeros(0), "momentum": 10 * push}
    state |= {"memory": {"5": row}, "counts": {"5": 1}}
    found = method.aggregate(state, [reply(0, 1, *[0.0] * P)], Log())["momentum"]
    whole = small.worker(tiny("gradma", worker=False)).method
    other = whole.aggregate(state, [reply(0, 1, *[0.0] * P)], Log())["momentum"]
    sizes = [64 * 32, 32, 32 * 10, 10]
    assert method.sizes() == sizes
    parts, others = (
        [float(a @ b) for a, b in zip(row.split(sizes), m.split(sizes), strict=True)]
        for m in (found, other)
    )
    assert max(map(abs, parts)) < 1e-2
    assert abs(sum(others)) < 1e-2 and max(map(abs, others)) > 1


# ------------------------------------------------------------------ when it is FedAvg


@pytest.mark.parametrize("step", [0.5, 1.0])
@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_a_server_without_momentum_and_memory_is_fedavg(
    step: float, network: dict[str, Any]
) -> None:
    """theta - step mean(theta - theta_c), here of clients with different numbers of pictures."""
    few = {"network": network, "split": {"images_per_class": 20}, "step": step}
    cell = tiny("gradma", worker=False, beta1=0.0, remembered=0, **few)
    one = plan(cell).train_indices(cell.images(), 0, 0)[:9].tolist()
    uneven = small.with_train(plan(cell), {(0, 0): tuple(one)})
    record, plain = run(cell, uneven), run(tiny(**few), uneven)
    for name, value in plain.weights.items():
        np.testing.assert_allclose(record.weights[name], value, rtol=0, atol=2e-6, err_msg=name)
    assert all(row["notes"] == {"gradma server corrected": 0.0} for row in record.history)


def test_neither_half_is_a_dummy() -> None:
    """FedAvg, the worker's half, the server's half and both are four models."""
    switches = [(False, False), (True, False), (False, True), (True, True)]
    found = [
        run(tiny("gradma", worker=worker, server=server)).weights["head.weight"]
        for worker, server in switches
    ]
    for k, one in enumerate(found):
        for other in found[:k]:
            assert np.abs(one - other).max() > 1e-2


def test_nothing_else_is_sent_and_clients_keep_nothing() -> None:
    record, plain = run(tiny("gradma")), run(tiny())
    assert [row["bytes"] for row in record.history] == [row["bytes"] for row in plain.history]
    assert all(row["disk"] == 0 for row in record.history)


# ------------------------------------------------------------------ parameters


def test_the_defaults() -> None:
    found = Memories()
    assert found.worker and found.server and found.scope == "model"
    assert (found.step, found.beta1, found.beta2, found.remembered) == (1.0, 0.9, 0.0, 100)
    assert found.worker_rho == found.server_rho == 0
    assert GradMA.group == "federated" and GradMA.models == ("global", "local")
    assert GradMA.neutral == {"worker": False, "server": False}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker_rho", -0.1),
        ("server_rho", -0.1),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("beta2", -0.1),
        ("remembered", -1),
        ("step", 0.0),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ParameterError, match=f"{key} is {value}"):
        tiny("gradma", **{key: value})


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"scope 'layer' is unknown; .*known: model, tensor"):
        tiny("gradma", scope="layer")
