"""Every method is FedAvg where its extras are off, and keeps the promises that others build on."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import ALWAYS, BATCH_NORM, BN_B, BN_P, P, first, kept, plan, run, tiny, whole, with_train
from torch import Tensor, nn

from stamp_core import checkpoint, methods, models
from stamp_core.config import Network
from stamp_core.coresets import Proposal
from stamp_core.executor import Answer, Worker
from stamp_core.experiments import Experiment
from stamp_core.methods import Log, Method, Reply, State, Turn, replay
from stamp_core.metrics import Array
from stamp_core.records import Record
from stamp_core.seeding import generator
from stamp_core.split import Plan, Task
from stamp_core.workspace import Visit

EVERY = methods.names()
WITHOUT_NEUTRAL = {"joint", "local"}  # bounds and controls that are no kind of FedAvg
POLICIES = ("shared", "local", "frozen")
FEW = {"images_per_class": 20}
HARD: dict[str, Any] = {
    "participation": 0.7,
    "dropout": 0.3,
    "momentum": 0.9,
    "shift": 1,
    "flip": True,
    "epochs": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hard": {"network": BATCH_NORM, "split": {"cycles": 2, **FEW}, "training": HARD},
    "own": {"network": BATCH_NORM, "split": FEW, "training": {**HARD, "buffers": "local"}},
}


# ------------------------------------------------------------------ what holds for all methods


@cache
def fedavg(setting: str) -> Record:
    """What FedAvg leaves behind."""
    return run(tiny(**SETTINGS[setting]))


def neutral(kind: str) -> dict[str, Any]:
    """The parameters that make a method FedAvg."""
    return dict(methods.get(kind).neutral or {})


def test_only_bounds_and_controls_have_no_neutral_parameters() -> None:
    assert {kind for kind in EVERY if methods.get(kind).neutral is None} == WITHOUT_NEUTRAL


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", sorted(set(EVERY) - WITHOUT_NEUTRAL))
def test_with_its_extras_off_a_method_is_fedavg_bit_for_bit(kind: str, setting: str) -> None:
    record = run(tiny(kind, **SETTINGS[setting], **neutral(kind)))
    expected = fedavg(setting)
    small.assert_same_weights(record, expected)
    for model in ("initial", "global", "local"):  # a method may have a personal one besides
        np.testing.assert_array_equal(record.scores[model], expected.scores[model], model)


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
@pytest.mark.parametrize("training", [{}, {"participation": 0.5, "dropout": 0.3}], ids=str)
@pytest.mark.parametrize("kind", EVERY)
def test_clients_with_next_to_nothing_do_no_harm(
    kind: str, training: dict[str, Any], network: dict[str, Any]
) -> None:
    """One picture, one class, none at all: weights, losses and accuracies stay numbers."""
    cell = whole(kind, network=network, split=FEW, training=training)
    record = run(cell, small.awkward(cell))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert all(row["loss"] is None or np.isfinite(row["loss"]) for row in record.history)
    assert any(row["loss"] for row in record.history)
    for model in {"global", "personal"} & set(methods.get(kind).models):
        accuracy = record.accuracy(model)
        assert ((accuracy >= 0) & (accuracy <= 1)).all(), model


class Attended(NamedTuple):
    """A visit that took place."""

    server: State
    given: list[Any]  # state and message
    before: list[Any]  # copies of the two, made beforehand
    turn: Turn  # the visit with these copies
    answer: Answer


def attended(here: Worker, plan_: Plan) -> Iterator[Attended]:
    """The visits of one round of every step."""
    server, states, *_ = here.begin(plan_.seed)
    for step in range(plan_.steps):
        replies = []
        for client in here.method.participants(list(range(len(states)))):
            visit = Visit(plan_.seed, client, step, 0, last=True)
            given = [states[client], here.method.broadcast(server, client)]
            before = small.copied(given)
            answer = here.attend(visit, *given)
            yield Attended(server, given, before, Turn(visit, plan_, *before), answer)
            states[client] = answer.reply.state
            replies.append(answer.reply)
        server = here.method.aggregate(server, replies, Log())


def test_a_client_without_pictures_takes_no_step() -> None:
    """Not even one of weight decay: its own model is the initial one."""
    cell = tiny("local", training={"weight_decay": 0.1})
    here = small.worker(cell, small.awkward(cell))
    for each in attended(here, small.awkward(cell)):
        after, start = each.answer.reply.state["parameters"], each.server["parameters"]
        empty = each.turn.visit.client == 2
        assert torch.equal(after, start) == (each.answer.reply.steps == 0) == empty


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", EVERY)
def test_a_visit_depends_on_nothing_but_its_arguments(kind: str, policy: str) -> None:
    """Whoever was in the live model before, and whatever was drawn elsewhere, leaves no trace."""
    cell = whole(kind, network=BATCH_NORM, split=FEW, training={"buffers": policy})
    here = small.worker(cell, plan(cell))
    for each in attended(here, plan(cell)):
        live = here.work.model
        for vector in (live.parameters, live.gradients, live.buffers):
            vector.fill_(7)
        torch.manual_seed(each.turn.visit.client)
        drawn = torch.get_rng_state()
        again = here.attend(each.turn.visit, *each.before)
        assert torch.equal(torch.get_rng_state(), drawn), "drawn from the global generator"
        small.assert_equal_trees(again.reply.state, each.answer.reply.state)
        small.assert_equal_trees(again.reply.message, each.answer.reply.message)
        small.assert_equal_trees(again.scores, each.answer.scores)


@pytest.mark.parametrize("kind", EVERY)
def test_nothing_given_is_written_to(kind: str) -> None:
    """Neither a visit nor the next average changes server, state or message in place."""
    cell = whole(kind, network=BATCH_NORM, split=FEW)
    here = small.worker(cell, plan(cell))
    servers: list[tuple[State, State]] = []
    for each in attended(here, plan(cell)):
        servers.append((each.server, small.copied(each.server)))
        here.method.receive(Turn(each.turn.visit, each.turn.plan, *each.given))
        here.work.model.parameters.fill_(7)
        small.assert_equal_trees(each.given, each.before)
    for server, before in servers:
        small.assert_equal_trees(server, before)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", EVERY)
def test_what_a_client_keeps_or_sends_is_its_own(kind: str, policy: str, tmp_path: Path) -> None:
    """No tensor is a window on the live model, and the state comes back whole from a file."""
    cell = whole(kind, network=BATCH_NORM, split=FEW, training={"buffers": policy})
    here, file = small.worker(cell, plan(cell)), tmp_path / "state.safetensors"
    model = here.work.model
    vectors = (model.parameters, model.gradients, model.buffers)
    live = {vector.untyped_storage().data_ptr() for vector in vectors}
    for each in attended(here, plan(cell)):
        reply = each.answer.reply
        for name, tensor in small.tensors([reply.state, reply.message]):
            assert not tensor.numel() or tensor.untyped_storage().data_ptr() not in live, name
        checkpoint.save(file, reply.state, {})
        small.assert_equal_trees(checkpoint.load(file, {}), reply.state)


# ------------------------------------------------------------------ FedAvg


@pytest.mark.parametrize(
    "training",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.01, "epochs": 2, "batch": 50}],
    ids=str,
)
def test_one_client_is_plain_sgd_bit_for_bit(training: dict[str, Any]) -> None:
    """A single client's average is its own model; each visit starts a new optimiser."""
    cell = tiny(split={"clients": 1}, training=training)
    images, plan_, t = cell.images(), plan(cell), cell.setting.training
    normalise = small.worker(cell, plan_).work.normalise
    net = models.build(cell.setting.network, (1, 8, 8), 10, seed=0)
    for step in range(3):
        own = plan_.train_indices(images, 0, step)
        for round_ in range(2):
            descent = torch.optim.SGD(
                net.parameters(), t.rate, momentum=t.momentum, weight_decay=t.weight_decay
            )
            draw = generator(0, 0, step, round_, "order")
            for _ in range(t.epochs):
                for batch in own[torch.randperm(len(own), generator=draw)].split(t.batch):
                    descent.zero_grad()
                    F.cross_entropy(
                        net(normalise(images.x_train[batch])), images.y_train[batch]
                    ).backward()
                    descent.step()
    record = run(cell, plan_)
    for name, value in net.named_parameters():
        assert record.weights[name].tobytes() == value.detach().numpy().tobytes(), name


def test_one_round_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression z = W x + b, one full batch per client, so one step of gradient descent.

    The mean cross-entropy of n pictures has dL/dz = (softmax(z) - onehot) / n =: G  [n, 10], thus
    dL/dW = G^T X, dL/db = sum_n G. The server's model is sum_u n_u theta_u / sum_u n_u.
    """
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))
    cell = tiny(split={"clients": 2, "tasks": 1}, training={"rounds": 1, "batch": 1000})
    images, whole = cell.images(), plan(cell)
    few = whole.train_indices(images, 0, 0)[:7]
    plan_ = with_train(whole, {(0, 0): tuple(few.tolist())})
    head = models.build(cell.setting.network, (1, 8, 8), 10, seed=0).head
    w, b = (p.detach().double().numpy() for p in (head.weight, head.bias))

    total, new_w, new_b = 0, 0.0, 0.0
    for u in range(2):
        own = plan_.train_indices(images, u, 0).numpy()
        x = images.x_train.numpy()[own].reshape(-1, 64) / 255
        x = (x - float(images.mean)) / float(images.std)
        z = np.exp(x @ w.T + b)
        g = (z / z.sum(1, keepdims=True) - np.eye(10)[images.y_train.numpy()[own]]) / len(own)
        new_w += len(own) * (w - 0.1 * g.T @ x)
        new_b += len(own) * (b - 0.1 * g.sum(0))
        total += len(own)

    found = run(cell, plan_).weights
    np.testing.assert_allclose(found["head.weight"], new_w / total, atol=1e-6, rtol=0)
    np.testing.assert_allclose(found["head.bias"], new_b / total, atol=1e-6, rtol=0)


def test_equal_clients_average_to_any_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one order of batches for all, four clients with client 0's data are client 0."""
    monkeypatch.setattr(
        Visit, "generator", lambda v, purpose: generator(v.seed, v.step, v.round, purpose)
    )
    cell = tiny()
    whole = plan(cell)
    equal = replace(whole, clients=whole.clients[:1] * 4)
    small.assert_same_weights(run(cell, equal), run(cell, first(whole, 1)))


def test_a_client_without_pictures_has_no_weight() -> None:
    """Four clients, the last one empty, train the same model as the first three alone."""
    cell = tiny()
    whole = plan(cell)
    empty = with_train(whole, {(3, t): () for t in range(3)})
    small.assert_same_weights(run(cell, empty), run(cell, first(whole, 3)))


def test_at_rate_zero_nothing_moves() -> None:
    """Six averages of four copies of one model are that model."""
    record = run(tiny(training={"rate": 0}))
    for name, value in initial().items():
        assert record.weights[name].tobytes() == value.tobytes(), name


def initial(network: Network | None = None) -> dict[str, Array]:
    """The weights and buffers that a run of seed 0 starts from."""
    net = models.build(network or tiny().setting.network, (1, 8, 8), 10, seed=0)
    return {name: value.numpy() for name, value in net.state_dict().items()}


def reply(samples: int, *values: float) -> Reply:
    """A client's answer with weights and buffers of two numbers each."""
    vector = torch.tensor(values, dtype=torch.float32)
    return Reply(0, {}, {"parameters": vector, "buffers": vector * 2}, samples, 1, 0.0)


def two_numbers(step: float) -> tuple[Method, State]:
    """A server that averages, at theta = (1, 2) with buffers (5, 5)."""
    method = small.worker(tiny(network=BATCH_NORM, step=step)).method
    return method, {"parameters": torch.tensor([1.0, 2.0]), "buffers": torch.tensor([5.0, 5.0])}


@pytest.mark.parametrize(("step", "expected"), [(0.5, [2.25, 1.5]), (1, [3.5, 1]), (2, [6, 0])])
def test_the_servers_step_by_hand(step: float, expected: list[float]) -> None:
    """avg = (1 (2, 4) + 3 (4, 0)) / 4 = (3.5, 1), theta + step (avg - theta); buffers: 2 avg.

    The answer without samples must not count, whatever is in it.
    """
    method, server = two_numbers(step)
    nothing = reply(0, float("nan"), float("inf"))
    after = method.aggregate(server, [reply(1, 2, 4), nothing, reply(3, 4, 0)], Log())
    assert after["parameters"].tolist() == expected
    assert after["buffers"].tolist() == [7, 2]
    assert server["parameters"].tolist() == [1, 2]


def test_without_answers_the_server_stays() -> None:
    method, server = two_numbers(step=2)
    assert method.aggregate(server, [], Log()) is server
    assert method.aggregate(server, [reply(0, 1, 1)], Log()) is server


def test_the_order_of_answers_does_not_matter() -> None:
    """Sums in float64 leave at most the last digit of float32 to chance."""
    method, server = two_numbers(step=1)
    draw = generator("permutation")
    replies = [reply(n, *torch.randn(1000, generator=draw).tolist()) for n in (1, 10, 99, 270)]
    means = [
        method.aggregate(server, list(each), Log())["parameters"] for each in permutations(replies)
    ]
    for mean in means:
        torch.testing.assert_close(mean, means[0], rtol=0, atol=1e-6)


# ------------------------------------------------------------------ replay


def remembered(here: Worker, plan_: Plan, client: int) -> list[State]:
    """A client's memory after every step, whose number it notes."""
    own = [each for each in attended(here, plan_) if each.turn.visit.client == client]
    assert [each.answer.reply.state["step"] for each in own] == [*range(plan_.steps)]
    return [each.answer.reply.state["memory"] for each in own]


def rows(pictures: Tensor) -> list[bytes]:
    """Each picture as something that can be looked up."""
    return [picture.numpy().tobytes() for picture in pictures]


@pytest.mark.parametrize("per_class", [5, 1000])
def test_replay_keeps_so_many_pictures_of_each_class_once(per_class: int) -> None:
    """Two cycles: the second meets every class again and adds nothing but their number."""
    cell = tiny("replay", split={"cycles": 2}, memory=kept(per_class))
    plan_, images = plan(cell), cell.images()
    memories = remembered(small.worker(cell, plan_), plan_, 1)
    for step, state in enumerate(memories):
        tasks, met = range(min(step + 1, 3)), torch.zeros(10, dtype=torch.int64)
        assert set(state["tasks"].tolist()) == set(tasks)
        for task in tasks:
            own = plan_.train_indices(images, 1, task)
            for label in plan_.clients[1][task].classes:
                mine = state["pictures"][(state["tasks"] == task) & (state["labels"] == label)]
                known = rows(images.x_train[own[images.y_train[own] == label]])
                assert len(mine) == min(per_class, len(known))
                assert len(set(rows(mine))) == len(mine)
                assert set(rows(mine)) <= set(known)
                met[label] = len(known) * ((step - task) // 3 + 1)
        assert torch.equal(state["seen"], met)
    for state in memories[3:]:
        assert labelled(state) == labelled(memories[2])


def labelled(memory: State) -> list[tuple[bytes, int, int]]:
    """Every remembered picture with its class and task, in an order of its own."""
    about = memory["labels"].tolist(), memory["tasks"].tolist()
    return sorted(zip(rows(memory["pictures"]), *about, strict=True))


@pytest.mark.parametrize("missing", [{"dropout": 0.1}, {"participation": 0.5}])
def test_where_clients_may_be_missed_replay_chooses_on_the_first_visit(missing: Any) -> None:
    """And keeps it: a choice at random does not look at what the encoder has learnt."""
    cell = tiny("replay", training=missing, memory=kept(5))
    plan_ = plan(cell)
    here = small.worker(cell, plan_)
    server, states, *_ = here.begin(0)
    message = here.method.broadcast(server, 0)
    once = here.attend(Visit(0, 0, 0, 0), states[0], message).reply.state
    assert len(once["memory"]["labels"]) == 10
    for last in (False, True):
        twice = here.attend(Visit(0, 0, 0, 1, last), once, message).reply.state
        small.assert_equal_trees(twice, once)


def test_where_nobody_is_missed_replay_chooses_in_the_last_round() -> None:
    """From the pictures that it would have chosen on the first visit."""
    sure = tiny("replay", memory=kept(5))
    here, plan_ = small.worker(sure, plan(sure)), plan(sure)
    server, states, *_ = here.begin(0)
    message = here.method.broadcast(server, 0)
    once = here.attend(Visit(0, 0, 0, 0), states[0], message).reply.state
    small.assert_equal_trees(once, states[0])
    last = here.attend(Visit(0, 0, 0, 1, True), once, message).reply.state
    unsure = tiny("replay", training={"dropout": 0.1}, memory=kept(5))
    visit = Visit(0, 0, 0, 0)
    first = small.worker(unsure, plan_).attend(visit, states[0], message).reply.state
    small.assert_equal_trees(last, first)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 4.0])
def test_replayed_pictures_are_of_other_tasks_and_so_many(ratio: float) -> None:
    """Behind n new pictures of a batch stand min(ratio n, all) old ones, no two the same.

    10 are remembered per task; batches are of 16, the last of 272 = 17 x 16 as well or shorter.
    """
    cell = tiny("replay", split={"cycles": 2}, memory=kept(5), ratio=ratio)
    plan_ = plan(cell)
    here = small.worker(cell, plan_)
    for turn in (each.turn for each in attended(here, plan_)):
        state, now = turn.state["memory"], turn.visit.step % 3
        past = state["tasks"] != now
        memory = rows(here.work.normalise(state["pictures"][past]))
        known = dict(zip(memory, state["labels"][past].tolist(), strict=True))
        turn.indices = here.method.examples(turn)
        new = list(here.work.batches(turn.visit, turn.indices))
        mixed = list(here.method.batches(turn))
        for (x, y), (pictures, labels) in zip(new, mixed, strict=True):
            assert torch.equal(pictures[: len(x)], x) and torch.equal(labels[: len(y)], y)
            old = rows(pictures[len(x) :])
            assert len(old) == min(round(ratio * len(x)), len(known))
            assert len(set(old)) == len(old)
            assert [known[each] for each in old] == labels[len(y) :].tolist()
        assert not set(state["labels"][past].tolist()) & set(
            plan_.clients[turn.visit.client][now].classes
        )


def test_replay_at_ratio_zero_trains_like_fedavg() -> None:
    record = run(tiny("replay", ratio=0.0))
    small.assert_same_weights(record, fedavg("plain"))
    for model, values in fedavg("plain").scores.items():
        np.testing.assert_array_equal(record.scores[model], values)


def test_replay_remembers_something_that_fedavg_forgets() -> None:
    """The control does what it is there for: more of the first task is left at the end."""
    left = [r.accuracy()[-1, :, 0].mean() for r in (run(tiny("replay")), fedavg("plain"))]
    assert left[0] > left[1] + 0.1


def test_what_is_offered_of_a_class_are_the_clients_own_pictures_of_it() -> None:
    cell = tiny("replay", memory=kept(5))
    plan_, images = plan(cell), cell.images()
    here = small.worker(cell, plan_)
    turn = small.arrived(here, plan_, 0)
    turn.indices = here.method.examples(turn)
    labels = images.y_train[turn.indices]
    for label in plan_.clients[0][0].classes:
        offered = here.method.pictures_of(turn, labels, label)
        own = turn.indices[labels == label]
        assert torch.equal(offered.pictures, images.x_train[own]) and len(own) > 5
        assert offered.labels.tolist() == [label] * len(own)
        assert offered.soft.shape == (len(own), 0)


@pytest.mark.parametrize("rule", ["uniform", "herding", "k_centre"])
@pytest.mark.parametrize("missing", [{}, {"dropout": 0.1}])
def test_class_by_class_a_client_chooses_what_it_would_among_all_pictures_of_the_task(
    rule: str, missing: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never has the pictures of more than one class in hand."""
    cell = tiny("replay", split=FEW, training=missing, memory=kept(3, rule=rule))
    plan_, sizes = plan(cell), list[int]()
    as_they_are = replay.as_they_are

    def counted(pictures: Tensor, labels: Tensor) -> Proposal:
        sizes.append(len(labels))
        return as_they_are(pictures, labels)

    def all_at_once(self: Method, turn: Turn, labels: Tensor, label: int) -> Proposal:
        return as_they_are(self.work.images.x_train[turn.indices], labels)

    monkeypatch.setattr(replay, "as_they_are", counted)
    found = remembered(small.worker(cell, plan_), plan_, 0)
    assert set(sizes) == {20} and len(found[-1]["labels"]) == 3 * 2 * 3
    monkeypatch.setattr(replay.Replay, "pictures_of", all_at_once)
    for one, other in zip(found, remembered(small.worker(cell, plan_), plan_, 0), strict=True):
        small.assert_equal_trees(one, other)


def test_a_rule_that_looks_at_whole_tasks_is_asked_once_a_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each class the first pictures that it proposes are kept."""
    cell = tiny("replay", split=FEW, memory=kept(3, rule="ocs"))
    plan_, asked, propose = plan(cell), list[Proposal](), replay.propose

    def noted(rule: str, task: Any) -> Proposal:
        assert len(task.labels) == 40
        asked.append(propose(rule, task))
        return asked[-1]

    monkeypatch.setattr(replay, "propose", noted)
    last = remembered(small.worker(cell, plan_), plan_, 0)[-1]
    assert len(asked) == plan_.tasks * len(plan_.clients) and len(last["labels"]) == 18
    for task, proposal in enumerate(asked[:: len(plan_.clients)]):  # client 0 comes first
        for label in plan_.clients[0][task].classes:
            first = proposal.pictures[proposal.labels == label][:3]
            mine = (last["tasks"] == task) & (last["labels"] == label)
            assert rows(last["pictures"][mine]) == rows(first)


def test_the_history_weighs_the_memory() -> None:
    """A picture is 64 bytes, its label and its task 8 each; 2 classes x 5 pictures a task. How
    many of each of 10 classes were seen takes 80 more."""
    record = run(tiny("replay", memory=kept(5)))
    assert [row["disk"] for row in record.history] == [80, 880, 880, 1680, 1680, 2480]


# ------------------------------------------------------------------ local and joint


def test_local_is_fedavg_of_each_client_alone() -> None:
    """A federation in which only client u has pictures trains u's own model."""
    cell = tiny("local")
    whole, record = plan(cell), run(cell)
    for u in range(4):
        others = {(v, t): () for v, t in small.everywhere(whole) if v != u}
        alone = run(tiny(), with_train(whole, others))
        np.testing.assert_array_equal(
            record.scores["personal"][:, :, u], alone.scores["global"][:, :, u]
        )


def test_local_sends_nothing_and_has_no_global_model() -> None:
    record = run(tiny("local"))
    assert all(row["bytes"] == {"down": 0, "up": 0} for row in record.history)
    assert all(row["disk"] == 4 * P for row in record.history)
    assert np.isnan(record.scores["global"]).all() and np.isnan(record.scores["local"]).all()
    assert record.weights == {}


def union(cell: Experiment, whole: Plan) -> Plan:
    """One client that has the pictures of all clients and tasks, three tasks long."""
    images = cell.images()
    every = {
        i for u, t in small.everywhere(whole) for i in whole.train_indices(images, u, t).tolist()
    }
    task = Task(tuple(range(10)), train=tuple(sorted(every)))
    return replace(first(whole, 1), clients=((task,) * 3,))


@pytest.mark.parametrize("dropout", [0.0, ALWAYS])
def test_joint_is_one_learner_on_the_union(dropout: float) -> None:
    """Pictures that several clients hold count once, and nobody can drop out."""
    cell = tiny("joint", training={"dropout": dropout, "participation": 0.5})
    record = run(cell)
    alone = run(tiny(), union(cell, plan(cell)))
    small.assert_same_weights(record, alone)
    for row in record.history:
        assert (row["asked"], row["answered"], row["bytes"]) == (1, 1, {"down": 4 * P, "up": 4 * P})
    assert np.isnan(record.scores["personal"]).all() and np.isnan(record.scores["local"]).all()
    assert np.isfinite(record.accuracy()).all()


# ------------------------------------------------------------------ batch normalisation


def normalised(kind: str, policy: str, **training: Any) -> Experiment:
    """A network with batch normalisation whose buffers are treated by a policy."""
    return tiny(kind, network=BATCH_NORM, split=FEW, training={"buffers": policy, **training})


BUFFERS = ("encoder.1.running_mean", "encoder.1.running_var")


@pytest.mark.parametrize("kind", ["fedavg", "joint"])
@pytest.mark.parametrize("policy", POLICIES)
def test_buffers_move_as_the_policy_says(policy: str, kind: str) -> None:
    """Shared ones are averaged; local ones stay with the clients; frozen ones never change.

    The one learner of `joint` is client and server in one: its buffers are local and shared.
    """
    cell = normalised(kind, policy)
    record, start = run(cell), initial(cell.setting.network)
    moved = [not np.array_equal(record.weights[name], start[name]) for name in BUFFERS]
    assert moved == [policy == "shared" or (policy, kind) == ("local", "joint")] * 2
    assert np.isfinite(record.accuracy()).all()


@pytest.mark.parametrize(
    ("policy", "each"), [("shared", BN_P + BN_B), ("local", BN_P), ("frozen", BN_P)]
)
def test_buffers_are_paid_for_where_they_travel(policy: str, each: int) -> None:
    record = run(normalised("fedavg", policy))
    assert all(row["bytes"] == {"down": 16 * each, "up": 16 * each} for row in record.history)
    disk = 4 * BN_B if policy == "local" else 0
    assert all(row["disk"] == disk for row in record.history)


def test_shared_buffers_are_averaged_by_samples() -> None:
    """One full batch each at rate 0: a running mean becomes 0.9 x 0 + 0.1 x that of the batch."""
    cell = normalised("fedavg", "shared", rate=0, rounds=1, batch=1000)
    whole, images = plan(cell), cell.images()
    plan_ = with_train(first(whole, 2), {(0, 0): whole.clients[0][0].train[:7]})
    convolution = models.build(cell.setting.network, (1, 8, 8), 10, seed=0).encoder[0]
    normalise, mean = small.worker(cell, plan_).work.normalise, torch.zeros(4)
    for client, weight in ((0, 7 / 47), (1, 40 / 47)):
        own = plan_.train_indices(images, client, 0)
        mean += weight * 0.1 * convolution(normalise(images.x_train[own])).mean((0, 2, 3)).detach()
    here = small.worker(cell, plan_)
    server, states, *_ = here.begin(0)
    sent = here.method.broadcast(server, 0)
    replies = [here.attend(Visit(0, u, 0, 0), states[u], sent).reply for u in range(2)]
    found = here.method.aggregate(server, replies, Log())["buffers"][:4]
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)


def test_frozen_normalisation_is_the_identity_also_in_training() -> None:
    """Its buffers are those of an untrained network: mean 0, variance 1."""
    cell = normalised("fedavg", "frozen")
    here = small.worker(cell, plan(cell))
    for _ in attended(here, plan(cell)):
        assert here.work.model.buffers.tolist() == [0.0] * 4 + [1.0] * 4


def by_hand(net: nn.Module, here: Worker, plan_: Plan, client: int) -> list[float]:
    """The share of a client's test pictures of each task that the network gets right."""
    images, found = here.work.images, []
    for task in range(plan_.tasks):
        test = plan_.test_indices(images, client, task)
        answers = net(here.work.normalise(images.x_test[test])).argmax(1)
        found.append(float((answers == images.y_test[test]).double().mean()))
    return found


@pytest.mark.parametrize("kind", ["fedavg", "local"])
def test_local_buffers_are_used_where_they_belong(kind: str, tmp_path: Path) -> None:
    """Each client's last accuracies follow from the last weights with its own buffers."""
    cell = normalised(kind, "local")
    plan_ = plan(cell)
    here, record = small.worker(cell, plan_), run(cell, plan_, resume=tmp_path)
    state, net = small.saved(cell, tmp_path), models.build(cell.setting.network, (1, 8, 8), 10, 0)
    net.eval()
    untouched = []
    for u, own in enumerate(state["clients"]):
        weights = own if kind == "local" else state["server"]
        nn.utils.vector_to_parameters(weights["parameters"], net.parameters())
        untouched += by_hand(net, here, plan_, u)
        net.encoder[1].running_mean.copy_(own["buffers"][:4])
        net.encoder[1].running_var.copy_(own["buffers"][4:])
        found = record.accuracy("global" if kind == "fedavg" else "personal")[-1, u]
        assert found == pytest.approx(by_hand(net, here, plan_, u), abs=1e-6)
        net.encoder[1].reset_running_stats()
    all_found = record.accuracy("global" if kind == "fedavg" else "personal")[-1].flatten()
    assert not np.allclose(all_found, untouched)  # so the buffers do matter here
