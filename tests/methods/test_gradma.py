"""GradMA: steps of a client and rounds of the server by hand, and when it is FedAvg."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from active_sets import best_active_set
from by_hand import inputs, softmax_gradient, two_number_reply, use_softmax_regression
from small import BATCH_NORM, P, plan, run, tiny
from torch import Tensor

from stamp_core.engine import trees
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound, DivergedError, Log, Method, State
from stamp_core.methods.gradma import GradMA

WORKER: dict[str, Any] = {"server": False}
SERVER: dict[str, Any] = {"worker": False}


def arrived(kind: str = "gradma", **options: Any) -> tuple[Worker, ClientRound]:
    """A client's first round."""
    experiment = tiny(kind, **options)
    worker = small.worker(experiment, plan(experiment))
    return worker, small.arrived(worker, plan(experiment), 0)


# ------------------------------------------------------------------ a client


@pytest.mark.parametrize(
    ("lr", "decay", "active"),
    [
        (0.1, 0.0, {"displacement"}),
        (1.0, 0.0, {"previous", "received", "displacement"}),
        (1.0, 0.3, {"previous", "received"}),
    ],
)
def test_five_steps_by_hand(
    lr: float, decay: float, active: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five batches of softmax regression from the received model x0. The first step is plain: its
    memory is g, g and 0. In the second the previous iterate is x0: g(x0) twice, of which one is
    enough here, and x1 - x0. Then g(x_{k-1}), g(x0) and x_k - x0. All gradients are on the step's
    batch and with weight decay; x <- x - lr (g + v'memory), v the best of all active sets.
    """
    use_softmax_regression(monkeypatch)
    training = {"rounds": 1, "batch_size": 8, "lr": lr, "weight_decay": decay}
    worker, client_round = arrived(split={"images_per_class": 20}, training=training, **WORKER)
    dataset = worker.work.dataset
    indices = client_round.plan.train_indices(dataset, 0, 0)
    start = before = x = client_round.message["parameters"].double().numpy()
    order = torch.randperm(40, generator=client_round.round_id.generator("order"))
    used, corrected = set[str](), 0
    for step, batch in enumerate(indices[order].split(8)):
        data = inputs(worker, dataset.x_train[batch]), dataset.y_train[batch]
        g, previous, first = (softmax_gradient(at, *data) + decay * at for at in (x, before, start))
        memory = {"previous": previous, "received": first, "displacement": x - start}
        names = [["received"], ["received", "displacement"], list(memory)][min(step, 2)]
        matrix = np.stack([memory[name] for name in names])
        v = best_active_set(matrix @ matrix.T, matrix @ g)
        used |= {name for name, each in zip(names, v, strict=True) if each > 1e-3}
        corrected += int(v.any())
        before, x = x, x - lr * (g + v @ matrix)
    reply = worker.method.train_client(client_round)
    assert used == active
    np.testing.assert_allclose(reply.message["parameters"], x, rtol=0, atol=2e-6)
    assert reply.log.numbers == {"gradma corrected": corrected / 5} and reply.log.events == []
    assert reply.log.seconds["gradma"] > 0 and reply.state == {}


@pytest.mark.parametrize("scope", ["model", "tensor"])
@pytest.mark.parametrize("training", [{}, {"weight_decay": 0.3, "momentum": 0.9}], ids=str)
def test_the_first_step_is_plain_bit_for_bit(scope: str, training: dict[str, Any]) -> None:
    """Its memory is the gradient twice, and zeros."""
    full_batch = {**training, "batch_size": 1000}
    record = run(tiny("gradma", training=full_batch, scope=scope, **WORKER))
    small.assert_same_weights(record, run(tiny(training=full_batch)))
    assert all(entry["notes"] == {"gradma corrected": 0.0} for entry in record.history)


@pytest.mark.parametrize("training", [{}, {"weight_decay": 0.3}], ids=str)
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_no_step_of_a_run_conflicts_with_the_memory(
    scope: str, training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weight decay: the whole step but for momentum. With scope "tensor", in each tensor."""
    gradient_at, correct = GradMA.gradient_at, GradMA.correct_gradient
    memory: list[tuple[Tensor, Tensor]] = []
    cosines: list[float] = []

    def noted(self: GradMA, client_round: ClientRound, point: Tensor) -> Tensor:
        memory.append((point.clone(), gradient_at(self, client_round, point)))
        return memory[-1][1]

    def checked(self: GradMA, client_round: ClientRound) -> None:
        iterates = client_round.scratch.setdefault("iterates", [client_round.message["parameters"]])
        here, decay = self.work.model.parameters.clone(), self.work.training.weight_decay
        memory.clear()
        correct(self, client_round)
        assert torch.equal(self.work.model.parameters, here)
        assert torch.equal(memory[0][0], iterates[-1]) and torch.equal(memory[1][0], iterates[0])
        step = (self.work.model.gradients + decay * here).double()
        sizes = self.block_sizes() or [P]
        for vector in (memory[0][1], memory[1][1], here - iterates[0]):
            for a, x in zip(vector.double().split(sizes), step.split(sizes), strict=True):
                length = float(a.norm() * x.norm())
                cosines.append(float(a @ x) / length if length else 0.0)
        iterates.append(here)

    monkeypatch.setattr(GradMA, "gradient_at", noted)
    monkeypatch.setattr(GradMA, "correct_gradient", checked)
    run(tiny("gradma", training={"rounds": 1, **training}, scope=scope, **WORKER))
    assert len(cosines) > 300 and min(cosines) > -1e-5


def test_scope_and_rho_change_the_steps() -> None:
    options: list[dict[str, Any]] = [{}, {"scope": "tensor"}, {"worker_rho": 0.1}]
    plain, *others, server_rho = (
        run(tiny("gradma", **WORKER, **each)).weights["head.weight"]
        for each in [*options, {"server_rho": 0.1}]
    )
    assert all(np.abs(plain - other).max() > 1e-3 for other in others)
    np.testing.assert_array_equal(plain, server_rho)  # which is the server's alone


def test_updates_are_shorter_than_those_of_fedavg() -> None:
    """To first order, no step increases the distance from the received model."""
    lengths = []
    for kind in ("gradma", "fedavg"):
        worker, client_round = arrived(kind)
        after = worker.method.train_client(client_round).message["parameters"]
        lengths.append(float((after - client_round.message["parameters"]).norm()))
    assert lengths[0] < 0.7 * lengths[1]


@pytest.mark.parametrize("buffers", ["shared", "local", "frozen"])
def test_gradients_at_other_points_keep_the_statistics_of_batch_normalisation(buffers: str) -> None:
    """At learning rate 0 they are those of FedAvg bit for bit, also after batches of one."""
    few: dict[str, Any] = {"network": BATCH_NORM, "split": {"images_per_class": 17}}
    training = {"lr": 0, "batch_size": 11, "buffers": buffers}
    record, fedavg = (run(tiny(kind, **few, training=training)) for kind in ("gradma", "fedavg"))
    small.assert_same_weights(record, fedavg)


def test_gradients_at_other_points_are_of_the_same_function() -> None:
    """At the received model the gradient there is the live one, with batch normalisation too."""
    worker, client_round = arrived(network=BATCH_NORM)
    method, work = worker.method, worker.work
    assert isinstance(method, GradMA)
    method.receive(client_round)
    client_round.indices = method.train_indices(client_round)
    batch = next(method.batches(client_round))
    work.train_mode(16)
    work.model.gradients.zero_()
    method.loss(client_round, *batch).backward()
    gradient = method.gradient_at(client_round, client_round.message["parameters"])
    torch.testing.assert_close(gradient, work.model.gradients, rtol=0, atol=1e-7)
    assert work.model.gradients.abs().max() > 1e-3


def test_a_gradient_that_is_not_finite_is_logged_and_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GradMA, "gradient_at", lambda self, *rest: torch.full((P,), torch.nan))
    record = run(tiny("gradma", **WORKER))
    small.assert_same_weights(record, run(tiny()))
    for entry in record.history:
        assert entry["events"] == {"gradma: not finite, not corrected": entry["sgd_steps"]}


def test_divergence_is_an_error() -> None:
    worker, client_round = arrived(training={"lr": 1e38})
    where = r"client 0, experience 0, round 0: .*training\.lr"
    with pytest.raises(DivergedError, match=where):
        worker.method.train_client(client_round)


# ------------------------------------------------------------------ the server


def server(**params: Any) -> tuple[Method, State]:
    """A server at (1, 2) with buffers (5, 5)."""
    method = small.worker(tiny("gradma", network=BATCH_NORM, **params)).method
    start = {"parameters": torch.tensor([1.0, 2.0]), "buffers": torch.tensor([5.0, 5.0])}
    return method, {**start, "momentum": torch.zeros(2), "memory": {}, "counts": {}}


def test_two_rounds_of_the_server_by_hand() -> None:
    """theta (1, 2), server_lr 2, beta1 0.5, beta2 0.25. First the updates are D_0 = (4, 0) of 1
    sample and D_1 = (0, 8) of 3: m = (1, 6) conflicts with none, theta = (1, 2) - 2 (1, 6).

    Then only 1 replies, and D_1 = (-2, -2): m = (0.5, 3) + (-2, -2) = (-1.5, 1); the memory is
    G_0 = (1, 0) and G_1 = (0, 2) + (-2, -2) = (-2, 0). Only x = (0, y) conflicts with none: the
    momentum is (0, 1), theta = (-1, -12). Remembered are (0.25, 0) and (-0.5, 0).
    """
    method, state = server(server_lr=2.0, beta1=0.5, beta2=0.25)
    replies = [two_number_reply(0, 1, -3, 2), two_number_reply(1, 3, 1, -6)]
    first, log = method.aggregate(state, replies, Log()), Log()
    assert first["parameters"].tolist() == [-1, -10] and first["momentum"].tolist() == [1, 6]
    assert {c: v.tolist() for c, v in first["memory"].items()} == {"0": [1, 0], "1": [0, 2]}
    assert first["counts"] == {"0": 1, "1": 1} and first["buffers"].tolist() == [0, -8]
    second = method.aggregate(first, [two_number_reply(1, 3, 1, -8)], log)
    np.testing.assert_allclose(second["parameters"], [-1, -12], atol=1e-6)
    np.testing.assert_allclose(second["momentum"], [0, 1], atol=1e-6)
    assert {c: v.tolist() for c, v in second["memory"].items()} == {"0": [0.25, 0], "1": [-0.5, 0]}
    assert second["counts"] == {"0": 1, "1": 2} and second["buffers"].tolist() == [2, -16]
    assert log.numbers == {"gradma server corrected": 1.0} and log.events == []
    assert log.seconds["gradma server"] > 0
    assert state["memory"] == {} and first["momentum"].tolist() == [1, 6]  # not written to


def test_the_servers_rho_by_hand() -> None:
    """One client with updates (4, 0) and then (0, 1): at rho 0.5 the momentum 0.5 (4, 0) + (0, 1)
    must have an inner product of at least 0.5 |m| with (0, 1)."""
    method, state = server(beta1=0.5, server_rho=0.5)
    state = method.aggregate(state, [two_number_reply(0, 1, -3, 2)], Log())
    assert state["momentum"].tolist() == [4, 0]
    state = method.aggregate(state, [two_number_reply(0, 1, -3, 1)], Log())
    np.testing.assert_allclose(state["momentum"], [2, 5**0.5 / 2], atol=1e-6)


def test_a_reply_without_samples_does_not_count() -> None:
    method, state = server()
    empty = two_number_reply(1, 0, float("nan"), float("inf"))
    after = method.aggregate(state, [two_number_reply(0, 1, 0, 0), empty], Log())
    assert after["memory"].keys() == {"0"} and after["parameters"].tolist() == [0, 0]
    for replies in ([], [empty]):
        assert method.aggregate(state, replies, Log()) is state


def rounds(
    method: Method, state: State, *participants: tuple[int, ...]
) -> Iterator[tuple[State, list[str]]]:
    """The server's state after each round, with the logged events."""
    for clients in participants:
        log = Log()
        state = method.aggregate(state, [two_number_reply(c, 1, 0.0, 1.0) for c in clients], log)
        yield state, log.events


def test_a_full_memory_forgets_the_absent_client_that_took_part_least() -> None:
    """Of equals the one with the lowest number, and 10 is above 9; who returns starts anew."""
    method, state = server(remembered=3, beta2=0.5)
    participants = [(2, 9, 10), (9,), (5,), (10, 11), (5, 9), (12,), (2, 10)]
    states = [state for state, _ in rounds(method, state, *participants)]
    assert [each["counts"] for each in states] == [
        {"2": 1, "9": 1, "10": 1},
        {"2": 1, "9": 2, "10": 1},
        {"9": 2, "10": 1, "5": 1},
        {"9": 2, "10": 2, "11": 1},
        {"9": 3, "10": 2, "5": 1},
        {"9": 3, "10": 2, "12": 1},
        {"9": 3, "10": 3, "2": 1},
    ]
    assert all(each["memory"].keys() == each["counts"].keys() for each in states)


def test_if_all_remembered_clients_take_part_a_new_one_is_logged_and_not_remembered() -> None:
    method, state = server(remembered=2)
    (_, before), (after, events) = rounds(method, state, (0, 3), (0, 1, 3))
    assert before == [] and events == ["gradma server: no room to remember a client"]
    assert after["counts"] == {"0": 2, "3": 2} and list(after["memory"]) == ["0", "3"]
    method, state = server(remembered=0)
    ((after, events),) = rounds(method, state, (0, 1))
    assert after["memory"] == after["counts"] == {} and events == []


def test_the_servers_memory_comes_back_from_a_file(tmp_path: Path) -> None:
    """In the same order of clients."""
    method, state = server(beta2=0.5)
    *_, (after, _) = rounds(method, state, (9, 10), (10, 2))
    trees.write_tree(tmp_path / "server.safetensors", after, {})
    again, _ = trees.read_tree(tmp_path / "server.safetensors")
    assert again is not None and list(again["memory"]) == ["9", "10", "2"]
    small.assert_equal_trees(again, after)


def test_the_server_corrects_tensor_by_tensor() -> None:
    """No tensor of the momentum conflicts with the memory, which the whole vector may hide."""
    generator = torch.Generator().manual_seed(0)
    push = torch.randn(P, generator=generator)
    remembered = torch.randn(P, generator=generator) - 0.5 * push
    state = {"parameters": torch.zeros(P), "buffers": torch.zeros(0), "momentum": 10 * push}
    state |= {"memory": {"5": remembered}, "counts": {"5": 1}}
    sizes = [64 * 32, 32, 32 * 10, 10]
    products = {}
    for scope in ("tensor", "model"):
        method = small.worker(tiny("gradma", scope=scope, **SERVER)).method
        assert isinstance(method, GradMA)
        assert method.block_sizes() == (sizes if scope == "tensor" else None)
        after = method.aggregate(state, [two_number_reply(0, 1, *[0.0] * P)], Log())["momentum"]
        pairs = zip(remembered.split(sizes), after.split(sizes), strict=True)
        products[scope] = [float(a @ b) for a, b in pairs]
    assert max(map(abs, products["tensor"])) < 1e-2
    assert abs(sum(products["model"])) < 1e-2 and max(map(abs, products["model"])) > 1


# ------------------------------------------------------------------ when it is FedAvg


@pytest.mark.parametrize("server_lr", [0.5, 1.0])
@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_a_server_without_momentum_and_memory_is_fedavg(
    server_lr: float, network: dict[str, Any]
) -> None:
    """theta - server_lr mean(theta - theta_c), of clients with different numbers of images."""
    few = {"network": network, "split": {"images_per_class": 20}, "server_lr": server_lr}
    experiment = tiny("gradma", beta1=0.0, remembered=0, **SERVER, **few)
    whole = plan(experiment)
    nine = whole.train_indices(experiment.dataset(), 0, 0)[:9].tolist()
    uneven = small.with_train(whole, {(0, 0): tuple(nine)})
    record, fedavg = run(experiment, uneven), run(tiny(**few), uneven)
    for name, value in fedavg.weights.items():
        np.testing.assert_allclose(record.weights[name], value, rtol=0, atol=2e-6, err_msg=name)
    assert all(entry["notes"] == {"gradma server corrected": 0.0} for entry in record.history)


def test_both_halves_change_the_model() -> None:
    """FedAvg, the worker's half, the server's half and both are four models."""
    switches = [(False, False), (True, False), (False, True), (True, True)]
    weights = [run(tiny("gradma", worker=w, server=s)).weights["head.weight"] for w, s in switches]
    for k, one in enumerate(weights):
        assert all(np.abs(one - other).max() > 1e-2 for other in weights[:k])


def test_only_the_model_is_sent_and_clients_keep_nothing() -> None:
    record, fedavg = run(tiny("gradma")), run(tiny())
    assert [e["bytes"] for e in record.history] == [e["bytes"] for e in fedavg.history]
    assert all(entry["disk"] == 0 for entry in record.history)


# ------------------------------------------------------------------ parameters
