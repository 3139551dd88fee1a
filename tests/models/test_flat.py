"""A model as a vector: views, SGD and the weighted mean, bit-identical to PyTorch and float64."""

from copy import deepcopy

import numpy as np
import pytest
import small
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stamp_core.config.schema import Training
from stamp_core.matching.match import MatchingParams, match
from stamp_core.models.flat import (
    FlatModel,
    FlatSGD,
    flatten_like,
    layer_blocks,
    split_like,
    weighted_average,
)

LAYOUTS = [torch.contiguous_format, torch.channels_last]
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)  # -0.0, tiny and huge ones
weights = st.one_of(st.integers(1, 10**6).map(float), st.floats(1e-6, 1e6))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 5)
    )


def loss(module: nn.Module, seed: int) -> Tensor:
    images = torch.randn(7, 1, 5, 5, generator=torch.Generator().manual_seed(seed))
    result: Tensor = module(images).square().sum()
    return result


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_the_vectors_hold_the_module_and_nothing_else():
    """P = 3 * 9 + 3 (convolution) + 3 + 3 (norm) + 27 * 5 + 5 (linear); B = 3 means + 3 variances:
    the integer counter is gone."""
    model, twin = FlatModel(network()), network()
    assert len(model.parameters) == 30 + 6 + 140 and len(model.buffers) == 6
    assert torch.equal(model.parameters, small.flat(list(twin.parameters())))
    assert torch.equal(model.buffers, torch.tensor([0.0, 0, 0, 1, 1, 1]))
    assert torch.equal(model.module(torch.ones(2, 1, 5, 5)), twin(torch.ones(2, 1, 5, 5)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_like_inverts_flatten_like(layout):
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0, 4), torch.randn(5)]
    tensors += [torch.randn(2, 3, 4, 5).to(memory_format=layout), torch.randn(2, 3, 1, 1)]
    vector = flatten_like(tensors, tensors)
    assert all(torch.equal(a, b) for a, b in zip(split_like(vector, tensors), tensors, strict=True))
    assert len(flatten_like([], [])) == 0


# --- channels last


def models() -> list[FlatModel]:
    """Two convolutions of more than one channel, in both layouts of their weights."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 5)
    module = nn.Sequential(*layers)
    return [FlatModel(deepcopy(module).to(memory_format=layout)) for layout in LAYOUTS]


def permuted(model: FlatModel) -> Tensor:
    """The place in the vector of channels first of each value in the one of channels last.

    By counting: value number n of each tensor becomes n.
    """
    places = [torch.arange(p.numel()).view(p.shape) for p in model.tensors]
    starts = torch.tensor([0, *(p.numel() for p in model.tensors)]).cumsum(0)
    return torch.cat(
        [
            start + (place.permute(0, 2, 3, 1) if place.dim() == 4 else place).reshape(-1)
            for start, place in zip(starts, places, strict=False)
        ]
    )


def test_weights_are_channels_last_inside_the_vector():
    """The values, the gradients and what is split off are views with the strides of cuDNN."""
    _, last = models()
    for p in (*last.tensors[:1], *last.tensors[2:3]):
        for each in (p, p.grad):
            assert each.is_contiguous(memory_format=torch.channels_last)
            assert not each.is_contiguous()
    last.parameters.copy_(torch.arange(len(last.parameters)))
    filter_ = last.tensors[0][0].detach()  # [I, H, W] = [2, 2, 2]
    assert filter_.flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_the_gradient_has_the_order_of_the_weights():
    """By `backward` and by `grad`, whose strides depend on the images'."""
    for model in models():
        images = torch.randn(3, 2, 5, 5).to(memory_format=torch.channels_last)
        model.module(images).square().sum().backward()
        slopes = torch.autograd.grad(model.module(images).square().sum(), model.tensors)
        assert torch.equal(flatten_like(slopes, model.tensors), model.gradients)


def test_means_and_matches_do_not_depend_on_the_layout():
    """A mean is that of each value, bit for bit; a match has sums in another order."""
    first, last = models()
    places, draw = permuted(first), torch.Generator().manual_seed(0)
    vectors = [torch.randn(len(places), generator=draw) for _ in range(3)]
    moved = [vector[places] for vector in vectors]
    mean = weighted_average(vectors, [1.0, 2.0, 4.0])
    assert torch.equal(weighted_average(moved, [1.0, 2.0, 4.0]), mean[places])
    sizes = [layer_blocks([p.numel() for p in each.tensors], 20) for each in (first, last)]
    assert sizes[0] == sizes[1] and len(sizes[0]) > 2
    params = MatchingParams(blocks="layers")
    one, other = match(vectors, params, sizes=sizes[0]), match(moved, params, sizes=sizes[1])
    torch.testing.assert_close(other[0], one[0][places])
    torch.testing.assert_close(other[1].coefficients, one[1].coefficients)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("decay", [0.0, 5e-4, 0.1])
def test_sgd_is_bit_identical_to_torch(momentum, decay):
    model, twin = FlatModel(network()), network()
    training = Training(1, 1, 1, lr=0.03, momentum=momentum, weight_decay=decay)
    sgd = FlatSGD(model, training)
    torch_sgd = torch.optim.SGD(twin.parameters(), lr=0.03, momentum=momentum, weight_decay=decay)
    start = model.parameters.clone()
    for step in range(6):
        model.gradients.zero_()
        loss(model.module, step).backward()
        sgd.step()
        torch_sgd.zero_grad()
        loss(twin, step).backward()
        torch_sgd.step()
        assert to_bytes(model.parameters) == to_bytes(small.flat(list(twin.parameters()))), step
    assert (start != model.parameters).float().mean() > 0.9


@pytest.mark.parametrize("schedule", ["cosine", "exponential"])
def test_learning_rates_are_those_of_torch(schedule):
    training = Training(7, 1, 1, lr=0.04, schedule=schedule, lr_end=0.001)
    sgd = torch.optim.SGD(network().parameters(), lr=0.04)
    scheduler = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 7, eta_min=0.001),
        "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(sgd, (1 / 40) ** (1 / 7)),
    }[schedule]()
    for round_ in range(7):
        assert training.lr_in(round_) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        sgd.step()
        scheduler.step()


def test_the_first_velocity_is_the_gradient_bit_by_bit():
    """A velocity of 0.0 would make 0.0 of a gradient of -0.0, and then 0.0 of a weight of -0.0."""
    model = FlatModel(network())
    model.parameters.fill_(-0.0)
    sgd = FlatSGD(model, Training(1, 1, 1, 1.0, momentum=0.9))
    values = torch.tensor([-0.0, 0.0, 1.5, -2.5e-42, torch.inf])
    model.gradients.copy_(values.repeat(len(model.gradients))[: len(model.gradients)])
    sgd.step()
    assert sgd.velocity is not None and to_bytes(sgd.velocity) == to_bytes(model.gradients)
    address = sgd.velocity.data_ptr()
    sgd.step()
    sgd.restart()
    sgd.step()
    assert to_bytes(sgd.velocity) == to_bytes(model.gradients)
    assert sgd.velocity.data_ptr() == address


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=9), st.lists(weights, min_size=1, max_size=12))
def test_the_mean_of_equal_vectors_is_bit_identical(values, weights):
    vector = torch.tensor(values)
    mean = weighted_average([vector.clone() for _ in weights], weights)
    assert to_bytes(mean) == to_bytes(vector)


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, weights), min_size=1, max_size=9))
@example([(1e30, 1.0), (-1e30, 1.0), (3.0, 1.0)])
@example([(1e30, 1.0), (3.0, 1.0), (-1e30, 1.0)])
@example([(2.0**24, 1.0), *[(1.0, 1.0)] * 8])
def test_the_mean_is_added_up_in_order_in_float64_and_rounded_once(pairs):
    """1e30 - 1e30 + 3 is 3, whereas 1e30 + 3 - 1e30 is 0 (float64 ends 16 digits below 1e30);
    2^24 and eight times 1 are 2^24 + 8, where float32 would stay at 2^24."""
    total = np.float64(0)
    for value, weight in pairs:
        total += np.float64(value) * np.float64(weight)
    with np.errstate(over="ignore"):
        expected = np.float32(total / sum(weight for _, weight in pairs))
    values, weights = zip(*pairs, strict=True)
    mean = weighted_average([torch.tensor([value]) for value in values], list(weights))
    np.testing.assert_array_max_ulp(mean.numpy(), np.array([expected]), maxulp=1)
