"""FedCIL: steps of the AC-GAN by hand, the consolidation, what is kept, sent and discarded."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from by_hand import CLOSE, Array, softmax_gradient, use_softmax_regression
from small import ALWAYS, BATCH_NORM, plan, run, tiny
from stamp_core.client.workspace import RoundId
from stamp_core.models.acgan import Generator, draw_balanced, draw_labels, generator_inputs
from test_bytes import P as RESNET
from test_bytes import workspace
from torch import Tensor, nn

from stamp_core.client.pool import Pool
from stamp_core.core.seeding import generator
from stamp_core.data import split
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.distillation import softened_divergence
from stamp_core.methods.base.method import ClientRound, Log, Message, Reply, State
from stamp_core.methods.base.task_server import PREFIX, class_mask
from stamp_core.methods.fedcil import (
    ALL_EQUAL,
    NOT_CONSOLIDATED,
    NOT_FINITE,
    AcganTraining,
    Batch,
    FedCIL,
    Teacher,
)
from stamp_core.models.flat import FlatModel
from stamp_core.models.generators import build_seeded
from stamp_core.results.records import tree_bytes

SMALL: dict[str, Any] = {"width": 16, "noise": 6, "consolidation": 2, "generator_lr": 2e-3}
PLAIN: dict[str, Any] = {**SMALL, "replay": 0.0, "consistency": 0.0, "consolidation": 0}
SEVEN = torch.arange(10) < 7  # a mask of classes


def sizes(module: torch.nn.Module) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in module.parameters())


# --- the generator


def test_the_generator_of_colour_images_has_the_published_size() -> None:
    """With 100 classes and 100 Gaussian inputs; published for 10 classes: 1,593,888."""
    assert sizes(Generator((3, 32, 32), 200, 384)) == 1_628_448
    assert sizes(Generator((3, 32, 32), 110, 384)) == 1_593_888


@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (1, 14, 14), (3, 32, 32), (1, 28, 28), (1, 3, 3), (3, 20, 9), (1, 5, 17)]
)
def test_images_of_any_size_are_between_minus_one_and_one(shape: tuple[int, ...]) -> None:
    """Of a batch of one as well; there are no buffers to send."""
    net = Generator(shape, 12, 16)
    for count in (1, 5):
        images = net(torch.randn(count, 12, generator=generator("noise")) * 100)
        assert images.shape == (count, *shape) and images.abs().max() <= 1
    assert not list(net.buffers())


def test_new_networks_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    make = partial(Generator, (1, 8, 8), 12, 16)
    one, other, same = (FlatModel(build_seeded(make, n, "g")).parameters for n in (0, 1, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_inputs_of_a_generator_are_the_one_hot_label_and_noise() -> None:
    labels = draw_labels(SEVEN, 7000, generator("labels"))
    assert labels.unique().tolist() == list(range(7))
    assert torch.bincount(labels).double().std() < 4 * math.sqrt(1000)
    noise = torch.randn(7000, 5, generator=generator("noise"))
    inputs = generator_inputs(labels, noise, 10)
    assert torch.equal(inputs[:, :10], F.one_hot(labels, 10).float())
    assert torch.equal(inputs[:, 10:], noise)


def test_balanced_draws_are_uniform_over_the_labels_that_are_present() -> None:
    """Three labels with 1, 10 and 89 images."""
    labels = torch.tensor([4] * 89 + [9] + [0] * 10)
    drawn = draw_balanced(labels, 6000, generator("balanced"))
    counts = torch.bincount(labels[drawn], minlength=10)
    assert counts.nonzero().flatten().tolist() == [0, 4, 9]
    assert ((counts[[0, 4, 9]] - 2000).abs() < 200).all()
    assert len(drawn.unique()) == 100  # every image of a label is drawn


# --- steps of training


def acgan_worker(**options: Any) -> tuple[Worker, FedCIL]:
    """A worker with its method."""
    experiment = tiny("fedcil", **options)
    worker = small.worker(experiment, plan(experiment))
    assert isinstance(worker.method, FedCIL)
    return worker, worker.method


def started(worker: Worker, method: FedCIL) -> AcganTraining:
    """A training that starts from the initial networks and generates images of seven classes."""
    server = worker.initial_states(0)[0]
    worker.work.model.load(server["parameters"], server["buffers"])
    method.load(server)
    draws = Pool(partial(method.draw_inputs, SEVEN, 12, generator("training")))
    return AcganTraining(method, draws, None)


def real_batch(worker: Worker, first: int = 0, count: int = 12) -> Batch:
    """Some training images."""
    images, labels = worker.work.train_images(torch.arange(first, first + count))
    return worker.work.normalise(images), labels


def vectors(worker: Worker, method: FedCIL) -> list[Array]:
    """Classifier and adversarial head."""
    models = worker.work.model, method.live["adversarial_head"]
    return [model.parameters.double().numpy().copy() for model in models]


def softmax(theta: Array, x: Array) -> Array:
    """Probabilities of the classes by softmax regression.  # [n, 10]"""
    z = np.exp(x @ theta[:640].reshape(10, 64).T + theta[640:])
    return z / z.sum(1, keepdims=True)


def score_gradient(head: Array, x: Array, real: bool) -> Array:
    """The gradient of binary cross-entropy with the scores s = v x + c of n images.  # [65]

    For "real" the loss is log(1 + exp(-s)), its derivative -1 / (1 + exp(s)); for "generated" it
    is log(1 + exp(s)), with 1 / (1 + exp(-s)).
    """
    s = x @ head[:64] + head[64]
    slope = (-1 / (1 + np.exp(s)) if real else 1 / (1 + np.exp(-s))) / len(x)
    return np.append(slope @ x, slope.sum())


def flat(images: Tensor) -> Array:
    """Images as rows."""
    return images.detach().flatten(1).double().numpy()


def test_generated_images_get_the_normalisation_of_training_images() -> None:
    """Each of the 256 values, moved to -1 .. 1."""
    worker, method = acgan_worker(**PLAIN)
    pixels = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8)
    actual = method.normalised(pixels / 127.5 - 1)
    torch.testing.assert_close(actual, worker.work.normalise(pixels), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shares", [(1.0,), (0.7, 0.3)], ids=["new", "replay"])
def test_a_step_of_the_discriminator_by_hand(
    shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax regression and a linear score. With weight a = 0.5 of the adversarial losses,

        L = sum_b share_b (CE_b + a BCE_b("real")) + a (CE_fake + BCE_fake("generated")),

    over the batch of the task (share 0.7) and the replayed one (0.3); one step of length 0.1.
    """
    use_softmax_regression(monkeypatch)
    worker, method = acgan_worker(**{**PLAIN, "adversarial": 0.5, "replay": 0.3})
    training = started(worker, method)
    theta, head = vectors(worker, method)
    batches = [real_batch(worker), real_batch(worker, 50, 9)][: len(shares)]
    fakes = training.generate(12)
    monkeypatch.setattr(training, "generate", lambda count: fakes)
    training.step(batches)

    x, labels = flat(fakes[0]), fakes[1]
    theta_gradient = 0.5 * softmax_gradient(theta, x, labels)
    head_gradient = 0.5 * score_gradient(head, x, real=False)
    for share, (images, labels) in zip(shares, batches, strict=True):
        x = flat(images)
        theta_gradient += share * softmax_gradient(theta, x, labels)
        head_gradient += share * 0.5 * score_gradient(head, x, real=True)
    after = vectors(worker, method)
    np.testing.assert_allclose(after[0], theta - 0.1 * theta_gradient, **CLOSE)
    np.testing.assert_allclose(after[1], head - 0.1 * head_gradient, **CLOSE)


def test_a_step_of_the_generator_is_one_of_adam_against_the_new_discriminator() -> None:
    """On BCE("real") + CE of the labels asked for, with the images of the discriminator's step."""
    worker, method = acgan_worker(**PLAIN)
    training = started(worker, method)
    net = Generator((1, 8, 8), 16, 16)
    nn.utils.vector_to_parameters(method.live["generator"].parameters.clone(), net.parameters())
    draw = generator("training")
    labels = draw_labels(SEVEN, 12, draw)
    noise = torch.randn(12, 6, generator=draw)
    images = method.normalised(net(generator_inputs(labels, noise, 10)))
    training.step([real_batch(worker)])

    adam = torch.optim.Adam(net.parameters(), 2e-3, betas=(0.5, 0.999))
    features = worker.work.classifier.encode(images)
    scores = method.live["adversarial_head"].module(features).flatten()
    loss = F.binary_cross_entropy_with_logits(scores, torch.ones(12))
    (loss + F.cross_entropy(worker.work.classifier.head(features), labels)).backward()
    adam.step()
    expected = nn.utils.parameters_to_vector(net.parameters()).detach()
    actual = method.live["generator"].parameters
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_the_divergence_by_hand() -> None:
    """0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75) for one of two rows, 0 for the other."""
    teacher = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log() + 3
    student = torch.tensor([[0.25, 0.75], [0.2, 0.8]]).log()
    expected = (0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2
    assert float(softened_divergence(student, teacher)) == pytest.approx(expected, abs=1e-6)
    assert float(softened_divergence(student, student)) == 0


def test_consistency_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """KL(p(taught) || p(x)) + KL(p(shared) || p(own)) + CE(shared): the server's images taught
    have the labels of the real images x, shared and own the same labels as each other."""
    use_softmax_regression(monkeypatch)
    worker, method = acgan_worker(**PLAIN)
    training = started(worker, method)
    theta, _ = vectors(worker, method)
    images, labels = real_batch(worker)
    numbers = generator("images")
    served, own = (torch.rand(n, 1, 8, 8, generator=numbers) * 2 - 1 for n in (24, 12))
    asked = list[Tensor]()

    def sample(parameters: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        asked.append(labels)
        return served

    def images_of(labels: Tensor, noise: Tensor) -> Tensor:
        asked.append(labels)
        return own

    monkeypatch.setattr(method, "sample", sample)
    monkeypatch.setattr(training, "images_of", images_of)
    draws = Pool(partial(method.draw_inputs, ~SEVEN, 12, generator("consistency"), (3,)))
    teacher = Teacher(torch.empty(0), draws)
    logits, _ = training.discriminate(images)
    actual = training.consistency_loss(teacher, logits, labels)
    shared = asked[1]
    assert torch.equal(asked[0], torch.cat([labels, shared]))
    assert set(shared.tolist()) <= {7, 8, 9} and len(shared) == 12

    x, y = flat(images), flat(own)
    taught, like_own = np.split(flat(method.normalised(served)), 2)
    p, q, r, s = (softmax(theta, each) for each in (taught, x, like_own, y))
    expected = (p * np.log(p / q)).sum(1).mean() + (r * np.log(r / s)).sum(1).mean()
    expected -= np.log(r[np.arange(12), shared.numpy()]).mean()
    assert float(actual.detach()) == pytest.approx(expected, abs=1e-5)
    actual.backward()
    assert worker.work.model.gradients.abs().max() > 0
    assert method.live["generator"].gradients.abs().max() == 0


def test_generated_images_do_not_change_running_statistics() -> None:
    """At learning rate 0 they are FedAvg's after a client round, bit for bit."""
    options: dict[str, Any] = {"network": BATCH_NORM, "training": {"lr": 0}}
    rounds = [(0, 0), (0, 1)]
    changed = [*federated(tiny("fedcil", **{**SMALL, "replay": 0.0}, **options), rounds)]
    plain = [*federated(tiny(**options), rounds)]
    assert changed[1].replies[0].message["parameters"].equal(changed[1].server["parameters"])
    for one, other in zip(changed, plain, strict=True):
        for mine, theirs in zip(one.replies, other.replies, strict=True):
            assert torch.equal(mine.message["buffers"], theirs.message["buffers"])


def test_the_generator_learns_the_images_of_each_class() -> None:
    """Two classes, each with one image: generated images come closer to that of their class."""
    worker, method = acgan_worker(**PLAIN, training={"lr": 0.03})
    training = started(worker, method)
    two = torch.arange(10) < 2
    training.draws = Pool(partial(method.draw_inputs, two, 16, generator("training")))
    images, _ = real_batch(worker, 0, 2)
    labels = torch.arange(2).repeat(8)
    noise = torch.randn(16, 6, generator=generator("noise"))

    def distance() -> float:
        with torch.no_grad():
            return float(F.mse_loss(training.images_of(labels, noise), images[labels]))

    before = distance()
    for _ in range(150):
        training.step([(images[labels], labels)])
    assert distance() < 0.5 * before


# --- rounds of a federation


class Round(NamedTuple):
    """One round: what was sent, the replies, and the states afterwards."""

    sent: list[Message]
    rounds: list[ClientRound]
    replies: list[Reply]
    before: State  # the server's
    server: State
    states: list[State]
    log: Log


def federated(
    experiment: Experiment,
    rounds: list[tuple[int, int]],
    plan_: Plan | None = None,
    missing: Mapping[tuple[int, int], Sequence[int]] = MappingProxyType({}),
) -> Iterator[Round]:
    """Rounds (experience, round) of all clients but the `missing` ones of some rounds."""
    whole = plan_ or plan(experiment)
    worker = small.worker(experiment, whole)
    method, (server, states, *_) = worker.method, worker.initial_states(0)
    for address in rounds:
        taking = [u for u in range(len(states)) if u not in missing.get(address, ())]
        sent = [method.broadcast(server, u) for u in taking]
        last = address[1] == experiment.setting.training.rounds - 1
        client_rounds = [
            ClientRound(RoundId(0, u, *address, last), whole, states[u], message)
            for u, message in zip(taking, sent, strict=True)
        ]
        replies = [method.train_client(each) for each in client_rounds]
        states = list(states)
        for reply in replies:
            states[reply.client] = reply.state
        before, log = server, Log()
        server = method.aggregate(before, replies, log)
        yield Round(sent, client_rounds, replies, before, server, states, log)


FOUR = [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_without_consolidation_all_networks_are_averaged_by_samples() -> None:
    experiment = tiny("fedcil", **PLAIN)
    uneven = small.with_train(plan(experiment), {(0, 0): plan_train(experiment, 5)})
    (only,) = federated(experiment, [(0, 0)], uneven)
    weights = torch.tensor([reply.samples for reply in only.replies]).double()
    assert weights[0] == 5
    for name in ("parameters", "generator", "adversarial_head"):
        each = torch.stack([reply.message[name] for reply in only.replies]).double()
        mean = (weights[:, None] * each).sum(0) / weights.sum()
        torch.testing.assert_close(only.server[name], mean.float(), rtol=0, atol=1e-6)


def plan_train(experiment: Experiment, count: int) -> tuple[int, ...]:
    """The first images of client 0's first task."""
    own = plan(experiment).train_indices(experiment.dataset(), 0, 0)
    return tuple(own[:count].tolist())


def test_the_servers_pool_has_current_and_last_generators_with_their_own_labels() -> None:
    """In the second task; the clients' images are those of the generators that they have sent."""
    experiment = tiny("fedcil", **SMALL)
    *_, last = federated(experiment, FOUR)
    method, whole = small.worker(experiment, plan(experiment)).method, plan(experiment)
    assert isinstance(method, FedCIL)
    draw, same = generator("pool"), generator("pool")
    images, labels = method.pool(last.server["clients"], last.replies, draw)
    sources = []
    for u, (reply, each) in enumerate(zip(last.replies, last.rounds, strict=True)):
        tasks = whole.clients[u]
        sources.append((reply.message["generator"], tasks[1].classes))
        sources.append((each.scratch["last"]["generator"], tasks[0].classes))
    assert len(labels) == 16 * len(sources)  # a batch of each
    parts = zip(sources, labels.split(16), images.split(16), strict=True)
    for (parameters, classes), own, part in parts:
        expected, noise = method.draw_inputs(class_mask(classes, 10), 16, same)
        assert torch.equal(own, expected)
        assert torch.equal(part, method.normalised(method.sample(parameters, own, noise)))


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_consolidation_changes_the_weights_of_all_networks_but_no_buffers(policy: str) -> None:
    """Compared with the plain mean, which is what the clients were trained to."""
    training = {"buffers": policy}
    plain = tiny("fedcil", **{**SMALL, "consolidation": 0}, network=BATCH_NORM, training=training)
    consolidated = tiny("fedcil", **SMALL, network=BATCH_NORM, training=training)
    (mean,), (one,), (again,) = (
        [*federated(each, [(0, 0)])] for each in (plain, consolidated, consolidated)
    )
    small.assert_equal_trees(one.server, again.server)
    assert torch.equal(one.server["buffers"], mean.server["buffers"])
    for name in ("parameters", "generator", "adversarial_head"):
        assert not torch.equal(one.server[name], mean.server[name])
    assert mean.server["moments"] is None and one.server["moments"]["steps"] == 2
    assert one.log.seconds["consolidation"] > 0 and not mean.log.seconds


def test_the_last_generator_is_that_of_the_previous_task_and_never_changes() -> None:
    """It is the generator that the client sent in the last round of that task."""
    records = [*federated(tiny("fedcil", **SMALL), [*FOUR, (2, 0)])]
    for u in range(4):
        last = [each.rounds[u].scratch["last"] for each in records]
        assert last[0] is None and last[1] is None
        assert torch.equal(last[2]["generator"], records[1].replies[u].message["generator"])
        assert torch.equal(last[3]["generator"], last[2]["generator"])
        assert torch.equal(last[4]["generator"], records[3].replies[u].message["generator"])
        seen = plan(tiny()).seen(u, 1)
        assert last[4]["classes"].nonzero().flatten().tolist() == list(seen)
        steps = [each.states[u]["moments"]["steps"] for each in records]
        assert steps == sorted(steps) and steps[0] > 0  # Adam continues


def test_a_client_that_misses_the_last_round_replays_its_latest_generator() -> None:
    """Client 0 misses the last round of task 0, client 1 all of it."""
    experiment = tiny("fedcil", **SMALL, training={"dropout": 0.5})
    missing = {(0, 0): [1], (0, 1): [0, 1]}
    records = [*federated(experiment, FOUR, missing=missing)]
    zero = records[2].rounds[0].scratch["last"]
    assert torch.equal(zero["generator"], records[0].replies[0].message["generator"])
    assert records[2].rounds[1].scratch["last"] is None
    clients = records[2].server["clients"]
    assert torch.equal(clients["0"]["last"]["generator"], zero["generator"])
    assert clients["1"]["last"] is None and clients["2"]["last"] is not None


def test_replayed_images_have_labels_of_the_clients_own_past(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches as large as those of the task, from the second task on."""
    steps = list[list[tuple[int, set[int]]]]()
    step = AcganTraining.step

    def spied(training: AcganTraining, real: list[Batch], adversarial: bool = True) -> Tensor:
        steps.append([(len(labels), set(labels.tolist())) for _, labels in real])
        return step(training, real, adversarial)

    monkeypatch.setattr(AcganTraining, "step", spied)
    experiment = tiny("fedcil", **{**SMALL, "consolidation": 0}, split={"clients": 1})
    for each in federated(experiment, FOUR):
        past = set(plan(experiment).seen(0, each.rounds[0].task - 1))
        assert steps and all(len(real) == (2 if past else 1) for real in steps)
        if past:
            assert set().union(*(real[1][1] for real in steps)) == past
            assert all(real[1][0] == 16 for real in steps)
        steps.clear()


def test_consistency_starts_in_the_second_round_with_the_classes_known_to_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teachers = list[Teacher]()

    def spied(training: AcganTraining, teacher: Teacher, logits: Tensor, labels: Tensor) -> Tensor:
        teachers.append(teacher)
        return logits.sum() * 0

    monkeypatch.setattr(AcganTraining, "consistency_loss", spied)
    experiment = tiny("fedcil", **{**SMALL, "every": 100, "consolidation": 0})
    whole = plan(experiment)
    for each in federated(experiment, FOUR):
        found = teachers.copy()
        teachers.clear()
        assert len(found) == (4 if each.rounds[0].round_id.round else 0)
        past = {c for u in range(4) for c in whole.seen(u, each.rounds[0].experience - 1)}
        for u, teacher in enumerate(found):
            classes = past | set(whole.clients[u][each.rounds[u].task].classes)
            assert set(teacher.draws.take(200)[0].tolist()) == classes
            assert torch.equal(teacher.parameters, each.before["generator"])


@pytest.mark.parametrize(("every", "expected"), [(1, 3), (2, 2), (3, 1), (99, 1)])
def test_every_so_many_batches_one_trains_the_generator(every: int, expected: int) -> None:
    """40 images are three batches; the first one always does."""
    experiment = tiny("fedcil", **{**PLAIN, "every": every}, split={"images_per_class": 20})
    (only,) = federated(experiment, [(0, 0)])
    assert [state["moments"]["steps"] for state in only.states] == [expected] * 4
    assert [reply.sgd_steps for reply in only.replies] == [3] * 4


# --- what is sent and kept


def test_the_bytes_of_resnet18() -> None:
    """The classifier, a head of 512 weights and a bias, and the generator, each way; once in an
    experience 13 bytes of classes each way, and up the last generator with its 13 bytes."""
    work, generator_size = workspace("local"), 1_628_448
    each_way = 4 * (RESNET + 513 + generator_size)
    params = tiny("fedcil", consolidation=1, every=2).params
    method = FedCIL(params, work)
    plan_ = split.make_plan(work.setting.split, work.dataset, seed=0)
    server, *_ = method.initial_states(plan_)
    sent = method.broadcast(server, 0)
    assert tree_bytes(sent) == each_way + 13
    last = {"generator": server["generator"], "classes": torch.ones(100, dtype=torch.bool)}
    for state, extra in (({}, 13), ({"last": last}, 4 * generator_size + 26)):
        client_round = ClientRound(RoundId(0, 0, 0, 0), plan_, state, sent)
        method.receive(client_round)
        assert tree_bytes(method.upload(client_round)) == each_way + extra
    informed = method.broadcast({**server, "informed": [0]}, 0)
    assert tree_bytes(informed) == each_way
    client_round = ClientRound(
        RoundId(0, 0, 0, 1), plan_, {"last": last, **announced(sent)}, informed
    )
    method.receive(client_round)
    assert tree_bytes(method.upload(client_round)) == each_way


def announced(message: Message) -> State:
    """The part of a client's state that keeps what was announced."""
    return {"announced": {"past": message[PREFIX + "past"]}}


def test_a_client_keeps_the_last_generator_and_two_moments() -> None:
    """Where it may miss rounds, the latest generator as well. 2 bytes of classes, 10 of a mask."""
    size = sizes(Generator((1, 8, 8), 16, 16))
    for training, kept in (({}, [2, 3, 3, 3]), ({"dropout": 1e-9}, [3, 3, 4, 3])):
        records = federated(tiny("fedcil", **SMALL, training=training), FOUR)
        for each, generators in zip(records, kept, strict=True):
            state = each.states[0]
            masks = sum(state[name] is not None for name in ("last", "next"))
            assert tree_bytes(state) == 4 * size * generators + 2 + 10 * masks


def test_memory_samples_are_images_of_the_classes_learnt_so_far() -> None:
    experiment = tiny("fedcil", **SMALL)
    worker = small.worker(experiment, plan(experiment))
    method, (server, *_) = worker.method, worker.initial_states(0)
    assert method.memory_samples(server, {}, 3) == {}
    server = {**server, "classes": SEVEN}
    before = torch.get_rng_state()
    one, again = (method.memory_samples(server, {}, 3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert one["images"].dtype == torch.uint8 and one["images"].shape == (21, 1, 8, 8)
    assert one["labels"].tolist() == [label for label in range(7) for _ in range(3)]
    assert torch.equal(one["images"], again["images"]) and one["images"].float().std() > 1


# --- generators that fail


def broken(server: State, last_layer: float) -> State:
    """The server's state with one value for all weights of the generator's last layer."""
    weights = server["generator"].clone()
    weights[-8 * 16 :] = last_layer
    return {**server, "generator": weights}


@pytest.mark.parametrize(("value", "event"), [(math.nan, NOT_FINITE), (0.0, ALL_EQUAL)])
def test_a_generator_that_fails_is_an_event_and_is_not_used(value: float, event: str) -> None:
    """The classifier is trained all the same; the server then keeps the plain mean."""
    experiment = tiny("fedcil", **{**SMALL, "generator_lr": 1e-6})
    worker = small.worker(experiment, plan(experiment))
    method, (server, states, *_) = worker.method, worker.initial_states(0)
    server = broken(server, value)
    replies = []
    for u, state in enumerate(states):
        round_id = RoundId(0, u, 0, 1, last=True)
        reply = worker.train_client(round_id, state, method.broadcast(server, u)).reply
        assert reply.log.events == [event]
        small.assert_equal_trees(reply.message["generator"], server["generator"])
        assert reply.state["moments"] is None
        trained = reply.message["parameters"]
        assert trained.isfinite().all() and not torch.equal(trained, server["parameters"])
        replies.append(reply)
    log = Log()
    after = method.aggregate(server, replies, log)
    assert log.events == [NOT_CONSOLIDATED] and after["moments"] is None
    assert after["parameters"].isfinite().all()


def test_training_goes_on_after_a_generator_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its second step on the generator is not finite: no further step is adversarial."""
    worker, method = acgan_worker(**PLAIN)
    training = started(worker, method)
    live, head = worker.work.model.parameters, method.live["adversarial_head"].parameters
    training.step([real_batch(worker)])
    method.live["generator"].parameters[-1] = math.nan
    for _ in range(2):  # also after its weights have become finite again
        before, fixed = live.clone(), head.clone()
        training.step([real_batch(worker)])
        after = live.clone()
        assert training.stopped and torch.equal(head, fixed) and not torch.equal(after, before)
        live.copy_(before)
        training.step([real_batch(worker)], adversarial=False)
        assert torch.equal(live, after)
        method.live["generator"].parameters.zero_()
    assert training.failure() == NOT_FINITE


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_awkward_federations_with_every_part_on(network: dict[str, Any]) -> None:
    """Two cycles, missed rounds, clients with one image, one class or none, batches of one."""
    training = {"dropout": 0.4, "participation": 0.7, "batch_size": 3, "rounds": 3}
    few = {"images_per_class": 8, "cycles": 2}
    experiment = tiny("fedcil", **SMALL, network=network, training=training, split=few)
    record = run(experiment, small.awkward(experiment))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert {event for row in record.history for event in row["events"]} == set()
    assert any("generator loss" in row["notes"] for row in record.history)


def test_if_everybody_drops_out_nothing_changes() -> None:
    record = run(tiny("fedcil", **SMALL, training={"dropout": ALWAYS}))
    assert all(row["completed"] == 0 for row in record.history)


# --- refused parameters
