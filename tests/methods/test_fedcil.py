"""FedCIL against a naive reference in torch over whole runs; generators that fail, statistics."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import CONFIGURATIONS, Reply, State, Visit
from small import BATCH_NORM, plan, tiny
from torch import Tensor, nn
from torch_reference import CLOSE, Adam, Descent, TorchReference, divergence, taker

from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import Log
from workbench.methods.base.generators import build_seeded
from workbench.methods.fedcil import NOT_CONSOLIDATED
from workbench.methods.fedcil.acgan import Generator
from workbench.methods.fedcil.training import ALL_EQUAL, NOT_FINITE

SMALL: dict[str, Any] = {"width": 8, "noise": 4, "consolidation": 2, "generator_lr": 2e-3}
BETAS = (0.5, 0.999)


def real(scores: Tensor) -> Tensor:
    """The mean of -log sigmoid(score): binary cross-entropy of images that are to look real."""
    return -scores.sigmoid().log().mean()


class FedCILReference(TorchReference):
    """An AC-GAN on each client, whose generators the server's one is trained on."""

    def start(self) -> None:
        super().start()
        p = self.params
        sizes = (1, 8, 8), 10 + p.noise, p.width
        made = build_seeded(lambda: Generator(*sizes), self.plan.seed, "generator")
        self.sizes = [weights.shape for weights in made.parameters()]
        self.gan = small.flat(list(made.parameters()))
        head = build_seeded(lambda: nn.Linear(32, 1), self.plan.seed, "adversarial_head")
        self.judge = small.flat(list(head.parameters()))
        self.reports: dict[int, list[tuple[Tensor | None, Tensor]]] = {}
        self.adam = Adam(p.generator_lr, BETAS)

    def made(self, gan: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Normalised images of a generator, as rows.

        Two linear layers to 4 x 4 maps, batch normalisation and a transposed convolution.
        """
        w, b, first, gain, shift, last = reference.pieces(gan, self.sizes)
        inputs = torch.cat([torch.eye(10)[labels], noise], 1)
        maps = ((inputs @ w.T + b) @ first.T).view(len(labels), -1, 4, 4)
        variance, mean = torch.var_mean(maps, (0, 2, 3), correction=0, keepdim=True)
        maps = (maps - mean) / (variance + 1e-5).sqrt()
        maps = (maps * gain[:, None, None] + shift[:, None, None]).relu()
        images = F.conv_transpose2d(maps, last.view(-1, 1, 4, 4), stride=2, padding=1).tanh()
        pixels = (images.flatten(1) + 1) / 2
        return (pixels - float(self.data.mean)) / float(self.data.std)

    def scores(self, theta: Tensor, judge: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and scores above 0 for images that look real."""
        h = self.features(theta, x)
        return self.outputs(theta, h), h @ judge[:-1] + judge[-1]

    def adversarial_step(
        self, nets: State, x: Tensor, y: Tensor, replayed: Any, take: Any, taught: Any = None
    ) -> None:
        """A step of classifier and head, and one of the generator; `nets` change in place."""
        p = self.params
        labels, noise = take(len(y))
        gan = nets["gan"].clone().requires_grad_()
        images = self.made(gan, labels, noise)
        theta, judge = (nets[name].clone().requires_grad_() for name in ("theta", "judge"))
        losses, logits = [], []
        for own_x, own_y in [(x, y), *replayed]:
            z, scores = self.scores(theta, judge, own_x)
            losses.append(F.cross_entropy(z, own_y) + p.adversarial * real(scores))
            logits.append(z)
        loss = losses[0] if len(losses) == 1 else sum_of(losses, p.replay)
        z, scores = self.scores(theta, judge, images.detach())
        loss = loss + p.adversarial * (F.cross_entropy(z, labels) + real(-scores))
        if taught is not None:
            loss = loss + p.consistency * self.consistency(theta, gan, logits[0], y, *taught)
        slopes = torch.autograd.grad(loss, [theta, judge])
        nets["theta"] = nets["sgd"].move(nets["theta"], slopes[0])
        nets["judge"] = nets["judge sgd"].move(nets["judge"], slopes[1])
        z, scores = self.scores(nets["theta"], nets["judge"], images)
        slope = torch.autograd.grad(real(scores) + F.cross_entropy(z, labels), gan)[0]
        nets["gan"] = nets["adam"].move(nets["gan"], slope)

    def consistency(
        self, theta: Tensor, gan: Tensor, logits: Tensor, y: Tensor, teacher: Tensor, take: Any
    ) -> Tensor:
        """KL(p(taught y) || p(x)) + KL(p(taught z) || p(own z)) + CE(taught z)."""
        labels, noise = take(len(y))
        both = torch.cat([y, labels]), torch.cat([noise[:, 0], noise[:, 1]])
        like_x, like_own = self.logits(theta, self.made(teacher, *both).detach()).chunk(2)
        own = self.logits(theta, self.made(gan, labels, noise[:, 2]).detach())
        divergences = divergence(logits, like_x).mean() + divergence(own, like_own).mean()
        return divergences + F.cross_entropy(like_own, labels)

    def local(self, visit: Visit, state: State) -> Reply:
        """A client round; state: the last generator with its classes, the next one, Adam."""
        p, t, count = self.params, self.training, len(visit.indices)
        first = visit.client not in self.told
        last = (state.get("next") if first else None) or state.get("last")
        state["past"] = self.past if first else state["past"]
        own = self.own_classes(visit)
        known = own if last is None else own | last[1]
        draw = self.draw(visit, "adversarial")
        take = taker(known, (t.epochs * count, p.noise), draw)
        taught = None
        if p.consistency and visit.round:
            size = (t.epochs * count, 3, p.noise)
            taught = (self.gan, taker(state["past"] | own, size, draw))
        adam = state.setdefault("adam", Adam(p.generator_lr, BETAS))
        nets = {"theta": self.theta, "judge": self.judge, "gan": self.gan, "adam": adam}
        nets |= {"sgd": Descent(t), "judge sgd": Descent(t)}
        replay = self.replay(visit, last)
        for place, batch in enumerate(self.batches(visit)):
            x, y = self.x[batch], self.y[batch]
            replayed = [next(replay)] if last is not None and p.replay else []
            if place % p.every == 0:
                self.adversarial_step(nets, x, y, replayed, take, taught)
                continue
            loss = partial(self.plain_loss, [(x, y), *replayed])
            nets["theta"] = nets["sgd"].step(nets["theta"], loss)
        trained = (nets["gan"], known) if count else None
        may_miss = t.participation < 1
        state["last"] = (trained or last) if visit.last else last
        state["next"] = trained if may_miss and not visit.last else None
        report = [(None, own), *([last] if last is not None else [])] if first else None
        sent = {"gan": nets["gan"], "judge": nets["judge"], "report": report}
        return Reply(visit.client, nets["theta"], count, sent)

    def plain_loss(self, pairs: list[tuple[Tensor, Tensor]], theta: Tensor) -> Tensor:
        losses = [F.cross_entropy(self.logits(theta, x), y) for x, y in pairs]
        return sum_of(losses, self.params.replay)

    def replay(self, visit: Visit, last: Any) -> Any:
        size = self.training.batch_size
        steps = self.training.epochs * math.ceil(len(visit.indices) / size)
        at_once = size * max(1, min(steps, 512 // size))
        count = at_once * math.ceil(steps * size / at_once)
        take = taker(last[1], (count, self.params.noise), self.draw(visit, "replay"))
        while True:
            labels, noise = take(at_once)
            images = self.made(last[0], labels, noise)
            yield from zip(images.split(size), labels.split(size), strict=True)

    def aggregate(self, replies: list[Reply]) -> None:
        super().aggregate(replies)
        p, size = self.params, self.training.batch_size
        for name in ("gan", "judge"):  # networks that move as the model does
            mean = self.mean([reply.sent[name] for reply in replies], replies)
            before = getattr(self, name)
            setattr(self, name, before + p.server_lr * (mean - before))
        self.reports |= {r.client: r.sent["report"] for r in replies if r.sent["report"]}
        if not p.consolidation:
            return
        draw = generator(self.plan.seed, self.rounds, "consolidation")
        sources = [
            (reply.sent["gan"] if vector is None else vector, classes)
            for reply in replies
            for vector, classes in self.reports[reply.client]
        ]
        each = max(size, math.ceil(p.consolidation * size / len(sources)))
        made = [taker(classes, (each, p.noise), draw)(each) for _, classes in sources]
        pairs = zip(sources, made, strict=True)
        images = torch.cat([self.made(gan, *drawn) for (gan, _), drawn in pairs])
        labels = torch.cat([y for y, _ in made])
        count = p.consolidation * size
        present = labels.unique()
        chosen = torch.randint(len(present), (count,), generator=draw)
        place = torch.randint(2**62, (count,), generator=draw)
        of_class = [(labels == label).nonzero().flatten() for label in present]
        pairs = zip(chosen, place, strict=True)
        index = torch.stack([of_class[c][n % len(of_class[c])] for c, n in pairs])
        take = taker(self.seen, (count, p.noise), draw)
        nets = {"theta": self.theta, "judge": self.judge, "gan": self.gan, "adam": self.adam}
        nets |= {"sgd": Descent(self.training), "judge sgd": Descent(self.training)}
        for batch in index.split(size):
            self.adversarial_step(nets, images[batch], labels[batch], [], take)
        self.theta, self.judge, self.gan = nets["theta"], nets["judge"], nets["gan"]


def sum_of(losses: list[Tensor], share: float) -> Tensor:
    return losses[0] if len(losses) == 1 else (1 - share) * losses[0] + share * losses[1]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"every": 2},
        {
            "consolidation": 0,
            "replay": 0.3,
            "consistency": 0.0,
            "adversarial": 0.5,
            "server_lr": 1.5,
        },
    ],
    ids=["consolidated", "averaged"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration):
    options = {**SMALL, **params, "close": CLOSE}
    reference.compare("fedcil", configuration, FedCILReference, **options)


def fedcil(**options: Any) -> tuple[Any, Any, list[Any]]:
    experiment = tiny("fedcil", **{**SMALL, **options})
    worker = small.worker(experiment, plan(experiment))
    server, states, *_ = worker.initial_states(0)
    return worker, server, states


@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (1, 14, 14), (3, 32, 32), (1, 3, 3), (3, 20, 9), (1, 5, 17)]
)
def test_images_of_any_size_are_between_minus_one_and_one(shape):
    """Of a batch of one as well; there are no buffers to send."""
    net = Generator(shape, 12, 16)
    for count in (1, 5):
        images = net(100 * torch.randn(count, 12, generator=generator("noise")))
        assert images.shape == (count, *shape) and images.abs().max() <= 1
    assert not list(net.buffers())


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_generated_images_do_not_change_running_statistics(policy):
    """At learning rate 0 they are FedAvg's, bit for bit, on clients and after consolidation."""
    options: dict[str, Any] = {"network": BATCH_NORM, "training": {"lr": 0, "buffers": policy}}
    options["diagnostics"] = {"angles": True}
    record = small.run(tiny("fedcil", **{**SMALL, "replay": 0.0}, **options))
    expected = small.run(tiny(**options))
    small.assert_same_weights(record, expected)
    np.testing.assert_array_equal(record.scores["local"], expected.scores["local"])


def test_a_client_that_cannot_miss_the_last_round_keeps_no_generator_before_it():
    worker, server, states = fedcil()
    message = worker.method.broadcast(server, 0)
    state = worker.train_client(small.RoundId(0, 0, 0, 0), states[0], message).reply.state
    assert state["next"] is None and state["last"] is None


@pytest.mark.parametrize(("value", "event"), [(math.nan, NOT_FINITE), (0.0, ALL_EQUAL)])
def test_a_generator_that_fails_is_an_event_and_is_not_used(value, event):
    """The classifier is trained all the same; the server then keeps the plain mean."""
    worker, server, states = fedcil(generator_lr=1e-6)
    weights = server["generator"].clone()
    weights[-16 * 4 :] = value  # its last layer
    server = {**server, "generator": weights}
    replies = []
    for client, state in enumerate(states):
        message = worker.method.broadcast(server, client)
        reply = worker.train_client(small.RoundId(0, client, 0, 1, True), state, message).reply
        assert reply.log.events == [event] and reply.state["moments"] is None
        small.assert_equal_trees(reply.message["generator"], weights)
        trained = reply.message["parameters"]
        assert trained.isfinite().all() and not torch.equal(trained, server["parameters"])
        replies.append(reply)
    log = Log()
    after = worker.method.aggregate(server, replies, log)
    assert log.events == [NOT_CONSOLIDATED] and after["moments"] is None
    assert after["parameters"].isfinite().all()
