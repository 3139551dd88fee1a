"""FedL2P against a naive reference with whole Hessians; the network, bytes, rare cases."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import CLOSE, CONFIGURATIONS, FedAvgReference, Numbers, Reply, State, Visit
from small import BATCH_NORM, BN_B, run, tiny
from torch import Tensor
from torch.autograd.functional import hessian, jacobian
from torch.distributions import Normal, kl_divergence

from stamp_core.client.runtime import RoundId
from stamp_core.core.seeding import generator
from workbench.methods.fedl2p.meta_networks import LayerStatistics, layer_statistics

FEW = {"images_per_class": 20}  # 40 images a task, 8 of them held out
BN: dict[str, Any] = {"network": BATCH_NORM, "split": FEW}
Moments = tuple[Tensor, Tensor]


class FedL2PReference(FedAvgReference):
    """Outer steps on the meta-networks, then FedAvg; networks are functions of a vector θ."""

    net: Moments = (torch.zeros(0), torch.zeros(0))  # the network's running statistics

    def start(self) -> None:
        """BNNet and LRNet: Xavier weights of gain 0.1, biases of 0.5 and 1; then learning rates."""
        k = len(self.shapes)  # tensors, two for each learnable layer
        self.has_norm = k == 8
        self.sizes = torch.tensor([int(np.prod(shape)) for shape in self.shapes])
        sizes = [(1, 100, 100, 1)] * self.has_norm + [(k, 100, 100, k)]
        draw = generator(self.plan.seed, "meta")
        self.mlps = [[(b, a) for a, b in pairwise(each)] for each in sizes]
        parts = []
        for mlp, bias in zip(self.mlps, [0.5, 1.0][-len(sizes) :], strict=True):
            for b, a in mlp:
                deviation = 0.1 * (2 / (a + b)) ** 0.5
                parts += [deviation * torch.randn(b, a, generator=draw), torch.full((b,), bias)]
        parts.append(torch.full((k,), self.params.finetune_lr))
        self.meta = torch.cat([part.flatten() for part in parts]).double()

    def settings(self, meta: Tensor, statistics: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Beta [N] and the learning rate of each tensor [K], by the meta-networks."""
        found = []
        for mlp, z in zip(self.mlps, statistics, strict=True):
            for place, (b, a) in enumerate(mlp):
                w, bias, meta = meta.split([a * b, b, len(meta) - a * b - b])
                z = F.linear(z, w.view(b, a), bias)
                z = z if place == 2 else z.relu()
            found.append(z)
        multipliers = found[-1] + (found[-1].clamp(0, 1000) - found[-1]).detach()
        beta = found[0] + (found[0].clamp(0, 1) - found[0]).detach() if self.has_norm else meta[:0]
        return beta, meta * multipliers

    def forward(self, theta: Tensor, own: Numbers, moments: Any) -> tuple[Tensor, list[Tensor]]:
        """Logits and the inputs of all learnable layers; `moments(maps)` normalise the maps."""
        tensors = self.parts(theta)
        z = torch.from_numpy(self.x[own])
        inputs = []
        if self.has_norm:
            z = z.view(-1, 1, 8, 8)
            maps = F.conv2d(z, *tensors[:2])
            inputs = [z, maps]
            mean, variance = (each.view(-1, 1, 1) for each in moments(maps))
            gain, bias = (each.view(-1, 1, 1) for each in tensors[2:4])
            normal = (maps - mean) / (variance + 1e-5).sqrt() * gain + bias
            z = F.max_pool2d(normal.relu(), 2).flatten(1)
        hidden = F.linear(z, *tensors[-4:-2]).relu()
        return F.linear(hidden, *tensors[-2:]), [*inputs, z, hidden]

    def loss(self, theta: Tensor, own: Numbers, moments: Any) -> Tensor:
        return F.cross_entropy(self.forward(theta, own, moments)[0], torch.from_numpy(self.y[own]))

    def statistics(self, theta: Tensor, own: Numbers) -> list[Tensor]:
        """Mean and deviation of layers' inputs; the divergence of maps from the network's."""
        _, inputs = self.forward(theta, own, lambda maps: self.net)
        pairs = [(z.mean(), (z.var(correction=0) + 1e-5).sqrt()) for z in inputs]
        found = [torch.stack([number for pair in pairs for number in pair])]
        if self.has_norm:
            mean, variance = batch_moments(inputs[1])
            one = Normal(mean, (variance + 1e-5).sqrt())
            two = Normal(self.net[0], (self.net[1] + 1e-5).sqrt())
            both = kl_divergence(one, two) + kl_divergence(two, one)
            found.insert(0, both.mean()[None] / 2)
        return found

    def mixed(self, beta: Tensor, own: Moments) -> Moments:
        """(1 - beta) of the network's statistics and beta of the client's."""
        mean, variance = ((1 - beta) * a + beta * b for a, b in zip(self.net, own, strict=True))
        return mean, variance

    def tune(
        self, theta: Tensor, batches: Iterable[Numbers], lrs: Tensor, beta: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Moments]]:
        """After every step θ, the gradient that led there, and new running statistics."""
        running = torch.zeros(4), torch.ones(4)
        lrs = lrs.repeat_interleave(self.sizes)
        for own in batches:
            seen = []

            def moments(maps: Tensor, seen: list[Tensor] = seen) -> Moments:
                seen.append(maps.detach())
                return self.mixed(beta, batch_moments(maps))

            theta = theta.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss(theta, own, moments), theta)
            theta = (theta - lrs * gradient).detach()
            for maps in seen:
                new = maps.mean((0, 2, 3)), maps.var((0, 2, 3))
                running = tuple(0.9 * a + 0.1 * b for a, b in zip(running, new, strict=True))
            yield theta, gradient, running

    def outer_step(self, theta: Tensor, statistics: list[Tensor], inner: Any, outer: Any) -> Tensor:
        """The hypergradient, by the Hessian and the Jacobians of all meta-parameters."""
        beta, lrs = self.settings(self.meta, statistics)
        steps = list(self.tune(theta, islice(inner, self.params.inner_steps), lrs, beta))
        theta, last, running = steps[-1]
        held, own = next(outer), next(inner)
        d_lrs = jacobian(lambda meta: self.settings(meta, statistics)[1], self.meta)  # [K, M]

        def held_out(theta: Tensor, beta: Tensor) -> Tensor:
            return self.loss(theta, held, lambda maps: self.mixed(beta, running))

        def training(theta: Tensor, beta: Tensor) -> Tensor:
            return self.loss(theta, own, lambda maps: self.mixed(beta, running))

        def slope(beta: Tensor) -> Tensor:
            point = theta.clone().requires_grad_()
            return torch.autograd.grad(training(point, beta), point, create_graph=True)[0]

        v = jacobian(lambda point: held_out(point, beta), theta)
        h = hessian(lambda point: training(point, beta), theta, vectorize=True)
        series = torch.eye(len(h)) - 0.1 * h
        terms = range(4)
        p = sum(torch.linalg.matrix_power(series, j) @ v for j in terms)
        by_tensor = (p @ h * last).split(self.sizes.tolist())  # θ = before - lrs * last
        gradient = torch.stack([part.sum() for part in by_tensor]) @ d_lrs
        if self.has_norm:
            through = jacobian(lambda b: held_out(theta, b), beta) - p @ jacobian(
                slope, beta, vectorize=True
            )
            d_beta = jacobian(lambda meta: self.settings(meta, statistics)[0], self.meta)
            gradient = gradient + through @ d_beta
        return gradient

    def local(self, visit: Visit, state: State) -> Reply:
        received = self.meta
        held, others = self.divided(visit)
        theta = torch.from_numpy(self.theta)
        statistics = self.statistics(theta, others) if len(held) else []
        inner, outer = self.endless(visit, others, "inner"), self.endless(visit, held, "outer")
        for _ in range(self.params.outer_steps if len(held) else 0):
            gradient = self.outer_step(theta, statistics, inner, outer)
            lr = torch.full_like(gradient, self.params.meta_lr)
            lr[-len(self.shapes) :] = self.params.hyper_lr
            self.meta = self.meta - lr * gradient.clamp(-self.params.clamp, self.params.clamp)
        reply = super().local(visit, state)
        reply.sent = {"meta": self.meta, "held": len(held)}
        self.meta = received
        return reply

    def aggregate(self, replies: list[Reply]) -> None:
        super().aggregate(replies)
        total = sum(reply.sent["held"] for reply in replies)
        if total:
            self.meta = sum(reply.sent["held"] / total * reply.sent["meta"] for reply in replies)

    def divided(self, visit: Visit) -> tuple[Numbers, Numbers]:
        draw = generator(self.plan.seed, visit.client, visit.task, "held out")
        order = visit.indices[torch.randperm(len(visit.indices), generator=draw).numpy()]
        held, others = np.split(order, [int(0.2 * len(order))])
        return held, others

    def endless(self, visit: Visit, indices: Numbers, purpose: str) -> Iterator[Numbers]:
        draw = self.draw(visit, purpose)
        while True:
            yield from self.passes(indices, draw, self.training.batch_size)

    def personal(self, client: int) -> tuple[Tensor, Moments]:
        """The fine-tuned θ of the current task and its statistics."""
        visit = reference.last_visit(self, client)
        theta = torch.from_numpy(self.theta)
        beta, lrs = self.settings(self.meta, self.statistics(theta, visit.indices))
        draw, size = self.draw(visit, "personal"), self.training.batch_size
        batches = self.passes(visit.indices, draw, size, self.params.ft_epochs)
        *_, (theta, _, running) = self.tune(theta, batches, lrs, beta)
        return theta, self.mixed(beta, running) if self.has_norm else self.net


def batch_moments(maps: Tensor) -> Moments:
    return maps.mean((0, 2, 3)), maps.var((0, 2, 3), correction=0)


LEARNING = {"lr": 0.05, "outer_steps": 2, "inner_steps": 3, "ft_epochs": 2, "clamp": 0.1}


def assert_personal_models(experiment: Any, plan: Any, saved: Any, naive: FedL2PReference) -> None:
    np.testing.assert_allclose(saved["server"]["meta"], naive.meta, rtol=0, atol=2e-6)
    worker = small.worker(experiment, plan)
    for client, state in enumerate(saved["clients"]):
        method: Any = worker.method
        message = method.broadcast(saved["server"], client)
        last = RoundId(0, client, plan.experiences - 1, experiment.setting.training.rounds - 1)
        client_round = method.client_round(last, plan, state, message)
        method.receive(client_round)
        found = layer_statistics(method.runtime, method.norms, client_round.indices)
        own = naive.statistics(torch.from_numpy(naive.theta), client_round.indices.numpy())
        np.testing.assert_allclose(torch.cat([*found][::-1]), torch.cat(own), rtol=1e-3, atol=1e-5)
        method.load_personal_model(client_round)
        theta, moments = naive.personal(client)
        np.testing.assert_allclose(worker.runtime.model.parameters, theta, **CLOSE)
        np.testing.assert_allclose(worker.runtime.model.buffers, torch.cat(moments), **CLOSE)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_whole_runs_are_those_of_the_reference(configuration, tmp_path):
    params: dict[str, Any] = {"network": {"kind": "mlp", "features": 4}, **LEARNING}
    _, naive, _ = reference.compare("fedl2p", configuration, FedL2PReference, tmp_path, **params)
    experiment = tiny("fedl2p", **CONFIGURATIONS[configuration], **params)
    assert_personal_models(experiment, naive.plan, small.saved(experiment, tmp_path), naive)


def test_a_run_with_a_frozen_network_is_that_of_the_reference(tmp_path, monkeypatch):
    """With batch normalisation; the network is that of the record."""
    options: dict[str, Any] = {"network": BATCH_NORM, "split": {**FEW, "clients": 2}}
    experiment = tiny("fedl2p", **options, **LEARNING, backbone="frozen", warm_rounds=3)
    plan = small.plan(experiment)
    run(experiment, plan, resume=tmp_path)
    saved = small.saved(experiment, tmp_path)
    naive = FedL2PReference(experiment, plan)
    monkeypatch.setattr(naive, "sgd", lambda visit, theta, state: theta)
    naive.theta = saved["server"]["parameters"].double().numpy()
    mean, variance = saved["server"]["buffers"].double().split(4)
    naive.net = mean, variance
    naive.run()
    assert_personal_models(experiment, plan, saved, naive)


@pytest.mark.parametrize("buffers", ["shared", "local"])
def test_outer_steps_do_not_change_the_network(buffers):
    training = {"momentum": 0.9, "shift": 1, "participation": 0.75, "buffers": buffers}
    record = run(tiny("fedl2p", **BN, training=training, outer_steps=2, finetune_lr=0.1))
    expected = run(tiny(**BN, training=training))
    small.assert_same_weights(record, expected)
    for model in ("initial", "global", "local"):
        np.testing.assert_array_equal(record.scores[model], expected.scores[model], model)
    assert [row["loss"] for row in record.history] == [row["loss"] for row in expected.history]
    assert all("lr" in row["notes"] and row["seconds"]["meta"] > 0 for row in record.history)


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_the_frozen_network_is_fedavgs_on_the_first_tasks(policy, tmp_path):
    """The weights are those of a run of FedAvg that ends there, and never change; with local
    buffers every client keeps its own. There is no global model."""
    frozen = {"backbone": "frozen", "warm_rounds": 3}
    experiment = tiny("fedl2p", **BN, **frozen, training={"rounds": 2, "buffers": policy})
    short = tiny(**BN, training={"rounds": 3, "buffers": policy})
    whole = small.plan(experiment)
    clients = tuple(sequence[:1] for sequence in whole.clients)
    first = replace(whole, split=replace(whole.split, tasks=1), clients=clients)
    run(short, first, resume=tmp_path / "fedavg")
    record = run(experiment, resume=tmp_path)
    state = small.saved(experiment, tmp_path)
    warm = small.saved(short, tmp_path / "fedavg")
    for name in ("parameters", "buffers"):
        assert torch.equal(state["server"][name], warm["server"][name])
    for own, before in zip(state["clients"], warm["clients"], strict=True):
        assert own.keys() == {"parameters", "buffers"}
        assert torch.equal(own["parameters"], state["server"]["parameters"])
        assert torch.equal(own["buffers"], before.get("buffers", state["server"]["buffers"]))
    assert np.isnan(record.scores["local"]).all() and np.isnan(record.scores["global"]).all()
    assert np.isfinite(record.accuracy("personal")).all() and record.weights == {}
    assert all(row["loss"] > 0 and row["sgd_steps"] == 4 for row in record.history)


def constant(l2p: Any, beta: float, multiplier: float, lr: float) -> Tensor:
    """Meta-networks with the same output for every client: no weights, and these last biases."""
    parts = [torch.zeros_like(part) for part in l2p.nets.parts]
    parts[5].fill_(beta)
    parts[-2].fill_(multiplier)
    parts[-1].fill_(lr)
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize(
    ("output", "beta", "multiplier"), [(-7.3, 0, 0), (0.4, 0.4, 0.4), (50.0, 1, 50), (2e3, 1, 1e3)]
)
def test_outputs_are_clamped_and_the_gradient_passes_through(output, beta, multiplier):
    l2p = small.worker(tiny("fedl2p", **BN)).method
    meta = constant(l2p, output, output, 1.0).requires_grad_()
    found = l2p.nets(meta, LayerStatistics(torch.ones(8), torch.ones(1)))
    assert found[0].tolist() == pytest.approx([beta])
    assert found[1].tolist() == pytest.approx([multiplier] * 8)
    (gradient,) = torch.autograd.grad(5 * (found[0].sum() + found[1].sum()), meta)
    assert float(gradient[l2p.nets.bn_size - 1]) == 5 and gradient[-16:-8].tolist() == [5] * 8


def test_a_step_that_is_not_finite_is_skipped_and_named():
    """With learning rates of 1e30 the meta-networks stay, and all models stay finite."""
    record = run(tiny("fedl2p", split=FEW, finetune_lr=1e30))
    skipped = "meta-networks: skipped a step that is not finite"
    assert all(row["events"] == {skipped: 4} for row in record.history)
    small.assert_same_weights(record, run(tiny(split=FEW)))
    assert np.isfinite(record.accuracy("personal")).all()


@pytest.mark.parametrize(
    ("size", "most"), [(5.0, 1.0), (1e4, 0.5), (1e30, 0.5), (float("nan"), 0.0)]
)
def test_the_gradient_of_a_loss_above_100_is_clipped_and_of_one_not_finite_zero(size, most):
    """With no weights but a bias of +size for class 5 and -size for the others nine in ten
    images have the loss 2 size, and the bias of class 5 a gradient of 0.9."""
    l2p = small.worker(tiny("fedl2p")).method
    batch = next(l2p.runtime.plain_batches(torch.arange(40), 40))
    bias = l2p.classifier.head.get_parameter("bias")
    l2p.model.parameters.zero_()
    bias.data.copy_(torch.where(torch.arange(10) == 5, size, -size))
    loss = F.cross_entropy(l2p.classifier(batch.images), batch.targets)
    (raw,) = torch.autograd.grad(loss, [bias])
    assert not float(raw.abs().max()) <= 0.5
    assert torch.equal(l2p.clipped_gradient(batch)[-10:], raw.nan_to_num(0).clamp(-most, most))


@pytest.mark.parametrize(
    ("client", "changes", "same"),
    [(1, {"ft_epochs": 0}, True), (0, {}, False), (2, {}, True)],
    ids=["no epochs", "one image", "no image"],
)
def test_without_batch_statistics_normalisation_is_not_mixed(client, changes, same):
    """Else it would use the reset mean of 0 and variance of 1."""
    experiment = tiny("fedl2p", **BN, **changes)
    plan = small.awkward(experiment)
    worker = small.worker(experiment, plan)
    l2p, client_round = worker.method, small.arrived(worker, plan, 0, client)
    buffers = torch.rand(BN_B, generator=generator("gathered"))
    client_round.message.update(meta=constant(l2p, 0.5, 1.0, 0.1), buffers=buffers)
    l2p.load_personal_model(client_round)
    assert torch.equal(l2p.model.buffers, buffers)
    assert torch.equal(l2p.model.parameters, client_round.message["parameters"]) == same
