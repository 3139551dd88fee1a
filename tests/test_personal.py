"""Meta-networks, statistics between net and client, batches without end, and a truncated series."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, plan, tiny
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from stamp_core import models, personal
from stamp_core.config import Network
from stamp_core.personal import (
    MetaNets,
    Seen,
    endless,
    forget,
    gathered,
    look,
    loss_at,
    mixed,
    neumann,
    settle,
    slope,
    straight,
)
from stamp_core.seeding import generator
from stamp_core.workspace import Visit, Workspace, augment

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


def workspace(network: dict[str, Any] = BATCH_NORM, **training: Any) -> Workspace:
    """A workspace of the digits whose normalisations have gathered something, and a plan's."""
    cell = tiny("fedl2p", network=network, training=training)
    work = small.worker(cell, plan(cell)).work
    draw = generator("gathered")
    for norm in work.classifier.norms:
        norm.running_mean.copy_(torch.randn(4, generator=draw))
        norm.running_var.copy_(torch.rand(4, generator=draw) + 0.5)
    return work


def pictures(work: Workspace, count: int = 40) -> tuple[Tensor, Tensor]:
    """The first pictures and their labels."""
    return work.normalise(work.x_train[:count]), work.y_train[:count]


# ------------------------------------------------------------------ meta-networks


def test_what_travels_for_resnet18_is_38944_numbers() -> None:
    """BNNet 20 x 100 + 100 + 100 x 100 + 100 + 100 x 20 + 20 = 14,220; LRNet 82 x 100 + 100 +
    10,100 + 100 x 62 + 62 = 24,662; 62 rates: 155,776 bytes, whatever the width of a layer."""
    net = models.build(Network("resnet18", norm="batch"), (3, 32, 32), 100, seed=0)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert (len(norms), len(personal.learnable(net)), len(list(net.parameters()))) == (20, 41, 62)
    nets = MetaNets(net, len(norms))
    meta = nets.start(0, 0.001)
    assert (meta.numel(), meta.numel() * meta.element_size()) == (38_944, 155_776)
    assert (nets.mixing, sum(nets.tensors)) == (14_220, 11_227_812)


def test_meta_networks_start_as_published_from_an_address_of_their_own() -> None:
    """Weights normal with deviation 0.1 sqrt(2 / (in + out)), all biases 0.5 or 1, rates alike."""
    nets = MetaNets(workspace().model.module, 1)
    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    meta = nets.start(3, 0.01)
    assert torch.equal(torch.get_rng_state(), drawn)
    bn, lr, rates = meta.split([nets.mixing, len(meta) - nets.mixing - 8, 8])
    assert rates.tolist() == [torch.tensor(0.01)] * 8
    for part, inputs, outputs, bias in ((bn, 1, 1, 0.5), (lr, 8, 8, 1.0)):
        first, b1, middle, b2, last, b3 = part.split(
            [100 * inputs, 100, 10_000, 100, 100 * outputs, outputs]
        )
        assert torch.cat([b1, b2, b3]).unique().tolist() == [bias]
        for weights, size in ((first, inputs), (middle, 100), (last, outputs)):
            deviation = 0.1 * (2 / (size + 100)) ** 0.5
            assert float(weights.std()) == pytest.approx(deviation, rel=0.25)
    assert torch.equal(meta, nets.start(3, 0.01)) and not torch.equal(meta, nets.start(4, 0.01))


def seen(layers: int, norms: int, size: float = 1.0) -> Seen:
    """What some layers might be given."""
    draw = generator("seen")
    inputs = size * torch.randn(2 * layers, generator=draw)
    return Seen(inputs, size * torch.rand(norms, generator=draw))


def test_meta_networks_by_hand() -> None:
    """shares = clamp(BNNet(xi), 0, 1) and rates = a clamp(LRNet(mean, deviation), 0, 1000)."""
    nets, given = MetaNets(workspace().model.module, 1), seen(4, 1)
    meta = 0.3 * torch.randn(len(nets.start(0, 0.1)), generator=generator("meta"))
    numbers, place, found = meta.double().numpy(), 0, []
    for x, outputs in ((given.distances, 1), (given.inputs, 8)):
        h = x.double().numpy()
        for size in (100, 100, outputs):
            w = numbers[place : place + size * len(h)].reshape(size, len(h))
            b = numbers[place + w.size : place + w.size + size]
            place += w.size + size
            h = w @ h + b if size == outputs else np.maximum(w @ h + b, 0)
        found.append(h)
    shares, rates = nets(meta, given)
    np.testing.assert_allclose(shares, found[0].clip(0, 1), **CLOSE)
    multipliers = found[1].clip(0, 1000)
    assert 0 < (multipliers > 0).sum() < 8  # some are cut off
    np.testing.assert_allclose(rates, numbers[place:] * multipliers, rtol=1e-4, atol=1e-6)


def test_shares_stay_within_0_and_1_and_multipliers_within_0_and_1000() -> None:
    nets = MetaNets(workspace().model.module, 1)
    ends = set()
    for k in range(20):
        meta = 9 * torch.randn(len(nets.start(0, 1.0)), generator=generator("wild", k))
        meta[-8:] = 1.0
        shares, rates = nets(meta, seen(4, 1, size=100.0))
        assert ((shares >= 0) & (shares <= 1)).all() and ((rates >= 0) & (rates <= 1000)).all()
        ends |= {*shares.tolist(), *rates.tolist()}
    assert {0.0, 1.0, 1000.0} <= ends


def test_a_clamp_has_the_gradient_of_what_it_clamps() -> None:
    x = torch.tensor([-7.3, -0.0, 0.4, 1.0, 1e4 + 0.3], requires_grad=True)
    upstream = torch.tensor([2.0, -3.0, 5.0, -7.0, 11.0])
    y = straight(x, 1.0)
    assert y.tolist() == [0.0, 0.0, pytest.approx(0.4), 1.0, 1.0]
    y.backward(upstream)
    assert x.grad is not None and torch.equal(x.grad, upstream)


def test_without_normalisation_there_is_no_network_for_it() -> None:
    """LRNet 4 x 100 + 100 + 10,100 + 100 x 4 + 4 for two layers of two tensors, and four rates."""
    work = workspace(small.NETWORK)
    nets = MetaNets(work.model.module, 0)
    meta = nets.start(0, 0.5)
    assert (nets.mixing, len(meta)) == (0, 400 + 100 + 10_100 + 400 + 4 + 4)
    shares, rates = nets(meta, look(work, [], torch.arange(9)))
    assert shares.shape == (0,) and rates.shape == (4,)


def test_every_parameter_has_the_rate_of_its_tensor() -> None:
    nets = MetaNets(workspace(small.NETWORK).model.module, 0)
    rates = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = [1.0] * 64 * 32 + [2.0] * 32 + [3.0] * 320 + [4.0] * 10
    assert nets.spread(rates).tolist() == expected


# ------------------------------------------------------------------ what a client is like


@pytest.mark.parametrize("chunk", [7, 512])
def test_what_layers_are_given_by_hand(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all pictures at once: mean and deviation of each layer's input, and for normalisation
    the divergences there and back of its input's channels from what is stored, halved."""
    monkeypatch.setattr("stamp_core.workspace.CHUNK", chunk)
    work, indices = workspace(), torch.arange(5, 45)
    found = look(work, work.classifier.norms, indices)
    convolution, norm, relu, pool, flat, hidden, last = work.classifier.encoder.eval()
    with torch.no_grad():
        x = work.normalise(work.x_train[indices])
        maps = convolution(x)
        vectors = flat(pool(relu(norm(maps))))
        inputs = [x, maps, vectors, last(hidden(vectors))]
    moments = [value for each in inputs for value in (each.mean(), each.std())]
    np.testing.assert_allclose(found.inputs, moments, rtol=0, atol=1e-3)  # n or n - 1 apart
    here = Normal(maps.mean((0, 2, 3)), (maps.var((0, 2, 3), correction=0) + 1e-5).sqrt())
    there = Normal(norm.running_mean, (norm.running_var + 1e-5).sqrt())
    both = kl_divergence(here, there) + kl_divergence(there, here)
    assert float(found.distances) == pytest.approx(float(both.mean() / 2), rel=1e-4)
    assert not any(m._forward_pre_hooks for m in work.classifier.modules())


def test_the_distance_is_symmetric_and_0_between_equals() -> None:
    draw = generator("moments")
    one, other = [(torch.randn(5, generator=draw), torch.rand(5, generator=draw)) for _ in "ab"]
    assert personal.distance(one, one) == 0
    assert personal.distance(one, other) == personal.distance(other, one) > 0


# ------------------------------------------------------------------ mixed normalisation


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_mixed_normalisation_by_hand(share: float, training: bool) -> None:
    """mean = (1 - beta) net + beta own, the same for variances; own is the batch (biased) in
    training and what has been gathered in evaluation."""
    work = workspace()
    (norm,) = work.classifier.norms
    net = gathered(work.classifier.norms)
    norm.running_mean.fill_(0.5)
    norm.running_var.fill_(2.0)
    norm.train(training)
    x = torch.randn(6, 4, 3, 3, generator=generator("x"))
    with torch.no_grad(), mixed(work.classifier.norms, net, torch.tensor([share])):
        found = norm(x)
    own = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    own = own if training else (torch.full((4,), 0.5), torch.full((4,), 2.0))
    mean, variance = ((1 - share) * n + share * o for n, o in zip(net[0], own, strict=True))
    expected = F.batch_norm(x, mean, variance, norm.weight, norm.bias)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if training:  # gathered as ever: a tenth of the batch's, the variance over n - 1
        torch.testing.assert_close(norm.running_mean, 0.9 * 0.5 + 0.1 * x.mean((0, 2, 3)))
        torch.testing.assert_close(norm.running_var, 0.9 * 2.0 + 0.1 * x.var((0, 2, 3)))
    else:
        assert norm.running_mean.tolist() == [0.5] * 4 and norm.running_var.tolist() == [2.0] * 4


def test_own_statistics_of_a_batch_have_a_gradient() -> None:
    """With beta 1 a shift of the input leaves the output, so the gradient sums to 0."""
    work = workspace()
    x = torch.randn(6, 4, 3, 3, generator=generator("x"), requires_grad=True)
    work.classifier.norms[0].train()
    for share, zero in ((1.0, True), (0.0, False)):
        with mixed(work.classifier.norms, gathered(work.classifier.norms), torch.tensor([share])):
            (g,) = torch.autograd.grad(work.classifier.norms[0](x)[:, 0, 0, 0].sum(), x)
        assert (abs(float(g.sum())) < 1e-5) == zero


def test_the_mixture_ends_also_after_an_exception() -> None:
    work = workspace()
    with (
        pytest.raises(ZeroDivisionError),
        mixed(work.classifier.norms, gathered(work.classifier.norms), torch.tensor([0.5])),
    ):
        assert len(work.classifier.norms[0]._forward_hooks) == 1
        raise ZeroDivisionError
    assert not work.classifier.norms[0]._forward_hooks


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_settled_statistics_evaluate_like_mixed_ones(share: float) -> None:
    """And with beta 0 they are the net's own again, bit for bit."""
    work = workspace()
    net, shares = gathered(work.classifier.norms), torch.tensor([share])
    forget(work.classifier.norms)
    assert work.model.buffers.tolist() == [0.0] * 4 + [1.0] * 4
    x, _ = pictures(work)
    with mixed(work.classifier.norms, net, shares), torch.no_grad():
        work.model.module.train()(x)
        own = gathered(work.classifier.norms)
        expected = work.model.module.eval()(x)
    settle(work.classifier.norms, net, shares)
    with torch.no_grad():
        torch.testing.assert_close(work.model.module.eval()(x), expected, rtol=0, atol=1e-5)
    for after, kept, other in zip(gathered(work.classifier.norms)[0], net[0], own[0], strict=True):
        torch.testing.assert_close(after, (1 - share) * kept + share * other)
        assert torch.equal(after, kept) == (share == 0)


# ------------------------------------------------------------------ steps and their derivatives


def test_batches_go_round_all_pictures_in_new_orders() -> None:
    """Three pictures at a time of seven: 3 + 3 + 1 each time round."""
    work = workspace(small.NETWORK, batch=3)
    indices = torch.arange(10, 17)
    known = {work.normalise(work.x_train[i : i + 1]).numpy().tobytes(): i for i in range(10, 17)}
    orders = []
    batches = endless(work, Visit(0, 1, 2, 3), indices, "here")
    for _ in range(3):
        order = []
        for x, y in islice(batches, 3):
            order += [known[one.numpy().tobytes()] for one in x]
            assert torch.equal(work.y_train[order[-len(y) :]], y)
        assert sorted(order) == indices.tolist()
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]
    again = next(endless(work, Visit(0, 1, 2, 3), indices, "there"))[0]
    assert [known[one.numpy().tobytes()] for one in again] != orders[0][:3]


def test_batches_are_augmented_as_in_training() -> None:
    work = workspace(small.NETWORK, shift=2, batch=5)
    x, _ = next(endless(work, Visit(0, 0, 0, 0), torch.arange(5), "here"))
    draw = Visit(0, 0, 0, 0).generator("here")
    order = torch.randperm(5, generator=draw)
    changed = augment(work.x_train[order], work.setting.training, draw)
    assert torch.equal(x, work.normalise(changed))
    assert not torch.equal(changed, work.x_train[order])


@pytest.mark.parametrize(
    ("size", "most"), [(5.0, 1.0), (1e4, 0.5), (1e30, 0.5), (float("nan"), 0.0)]
)
def test_a_loss_above_100_clips_the_gradient_and_one_that_is_no_number_has_none(
    size: float, most: float
) -> None:
    """With no weights but a bias of +size for class 5 and -size for the others nine in ten
    pictures have the loss 2 size, and the bias of class 5 a gradient of 0.9."""
    work = workspace(small.NETWORK)
    (x, y), bias = pictures(work), work.classifier.head.bias
    work.model.parameters.zero_()
    bias.data.copy_(torch.where(torch.arange(10) == 5, size, -size))
    (raw,) = torch.autograd.grad(F.cross_entropy(work.classifier(x), y), [bias])
    assert not float(raw.abs().max()) <= 0.5
    slope(work, x, y)
    assert torch.equal(bias.grad, raw.nan_to_num(0).clamp(-most, most))


def test_the_loss_at_other_parameters_leaves_the_live_model() -> None:
    """It is that of a copy with these parameters, in evaluation mode, and has their gradient."""
    work = workspace()
    x, y = pictures(work)
    before = work.model.parameters.clone(), work.model.buffers.clone()
    theta = (work.model.parameters + 0.1).requires_grad_()
    work.model.module.train()
    loss = loss_at(work, theta, x, y)
    (found,) = torch.autograd.grad(loss, theta)
    assert torch.equal(work.model.parameters, before[0])
    assert torch.equal(work.model.buffers, before[1])
    work.model.load(theta.detach())
    work.model.gradients.zero_()
    expected = F.cross_entropy(work.model.module.eval()(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, work.model.gradients)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_truncated_series_of_a_quadratic(steps: int) -> None:
    """The loss is theta^T Q theta / 2, so H = Q and the series is sum_{j <= steps} (I - 0.1 Q)^j v.

    With many steps it is Q^-1 v / 0.1: the inverse, were it multiplied by the rate.
    """
    draw = generator("quadratic")
    root = torch.randn(5, 5, generator=draw, dtype=torch.float64)
    q = root @ root.T / 5 + torch.eye(5)
    theta = torch.randn(5, generator=draw, dtype=torch.float64, requires_grad=True)
    v = torch.randn(5, generator=draw, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(theta @ q @ theta / 2, theta, create_graph=True)
    found = neumann(gradient, theta, v, steps, 0.1)
    factor = torch.eye(5, dtype=torch.float64) - 0.1 * q
    expected = sum(torch.linalg.matrix_power(factor, j) @ v for j in range(steps + 1))
    torch.testing.assert_close(found, expected)
    if steps == 3:
        inverse = torch.linalg.solve(q, v)
        torch.testing.assert_close(0.1 * neumann(gradient, theta, v, 500, 0.1), inverse)
