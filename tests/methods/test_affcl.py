"""AF-FCL: one client round by hand, credibility, distillation, the flow, and what is sent."""

import math
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from by_hand import CLOSE, FULL_BATCH, softmax_gradient, task_data, use_softmax_regression
from coupling_flow import ByHand, strengthen
from small import BATCH_NORM, BN_B, BN_P, P, plan, run, tiny
from stamp_core.client.workspace import RoundId
from test_bytes import FLOW, B, first_round
from test_bytes import P as RESNET
from torch import Tensor, nn

from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.affcl import AFFCL, DIVERGED, NOT_REPLAYED, TEMPERATURE, credibility
from stamp_core.methods.base.distillation import soft_cross_entropy
from stamp_core.methods.base.method import ClientRound, Log, Message, Reply, State
from stamp_core.methods.base.task_server import PREFIX, class_mask, pack_bits
from stamp_core.models.flat import FlatModel
from stamp_core.models.flow import Flow
from stamp_core.models.networks import Classifier

BITS = 13  # bytes for 100 classes
SMALL: dict[str, Any] = {"flow_hidden": 8}


def started(**options: Any) -> tuple[Worker, AFFCL, Plan, State]:
    """A worker, its method, the plan and the server's first state."""
    experiment = tiny("affcl", **{**SMALL, **options})
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    assert isinstance(worker.method, AFFCL)
    return worker, worker.method, plan_, worker.initial_states(0)[0]


def trained(
    worker: Worker, plan_: Plan, round_id: RoundId, state: State, message: Message
) -> tuple[ClientRound, Reply]:
    """A client round with its reply."""
    client_round = ClientRound(round_id, plan_, state, message)
    return client_round, worker.method.train_client(client_round)


def later_round(server: State, plan_: Plan, **changes: Any) -> tuple[State, Message]:
    """State and message in a later round of the second task, with a last copy of its own.

    Classes 0 and 1 are past, and all classes of the data are learnt.
    """
    draw = generator("last copy")
    last = {
        name: server[name] + by * torch.randn(len(server[name]), generator=draw)
        for name, by in (("parameters", 0.3), ("flow", 0.03))
    }
    past = pack_bits(class_mask([0, 1], 10))
    message = {name: server[name] for name in ("parameters", "buffers", "flow")}
    message = {**message, "learnt": pack_bits(class_mask(range(10), 10)), **changes}
    return {"announced": {"past": past}, "last": last}, message


# ------------------------------------------------------------------ by hand


def softmax(z: Any) -> Any:
    """The probabilities of logits.  # [n, 10]"""
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def credibility_by_hand(samples: Any, drawn: Any, own: Any, labels: Any, absent: float) -> Any:
    """The mean over d of N(x_d; mu_d, max(var_d, 0.01)) with the moments of the sample's class."""
    weights = []
    for x, label in zip(samples, drawn, strict=True):
        members = own[labels == label]
        if not len(members):
            weights.append(absent)
            continue
        variance = np.maximum(members.var(0), 0.01)
        density = np.exp(-((x - members.mean(0)) ** 2) / (2 * variance))
        weights.append((density / np.sqrt(2 * np.pi * variance)).mean())
    return np.array(weights)


@pytest.mark.parametrize(
    ("mode", "scale", "theta"),
    [("noise", "general", 0.2), ("features", "default", 0.0), ("mixed", "general", 1.0)],
)
def test_one_client_round_by_hand(
    mode: Any, scale: Any, theta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax regression z = W x + b, so that the features are the inputs; one full batch of n
    images, a fixed flow (flow_lr 0) and a last classifier with outputs q.

    With u, p the noise and the density of x_i, r = mean p^(1/64), n samples y_j of the flow and
    credibilities c_j, the replay step is theta_1 = theta_0 - lr k_loss_flow dL_1 with

        L_1 = (mean_j c_j CE(y_j)) ((1 - theta) r + theta) + k_kd_last k_kd_output KD(y),
        dKD / dz = (softmax(z / 2) - softmax(z_last / 2)) / (2 n);

    the step on images is theta_2 = theta_1 - lr (dCE(x) + k_kd_last k_kd_output dKD(x)).
    """
    use_softmax_regression(monkeypatch)
    params = {"flow_lr": 0.0, "flow_scale": scale, "theta": theta, "credibility": mode}
    weights = {"k_loss_flow": 0.7, "k_kd_last": 0.9, "k_kd_output": 0.8}
    options = {"split": {"images_per_class": 9}, "training": FULL_BATCH}
    worker, method, plan_, server = started(**options, **params, **weights)
    strengthen(server["flow"], by=0.01)
    state, message = later_round(server, plan_)
    client_round, reply = trained(worker, plan_, RoundId(0, 0, 1, 0, True), state, message)

    x, labels = task_data(client_round, worker)
    y, n, draw = labels.numpy(), len(labels), client_round.round_id.generator("replay")
    drawn = torch.randint(10, (n,), generator=draw).numpy()
    noise = torch.randn(n, 64, generator=draw).double().numpy()
    flow = method.new_flow(0)
    FlatModel(flow).load(server["flow"])
    by_hand = ByHand(flow, scale)
    pairs = [by_hand.noise(each, label) for each, label in zip(x, y, strict=True)]
    own_noise, log_density = (np.array(part) for part in zip(*pairs, strict=True))
    density = np.exp(log_density / 64).mean()
    samples = np.array([by_hand.sample(u, int(k)) for u, k in zip(noise, drawn, strict=True)])
    compared = noise if mode == "noise" else samples
    own = x if mode == "features" else own_noise
    credible = credibility_by_hand(compared, drawn, own, y, density)
    assert {*y} & {*drawn} and {*drawn} - {*y} and credible.max() > 1.1 * credible.min()

    before = message["parameters"].double().numpy()
    old, theta_1 = state["last"]["parameters"].double().numpy(), before.copy()

    def logits(v: Any, inputs: Any) -> Any:
        return inputs @ v[:640].reshape(10, 64).T + v[640:]

    def pulled_back(g: Any, inputs: Any) -> Any:
        return np.concatenate([(g.T @ inputs).ravel(), g.sum(0)])

    def distilled(v: Any, inputs: Any) -> Any:
        return 0.72 * (softmax(logits(v, inputs) / 2) - softmax(logits(old, inputs) / 2)) / (2 * n)

    g = credible[:, None] * (softmax(logits(before, samples)) - np.eye(10)[drawn]) / n
    g = g * ((1 - theta) * density + theta) + distilled(before, samples)
    theta_1 -= 0.1 * 0.7 * pulled_back(g, samples)
    g = softmax_gradient(theta_1, x, labels) + pulled_back(distilled(theta_1, x), x)
    np.testing.assert_allclose(reply.message["parameters"], theta_1 - 0.1 * g, **CLOSE)
    assert np.abs(theta_1 - before).max() > 1e-3
    assert torch.equal(reply.message["flow"], server["flow"])
    assert client_round.log.numbers["flow density"] == pytest.approx(density, rel=1e-5)
    assert client_round.log.numbers["credibility"] == pytest.approx(credible.mean(), rel=1e-5)


# ------------------------------------------------------------------ credibility and distillation


def test_credibility_of_a_class_with_one_image_is_bounded_by_the_least_variance() -> None:
    """At its mean the normal density is 1 / sqrt(2 pi var); a class without images has `absent`."""
    own, labels = torch.tensor([[1.0, 2.0]]), torch.tensor([4])
    samples, drawn = torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([4, 5])
    members = F.one_hot(labels, 6).float()
    for least, expected in ((1e-4, 39.894), (1e-2, 3.9894), (1.0, 0.39894)):
        found = credibility(samples, drawn, own, members, torch.tensor(0.5), least)
        assert found.tolist() == pytest.approx([expected, 0.5], rel=1e-4)


def test_standard_normal_features_have_the_density_of_a_standard_normal() -> None:
    """A flow whose scales are 1 and whose shifts are 0: exp(mean log p_d) approaches
    exp(-(ln 2 pi + 1) / 2) = 0.2420, and the published factor (1 - 0.1) 0.2420 + 0.1 is 0.318."""
    _, method, _, _ = started(network={"kind": "mlp", "features": 512})
    module = method.flow.module
    assert isinstance(module, Flow)
    module.scale = torch.ones_like
    method.flow.parameters.zero_()
    features = torch.randn(64, 512, generator=generator("normal"))
    labels, samples = torch.zeros(64, dtype=torch.int64), torch.zeros(1, 512)
    density = float(method.weights(features, labels, samples, samples, labels[:1])[1])
    assert density == pytest.approx(0.2420, abs=2e-3)
    assert (1 - 0.1) * density + 0.1 == pytest.approx(0.318, abs=2e-3)


def test_soft_cross_entropy_of_equal_outputs_is_the_entropy_and_pulls_nowhere() -> None:
    """The probabilities are p^(1/2), normalised."""
    logits = torch.randn(5, 10, generator=generator("logits"), dtype=torch.float64)
    root = logits.softmax(1).sqrt()
    p = root / root.sum(1, keepdim=True)
    moving = logits.clone().requires_grad_()
    loss = soft_cross_entropy(moving, logits, TEMPERATURE)
    loss.backward()
    torch.testing.assert_close(loss.detach(), -(p * p.log()).sum(1).mean())
    assert moving.grad is not None and moving.grad.abs().max() < 1e-15
    other = logits.roll(1, 1)
    expected = -(p * F.log_softmax(other / 2, 1)).sum(1).mean()
    torch.testing.assert_close(soft_cross_entropy(other, logits, TEMPERATURE), expected)


@pytest.mark.parametrize("hard", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_training_is_sgd_on_the_loss_with_distillation(hard: dict[str, Any]) -> None:
    """Without a flow, against torch.optim.SGD on CE + 0.8 (0.9 MSE(features) + 0.7 KD)."""
    weights = {"k_loss_flow": 0.0, "k_kd_last": 0.8, "k_kd_feature": 0.9, "k_kd_output": 0.7}
    worker, _, plan_, server = started(training={**hard, "epochs": 2}, **weights)
    last = server["parameters"] + 0.1 * torch.randn(P, generator=generator("last"))
    state = {"announced": {"past": pack_bits(class_mask([0], 10))}, "last": {"parameters": last}}
    message = {"parameters": server["parameters"]}
    _, reply = trained(worker, plan_, RoundId(0, 0, 1, 1), state, message)

    experiment = tiny("affcl", training={**hard, "epochs": 2}, **weights)
    dataset, t = experiment.dataset(), experiment.setting.training
    net, old = (small.network(experiment, v) for v in (server["parameters"], last))
    sgd = torch.optim.SGD(net.parameters(), t.lr, t.momentum, weight_decay=t.weight_decay)
    own, order = plan_.train_indices(dataset, 0, 1), generator(0, 0, 1, 1, "order")
    for _ in range(2):
        for batch in own[torch.randperm(len(own), generator=order)].split(t.batch_size):
            images = small.normalised(experiment, dataset.x_train[batch])
            features, old_features = net.encode(images), old.encode(images).detach()
            logits, old_logits = net.head(features), old.head(old_features).detach()
            teacher = (old_logits / 2).softmax(1)
            loss = F.cross_entropy(logits, dataset.y_train[batch])
            loss = loss + 0.8 * 0.9 * (features - old_features).square().mean()
            loss = loss - 0.8 * 0.7 * (teacher * (logits / 2).log_softmax(1)).sum(1).mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    expected = nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.testing.assert_close(reply.message["parameters"], expected, **CLOSE)
    assert torch.equal(reply.state["last"]["parameters"], last)


# ------------------------------------------------------------------ replay


@pytest.mark.parametrize("hard", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_replay_moves_the_head_alone(hard: dict[str, Any]) -> None:
    """Not the encoder, which weight decay would, and not the statistics of normalisation."""
    worker, method, plan_, server = started(network=BATCH_NORM, training=hard)
    state, message = later_round(server, plan_)
    client_round = ClientRound(RoundId(0, 0, 1, 1), plan_, state, message)
    method.receive(client_round)
    model, size = worker.work.model, worker.work.encoder_size
    before, buffers = model.parameters.clone(), model.buffers.clone()
    features = torch.rand(16, 8, generator=generator("features"))
    labels = torch.tensor([2, 3]).repeat(8)
    for _ in range(3):
        method.replay(client_round, features, labels)
    assert torch.equal(model.parameters[:size], before[:size])
    assert not torch.equal(model.parameters[size:], before[size:])
    assert torch.equal(model.buffers, buffers) and not model.gradients.any()


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_statistics_of_normalisation_are_updated_once_a_batch(policy: str) -> None:
    """After one full batch they are FedAvg's: no update depends on a weight that replay moves."""
    options: dict[str, Any] = {"network": BATCH_NORM, "training": {**FULL_BATCH, "buffers": policy}}
    worker, _, plan_, server = started(**options)
    state, message = later_round(server, plan_)
    state["last"] |= {"buffers": server["buffers"] + 0.1}
    round_id = RoundId(0, 0, 1, 0, True)
    trained(worker, plan_, round_id, state, message)
    after = worker.work.model.buffers.clone()
    plain = small.worker(tiny(**options), plan_)
    trained(plain, plan_, round_id, {}, {k: message[k] for k in ("parameters", "buffers")})
    assert torch.equal(after, plain.work.model.buffers)
    assert torch.equal(after, server["buffers"]) == (policy == "frozen")


def test_images_are_encoded_once_unless_the_modes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch takes one pass of the trained encoder, or two if normalisation uses the batch."""
    calls: list[Classifier] = []
    encode = Classifier.encode

    def counted(self: Classifier, images: Tensor) -> Tensor:
        calls.append(self)
        return encode(self, images)

    monkeypatch.setattr(Classifier, "encode", counted)
    for network, expected in ((small.NETWORK, 1), (BATCH_NORM, 2)):
        worker, method, plan_, server = started(network=network, training=FULL_BATCH)
        state, message = later_round(server, plan_)
        state["last"] |= {"buffers": server["buffers"]}
        calls.clear()
        trained(worker, plan_, RoundId(0, 0, 1, 0), state, message)
        assert calls.count(worker.work.classifier) == expected
        assert calls.count(method.teacher) == 1


def drawn_classes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Flow, set[int]]]:
    """The flow and the classes of every draw of samples from now on."""
    draws: list[tuple[Flow, set[int]]] = []
    sample = Flow.sample

    def counted(self: Flow, noise: Tensor, labels: Tensor) -> Tensor:
        draws.append((self, set(labels.tolist())))
        return sample(self, noise, labels)

    monkeypatch.setattr(Flow, "sample", counted)
    return draws


def test_all_classes_learnt_by_anybody_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round of an experience those of the past and of the own task; from the second
    one on also those that others are learning. Samples for the flow are of past classes."""
    options = {"training": {"rounds": 2, "batch_size": 1000}}
    worker, method, plan_, server = started(**options)
    draws = drawn_classes(monkeypatch)
    states = worker.initial_states(0)[1]
    for experience in range(3):
        seen = [set(plan_.seen(u, experience)) for u in range(4)]
        past = set().union(*(plan_.seen(u, experience - 1) for u in range(4)))
        for round_ in range(2):
            replies = []
            for u in range(4):
                draws.clear()
                message = method.broadcast(server, u)
                round_id = RoundId(0, u, experience, round_, round_ == 1)
                reply = trained(worker, plan_, round_id, states[u], message)[1]
                states[u] = reply.state
                replies.append(reply)
                known = set().union(*seen) if round_ else past | seen[u]
                *of_last, (flow, classes) = draws
                assert flow is method.flow.module and classes == known
                assert of_last == [(method.last_flow.module, past)] * bool(past)
            server = method.aggregate(server, replies, Log())


# ------------------------------------------------------------------ the flow


def test_the_flow_is_fitted_to_features_and_to_samples_of_the_last_one() -> None:
    """Against torch.optim.Adam on -mean log p(x) - k_lastflow mean log p(x of the last flow), at a
    local learning rate of 0, in batches of 16, and in a second round from stored moments."""
    options: dict[str, Any] = {"training": {"lr": 0.0}, "flow_lr": 0.01, "k_lastflow": 0.3}
    worker, method, plan_, server = started(**options)
    state, message = later_round(server, plan_)
    reference, last = method.new_flow(0), method.new_flow(0)
    FlatModel(last).load(state["last"]["flow"])
    net = small.network(tiny("affcl"), server["parameters"])
    dataset, adam = worker.work.dataset, torch.optim.Adam(reference.parameters(), lr=0.01)
    indices = plan_.train_indices(dataset, 0, 1)
    for round_ in range(2):
        round_id = RoundId(0, 0, 1, round_)
        _, reply = trained(worker, plan_, round_id, state, message)
        state, message = reply.state, {**message, "flow": reply.message["flow"]}
        past, used = round_id.generator("replay of the last task"), 0
        drawn_past = torch.randint(2, (len(indices),), generator=past)  # for the whole round
        with torch.no_grad():
            pool = last.sample(torch.randn(len(drawn_past), 32, generator=past), drawn_past)
        order = indices[torch.randperm(len(indices), generator=round_id.generator("order"))]
        for batch in order.split(16):
            n, images = len(batch), small.normalised(tiny(), dataset.x_train[batch])
            samples, drawn = pool[used : used + n], drawn_past[used : used + n]
            features, used = net.encode(images).detach(), used + n
            adam.zero_grad()
            loss = -reference(features, dataset.y_train[batch])[1].mean()
            (loss - 0.3 * reference(samples, drawn)[1].mean()).backward()
            adam.step()
    expected = nn.utils.parameters_to_vector(reference.parameters()).detach()
    torch.testing.assert_close(reply.message["flow"], expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected, server["flow"], rtol=0, atol=1e-3)
    assert torch.equal(reply.message["parameters"], server["parameters"])


@pytest.mark.parametrize(("every", "expected"), [(1, [16, 16, 8]), (2, [32, 8]), (5, [40])])
def test_several_batches_may_share_a_step_of_the_flow(
    every: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 40 images; the features of the last, incomplete group are used as well."""
    sizes: list[int] = []
    fit = AFFCL.fit_flow

    def counted(self: AFFCL, client_round: ClientRound, features: Tensor, labels: Tensor) -> None:
        sizes.append(len(labels))
        fit(self, client_round, features, labels)

    monkeypatch.setattr(AFFCL, "fit_flow", counted)
    split = {"images_per_class": 20}
    worker, method, plan_, server = started(split=split, flow_every=every)
    message = method.broadcast(server, 0)
    _, reply = trained(worker, plan_, RoundId(0, 0, 0, 0), {}, message)
    assert sizes == expected and reply.state["moments"]["steps"] == len(expected)


def test_the_server_averages_flows_by_samples() -> None:
    """(1 x (0, 2) + 3 x (4, 6)) / 4 = (3, 5), whatever server_lr; no samples, no weight."""
    _, method, _, server = started(server_lr=2.0)
    replies = []
    for client, (samples, flow) in enumerate([(1, (0.0, 2.0)), (3, (4.0, 6.0)), (0, (9.0, 9.0))]):
        message = {name: server[name] for name in ("parameters", "buffers")}
        message["flow"] = torch.tensor(flow)
        replies.append(Reply(client, {}, message, samples, 1, 0.0))
    assert method.aggregate(server, replies, Log())["flow"].tolist() == [3, 5]
    assert torch.equal(method.aggregate(server, replies[2:], Log())["flow"], server["flow"])


@pytest.mark.parametrize("lr", [0.0, 1e30], ids=["received", "trained"])
def test_training_goes_on_without_a_flow_that_is_not_finite(lr: float) -> None:
    """The received flow is sent back, and Adam starts afresh in the next round."""
    worker, method, plan_, server = started(flow_lr=lr, k_kd_last=0.0, k_lastflow=0.0)
    if not lr:
        server["flow"].fill_(math.inf)
    message = method.broadcast(server, 0)
    client_round, reply = trained(worker, plan_, RoundId(0, 0, 0, 0), {}, message)
    assert client_round.log.events.count(DIVERGED) == 1
    assert torch.equal(reply.message["flow"], server["flow"]) and reply.state["moments"] == {}
    assert torch.isfinite(reply.message["parameters"]).all()
    if not lr:  # never replayed, so the model is FedAvg's
        plain = small.worker(tiny(), plan_)
        of_plain = trained(plain, plan_, RoundId(0, 0, 0, 0), {}, message)[1]
        assert torch.equal(reply.message["parameters"], of_plain.message["parameters"])


def test_samples_that_are_not_finite_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flow, "sample", lambda self, noise, labels: noise * math.nan)
    worker, method, plan_, server = started(training=FULL_BATCH, k_kd_last=0.0)
    message = method.broadcast(server, 0)
    client_round, reply = trained(worker, plan_, RoundId(0, 0, 0, 0), {}, message)
    assert (
        client_round.log.events == [NOT_REPLAYED] and "credibility" not in client_round.log.numbers
    )
    assert not torch.equal(reply.message["flow"], server["flow"])
    plain = small.worker(tiny(training=FULL_BATCH), plan_)
    of_plain = trained(plain, plan_, RoundId(0, 0, 0, 0), {}, message)[1]
    assert torch.equal(reply.message["parameters"], of_plain.message["parameters"])


# ------------------------------------------------------------------ what is kept and sent


def test_the_last_copy_is_what_comes_first_in_an_experience() -> None:
    """None in the first experience; a client that misses the first round takes a later one. The
    nth message is the initial model plus n / 100."""
    worker, _, plan_, server = started()
    for mask, rounds, expected in (
        ([], [(0, 0)], None),
        ([0, 1], [(1, 0), (1, 1)], 0),
        ([0, 1], [(1, 1), (2, 0), (2, 1)], 1),
    ):
        state: State = {}
        for n, (experience, round_) in enumerate(rounds):
            first = n == 0 or rounds[n - 1][0] != experience
            message = {name: server[name] + n / 100 for name in ("parameters", "flow")}
            name = PREFIX + "past" if first else "learnt"
            message[name] = pack_bits(class_mask(mask, 10))
            given = small.copied(message)
            reply = trained(worker, plan_, RoundId(0, 0, experience, round_), state, message)[1]
            small.assert_equal_trees(message, given)
            state = reply.state
        assert bool(state["last"]) == (expected is not None)
        for name in state["last"]:
            assert torch.equal(state["last"][name], server[name] + expected / 100)


@pytest.mark.parametrize("policy", ["shared", "local"])
def test_the_last_classifier_has_its_own_statistics_of_normalisation(policy: str) -> None:
    """Those received with it or, where they stay local, those of the client."""
    worker, method, plan_, server = started(network=BATCH_NORM, training={"buffers": policy})
    server = {**server, "past": class_mask([0, 1], 10), "buffers": server["buffers"] + 0.5}
    own = server["buffers"] + 0.25
    state = {"buffers": own} if policy == "local" else {}
    reply = trained(worker, plan_, RoundId(0, 0, 1, 0), state, method.broadcast(server, 0))[1]
    expected = own if policy == "local" else server["buffers"]
    assert torch.equal(reply.state["last"]["buffers"], expected)
    assert torch.equal(method.flat_teacher.buffers, expected)


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        ({}, ("flow", "parameters")),
        ({"k_kd_last": 0.0}, ("flow",)),
        ({"k_kd_feature": 0.0, "k_kd_output": 0.0}, ("flow",)),
        ({"k_lastflow": 0.0}, ("parameters",)),
        ({"k_loss_flow": 0.0}, ("parameters",)),
        ({"k_loss_flow": 0.0, "k_kd_last": 0.0}, None),
        ({"k_lastflow": 0.0, "k_kd_last": 0.0}, None),
    ],
    ids=str,
)
def test_nothing_is_kept_or_sent_for_a_weight_of_zero(
    weights: dict[str, float], kept: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without replay there is no flow: none is built, drawn from, trained, kept or sent."""
    draws = drawn_classes(monkeypatch)
    worker, method, plan_, server = started(**weights)
    server = {**server, "past": class_mask([0, 1], 10)}
    message = method.broadcast(server, 0)
    reply = trained(worker, plan_, RoundId(0, 0, 1, 0), {}, message)[1]
    flow = weights.get("k_loss_flow", 1) > 0
    for tree in (server, message, reply.message):
        assert ("flow" in tree) == flow
    assert bool(draws) == flow == hasattr(method, "flow") == ("moments" in reply.state)
    assert (tuple(sorted(reply.state["last"])) if "last" in reply.state else None) == kept
    assert hasattr(method, "teacher") == ("parameters" in (kept or ()))


def test_a_round_of_resnet18_costs_the_classifier_and_the_flow() -> None:
    """The flow has the published size. The published classifier has 605,456 parameters more than
    this ResNet-18: two layers of 512 x 512 between features and head and 87,824 of attention that
    its forward pass does not use, less 7,680 for its smaller stem. So the published 72,924,880
    bytes are 2,421,824 more.
    """
    layers, attention, stem = 2 * (512 * 512 + 512), 87_824, (49 - 9) * 3 * 64
    published = RESNET + layers + attention - stem
    assert published == 11_833_268 and (published + FLOW) * 4 == 72_924_880
    sizes = first_round("affcl")
    assert sizes.down == sizes.up == 4 * (RESNET + FLOW) + BITS == 72_924_880 - 2_421_824 + BITS
    moments = 2 * 4 * FLOW
    assert sizes.disk == 4 * B + BITS + moments  # no last task yet


def test_a_client_keeps_the_last_models_and_the_moments() -> None:
    """And every round carries the classes as bits down, the first one of a task also up."""
    options: dict[str, Any] = {"split": {"images_per_class": 9}, "training": {"buffers": "local"}}
    record = run(tiny("affcl", network=BATCH_NORM, **options, **SMALL))
    flow = len(started(network=BATCH_NORM)[3]["flow"])
    moments, last = 2 * 4 * flow, 4 * (BN_P + flow + BN_B)
    assert [row["disk"] - 4 * BN_B - 2 for row in record.history] == [
        *[moments] * 2,
        *[moments + last] * 4,
    ]
    for row in record.history:
        down = 4 * (BN_P + flow) + 2
        up = down if row["round"] == 0 else down - 2
        assert row["bytes"] == {"down": 4 * down, "up": 4 * up}
        assert row["seconds"]["flow"] > 0 and row["notes"]["flow density"] > 0


@pytest.mark.parametrize("options", [{"participation": 0.5, "dropout": 0.3}, {}], ids=str)
@pytest.mark.parametrize("features", [1, 7])
def test_odd_features_missed_rounds_and_cycles_do_no_harm(
    features: int, options: dict[str, Any]
) -> None:
    split = {"cycles": 2, "images_per_class": 9}
    network = {"kind": "mlp", "features": features}
    params: dict[str, Any] = {"k_loss_flow": 1.0, "flow_layers": 2}
    record = run(tiny("affcl", split=split, network=network, training=options, **params))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert all(row["events"] == {} for row in record.history)


# ------------------------------------------------------------------ refused parameters
