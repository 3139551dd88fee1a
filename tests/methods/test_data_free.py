"""TARGET and LANDER against a naive reference in torch over whole runs; statistics, failures."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import CONFIGURATIONS, GROWING, Numbers, Reply, State, Visit
from small import BATCH_NORM, SYNTHESIS, plan, run, whole
from torch import Tensor, nn
from torch_reference import CLOSE, Adam, Descent, TorchReference, divergence, soft_cross_entropy

from stamp_core.core.seeding import address, generator
from stamp_core.methods.base.method import Log
from stamp_core.models.networks import build_network
from workbench.methods.base import synthesis
from workbench.methods.base.data_free import NO_IMAGES
from workbench.methods.base.generators import ImageGenerator, build_seeded
from workbench.methods.base.synthesis import Synthesis
from workbench.methods.lander import NoisyLabelGenerator

KINDS = ("target", "lander")
BETAS = (0.5, 0.999)


class DataFreeReference(TorchReference):
    """The server inverts its model into images, and clients distil from them."""

    shape = (1, 8, 8)
    replay: tuple[Tensor, Tensor, Tensor] | None = None  # images, labels, teacher

    def local(self, visit: Visit, state: State) -> Reply:
        """A client round; what was announced stays for the experience."""
        if visit.client not in self.told:
            state["past"], state["replay"] = self.past, self.replay
        state["batches"] = None
        own = self.own_classes(visit)
        state["others"] = others = state["past"] & ~own
        if state["replay"] and len(visit.indices):
            images, labels, state["teacher"] = state["replay"]
            if len(kept := images[others[labels]]):
                state["batches"] = self.synthetic(visit, kept)
        return super().local(visit, state)

    def synthetic(self, visit: Visit, images: Tensor) -> Iterator[Tensor]:
        """Batches of synthetic images without end; a local epoch passes all of them once."""
        draw = self.draw(visit, "replay")
        steps = math.ceil(len(visit.indices) / self.training.batch_size)
        size = self.params.replay_batch_size or math.ceil(len(images) / steps)
        rows = torch.from_numpy(self.normalised(images)).float()
        while True:
            yield from rows[torch.randperm(len(rows), generator=draw)].split(size)

    def sgd(self, visit: Visit, theta: Tensor, state: State) -> Tensor:
        descent = Descent(self.training, lr=self.lr)
        for batch in self.batches(visit):
            theta = descent.step(theta, lambda v: self.step_loss(visit, v, batch, state))  # noqa: B023
        return theta

    def step_loss(self, visit: Visit, theta: Tensor, batch: Numbers, state: State) -> Tensor:
        """Cross-entropy, if so without past classes, and distillation over these."""
        x, y, others = self.x[batch], self.y[batch], state["others"]
        logits = self.logits(theta, x)
        if self.params.ce_classes == "new":
            logits = logits.masked_fill(others, -torch.inf)
        loss = F.cross_entropy(logits, y) + self.anchor_loss(theta, x, y)
        if state["batches"] is None:
            return loss
        own = self.plan.clients[visit.client][visit.task].classes
        new, past = self.weights(int(others.sum()), len(own))
        return new * loss + past * self.distil(theta, next(state["batches"]), state)

    def weights(self, past: int, new: int) -> tuple[float, float]:
        return 1.0, self.params.kd

    def distil(self, theta: Tensor, x: Tensor, state: State) -> Tensor:
        pair = (self.logits(each, x)[:, state["others"]] for each in (theta, state["teacher"]))
        return soft_cross_entropy(*pair, 2.0)

    def anchor_loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor | float:
        return 0.0

    # --- synthesis

    def after_experience(self) -> None:
        super().after_experience()
        if self.rounds == self.plan.experiences * self.training.rounds or not self.past.any():
            return
        p, seed = self.params, (self.plan.seed, self.rounds)
        draw, known = generator(*seed, "synthesis"), self.past.nonzero().flatten()
        network = build_network(self.network, self.shape, 10, address(*seed, "student"))
        student = self.student(small.flat(list(network.parameters())), seed)
        sgd = Descent(
            self.training, lr=p.student_lr, momentum=0.9, weight_decay=p.student_weight_decay
        )
        self.begin(seed)
        ready, kept, labels = False, torch.empty(0, *self.shape, dtype=torch.uint8), known[:0]
        skipped = p.warmup if self.waits else 0
        for place in range(skipped + math.ceil(p.images / p.synthesis_batch_size)):
            targets = self.targets(len(known), draw)
            images = self.best_images(targets, known, draw, student if ready else None)
            if place >= skipped:
                kept = torch.cat([kept, (255 * images).round().to(torch.uint8)])
                labels = torch.cat([labels, known[targets]])
            for _ in range(p.student_steps if len(kept) and place >= p.warmup else 0):
                chosen = torch.randperm(len(kept), generator=draw)[: p.synthesis_batch_size]
                x = torch.from_numpy(self.normalised(kept[chosen])).float()
                student = sgd.step(student, lambda v: self.student_loss(v, x, known))  # noqa: B023
                ready = True
        self.replay = kept[: p.images], labels[: p.images], self.theta

    waits = False  # whether the images of the first rounds are left out

    def student(self, network: Tensor, seed: tuple[int, int]) -> Tensor:
        return network

    def student_loss(self, student: Tensor, x: Tensor, known: Tensor) -> Tensor:
        """T^2 KL of outputs at temperature 20."""
        pair = (self.logits(each, x)[:, known] / 20 for each in (student, self.theta))
        return 400 * divergence(*pair).mean()

    def begin(self, seed: tuple[int, int]) -> None:
        p = self.params
        sizes = self.shape, p.latent, p.generator_width
        made = build_seeded(lambda: ImageGenerator(*sizes), *seed, "generator")
        self.meta = small.flat(list(made.parameters()))
        self.meta_adam = Adam(p.generator_lr * p.generator_steps, BETAS)

    def targets(self, count: int, draw: torch.Generator) -> Tensor:
        return torch.randint(count, (self.params.synthesis_batch_size,), generator=draw)

    def best_images(
        self, targets: Tensor, known: Tensor, draw: torch.Generator, student: Tensor | None
    ) -> Tensor:
        """Steps of a copy of the meta-generator and of its inputs, then one of the former."""
        p = self.params
        latent = torch.randn(len(targets), p.latent, generator=draw)
        weights, total = self.meta, torch.zeros_like(self.meta)
        adams = Adam(p.generator_lr, BETAS), Adam(p.latent_lr, BETAS)
        found = []
        for _ in range(p.generator_steps):
            leaves = weights.clone().requires_grad_(), latent.clone().requires_grad_()
            images = self.images(*leaves)
            loss = self.generator_loss(images, targets, known, student)
            found.append((loss.item(), images.detach()))
            slopes = torch.autograd.grad(loss, leaves)
            weights, latent = adams[0].move(weights, slopes[0]), adams[1].move(latent, slopes[1])
            total += slopes[0]
        self.meta = self.meta_adam.move(self.meta, total)
        return min(found, key=lambda each: each[0])[1]

    def images(self, weights: Tensor, latent: Tensor) -> Tensor:
        """Maps of 2 x 2, 4 x 4 and 8 x 8, each normalised by its batch and convolved."""
        w, c = self.params.generator_width, self.shape[0]
        shapes = [(8 * w, self.params.latent), (8 * w,), (2 * w,), (2 * w,), (2 * w, 2 * w, 3, 3)]
        shapes += [(2 * w,), (2 * w,), (w, 2 * w, 3, 3), (w,), (w,), (c, w, 3, 3), (c,)]
        a, b, g1, h1, k1, g2, h2, k2, g3, h3, k3, last = reference.pieces(weights, shapes)
        x = normalised((latent @ a.T + b).view(-1, 2 * w, 2, 2), g1, h1)
        x = F.conv2d(x.repeat_interleave(2, 2).repeat_interleave(2, 3), k1, padding=1)
        x = F.leaky_relu(normalised(x, g2, h2), 0.2)
        x = F.conv2d(x.repeat_interleave(2, 2).repeat_interleave(2, 3), k2, padding=1)
        x = F.leaky_relu(normalised(x, g3, h3), 0.2)
        return F.conv2d(x, k3, last, padding=1).sigmoid()

    def generator_loss(
        self, images: Tensor, targets: Tensor, known: Tensor, student: Tensor | None
    ) -> Tensor:
        """The teacher's loss on the labels, less the student's divergence where both agree."""
        p = self.params
        x = (images.flatten(1) - float(self.data.mean)) / float(self.data.std)
        logits = self.logits(self.theta, x)[:, known]
        loss = 0.5 * F.cross_entropy(logits, targets)
        loss = loss + self.anchor_loss(self.theta, x, known[targets])
        if student is not None:
            own = self.logits(student, x)[:, known]
            agree = own.argmax(1) == logits.argmax(1)
            loss = loss - p.adversarial_weight * (divergence(own, logits) * agree).mean()
        return loss


def normalised(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    axes = [0, *range(2, x.dim())]
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    each = (1, -1, *(1 for _ in axes[1:]))
    return (x - mean) / (variance + 1e-5).sqrt() * gain.view(each) + shift.view(each)


class LanderReference(DataFreeReference):
    """The map of features is the end of the model's vector: it is trained and averaged with it."""

    waits = True

    def start(self) -> None:
        super().start()
        size = self.params.anchor_features
        linear = build_seeded(lambda: nn.Linear(32, size), self.plan.seed, "map")
        self.shapes = [*self.shapes, (size, 32), (size,)]
        self.theta = torch.cat([self.theta, small.flat(list(linear.parameters()))])
        table = torch.randn(10, size, generator=generator(self.plan.seed, "anchors"))
        self.anchors = (math.sqrt(0.081 / 2) * table).half().float()

    def mapped(self, theta: Tensor, x: Tensor) -> Tensor:
        a, c = self.parts(theta)[4:]
        mapped: Tensor = self.features(theta, x) @ a.T + c
        return mapped

    def anchor_loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor | float:
        """By how much the mean squared distance from the anchors exceeds the radius."""
        distance = (self.mapped(theta, x) - self.anchors[y]).square().mean()
        return self.params.anchor_weight * (distance - 0.015).clamp(min=0)

    def weights(self, past: int, new: int) -> tuple[float, float]:
        """ce (1 + 1 / a) / b and kd a b with a = log2((k + n) / 2 + 1), b = sqrt(k / (k + n))."""
        a, b = math.log2((past + new) / 2 + 1), math.sqrt(past / (past + new))
        return self.params.ce * (1 + 1 / a) / b, self.params.kd * a * b

    def distil(self, theta: Tensor, x: Tensor, state: State) -> Tensor:
        away = self.mapped(theta, x) - self.mapped(state["teacher"], x)
        return super().distil(theta, x, state) + away.square().mean()

    def student(self, network: Tensor, seed: tuple[int, int]) -> Tensor:
        size = self.params.anchor_features
        linear = build_seeded(lambda: nn.Linear(32, size), *seed, "student's map")
        return torch.cat([network, small.flat(list(linear.parameters()))])

    def student_loss(self, student: Tensor, x: Tensor, known: Tensor) -> Tensor:
        away = (self.mapped(student, x) - self.mapped(self.theta, x)).square().mean()
        return super().student_loss(student, x, known) + self.params.anchor_weight * away

    def begin(self, seed: tuple[int, int]) -> None:
        p = self.params
        sizes = p.latent, p.generator_width, p.anchor_features, p.synthesis_batch_size
        made = build_seeded(lambda: NoisyLabelGenerator(self.shape, *sizes), *seed, "generator")
        self.layer = made.weight.shape
        self.meta = small.flat(list(made.parameters()))

    def targets(self, count: int, draw: torch.Generator) -> Tensor:
        cycles, rest = divmod(self.params.synthesis_batch_size, count)
        drawn = torch.randint(count, (rest,), generator=draw)
        return torch.cat([torch.arange(count).repeat(cycles), drawn])

    def best_images(
        self, targets: Tensor, known: Tensor, draw: torch.Generator, student: Tensor | None
    ) -> Tensor:
        noise = torch.randn(self.layer, generator=draw)
        bias = torch.zeros(len(noise) * self.params.latent)
        rest = self.meta[noise.numel() + len(bias) :]
        weights = torch.cat([noise.flatten(), bias, rest])
        adam = Adam(self.params.generator_lr, BETAS)
        found = []
        for _ in range(self.params.generator_steps):
            leaf = weights.clone().requires_grad_()
            images = self.from_anchors(leaf, self.anchors[known[targets]])
            loss = self.generator_loss(images, targets, known, student)
            found.append((loss.item(), images.detach()))
            weights = adam.move(weights, torch.autograd.grad(loss, leaf)[0])
        self.meta = weights
        return min(found, key=lambda each: each[0])[1]

    def from_anchors(self, weights: Tensor, anchors: Tensor) -> Tensor:
        chunks, size, latent = self.layer
        sizes = [chunks * size * latent, chunks * latent, size, size]
        noisy, bias, gain, shift, rest = weights.split([*sizes, len(weights) - sum(sizes)])
        x, layers = normalised(anchors, gain, shift), noisy.view(self.layer)
        rows = [row @ layers[i // 10] + bias.view(chunks, -1)[i // 10] for i, row in enumerate(x)]
        return self.images(rest, torch.stack(rows))

    def run(self) -> Any:
        return super().run()[: small.P]


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("target", {"kd": 1.0, "server_lr": 1.5}),
        ("target", {"kd": 2.0, "ce_classes": "all", "replay_batch_size": 5, "latent_lr": 0.1}),
        ("lander", {"anchor_features": 6, "server_lr": 1.5}),
    ],
    ids=["target", "target all", "lander"],
)
def test_whole_runs_are_those_of_the_reference(kind, params, configuration):
    """The models, and the images that the server has synthesised last."""
    made = LanderReference if kind == "lander" else DataFreeReference
    longer = configuration not in CONFIGURATIONS  # a rounding grows with the rounds
    close = {**CLOSE, "atol": 2e-5} if longer else CLOSE
    options = {**SYNTHESIS, **params, "diagnostics": {"memory": 99}, "close": close}
    record, naive, _ = reference.compare(kind, configuration, made, **options)
    newest = record.memory["experiences"] == record.memory["experiences"].max()
    images, labels, _ = naive.replay
    assert record.memory["labels"][newest].tolist() == labels.tolist()
    away = np.abs(record.memory["images"][newest] - images.numpy().astype(float))
    assert away.max() <= 1 and away.mean() < 0.01


def begun(kind: str, **options: Any) -> tuple[Any, Log]:
    """The method's synthesis after an experience with three classes, and its log."""
    experiment = whole(kind, **options)
    worker = small.worker(experiment, plan(experiment))
    method: Any = worker.method
    past = torch.zeros(10, dtype=torch.bool)
    past[[0, 3, 4]] = True
    log = Log()
    server = {**worker.initial_states(0)[0], "past": past, "round": 1}
    return method.synthesis(method.source(server), server, log), log


@pytest.mark.parametrize("shape", [(1, 14, 14), (3, 20, 20), (2, 5, 9)], ids=str)
def test_images_of_any_shape_have_pixels_from_0_to_1(shape):
    """Also where the sides cannot be halved; the mode of the network changes nothing."""
    latent = torch.randn(13, 6, generator=generator("latent"))
    for make in (
        lambda: ImageGenerator(shape, 6, 4),
        lambda: NoisyLabelGenerator(shape, 5, 4, 6, images=13),
    ):
        module: nn.Module = build_seeded(make, "module")
        images = module(latent)
        assert images.shape == (13, *shape) and 0 <= images.min() <= images.max() <= 1
        assert torch.equal(module.eval()(latent), images)


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_that_diverges_goes_back(kind, monkeypatch):
    """Its second round has no finite loss: it gives no images, the others do."""
    each, log = begun(kind, generator_steps=1, adversarial_weight=0.0, warmup=0)
    calls, actual = list[int](), Synthesis.generator_loss

    def loss(self: Synthesis, images: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        return actual(self, images, targets) * (torch.nan if len(calls) == 2 else 1)

    monkeypatch.setattr(Synthesis, "generator_loss", loss)
    images, labels = each.run()
    assert len(images) == len(labels) == 32 and len(calls) == 3
    assert log.events.count(synthesis.NOT_FINITE) == 1
    assert each.generator.parameters.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_finite_images_training_goes_on(kind, monkeypatch):
    broken = lambda self, images, targets: images.sum() * torch.nan  # noqa: E731
    monkeypatch.setattr(Synthesis, "generator_loss", broken)
    record = run(whole(kind, training={"rounds": 1}, diagnostics={"memory": 1}))
    events = [entry["events"].get(NO_IMAGES, 0) for entry in record.history]
    assert events == [1, 1, 0] and not record.memory
    assert all(np.isfinite(entry["loss"]) for entry in record.history)


def test_a_student_that_diverges_is_left_out():
    each, log = begun("target", student_lr=1e30)
    assert len(each.run()[0]) == 40
    assert log.events.count(synthesis.STUDENT_DIVERGED) == 1 and each.student is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_synthetic_image_does_not_freeze_the_statistics_of_real_ones(kind):
    """It has no variance of its own; the real images of the same step have one."""
    experiment = whole(kind, network=BATCH_NORM, replay_batch_size=1)
    worker = small.worker(experiment, plan(experiment))
    client_round = small.arrived(worker, plan(experiment), 1)
    network = worker.method.teacher(worker.method.init_server(0))
    received = client_round.message["buffers"]
    client_round.message.update(
        {
            "announced images": worker.runtime.x_train[:1].clone(),
            "announced labels": worker.runtime.y_train[:1].to(torch.uint8),
            "announced teacher": network,
            "announced teacher buffers": received,
            "announced past": torch.tensor([255, 3], dtype=torch.uint8),
        }
    )
    reply = worker.method.train_client(client_round)
    assert (reply.message["buffers"] - received).abs().min() > 1e-4
