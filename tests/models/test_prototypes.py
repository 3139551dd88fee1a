"""The prototypical loss: its formula, support and queries, its gradients, and it in training."""

import math
from typing import Any

import pytest
import small
import torch
import torch.nn.functional as F
from small import kept, network, normalised, plan, slope, tiny
from torch import Tensor

from stamp_core.core.seeding import generator
from stamp_core.models.prototypes import prototype_loss

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


def drawn(labels: list[int], dimensions: int = 3, seed: int = 0) -> Tensor:
    """Random features in float64."""
    draw = generator("features", seed)
    return torch.randn(len(labels), dimensions, generator=draw, dtype=torch.float64)


def by_hand(features: Tensor, labels: list[int]) -> float:
    """The mean of -log softmax(-|z - p|^2) over the queries, in loops."""
    vectors, prototypes, queries = features.tolist(), {}, []
    for label in set(labels):
        own = [vector for vector, each in zip(vectors, labels, strict=True) if each == label]
        half = math.ceil(len(own) / 2)
        if len(own) > 1:
            prototypes[label] = [sum(column) / half for column in zip(*own[:half], strict=True)]
            queries += [(label, vector) for vector in own[half:]]
    losses = []
    for label, z in queries:
        distances = {
            each: sum((a - b) ** 2 for a, b in zip(z, p, strict=True))
            for each, p in prototypes.items()
        }
        losses.append(distances[label] + math.log(sum(math.exp(-d) for d in distances.values())))
    return sum(losses) / len(losses) if losses else 0.0


def test_five_images_by_hand() -> None:
    """p_0 = (0, 0) and p_1 = ((0, 1) + (0, 3)) / 2 = (0, 2): 2 of 3 images are support.

    The query (2, 0) of class 0 has distances 4 and 8: log(1 + e^-4); the query (1, 1) of class 1
    has distances 2 and 2: log 2.
    """
    features = torch.tensor([[0.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    labels = torch.tensor([7, 3, 7, 3, 3])
    expected = (math.log(1 + math.exp(-4)) + math.log(2)) / 2
    assert float(prototype_loss(features, labels)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 0, 1],
        [4, 4, 4, 9, 9, 9, 9, 9, 1, 1],
        [2, 0, 2, 1, 0, 1, 2, 2, 0, 5],  # 5 has one image
        [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9],
    ],
    ids=str,
)
def test_the_loss_is_its_formula(labels: list[int]) -> None:
    for seed in range(5):
        features = drawn(labels, seed=seed)
        loss = float(prototype_loss(features, torch.tensor(labels)))
        assert loss == pytest.approx(by_hand(features, labels), rel=1e-12)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_the_first_half_of_a_class_rounded_up_is_its_support(count: int) -> None:
    """The gradient shows which images those are: equal for all of the support, which enters by its
    mean, and another for each query."""
    labels = torch.tensor([0] * count + [1, 1])
    features = drawn(labels.tolist()).requires_grad_()
    (gradient,) = torch.autograd.grad(prototype_loss(features, labels), features)
    half = math.ceil(count / 2)
    torch.testing.assert_close(gradient[:half], gradient[:1].expand(half, -1))
    assert not any(torch.allclose(gradient[0], gradient[k]) for k in range(half, count))


def test_a_common_shift_of_all_features_changes_nothing() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    features = drawn(labels.tolist())
    shifted = features + torch.tensor([5.0, -3.0, 100.0], dtype=torch.float64)
    loss = float(prototype_loss(features, labels))
    assert float(prototype_loss(shifted, labels)) == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2], [5], [4, 4, 1, 2]], ids=str)
def test_with_less_than_two_usable_classes_the_loss_is_zero(labels: list[int]) -> None:
    """Its gradient is zeros, not None."""
    features = drawn(labels).requires_grad_()
    loss = prototype_loss(features, torch.tensor(labels))
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss.item() == 0 and not gradient.any()


def test_a_class_with_one_image_is_ignored() -> None:
    """It is neither a query nor a prototype."""
    labels = torch.tensor([0, 3, 0, 1, 1, 8])
    features = drawn(labels.tolist()).requires_grad_()
    alone = (labels == 3) | (labels == 8)
    loss = prototype_loss(features, labels)
    without = prototype_loss(features[~alone], labels[~alone])
    assert loss.item() == pytest.approx(without.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, features)
    assert not gradient[alone].any() and gradient[~alone].any(1).all()


@pytest.mark.parametrize("labels", [[0, 1, 0, 1], [2, 2, 0, 0, 0, 7, 2, 4, 4, 4, 4]], ids=str)
def test_gradients_are_those_of_finite_differences(labels: list[int]) -> None:
    features = drawn(labels).requires_grad_()
    assert torch.autograd.gradcheck(prototype_loss, (features, torch.tensor(labels)))


def test_large_distances_do_not_overflow() -> None:
    """Squared distances of 1e10 and more: exponentials without a shift would give 0 / 0."""
    labels = torch.tensor([0, 0, 1, 1])
    features = (drawn(labels.tolist()) * 1e5).float().requires_grad_()
    loss = prototype_loss(features, labels)
    (gradient,) = torch.autograd.grad(loss, features)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


# --- in training


def trained(**options: Any) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
    """A client round: the experiment, the parameters before and after, and images with labels."""
    training = options.pop("training", {})
    experiment = tiny("stamp", memory=kept(0), training=training, **options)
    worker = small.worker(experiment, plan(experiment))
    client_round = small.arrived(worker, plan(experiment), 0)
    after = worker.method.train_client(client_round).message["parameters"]
    dataset, indices = experiment.dataset(), client_round.indices
    x, y = normalised(experiment, dataset.x_train[indices]), dataset.y_train[indices]
    return experiment, client_round.message["parameters"], after, x, y


ONE_STEP = {"batch_size": 1000, "lr": 0.01}
HEAD = 32 * 10 + 10


def in_order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The images in the order of the first epoch, which decides about the support."""
    order = torch.randperm(len(y), generator=generator(0, 0, 0, 0, "order"))
    return x[order], y[order]


def test_the_loss_of_a_step_is_cross_entropy_and_the_weighted_prototypical_one() -> None:
    experiment, before, after, x, y = trained(training=ONE_STEP, prototype=0.3)
    x, y = in_order(x, y)
    net = network(experiment, before)
    features = net.encoder(x)
    loss = F.cross_entropy(net.head(features), y) + 0.3 * prototype_loss(features, y)
    torch.testing.assert_close(after, before - 0.01 * slope(net, loss), **CLOSE)


def test_alternating_trains_the_encoder_on_prototypes_and_then_the_head() -> None:
    """The head gets no prototypical gradient, the encoder none of cross-entropy, and the head is
    trained on the features of the new encoder."""
    experiment, before, after, x, y = trained(training=ONE_STEP, prototype=0.3, alternate=True)
    x, y = in_order(x, y)
    net = network(experiment, before)
    parts = list(net.encoder.parameters())
    slopes = torch.autograd.grad(0.3 * prototype_loss(net.encoder(x), y), parts)
    with torch.no_grad():
        for part, each in zip(parts, slopes, strict=True):
            part -= 0.01 * each
    encoder = torch.nn.utils.parameters_to_vector(parts).detach()
    torch.testing.assert_close(after[:-HEAD], encoder, **CLOSE)
    loss = F.cross_entropy(net.head(net.encoder(x).detach()), y)
    head = torch.autograd.grad(loss, list(net.head.parameters()))
    expected = before[-HEAD:] - 0.01 * torch.cat([each.flatten() for each in head])
    torch.testing.assert_close(after[-HEAD:], expected, **CLOSE)
    old = network(experiment, before)
    stale = torch.autograd.grad(F.cross_entropy(old(x), y), list(old.head.parameters()))
    stale_head = before[-HEAD:] - 0.01 * torch.cat([each.flatten() for each in stale])
    assert float((stale_head - after[-HEAD:]).abs().max()) > 1e-5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_alternating_uses_two_optimisers(momentum: float) -> None:
    """As torch would, batch by batch."""
    training = {"momentum": momentum, "batch_size": 50, "epochs": 2, "lr": 0.02}
    experiment, before, after, x, y = trained(training=training, prototype=0.1, alternate=True)
    net = network(experiment, before)
    options = {"lr": 0.02, "momentum": momentum}
    encoder = torch.optim.SGD(net.encoder.parameters(), **options)
    head = torch.optim.SGD(net.head.parameters(), **options)
    draw = generator(0, 0, 0, 0, "order")
    for _ in range(2):
        for batch in torch.randperm(len(y), generator=draw).split(50):
            for sgd in (encoder, head):
                sgd.zero_grad()
            (0.1 * prototype_loss(net.encoder(x[batch]), y[batch])).backward()
            encoder.step()
            F.cross_entropy(net.head(net.encoder(x[batch]).detach()), y[batch]).backward()
            head.step()
    expected = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)
