"""FedWeIT: two tasks by hand, what is sent and kept, and what each task's model is made of."""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from by_hand import CLOSE, FULL_BATCH, Array, inputs
from small import BATCH_NORM, P, plan, run, tiny
from stamp_core.client.workspace import RoundId
from torch import Tensor, nn

from stamp_core.client.scoring import score
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.method import ClientRound, Log, Reply
from stamp_core.methods.base.task_server import pack_bits
from stamp_core.methods.fedweit import FedWeIT, _dense, _sparse
from stamp_core.models import networks
from stamp_core.models.decomposed import Channels, PastWeights
from stamp_core.results.records import tree_bytes

N, C = 64 * 32, 32  # weights and channels of the small network's only decomposed tensor
R = P - N
CODE: dict[str, Any] = {"mask": "decay", "retroactive": False, "head": "task"}
FEW = {"images_per_class": 20}


class Federation:
    """The rounds of a run, one at a time, with all that is sent and kept."""

    def __init__(self, experiment: Experiment, plan_: Plan | None = None) -> None:
        self.plan = plan_ or plan(experiment)
        self.worker = small.worker(experiment, self.plan)
        assert isinstance(self.worker.method, FedWeIT)
        self.method = self.worker.method
        self.rounds = experiment.setting.training.rounds
        self.server, self.states, *_ = self.worker.initial_states(0)
        self.sent: list[dict[str, Tensor]] = []  # of the last round
        self.log = Log()

    def round(self, experience: int, round_: int, missing: tuple[int, ...] = ()) -> list[Reply]:
        """The replies of one round, from all clients but the missing ones."""
        clients = [u for u in range(len(self.states)) if u not in missing]
        self.sent = [self.method.broadcast(self.server, u) for u in clients]
        replies = []
        for client, sent in zip(clients, self.sent, strict=True):
            round_id = RoundId(0, client, experience, round_, round_ == self.rounds - 1)
            result = self.worker.train_client(round_id, self.states[client], sent)
            self.states[client] = result.reply.state
            replies.append(result.reply)
        self.log = Log()
        self.server = self.method.aggregate(self.server, replies, self.log)
        return replies

    def experience(self, experience: int, missing: tuple[int, ...] = ()) -> list[Reply]:
        """The replies of the last round of an experience, in which some clients are missing."""
        for round_ in range(self.rounds - 1):
            self.round(experience, round_)
        return self.round(experience, self.rounds - 1, missing)

    def arrived(self, client: int, experience: int, round_: int = 0) -> ClientRound:
        """A client round whose client has received what it is sent now."""
        sent = self.method.broadcast(self.server, client)
        round_id = RoundId(0, client, experience, round_, round_ == self.rounds - 1)
        client_round = ClientRound(round_id, self.plan, self.states[client], sent)
        self.method.receive(client_round)
        return client_round


# ------------------------------------------------------------------ by hand

IMPLICIT: dict[str, Any] = {
    "adaptive": 0.4,
    "sparsity": 0.3,
    "lambda1": 0.02,
    "lambda2": 5.0,
    "weight_decay": 0.1,
}


def sigmoid(m: Array) -> Array:
    """The shares of B, one row per channel.  # [4, 1]"""
    return 1 / (1 + np.exp(-m[:, None]))


class ByHand:
    """One client's parts of theta [4, 64] for a linear encoder with four features."""

    def __init__(self, client: int, server: dict[str, Any]) -> None:
        self.client, self.B = client, server["B"]
        self.tasks: list[dict[str, Any]] = []

    def start(self, task: int, server: dict[str, Any]) -> None:
        """What a task starts with."""
        self.anchor = self.B  # before the received one is loaded
        self.B = np.where(server["sent"] == 0, self.B, server["sent"])
        self.rest = {name: value.copy() for name, value in server["rest"].items()}
        draw = [generator(0, self.client, task, 0, name) for name in ("mask", "attention")]
        m = torch.randn(4, generator=draw[0]).double().numpy() / 2  # variance 1 / 4
        self.KB = server["KB"]
        self.alpha = torch.randn(len(self.KB), generator=draw[1]).double().numpy()
        self.alpha /= max(1, len(self.KB)) ** 0.5
        self.tasks.append({"m": m, "A": 0.4 * self.B})

    def theta(self) -> Array:
        """The current task's weights."""
        task = self.tasks[-1]
        foreign = sum((a * K for a, K in zip(self.alpha, self.KB, strict=True)), np.zeros((4, 64)))
        return self.B * sigmoid(task["m"]) + task["A"] + foreign

    def step(self, x: Array, labels: Tensor) -> None:
        """One SGD step at a learning rate of 0.1 on all parts."""
        own, rest, theta = self.tasks[-1], self.rest, self.theta()
        h = x @ theta.T + rest["b"]
        z = np.exp(h @ rest["V"].T + rest["c"])
        G = (z / z.sum(1, keepdims=True) - np.eye(10)[labels.numpy()]) / len(labels)
        g, s = (G @ rest["V"]).T @ x, sigmoid(own["m"])
        dB = g * s + (0.1 * self.B if len(self.tasks) == 1 else 0)
        dm = (g * self.B).sum(1) * (s * (1 - s))[:, 0] + 0.1 * own["m"]
        dA = g + 0.1 * own["A"] + 0.02 * np.sign(own["A"])
        dalpha = np.array([(g * K).sum() for K in self.KB])
        drest = {"b": (G @ rest["V"]).sum(0), "V": G.T @ h, "c": G.sum(0)}
        self.rest = {name: rest[name] - 0.1 * drest[name] for name in rest}
        self.B = self.B - 0.1 * dB
        own["m"], own["A"] = own["m"] - 0.1 * dm, own["A"] - 0.1 * dA
        self.alpha = self.alpha - 0.1 * dalpha
        if len(self.tasks) == 2:
            self.retain(self.tasks[0])

    def retain(self, past: dict[str, Any]) -> None:
        """(I + 0.5 H) (b, a) = (b', a') where (b, a) H (b, a) = (b s + a)^2, for each weight."""
        past.setdefault("before", past["A"])
        b, a = self.B - self.anchor, past["A"] - past["before"]
        s = np.broadcast_to(sigmoid(past["m"]), b.shape)
        systems = np.stack([np.stack([1 + 0.5 * s * s, 0.5 * s]), np.stack([0.5 * s, 1.5 + 0 * s])])
        solved = np.linalg.solve(systems.transpose(2, 3, 0, 1), np.stack([b, a], -1)[..., None])
        self.B, past["A"] = self.anchor + solved[..., 0, 0], past["before"] + solved[..., 1, 0]

    def end(self) -> None:
        """The task keeps what it needs besides B."""
        own = self.tasks[-1]
        own["foreign"] = self.theta() - self.B * sigmoid(own["m"]) - own["A"]
        own["rest"] = self.rest


def thresholded(A: Array) -> Array:
    """A without the elements of at most lambda1."""
    return np.where(np.abs(A) > 0.02, A, 0)


def average(server: dict[str, Any], clients: list[ByHand], sizes: list[int]) -> dict[str, Any]:
    """Each channel of B over those who keep it: |m| above the second smallest of four."""
    keep = [np.abs(u.tasks[-1]["m"]) > np.sort(np.abs(u.tasks[-1]["m"]))[1] for u in clients]
    count = np.sum(keep, 0)[:, None]
    total = sum(u.B * k[:, None] for u, k in zip(clients, keep, strict=True))
    B = np.where(count > 0, total / np.maximum(count, 1), server["B"])
    rest = {name: np.average([u.rest[name] for u in clients], 0, sizes) for name in server["rest"]}
    KB = [thresholded(u.tasks[-1]["A"]) for u in clients]
    return {"B": B, "sent": B * (count > 0), "rest": rest, "KB": KB, "count": count[:, 0]}


def linear_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the network linear: an encoder [4, 64] with biases, then the head [10, 4]."""

    def encoder(network: Any, shape: Any) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), 4

    monkeypatch.setitem(networks.ENCODERS, "mlp", encoder)


def flat(B: Array, rest: dict[str, Array]) -> Array:
    """The parameters in the order of the network.  # [310]"""
    return np.concatenate([B.ravel(), rest["b"], rest["V"].ravel(), rest["c"]])


def accuracy_by_hand(theta: Array, rest: dict[str, Array], x: Array, labels: Tensor) -> float:
    """The accuracy among the classes of the task."""
    logits = (x @ theta.T + rest["b"]) @ rest["V"].T + rest["c"]
    own = np.unique(labels.numpy())
    return float((own[logits[:, own].argmax(1)] == labels.numpy()).mean())


def test_two_tasks_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A linear encoder in full batches, two clients, two tasks of one round with two steps.

    theta = B s + A + sum_k alpha_k KB_k with s = sigmoid(m) per row. With g = dL/dtheta the steps
    are along dB = g s (+ wd B in the first task), dm = s (1 - s) sum_j g_j B_j + wd m,
    dA = g + wd A + lambda1 sign(A), dalpha_k = <g, KB_k>. In the second task the implicit step of
    lr lambda2 = 0.5 follows, which holds B s_0 + A_0 where it was with the client's own B. Of
    four channels two travel, those with |m| above the value of rank floor(0.3 x 4) = 1; each is
    averaged over those who sent it, biases and head over all by samples. A where it is above
    lambda1 travels after each task, and is the knowledge base of the next. Personal models are
    composed with the last average of B and A above lambda1.
    """
    linear_encoder(monkeypatch)
    split, training = {"clients": 2, "tasks": 2}, {**FULL_BATCH, "epochs": 2}
    experiment = tiny("fedweit", split=split, training=training, **IMPLICIT)
    dataset, whole = experiment.dataset(), plan(experiment)
    few = {(0, t): tuple(whole.train_indices(dataset, 0, t)[:7].tolist()) for t in range(2)}
    plan_ = small.with_train(whole, few)
    worker = small.worker(experiment, plan_)
    start = worker.initial_states(0)[0]["parameters"].double().numpy()
    parts = {"b": start[256:260], "V": start[260:300].reshape(10, 4), "c": start[300:]}
    B = start[:256].reshape(4, 64)
    server: dict[str, Any] = {"B": B, "sent": B, "rest": parts, "KB": []}
    clients, counts = [ByHand(u, server) for u in range(2)], []
    for task in range(2):
        sizes = []
        for u in clients:
            u.start(task, server)
            own = plan_.train_indices(dataset, u.client, task)
            x, labels = inputs(worker, dataset.x_train[own]), dataset.y_train[own]
            for _ in range(2):
                u.step(x, labels)
            u.end()
            sizes.append(len(own))
        server = average(server, clients, sizes)
        counts += server["count"].tolist()
    assert {0, 1, 2} <= set(counts)  # channels of nobody, of one client, of both
    for u in clients:
        past = u.tasks[0]
        assert np.abs(past["A"] - past["before"]).max() > 1e-3 < np.abs(u.tasks[1]["foreign"]).max()
        assert 0.1 < (thresholded(past["A"]) == 0).mean() < 0.9

    record = run(experiment, plan_, resume=tmp_path)
    state = small.saved(experiment, tmp_path)
    actual = state["server"]
    np.testing.assert_allclose(actual["parameters"], flat(server["B"], server["rest"]), **CLOSE)
    np.testing.assert_allclose(actual["base"], server["sent"].ravel(), **CLOSE)
    for u, own in zip(clients, state["clients"], strict=True):
        np.testing.assert_allclose(own["base"], u.B.ravel(), **CLOSE)
        np.testing.assert_allclose(own["attention"], u.alpha, **CLOSE)
        B = np.where(server["sent"] == 0, u.B, server["sent"])
        for name, task in enumerate(u.tasks):
            kept = own["tasks"][str(name)]
            np.testing.assert_allclose(kept["mask"], task["m"], **CLOSE)
            np.testing.assert_allclose(kept["adaptive"], task["A"].ravel(), **CLOSE)
            np.testing.assert_allclose(kept["foreign"], task["foreign"].ravel(), **CLOSE)
            np.testing.assert_allclose(kept["rest"], flat(B, task["rest"])[256:], **CLOSE)
            theta = B * sigmoid(task["m"]) + thresholded(task["A"]) + task["foreign"]
            test = plan_.test_indices(dataset, u.client, name)
            x = inputs(worker, dataset.x_test[test])
            expected = accuracy_by_hand(theta, task["rest"], x, dataset.y_test[test])
            assert record.accuracy("personal", "task")[1, u.client, name] == pytest.approx(expected)


# ------------------------------------------------------------------ what is sent

LENET = [(20, 3, 5, 5), (50, 20, 5, 5), (800, 3200), (500, 800)]  # of the published network
KEPT = [13, 34, 559, 349]


def test_the_bytes_of_the_published_network() -> None:
    """13, 34, 559 and 349 of its 20, 50, 800 and 500 channels: 69.8 % of its weights."""
    channels = Channels(LENET, [True] * 4)
    assert (channels.weights, channels.count) == (2_986_500, 1_370)
    kept = channels.largest(torch.randn(1370, generator=generator("m")).abs(), 0.3)
    assert [int(part.sum()) for part in kept.split([20, 50, 800, 500])] == KEPT
    assert (
        int(channels.expand(kept).sum())
        == 2_085_975
        == sum(
            count * torch.Size(shape[1:]).numel() for count, shape in zip(KEPT, LENET, strict=True)
        )
    )
    assert len(pack_bits(kept)) == 172


@pytest.mark.parametrize("head", ["shared", "task"])
def test_a_round_costs_what_is_kept(head: str) -> None:
    """Down B, up 22 of 32 channels with 4 bytes of bits; the rest only where it is shared. After a
    task A as well: values and one bit for each weight; with the next task all clients' A."""
    federation = Federation(tiny("fedweit", head=head))
    rest = 4 * R if head == "shared" else 0
    down = 4 * N + rest
    up = 4 * 22 * 64 + 4 + rest
    for experience in range(2):
        for round_ in range(2):
            first, last = round_ == 0, round_ == 1
            known = [tree_bytes(sparse) for sparse in federation.server["knowledge"].values()]
            replies = federation.round(experience, round_)
            bits = 2 if first else 0  # of ten classes
            expected = down + bits + (sum(known) if first else 0)
            assert [tree_bytes(sent) for sent in federation.sent] == [expected] * 4
            assert len(known) == (4 if experience else 0)
            for reply in replies:
                values = reply.message.get("values", torch.empty(0))
                assert ("values" in reply.message) == last
                places = N // 8 if last else 0
                assert tree_bytes(reply.message) == up + 4 * len(values) + places


def test_few_values_are_sent_with_indices() -> None:
    """4 bytes each, less than a bit for each of 2,048 weights as long as they are under 64."""
    weights = torch.zeros(N)
    for count in (0, 1, 63, 64, 65):
        weights[:count] = -1.0
        sent = _sparse(weights, 0.5)
        assert sent["places"].nbytes == min(4 * count, N // 8)
        assert torch.equal(_dense(**sent, size=N), weights)


def test_the_threshold_itself_is_not_sent() -> None:
    sent = _sparse(torch.tensor([0.5, -0.5, -0.75, 0.0, 0.625]), 0.5)
    assert sent["values"].tolist() == [-0.75, 0.625]


def base_message(federation: Federation, kept: list[int], value: float) -> dict[str, Tensor]:
    """A message with some channels of B, all of one value."""
    mask = torch.zeros(C, dtype=torch.bool)
    mask[kept] = True
    base = torch.full((64 * len(kept),), value)
    return {"base": base, "kept": pack_bits(mask), "rest": federation.server["rest"]}


def test_channels_are_averaged_over_those_who_sent_them() -> None:
    """Whatever their numbers of images; a client without images has no say."""
    federation = Federation(tiny("fedweit"))
    server, log = federation.server, Log()
    sent = [([0, 1], 1.0, 5), ([1, 2], 3.0, 50), ([2, 3], 9.0, 0)]
    replies = [
        Reply(u, {}, base_message(federation, kept, value), samples, 1, 0.0)
        for u, (kept, value, samples) in enumerate(sent)
    ]
    for order in permutations(replies):
        after = federation.method.aggregate(server, list(order), log)
        rows = after["base"].view(C, 64)
        for channel, value in {0: 1.0, 1: 2.0, 2: 3.0, 3: 0.0, 31: 0.0}.items():
            assert (rows[channel] == value).all()
        model = after["parameters"][:N].view(C, 64)
        assert torch.equal(model[:3], rows[:3])
        assert torch.equal(model[3:], server["parameters"][:N].view(C, 64)[3:])
    assert log.numbers["channels nobody kept"] == 29


def test_the_servers_learning_rate_applies_to_what_was_sent() -> None:
    """theta + 0.5 (avg - theta); what nobody sent is still sent as zeros."""
    federation = Federation(tiny("fedweit", server_lr=0.5))
    server = federation.server
    reply = Reply(0, {}, base_message(federation, [4], 2.0), 7, 1, 0.0)
    after = federation.method.aggregate(server, [reply], Log())
    rows, before = after["base"].view(C, 64), server["parameters"][:N].view(C, 64)
    torch.testing.assert_close(rows[4], 1 + before[4] / 2)
    assert not rows[:4].any() and not rows[5:].any()


def same_masks(monkeypatch: pytest.MonkeyPatch, value: float = 0.0) -> None:
    """Give all channels of all clients one mask."""
    monkeypatch.setattr(
        Channels, "draw_masks", lambda channels, draw: torch.full((channels.count,), value)
    )


def test_of_equal_masks_none_is_above_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of B travels, so each client goes on with its own."""
    same_masks(monkeypatch)
    federation = Federation(tiny("fedweit", training={"rounds": 3}, mask="decay"))
    start = federation.server["parameters"][:N]
    for round_ in range(2):
        replies = federation.round(0, round_)
        assert all(len(reply.message["base"]) == 0 for reply in replies)
        assert torch.equal(federation.server["parameters"][:N], start)
        assert not federation.server["base"].any()
        for client, state in enumerate(federation.states):
            arrived = federation.arrived(client, 0, round_ + 1)
            assert torch.equal(arrived.scratch["weights"].base, state["base"])
            assert not torch.equal(state["base"], start)


def test_what_a_client_keeps() -> None:
    """B, target of past tasks, alpha, KB and bits; for each task m, A, alpha KB and the rest."""
    federation = Federation(tiny("fedweit"))
    for experience in range(3):
        known = [tree_bytes(sparse) for sparse in federation.server["knowledge"].values()]
        federation.experience(experience)
        expected = N + (experience + 1) * (C + 2 * N + R) + (N + 4 if experience else 0)
        assert tree_bytes(federation.states[0]) == 4 * expected + sum(known) + 2


# ------------------------------------------------------------------ the knowledge base


@pytest.mark.parametrize("clients", [1, 3])
def test_the_knowledge_base_is_every_clients_last_adaptive_part(clients: int) -> None:
    """In the order of clients, the own one too; the first task has none and no attention."""
    federation = Federation(tiny("fedweit", split={"clients": clients}))
    for experience in range(3):
        weights = federation.arrived(0, experience).scratch["weights"]
        assert weights.knowledge.shape == (clients if experience else 0, N)
        assert len(weights.attention) == len(weights.knowledge)
        for client, row in enumerate(weights.knowledge):
            own = federation.states[client]["tasks"][str(experience - 1)]["adaptive"]
            expected = torch.where(own.abs() > 1e-3, own, 0)
            assert torch.equal(row, expected) and 0 < int((row == 0).sum()) < N
        federation.experience(experience)


def test_attention_is_drawn_once_in_a_task_and_trained() -> None:
    federation = Federation(tiny("fedweit"))
    federation.experience(0)
    drawn = federation.arrived(2, 1).scratch["weights"].attention
    federation.round(1, 0)
    trained = federation.states[2]["attention"]
    assert not torch.equal(trained, drawn)
    assert torch.equal(federation.arrived(2, 1, 1).scratch["weights"].attention, trained)


def test_who_misses_the_last_round_leaves_an_older_adaptive_part() -> None:
    federation = Federation(tiny("fedweit"))
    federation.experience(0, missing=(1,))
    assert list(federation.server["knowledge"]) == ["0", "2", "3"]
    federation.experience(1)
    older = small.copied(federation.server["knowledge"]["3"])
    federation.experience(2, missing=(3,))
    small.assert_equal_trees(federation.server["knowledge"]["3"], older)
    assert len(federation.states[3]["tasks"]) == 3  # its own model of the task exists


def test_a_client_without_images_adds_nothing() -> None:
    experiment = tiny("fedweit", split=FEW)
    federation = Federation(experiment, small.awkward(experiment))
    for experience in range(3):
        federation.experience(experience)
    assert federation.states[2]["tasks"] == {}
    assert sorted(federation.server["knowledge"]) == ["0", "1", "3"]


def test_small_adaptive_parts_are_neither_sent_nor_used() -> None:
    """With |A| <= lambda1 everywhere the knowledge base is zero, and evaluation ignores A."""
    federation = Federation(tiny("fedweit", lambda1=0.5))
    replies = federation.experience(0)
    assert all(tree_bytes({"A": reply.message["values"]}) == 0 for reply in replies)
    client_round = federation.arrived(0, 1)
    assert not client_round.scratch["weights"].knowledge.any()
    scores = federation.method.personal_scores(client_round)
    task = federation.states[0]["tasks"]["0"]
    assert 0 < task["adaptive"].abs().max() <= 0.5
    federation.states[0]["tasks"]["0"] = {**task, "adaptive": torch.zeros(N)}
    again = federation.method.personal_scores(client_round)
    assert torch.equal(again.nan_to_num(2), scores.nan_to_num(2))


# ------------------------------------------------------------------ past tasks


def records(federation: Federation, names: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """Copies of some parts of all clients' first task."""
    states = federation.states
    return [{name: state["tasks"]["0"][name].clone() for name in names} for state in states]


@pytest.mark.parametrize("retroactive", [True, False])
def test_the_model_of_a_past_task_stays(retroactive: bool) -> None:
    """Mask, attention, rest and buffers bit for bit; A only if it is not trained further."""
    names = ("mask", "foreign", "rest", "buffers") + (() if retroactive else ("adaptive",))
    federation = Federation(tiny("fedweit", network=BATCH_NORM, split=FEW, retroactive=retroactive))
    federation.experience(0)
    before = records(federation, names)
    for experience in (1, 2):
        federation.experience(experience)
    small.assert_equal_trees(records(federation, names), before)


def past_thetas(federation: Federation) -> list[Tensor]:
    """B sigmoid(m) + A of the first task with each client's own B."""
    thetas = []
    for state in federation.states:
        task = state["tasks"]["0"]
        gate = federation.method.channels.expand(task["mask"].sigmoid())
        thetas.append(state["base"] * gate + task["adaptive"])
    return thetas


@pytest.mark.parametrize("retroactive", [True, False])
def test_lambda2_holds_the_weights_of_past_tasks(retroactive: bool) -> None:
    """The larger, the less they move in the next task."""
    moved = []
    for lambda2 in (0.0, 1.0, 1e5):
        federation = Federation(tiny("fedweit", lambda2=lambda2, retroactive=retroactive))
        federation.experience(0)
        before = past_thetas(federation)
        federation.experience(1)
        pairs = zip(past_thetas(federation), before, strict=True)
        moved.append(sum(float((after - start).norm()) for after, start in pairs))
    assert moved == sorted(moved, reverse=True) and moved[2] < 1e-3 < moved[0]


def test_weights_are_held_where_they_were_before_the_task() -> None:
    """The anchor is the client's own B before it loads the received one, in all rounds."""
    federation = Federation(tiny("fedweit", training={"rounds": 3}))
    federation.experience(0)
    own = [state["base"].clone() for state in federation.states]
    before = past_thetas(federation)
    for round_ in range(2):
        for client, base in enumerate(own):
            past: PastWeights = federation.arrived(client, 1, round_).scratch["past"]
            task = federation.states[client]["tasks"]["0"]
            gate = federation.method.channels.expand(task["mask"].sigmoid())
            torch.testing.assert_close(
                past.target * gate + task["adaptive"], before[client], **CLOSE
            )
            assert torch.equal(past.target, base) == (round_ == 0)
        federation.round(1, round_)


def test_the_first_task_alone_decays_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """At gradient zero: B shrinks by 1 - lr wd with each step of the first task, A and m always."""
    monkeypatch.setattr(
        FedWeIT, "loss", lambda self, round_, images, labels: 0 * self.work.classifier(images).sum()
    )
    experiment = tiny("fedweit", lambda1=0.0, lambda2=0.0, weight_decay=0.5, sparsity=0.0)
    federation = Federation(experiment)
    for experience in range(2):
        weights = federation.arrived(0, experience).scratch["weights"]
        start = [part.clone() for part in (weights.mask, weights.adaptive, weights.base)]
        (reply, *_) = federation.round(experience, 0)
        shrunk = (1 - 0.1 * 0.5) ** reply.sgd_steps
        state = reply.state
        own = state["tasks"][str(experience)]
        after = [own["mask"], own["adaptive"], state["base"]]
        factors = [shrunk, shrunk, 1.0 if experience else shrunk]
        for value, begin, factor in zip(after, start, factors, strict=True):
            torch.testing.assert_close(value, factor * begin, **CLOSE)
        federation.round(experience, 1)


@pytest.mark.parametrize("mask", ["trained", "decay"])
def test_only_a_trained_mask_learns_from_the_loss(mask: str) -> None:
    federation = Federation(tiny("fedweit", mask=mask, weight_decay=0.01))
    start = federation.arrived(0, 0).scratch["weights"].mask.clone()
    (reply, *_) = federation.round(0, 0)
    shrunk = (1 - 0.1 * 0.01) ** reply.sgd_steps * start
    after = reply.state["tasks"]["0"]["mask"]
    assert torch.allclose(after, shrunk, rtol=0, atol=1e-6) == (mask == "decay")


# ------------------------------------------------------------------ models and evaluation


def test_what_is_not_shared_is_each_tasks_own() -> None:
    """Biases and head start as they were initialised, and no client sends them."""
    federation = Federation(tiny("fedweit", head="task"))
    start = federation.states[0]["rest"]
    for experience in range(3):
        weights = federation.arrived(1, experience)
        live = federation.worker.work.model.parameters
        assert torch.equal(federation.method.channels.gather(live, decomposed=False), start)
        replies = federation.round(experience, 0)
        assert not any("rest" in reply.message for reply in replies)
        own = federation.states[1]["tasks"][str(weights.task)]["rest"]
        federation.arrived(1, experience, 1)
        assert torch.equal(federation.method.channels.gather(live, decomposed=False), own)
        assert not torch.equal(own, start)
        federation.round(experience, 1)
    assert federation.method.models == ("personal", "local")


def test_a_task_that_comes_again_goes_on_with_its_own_parts() -> None:
    federation = Federation(tiny("fedweit", split={"cycles": 2, **FEW}))
    for experience in range(3):
        federation.experience(experience)
    state = federation.states[0]
    weights = federation.arrived(0, 3).scratch["weights"]
    assert torch.equal(weights.mask, state["tasks"]["0"]["mask"])
    assert torch.equal(weights.adaptive, state["tasks"]["0"]["adaptive"])
    others = torch.stack([state["tasks"][name]["mask"].sigmoid() ** 2 for name in ("1", "2")])
    past: PastWeights = federation.arrived(0, 3).scratch["past"]
    q = 0.1 * 100 / (1 + 0.1 * 100) * federation.method.channels.expand(others.sum(0))
    torch.testing.assert_close(past.pull, q / (1 + q), **CLOSE)
    federation.experience(3)
    assert list(federation.states[0]["tasks"]) == ["0", "1", "2"]


def test_a_task_not_learnt_yet_is_evaluated_with_the_received_model() -> None:
    federation = Federation(tiny("fedweit"))
    federation.experience(0)
    client_round = federation.arrived(0, 1)
    scores = federation.method.personal_scores(client_round)
    work = federation.worker.work
    base = federation.method.merged_base(client_round)
    work.model.load(federation.method.channels.join(base, client_round.message["rest"]))
    expected = score(work, federation.plan, [0], 1)
    assert torch.equal(scores[2, 0, 1:], expected[2, 0, 1:])
    assert scores[:2].isnan().all()  # a model that is told the task has no other accuracy


def test_the_global_model_is_the_base_with_the_averaged_rest() -> None:
    """With all channels that anybody sent; the rest is averaged by samples."""
    experiment = tiny("fedweit", split=FEW)
    federation = Federation(experiment, small.awkward(experiment))
    replies = federation.round(0, 0)
    server, channels = federation.server, federation.method.channels
    unsent = channels.gather(server["parameters"]) != server["base"]
    assert not server["base"][unsent].any() and not unsent.all()
    assert torch.equal(channels.gather(server["parameters"], decomposed=False), server["rest"])
    sizes = torch.tensor([reply.samples for reply in replies])
    assert sizes.tolist() == [1, 20, 0, 40]
    rests = torch.stack([reply.message["rest"] for reply in replies])
    torch.testing.assert_close(server["rest"], (sizes[:, None] * rests).sum(0) / 61, **CLOSE)


def test_each_tasks_model_beats_the_one_of_the_last_task() -> None:
    """On the tasks of all clients, after the last one."""
    record = run(tiny("fedweit", training={"rounds": 4}))
    personal, local = (record.accuracy(name, "task")[-1].mean() for name in ("personal", "local"))
    assert personal > 0.95 and personal > local + 0.05


def test_the_released_variant_trains() -> None:
    record = run(tiny("fedweit", training={"rounds": 4}, **CODE))
    assert record.accuracy("personal", "task")[-1].mean() > 0.9
    assert np.isnan(record.scores["global"]).all() and record.weights == {}


@pytest.mark.parametrize("head", ["shared", "task"])
@pytest.mark.parametrize("buffers", ["shared", "local", "frozen"])
def test_rounds_that_are_missed_do_no_harm(buffers: str, head: str) -> None:
    """One image, one class or none, two cycles, half of the clients in a round."""
    training = {"participation": 0.5, "dropout": 0.3, "buffers": buffers, "momentum": 0.9}
    split = {"cycles": 2, **FEW}
    experiment = tiny("fedweit", network=BATCH_NORM, split=split, training=training, head=head)
    record = run(experiment, small.awkward(experiment))
    assert np.isfinite(record.accuracy("personal", "task")).all()
    assert all(entry["loss"] is None or np.isfinite(entry["loss"]) for entry in record.history)


# ------------------------------------------------------------------ bad input
