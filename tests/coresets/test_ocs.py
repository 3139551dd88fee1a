"""OCS scores images by its definition and proposes the best of each batch first."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rule_tasks import BATCH_NORM, MLP, OCS, Array, generator, indices_of, normal
from rule_tasks import ocs_task as make_task
from torch import Tensor

from stamp_core.coresets.selection.base import TaskData
from workbench.selection import ocs
from workbench.selection.ocs import Options

SHORTAGE = "ocs: a class had too few candidates"
NOT_FINITE = "ocs: a gradient was not finite"
PAST_NOT_FINITE = "ocs: the gradient of the past was not finite"


def stream_of(task: TaskData, seed: int = 0) -> Tensor:
    return torch.randperm(len(task.labels), generator=generator(seed))


def scores_of(task: TaskData) -> Array:
    return ocs._stream_scores(task, stream_of(task)).double().numpy()


def proposed(task: TaskData) -> list[int]:
    return indices_of(ocs.propose(task), task)


def gradients_of(task: TaskData, images: Tensor, labels: Tensor) -> Array:
    network, gradients = task.learner.network.eval(), []
    parameters = list(network.parameters())[-2 if task.options.gradients == "head" else 0 :]
    for image, label in zip(task.learner.normalise(images), labels, strict=True):
        loss = F.cross_entropy(network(image[None]), label[None])
        parts = torch.autograd.grad(loss, parameters)
        gradients.append(torch.cat([part.flatten() for part in parts]).double().numpy())
    return np.array(gradients)


def cosine(one: Array, other: Array) -> float:
    size = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / size) if size else 0.0


def defined_scores(task: TaskData, order: Tensor) -> Array:
    """Cosine with the batch's mean - the mean cosine + tau times that with the past's mean."""
    gradients = gradients_of(task, task.images[order], task.labels[order])
    past = gradients_of(task, *task.past).mean(0) if len(task.past[1]) else 0 * gradients[0]
    options, scores = task.options, []
    for start in range(0, len(gradients), options.batch_size):
        batch = gradients[start : start + options.batch_size]
        for g in batch:
            score = cosine(g, batch.mean(0)) - np.mean([cosine(g, h) for h in batch])
            scores.append(score + options.tau * cosine(g, past))
    return np.array(scores)


def defined_order(task: TaskData, seed: int = 0) -> tuple[list[int], list[int]]:
    """The candidates of all batches by their score, then the others by theirs."""
    order, options = stream_of(task, seed), task.options
    scores = dict(zip(order.tolist(), defined_scores(task, order), strict=True))
    candidates: list[int] = []
    for batch in order.split(options.batch_size):
        best = sorted(batch.tolist(), key=lambda n: -scores[n])
        candidates += best[: options.batch_candidates]
    ranked = sorted(scores, key=lambda n: -scores[n])
    return [n for n in ranked if n in candidates], [n for n in ranked if n not in candidates]


@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("network", [MLP, BATCH_NORM], ids=lambda n: n.kind)
@pytest.mark.parametrize("gradients", ["all", "head"])
def test_a_score_is_what_its_definition_says(gradients, network, past):
    """The scores of the other gradients differ by more than rounding."""
    task = make_task(network=network, past=past, gradients=gradients)
    expected = defined_scores(task, stream_of(task))
    np.testing.assert_allclose(scores_of(task), expected, rtol=0, atol=1e-5)
    other = {"all": "head", "head": "all"}[gradients]
    scores = scores_of(make_task(network=network, past=past, gradients=other))
    assert abs(scores - expected).max() > 1e-2


def test_scores_by_hand():
    """Gradients (3, 0), (0, 1), (1, 0) and 0 add up to (4, 1); the past's is (0, 5).

    The cosine of 0 with everything is 0, but counts in means. The second batch has one finite
    gradient, (-1, 0).
    """
    low, nan, infinite = -torch.inf, [torch.nan, 0], [-torch.inf, 1]
    right = torch.tensor([[3.0, 0], [0, 1], [1, 0], [0, 0], nan, [-1, 0], infinite])
    options = Options(batch_size=4, batch_candidates=1, tau=10.0)
    far, near = 4 / 17**0.5 - 2 / 4, 1 / 17**0.5 - 1 / 4
    for past, bonus in ((None, 0), (torch.tensor([[0.0, 1.0]]), 10)):
        scores = ocs._batch_scores(torch.ones(7, 1), right.clone(), past, options)
        np.testing.assert_allclose(scores, [far, bonus + near, far, 0, low, 0, low], atol=1e-6)


@pytest.mark.parametrize("scale", [1e-33, 1e-25, 1e25, 1e33])
def test_the_length_of_gradients_does_not_matter(scale):
    """Although their squares, and products of the factors, under- or overflow in float32."""
    left, right, past = normal(9, 3).abs() + 1, normal(9, 6, seed=1), normal(3, 6, seed=2)
    past, options = past / past.norm(), Options(**OCS)
    expected = ocs._batch_scores(left.clone(), right.clone(), past, options)
    for one, other in ((scale, 1), (1, scale), (scale, scale)):
        scores = ocs._batch_scores(one * left, other * right, past, options)
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("gradients", ["all", "head"])
def test_memory_limits_do_not_change_scores(gradients, monkeypatch):
    """Gradients are computed in multiples of a batch, those of past exemplars in parts."""
    task = make_task(gradients=gradients)
    expected = scores_of(task)
    monkeypatch.setattr(ocs, "PAST_BATCH", 3)
    for limit in (1, 2 * 5 * len(task.learner.model.parameters)):
        monkeypatch.setattr(ocs, "MAX_NUMBERS", limit)
        np.testing.assert_allclose(scores_of(task), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"tau": 0.0}, {"batch_size": 13, "batch_candidates": 13}])
@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("gradients", ["all", "head"])
@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_each_batch_come_first(gradients, past, seed, options):
    task = make_task(past=past, seed=seed, gradients=gradients, **options)
    candidates, others = defined_order(task, seed)
    assert proposed(task) == candidates + others
    first = task.labels[candidates].bincount(minlength=3)
    assert task.events == [SHORTAGE] * bool((first < 2).any())


@pytest.mark.parametrize("gradients", ["all", "head"])
def test_an_image_without_a_finite_gradient_comes_last_and_changes_nothing(gradients):
    task = make_task(batch_size=13, batch_candidates=13, gradients=gradients)
    task.images[4] = 255
    order, others = proposed(task), torch.arange(13) != 4
    rest = replace(task, images=task.images[others], labels=task.labels[others], events=[])
    expected = proposed(replace(rest, generator=generator(5)))
    assert order == [n + (n >= 4) for n in expected] + [4]
    assert task.events == [NOT_FINITE] and rest.events == []


@pytest.mark.parametrize("gradients", ["all", "head"])
def test_a_past_without_a_finite_gradient_is_ignored(gradients):
    task, alone = make_task(gradients=gradients), make_task(past=0, gradients=gradients)
    task.past[0][2] = 255
    assert proposed(task) == proposed(alone)
    assert task.events == [PAST_NOT_FINITE, *alone.events] and PAST_NOT_FINITE not in alone.events
