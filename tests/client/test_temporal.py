"""Gradients of past tasks and their match, against the same network written out in plain torch."""

import math
from functools import partial
from typing import Any, NamedTuple

import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, kept, network, normalised, plan, run, slope, tiny
from stamp_core.client.temporal import TemporalMatcher, TemporalParams, sample_tasks
from stamp_core.client.workspace import RoundId, Workspace
from torch import Tensor

from stamp_core.config.params import read_params
from stamp_core.core.seeding import generator
from stamp_core.engine.executor import Worker
from stamp_core.engine.experiment import Experiment
from stamp_core.matching.match import match
from stamp_core.methods.base import registry
from stamp_core.methods.base.method import ClientRound
from stamp_core.methods.stamp import Stamp

MEMORY = kept(5)
FREE: dict[str, Any] = {"length": "free"}
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01, "epochs": 2}
WIDE = {"kind": "mlp", "features": 128}  # two layers of more than 1024 parameters
WIDE_SIZES = [64 * 128 + 128, 128 * 10 + 10]
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


class Matching(NamedTuple):
    """A client after local SGD, before its update is matched."""

    experiment: Experiment
    worker: Worker
    client_round: ClientRound
    received: Tensor
    trained: Tensor  # by local SGD alone
    buffers: Tensor  # after it
    sgd_steps: int

    @property
    def update(self) -> Tensor:
        """Minus the update by local SGD."""
        return self.received - self.trained

    @property
    def path(self) -> float:
        """What scales a gradient to the client round's steps."""
        return self.sgd_steps * 0.1

    @property
    def matcher(self) -> TemporalMatcher:
        """The matcher after local SGD."""
        method, work = self.worker.method, self.worker.work
        assert isinstance(method, Stamp)
        work.model.load(self.trained, self.buffers)
        params, round_id = method.params.temporal, self.client_round.round_id
        stored = partial(method.stored, self.client_round)
        return TemporalMatcher(work, round_id, params, self.received, stored)

    def exemplars(self, task: int) -> tuple[Tensor, Tensor]:
        """Normalised images and labels of a task in the memory."""
        memory = self.client_round.state["memory"]
        own = memory["tasks"] == task
        return normalised(self.experiment, memory["images"][own]), memory["labels"][own]

    def gradient(self, task: int) -> Tensor:
        """The gradient of the mean cross-entropy on the exemplars of a task."""
        net = network(self.experiment, self.trained)
        images, labels = self.exemplars(task)
        return slope(net, F.cross_entropy(net(images), labels))

    def upload(self) -> Tensor:
        """The parameters that the client sends, with matching."""
        return self.worker.method.train_client(self.client_round).message["parameters"]

    def matched(self) -> Tensor:
        """Minus the matched update."""
        return self.received - self.upload()


def matching(
    experience: int = 2, /, memory: Any = MEMORY, params: Any = None, **options: Any
) -> Matching:
    """A client in an experience's only round; options of matching and of the experiment."""
    outer = {k: options.pop(k) for k in ("split", "training", "network") if k in options}
    params = {"memory": memory, "temporal": options} if params is None else params
    experiment = tiny("stamp", **outer, **params)
    worker = small.worker(experiment, plan(experiment))
    client_round = small.arrived(worker, plan(experiment), experience)
    unmatched = tiny("stamp", **outer, **{**params, "temporal": None})
    plain = small.worker(unmatched, plan(experiment))
    round_id, plan_, start = client_round.round_id, client_round.plan, client_round.message
    reply = plain.method.train_client(ClientRound(round_id, plan_, client_round.state, start))
    model = plain.work.model
    local = model.parameters.clone(), model.buffers.clone(), reply.sgd_steps
    return Matching(experiment, worker, client_round, start["parameters"], *local)


# ------------------------------------------------------------------ gradients of past tasks


def test_a_gradient_is_that_of_the_mean_loss_times_lr_and_steps() -> None:
    """17 or 18 batches at learning rate 0.1: as long as the update of so many such steps."""
    at = matching(past="gradient")
    assert at.sgd_steps > 10
    for task in (0, 1):
        expected = at.path * at.gradient(task)
        torch.testing.assert_close(at.matcher.past_gradient(task, at.path), expected, **CLOSE)
        assert expected.norm() > 0.01


@pytest.mark.parametrize("training", [{}, MOMENTUM], ids=str)
def test_a_trajectory_is_sgd_on_the_exemplars_relative_to_the_received_model(
    training: dict[str, Any],
) -> None:
    """As many epochs as the client round, with an optimiser and an order of its own."""
    at = matching(past="trajectory", training={"batch_size": 4, **training})
    t = at.experiment.setting.training
    for task in (0, 1):
        net = network(at.experiment, at.trained)
        sgd = torch.optim.SGD(net.parameters(), t.lr, t.momentum, 0, t.weight_decay)
        images, labels = at.exemplars(task)
        order = generator(0, 0, 2, 0, f"order of task {task}")
        for _ in range(t.epochs):
            for batch in torch.randperm(len(labels), generator=order).split(4):
                sgd.zero_grad()
                F.cross_entropy(net(images[batch]), labels[batch]).backward()
                sgd.step()
        expected = at.received - torch.nn.utils.parameters_to_vector(net.parameters()).detach()
        torch.testing.assert_close(at.matcher.past_gradient(task, 1.0), expected, **CLOSE)


def test_an_unmoved_past_is_the_update_itself() -> None:
    at = matching(past="unmoved")
    assert all(torch.equal(at.matcher.past_gradient(task, 1.0), at.update) for task in (0, 1))


def test_all_data_are_the_training_images_of_the_task() -> None:
    """Whatever is in memory: here nothing is."""
    at = matching(memory=kept(0), past="gradient", source="all data", images=1000)
    dataset, net = at.experiment.dataset(), network(at.experiment, at.trained)
    own = plan(at.experiment).train_indices(dataset, 0, 1)
    logits = net(normalised(at.experiment, dataset.x_train[own]))
    expected = slope(net, F.cross_entropy(logits, dataset.y_train[own]))
    assert len(own) > 200
    torch.testing.assert_close(at.matcher.past_gradient(1, 1.0), expected, **CLOSE)


def test_the_images_behind_a_gradient_are_sampled_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most `images` of the 10 exemplars of a task."""
    batches: list[Tensor] = []
    normalise = Workspace.normalise

    def noted(self: Workspace, images: Tensor) -> Tensor:
        batches.append(images)
        return normalise(self, images)

    monkeypatch.setattr(Workspace, "normalise", noted)
    at = matching(past="gradient", images=10)
    at.matcher.past_gradient(0, 1.0)
    assert len(batches[-1]) == 10
    at = matching(past="gradient", images=3)
    old = at.client_round
    batches.clear()
    later = ClientRound(RoundId(0, 0, 2, 1), old.plan, old.state, old.message)
    for each in (at, at, at._replace(client_round=later)):
        each.matcher.past_gradient(0, 1.0)
    assert [len(each) for each in batches] == [3, 3, 3]
    assert torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], batches[2])
    memory = at.client_round.state["memory"]
    exemplars = memory["images"][memory["tasks"] == 0]
    known = {each.numpy().tobytes() for each in exemplars}
    assert all(each.numpy().tobytes() in known for batch in batches for each in batch)


# ------------------------------------------------------------------ the match of a client round


@pytest.mark.parametrize(
    ("reference", "past", "own", "lr"),
    [
        ("mean", 1 / 3, 1 / 3, 1.0),
        ("current", 0.0, 1.0, 1.0),
        ("current", 0.0, 1.0, 0.5),
        ("mean", 1 / 3, 1 / 3, 2.0),
    ],
)
def test_with_radius_0_the_result_is_lr_times_the_reference(
    reference: str, past: float, own: float, lr: float
) -> None:
    """In the third of three tasks: lr (own * update + past * path (g_0 + g_1))."""
    at = matching(past="gradient", reference=reference, kappa=0.0, lr=lr, **FREE)
    expected = own * at.update + past * at.path * (at.gradient(0) + at.gradient(1))
    torch.testing.assert_close(at.matched(), lr * expected, **CLOSE)


def test_with_the_current_task_as_reference_and_radius_0_normalisation_changes_nothing() -> None:
    at = matching(reference="current", normalise="current", kappa=0.0)
    torch.testing.assert_close(at.upload(), at.trained, **CLOSE)


def test_matching_does_not_change_two_gradients_of_one_length() -> None:
    """By symmetry w = (1/2, 1/2), so d = (1 + kappa) g0, which is divided by 1 + kappa."""
    at = matching(1, past="gradient", normalise="current", kappa=0.5, length="1+kappa")
    past = at.gradient(0)
    mean = (at.update + past * at.update.norm() / past.norm()) / 2
    torch.testing.assert_close(at.matched(), mean, **CLOSE)
    assert not torch.allclose(mean, at.update, atol=1e-3)


def test_the_matched_update_is_the_best_in_its_ball() -> None:
    """|d - g0| = kappa |g0|, and no other d of the ball does better for the worst-served gradient:
    neither g0, nor 300 random ones, nor 300 combinations of gradients, nor 300 near d."""
    kappa = 0.5
    at = matching(past="gradient", normalise="none", kappa=kappa, **FREE)
    gradients = [at.path * at.gradient(0), at.path * at.gradient(1), at.update]
    table, d = torch.stack(gradients).double(), at.matched().double()
    g0 = table.mean(0)
    radius = float(kappa * g0.norm())
    assert float((d - g0).norm()) == pytest.approx(radius, rel=1e-4)
    worst = float((table @ d).min())
    assert worst > float((table @ g0).min()) * 1.001
    numbers = generator("directions")
    for _ in range(300):
        weights = torch.rand(3, generator=numbers, dtype=torch.float64)
        noise = torch.randn(small.P, generator=numbers, dtype=torch.float64)
        for direction in (weights @ table, noise, d - g0 + 0.1 * radius * noise / noise.norm()):
            other = g0 + radius * direction / direction.norm()
            assert float((table @ other).min()) <= worst * (1 + 1e-4)


def test_the_first_experience_is_local_sgd_bit_for_bit() -> None:
    at = matching(0)
    assert torch.equal(at.upload(), at.trained)


def preset(name: str) -> dict[str, Any]:
    """A preset's parameters, with those that it inherits."""
    values = registry.read_preset(name, read_params())
    values.pop("kind")
    return values


LONGER = 2 * 1.25 / (1 + 0.25**2)  # 2 (1 + c) / (1 + c^2) at c = 0.25


@pytest.mark.parametrize(
    ("name", "experience"),
    [("stamp_code", 0), ("stamp_code_coreset", 0), ("stamp_code_coreset", 2)],
)
def test_equal_gradients_make_the_public_codes_update_2_353_times_as_long(
    name: str, experience: int
) -> None:
    """In the first experience there is one gradient, and with an unmoved past all are equal.

    The code adds 1e-4 to lengths, relative to gradients of about 1.
    """
    assert round(LONGER, 3) == 2.353
    at = matching(experience, params=preset(name))
    matched = at.matched()
    assert float((matched - LONGER * at.update).norm() / at.update.norm()) < 1e-3
    assert float(matched @ at.update / at.update.square().sum()) == pytest.approx(LONGER, rel=1e-4)


def test_later_tasks_of_the_public_code_without_coresets_are_matched() -> None:
    at = matching(1, params=preset("stamp_code"))
    assert float((at.matched() - LONGER * at.update).norm() / at.update.norm()) > 0.1


# ------------------------------------------------------------------ samples, blocks


def test_tasks_are_sampled_in_every_round() -> None:
    tasks = list(range(3, 13))
    samples = [sample_tasks(tasks, 4, RoundId(0, 1, 2, round_)) for round_ in range(40)]
    assert all(len(set(each)) == 4 and each == sorted(each) for each in samples)
    assert set().union(*samples) == set(tasks) and len({tuple(each) for each in samples}) > 10
    first = RoundId(0, 1, 2, 0)
    assert sample_tasks(tasks, 4, first) == samples[0]
    assert sample_tasks(tasks, 10, first) == sample_tasks(tasks, 50, first) == tasks


@pytest.mark.parametrize(("tasks", "counts"), [(1, [2, 2, 2]), (2, [2, 3, 3]), (50, [2, 3, 4])])
def test_a_match_has_the_current_and_at_most_so_many_past_tasks(
    tasks: int, counts: list[int]
) -> None:
    record = run(tiny("stamp", split={"tasks": 4}, memory=MEMORY, temporal={"tasks": tasks}))
    logged = [entry["notes"].get("temporal gradient count") for entry in record.history[::2]]
    assert logged == [None, *counts]


def test_buffers_after_a_match_are_those_of_local_training() -> None:
    """Exemplars do not change the statistics of batch normalisation."""
    at = matching(network=BATCH_NORM, normalise="current")
    message = at.worker.method.train_client(at.client_round).message
    assert torch.equal(message["buffers"], at.buffers)
    assert not torch.allclose(message["parameters"], at.trained, atol=1e-3)


@pytest.mark.parametrize("past", ["gradient", "trajectory"])
def test_past_gradients_start_from_the_buffers_of_local_training(past: str) -> None:
    """Gradients in evaluation mode; SGD steps with the batch's statistics, but for the last batch
    of one of ten images, which has none. The order of tasks does not matter."""
    at = matching(network=BATCH_NORM, past=past, training={"batch_size": 9})
    expected = []
    for task in (0, 1):
        net = network(at.experiment, at.trained).eval()
        norm = net.encoder[1]
        norm.running_mean.copy_(at.buffers[:4])
        norm.running_var.copy_(at.buffers[4:])
        images, labels = at.exemplars(task)
        if past == "gradient":
            expected.append(slope(net, F.cross_entropy(net(images), labels)))
            continue
        order = generator(0, 0, 2, 0, f"order of task {task}")
        for batch in torch.randperm(10, generator=order).split(9):
            norm.train(len(batch) > 1)
            step = slope(net, F.cross_entropy(net(images[batch]), labels[batch]))
            weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach() - 0.1 * step
            torch.nn.utils.vector_to_parameters(weights, net.parameters())
        expected.append(at.received - weights)
    for order_ in ((0, 1), (1, 0)):
        matcher = at.matcher
        at.worker.work.model.module.train(past == "gradient")
        for task in order_:
            torch.testing.assert_close(matcher.past_gradient(task, 1.0), expected[task], **CLOSE)


def test_the_blocks_of_a_client_round_are_the_layers_of_its_model() -> None:
    """Each of two layers is matched as if it were the model."""
    options: dict[str, Any] = {"past": "gradient", "network": WIDE, "normalise": "current", **FREE}
    whole = matching(blocks="model", **options).matched()
    at = matching(blocks="layers", **options)
    past = [at.gradient(task) for task in (0, 1)]
    gradients = [*(each * (at.update.norm() / each.norm()) for each in past), at.update]
    assert at.worker.work.layers() == WIDE_SIZES
    layers = zip(*(each.split(WIDE_SIZES) for each in gradients), strict=True)
    alone = [match(list(layer), TemporalParams(**FREE))[0] for layer in layers]
    torch.testing.assert_close(at.matched(), torch.cat(alone), **CLOSE)
    assert not torch.allclose(whole, torch.cat(alone), atol=1e-4)


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_dropped_and_counted(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exemplar whose forward pass overflows excludes its task, nothing else."""
    gradient = TemporalMatcher.gradient

    def overflowing(self: TemporalMatcher, task: int) -> Tensor:
        result = gradient(self, task)
        return result.index_fill(0, torch.tensor([7]), bad) if task == 0 else result

    monkeypatch.setattr(TemporalMatcher, "gradient", overflowing)
    options = {"past": "gradient", "normalise": "current"}
    record = run(tiny("stamp", memory=MEMORY, temporal=options))
    assert all(torch.from_numpy(value).isfinite().all() for value in record.weights.values())
    event = "temporal matching: a gradient was dropped"
    counts = [entry["events"].get(event, 0) for entry in record.history]
    assert counts == [0, 0, 4, 4, 4, 4]  # at all four clients
    assert record.history[-1]["notes"]["temporal dropped"] == 1


def test_a_dropped_gradient_does_not_change_the_match_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """received - (update + path g_1) / 2, as if task 0 had never been met."""
    at = matching(past="gradient", kappa=0.0, **FREE)
    gradient = TemporalMatcher.gradient
    monkeypatch.setattr(
        TemporalMatcher, "gradient", lambda m, task: gradient(m, task) * (1 if task else math.nan)
    )
    torch.testing.assert_close(at.matched(), (at.update + at.path * at.gradient(1)) / 2, **CLOSE)
