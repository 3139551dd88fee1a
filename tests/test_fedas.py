"""FedAS: an encoder aligned with the own one, weights from Fisher information, heads at home."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, BN_B, BN_P, P, plan, run, tiny
from torch import Tensor, nn

from stamp_core import models
from stamp_core.config import ParameterError
from stamp_core.executor import Worker
from stamp_core.methods import Log, Method, Reply, State, Turn
from stamp_core.methods.fedas import FedAS, Synchronised
from stamp_core.metrics import Array
from stamp_core.seeding import generator
from stamp_core.split import Plan
from stamp_core.vectors import average
from stamp_core.workspace import Visit

HEAD = 32 * 10 + 10  # of the small network
BASE = P - HEAD
BN_HEAD = 8 * 10 + 10
FEW = {"images_per_class": 20}
FEDPER: dict[str, Any] = {"align": False, "weights": "samples"}
ZERO = "synchronisation: all traces are zero, so samples weigh"
INFINITE = "synchronisation: a trace is not finite, so samples weigh"


def begun(cell: Any, plan_: Plan) -> tuple[Worker, FedAS, State, list[State]]:
    """A worker with its method, and what everybody knows before the first round."""
    here = small.worker(cell, plan_)
    server, states, *_ = here.begin(plan_.seed)
    assert isinstance(here.method, FedAS)
    return here, here.method, server, states


def turn_of(method: Method, plan_: Plan, visit: Visit, server: State, states: list[State]) -> Turn:
    """A client's turn that is about to begin."""
    sent = method.broadcast(server, visit.client)
    return Turn(visit, plan_, states[visit.client], sent)


def step_on(here: Worker, plan_: Plan, visit: Visit, server: State, states: list[State]) -> None:
    """A client's visit, after which its state is the new one."""
    sent = here.method.broadcast(server, visit.client)
    states[visit.client] = here.attend(visit, states[visit.client], sent).reply.state


# ------------------------------------------------------------------ by hand


class ByHand:
    """Two linear layers h = A x + a, logits = V h + c, and all that a client does with them."""

    def __init__(self, cell: Any, plan_: Plan, client: int) -> None:
        images, own = cell.images(), plan_.train_indices(cell.images(), client, 0)
        x = images.x_train[own].numpy().reshape(-1, 64) / 255
        self.x = (x - float(images.mean)) / float(images.std)
        self.y = images.y_train[own].numpy()

    def aligned(self, base: list[Array], old: list[Array]) -> list[Array]:
        """The encoder after a full batch of alignment at rate 1 / 4."""
        h, before = (self.x @ each[0].T + each[1] for each in (base, old))
        back = np.zeros_like(h)
        for label in np.unique(self.y):
            own = self.y == label
            back[own] = 2 * (h[own] - before[own].mean(0)) / (3 * own.sum())
        return [base[0] - 0.25 * back.T @ self.x, base[1] - 0.25 * back.sum(0)]

    def gradient(self, base: list[Array], head: list[Array]) -> list[Array]:
        """That of the mean cross-entropy by A, a, V, c."""
        h = self.x @ base[0].T + base[1]
        e = np.exp(h @ head[0].T + head[1])
        g = (e / e.sum(1, keepdims=True) - np.eye(10)[self.y]) / len(self.y)
        back = g @ head[0]
        return [back.T @ self.x, back.sum(0), g.T @ h, g.sum(0)]


def test_two_rounds_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two clients with 7 and all pictures, full batches throughout; F = 3 features.

    Prototype: p_c = mean over class c of A_old x + a_old. Alignment: sum_c mean_{i in c, j}
    (h_ij - p_cj)^2 has dL/dh_i = 2 (h_i - p_c) / (F n_c) =: B  [n, F], so dL/dA = B^T x, dL/da =
    sum B. Training: with G = (softmax - onehot) / n, dL/dV = G^T h, dL/dc = sum G, dL/dA =
    (G V)^T x, dL/da = sum G V. Trace: the squared norm of all four at the trained model. The server
    averages A and a by traces. Old is the first model in the first round, then the client's own.
    """

    def two_layers(network: Any, shape: Any) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), 3

    monkeypatch.setitem(models.ENCODERS, "mlp", two_layers)
    split, training = {"clients": 2, "tasks": 1}, {"rounds": 2, "batch": 1000}
    cell = tiny("fedas", split=split, training=training, align_rate=0.25, align_batch=1000)
    whole = plan(cell)
    few = whole.train_indices(cell.images(), 0, 0)[:7].tolist()
    plan_ = small.with_train(whole, {(0, 0): tuple(few)})
    hands = [ByHand(cell, plan_, client) for client in range(2)]

    net = models.build(cell.setting.network, (1, 8, 8), 10, seed=0)
    start = [p.detach().double().numpy() for p in net.parameters()]
    base, own, heads = start[:2], [start[:2]] * 2, [start[2:]] * 2
    for _ in range(2):
        traces = []
        for u, hand in enumerate(hands):
            aligned = hand.aligned(base, own[u])
            model, slope = [*aligned, *heads[u]], hand.gradient(aligned, heads[u])
            model = [value - 0.1 * g for value, g in zip(model, slope, strict=True)]
            own[u], heads[u] = model[:2], model[2:]
            traces.append(sum(float((g**2).sum()) for g in hand.gradient(own[u], heads[u])))
        one, two = (trace / sum(traces) for trace in traces)
        base = [one * a + two * b for a, b in zip(*own, strict=True)]
    assert 0.05 < one < 0.95 and abs(one - 7 / (7 + len(hands[1].y))) > 0.05

    record = run(cell, plan_, resume=tmp_path)
    state = small.saved(cell, tmp_path)
    found = [state["server"]["parameters"], *(each["base"] for each in state["clients"])]
    expected = [[*base, *start[2:]], *own]
    found += [each["head"] for each in state["clients"]]
    for vector, parts in zip(found, [*expected, *heads], strict=True):
        whole_ = np.concatenate([part.ravel() for part in parts])
        np.testing.assert_allclose(vector, whole_, rtol=0, atol=1e-6)
    notes = record.history[-1]["notes"]
    assert notes["trace"] == pytest.approx(sum(traces) / 2, rel=1e-5)
    assert notes["trace, largest share"] == pytest.approx(max(one, two), rel=1e-5)


def test_without_its_two_ideas_it_is_fedper_bit_for_bit(tmp_path: Path) -> None:
    """Encoders averaged by samples, heads at home: written again with torch's own optimiser."""
    training = {"momentum": 0.9, "weight_decay": 0.01}
    split = {"clients": 2, "tasks": 2, **FEW}
    cell = tiny("fedas", split=split, training=training, **FEDPER)
    images, whole = cell.images(), plan(cell)
    few = whole.train_indices(images, 0, 1)[:9].tolist()
    plan_ = small.with_train(whole, {(0, 1): tuple(few)})
    normalise = small.worker(cell, plan_).work.normalise
    nets = [models.build(cell.setting.network, (1, 8, 8), 10, seed=0) for _ in range(2)]
    for step in range(2):
        own = [plan_.train_indices(images, u, step) for u in range(2)]
        for round_ in range(2):
            for u, net in enumerate(nets):
                descent = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=0.01)
                draw = generator(0, u, step, round_, "order")
                for batch in own[u][torch.randperm(len(own[u]), generator=draw)].split(16):
                    descent.zero_grad()
                    x, y = normalise(images.x_train[batch]), images.y_train[batch]
                    F.cross_entropy(net(x), y).backward()
                    descent.step()
            flat = [nn.utils.parameters_to_vector(net.encoder.parameters()) for net in nets]
            mean = average([each.detach() for each in flat], [float(len(each)) for each in own])
            for net in nets:
                nn.utils.vector_to_parameters(mean.clone(), net.encoder.parameters())
    record = run(cell, plan_, resume=tmp_path)
    state = small.saved(cell, tmp_path)
    assert torch.equal(state["server"]["parameters"][:BASE], mean)
    for net, client in zip(nets, state["clients"], strict=True):
        head = nn.utils.parameters_to_vector(net.head.parameters()).detach()
        assert torch.equal(client["head"], head)
    assert np.isnan(record.accuracy("global")).all() and record.weights == {}


# ------------------------------------------------------------------ alignment


def later(cell: Any, plan_: Plan) -> tuple[Worker, FedAS, State, list[State]]:
    """Everybody after one round of the first task, with a server that has learnt from all."""
    here, method, server, states = begun(cell, plan_)
    replies = []
    for client in range(len(states)):
        sent = method.broadcast(server, client)
        replies.append(here.attend(Visit(0, client, 0, 0), states[client], sent).reply)
    return here, method, method.aggregate(server, replies, Log()), [r.state for r in replies]


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_prototypes_are_the_old_encoders_class_means(policy: str, network: dict[str, Any]) -> None:
    """By the base and the running statistics that the client itself has trained."""
    cell = tiny("fedas", network=network, split=FEW, training={"buffers": policy})
    plan_ = plan(cell)
    here, method, server, states = later(cell, plan_)
    turn = turn_of(method, plan_, Visit(0, 1, 1, 0), server, states)
    found = method.prototypes(turn)
    net, images = here.work.network(0).eval(), cell.images()
    nn.utils.vector_to_parameters(states[1]["base"].clone(), net.encoder.parameters())
    if network == BATCH_NORM:
        net.encoder[1].running_mean.copy_(states[1]["base buffers"][:4])  # type: ignore[index]
        net.encoder[1].running_var.copy_(states[1]["base buffers"][4:])  # type: ignore[index]
        still = torch.equal(states[1]["base buffers"], server["buffers"])
        assert still == (policy == "frozen")
    own = plan_.train_indices(images, 1, 1)
    features = net.encoder(small.normalised(cell, images.x_train[own])).detach()
    present = images.y_train[own].unique().tolist()
    assert len(present) == 2 and len(found) == 10
    for label in range(10):
        if label in present:
            mean = features[images.y_train[own] == label].mean(0)
            torch.testing.assert_close(found[label], mean, rtol=0, atol=1e-5)
        else:
            assert not found[label].any()


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_alignment_moves_the_received_encoder_towards_the_prototypes(policy: str) -> None:
    """Its features come nearer; head and running statistics stay what they are without it."""
    options: dict[str, Any] = {"network": BATCH_NORM, "split": FEW}
    cell = tiny("fedas", training={"buffers": policy}, **options)
    plan_ = plan(cell)
    here, method, server, states = later(cell, plan_)
    turn = turn_of(method, plan_, Visit(0, 2, 1, 0), server, states)
    prototypes, model = method.prototypes(turn), here.work.model
    own = plan_.train_indices(cell.images(), 2, 1)
    wanted = prototypes[cell.images().y_train[own]]
    away, left = [], []
    for put in (method.take_up, method.receive):
        put(turn)
        left.append((model.parameters.clone(), model.buffers.clone()))
        features = here.work.outputs(cell.images().x_train[own], here.work.classifier.encoder)
        away.append(float((features - wanted).square().mean()))
    assert away[1] < 0.95 * away[0]
    (before, statistics), (after, same) = left
    base = here.work.base
    assert torch.equal(before[:base], server["parameters"][:base])
    assert torch.equal(before[base:], states[2]["head"])
    assert torch.equal(after[base:], before[base:]) and torch.equal(statistics, same)
    expected = states[2]["buffers"] if policy == "local" else server["buffers"]
    assert torch.equal(same, expected)
    assert turn.log.seconds.keys() == {"alignment"}


def test_alignment_takes_one_step_a_batch_at_its_rate() -> None:
    """Two batches of class means over the pictures at hand, in an order of the visit's own."""
    cell = tiny("fedas", split=FEW, align_rate=0.2, align_batch=25)
    plan_ = plan(cell)
    here, method, server, states = later(cell, plan_)
    visit = Visit(0, 3, 1, 0)
    turn = turn_of(method, plan_, visit, server, states)
    prototypes, images = method.prototypes(turn), cell.images()
    base = server["parameters"][:BASE]
    net = small.network(cell, torch.cat([base, states[3]["head"]]))
    own = plan_.train_indices(images, 3, 1)
    order = torch.randperm(40, generator=visit.generator("alignment"))
    for batch in own[order].split(25):
        features, loss = net.encoder(small.normalised(cell, images.x_train[batch])), torch.zeros(())
        for label in images.y_train[batch].unique().tolist():
            mine = features[images.y_train[batch] == label]
            loss = loss + F.mse_loss(mine, prototypes[label].expand_as(mine))
        slope = small.slope(net.encoder, loss)
        start = nn.utils.parameters_to_vector(net.encoder.parameters()).detach()
        nn.utils.vector_to_parameters(start - 0.2 * slope, net.encoder.parameters())
    method.receive(turn)
    expected = nn.utils.parameters_to_vector(net.encoder.parameters()).detach()
    torch.testing.assert_close(here.work.model.parameters[:BASE], expected, rtol=0, atol=1e-6)


def test_the_server_is_untouched_by_what_clients_make_of_its_model() -> None:
    """Nor does it matter who received it before: no client starts from another's alignment."""
    cell = tiny("fedas")
    plan_ = plan(cell)
    here, method, server, states = later(cell, plan_)
    before, starts = small.copied(server), dict[int, Tensor]()
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        for client in order:
            method.receive(turn_of(method, plan_, Visit(0, client, 1, 0), server, states))
            start = here.work.model.parameters.clone()
            assert torch.equal(starts.setdefault(client, start), start)
            small.assert_equal_trees(server, before)
    assert len({start.numpy().tobytes() for start in starts.values()}) == 4


def test_a_new_task_can_go_without_alignment() -> None:
    """Until the client has trained on it, in whichever round that is."""
    cell = tiny("fedas", align_on_new_task=False)
    plan_ = plan(cell)
    here, method, server, states = later(cell, plan_)

    def moved(visit: Visit) -> bool:
        method.receive(turn_of(method, plan_, visit, server, states))
        return not torch.equal(here.work.model.parameters[:BASE], server["parameters"][:BASE])

    assert moved(Visit(0, 0, 0, 1)) and not moved(Visit(0, 0, 1, 0))
    assert not moved(Visit(0, 0, 1, 1))  # it was not asked in round 0
    step_on(here, plan_, Visit(0, 0, 1, 1), server, states)
    assert moved(Visit(0, 0, 1, 2)) and not moved(Visit(0, 0, 2, 0))
    always = begun(tiny("fedas"), plan_)[1]
    always.receive(turn_of(always, plan_, Visit(0, 0, 1, 0), server, states))
    assert not torch.equal(always.work.model.parameters[:BASE], server["parameters"][:BASE])


def test_alignment_that_diverges_is_refused_by_name() -> None:
    with pytest.raises(ParameterError, match=r"align_rate is 1e\+30; it must be smaller"):
        run(tiny("fedas", align_rate=1e30))


# ------------------------------------------------------------------ the trace


def uploaded(cell: Any, plan_: Plan, client: int = 0) -> tuple[State, float]:
    """The trained model of a first visit as a state dict would have it, and its trace."""
    here, method, server, states = begun(cell, plan_)
    sent = method.broadcast(server, client)
    reply = here.attend(Visit(0, client, 0, 0), states[client], sent).reply
    trained = {"parameters": here.work.model.parameters.clone(), **reply.message}
    assert reply.log.numbers["trace"] == float(reply.message["trace"])
    assert reply.message["trace"].dtype == torch.float32 and reply.message["trace"].shape == (1,)
    return trained, float(reply.message["trace"])


def test_the_trace_is_the_sum_of_squared_gradients_of_batches() -> None:
    """Two batches in an order of their own, at the trained model, of encoder and head."""
    cell = tiny("fedas", split=FEW, training={"batch": 25, "shift": 1})
    plan_ = plan(cell)
    trained, found = uploaded(cell, plan_)
    net, images = small.network(cell, trained["parameters"]), cell.images()
    order = torch.randperm(40, generator=Visit(0, 0, 0, 0).generator("trace"))
    expected = 0.0
    for batch in plan_.train_indices(images, 0, 0)[order].split(25):
        loss = F.cross_entropy(
            net(small.normalised(cell, images.x_train[batch])), images.y_train[batch]
        )
        expected += float(small.slope(net, loss).square().sum())
    assert found == pytest.approx(expected, rel=1e-5) and found > 0


def test_pictures_that_are_there_twice_double_the_trace() -> None:
    """In batches of one it is a sum over pictures; at rate 0 the model is the same."""
    cell = tiny("fedas", training={"batch": 1, "rate": 0}, align=False)
    own = plan(cell).train_indices(cell.images(), 0, 0)[:10].tolist()
    traces = [
        uploaded(cell, small.with_train(plan(cell), {(0, 0): tuple(pictures)}))[1]
        for pictures in (own, own * 2)
    ]
    assert traces[1] == pytest.approx(2 * traces[0], rel=1e-5)


def sure(server: State, label: int) -> State:
    """The server with a head that answers `label` whatever it sees."""
    parameters = server["parameters"].clone()
    parameters[BASE:] = 0
    parameters[label - 10] = 1e4
    return {**server, "parameters": parameters}


def test_a_perfect_fit_has_no_trace_and_then_samples_weigh() -> None:
    """Its loss and gradient are 0 exactly; a sum of zeros cannot be divided by."""
    cell = tiny("fedas", head="shared")
    whole, images = plan(cell), cell.images()
    label = whole.clients[1][0].classes[0]
    own = whole.train_indices(images, 1, 0)
    own = own[images.y_train[own] == label]
    plan_ = small.with_train(whole, {(u, 0): tuple(own[: 9 * u].tolist()) for u in range(4)})
    here, method, server, states = begun(cell, plan_)
    server, replies = sure(server, label), []
    for client in range(4):
        sent = method.broadcast(server, client)
        replies.append(here.attend(Visit(0, client, 0, 0), states[client], sent).reply)
    assert [float(reply.message["trace"]) for reply in replies] == [0, 0, 0, 0]
    assert [reply.samples for reply in replies] == [0, 9, 18, 27]
    log = Log()
    after = method.aggregate(server, replies, log)
    sent_back = [reply.message["parameters"] for reply in replies[1:]]
    assert torch.equal(after["parameters"], average(sent_back, [9.0, 18.0, 27.0]))
    assert log.events == [ZERO] and not log.numbers


def test_the_trace_moves_nothing() -> None:
    """A visit ends with the same weights and running statistics whether or not it is taken."""
    for policy in ("shared", "local"):
        options: dict[str, Any] = {"network": BATCH_NORM, "split": FEW, "align": False}
        ends = []
        for weights in ("fisher", "samples"):
            cell = tiny("fedas", weights=weights, training={"buffers": policy}, **options)
            here, method, server, states = begun(cell, plan(cell))
            reply = here.attend(Visit(0, 0, 0, 0), states[0], method.broadcast(server, 0)).reply
            reply.message.pop("trace", None)
            ends.append((reply.state, reply.message))
            assert not torch.equal(here.work.model.buffers, here.work.untrained)
        small.assert_equal_trees(list(map(dict, ends[0])), list(map(dict, ends[1])))


# ------------------------------------------------------------------ the server


def answer(client: int, samples: int, trace: float, fill: float) -> Reply:
    """A client's answer with an encoder of one number."""
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
@pytest.mark.parametrize("step", [1.0, 0.5])
def test_encoders_are_averaged_by_their_traces(
    traces: tuple[float, float], expected: float, events: list[str], step: float
) -> None:
    """2 and 6 with 5 and 3 samples, and one without samples whose answer must not count. One trace
    that is not a number leaves no scale to weigh the others by. The head stays the first one."""
    cell = tiny("fedas", step=step)
    _, method, server, _ = begun(cell, plan(cell))
    before, log = small.copied(server), Log()
    replies = [answer(0, 5, traces[0], 2.0), answer(1, 3, traces[1], 6.0)]
    nothing = answer(2, 0, float("nan"), float("nan"))
    after = method.aggregate(server, [*replies, nothing], log)
    base, head = after["parameters"][:BASE], after["parameters"][BASE:]
    torch.testing.assert_close(
        base, torch.lerp(before["parameters"][:BASE], torch.full((BASE,), expected), step)
    )
    assert torch.equal(head, before["parameters"][BASE:]) and log.events == events
    small.assert_equal_trees(server, before)


def test_without_answers_the_server_stays() -> None:
    _, method, server, _ = begun(tiny("fedas"), plan(tiny()))
    for replies in ([], [answer(0, 0, 1.0, 9.0)]):
        log = Log()
        assert method.aggregate(server, replies, log) is server and log == Log()


def test_equal_traces_and_samples_with_a_shared_head_are_fedavg() -> None:
    """Then all that is left of the method is alignment, which is off."""
    cell = tiny("fedas", align=False, head="shared")
    here, method, server, states = begun(cell, plan(cell))
    replies = []
    for client in range(4):
        sent = method.broadcast(server, client)
        reply = here.attend(Visit(0, client, 0, 0), states[client], sent).reply
        reply.message["trace"] = torch.tensor([4.0])
        replies.append(Reply(client, {}, reply.message, 8, 1, 0.0))
    after = method.aggregate(server, replies, Log())["parameters"]
    fedavg = small.worker(tiny()).method.aggregate(server, replies, Log())["parameters"]
    assert torch.equal(after, fedavg) and not torch.equal(after, server["parameters"])


def test_running_statistics_are_averaged_with_the_same_weights() -> None:
    cell = tiny("fedas", network=BATCH_NORM, split=FEW)
    here, method, server, _ = begun(cell, plan(cell))
    replies = [
        Reply(u, {}, {**message, "buffers": torch.full((8,), float(u))}, 7, 1, 0.0)
        for u, message in enumerate(
            {"base": torch.zeros(here.work.base), "trace": torch.tensor([t])} for t in (1.0, 3.0)
        )
    ]
    assert method.aggregate(server, replies, Log())["buffers"].tolist() == [0.75] * 8


# ------------------------------------------------------------------ heads and bytes


def test_a_reported_head_changes_no_client() -> None:
    """It costs bytes and buys the accuracy of a global model."""
    local, reported = run(tiny("fedas")), run(tiny("fedas", head="reported"))
    for model in ("personal", "local"):
        np.testing.assert_array_equal(local.accuracy(model), reported.accuracy(model))
    assert np.isnan(local.accuracy("global")).all() and local.weights == {}
    assert np.isfinite(reported.accuracy("global")).all()
    start = models.build(tiny().setting.network, (1, 8, 8), 10, seed=0).head.state_dict()
    assert not np.array_equal(reported.weights["head.weight"], start["weight"].numpy())
    angles = [row["angles"] for row in reported.history]
    assert all("spatial clients" in each for each in angles)


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
def test_only_what_is_needed_travels_and_is_kept(
    options: dict[str, Any], down: int, up: int, disk: int
) -> None:
    for row in run(tiny("fedas", **options)).history:
        assert row["bytes"] == {"down": 16 * down, "up": 16 * up}
        assert row["disk"] == 4 * disk


@pytest.mark.parametrize(("policy", "each"), [("shared", BN_B), ("local", 0), ("frozen", 0)])
def test_buffers_travel_with_the_encoder(policy: str, each: int) -> None:
    cell = tiny("fedas", network=BATCH_NORM, split=FEW, training={"buffers": policy})
    base = BN_P - BN_HEAD
    for row in run(cell).history:
        assert row["bytes"] == {"down": 16 * (base + each), "up": 16 * (base + each + 1)}
        assert row["disk"] == 4 * (BN_P + BN_B + (BN_B if policy == "local" else 0))


def test_a_head_stays_with_its_client_from_task_to_task() -> None:
    """It is what the last visit has left, whatever the server's head is."""
    cell = tiny("fedas", align=False)
    plan_ = plan(cell)
    here, method, server, states = begun(cell, plan_)
    heads = [states[0]["head"]]
    for step in range(3):
        method.receive(turn_of(method, plan_, Visit(0, 0, step, 0), server, states))
        assert torch.equal(here.work.model.parameters[BASE:], heads[-1])
        step_on(here, plan_, Visit(0, 0, step, 0), server, states)
        assert torch.equal(here.work.model.parameters[BASE:], states[0]["head"])
        heads.append(states[0]["head"])
    assert len({head.numpy().tobytes() for head in heads}) == 4


# ------------------------------------------------------------------ evaluation and oddities


def test_a_personal_model_is_the_aligned_encoder_with_the_own_head() -> None:
    """What the client would train from, if it were asked once more."""
    cell = tiny("fedas", align_on_new_task=False)
    plan_ = plan(cell)
    here, method, server, states = later(cell, plan_)
    turn = turn_of(method, plan_, Visit(0, 1, 0, 1, True), server, states)
    found: list[Tensor] = []
    for put in (method.receive_personal, method.receive, method.take_up):
        put(turn)
        found.append(here.work.model.parameters.clone())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(found[0][BASE:], states[1]["head"])


def test_a_client_never_visited_has_the_untrained_head_and_the_encoder_as_it_is() -> None:
    cell = tiny("fedas")
    plan_ = plan(cell)
    here, method, server, _ = later(cell, plan_)
    fresh = [method.new_client(u, method.new_server(0)) for u in range(4)]
    method.receive_personal(turn_of(method, plan_, Visit(0, 0, 0, 1, True), server, fresh))
    found = here.work.model.parameters
    assert torch.equal(found[:BASE], server["parameters"][:BASE])
    assert torch.equal(found[BASE:], method.new_server(0)["parameters"][BASE:])


def test_a_client_without_pictures_keeps_what_it_received() -> None:
    """Nothing to align with, no step, a trace of zero that does not count."""
    cell = tiny("fedas", training={"weight_decay": 0.1})
    plan_ = small.awkward(cell)
    here, method, server, states = later(cell, plan_)
    sent = method.broadcast(server, 2)
    reply = here.attend(Visit(0, 2, 1, 0), states[2], sent).reply
    assert torch.equal(reply.message["base"], server["parameters"][:BASE])
    assert torch.equal(reply.state["base"], server["parameters"][:BASE])
    assert torch.equal(reply.state["head"], states[2]["head"])
    assert float(reply.message["trace"]) == reply.samples == 0


def test_every_part_changes_the_model() -> None:
    """None of the switches is a dummy."""
    parts: list[dict[str, Any]] = [
        {},
        {"align": False},
        {"align_rate": 0.1},
        {"align_batch": 64},
        {"align_on_new_task": False},
        {"weights": "samples"},
        {"step": 0.5},
    ]
    found = [run(tiny("fedas", split=FEW, head="reported", **each)).weights for each in parts]
    found.append(run(tiny("fedas", split=FEW, head="shared")).weights)
    for k, one in enumerate(found):
        for other in found[:k]:
            assert np.abs(one["encoder.1.weight"] - other["encoder.1.weight"]).max() > 1e-5, k


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"align_rate": 0.0}, "align_rate is 0.0; it must be above 0"),
        ({"align_rate": float("nan")}, "align_rate is nan; it must be above 0"),
        ({"align_batch": 0}, "align_batch is 0; it must be at least 1"),
        ({"step": -1.0}, "step is -1.0; it must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        Synchronised(**values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head": "own"}, "head 'own' is unknown; known: local, reported, shared"),
        ({"weights": "trace"}, "weights 'trace' is unknown; known: fisher, samples"),
    ],
)
def test_unknown_choices_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        tiny("fedas", **values)
