"""The prototypical loss: its formula written out, who takes part in it, and its gradients."""

import math
from typing import Any

import pytest
import small
import torch
import torch.nn.functional as F
from small import kept, network, normalised, plan, slope, tiny
from torch import Tensor

from stamp_core.prototypes import prototype_loss
from stamp_core.seeding import generator

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


def drawn(labels: list[int], dimensions: int = 3, seed: int = 0) -> Tensor:
    """Random features in float64."""
    draw = generator("features", seed)
    return torch.randn(len(labels), dimensions, generator=draw, dtype=torch.float64)


def by_hand(features: Tensor, labels: list[int]) -> float:
    """The mean of -log softmax(-|z - p|^2), loop by loop."""
    rows, prototypes, queries = features.tolist(), {}, []
    for label in set(labels):
        own = [row for row, each in zip(rows, labels, strict=True) if each == label]
        half = math.ceil(len(own) / 2)
        if len(own) > 1:
            prototypes[label] = [sum(column) / half for column in zip(*own[:half], strict=True)]
            queries += [(label, row) for row in own[half:]]
    losses = []
    for label, row in queries:
        away = {
            each: sum((a - b) ** 2 for a, b in zip(row, p, strict=True))
            for each, p in prototypes.items()
        }
        losses.append(away[label] + math.log(sum(math.exp(-d) for d in away.values())))
    return sum(losses) / len(losses) if losses else 0.0


def test_five_pictures_on_paper() -> None:
    """p_0 = (0, 0) and p_1 = ((0, 1) + (0, 3)) / 2 = (0, 2): of 3 pictures 2 are support.

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
        [2, 0, 2, 1, 0, 1, 2, 2, 0, 5],  # 5 is alone
        [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9],
    ],
    ids=str,
)
def test_the_loss_is_its_formula(labels: list[int]) -> None:
    for seed in range(5):
        features = drawn(labels, seed=seed)
        found = float(prototype_loss(features, torch.tensor(labels)))
        assert found == pytest.approx(by_hand(features, labels), rel=1e-12)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_the_first_half_of_a_class_rounded_up_is_its_support(count: int) -> None:
    """Which pictures those are shows in the gradient: all of a support push alike, as they enter
    by their mean, and a query of its own accord."""
    labels = torch.tensor([0] * count + [1, 1])
    features = drawn(labels.tolist()).requires_grad_()
    (found,) = torch.autograd.grad(prototype_loss(features, labels), features)
    half = math.ceil(count / 2)
    torch.testing.assert_close(found[:half], found[:1].expand(half, -1))
    assert not any(torch.allclose(found[0], found[k]) for k in range(half, count))


def test_a_common_shift_of_all_features_changes_nothing() -> None:
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    features = drawn(labels.tolist())
    there = features + torch.tensor([5.0, -3.0, 100.0], dtype=torch.float64)
    found, moved = prototype_loss(features, labels), prototype_loss(there, labels)
    assert float(moved) == pytest.approx(float(found), rel=1e-10)


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2], [5], [4, 4, 1, 2]], ids=str)
def test_where_there_is_nothing_to_tell_apart_the_loss_is_zero(labels: list[int]) -> None:
    """One class that takes part, or none: no loss and a gradient of zeros, not none at all."""
    features = drawn(labels).requires_grad_()
    loss = prototype_loss(features, torch.tensor(labels))
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss.item() == 0 and not gradient.any()


def test_a_class_with_one_picture_takes_no_part() -> None:
    """Neither as a query nor as a prototype that others could be near to."""
    labels = torch.tensor([0, 3, 0, 1, 1, 8])
    features = drawn(labels.tolist()).requires_grad_()
    alone = (labels == 3) | (labels == 8)
    loss = prototype_loss(features, labels)
    without = prototype_loss(features[~alone], labels[~alone])
    assert loss.item() == pytest.approx(without.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, features)
    assert not gradient[alone].any() and gradient[~alone].any(1).all()


@pytest.mark.parametrize("labels", [[0, 1, 0, 1], [2, 2, 0, 0, 0, 7, 2, 4, 4, 4, 4]], ids=str)
def test_gradients_are_right(labels: list[int]) -> None:
    features = drawn(labels).requires_grad_()
    assert torch.autograd.gradcheck(prototype_loss, (features, torch.tensor(labels)))


def test_far_away_features_overflow_nothing() -> None:
    """Squared distances of 1e10 and more: a softmax that took their exponentials would be 0 / 0."""
    labels = torch.tensor([0, 0, 1, 1])
    features = (drawn(labels.tolist()) * 1e5).float().requires_grad_()
    loss = prototype_loss(features, labels)
    (gradient,) = torch.autograd.grad(loss, features)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


# ------------------------------------------------------------------ in training


def trained(**options: Any) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
    """One visit: the cell, the parameters before and after, and the pictures with their labels."""
    training = options.pop("training", {})
    cell = tiny("stamp", memory=kept(0), training=training, **options)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 0)
    after = here.method.local(turn).message["parameters"]
    images = cell.images()
    x, y = normalised(cell, images.x_train[turn.indices]), images.y_train[turn.indices]
    return cell, turn.message["parameters"], after, x, y


ONE_STEP = {"batch": 1000, "rate": 0.01}
HEAD = 32 * 10 + 10


def in_order(cell: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures in the order of the first epoch, which decides who is support."""
    order = torch.randperm(len(y), generator=generator(0, 0, 0, 0, "order"))
    return x[order], y[order]


def test_the_loss_of_a_step_is_cross_entropy_and_the_weighted_prototypical_one() -> None:
    cell, before, after, x, y = trained(training=ONE_STEP, prototype=0.3)
    x, y = in_order(cell, x, y)
    net = network(cell, before)
    features = net.encoder(x)
    loss = F.cross_entropy(net.head(features), y) + 0.3 * prototype_loss(features, y)
    torch.testing.assert_close(after, before - 0.01 * slope(net, loss), **CLOSE)


def test_in_turn_the_encoder_follows_prototypes_and_then_the_head_cross_entropy() -> None:
    """The head gets no prototypical gradient, the encoder none of cross-entropy, and the head sees
    what the encoder has become."""
    cell, before, after, x, y = trained(training=ONE_STEP, prototype=0.3, alternate=True)
    x, y = in_order(cell, x, y)
    net = network(cell, before)
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
    old = network(cell, before)
    stale = torch.autograd.grad(F.cross_entropy(old(x), y), list(old.head.parameters()))
    stale_head = before[-HEAD:] - 0.01 * torch.cat([each.flatten() for each in stale])
    assert float((stale_head - after[-HEAD:]).abs().max()) > 1e-5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_in_turn_each_half_has_an_optimiser_of_its_own(momentum: float) -> None:
    """As two optimisers of torch would, batch by batch."""
    training = {"momentum": momentum, "batch": 50, "epochs": 2, "rate": 0.02}
    cell, before, after, x, y = trained(training=training, prototype=0.1, alternate=True)
    net = network(cell, before)
    options = {"lr": 0.02, "momentum": momentum}
    encoder = torch.optim.SGD(net.encoder.parameters(), **options)
    head = torch.optim.SGD(net.head.parameters(), **options)
    draw = generator(0, 0, 0, 0, "order")
    for _ in range(2):
        for batch in torch.randperm(len(y), generator=draw).split(50):
            for descent in (encoder, head):
                descent.zero_grad()
            (0.1 * prototype_loss(net.encoder(x[batch]), y[batch])).backward()
            encoder.step()
            F.cross_entropy(net.head(net.encoder(x[batch]).detach()), y[batch]).backward()
            head.step()
    found = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.testing.assert_close(after, found, rtol=0, atol=1e-5)
