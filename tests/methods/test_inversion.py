"""Synthesis from a frozen teacher, and what clients receive and learn from it."""

from typing import Any

import numpy as np
import pytest
import small
import torch
from by_hand import CLOSE
from small import BATCH_NORM, plan, run, whole
from stamp_core.client.workspace import RoundId, Workspace
from stamp_core.models.inversion import NormStatistics
from test_methods import client_rounds
from torch import Tensor, nn

from stamp_core.core.seeding import generator
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base import inversion
from stamp_core.methods.base.inversion import Inversion, Synthesis
from stamp_core.methods.base.method import ClientRound, Log, State

KINDS = ("target", "lander")
ONE_ROUND = {"rounds": 1}


def server_of(experiment: Experiment, classes: tuple[int, ...] = (0, 3, 4)) -> tuple[Worker, State]:
    """A worker, and its server's untrained state after an experience with these classes."""
    worker = small.worker(experiment, plan(experiment))
    server = worker.initial_states(0)[0]
    past = torch.zeros(10, dtype=torch.bool)
    past[list(classes)] = True
    return worker, {**server, "classes": past, "past": past, "round": 1}


def synthesis(experiment: Experiment, **changes: Any) -> tuple[Synthesis, Log]:
    """A synthesis that has not begun, with its log; `changes` are those of the server's state."""
    worker, server = server_of(experiment)
    assert isinstance(worker.method, Inversion)
    log = Log()
    return worker.method.synthesis(worker.method, {**server, **changes}, log), log


# --- statistics of batch normalisation


def normed() -> tuple[nn.Module, NormStatistics]:
    """A batch normalisation of two channels with running statistics of its own."""
    norm = nn.BatchNorm2d(2).eval()
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.copy_(torch.tensor([1.0, -1.0]))
    norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    return norm, NormStatistics([norm])


def batch(means: tuple[float, float], deviations: tuple[float, float]) -> Tensor:
    """Two values of each channel with exactly these means and (biased) deviations."""
    signs = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    return (torch.tensor(means) + signs * torch.tensor(deviations)).view(2, 2, 1, 1)


def test_a_batch_with_the_running_statistics_has_no_loss() -> None:
    norm, statistics = normed()
    norm(batch((1, -1), (2, 0.5)))
    assert statistics.loss().item() == 0


def test_statistics_by_hand() -> None:
    """Means (4, 3) are off by (3, 4), variances (4, 1.25) by (0, 1): distances 5 + 1."""
    norm, statistics = normed()
    norm(batch((4, 3), (2, 1.25**0.5)))
    np.testing.assert_allclose(statistics.loss().item(), 6, **CLOSE)


def test_later_rounds_are_mixed_with_an_average_of_earlier_ones() -> None:
    """0.1 of the batch and 0.9 of the average, which takes in the mixture. Variances fit.

    First round: means off by (3, 4). Second, off by (-7, -6): 0.1 of it and 0.9 of the first is
    (2, 3). Third, no gap in the batch: (1.8, 2.7).
    """
    norm, statistics = normed()
    gaps = []
    for means in ((4, 3), (-6, -7), (1, -1)):
        norm(batch(means, (2, 0.5)))
        gaps.append(statistics.loss().item())
        statistics.end_round()
    np.testing.assert_allclose(gaps, [5, 13**0.5, 0.9 * 13**0.5], **CLOSE)


def test_the_teachers_statistics_are_those_of_its_layers() -> None:
    """Written out for the only layer of the network: the convolution's output."""
    experiment = whole("target", network=BATCH_NORM, adversarial_weight=0.0)
    each, log = synthesis(experiment)
    assert each.statistics is not None and log.events == []
    images = torch.rand(5, 1, 8, 8, generator=generator("images"))
    each.generator_loss(images, torch.tensor([0, 1, 2, 0, 1]))
    conv = each.teacher.classifier.encoder[0](each.prepare(images * 255))
    variance, mean = torch.var_mean(conv, (0, 2, 3), correction=0)
    expected = mean.norm() + (variance - 1).norm()  # the untrained network's are 0 and 1
    torch.testing.assert_close(each.statistics.loss(), expected)


# --- the synthetic set


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_set_has_so_many_images_of_learnt_classes(kind: str, network: dict[str, Any]) -> None:
    """And of the source's shape and type, here 40 of three rounds of 16."""
    each, log = synthesis(whole(kind, network=network))
    images, labels = each.run()
    assert images.shape == (40, 1, 8, 8) and images.dtype == torch.uint8
    assert labels.shape == (40,) and set(labels.tolist()) <= {0, 3, 4}
    assert 0 <= log.numbers["synthesis accuracy"] <= 1
    assert images.float().std(0).mean() > 1 and inversion.ALIKE not in log.events


@pytest.mark.parametrize("shape", [(1, 14, 14), (3, 9, 11)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_any_shape(kind: str, shape: tuple[int, ...]) -> None:
    """A round of 16 images of noise, also where a generator's layers cannot halve the sides."""
    experiment = whole(kind, network=BATCH_NORM)
    noise = torch.randint(256, (20, *shape), dtype=torch.uint8, generator=generator("noise"))
    labels, moments = torch.arange(20) % 10, torch.full((shape[0],), 0.5)
    dataset = ImageDataset(
        *("noise", noise, labels, noise, labels, tuple("abcdefghij"), ("all",)),
        **{"domain_train": 0 * labels, "domain_test": 0 * labels, "digest": "noise"},
        **{"mean": moments, "std": moments},
    )
    method = experiment.kind(experiment.params, Workspace(experiment.setting, dataset))
    assert isinstance(method, Inversion)
    past = torch.arange(10) < 3
    server = {**method.init_server(0), "seed": 0, "round": 1, "past": past}
    images, _ = method.synthesis(method, server, Log()).run()
    assert images.shape == (40, *shape)


@pytest.mark.parametrize("kind", KINDS)
def test_synthesis_depends_on_nothing_but_the_server(kind: str) -> None:
    """Neither on the global generator, which it leaves alone, nor on the live model."""
    experiment = whole(kind, network=BATCH_NORM)
    results = []
    for seed in (1, 2):
        each, _ = synthesis(experiment)
        torch.manual_seed(seed)
        each.work.model.parameters.fill_(seed)
        drawn = torch.get_rng_state()
        results.append(list(each.run()))
        assert torch.equal(torch.get_rng_state(), drawn)
    small.assert_equal_trees(*results)
    another = synthesis(experiment, round=2)[0].run()
    assert not torch.equal(another[0], results[0][0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_teacher_stays_bit_for_bit(kind: str) -> None:
    """Weights and running statistics, on the server and in distillation."""
    each, _ = synthesis(whole(kind, network=BATCH_NORM, training={"shift": 1, "flip": True}))
    before = small.copied(each.teacher.state_dict())
    each.run()
    assert len(before) > 7
    for name, value in each.teacher.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(p.requires_grad for p in each.teacher.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_step_of_a_round_is_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    each, _ = synthesis(whole(kind, generator_steps=4))
    given, values = list[Tensor](), iter([3.0, 1.0, 2.0, float("nan")])
    actual = Synthesis.generator_loss

    def loss(self: Synthesis, images: Tensor, targets: Tensor) -> Tensor:
        given.append(images.detach().clone())
        value = actual(self, images, targets)
        return value - value.detach() + next(values)

    monkeypatch.setattr(Synthesis, "generator_loss", loss)
    best = each.train_generator(each.draw_targets(16))
    assert best is not None and torch.equal(best, given[1])
    assert not torch.equal(given[0], given[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_lowers_its_loss(kind: str) -> None:
    """Of one fixed batch, in the course of a round."""
    options = {"adversarial_weight": 0.0, "generator_steps": 40, "generator_lr": 0.01}
    each, log = synthesis(whole(kind, network=BATCH_NORM, **options))
    losses = list[float]()
    actual = each.generator_loss

    def loss(images: Tensor, targets: Tensor) -> Tensor:
        value = actual(images, targets)
        losses.append(float(value.detach()))
        return value

    each.generator_loss = loss  # type: ignore[method-assign]
    each.train_generator(each.draw_targets(16))
    assert losses[-1] < 0.9 * losses[0] and log.events == []


# --- what goes wrong


def test_without_statistics_an_event_says_so() -> None:
    """No batch normalisation, or one whose statistics the server does not have."""
    for network, buffers in ((small.NETWORK, "shared"), (BATCH_NORM, "local")):
        options = {"network": network, "training": {"buffers": buffers}}
        each, log = synthesis(whole("target", **options))
        assert each.statistics is None and log.events == [inversion.NO_STATISTICS]
        assert synthesis(whole("target", statistics_weight=0.0, **options))[1].events == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_that_diverges_goes_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second round has no finite loss: it gives no images, the others do."""
    each, log = synthesis(whole(kind, generator_steps=1, adversarial_weight=0.0, warmup=0))
    calls, actual = list[int](), Synthesis.generator_loss

    def loss(self: Synthesis, images: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        return actual(self, images, targets) * (torch.nan if len(calls) == 2 else 1)

    monkeypatch.setattr(Synthesis, "generator_loss", loss)
    images, labels = each.run()
    assert len(images) == len(labels) == 32 and len(calls) == 3
    assert log.events.count(inversion.NOT_FINITE) == 1
    assert each.generator.parameters.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_finite_images_training_goes_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(self: Synthesis, images: Tensor, targets: Tensor) -> Tensor:
        return images.sum() * torch.nan

    monkeypatch.setattr(Synthesis, "generator_loss", loss)
    record = run(whole(kind, training=ONE_ROUND, diagnostics={"memory": 1}))
    events = [entry["events"].get(inversion.NO_IMAGES, 0) for entry in record.history]
    assert events == [1, 1, 0] and not record.memory
    assert all(np.isfinite(entry["loss"]) for entry in record.history)


def test_a_student_that_diverges_is_left_out() -> None:
    """Synthesis goes on without it; with it, its term is used from the round after its first."""
    each, log = synthesis(whole("target", student_lr=1e30))
    assert len(each.run()[0]) == 40
    assert log.events.count(inversion.STUDENT_DIVERGED) == 1 and each.student is None
    each, log = synthesis(whole("target"))
    each.run()
    assert each.student_ready and inversion.STUDENT_DIVERGED not in log.events


def test_images_that_are_all_alike_are_an_event() -> None:
    each, log = synthesis(whole("target"))
    flat = torch.full((9, 1, 8, 8), 7, dtype=torch.uint8)
    each.examine(flat, torch.zeros(9, dtype=torch.int64))
    assert log.events[-1] == inversion.ALIKE


# --- from experience to experience


def one_round(kind: str, **options: Any) -> Experiment:
    """One round in each of three experiences."""
    return whole(kind, training=ONE_ROUND, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_follows_every_experience_but_the_last(kind: str) -> None:
    experiment = one_round(kind)
    worker, plan_ = small.worker(experiment, plan(experiment)), plan(experiment)
    rounds = list(client_rounds(worker, plan_))
    for each in rounds:
        announced = each.client_round.message.get("announced images")
        assert (announced is not None) == (each.client_round.experience > 0)
        if announced is None:
            continue
        labels = set(each.client_round.message["announced labels"].tolist())
        clients = range(len(plan_.clients))
        earlier = [plan_.seen(u, each.client_round.experience - 1) for u in clients]
        assert labels and labels <= {label for seen in earlier for label in seen}
        # in the only round of an experience the received model is the teacher
        teacher = each.client_round.message["announced teacher"]
        assert torch.equal(teacher[: small.P], each.client_round.message["parameters"])
    assert [entry["seconds"].get("synthesis", 0) > 0 for entry in run(experiment).history] == [
        *(True, True, False)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_set_is_sent_once_to_every_client_in_an_experience(kind: str) -> None:
    """40 images of 64 bytes with a byte for each label, and the teacher."""
    network = BATCH_NORM
    record = run(whole(kind, network=network))
    down = [entry["bytes"]["down"] for entry in record.history]
    once = 40 * (64 + 1) + 4 * (small.BN_P + small.BN_B)
    if kind == "lander":
        once += 4 * (8 * 6 + 6)  # the teacher's map
    assert [down[place] - down[place + 1] for place in (2, 4)] == 2 * [4 * (once + 2)]
    assert down[1] == down[3] == down[5]


def received(experiment: Experiment, labels: list[int], own: Plan | None = None) -> Any:
    """A client round of the second experience with an image of each of some labels."""
    plan_ = own or plan(experiment)
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    past = torch.zeros(10, dtype=torch.bool)
    past[labels] = True
    draw = generator("set")
    images = torch.randint(256, (len(labels), 1, 8, 8), dtype=torch.uint8, generator=draw)
    assert isinstance(worker.method, Inversion)
    replay = {"images": images, "labels": torch.tensor(labels, dtype=torch.uint8)}
    replay |= {"teacher": worker.method.teacher_vector(server)}
    server = {**server, "past": past, "replay": replay}
    message = worker.method.broadcast(server, 0)
    return worker, ClientRound(RoundId(0, 0, 1, 0), plan_, states[0], message)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_distil_on_images_of_other_classes_alone(kind: str) -> None:
    experiment = one_round(kind)
    own = set(plan(experiment).clients[0][1].classes)
    worker, client_round = received(experiment, list(range(10)))
    worker.method.train_client(client_round)
    assert set(client_round.scratch["kd classes"].tolist()) == set(range(10)) - own
    images = client_round.message["announced images"]
    shown = {tuple(part.flatten().tolist()) for part in next(client_round.scratch["replay"])}
    others = worker.work.normalise(images[[c for c in range(10) if c not in own]])
    assert shown <= {tuple(image.flatten().tolist()) for image in others}


@pytest.mark.parametrize("kind", KINDS)
def test_with_only_classes_of_its_own_a_client_has_no_replay(kind: str) -> None:
    """Its loss is that of a first experience: nothing of the set is used."""
    experiment = one_round(kind)
    own = list(plan(experiment).clients[0][1].classes)
    with_set, first = received(experiment, own), received(experiment, [])
    replies = [
        worker.method.train_client(client_round) for worker, client_round in (with_set, first)
    ]
    assert "replay" not in with_set[1].scratch
    small.assert_equal_trees(replies[0].message, replies[1].message)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [(8, None, [2, 2, 2, 2]), (8, 3, [3, 3, 2, 3]), (2, None, [1, 1, 1, 1])],
)
def test_sizes_of_replay_batches(count: int, size: int | None, expected: list[int]) -> None:
    """By default the set is passed once in a local epoch, here in four batches."""
    experiment = one_round("target", split={"images_per_class": 32}, replay_batch_size=size)
    own = plan(experiment).clients[0][1].classes
    labels = [label for label in range(10) if label not in own][:count]
    worker, client_round = received(experiment, labels)
    worker.method.receive(client_round)
    client_round.indices = worker.method.train_indices(client_round)
    worker.method.train(client_round)
    batches = worker.method.replay_batches(client_round, client_round.message["announced images"])
    drawn = [next(batches) for _ in range(4)]
    assert [len(each) for each in drawn] == expected
    if size is None:
        epoch = torch.cat(drawn)[:count].flatten(1)
        assert len(epoch.unique(dim=0)) == count


def test_one_image_of_each_kind_does_no_harm_to_micro_batches() -> None:
    """With batch normalisation, in micro-batches, and one synthetic image at a time."""
    network = {**BATCH_NORM, "micro_batch_size": 4}
    few = {"images_per_class": 10, "clients": 2}
    experiment = one_round("target", network=network, split=few, replay_batch_size=1)
    record = run(experiment)
    assert all(np.isfinite(value).all() for value in record.weights.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_shown_is_the_set_of_the_server(kind: str) -> None:
    experiment = one_round(kind, diagnostics={"memory": 2})
    worker, server = server_of(experiment)
    method = worker.method
    assert method.memory_samples(server, {}, 2) == {}
    server = method.end_experience({**server, "round": 1}, Log())
    samples, labels = method.memory_samples(server, {}, 2), server["replay"]["labels"].long()
    assert samples["labels"].dtype == torch.int64
    for label in (0, 3, 4):
        images = samples["images"][samples["labels"] == label]
        assert torch.equal(images, server["replay"]["images"][labels == label][:2])
    record = run(experiment)
    assert set(record.memory["experiences"].tolist()) == {0, 2}
