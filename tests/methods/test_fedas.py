"""FedAS: parameter alignment, client synchronisation by Fisher traces, local heads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, BN_B, BN_P, P, plan, run, tiny
from torch import Tensor, nn

from stamp_core.client.workspace import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound, Log, Reply
from stamp_core.methods.fedas import FedAS
from stamp_core.models import networks as models
from stamp_core.models.flat import weighted_average

HEAD = 32 * 10 + 10  # of the small network
BASE = P - HEAD
BN_HEAD = 8 * 10 + 10
FEW = {"images_per_class": 20}
FEDPER: dict[str, Any] = {"align": False, "weights": "samples"}
ZERO = "synchronisation: all traces are zero, weighted by samples"
INFINITE = "synchronisation: a trace is not finite, weighted by samples"


class Federation:
    """A worker with its method, the server's state and the clients' states."""

    def __init__(self, experiment: Any, plan_: Plan | None = None) -> None:
        self.experiment, self.plan = experiment, plan_ or plan(experiment)
        self.dataset = experiment.dataset()
        self.worker: Worker = small.worker(experiment, self.plan)
        self.model = self.worker.work.model
        self.server, self.states, *_ = self.worker.initial_states(self.plan.seed)
        assert isinstance(self.worker.method, FedAS)
        self.method = self.worker.method

    def client_round(self, client: int, experience: int, round_: int = 0) -> ClientRound:
        """A client round that is about to begin."""
        sent = self.method.broadcast(self.server, client)
        round_id = RoundId(0, client, experience, round_)
        return ClientRound(round_id, self.plan, self.states[client], sent)

    def train(self, client: int, experience: int, round_: int = 0) -> Reply:
        """A client round, after which its state is the new one."""
        client_round = self.client_round(client, experience, round_)
        reply = self.worker.train_client(
            client_round.round_id, client_round.state, client_round.message
        ).reply
        self.states[client] = reply.state
        return reply

    def train_all(self) -> "Federation":
        """A round of the first task with all clients."""
        replies = [self.train(client, 0) for client in range(len(self.states))]
        self.server = self.method.aggregate(self.server, replies, Log())
        return self


# --- by hand


class ByHand:
    """Two linear layers h = A x + a, logits = V h + c, and all that a client does with them."""

    def __init__(self, experiment: Any, plan_: Plan, client: int) -> None:
        dataset = experiment.dataset()
        own = plan_.train_indices(dataset, client, 0)
        x = dataset.x_train[own].numpy().reshape(-1, 64) / 255
        self.x = (x - float(dataset.mean)) / float(dataset.std)
        self.y = dataset.y_train[own].numpy()

    def aligned(self, base: list[Any], old: list[Any]) -> list[Any]:
        """The encoder after one full batch of alignment with learning rate 1 / 4."""
        h, before = (self.x @ each[0].T + each[1] for each in (base, old))
        back = np.zeros_like(h)
        for label in np.unique(self.y):
            own = self.y == label
            back[own] = 2 * (h[own] - before[own].mean(0)) / (3 * own.sum())
        return [base[0] - 0.25 * back.T @ self.x, base[1] - 0.25 * back.sum(0)]

    def gradient(self, base: list[Any], head: list[Any]) -> list[Any]:
        """That of the mean cross-entropy with respect to A, a, V, c."""
        h = self.x @ base[0].T + base[1]
        e = np.exp(h @ head[0].T + head[1])
        g = (e / e.sum(1, keepdims=True) - np.eye(10)[self.y]) / len(self.y)
        back = g @ head[0]
        return [back.T @ self.x, back.sum(0), g.T @ h, g.sum(0)]


def test_two_rounds_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two clients with 7 and all images, full batches throughout; F = 3 features.

    Prototype: p_c = mean over class c of A_old x + a_old. Alignment: sum_c mean_{i in c, j}
    (h_ij - p_cj)^2 has dL/dh_i = 2 (h_i - p_c) / (F n_c) =: B  [n, F], so dL/dA = B^T x, dL/da =
    sum B. Training: with G = (softmax - onehot) / n, dL/dV = G^T h, dL/dc = sum G, dL/dA =
    (G V)^T x, dL/da = sum G V. Trace: the squared norm of all four at the trained model. The server
    averages A and a by traces. Old is the first model in the first round, then the client's own.
    """

    def two_layers(network: Any, shape: Any) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), 3

    monkeypatch.setitem(models.ENCODERS, "mlp", two_layers)
    split, training = {"clients": 2, "tasks": 1}, {"rounds": 2, "batch_size": 1000}
    params = {"align_lr": 0.25, "align_batch_size": 1000}
    experiment = tiny("fedas", split=split, training=training, **params)
    whole = plan(experiment)
    few = whole.train_indices(experiment.dataset(), 0, 0)[:7].tolist()
    plan_ = small.with_train(whole, {(0, 0): tuple(few)})
    hands = [ByHand(experiment, plan_, client) for client in range(2)]

    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    start = [p.detach().double().numpy() for p in net.parameters()]
    base, own, heads = start[:2], [start[:2]] * 2, [start[2:]] * 2
    for _ in range(2):
        traces = []
        for u, hand in enumerate(hands):
            aligned = hand.aligned(base, own[u])
            model, gradient = [*aligned, *heads[u]], hand.gradient(aligned, heads[u])
            model = [value - 0.1 * g for value, g in zip(model, gradient, strict=True)]
            own[u], heads[u] = model[:2], model[2:]
            traces.append(sum(float((g**2).sum()) for g in hand.gradient(own[u], heads[u])))
        one, two = (trace / sum(traces) for trace in traces)
        base = [one * a + two * b for a, b in zip(*own, strict=True)]
    assert 0.05 < one < 0.95 and abs(one - 7 / (7 + len(hands[1].y))) > 0.05

    record = run(experiment, plan_, resume=tmp_path)
    state = small.saved(experiment, tmp_path)
    actual = [state["server"]["parameters"], *(each["base"] for each in state["clients"])]
    actual += [each["head"] for each in state["clients"]]
    for vector, parts in zip(actual, [[*base, *start[2:]], *own, *heads], strict=True):
        expected = np.concatenate([part.ravel() for part in parts])
        np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-6)
    notes = record.history[-1]["notes"]
    assert notes["trace"] == pytest.approx(sum(traces) / 2, rel=1e-5)
    assert notes["trace, largest share"] == pytest.approx(max(one, two), rel=1e-5)


def test_without_alignment_and_traces_it_is_fedper_bit_for_bit(tmp_path: Path) -> None:
    """Encoders averaged by samples, local heads: written again with torch's own optimiser."""
    training = {"momentum": 0.9, "weight_decay": 0.01}
    split = {"clients": 2, "tasks": 2, **FEW}
    experiment = tiny("fedas", split=split, training=training, **FEDPER)
    dataset, whole = experiment.dataset(), plan(experiment)
    few = whole.train_indices(dataset, 0, 1)[:9].tolist()
    plan_ = small.with_train(whole, {(0, 1): tuple(few)})
    normalise, network = small.worker(experiment, plan_).work.normalise, experiment.setting.network
    nets = [models.build_network(network, (1, 8, 8), 10, seed=0) for _ in range(2)]
    for experience in range(2):
        own = [plan_.train_indices(dataset, u, experience) for u in range(2)]
        for round_ in range(2):
            for u, net in enumerate(nets):
                sgd = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=0.01)
                draw = generator(0, u, experience, round_, "order")
                for batch in own[u][torch.randperm(len(own[u]), generator=draw)].split(16):
                    sgd.zero_grad()
                    x, y = normalise(dataset.x_train[batch]), dataset.y_train[batch]
                    F.cross_entropy(net(x), y).backward()
                    sgd.step()
            flat = [nn.utils.parameters_to_vector(net.encoder.parameters()) for net in nets]
            samples = [float(len(each)) for each in own]
            mean = weighted_average([each.detach() for each in flat], samples)
            for net in nets:
                nn.utils.vector_to_parameters(mean.clone(), net.encoder.parameters())
    record = run(experiment, plan_, resume=tmp_path)
    state = small.saved(experiment, tmp_path)
    assert torch.equal(state["server"]["parameters"][:BASE], mean)
    for net, client in zip(nets, state["clients"], strict=True):
        head = nn.utils.parameters_to_vector(net.head.parameters()).detach()
        assert torch.equal(client["head"], head)
    assert np.isnan(record.accuracy("global")).all() and record.weights == {}


# --- alignment


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_prototypes_are_class_means_of_the_clients_own_encoder(
    policy: str, network: dict[str, Any]
) -> None:
    """With the parameters and the running statistics that the client itself has trained."""
    experiment = tiny("fedas", network=network, split=FEW, training={"buffers": policy})
    fed = Federation(experiment).train_all()
    actual, state = fed.method.prototypes(fed.client_round(1, 1)), fed.states[1]
    net = fed.worker.work.network(0).eval()
    nn.utils.vector_to_parameters(state["base"].clone(), net.encoder.parameters())
    if network == BATCH_NORM:
        net.encoder[1].running_mean.copy_(state["base buffers"][:4])  # type: ignore[index]
        net.encoder[1].running_var.copy_(state["base buffers"][4:])  # type: ignore[index]
        unchanged = torch.equal(state["base buffers"], fed.server["buffers"])
        assert unchanged == (policy == "frozen")
    own = fed.plan.train_indices(fed.dataset, 1, 1)
    features = net.encoder(small.normalised(experiment, fed.dataset.x_train[own])).detach()
    labels = fed.dataset.y_train[own]
    assert len(labels.unique()) == 2
    expected = torch.zeros(10, features.shape[1])
    for label in labels.unique():
        expected[label] = features[labels == label].mean(0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_alignment_changes_the_encoder_alone_and_towards_the_prototypes(policy: str) -> None:
    """The features come nearer; head and running statistics stay."""
    experiment = tiny("fedas", network=BATCH_NORM, split=FEW, training={"buffers": policy})
    fed = Federation(experiment).train_all()
    client_round = fed.client_round(2, 1)
    own = fed.plan.train_indices(fed.dataset, 2, 1)
    wanted = fed.method.prototypes(client_round)[fed.dataset.y_train[own]]
    errors, vectors = [], []
    for load in (fed.method.load_unaligned, fed.method.receive):
        load(client_round)
        vectors.append((fed.model.parameters.clone(), fed.model.buffers.clone()))
        work = fed.worker.work
        features = work.outputs(fed.dataset.x_train[own], work.classifier.encoder)
        errors.append(float((features - wanted).square().mean()))
    assert errors[1] < 0.95 * errors[0]
    (before, statistics), (after, same) = vectors
    base = fed.worker.work.encoder_size
    assert torch.equal(before[:base], fed.server["parameters"][:base])
    assert torch.equal(before[base:], fed.states[2]["head"])
    assert torch.equal(after[base:], before[base:]) and torch.equal(statistics, same)
    expected = fed.states[2]["buffers"] if policy == "local" else fed.server["buffers"]
    assert torch.equal(same, expected)
    assert client_round.log.seconds.keys() == {"alignment"}


def test_alignment_takes_one_sgd_step_a_batch() -> None:
    """Two batches in an order of the client round's own; the loss sums the means of the classes."""
    experiment = tiny("fedas", split=FEW, align_lr=0.2, align_batch_size=25)
    fed = Federation(experiment).train_all()
    client_round, dataset = fed.client_round(3, 1), fed.dataset
    prototypes = fed.method.prototypes(client_round)
    start = torch.cat([fed.server["parameters"][:BASE], fed.states[3]["head"]])
    net = small.network(experiment, start)
    own = fed.plan.train_indices(dataset, 3, 1)
    order = torch.randperm(40, generator=client_round.round_id.generator("alignment"))
    for batch in own[order].split(25):
        features = net.encoder(small.normalised(experiment, dataset.x_train[batch]))
        loss = torch.zeros(())
        for label in dataset.y_train[batch].unique().tolist():
            mine = features[dataset.y_train[batch] == label]
            loss = loss + F.mse_loss(mine, prototypes[label].expand_as(mine))
        gradient = small.slope(net.encoder, loss)
        before = nn.utils.parameters_to_vector(net.encoder.parameters()).detach()
        nn.utils.vector_to_parameters(before - 0.2 * gradient, net.encoder.parameters())
    fed.method.receive(client_round)
    expected = nn.utils.parameters_to_vector(net.encoder.parameters()).detach()
    torch.testing.assert_close(fed.model.parameters[:BASE], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("always", [True, False])
def test_alignment_can_wait_until_the_client_has_trained_on_the_task(always: bool) -> None:
    """In whichever round of the task that is."""
    fed = Federation(tiny("fedas", align_on_new_task=always)).train_all()

    def aligned(experience: int, round_: int) -> bool:
        fed.method.receive(fed.client_round(0, experience, round_))
        return not torch.equal(fed.model.parameters[:BASE], fed.server["parameters"][:BASE])

    assert aligned(0, 1)
    assert aligned(1, 0) == aligned(1, 1) == always  # it did not train in round 0
    fed.train(0, 1, 1)
    assert aligned(1, 2) and aligned(2, 0) == always


def test_alignment_that_diverges_is_refused_by_name() -> None:
    with pytest.raises(ParameterError, match=r"align_lr is 1e\+30; it must be smaller"):
        run(tiny("fedas", align_lr=1e30))


# --- the trace


def test_the_trace_is_the_sum_of_squared_gradients_of_batches() -> None:
    """Two batches in an order of their own, at the trained model, of encoder and head."""
    experiment = tiny("fedas", split=FEW, training={"batch_size": 25, "shift": 1})
    fed = Federation(experiment)
    reply = fed.train(0, 0)
    net = small.network(experiment, fed.model.parameters)
    order = torch.randperm(40, generator=RoundId(0, 0, 0, 0).generator("trace"))
    expected = 0.0
    for batch in fed.plan.train_indices(fed.dataset, 0, 0)[order].split(25):
        logits = net(small.normalised(experiment, fed.dataset.x_train[batch]))
        loss = F.cross_entropy(logits, fed.dataset.y_train[batch])
        expected += float(small.slope(net, loss).square().sum())
    trace = reply.message["trace"]
    assert trace.dtype == torch.float32 and trace.shape == (1,) and expected > 0
    assert float(trace) == reply.log.numbers["trace"] == pytest.approx(expected, rel=1e-5)


def test_a_perfect_fit_has_no_trace() -> None:
    """Loss and gradient are exactly 0 where the head always answers the only class present."""
    experiment = tiny("fedas", head="shared")
    whole, dataset = plan(experiment), experiment.dataset()
    label, own = whole.clients[1][0].classes[0], whole.train_indices(dataset, 1, 0)
    own = own[dataset.y_train[own] == label][:9]
    fed = Federation(experiment, small.with_train(whole, {(1, 0): tuple(own.tolist())}))
    fed.server["parameters"][BASE:] = 0
    fed.server["parameters"][label - 10] = 1e4
    reply = fed.train(1, 0)
    assert float(reply.message["trace"]) == 0 and reply.samples == 9


@pytest.mark.parametrize("policy", ["shared", "local"])
def test_measuring_the_trace_changes_neither_weights_nor_running_statistics(policy: str) -> None:
    replies = []
    for weights in ("fisher", "samples"):
        options: dict[str, Any] = {"network": BATCH_NORM, "split": FEW, "align": False}
        fed = Federation(tiny("fedas", weights=weights, training={"buffers": policy}, **options))
        reply = fed.train(0, 0)
        reply.message.pop("trace", None)
        replies.append([dict(reply.state), dict(reply.message)])
        assert not torch.equal(fed.model.buffers, fed.worker.work.untrained)
    small.assert_equal_trees(*replies)


# --- the server


def answer(client: int, samples: int, trace: float, fill: float) -> Reply:
    """A client's reply with an encoder of equal numbers."""
    message = {"base": torch.full((BASE,), fill), "trace": torch.tensor([trace])}
    return Reply(client, {}, message, samples, 1, 0.0)


@pytest.mark.parametrize(
    ("traces", "expected", "events"),
    [
        ((1.0, 3.0), (1 * 2 + 3 * 6) / 4, []),
        ((0.0, 3.0), 6.0, []),
        ((2.0, 2.0), 4.0, []),
        ((0.0, 0.0), (5 * 2 + 3 * 6) / 8, [ZERO]),
        ((float("nan"), 3.0), (5 * 2 + 3 * 6) / 8, [INFINITE]),
        ((1.0, float("inf")), (5 * 2 + 3 * 6) / 8, [INFINITE]),
    ],
)
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_encoders_are_averaged_by_their_traces(
    traces: tuple[float, float], expected: float, events: list[str], server_lr: float
) -> None:
    """2 and 6 with 5 and 3 samples; a reply without samples must not count. If one trace is not
    finite there is no scale for the others. The head stays the initial one."""
    fed = Federation(tiny("fedas", server_lr=server_lr))
    before, log = small.copied(fed.server), Log()
    replies = [answer(0, 5, traces[0], 2.0), answer(1, 3, traces[1], 6.0)]
    empty = answer(2, 0, float("nan"), float("nan"))
    after = fed.method.aggregate(fed.server, [*replies, empty], log)
    base, head = after["parameters"][:BASE], after["parameters"][BASE:]
    mean = torch.full((BASE,), expected)
    torch.testing.assert_close(base, torch.lerp(before["parameters"][:BASE], mean, server_lr))
    assert torch.equal(head, before["parameters"][BASE:]) and log.events == events
    small.assert_equal_trees(fed.server, before)


@pytest.mark.parametrize("replies", [[], [answer(0, 0, 1.0, 9.0)]], ids=["none", "no samples"])
def test_without_replies_the_server_stays(replies: list[Reply]) -> None:
    fed, log = Federation(tiny("fedas")), Log()
    assert fed.method.aggregate(fed.server, replies, log) is fed.server and log == Log()


def test_running_statistics_are_averaged_with_the_same_weights() -> None:
    fed, replies = Federation(tiny("fedas", network=BATCH_NORM, split=FEW)), []
    for u, trace in enumerate((1.0, 3.0)):
        base = torch.zeros(fed.worker.work.encoder_size)
        message = {"base": base, "trace": torch.tensor([trace])}
        message["buffers"] = torch.full((8,), float(u))
        replies.append(Reply(u, {}, message, 7, 1, 0.0))
    assert fed.method.aggregate(fed.server, replies, Log())["buffers"].tolist() == [0.75] * 8


# --- heads and bytes


def test_a_reported_head_changes_no_client() -> None:
    """It costs bytes and gives the accuracy of a global model."""
    local, reported = run(tiny("fedas")), run(tiny("fedas", head="reported"))
    for model in ("personal", "local"):
        np.testing.assert_array_equal(local.accuracy(model), reported.accuracy(model))
    assert np.isnan(local.accuracy("global")).all() and local.weights == {}
    assert np.isfinite(reported.accuracy("global")).all()
    start = models.build_network(tiny().setting.network, (1, 8, 8), 10, seed=0).head.state_dict()
    assert not np.array_equal(reported.weights["head.weight"], start["weight"].numpy())
    assert all("spatial clients" in row["angles"] for row in reported.history)


@pytest.mark.parametrize(
    ("options", "down", "up", "disk"),
    [
        ({}, BASE, BASE + 1, P),
        ({"head": "reported"}, BASE, P + 1, P),
        ({"head": "shared"}, P, P + 1, BASE),
        ({"weights": "samples"}, BASE, BASE, P),
        ({"align": False}, BASE, BASE + 1, HEAD),
        ({"align": False, "weights": "samples", "head": "shared"}, P, P, 0),
    ],
    ids=str,
)
def test_only_what_is_needed_is_sent_and_kept(
    options: dict[str, Any], down: int, up: int, disk: int
) -> None:
    for row in run(tiny("fedas", **options)).history:
        assert row["bytes"] == {"down": 16 * down, "up": 16 * up}
        assert row["disk"] == 4 * disk


@pytest.mark.parametrize(("policy", "each"), [("shared", BN_B), ("local", 0), ("frozen", 0)])
def test_shared_buffers_are_sent_with_the_encoder(policy: str, each: int) -> None:
    experiment = tiny("fedas", network=BATCH_NORM, split=FEW, training={"buffers": policy})
    base = BN_P - BN_HEAD
    for row in run(experiment).history:
        assert row["bytes"] == {"down": 16 * (base + each), "up": 16 * (base + each + 1)}
        assert row["disk"] == 4 * (BN_P + BN_B + (BN_B if policy == "local" else 0))


def test_a_client_keeps_its_head_from_task_to_task() -> None:
    """It is the one that its last round has trained, whatever the server's head is."""
    fed = Federation(tiny("fedas", align=False))
    heads = [fed.states[0]["head"]]
    for experience in range(3):
        fed.method.receive(fed.client_round(0, experience))
        assert torch.equal(fed.model.parameters[BASE:], heads[-1])
        heads.append(fed.train(0, experience).state["head"])
        assert torch.equal(fed.model.parameters[BASE:], heads[-1])
    assert len({head.numpy().tobytes() for head in heads}) == 4


# --- evaluation and rare cases


def test_a_personal_model_is_the_aligned_encoder_with_the_own_head() -> None:
    """The model that the client's next round would start from."""
    fed = Federation(tiny("fedas", align_on_new_task=False)).train_all()
    client_round, actual = fed.client_round(1, 0, 1), list[Tensor]()
    for load in (fed.method.load_personal_model, fed.method.receive, fed.method.load_unaligned):
        load(client_round)
        actual.append(fed.model.parameters.clone())
    assert torch.equal(actual[0], actual[1]) and not torch.equal(actual[0], actual[2])
    assert torch.equal(actual[0][BASE:], fed.states[1]["head"])


def test_a_client_never_selected_has_the_untrained_head_and_the_unaligned_encoder() -> None:
    fed = Federation(tiny("fedas")).train_all()
    initial = fed.method.init_server(0)
    fed.states[0] = fed.method.init_client(0, initial)
    fed.method.load_personal_model(fed.client_round(0, 0, 1))
    assert torch.equal(fed.model.parameters[:BASE], fed.server["parameters"][:BASE])
    assert torch.equal(fed.model.parameters[BASE:], initial["parameters"][BASE:])


def test_a_client_without_images_keeps_the_received_model() -> None:
    """Nothing to align with, no step, a trace of zero that does not count."""
    experiment = tiny("fedas", training={"weight_decay": 0.1})
    fed = Federation(experiment, small.awkward(experiment)).train_all()
    head = fed.states[2]["head"]
    reply = fed.train(2, 1)
    assert torch.equal(reply.message["base"], fed.server["parameters"][:BASE])
    assert torch.equal(reply.state["base"], fed.server["parameters"][:BASE])
    assert torch.equal(reply.state["head"], head)
    assert float(reply.message["trace"]) == reply.samples == 0


def test_every_parameter_changes_the_model() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"align": False},
        {"align_lr": 0.1},
        {"align_batch_size": 64},
        {"align_on_new_task": False},
        {"weights": "samples"},
        {"server_lr": 0.5},
        {"head": "shared"},
    ]
    actual = [run(tiny("fedas", split=FEW, **{"head": "reported", **each})) for each in changes]
    weights = [record.weights["encoder.1.weight"] for record in actual]
    for k, one in enumerate(weights):
        for other in weights[:k]:
            assert np.abs(one - other).max() > 1e-5, changes[k]
