"""CSReL: its definition in numpy, quotas, batch normalisation, divergence."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rule_tasks import BATCH_NORM, CLASSES, MLP, NETWORKS, Array, generator, indices_of, to_unit
from rule_tasks import csrel_task as make_task
from torch import Tensor

from stamp_core.coresets.selection.base import TaskData
from stamp_core.models.networks import build_network, set_train_mode
from workbench.selection import csrel

torch.set_num_threads(1)  # as in training


def proposed(task: TaskData) -> list[int]:
    return indices_of(csrel.propose(task), task)


class NumpyNetwork:
    """A network with one hidden layer in numpy, with its gradients by hand.

    With h = relu(A x + a) and z = B h + b, an image's loss is log sum exp z - z_y. Its gradient by
    z is e = softmax z - onehot y; by B, e h'; by h, B'e; by A, (B'e where h > 0) x'.
    """

    def __init__(self, weights: Tensor, inputs: int, features: int) -> None:
        flat, sizes = weights.double().numpy(), (features * inputs, features, CLASSES * features)
        A, a, B, b = np.split(flat.copy(), np.cumsum(sizes))
        self.A, self.a = A.reshape(features, inputs), a
        self.B, self.b = B.reshape(CLASSES, features), b

    def forward(self, x: Array) -> tuple[Array, Array]:
        h = np.maximum(x @ self.A.T + self.a, 0)
        return h, h @ self.B.T + self.b

    def losses(self, x: Array, y: Array) -> Array:
        _, z = self.forward(x)
        losses: Array = np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]
        return losses

    def step(self, x: Array, y: Array, lr: float) -> None:
        h, z = self.forward(x)
        e = np.exp(z) / np.exp(z).sum(1, keepdims=True) - np.eye(CLASSES)[y]
        back = (e @ self.B) * (h > 0)
        for weights, gradient in (
            (self.A, back.T @ x),
            (self.a, back.sum(0)),
            (self.B, e.T @ h),
            (self.b, e.sum(0)),
        ):
            weights -= lr * gradient / len(y)


def defined_order(task: TaskData) -> list[int]:
    """The whole selection in numpy, one image at a time, with torch's draws.

    Batches of a coreset of one image hold copies of it, as published.
    """
    options, draws = task.options, generator(task.generator.initial_seed())
    x = task.images.flatten(1).double().numpy() / 255
    y, n = task.labels.numpy(), len(task.labels)

    def start(weights: Tensor) -> NumpyNetwork:
        return NumpyNetwork(weights, x.shape[1], MLP.features)

    reference = start(task.learner.initial_weights[0])
    orders = [torch.randperm(n, generator=draws) for _ in range(options.reference_epochs)]
    for order in orders:
        for at in range(0, n, options.batch_size):
            batch = order[at : at + options.batch_size].numpy()
            reference.step(x[batch], y[batch], options.reference_lr)
    irreducible = reference.losses(x, y)
    total = sum(min(task.exemplars_per_class, int((y == c).sum())) for c in set(y.tolist()))
    share = max(total // options.selection_steps, 1)
    selector, selected = start(task.learner.initial_weights[0]), []
    while True:
        scores = selector.losses(x, y) - irreducible
        for _ in range(share if len(selected) + share < total else n - len(selected)):
            selected.append(next_image(scores, y, selected, options.balanced))
        if len(selected) == n:
            return selected
        selector = start(task.learner.initial_weights[0])
        width = 1 if len(selected) == 1 else options.batch_size
        drawn = torch.randint(len(selected), (options.train_steps, width), generator=draws).numpy()
        for draw in drawn:
            batch = np.array(selected)[np.resize(draw, options.batch_size)]
            selector.step(x[batch], y[batch], options.train_lr)


def next_image(scores: Array, y: Array, selected: list[int], balanced: bool) -> int:
    """The image with the highest score; if balanced, of the classes with the fewest selected."""
    rest = [i for i in range(len(y)) if i not in selected]
    if balanced:
        counts = {i: sum(y[j] == y[i] for j in selected) for i in rest}
        rest = [i for i in rest if counts[i] == min(counts.values())]
    return max(rest, key=lambda i: scores[i])


VARIANTS: list[dict[str, Any]] = [
    {},
    {"balanced": False},
    {"reference_epochs": 1, "batch_size": 32},
    {"selection_steps": 1},
    {"selection_steps": 4},
    {"selection_steps": 99},
    {"train_steps": 1},
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_images_are_selected_by_the_definition(options, seed):
    task = make_task(9, 4, 1, 7, exemplars_per_class=3, seed=seed, **options)
    assert proposed(task) == defined_order(task)


def test_ties_go_to_the_lowest_index():
    labels = torch.tensor([1, 1, 1, 0, 0, 0])
    none = torch.empty(0, dtype=torch.int64)
    assert csrel._rank(torch.zeros(6), labels, none, False).tolist() == [0, 1, 2, 3, 4, 5]
    assert csrel._rank(torch.zeros(6), labels, none, True).tolist() == [0, 3, 1, 4, 2, 5]


def scores_by_autograd(task: TaskData, coresets: list[list[int]]) -> list[Tensor]:
    draws, options = generator(task.generator.initial_seed()), task.options
    inputs = to_unit(task.images)
    irreducible = csrel._reference_losses(replace(task, generator=draws))
    scores = []
    for coreset in ([], *coresets):
        net = build_network(BATCH_NORM, (1, 8, 8), CLASSES, seed=0)
        steps = options.train_steps if coreset else 0
        size = (steps, options.batch_size if len(coreset) > 1 else 1)
        for draw in torch.randint(max(len(coreset), 1), size, generator=draws):
            batch = torch.tensor(coreset)[draw]
            set_train_mode(net, len(coreset) > 1)
            loss = F.cross_entropy(net(inputs[batch]), task.labels[batch])
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for weights, gradient in zip(net.parameters(), gradients, strict=True):
                    weights -= options.train_lr * gradient
        with torch.no_grad():
            logits = net.eval()(inputs)
        losses = F.cross_entropy(logits, task.labels, reduction="none")
        scores.append(losses - irreducible)
    return scores


def test_batch_normalisation_on_coresets_of_one_and_two_images():
    """A single image has no variance; scores are computed in evaluation mode."""
    task = make_task(7, exemplars_per_class=3, network=BATCH_NORM, train_steps=6)
    found = proposed(task)
    one, two, three = scores_by_autograd(task, [found[:1], found[:2]])
    assert found[0] == int(one.argmax())
    two[found[:1]] = three[found[:2]] = -torch.inf
    assert found[1] == int(two.argmax())
    assert found[2:] == three.argsort(descending=True)[:5].tolist()


def test_scores_that_are_not_finite_become_the_lowest():
    """Below every float32 score, and recorded once."""
    task = make_task(6)
    scores = torch.tensor([3.0, torch.nan, -3e38, torch.inf, -torch.inf, 0.0])
    for _ in range(2):
        usable = csrel._finite_scores(scores, task)
        assert torch.equal(usable[[0, 2, 5]].float(), scores[[0, 2, 5]])
        assert usable.isfinite().all() and usable[[1, 3, 4]].max() < scores[2]
    assert task.events == [csrel.NOT_FINITE]


@pytest.mark.parametrize(
    "options",
    [
        {"reference_lr": 1e30},
        {"train_lr": 1e30, "train_steps": 9},
        {"train_lr": 1e30, "train_steps": 9, "balanced": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NETWORKS)
def test_divergence_is_recorded_and_the_proposal_complete(name, options):
    task = make_task(7, 5, exemplars_per_class=4, network=NETWORKS[name], **options)
    assert sorted(proposed(task)) == list(range(12))
    assert task.events == [csrel.NOT_FINITE]
