"""A model is a vector: views, descent and the weighted mean, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stamp_core.config import Training
from stamp_core.vectors import Descent, FlatModel, average, flatten, pieces

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)  # -0.0, tiny and huge ones
weights = st.one_of(st.integers(1, 10**6).map(float), st.floats(1e-6, 1e6))


def net(seed: int = 0) -> nn.Sequential:
    """Odd sizes, so that no tensor begins where a vector register does."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 5)
    )


def loss(module: nn.Module, seed: int) -> Tensor:
    pictures = torch.randn(7, 1, 5, 5, generator=torch.Generator().manual_seed(seed))
    result: Tensor = module(pictures).square().sum()
    return result


def bits(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_the_vectors_start_as_the_module_and_hold_nothing_else() -> None:
    """P = 3 * 9 + 3 (convolution) + 3 + 3 (norm) + 27 * 5 + 5 (linear); B = 3 means + 3 variances:
    the integer counter is gone."""
    model, twin = FlatModel(net()), net()
    assert len(model.parameters) == 30 + 6 + 140 and len(model.buffers) == 6
    assert torch.equal(model.parameters, flatten(list(twin.parameters())))
    assert torch.equal(model.buffers, torch.tensor([0.0, 0, 0, 1, 1, 1]))
    assert torch.equal(model.module(torch.ones(2, 1, 5, 5)), twin(torch.ones(2, 1, 5, 5)))


@pytest.mark.parametrize("what", ["parameters", "buffers"])
def test_vector_and_module_are_the_same_memory(what: str) -> None:
    model = FlatModel(net())
    vector, tensors = getattr(model, what), list(getattr(model.module, what)())
    vector.copy_(torch.arange(len(vector)))
    expected = torch.arange(len(vector)).float()
    for tensor in tensors:
        own, expected = expected[: tensor.numel()], expected[tensor.numel() :]
        assert torch.equal(tensor.reshape(-1), own)
    with torch.no_grad():
        tensors[-1].fill_(-1.0)
    assert (vector[-tensors[-1].numel() :] == -1).all() and (vector == -1).sum() == len(tensors[-1])


def test_training_writes_into_the_buffers_vector() -> None:
    """Momentum 0.1: the mean of a channel moves from 0 to a tenth of the batch's."""
    model = FlatModel(net())
    pictures = torch.randn(7, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        means = model.module[0](pictures).mean((0, 2, 3))
        model.module.train()(pictures)
    torch.testing.assert_close(model.buffers[:3], means / 10)


def test_gradients_land_in_the_vector_and_add_up() -> None:
    model, twin = FlatModel(net()), net()
    loss(twin, 0).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
    assert expected.count_nonzero() > len(expected) / 2
    loss(model.module, 0).backward()
    assert torch.equal(model.gradients, expected)
    loss(model.module, 0).backward()
    assert torch.equal(model.gradients, 2 * expected)
    model.gradients.zero_()
    assert all(not p.grad.any() for p in model.module.parameters())


def test_load_copies() -> None:
    """Later changes of the model leave what was loaded alone, and the views stay views."""
    model = FlatModel(net())
    parameters, buffers = torch.ones_like(model.parameters), torch.full_like(model.buffers, 2.0)
    model.load(parameters)
    assert torch.equal(model.buffers, torch.tensor([0.0, 0, 0, 1, 1, 1]))
    model.load(parameters, buffers)
    assert all((p == 1).all() for p in model.module.parameters())
    assert all((b == 2).all() for b in model.module.buffers())
    model.parameters.zero_()
    model.buffers.zero_()
    assert parameters.all() and buffers.all()


def test_pieces_undo_flatten() -> None:
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0, 4), torch.randn(5)]
    vector = flatten(tensors)
    assert all(torch.equal(a, b) for a, b in zip(pieces(vector, tensors), tensors, strict=True))
    assert len(flatten([])) == 0


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("decay", [0.0, 5e-4, 0.1])
def test_descent_is_sgd_bit_for_bit(momentum: float, decay: float) -> None:
    model, twin = FlatModel(net()), net()
    training = Training(1, 1, 1, rate=0.03, momentum=momentum, weight_decay=decay)
    descent = Descent(model, training)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.03, momentum=momentum, weight_decay=decay)
    start = model.parameters.clone()
    for step in range(6):
        model.gradients.zero_()
        loss(model.module, step).backward()
        descent.step()
        sgd.zero_grad()
        loss(twin, step).backward()
        sgd.step()
        assert bits(model.parameters) == bits(flatten(list(twin.parameters()))), step
    assert (start != model.parameters).float().mean() > 0.9


def test_a_new_descent_starts_without_velocity() -> None:
    """Step 1 of momentum 0.9 on a gradient of 1 is -rate; step 2 would be -1.9 rate."""
    model = FlatModel(net())
    model.parameters.zero_()
    training = Training(1, 1, 1, 1.0, momentum=0.9)
    for _ in range(2):
        model.gradients.fill_(1.0)
        Descent(model, training).step()
    assert (model.parameters == -2).all()
    descent = Descent(model, training)
    descent.step()
    descent.step()
    torch.testing.assert_close(model.parameters, torch.full_like(model.parameters, -2 - 1 - 1.9))


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=9), st.lists(weights, min_size=1, max_size=12))
def test_equal_vectors_average_to_themselves_bit_for_bit(
    values: list[float], weights: list[float]
) -> None:
    vector = torch.tensor(values)
    assert bits(average([vector.clone() for _ in weights], weights)) == bits(vector)


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, weights), min_size=1, max_size=9))
def test_the_mean_is_that_of_float64_rounded_once(rows: list[tuple[float, float]]) -> None:
    total = np.float64(0)
    for value, weight in rows:
        total += np.float64(value) * np.float64(weight)
    with np.errstate(over="ignore"):
        expected = np.float32(total / sum(weight for _, weight in rows))
    found = average([torch.tensor([value]) for value, _ in rows], [weight for _, weight in rows])
    np.testing.assert_array_max_ulp(found.numpy(), np.array([expected]), maxulp=1)


def test_average_by_hand() -> None:
    """(1 * 1 + 3 * 3) / 4 = 2.5, (1 * 2 + 3 * -6) / 4 = -4; a weight of 0 adds nothing."""
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -6.0]), torch.tensor([9.0, 9.0])]
    mean = average(vectors, [1.0, 3.0, 0.0])
    assert mean.tolist() == [2.5, -4.0] and mean.dtype == torch.float32
    assert [v.tolist() for v in vectors] == [[1, 2], [3, -6], [9, 9]]


def test_average_adds_in_the_given_order_in_float64() -> None:
    """1e30 - 1e30 + 3 is 3, whereas 1e30 + 3 - 1e30 is 0 (float64 ends 16 digits below 1e30);
    2^24 + 1 + 1 is 2^24 + 2, where float32 would stay at 2^24."""
    big, three = torch.tensor([1e30]), torch.tensor([3.0])
    assert average([big, -big, three], [1.0, 1.0, 1.0]).item() == 1.0
    assert average([big, three, -big], [1.0, 1.0, 1.0]).item() == 0.0
    one, many = torch.tensor([1.0]), torch.tensor([2.0**24])
    assert average([many, one, one], [1.0, 1.0, 1.0]).item() == np.float32((2**24 + 2) / 3)


def test_vectors_and_weights_must_go_together() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        average([torch.ones(1), torch.ones(1)], [1.0])
