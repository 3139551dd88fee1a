"""Meta-networks, mixed normalisation, batches, clipped gradients, the Neumann series."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, plan, tiny
from stamp_core.client.augmentation import augment
from stamp_core.client.personalisation import (
    LayerStatistics,
    MetaNets,
    clipped_gradient,
    endless_batches,
    epoch_batches,
    layer_statistics,
    loss_at,
    mixed_normalisation,
    neumann_series,
    plain_batches,
    running_statistics,
    store_mixture,
)
from stamp_core.client.workspace import RoundId, Workspace
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from stamp_core.config.schema import Network
from stamp_core.core.seeding import generator
from stamp_core.models import networks as models

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}
ROUND = RoundId(0, 1, 2, 3)


def workspace(network: dict[str, Any] = BATCH_NORM, **training: Any) -> Workspace:
    """A workspace of the digits with random running statistics."""
    experiment = tiny("fedl2p", network=network, training=training)
    work = small.worker(experiment, plan(experiment)).work
    draw = generator("gathered")
    for norm in work.classifier.norms:
        norm.running_mean.copy_(torch.randn(4, generator=draw))
        norm.running_var.copy_(torch.rand(4, generator=draw) + 0.5)
    return work


def images(work: Workspace, count: int = 40) -> tuple[Tensor, Tensor]:
    """The first images and their labels."""
    return work.normalise(work.x_train[:count]), work.y_train[:count]


# --- meta-networks


def test_meta_of_resnet18_has_38944_numbers() -> None:
    """BNNet 20 x 100 + 100 + 100 x 100 + 100 + 100 x 20 + 20 = 14,220; LRNet 82 x 100 + 100 +
    10,100 + 100 x 62 + 62 = 24,662; 62 learning rates: 155,776 bytes for all widths."""
    net = models.build_network(Network("resnet18", norm="batch"), (3, 32, 32), 100, seed=0)
    nets = MetaNets(net, sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()))
    meta = nets.initial(0, 0.001)
    assert (meta.numel(), meta.numel() * meta.element_size()) == (38_944, 155_776)
    assert (nets.bn_size, sum(nets.tensors)) == (14_220, 11_227_812)


def test_meta_networks_are_initialised_as_published_from_the_seed_alone() -> None:
    """Weights normal with deviation 0.1 sqrt(2 / (in + out)), all biases 0.5 or 1, equal lrs."""
    nets = MetaNets(workspace().model.module, 1)
    torch.manual_seed(5)
    global_state = torch.get_rng_state()
    meta = nets.initial(3, 0.01)
    assert torch.equal(torch.get_rng_state(), global_state)
    bn, lr, lrs = meta.split([nets.bn_size, len(meta) - nets.bn_size - 8, 8])
    assert lrs.tolist() == [torch.tensor(0.01)] * 8
    for part, inputs, outputs, bias in ((bn, 1, 1, 0.5), (lr, 8, 8, 1.0)):
        sizes = [100 * inputs, 100, 10_000, 100, 100 * outputs, outputs]
        first, b1, middle, b2, last, b3 = part.split(sizes)
        assert torch.cat([b1, b2, b3]).unique().tolist() == [bias]
        for weights, size in ((first, inputs), (middle, 100), (last, outputs)):
            deviation = 0.1 * (2 / (size + 100)) ** 0.5
            assert float(weights.std()) == pytest.approx(deviation, rel=0.25)
    assert torch.equal(meta, nets.initial(3, 0.01))
    assert not torch.equal(meta, nets.initial(4, 0.01))


def statistics(size: float = 1.0) -> LayerStatistics:
    """Statistics of four layers and one normalisation."""
    draw = generator("seen")
    inputs = size * torch.randn(8, generator=draw)
    return LayerStatistics(inputs, size * torch.rand(1, generator=draw))


def test_meta_networks_by_hand() -> None:
    """beta = clamp(BNNet(xi), 0, 1) and lrs = a clamp(LRNet(mean, deviation), 0, 1000)."""
    nets, given = MetaNets(workspace().model.module, 1), statistics()
    meta = 0.3 * torch.randn(len(nets.initial(0, 0.1)), generator=generator("meta"))
    numbers, place, actual = meta.double().numpy(), 0, []
    for x, outputs in ((given.divergences, 1), (given.inputs, 8)):
        h = x.double().numpy()
        for size in (100, 100, outputs):
            w = numbers[place : place + size * len(h)].reshape(size, len(h))
            b = numbers[place + w.size : place + w.size + size]
            place += w.size + size
            h = w @ h + b if size == outputs else np.maximum(w @ h + b, 0)
        actual.append(h)
    beta, lrs = nets(meta, given)
    np.testing.assert_allclose(beta, actual[0].clip(0, 1), **CLOSE)
    multipliers = actual[1].clip(0, 1000)
    assert 0 < (multipliers > 0).sum() < 8  # some are clamped
    np.testing.assert_allclose(lrs, numbers[place:] * multipliers, rtol=1e-4, atol=1e-6)


def test_beta_is_clamped_to_0_and_1_and_multipliers_to_0_and_1000() -> None:
    nets, ends = MetaNets(workspace().model.module, 1), set[float]()
    for k in range(20):
        meta = 9 * torch.randn(len(nets.initial(0, 1.0)), generator=generator("wild", k))
        meta[-8:] = 1.0
        beta, lrs = nets(meta, statistics(size=100.0))
        assert ((beta >= 0) & (beta <= 1)).all() and ((lrs >= 0) & (lrs <= 1000)).all()
        ends |= {*beta.tolist(), *lrs.tolist()}
    assert {0.0, 1.0, 1000.0} <= ends


@pytest.mark.parametrize(
    ("bias", "beta"), [(-7.3, 0.0), (0.0, 0.0), (0.4, 0.4), (1.0, 1.0), (1e4, 1.0)]
)
def test_the_clamp_passes_the_gradient_through(bias: float, beta: float) -> None:
    """With weights of 0 the last bias of BNNet is its output: 5 beta has the derivative 5."""
    nets = MetaNets(workspace().model.module, 1)
    meta = torch.zeros(len(nets.initial(0, 0.0)))
    meta[nets.bn_size - 1] = bias
    actual, _ = nets(meta.requires_grad_(), statistics())
    (gradient,) = torch.autograd.grad(5 * actual.sum(), meta)
    assert float(actual.detach()) == pytest.approx(beta) and float(gradient[nets.bn_size - 1]) == 5


def test_without_normalisation_there_is_no_bnnet() -> None:
    """LRNet 4 x 100 + 100 + 10,100 + 100 x 4 + 4 for two layers of two tensors, and four lrs."""
    work = workspace(small.NETWORK)
    nets = MetaNets(work.model.module, 0)
    meta = nets.initial(0, 0.5)
    assert (nets.bn_size, len(meta)) == (0, 400 + 100 + 10_100 + 400 + 4 + 4)
    beta, lrs = nets(meta, layer_statistics(work, [], torch.arange(9)))
    assert beta.shape == (0,) and lrs.shape == (4,)


def test_every_parameter_has_the_learning_rate_of_its_tensor() -> None:
    nets = MetaNets(workspace(small.NETWORK).model.module, 0)
    expected = [1.0] * 64 * 32 + [2.0] * 32 + [3.0] * 320 + [4.0] * 10
    assert nets.expand(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == expected


# --- layer statistics


@pytest.mark.parametrize("chunk", [7, 512])
def test_layer_statistics_by_hand(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all images at once: mean and deviation of each layer's input, and for normalisation
    (KL + KL reversed) / 2 of its input's channels from the running statistics."""
    monkeypatch.setattr("stamp_core.client.workspace.EVALUATION_BATCH", chunk)
    work, indices = workspace(), torch.arange(5, 45)
    actual = layer_statistics(work, work.classifier.norms, indices)
    convolution, norm, relu, pool, flat, hidden, last = work.classifier.encoder.eval()
    with torch.no_grad():
        x = work.normalise(work.x_train[indices])
        maps = convolution(x)
        vectors = flat(pool(relu(norm(maps))))
        inputs = [x, maps, vectors, last(hidden(vectors))]
    moments = [value for each in inputs for value in (each.mean(), each.std())]
    np.testing.assert_allclose(actual.inputs, moments, rtol=0, atol=1e-3)  # n or n - 1 apart
    own = Normal(maps.mean((0, 2, 3)), (maps.var((0, 2, 3), correction=0) + 1e-5).sqrt())
    net = Normal(norm.running_mean, (norm.running_var + 1e-5).sqrt())
    both = kl_divergence(own, net) + kl_divergence(net, own)
    assert float(actual.divergences) == pytest.approx(float(both.mean() / 2), rel=1e-4)
    assert not any(m._forward_pre_hooks for m in work.classifier.modules())


# --- mixed normalisation


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_mixed_normalisation_by_hand(beta: float, training: bool) -> None:
    """mean = (1 - beta) net + beta own, and the same for variances; own is the batch (biased) in
    training, the running statistics in evaluation. Training updates these as usual."""
    norms = workspace().classifier.norms
    (norm,), net = norms, running_statistics(norms)
    norm.running_mean.fill_(0.5)
    norm.running_var.fill_(2.0)
    norm.train(training)
    x = torch.randn(6, 4, 3, 3, generator=generator("x"))
    with torch.no_grad(), mixed_normalisation(norms, net, torch.tensor([beta])):
        actual = norm(x)
    own = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    own = own if training else (torch.full((4,), 0.5), torch.full((4,), 2.0))
    mean, variance = ((1 - beta) * n + beta * o for n, o in zip(net[0], own, strict=True))
    expected = F.batch_norm(x, mean, variance, norm.weight, norm.bias)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    share = 0.1 if training else 0.0  # of the batch, whose variance is divided by n - 1
    batch_mean, batch_variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, (1 - share) * 0.5 + share * batch_mean)
    torch.testing.assert_close(norm.running_var, (1 - share) * 2.0 + share * batch_variance)


@pytest.mark.parametrize(("beta", "zero"), [(1.0, True), (0.0, False)])
def test_the_statistics_of_a_batch_have_a_gradient(beta: float, zero: bool) -> None:
    """With beta 1 a shift of the input does not change the output, so the gradient sums to 0."""
    norms = workspace().classifier.norms
    x = torch.randn(6, 4, 3, 3, generator=generator("x"), requires_grad=True)
    norms[0].train()
    with mixed_normalisation(norms, running_statistics(norms), torch.tensor([beta])):
        (g,) = torch.autograd.grad(norms[0](x)[:, 0, 0, 0].sum(), x)
    assert (abs(float(g.sum())) < 1e-5) == zero


def test_mixed_normalisation_ends_after_an_exception() -> None:
    norms = workspace().classifier.norms
    with (
        pytest.raises(ZeroDivisionError),
        mixed_normalisation(norms, running_statistics(norms), torch.tensor([0.5])),
    ):
        assert len(norms[0]._forward_hooks) == 1
        raise ZeroDivisionError
    assert not norms[0]._forward_hooks


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_a_stored_mixture_evaluates_like_mixed_normalisation(beta: float) -> None:
    """With beta 0 it is the network's own statistics, bit for bit."""
    work = workspace()
    norms, module, mixture = work.classifier.norms, work.model.module, torch.tensor([beta])
    net, (x, _) = running_statistics(norms), images(work)
    work.model.buffers.copy_(work.untrained)
    with mixed_normalisation(norms, net, mixture), torch.no_grad():
        module.train()(x)
        own, expected = running_statistics(norms), module.eval()(x)
    store_mixture(norms, net, mixture)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), expected, rtol=0, atol=1e-5)
    for after, one, other in zip(running_statistics(norms)[0], net[0], own[0], strict=True):
        torch.testing.assert_close(after, (1 - beta) * one + beta * other)
        assert torch.equal(after, one) == (beta == 0)


# --- batches, gradients and their derivatives


def test_plain_batches_are_in_order_and_unchanged() -> None:
    work = workspace(small.NETWORK, shift=2)
    actual = list(plain_batches(work, torch.tensor([9, 4, 7]), 2))
    assert [len(labels) for _, labels in actual] == [2, 1]
    assert torch.equal(torch.cat([x for x, _ in actual]), work.normalise(work.x_train[[9, 4, 7]]))
    assert torch.equal(torch.cat([y for _, y in actual]), work.y_train[[9, 4, 7]])
    assert not list(plain_batches(work, torch.arange(0), 2))


def test_endless_batches_repeat_all_images_in_new_orders() -> None:
    """Three images at a time of seven: 3 + 3 + 1 each epoch."""
    work = workspace(small.NETWORK, batch_size=3)
    indices = torch.arange(10, 17)
    known = {work.normalise(work.x_train[i : i + 1]).numpy().tobytes(): i for i in range(10, 17)}
    batches, orders = endless_batches(work, ROUND, indices, "here"), []
    for _ in range(3):
        order = list[int]()
        for x, y in islice(batches, 3):
            order += [known[one.numpy().tobytes()] for one in x]
            assert torch.equal(work.y_train[order[-len(y) :]], y)
        assert sorted(order) == indices.tolist()
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]
    other = next(endless_batches(work, ROUND, indices, "there"))[0]
    assert [known[one.numpy().tobytes()] for one in other] != orders[0][:3]


def test_endless_batches_are_augmented_as_in_training() -> None:
    work = workspace(small.NETWORK, shift=2, batch_size=5)
    x, _ = next(endless_batches(work, ROUND, torch.arange(5), "here"))
    draw = ROUND.generator("here")
    order = torch.randperm(5, generator=draw)
    augmented = augment(work.x_train[order], work.training, draw)
    assert torch.equal(x, work.normalise(augmented))
    assert not torch.equal(augmented, work.x_train[order])


@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_epoch_batches_are_the_first_epochs_of_the_endless_ones(epochs: int) -> None:
    """Seven images at three a batch: three batches an epoch."""
    work, indices = workspace(small.NETWORK, batch_size=3), torch.arange(10, 17)
    actual = list(epoch_batches(work, ROUND, indices, "here", epochs))
    expected = islice(endless_batches(work, ROUND, indices, "here"), 3 * epochs)
    assert len(actual) == 3 * epochs
    for (x, y), (images_, labels) in zip(actual, expected, strict=True):
        assert torch.equal(x, images_) and torch.equal(y, labels)
    assert not list(epoch_batches(work, ROUND, indices[:0], "here", epochs))


@pytest.mark.parametrize(
    ("size", "most"), [(5.0, 1.0), (1e4, 0.5), (1e30, 0.5), (float("nan"), 0.0)]
)
def test_the_gradient_of_a_loss_above_100_is_clipped_and_of_one_not_finite_zero(
    size: float, most: float
) -> None:
    """With no weights but a bias of +size for class 5 and -size for the others nine in ten
    images have the loss 2 size, and the bias of class 5 a gradient of 0.9."""
    work = workspace(small.NETWORK)
    (x, y), bias = images(work), work.classifier.head.bias
    work.model.parameters.zero_()
    bias.data.copy_(torch.where(torch.arange(10) == 5, size, -size))
    (raw,) = torch.autograd.grad(F.cross_entropy(work.classifier(x), y), [bias])
    assert not float(raw.abs().max()) <= 0.5
    clipped_gradient(work, x, y)
    assert torch.equal(bias.grad, raw.nan_to_num(0).clamp(-most, most))


def test_the_loss_at_other_parameters_does_not_change_the_live_model() -> None:
    """It is that of a copy with these parameters, in evaluation mode, and has their gradient."""
    work = workspace()
    (x, y), model = images(work), work.model
    before = model.parameters.clone(), model.buffers.clone()
    theta = (model.parameters + 0.1).requires_grad_()
    model.module.train()
    loss = loss_at(work, theta, x, y)
    (gradient,) = torch.autograd.grad(loss, theta)
    assert torch.equal(model.parameters, before[0]) and torch.equal(model.buffers, before[1])
    model.load(theta.detach())
    model.gradients.zero_()
    expected = F.cross_entropy(model.module.eval()(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, model.gradients)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_neumann_series_of_a_quadratic(steps: int) -> None:
    """The loss is theta^T Q theta / 2, so H = Q and the series is sum_{j <= steps} (I - 0.1 Q)^j v.

    With many steps it is Q^-1 v / 0.1: multiplied by the learning rate, the inverse.
    """
    draw = generator("quadratic")
    root = torch.randn(5, 5, generator=draw, dtype=torch.float64)
    q = root @ root.T / 5 + torch.eye(5)
    theta = torch.randn(5, generator=draw, dtype=torch.float64, requires_grad=True)
    v = torch.randn(5, generator=draw, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(theta @ q @ theta / 2, theta, create_graph=True)
    actual = neumann_series(gradient, theta, v, steps, 0.1)
    factor = torch.eye(5, dtype=torch.float64) - 0.1 * q
    expected = sum(torch.linalg.matrix_power(factor, j) @ v for j in range(steps + 1))
    torch.testing.assert_close(actual, expected)
    if steps == 3:
        many = neumann_series(gradient, theta, v, 500, 0.1)
        torch.testing.assert_close(0.1 * many, torch.linalg.solve(q, v))
