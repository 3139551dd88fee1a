"""AF-FCL against a naive reference in torch; the flow; failures, statistics and what is kept."""

import math
from typing import Any

import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import CONFIGURATIONS, Reply, State, Visit
from small import BATCH_NORM, plan, tiny
from torch import Tensor
from torch_reference import CLOSE, Adam, Descent, TorchReference, soft_cross_entropy, taker

from workbench.methods.affcl.flow import Flow, Scale
from workbench.methods.affcl.replay import CLIPPED, DIVERGED, NOT_REPLAYED
from workbench.methods.base.generators import build_seeded

SMALL: dict[str, Any] = {"flow_layers": 3, "flow_hidden": 6, "flow_lr": 0.01}


class NaiveFlow:
    """A flow of couplings on a vector of parameters.

    h = W [kept; onehot] + b; twice h += (W2 a(W1 a(h) + b1) + b2) * sigmoid(W_c onehot + b_c) with
    a leaky rectifier a of slope 0.01; [shift; raw] = V h + c. The scale is sigmoid(raw + 2) + 0.001
    or min(log(1 + e^raw) + 0.001, 3).
    """

    def __init__(self, flow: Flow, scale: Scale, vector: Tensor) -> None:
        shapes = {name: p.shape for name, p in flow.named_parameters()}
        parts = reference.pieces(vector, shapes.values())
        self.weights = dict(zip(shapes, parts, strict=True))
        self.orders, self.classes, self.hidden = flow.orders, flow.classes, flow.hidden
        self.default = scale == "default"

    def affine(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def coupling(self, layer: int, kept: Tensor, onehot: Tensor) -> tuple[Tensor, Tensor]:
        name = f"couplings.{layer}"
        h = self.affine(f"{name}.enter", torch.cat([kept, onehot], 1))
        gates = self.affine("gates", onehot).sigmoid()
        for block in range(2):
            inner = self.affine(f"{name}.first.{block}", torch.maximum(h, 0.01 * h))
            inner = self.affine(f"{name}.second.{block}", torch.maximum(inner, 0.01 * inner))
            start = (2 * layer + block) * self.hidden
            h = h + inner * gates[:, start : start + self.hidden]
        shift, raw = self.affine(f"{name}.leave", h).chunk(2, 1)
        if self.default:
            return shift, (raw + 2).sigmoid() + 0.001
        return shift, ((1 + raw.exp()).log() + 0.001).clamp(max=3)

    def noise(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The noise u of features x and log p(x) = sum log s - |u|^2 / 2 - D / 2 log(2 pi)."""
        onehot, half = torch.eye(self.classes)[labels].to(x), x.shape[1] // 2
        density = -x.shape[1] / 2 * math.log(2 * math.pi)
        for layer, order in enumerate(self.orders):
            x = x[:, order]
            shift, scale = self.coupling(layer, x[:, :half], onehot)
            x = torch.cat([x[:, :half], shift + scale * x[:, half:]], 1)
            density = density + scale.log().sum(1)
        return x, density - x.square().sum(1) / 2

    def sample(self, u: Tensor, labels: Tensor) -> Tensor:
        """The features of noise u: the layers backwards, each solved for its input."""
        onehot, half = torch.eye(self.classes)[labels].to(u), u.shape[1] // 2
        for layer in reversed(range(len(self.orders))):
            shift, scale = self.coupling(layer, u[:, :half], onehot)
            permuted = torch.cat([u[:, :half], (u[:, half:] - shift) / scale], 1)
            u = torch.empty_like(u)
            u[:, self.orders[layer]] = permuted
        return u


class AFFCLReference(TorchReference):
    """The flow learns features, the head learns from its samples; old networks teach."""

    def start(self) -> None:
        super().start()
        self.clipped = 0  # replay steps
        p = self.params
        sizes = (32, self.classes, p.flow_hidden, p.flow_layers, p.flow_scale)
        self.net = build_seeded(lambda: Flow(*sizes), self.plan.seed, "flow")
        self.flow = small.flat(list(self.net.parameters()))

    def on(self, vector: Tensor) -> NaiveFlow:
        return NaiveFlow(self.net, self.params.flow_scale, vector)

    def local(self, visit: Visit, state: State) -> Reply:
        p, first = self.params, visit.client not in self.told
        if first:
            state["past"] = self.past
            state["last"] = (self.theta, self.flow) if self.past.any() else None
        learnt = (state["past"] if first else self.seen) | self.own_classes(visit)
        size = (self.training.epochs * len(visit.indices), 32)
        take = taker(learnt, size, self.draw(visit, "replay"))
        take_old = taker(state["past"], size, self.draw(visit, "replay of the last task"))
        theta, flow, last = self.theta, self.flow, state["last"]
        state["adam"] = adam = state.get("adam") or Adam(p.flow_lr)
        descent, of_head = Descent(self.training), Descent(self.training, weight_decay=0.0)
        waiting = list[tuple[Tensor, Tensor]]()
        batches = self.batches(visit)
        for place in range(len(batches) + 1):
            batch = batches[place : place + 1]
            waiting += [(self.features(theta, self.x[each]), self.y[each]) for each in batch]
            if len(waiting) == p.flow_every or (waiting and not batch):
                features, labels = map(torch.cat, zip(*waiting, strict=True))
                flow = self.fit(adam, flow, features, labels, last, take_old)
                theta = self.replay(of_head, theta, flow, features, labels, last, take)
                waiting.clear()
            for each in batch:
                theta = descent.step(theta, lambda v: self.image_loss(v, each, last))  # noqa: B023
        return Reply(visit.client, theta, len(visit.indices), {"flow": flow})

    def fit(self, adam: Adam, flow: Tensor, x: Tensor, y: Tensor, last: Any, take: Any) -> Tensor:
        leaf = flow.clone().requires_grad_()
        loss = -self.on(leaf).noise(x, y)[1].mean()
        if last:
            labels, noise = take(len(y))
            old = self.on(last[1]).sample(noise, labels)
            loss = loss - self.params.k_lastflow * self.on(leaf).noise(old, labels)[1].mean()
        return adam.move(flow, torch.autograd.grad(loss, leaf)[0])

    def replay(
        self, sgd: Descent, theta: Tensor, flow: Tensor, x: Tensor, y: Tensor, last: Any, take: Any
    ) -> Tensor:
        """A step of the head on samples, each weighted by its credibility; not a long one."""
        p = self.params
        labels, noise = take(len(y))
        samples = self.on(flow).sample(noise, labels)
        own, log_density = self.on(flow).noise(x, y)
        density = (log_density / 32).exp().mean()
        weights = torch.stack([density] * len(y))
        for i, label in enumerate(labels):
            if (y == label).any():
                of_class = own[y == label]
                variance = of_class.var(0, correction=0).clamp(min=0.01)
                normal = torch.distributions.Normal(of_class.mean(0), variance.sqrt())
                weights[i] = normal.log_prob(noise[i]).exp().mean()

        def loss(vector: Tensor) -> Tensor:
            logits = self.outputs(vector, samples)
            each = F.cross_entropy(logits, labels, reduction="none")
            value = (weights * each).mean() * ((1 - p.theta) * density + p.theta)
            if last:
                old = self.outputs(last[0], samples)
                value = value + p.k_kd_last * p.k_kd_output * soft_cross_entropy(logits, old, 2.0)
            return p.k_loss_flow * value

        leaf = theta.clone().requires_grad_()
        norm = float(torch.autograd.grad(loss(leaf), leaf)[0].norm())
        self.clipped += norm > p.replay_clip
        return sgd.step(theta, lambda vector: min(1, p.replay_clip / norm) * loss(vector))

    def image_loss(self, theta: Tensor, batch: Any, last: Any) -> Tensor:
        """Cross-entropy and the distances from the last task's features and outputs."""
        features = self.features(theta, self.x[batch])
        logits = self.outputs(theta, features)
        loss = F.cross_entropy(logits, self.y[batch])
        if last:
            old = self.features(last[0], self.x[batch])
            of_features = (features - old).square().mean()
            of_outputs = soft_cross_entropy(logits, self.outputs(last[0], old), 2.0)
            of_outputs = self.params.k_kd_output * of_outputs
            loss = loss + self.params.k_kd_last * (0.5 * of_features + of_outputs)
        return loss

    def aggregate(self, replies: list[Reply]) -> None:
        super().aggregate(replies)
        mean = self.mean([reply.sent["flow"] for reply in replies], replies)
        self.flow = self.flow + self.params.server_lr * (mean - self.flow)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"k_loss_flow": 0.5, "k_kd_last": 1.0, "server_lr": 1.5},
        {"k_loss_flow": 2.0, "flow_every": 2, "flow_scale": "general", "theta": 1.0},
        {"k_loss_flow": 2.0, "replay_clip": 0.2},
    ],
    ids=["default", "general", "clipped"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration):
    options = {**SMALL, **params, "close": CLOSE}
    record, naive, _ = reference.compare("affcl", configuration, AFFCLReference, **options)
    assert sum(row["events"].get(CLIPPED, 0) for row in record.history) == naive.clipped
    assert naive.clipped or "replay_clip" not in params


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_every_feature_is_mapped_and_all_flows_permute_alike(layers):
    """Whatever the seed of the weights; layers reverse first and permute at random then."""
    makes = [lambda: Flow(7, 2, 3, layers, "default")] * 2
    one, other = (build_seeded(make, seed) for seed, make in enumerate(makes))
    assert torch.equal(one.orders, other.orders)
    assert not torch.equal(one.gates.weight, other.gates.weight)
    reverse = torch.arange(6, -1, -1)
    first = max(2, layers // 2)
    assert all(torch.equal(order, reverse) == (i < first) for i, order in enumerate(one.orders))
    assert (one(torch.ones(1, 7), torch.tensor([0]))[0] != 1).all()


def after_first_task(**options: Any) -> tuple[Any, Any]:
    """A worker and a client round of its second task, in which it has a last task."""
    experiment = tiny("affcl", **{**SMALL, **options})
    worker = small.worker(experiment, plan(experiment))
    client_round = small.arrived(worker, plan(experiment), 1)
    client_round.message["announced past"] = torch.tensor([255, 3], dtype=torch.uint8)
    return worker, client_round


def test_training_goes_on_without_a_flow_that_is_not_finite():
    """The received flow is sent back, and Adam starts afresh in the next round."""
    worker, client_round = after_first_task(flow_lr=1e30)
    reply = worker.method.train_client(client_round)
    assert reply.log.events.count(DIVERGED) == 1 and math.isfinite(reply.loss)
    assert torch.equal(reply.message["flow"], client_round.message["flow"])
    assert reply.state["moments"] == {}


def test_samples_that_are_not_finite_are_not_replayed(monkeypatch):
    broken = lambda flow, noise, labels: torch.full_like(noise, torch.nan)  # noqa: E731
    monkeypatch.setattr(Flow, "sample", broken)
    worker, client_round = after_first_task(
        k_lastflow=0.0, k_kd_last=0.0, split={"images_per_class": 16}
    )
    reply = worker.method.train_client(client_round)
    assert reply.log.events == [NOT_REPLAYED] * 2
    plain = small.worker(tiny(split={"images_per_class": 16}), client_round.plan)
    fedavg = plain.method.train_client(small.arrived(plain, client_round.plan, 1))
    assert torch.equal(reply.message["parameters"], fedavg.message["parameters"])


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_statistics_of_normalisation_are_updated_once_a_batch(policy):
    """After one full batch they are FedAvg's; the last classifier has those it was received with,
    or the client's own where they stay local."""
    training = {"rounds": 1, "batch_size": 1000, "buffers": policy, "momentum": 0.9}
    options: dict[str, Any] = {"network": BATCH_NORM, "training": training}
    worker, client_round = after_first_task(**options)
    reply = worker.method.train_client(client_round)
    found = worker.runtime.model.buffers.clone()
    received = client_round.state.get("buffers", client_round.message.get("buffers"))
    received = worker.runtime.untrained if received is None else received
    assert torch.equal(reply.state["last"]["buffers"], received)
    plain = small.worker(tiny(**options), client_round.plan)
    plain.method.train_client(client_round)
    torch.testing.assert_close(found, plain.runtime.model.buffers, rtol=0, atol=1e-6)
