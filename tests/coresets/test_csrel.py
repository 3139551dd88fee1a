"""CSReL: its definition in numpy, quotas, batch normalisation, divergence."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rule_tasks import BATCH_NORM, CLASSES, MLP, NETWORKS, generator, indices_of, to_unit
from rule_tasks import csrel_task as make_task
from torch import Tensor

from stamp_core.config.schema import Network
from stamp_core.coresets.selection import base, csrel
from stamp_core.coresets.selection.base import TaskData
from stamp_core.models.networks import build_network, set_train_mode

torch.set_num_threads(1)  # as in training


def proposed(task: TaskData) -> list[int]:
    """The proposal as indices of the task's images."""
    return indices_of(csrel.propose(task), task)


# ------------------------------------------------------------------------------ the definition

Matrix = NDArray[np.float64]


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

    def forward(self, x: Matrix) -> tuple[Matrix, Matrix]:
        h = np.maximum(x @ self.A.T + self.a, 0)
        return h, h @ self.B.T + self.b

    def losses(self, x: Matrix, y: Matrix) -> Matrix:
        _, z = self.forward(x)
        losses: Matrix = np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]
        return losses

    def step(self, x: Matrix, y: Matrix, lr: float) -> None:
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

    if options.reference == "client":
        reference = start(task.learner.client_weights[0])
    else:
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


def next_image(scores: Matrix, y: Matrix, selected: list[int], balanced: bool) -> int:
    """The image with the highest score; if balanced, of the classes with the fewest selected."""
    rest = [i for i in range(len(y)) if i not in selected]
    if balanced:
        counts = {i: sum(y[j] == y[i] for j in selected) for i in rest}
        rest = [i for i in rest if counts[i] == min(counts.values())]
    return max(rest, key=lambda i: scores[i])


VARIANTS: list[dict[str, Any]] = [
    {},
    {"reference": "client"},
    {"balanced": False},
    {"reference": "client", "balanced": False},
    {"reference_epochs": 1, "batch_size": 32},
    {"reference_lr": 0.05},
    {"selection_steps": 1},
    {"selection_steps": 4},
    {"selection_steps": 99},
    {"train_steps": 1},
    {"train_lr": 0.02},
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_images_are_selected_by_the_definition(options: dict[str, Any], seed: int) -> None:
    task = make_task(9, 4, 1, 7, exemplars_per_class=3, seed=seed, **options)
    assert proposed(task) == defined_order(task)


def test_every_option_changes_the_selection() -> None:
    tasks = [make_task(9, 4, 1, 7, exemplars_per_class=3, **options) for options in VARIANTS]
    assert len({tuple(proposed(task)) for task in tasks}) == len(VARIANTS)


def test_six_images_and_a_budget_of_two_step_by_step() -> None:
    """The first has the largest loss of the untrained network over the client's; the second that
    of a network trained on the first. The losses alone would select others."""
    task = make_task(
        6, exemplars_per_class=2, seed=13, reference="client", train_steps=9, selection_steps=2
    )
    x, y = task.images.flatten(1).double().numpy() / 255, task.labels.numpy()
    irreducible = NumpyNetwork(task.learner.client_weights[0], 64, 6).losses(x, y)
    untrained = NumpyNetwork(task.learner.initial_weights[0], 64, 6)
    score = untrained.losses(x, y) - irreducible
    first = int(score.argmax())
    trained = NumpyNetwork(task.learner.initial_weights[0], 64, 6)
    for _ in range(9):
        trained.step(x[[first]], y[[first]], 0.4)
    later = trained.losses(x, y) - irreducible
    rest = [i for i in np.argsort(-later).tolist() if i != first]
    assert proposed(task) == [first, *rest]
    assert first != untrained.losses(x, y).argmax()
    assert rest[0] not in (np.argsort(-score)[1], trained.losses(x, y).argmax())


def test_if_the_reference_is_the_untrained_network_the_first_of_equal_scores_is_selected() -> None:
    """The first in the order of content, in which every rule is given a task."""
    task = make_task(5, 5, reference="client")
    task.learner.client_weights = task.learner.initial_weights
    first = min(image.numpy().tobytes() for image in task.images[:5])
    assert base.propose_exemplars("csrel", task).images[0].numpy().tobytes() == first


@dataclass
class Training:
    """What a learner was trained on, and how."""

    images: Tensor
    labels: Tensor
    batches: list[Tensor] | Tensor  # indices of each batch, or weights of all images in it
    lr: float
    weighted: bool
    initial: bool  # from its initial weights


def trainings(task: TaskData, monkeypatch: pytest.MonkeyPatch) -> list[Training]:
    """The trainings of a task's learner, in a list that fills as they happen."""
    found: list[Training] = []

    def recorded(train: Any, weighted: bool) -> Any:
        def call(images: Tensor, labels: Tensor, batches: Any, lr: float) -> None:
            start = task.learner.initial_weights[0]
            initial = torch.equal(task.learner.model.parameters, start)
            found.append(Training(images, labels, batches, lr, weighted, initial))
            train(images, labels, batches, lr)

        return call

    for name in ("train", "train_weighted"):
        weighted = name == "train_weighted"
        monkeypatch.setattr(task.learner, name, recorded(getattr(task.learner, name), weighted))
    return found


@pytest.mark.parametrize("network", [MLP, BATCH_NORM], ids=lambda n: n.kind)
def test_what_is_trained_from_initial_weights(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of 10 in 4 steps grows by 2: the training sets are 2, 4, 6 and 8 images.

    In batches of 6, whose images are weighted where they are as many as the coreset has or more.
    """
    options: dict[str, Any] = {"exemplars_per_class": 5, "selection_steps": 4, "train_steps": 3}
    task = make_task(12, 9, network=network, batch_size=6, **options)
    found = trainings(task, monkeypatch)
    order = proposed(task)
    reference, *others = found
    assert [each.lr for each in found] == [0.3, *4 * [0.4]] and all(each.initial for each in found)
    assert torch.equal(reference.images, to_unit(task.images))
    assert torch.equal(reference.labels, task.labels) and not reference.weighted
    assert [len(batch) for batch in reference.batches] == 3 * [6, 6, 6, 3]
    for epoch in range(3):
        indices = torch.cat(list(reference.batches[4 * epoch :][:4]))
        assert indices.sort().values.tolist() == list(range(21))
    assert not torch.equal(reference.batches[0], reference.batches[4])
    weighted = [True, True, True, False] if network is MLP else 4 * [False]
    assert [each.weighted for each in others] == weighted
    for size, each in zip((2, 4, 6, 8), others, strict=True):
        assert torch.equal(each.images, to_unit(task.images)[order[:size]])
        assert torch.equal(each.labels, task.labels[order[:size]])
        assert isinstance(each.batches, Tensor)
        assert each.batches.shape == (3, size if each.weighted else 6)


@pytest.mark.parametrize("network", [MLP, NETWORKS["group norm"]], ids=lambda n: n.kind)
def test_weighted_images_are_trained_on_like_the_batches_that_were_drawn(network: Network) -> None:
    """4 images in batches of 10: some are drawn several times, some perhaps not at all."""
    task = make_task(9, 4, network=network, train_steps=6, batch_size=10)
    (images, labels), coreset = task.inputs(), torch.tensor([7, 2, 11, 5])
    csrel._train_from_scratch(images[coreset], labels[coreset], task)
    weighted = task.learner.model.parameters.clone()
    task.learner.load_initial_weights()
    batches = coreset[torch.randint(4, (6, 10), generator=generator())]
    task.learner.train(images, labels, batches, task.options.train_lr)
    torch.testing.assert_close(weighted, task.learner.model.parameters, rtol=0, atol=1e-6)
    assert (weighted - task.learner.initial_weights[0]).abs().max() > 0.01


@pytest.mark.parametrize("network", [MLP, BATCH_NORM], ids=lambda n: n.kind)
def test_batches_are_drawn_uniformly_with_replacement_from_the_coreset(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 4 images has a quarter of 8000 draws, up to 6 deviations of 39."""
    task = make_task(9, 4, network=network, train_steps=200, batch_size=40)
    images, labels = task.inputs()
    found = trainings(task, monkeypatch)
    csrel._train_from_scratch(images[:4], labels[:4], task)
    (training,) = found
    batches = training.batches
    assert isinstance(batches, Tensor) and training.weighted == (network is MLP)
    counts = 40 * batches.sum(0) if training.weighted else batches.flatten().bincount()
    assert counts.sum() == 8000 and (counts - 2000).abs().max() < 6 * 39


def test_the_reference_of_the_client_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(6, 6, reference="client")
    found = trainings(task, monkeypatch)
    proposed(task)
    assert {each.lr for each in found} == {0.4}
    task.learner.load_client_weights()
    expected = task.learner.losses(*task.inputs())
    assert torch.equal(csrel._reference_losses(task), expected)


# ------------------------------------------------------------------------------ quotas


def test_balanced_ranks_proceed_in_rounds_over_the_classes() -> None:
    """Class 0 has two already, so 1 and 2 come first twice; each round is in order of score."""
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    scores = torch.tensor([9.0, 8, 7, 6, 1, 3, 2, 5, 4, -5])
    selected = torch.tensor([2, 0])
    ranks = [csrel._rank(scores, labels, selected, balanced).tolist() for balanced in (True, False)]
    assert ranks == [[7, 5, 8, 6, 1, 4, 9, 3], [1, 3, 7, 8, 5, 6, 4, 9]]


def test_ties_go_to_the_lowest_index() -> None:
    labels = torch.tensor([1, 1, 1, 0, 0, 0])
    none = torch.empty(0, dtype=torch.int64)
    assert csrel._rank(torch.zeros(6), labels, none, False).tolist() == [0, 1, 2, 3, 4, 5]
    assert csrel._rank(torch.zeros(6), labels, none, True).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_the_coreset_has_the_exemplars_of_each_class(steps: int) -> None:
    """Of 9, 2, 1 and 5 images, with a budget of 4: 4, 2, 1 and 4."""
    task = make_task(9, 2, 1, 5, exemplars_per_class=4, selection_steps=steps)
    assert task.labels[proposed(task)[:11]].bincount().tolist() == [4, 2, 1, 4]


def test_unbalanced_ranks_compare_all_classes() -> None:
    """The client's network is certain of class 0, so only its losses are reducible."""
    task = make_task(8, 8, exemplars_per_class=3, balanced=False, reference="client", train_lr=1e-6)
    weights, buffers = task.learner.client_weights
    weights[-CLASSES:] = torch.tensor([50.0, 0, 0, 0])  # the bias of the head
    task.learner.client_weights = weights, buffers
    assert task.labels[proposed(task)].tolist() == 8 * [0] + 8 * [1]
    balanced = replace(task, options=replace(task.options, balanced=True))
    assert task.labels[proposed(balanced)].tolist() == 8 * [0, 1]


def test_labels_need_not_be_consecutive() -> None:
    """Each round has one image of class 1 and one of class 3."""
    task = make_task(4, 4)
    task = replace(task, labels=torch.where(task.labels == 0, 1, 3))
    rounds = task.labels[proposed(task)].reshape(4, 2)
    assert rounds.sort(1).values.tolist() == 4 * [[1, 3]]


# ------------------------------------------------------------------------------ batch normalisation


def scores_by_autograd(task: TaskData, coresets: list[list[int]]) -> list[Tensor]:
    """Scores of an untrained network and after training on each coreset."""
    draws, options = generator(task.generator.initial_seed()), task.options
    inputs, irreducible = to_unit(task.images), csrel._reference_losses(task)
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


def test_batch_normalisation_on_coresets_of_one_and_two_images() -> None:
    """A single image has no variance; scores are computed in evaluation mode."""
    task = make_task(
        7, exemplars_per_class=3, network=BATCH_NORM, reference="client", train_steps=6
    )
    found = proposed(task)
    one, two, three = scores_by_autograd(task, [found[:1], found[:2]])
    assert found[0] == int(one.argmax())
    two[found[:1]] = three[found[:2]] = -torch.inf
    assert found[1] == int(two.argmax())
    assert found[2:] == three.argsort(descending=True)[:5].tolist()


def test_a_single_image_does_not_update_running_statistics() -> None:
    task = make_task(7, network=BATCH_NORM)
    images, labels = task.inputs()
    for coreset, stays in (([3], True), ([3, 4], False)):
        csrel._train_from_scratch(images[coreset], labels[coreset], task)
        assert torch.equal(task.learner.model.buffers, task.learner.initial_weights[1]) == stays
        assert not torch.equal(task.learner.model.parameters, task.learner.initial_weights[0])


def test_a_single_image_is_trained_on_like_its_copies() -> None:
    """The mean of equal gradients is the gradient."""
    task = make_task(7, train_steps=5, batch_size=8)
    images, labels = task.inputs()
    csrel._train_from_scratch(images[[3]], labels[[3]], task)
    alone = task.learner.model.parameters.clone()
    task.learner.load_initial_weights()
    task.learner.train(images, labels, 5 * [torch.full((8,), 3)], task.options.train_lr)
    torch.testing.assert_close(alone, task.learner.model.parameters, rtol=0, atol=1e-6)
    assert (alone - task.learner.initial_weights[0]).abs().max() > 0.01


# ------------------------------------------------------------------------------ divergence


def test_images_without_a_finite_score_come_last_of_their_class() -> None:
    """Two images have white pixels, whose input is infinite; this is recorded once."""

    def without_white(images: Tensor) -> Tensor:
        return to_unit(images).masked_fill(images == 255, torch.inf)

    options = {"reference": "client", "normalise": without_white, "selection_steps": 4}
    task = make_task(6, 6, exemplars_per_class=4, **options)
    task.images[2, 0, :4] = task.images[9, 0, :3] = 255
    order = proposed(task)
    assert sorted(order) == list(range(12)) and set(order[-2:]) == {2, 9}
    assert task.events == [csrel.NOT_FINITE]
    finite = [i for i in range(12) if i not in (2, 9)]
    fine = make_task(6, 6, exemplars_per_class=4, **options)
    fine = replace(fine, images=task.images[finite], labels=task.labels[finite])
    alone = [finite[i] for i in proposed(fine)]
    assert order[:2] == alone[:2] and not fine.events


@pytest.mark.parametrize(
    "options",
    [
        {"reference_lr": 1e30},
        {"train_lr": 1e30, "train_steps": 9},
        {"train_lr": 1e30, "train_steps": 9, "reference": "client", "balanced": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NETWORKS)
def test_divergence_is_recorded_and_the_proposal_complete(
    name: str, options: dict[str, Any]
) -> None:
    task = make_task(7, 5, exemplars_per_class=4, network=NETWORKS[name], **options)
    assert sorted(proposed(task)) == list(range(12))
    assert task.events == [csrel.NOT_FINITE]


def test_scores_that_are_not_finite_become_the_lowest() -> None:
    task = make_task(6)
    scores = torch.tensor([3.0, torch.nan, -3e38, torch.inf, -torch.inf, 0.0])
    usable = csrel._finite_scores(scores, task)
    assert torch.equal(usable[[0, 2, 5]].float(), scores[[0, 2, 5]])
    assert usable.isfinite().all() and usable[[1, 3, 4]].max() < scores[2]
    assert scores.isnan().sum() == 1, "the scores were changed in place"
