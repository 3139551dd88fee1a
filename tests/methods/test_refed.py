"""Re-Fed: importance and cache by hand, the informative model, what is read, cached and sent."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from by_hand import CLOSE, FULL_BATCH, Array, inputs, softmax_gradient, use_softmax_regression
from small import BATCH_NORM, BN_B, P, plan, run, tiny
from stamp_core.client.workspace import RoundId
from test_bytes import MODEL, B, workspace
from torch import Tensor

from stamp_core.core.seeding import generator
from stamp_core.data import split
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.base import sample_cache
from stamp_core.methods.base.exemplar_lists import ExemplarLists
from stamp_core.methods.base.method import ClientRound, State
from stamp_core.methods.base.sample_cache import LOST, NOT_FINITE, OMITTED, rank_in_class
from stamp_core.methods.refed import ReFed
from stamp_core.models.networks import Classifier
from stamp_core.results.records import tree_bytes

FEW = {"images_per_class": 20}  # 40 images in a task


def refed_worker(**options: Any) -> tuple[Worker, Plan, ReFed]:
    """A worker for Re-Fed on 40 images per task, its plan and its method."""
    experiment = tiny("refed", **{"split": FEW, **options})
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    assert isinstance(worker.method, ReFed)
    return worker, plan_, worker.method


def task_samples(worker: Worker, plan_: Plan, task: int, client: int = 0) -> ExemplarLists:
    """All training images of a task."""
    dataset = worker.work.dataset
    indices = plan_.train_indices(dataset, client, task)
    tasks = torch.full_like(indices, task)
    return {"images": dataset.x_train[indices], "labels": dataset.y_train[indices], "tasks": tasks}


def joined(*parts: ExemplarLists) -> ExemplarLists:
    """Samples one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def without(samples: ExemplarLists, task: int) -> ExemplarLists:
    """The samples of other tasks."""
    return {name: values[samples["tasks"] != task] for name, values in samples.items()}


def rows(samples: ExemplarLists) -> list[bytes]:
    """Every sample as bytes, sorted."""
    parts = zip(samples["images"], samples["labels"], samples["tasks"], strict=True)
    return sorted(b"".join(part.numpy().tobytes() for part in sample) for sample in parts)


# --- by hand


def importance_by_hand(theta: Array, x: Array, labels: Tensor) -> Array:
    """Three steps at lam = 0.4, so q = 0.6 / 0.8 = 0.75, with a learning rate of 0.5.  # [n]"""
    v, importance = theta, np.zeros(len(x))
    for step in (1, 2, 3):
        z = np.exp(x @ v[:640].reshape(10, 64).T + v[640:])
        error = z / z.sum(1, keepdims=True) - np.eye(10)[labels.numpy()]
        importance += np.sqrt((error**2).sum(1) * ((x**2).sum(1) + 1)) / step
        v = v - 0.5 * (softmax_gradient(v, x, labels) + 0.75 * (v - theta))
    return importance


@pytest.mark.parametrize("score", ["full", "head"])
def test_two_caches_by_hand(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression z = W x + b in full batches; every received model is theta.

    For one image the gradient is (p - e) x^T in W and p - e in b, with p = softmax(z) and e the
    one-hot label. Its norm is G = |p - e| sqrt(|x|^2 + 1). The informative model starts from
    v_1 = theta and moves by v_(p+1) = v_p - 0.5 (mean gradient at v_p + 0.75 (v_p - theta)). The
    importance is G_1 + G_2 / 2 + G_3 / 3. The twelve largest are cached: first of task 0, then of
    task 1 and this cache. Training is one step of 0.1 along the mean gradient of cache and task.
    """
    use_softmax_regression(monkeypatch)
    params: dict[str, Any] = {"cache": 12, "lam": 0.4, "steps": 3, "pim_lr": 0.5, "score": score}
    worker, plan_, method = refed_worker(training=FULL_BATCH, **params)
    cache = task_samples(worker, plan_, 0)
    for task in (1, 2):
        client_round = small.arrived(worker, plan_, task)
        samples = cache if task == 1 else joined(task_samples(worker, plan_, 1), cache)
        theta = client_round.message["parameters"].double().numpy()
        expected = importance_by_hand(theta, inputs(worker, samples["images"]), samples["labels"])
        worker.work.model.load(client_round.message["parameters"])
        actual = method.importance(client_round, samples)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=0)

        order = np.argsort(-expected, kind="stable")
        assert expected[order[11]] - expected[order[12]] > 1e-4  # rounding does not decide
        cache = {name: values[order[:12].copy()] for name, values in samples.items()}
        reply = worker.method.train_client(client_round)
        small.assert_equal_trees(reply.state["cache"], cache)
        union = joined(task_samples(worker, plan_, task), cache)
        gradient = softmax_gradient(theta, inputs(worker, union["images"]), union["labels"])
        after = reply.message["parameters"].numpy()
        np.testing.assert_allclose(after, theta - 0.1 * gradient, **CLOSE)
    assert set(cache["tasks"].tolist()) == {0, 1}  # the second choice was one between tasks


# --- gradient norms


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
@pytest.mark.parametrize("score", ["full", "head"])
def test_norms_are_those_of_single_images_in_any_order_and_portion(
    score: str, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By backpropagation of one image at a time, in evaluation mode."""
    worker, plan_, method = refed_worker(network=network, score=score)
    samples, classifier = task_samples(worker, plan_, 0), worker.work.classifier
    worker.work.model.buffers.uniform_(0.5, 1.5, generator=generator("buffers"))
    buffers = worker.work.model.buffers.clone()
    actual = method.gradient_norms(samples)

    classifier.eval()
    weights = list((classifier if score == "full" else classifier.head).parameters())
    for i, (images, labels) in enumerate(method.parts(samples, 1)):
        gradients = torch.autograd.grad(F.cross_entropy(classifier(images), labels), weights)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        torch.testing.assert_close(actual[i], norm, rtol=1e-5, atol=1e-6)
    assert i == 39

    order = torch.randperm(40, generator=generator("order"))
    monkeypatch.setattr(sample_cache, "GRADIENTS", 3 * len(worker.work.model.parameters))
    monkeypatch.setattr(worker.work, "chunk", 7)
    shuffled = method.gradient_norms({name: v[order] for name, v in samples.items()})
    torch.testing.assert_close(shuffled, actual[order], rtol=1e-5, atol=1e-6)
    assert torch.equal(worker.work.model.buffers, buffers)


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
@pytest.mark.parametrize(("score", "passes"), [("full", 5), ("head", 2)])
def test_all_images_that_are_differentiated_are_counted(
    score: str, passes: int, network: Any
) -> None:
    """The 40 images in two steps and, with gradients of all parameters, in three scorings."""
    worker, plan_, method = refed_worker(network=network, cache=5, steps=3, score=score)
    client_round, samples = small.arrived(worker, plan_, 1), task_samples(worker, plan_, 0)
    before = Classifier.differentiated
    method.importance(client_round, samples)
    assert Classifier.differentiated - before == passes * 40


# --- the informative model


def followed(monkeypatch: pytest.MonkeyPatch, **params: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The informative model at every scoring, and the mean gradient there."""
    worker, plan_, method = refed_worker(**params)
    samples, client_round = task_samples(worker, plan_, 0), small.arrived(worker, plan_, 1)
    path, slopes = list[Tensor](), list[Tensor]()
    scored = ReFed.gradient_norms

    def gradient_norms(self: ReFed, samples: ExemplarLists) -> Tensor:
        path.append(self.work.model.parameters.clone())
        slopes.append(self.mean_gradient(samples).clone())
        return scored(self, samples)

    monkeypatch.setattr(ReFed, "gradient_norms", gradient_norms)
    worker.work.model.load(client_round.message["parameters"])
    method.importance(client_round, samples)
    assert torch.equal(path[0], client_round.message["parameters"])
    return path, slopes


def test_at_lam_1_the_informative_model_takes_plain_gradient_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, slopes = followed(monkeypatch, lam=1.0, pim_lr=0.2, steps=3)
    torch.testing.assert_close(path[1], path[0] - 0.2 * slopes[0])
    torch.testing.assert_close(path[2], path[1] - 0.2 * slopes[1])


def test_where_lr_times_q_is_1_each_step_starts_from_the_received_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """v - eta (g + (v - w) / eta) = w - eta g; q = 5 at lam = 1 / 11."""
    path, slopes = followed(monkeypatch, lam=1 / 11, pim_lr=0.2, steps=3)
    torch.testing.assert_close(path[1], path[0] - 0.2 * slopes[0])
    torch.testing.assert_close(path[2], path[0] - 0.2 * slopes[1])
    assert not torch.allclose(slopes[1], slopes[0])


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_scoring_changes_neither_the_live_model_nor_the_statistics(policy: str) -> None:
    """The first local step starts from the received model and the buffers of before."""
    worker, plan_, method = refed_worker(
        network=BATCH_NORM, training={"buffers": policy}, cache=5, pim_lr=0.5
    )
    client_round = small.arrived(worker, plan_, 1)
    method.receive(client_round)
    vectors = worker.work.model.parameters, worker.work.model.buffers
    before = [vector.clone() for vector in vectors]
    method.importance(client_round, task_samples(worker, plan_, 0))
    small.assert_equal_trees(list(vectors), before)


def test_norms_that_are_not_finite_end_the_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate of 1e38: the second scoring overflows, so the first one decides alone."""
    worker, plan_, _ = refed_worker(cache=5, lam=1.0, pim_lr=1e38, steps=3)
    client_round = small.arrived(worker, plan_, 1)
    reply = worker.method.train_client(client_round)
    assert client_round.log.events.count(NOT_FINITE) == 1
    assert torch.isfinite(reply.message["parameters"]).all()

    worker, plan_, _ = refed_worker(cache=5, lam=1.0, pim_lr=0.1, steps=1)
    other = small.arrived(worker, plan_, 1)
    small.assert_equal_trees(worker.method.train_client(other).state["cache"], reply.state["cache"])
    assert NOT_FINITE not in other.log.events


# --- what is cached


def sequence(worker: Worker, plan_: Plan, *experiences: int) -> list[tuple[ClientRound, State]]:
    """Client 0's rounds in some experiences, each after the same message, and its states."""
    server, states, *_ = worker.initial_states(0)
    state, message, results = states[0], worker.method.broadcast(server, 0), []
    for experience in experiences:
        client_round = ClientRound(RoundId(0, 0, experience, 0), plan_, state, message)
        state = worker.method.train_client(client_round).state
        results.append((client_round, state))
    return results


@pytest.mark.parametrize("cache", [5, 39, 40, 41, 60, 100])
@pytest.mark.parametrize("balance", ["none", "class"])
def test_the_cache_is_part_of_the_task_before_and_the_cache_before(
    cache: int, balance: str
) -> None:
    """So what was dropped never comes back. It is full, or holds all there is."""
    worker, plan_, _ = refed_worker(cache=cache, balance=balance, steps=2)
    caches = [state["cache"] for _, state in sequence(worker, plan_, 0, 1, 2)]
    assert rows(caches[0]) == []
    for task in (1, 2):
        offered = rows(joined(task_samples(worker, plan_, task - 1), caches[task - 1]))
        cached = rows(caches[task])
        assert len(set(cached)) == len(cached) == min(cache, len(offered))
        assert set(cached) <= set(offered)


def test_the_cache_stays_throughout_an_experience() -> None:
    worker, plan_, _ = refed_worker(cache=5)
    first, second, third = sequence(worker, plan_, 1, 1, 1)
    assert len(first[1]["cache"]["labels"]) == 5
    small.assert_equal_trees([second[1], third[1]], [first[1]] * 2)
    timed = ["cache" in each[0].log.seconds for each in (first, second, third)]
    assert timed == [True, False, False]


def test_samples_without_a_gradient_go_first() -> None:
    """At a bias of 1000 for one class its images have p = 1: they have no gradient."""
    counts = {}
    for balance in ("none", "class"):
        worker, plan_, method = refed_worker(cache=20, steps=1, balance=balance)
        client_round = small.arrived(worker, plan_, 1)
        certain, other = plan_.clients[0][0].classes
        biased = client_round.message["parameters"].clone()
        biased[P - 10 + certain] = 1000.0
        reply = method.train_client(replace(client_round, message={"parameters": biased}))
        labels = reply.state["cache"]["labels"]
        counts[balance] = [int((labels == label).sum()) for label in (certain, other)]
        assert reply.log.events == ([OMITTED] if balance == "none" else [])
        assert reply.log.numbers["cache classes"] == (1 if balance == "none" else 2)
    assert counts == {"none": [0, 20], "class": [10, 10]}


def test_a_balanced_cache_takes_the_best_of_each_class_in_turn() -> None:
    """Classes of 20, 20, 3 and 3 offered images: of 16, two classes give all, the others five."""
    worker, plan_, method = refed_worker(cache=16, steps=1, balance="class")
    first, second = (task_samples(worker, plan_, task) for task in (0, 1))
    few = [
        i for label in second["labels"].unique() for i in range(40) if second["labels"][i] == label
    ]
    few = [*few[:3], *few[20:23]]
    samples = joined(first, {name: values[few] for name, values in second.items()})
    client_round = small.arrived(worker, plan_, 1)
    worker.work.model.load(client_round.message["parameters"])
    importance, chosen = (
        method.importance(client_round, samples),
        method.choose(client_round, samples),
    )
    for label in samples["labels"].unique():
        own = (samples["labels"] == label).nonzero().flatten()
        best = own[importance[own].argsort(descending=True)][:5]
        assert set(chosen[samples["labels"][chosen] == label].tolist()) == set(best.tolist())


def test_places_in_a_class_by_hand() -> None:
    assert rank_in_class(torch.tensor([7, 2, 7, 7, 2, 9])).tolist() == [1, 1, 2, 3, 2, 1]


def test_memory_samples_are_cached_images() -> None:
    worker, plan_, method = refed_worker(cache=30)
    state = sequence(worker, plan_, 0, 1)[-1][1]
    shown = method.memory_samples({}, state, 3)
    assert shown["images"].shape == (6, 1, 8, 8)
    assert shown["labels"].unique(return_counts=True)[1].tolist() == [3, 3]
    pairs = {rows({**state["cache"], "tasks": state["cache"]["labels"]})[i] for i in range(30)}
    assert set(rows({**shown, "tasks": shown["labels"]})) <= pairs
    assert len(method.memory_samples({}, worker.initial_states(0)[1][0], 3)["labels"]) == 0


# --- what is read and trained on


def test_only_the_task_and_the_one_before_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the one before only in the first round of an experience."""
    asked, read = list[int](), Plan.train_indices

    def train_indices(self: Plan, dataset: Any, client: int, task: int) -> Tensor:
        asked.append(task)
        return read(self, dataset, client, task)

    monkeypatch.setattr(Plan, "train_indices", train_indices)
    worker, plan_, _ = refed_worker(cache=5)
    for experiences, expected in (((0,), {0}), ((1,), {0, 1}), ((1, 1), {1}), ((0, 2), {1, 2})):
        *before, last = experiences
        results = sequence(worker, plan_, *before)
        state = results[-1][1] if results else worker.initial_states(0)[1][0]
        message = worker.method.broadcast(worker.initial_states(0)[0], 0)
        asked.clear()
        worker.method.train_client(ClientRound(RoundId(0, 0, last, 1), plan_, state, message))
        assert set(asked) == expected


def test_images_of_tasks_before_missed_ones_are_lost_and_counted() -> None:
    """The cache holds what is offered: the task before, also where it was missed."""
    split_ = {**FEW, "tasks": 4}
    worker, plan_, _ = refed_worker(cache=100, split=split_)
    for experiences, lost, tasks in (
        ((0, 1, 2, 3), 0, {0, 1, 2}),
        ((1, 2, 3), 0, {0, 1, 2}),
        ((0, 1, 3), 1, {0, 2}),
        ((0, 3), 2, {2}),
        ((3,), 2, {2}),
    ):
        results = sequence(worker, plan_, *experiences)
        events = [event for client_round, _ in results for event in client_round.log.events]
        assert events == [LOST] * lost
        assert set(results[-1][1]["cache"]["tasks"].tolist()) == tasks


@pytest.mark.parametrize("cycles", [1, 2])
def test_an_epoch_is_the_task_and_the_cache_each_image_once(
    cycles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shuffled together. In a second cycle the cache has images of the task: none is used twice."""
    worker, plan_, method = refed_worker(
        cache=60, split={**FEW, "cycles": cycles}, training={"epochs": 2}, steps=1
    )
    overlaps = []
    for client_round, state in sequence(worker, plan_, *range(3 * cycles)):
        task, epoch = client_round.task, list[tuple[Tensor, Tensor]]()
        expected = joined(task_samples(worker, plan_, task), without(state["cache"], task))
        overlaps.append(int((state["cache"]["tasks"] == task).sum()))
        batches = list(method.batches(client_round))
        for images, labels in batches[: len(batches) // 2]:
            epoch += zip(images, labels, strict=True)
        assert len(batches[0][1]) == 16 and len(epoch) == len(expected["labels"])
        shown = torch.stack([image for image, _ in epoch])
        normalised = worker.work.normalise(expected["images"])
        nearest = torch.cdist(shown.flatten(1), normalised.flatten(1)).argmin(1)
        assert sorted(nearest.tolist()) == list(range(len(epoch)))
        assert expected["labels"][nearest].tolist() == [int(label) for _, label in epoch]
        if client_round.experience:  # not the one after the other
            mixed = expected["tasks"][nearest][:16].unique()
            assert len(mixed) > 1
    assert (max(overlaps) > 0) == (cycles == 2)


def test_without_images_a_task_is_passed_over_and_the_cache_still_chosen() -> None:
    worker, plan_, _ = refed_worker(cache=5)
    empty = small.with_train(plan_, {(0, 1): ()})
    results = sequence(worker, empty, 0, 1, 2)
    assert [len(state["cache"]["labels"]) for _, state in results] == [0, 5, 5]
    assert results[2][1]["cache"]["tasks"].tolist() == [0] * 5
    reply = worker.method.train_client(results[1][0])
    assert reply.sgd_steps == reply.samples == 0
    assert torch.equal(reply.message["parameters"], results[1][0].message["parameters"])


def test_the_first_task_is_fedavg_bit_for_bit() -> None:
    training = {"momentum": 0.9, "weight_decay": 0.01, "shift": 1}
    record = run(tiny("refed", split={"tasks": 1}, training=training))
    small.assert_same_weights(record, run(tiny(split={"tasks": 1}, training=training)))
    record = run(tiny("refed", split={"tasks": 2}, training=training))
    other = run(tiny(split={"tasks": 2}, training=training))
    assert not np.array_equal(record.weights["head.bias"], other.weights["head.bias"])


# --- bytes


def test_a_client_keeps_the_cache_and_sends_the_model() -> None:
    """ResNet-18: at 32 x 32 pixels an image is 3072 bytes, its label and its task 8 each.

    Three of four images are cached at the second task; nothing at the first.
    """
    work = workspace("local")
    method = ReFed(tiny("refed", cache=3, steps=1, score="head").params, work)
    plan_ = split.make_plan(work.setting.split, work.dataset, seed=0)
    server, (state, *_), *_ = method.initial_states(plan_)
    for experience, disk in ((0, 0), (1, 3 * (3072 + 8 + 8))):
        message = method.broadcast(server, 0)
        reply = method.train_client(
            ClientRound(RoundId(0, 0, experience, 0), plan_, state, message)
        )
        state = reply.state
        assert (tree_bytes(message), tree_bytes(reply.message)) == MODEL
        assert tree_bytes(state) - 4 * B == disk


def test_at_the_end_the_cache_takes_the_bytes_of_replay() -> None:
    """Six classes of five exemplars are 30 images; replay also counts the images of 10 classes."""
    record = run(tiny("refed", split=FEW, cache=30, steps=1))
    other = run(tiny("replay", split=FEW, memory=small.kept(5)))
    assert record.history[-1]["disk"] == 30 * (64 + 8 + 8)
    assert other.history[-1]["disk"] == 30 * (64 + 8 + 8) + 10 * 8
    assert all(row["bytes"] == {"down": 16 * P, "up": 16 * P} for row in record.history)


def test_statistics_of_batch_normalisation_are_kept_beside_the_cache() -> None:
    record = run(
        tiny("refed", split=FEW, network=BATCH_NORM, training={"buffers": "local"}, cache=4)
    )
    assert [row["disk"] for row in record.history[1:3]] == [4 * BN_B, 4 * BN_B + 4 * (64 + 16)]


# --- refused parameters
