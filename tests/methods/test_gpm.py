"""GPM: bases and a step of a 2-layer linear network by hand, and what projection protects."""

from typing import Any

import numpy as np
import pytest
import small
import torch
from by_hand import FULL_BATCH, Array, task_data
from small import BATCH_NORM, BN_P, P, first, plan, run, tiny
from stamp_core.client.workspace import RoundId
from torch import Tensor, nn

from stamp_core.client import subspaces
from stamp_core.config.schema import Network
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.method import ClientRound, Reply
from stamp_core.methods.gpm import Gpm
from stamp_core.models import networks

HIDDEN = 6  # of the linear network
FIRST = HIDDEN * 64 + HIDDEN  # parameters of its first layer
EXACT = {"epsilon": 1.0, "increment": 0.0}  # bases hold all inputs but rounding noise


def use_two_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the network z = W2 (W1 x + b1) + b2 with W1 [6, 64] and W2 [10, 6]."""

    def encoder(network: Network, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN)), HIDDEN

    monkeypatch.setitem(networks.ENCODERS, "mlp", encoder)


def trained(worker: Worker, client_round: ClientRound) -> Reply:
    """The reply of a client round, which fills the round's scratch and log."""
    return worker.method.train_client(client_round)


def arrived(experience: int, **options: Any) -> tuple[Worker, ClientRound]:
    """A client round in the only round of an experience, after one in every experience before."""
    options["training"] = {"rounds": 1, **options.get("training", {})}
    experiment = tiny("gpm", **options)
    worker = small.worker(experiment, plan(experiment))
    return worker, small.arrived(worker, plan(experiment), experience)


# ------------------------------------------------------------------ by hand


def layers_of(theta: Array) -> tuple[Array, Array]:
    """[W1 b1] and [W2 b2] of the flat vector."""
    one, two = theta[:FIRST], theta[FIRST:]
    return (
        np.c_[one[: 64 * HIDDEN].reshape(HIDDEN, 64), one[64 * HIDDEN :]],
        np.c_[two[: 10 * HIDDEN].reshape(10, HIDDEN), two[10 * HIDDEN :]],
    )


def layer_inputs(theta: Array, x: Array) -> tuple[Array, Array]:
    """R of both layers: rows (x, 1) and (h, 1) with h = W1 x + b1, as columns."""
    r1 = np.c_[x, np.ones(len(x))].T  # [65, n]
    return r1, np.r_[layers_of(theta)[0] @ r1, np.ones((1, len(x)))]


def space(r: Array, epsilon: float, held: Array | None = None) -> Array:
    """M M' by singular values: the fewest directions of the residual that reach epsilon."""
    held = np.zeros((len(r), len(r))) if held is None else held
    rest, total = r - held @ r, (r**2).sum()
    u, s, _ = np.linalg.svd(rest, full_matrices=False)
    reached = 1 - (rest**2).sum() / total + np.r_[0, np.cumsum(s**2)] / total
    k = int(np.argmax(reached >= epsilon))
    return np.asarray(held + u[:, :k] @ u[:, :k].T)


def found_space(reply: Reply, name: str) -> Array:
    """M M' of a layer in a client's state."""
    basis = reply.state["bases"][name].double().numpy()
    return np.asarray(basis @ basis.T)


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_the_bases_of_two_tasks_by_hand(lr: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """epsilon is 0.8 for the first task and 0.8 + 0.1 for the second, whose residual counts."""
    use_two_linear_layers(monkeypatch)
    options = {"epsilon": 0.8, "increment": 0.1, "images": 1000, "training": {"lr": lr}}
    worker, client_round = arrived(0, **options)
    reply = trained(worker, client_round)
    theta = reply.message["parameters"].double().numpy()
    spaces = [space(r, 0.8) for r in layer_inputs(theta, task_data(client_round, worker)[0])]
    for name, expected in zip(("encoder.1", "head"), spaces, strict=True):
        np.testing.assert_allclose(found_space(reply, name), expected, rtol=0, atol=1e-5)
    assert [round(np.trace(each)) for each in spaces] == [
        reply.state["bases"][name].shape[1] for name in ("encoder.1", "head")
    ]
    worker, client_round = arrived(1, **options)
    held = [found_space(trained(*arrived(0, **options)), name) for name in ("encoder.1", "head")]
    reply = trained(worker, client_round)
    theta = reply.message["parameters"].double().numpy()
    new = layer_inputs(theta, task_data(client_round, worker)[0])
    for name, r, before in zip(("encoder.1", "head"), new, held, strict=True):
        expected = space(r, 0.9, before)
        np.testing.assert_allclose(found_space(reply, name), expected, rtol=0, atol=1e-4)
        assert reply.state["tasks"][name].tolist() == sorted(reply.state["tasks"][name].tolist())
    assert np.trace(space(new[0], 0.9, held[0])) > np.trace(held[0]) + 0.5


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_projected_step_by_hand(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With D = (softmax(z) - onehot) / n the gradients are D' [h 1] for [W2 b2] and, through the
    second layer, (D W2)' [x 1] for [W1 b1]; a step is -lr (G + decay W)(I - M M')."""
    use_two_linear_layers(monkeypatch)
    training = {**FULL_BATCH, "weight_decay": decay, "momentum": 0.9}
    worker, client_round = arrived(1, training=training)
    theta = client_round.message["parameters"].double().numpy()
    x, labels = task_data(client_round, worker)
    one, two = layers_of(theta)
    r1, r2 = layer_inputs(theta, x)
    z = np.exp(r2.T @ two.T)
    delta = (z / z.sum(1, keepdims=True) - np.eye(10)[labels.numpy()]) / len(labels)
    pairs = []
    for name, w, g in (
        ("encoder.1", one, (delta @ two[:, :HIDDEN]).T @ r1.T),
        ("head", two, delta.T @ r2.T),
    ):
        basis = client_round.state["bases"][name].double().numpy()
        step = g + decay * w
        new = w - 0.1 * (step - step @ basis @ basis.T)
        pairs += [new[:, :-1].ravel(), new[:, -1]]
        assert np.abs(new - (w - 0.1 * step)).max() > 1e-3
    reply = trained(worker, client_round)
    expected = np.concatenate(pairs)
    np.testing.assert_allclose(reply.message["parameters"], expected, rtol=0, atol=1e-6)
    if not decay:
        g = np.concatenate([theta - expected]) / 0.1
        whole = np.r_[((delta @ two[:, :HIDDEN]).T @ x).ravel(), (delta @ two[:, :HIDDEN]).sum(0)]
        whole = np.r_[whole, (delta.T @ r2[:-1].T).ravel(), delta.sum(0)]
        removed = np.linalg.norm(whole - g) / np.linalg.norm(whole)
        assert reply.log.numbers["removed"] == pytest.approx(removed, abs=1e-5)


def test_epsilon_grows_with_every_task_up_to_1(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []
    grow = subspaces.grow

    def noted(basis: Tensor, each: Tensor, epsilon: float) -> Tensor:
        used.append(epsilon)
        return grow(basis, each, epsilon)

    monkeypatch.setattr(subspaces, "grow", noted)
    worker, client_round = arrived(2, epsilon=0.5, increment=0.3)
    trained(worker, client_round)
    assert used == [0.5, 0.5, 0.8, 0.8, 1.0, 1.0]  # two layers


# ------------------------------------------------------------------ what is protected


def past_outputs(worker: Worker, client_round: ClientRound, parameters: Tensor) -> Tensor:
    """The logits of the first task's images.  # [n, 10]"""
    own = client_round.plan.train_indices(worker.work.dataset, client_round.client, 0)
    worker.work.model.load(parameters)
    return worker.work.outputs(worker.work.dataset.x_train[own])


@pytest.mark.parametrize(
    "options",
    [{}, {"training": {"momentum": 0.9, "weight_decay": 0.05}}, {"project": "update"}],
    ids=["steps", "momentum and decay", "the update"],
)
@pytest.mark.parametrize("network", [small.NETWORK, {**BATCH_NORM, "norm": "group"}], ids=str)
def test_outputs_of_all_layers_for_past_images_stay(
    network: dict[str, Any], options: dict[str, Any]
) -> None:
    """Training on the second task leaves the logits of the first one's 4 images as they were,
    since the inputs of every layer do; FedAvg changes them."""
    exact = {**EXACT, "split": {"images_per_class": 2}, "network": network}
    worker, client_round = arrived(1, **exact, **options)
    start = client_round.message["parameters"]
    state = trained(*arrived(0, **exact, **options)).state
    # the bases belong to the model that the client received, which is not its own
    worker.work.model.load(start)
    own = client_round.plan.train_indices(worker.work.dataset, 0, 0)
    method: Any = worker.method
    read = subspaces.layer_inputs(worker.work, method.layers, worker.work.dataset.x_train[own])
    bases = {
        name: subspaces.grow(torch.zeros(len(r), 0).double(), r, 1.0).float()
        for name, r in read.items()
    }
    tasks = {name: torch.zeros(basis.shape[1], dtype=torch.int32) for name, basis in bases.items()}
    client_round.state |= {**state, "bases": bases, "tasks": tasks}
    before = past_outputs(worker, client_round, start)
    end = trained(worker, client_round).message["parameters"]
    assert (end - start).abs().max() > 1e-3
    torch.testing.assert_close(past_outputs(worker, client_round, end), before, rtol=0, atol=2e-4)
    change = subspaces.share_inside(end - start, method.layers, bases)
    assert change < 1e-4


def mlp_slices() -> dict[str, slice]:
    """Where the parameters of the MLP are: weights [32, 64], biases, weights [10, 32], biases."""
    ends = [0, 64 * 32, 64 * 32 + 32, P - 10, P]
    names = ("encoder.1.weight", "encoder.1.bias", "head.weight", "head.bias")
    return {name: slice(*ends[n : n + 2]) for n, name in enumerate(names)}


@pytest.mark.parametrize(
    ("options", "moving"),
    [
        ({"bias": "freeze"}, ["encoder.1.weight", "head.weight"]),
        ({"bias": "freeze", "head": "free"}, ["encoder.1.weight", "head.weight", "head.bias"]),
        ({"bias": "free"}, list(mlp_slices())),
        ({"bias": "joint"}, list(mlp_slices())),
    ],
    ids=str,
)
def test_fixed_biases_stay_once_anything_is_protected(
    options: dict[str, Any], moving: list[str]
) -> None:
    for experience, expected in ((0, list(mlp_slices())), (1, moving)):
        worker, client_round = arrived(experience, **options)
        move = trained(worker, client_round).message["parameters"]
        move = move - client_round.message["parameters"]
        moved = {name for name, place in mlp_slices().items() if move[place].any()}
        assert moved == set(expected)


@pytest.mark.parametrize("bias", ["joint", "free"])
def test_a_free_head_takes_fedavgs_step(bias: str) -> None:
    """In one step the head moves as without projection, the encoder does not."""
    training, places = FULL_BATCH, mlp_slices()
    ends = []
    for options in ({"epsilon": 0.0, "increment": 0.0}, {"head": "free", "bias": bias}):
        worker, client_round = arrived(1, training=training, **options)
        ends.append(trained(worker, client_round).message["parameters"])
    head, encoder = slice(places["head.weight"].start, P), places["encoder.1.weight"]
    assert torch.equal(ends[0][head], ends[1][head])
    assert not torch.equal(ends[0][encoder], ends[1][encoder])
    bias_ = places["encoder.1.bias"]
    assert torch.equal(ends[0][bias_], ends[1][bias_]) == (bias == "free")


def test_masked_rows_of_the_head_are_those_of_past_classes() -> None:
    worker, client_round = arrived(2, head="mask")
    own = client_round.plan.clients[0]
    move = trained(worker, client_round).message["parameters"]
    move = move - client_round.message["parameters"]
    places = mlp_slices()
    rows = torch.cat([move[places["head.weight"]].view(10, 32), move[places["head.bias"], None]], 1)
    still = (~rows.any(1)).nonzero().flatten().tolist()
    assert still == sorted({*own[0].classes, *own[1].classes} - set(own[2].classes))


def test_a_class_of_the_current_task_is_not_masked() -> None:
    """All tasks have the same classes in other domains: nothing is masked."""
    worker, client_round = arrived(1, head="mask")
    method: Any = worker.method
    again = client_round.plan.clients[0][0]
    same = (again, again, again)
    client_round.plan = Plan(**{**vars(client_round.plan), "clients": (same,) * 4})
    assert method.past_classes(client_round) == []


def test_normalisation_is_fixed_after_the_first_task() -> None:
    """Its scale and shift, at 104 to 111 in the flat vector; running statistics go on."""
    moves = []
    for experience in (0, 1):
        worker, client_round = arrived(experience, network=BATCH_NORM, epsilon=0.5)
        reply = trained(worker, client_round)
        moves.append(reply.message["parameters"] - client_round.message["parameters"])
        assert not torch.equal(reply.message["buffers"], client_round.message["buffers"])
    assert len(moves[0]) == BN_P and moves[0][104:112].all() and not moves[1][104:112].any()
    assert moves[1][:104].any()


# ------------------------------------------------------------------ switches


def test_a_projected_update_is_that_of_free_training_cut() -> None:
    """From the model that both receive: FedAvg's update minus its part in the bases."""
    worker, client_round = arrived(1, project="update")
    start = client_round.message["parameters"]
    update = trained(worker, client_round).message["parameters"] - start
    free_worker, free_round = arrived(1, epsilon=0.0, increment=0.0)
    free = trained(free_worker, free_round).message["parameters"] - start
    method: Any = worker.method
    inside = subspaces.component(free, method.layers, client_round.state["bases"])
    torch.testing.assert_close(update, free - inside, rtol=0, atol=1e-6)
    assert inside.norm() > 0.1 * free.norm()


def test_with_receive_protect_the_client_starts_from_its_own_past_outputs() -> None:
    """W M is that of the model with which the bases were made; outside W is the received one."""
    worker, client_round = arrived(1, receive="protect")
    assert worker.method.models == ("global", "personal", "local")
    own = trained(*arrived(0, receive="protect")).message["parameters"]
    received = torch.randn(P, generator=generator("received"))
    client_round.message["parameters"] = received
    worker.method.receive(client_round)
    method, start = worker.method, worker.work.model.parameters.clone()
    assert isinstance(method, Gpm)
    for name, layer in method.layers.items():
        basis = client_round.state["bases"][name]
        expected = layer.matrix(own) @ basis
        torch.testing.assert_close(layer.matrix(start) @ basis, expected, rtol=0, atol=1e-5)
        rest = layer.matrix(start - received)
        torch.testing.assert_close(rest, rest @ basis @ basis.T, rtol=0, atol=1e-5)
    assert (start - received).abs().max() > 0.1
    method.load_personal_model(client_round)
    assert torch.equal(worker.work.model.parameters, start)


def test_a_personal_model_also_has_the_outputs_of_the_last_task() -> None:
    worker, client_round = arrived(0, receive="protect")
    reply = trained(worker, client_round)
    after = ClientRound(client_round.round_id, client_round.plan, reply.state, client_round.message)
    worker.method.receive(after)
    assert torch.equal(worker.work.model.parameters, client_round.message["parameters"])
    worker.method.load_personal_model(after)
    method: Any = worker.method
    for name, layer in method.layers.items():
        basis = reply.state["bases"][name]
        outputs = layer.matrix(worker.work.model.parameters) @ basis
        expected = layer.matrix(reply.message["parameters"]) @ basis
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ from round to round


def sequence(*rounds: tuple[int, int, bool], **options: Any) -> list[tuple[ClientRound, Reply]]:
    """Client 0's rounds (experience, round, last), in each of which it receives the first model."""
    experiment = tiny("gpm", **options)
    plan_ = plan(experiment)
    worker, results = small.worker(experiment, plan_), []
    server, states, *_ = worker.initial_states(0)
    state = states[0]
    for each in rounds:
        message = worker.method.broadcast(server, 0)
        client_round = ClientRound(RoundId(0, 0, *each), plan_, state, message)
        reply = trained(worker, client_round)
        results.append((client_round, reply))
        state = reply.state
    return results


def columns_by_task(state: dict[str, Any]) -> dict[int, int]:
    """The number of columns that each task has added to the first layer."""
    tasks, counts = state["tasks"]["encoder.1"].unique(return_counts=True)
    return dict(zip(tasks.tolist(), counts.tolist(), strict=True))


def test_a_returning_task_is_free_to_be_learnt_and_then_replaces_its_columns() -> None:
    """In the second cycle the columns of the current task are left out."""
    ends = [(experience, 0, True) for experience in range(6)]
    results = sequence(*ends, split={"cycles": 2}, training={"rounds": 1})
    for client_round, reply in results:
        tasks = client_round.state["tasks"]["encoder.1"]
        used = client_round.scratch.get("bases")
        others = int((tasks != client_round.task).sum())
        assert (used["encoder.1"].shape[1] if used else 0) == others
        assert set(columns_by_task(reply.state)) == set(range(min(client_round.experience, 2) + 1))
    last = results[-1][1].state
    assert last["experiences"] == [0, 1, 2, 3, 4, 5]
    assert last["bases"]["encoder.1"].shape[1] <= 65


def test_where_rounds_may_be_missed_bases_are_made_at_once_and_again_at_the_end() -> None:
    """The columns of the running task protect nothing, and its last round replaces them."""
    rounds = [(0, 0, False), (0, 1, False), (1, 0, False), (1, 1, True)]
    results = sequence(*rounds, training={"dropout": 0.1})
    tasks = [set(columns_by_task(reply.state)) for _, reply in results]
    assert tasks == [{0}, {0}, {0, 1}, {0, 1}]
    assert "bases" not in results[1][0].scratch and "bases" in results[2][0].scratch
    same = [
        torch.equal(results[a][1].state["bases"]["head"], results[b][1].state["bases"]["head"])
        for a, b in ((0, 1), (1, 2), (2, 3))
    ]
    assert same == [True, False, False]
    without = sequence(*rounds)
    assert columns_by_task(without[0][1].state) == {} and "bases" not in without[2][0].scratch


# ------------------------------------------------------------------ drift


def drifts(experiment: Experiment, plan_: Plan | None = None) -> list[float]:
    """The drift of each round, as far as it is defined."""
    history = run(experiment, plan_).history
    return [row["notes"]["drift"] for row in history if "drift" in row["notes"]]


def test_the_average_of_clients_with_other_pasts_leaves_what_they_protect() -> None:
    """One client, or clients that all have the same images, stay outside their bases."""
    options: dict[str, Any] = {"drift": True, "training": {"rounds": 3, "weight_decay": 0.01}}
    experiment = tiny("gpm", **options)
    several, alone = drifts(experiment), drifts(experiment, first(plan(experiment), 1))
    assert len(several) == len(alone) == 4  # two rounds of the second and of the third task
    assert max(alone) < 1e-4 and min(several) > 0.1


def test_clients_with_the_same_bases_do_not_drift() -> None:
    """Four clients start the second task from the state of one of them."""
    experiment = tiny("gpm", drift=True, split={"order": "common"})
    worker, plan_ = small.worker(experiment, plan(experiment)), plan(experiment)
    server, states, *_ = worker.initial_states(0)
    message = worker.method.broadcast(server, 0)
    state = worker.train_client(RoundId(0, 0, 0, 1, last=True), states[0], message).reply.state
    replies = [
        worker.train_client(RoundId(0, client, 1, 0), state, message).reply for client in range(4)
    ]
    after = {
        **message,
        "parameters": torch.stack([r.message["parameters"] for r in replies]).mean(0),
    }
    for client, reply in enumerate(replies):
        client_round = ClientRound(RoundId(0, client, 1, 1), plan_, reply.state, after)
        assert trained(worker, client_round).log.numbers["drift"] < 1e-5


# ------------------------------------------------------------------ costs and parameters


@pytest.mark.parametrize("receive", ["global", "protect"])
def test_a_client_keeps_its_bases_and_sends_the_model(receive: str) -> None:
    """4 d bytes for a column and 4 for its task; with protect 4 o for its outputs."""
    record = run(tiny("gpm", receive=receive, split={"clients": 1}))
    extra = {"encoder.1": 32, "head": 10} if receive == "protect" else {"encoder.1": 0, "head": 0}
    for row in record.history:
        assert row["bytes"] == {"down": 4 * P, "up": 4 * P}
        columns = {
            n: round(row["notes"][f"filled {n}"] * d) for n, d in (("encoder.1", 65), ("head", 33))
        }
        each = {"encoder.1": 65, "head": 33}
        assert row["disk"] == sum(4 * k * (each[n] + 1 + extra[n]) for n, k in columns.items())
        total = sum(columns.values()) / 98
        assert row["notes"]["filled"] == pytest.approx(total)
    assert record.history[0]["disk"] == 0 < record.history[-1]["disk"]


def test_the_received_model_is_kept_only_to_measure_drift() -> None:
    """Nothing else changes."""
    without, kept = (run(tiny("gpm", drift=drift)) for drift in (False, True))
    assert kept.history[-1]["disk"] - without.history[-1]["disk"] == 4 * P
    small.assert_same_weights(without, kept)


@pytest.mark.parametrize("receive", ["global", "protect"])
def test_a_run_is_resumed_with_its_bases(receive: str, tmp_path: Any) -> None:
    """States on disk come back bit-identical."""
    experiment = tiny("gpm", receive=receive, drift=True)
    small.assert_same(run(experiment, resume=tmp_path), run(experiment))


def test_with_one_task_it_is_fedavg_bit_for_bit() -> None:
    one = {"tasks": 1}
    small.assert_same_weights(run(tiny("gpm", split=one)), run(tiny(split=one)))


def test_it_forgets_less_than_fedavg() -> None:
    """All clients learn the same tasks in the same order."""
    common = {"order": "common"}
    records = run(tiny("gpm", split=common)), run(tiny(split=common))
    gpm, fedavg = (record.accuracy()[-1, :, 0].mean() for record in records)
    assert gpm > fedavg + 0.1
