"""Layers as matrices, the rank rule and projection: by hand, and what must hold for any input."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small
import torch
from small import BATCH_NORM, tiny
from stamp_core.client.workspace import Workspace
from torch import Tensor, nn

from stamp_core.client import subspaces
from stamp_core.client.subspaces import Layer, component, grow, share_inside
from stamp_core.config.decode import ParameterError


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(d: int, k: int, seed: int = 0) -> Tensor:
    """k orthonormal columns of d numbers."""
    return torch.linalg.qr(draw(d, k, seed=seed)).Q


def both_forms(inputs: Tensor) -> list[Tensor]:
    """Columns R, of which there must be fewer than rows, and R R'."""
    assert inputs.shape[1] < inputs.shape[0]
    return [inputs, inputs @ inputs.T]


def one_layer(outputs: int, inputs: int) -> dict[str, Layer]:
    """A layer without a bias that is the whole flat vector."""
    module = nn.Linear(inputs, outputs, bias=False)
    return {"all": Layer(module, slice(0, outputs * inputs), None, (outputs, inputs))}


# --- layers as matrices


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"padding": 1}, {"stride": 2, "padding": 2, "dilation": 2}],
    ids=str,
)
def test_the_matrix_of_a_convolution_times_its_columns_is_its_output(
    options: dict[str, Any], bias: bool
) -> None:
    conv, vector = nn.Conv2d(3, 4, 3, bias=bias, **options).double(), draw(108 + 4 * bias, seed=1)
    nn.utils.vector_to_parameters(vector, conv.parameters())
    x = draw(2, 3, 7, 8)
    places = slice(0, 108), slice(108, 112) if bias else None
    layer = Layer(conv, *places, (4, 27 + bias))
    expected = conv(x).transpose(0, 1).flatten(1)  # [4, n L]
    torch.testing.assert_close(layer.matrix(vector) @ layer.columns(x), expected)
    written = torch.zeros_like(vector)
    layer.write(written, layer.matrix(vector))
    assert torch.equal(written, vector)


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_what_layers_get_is_what_they_multiply(network: dict[str, Any]) -> None:
    """In evaluation mode, in several passes: W R for one image, W R R' for many."""
    work = small.worker(tiny(network=network)).work
    layers, images = subspaces.find_layers(work), work.dataset.x_train[:40]
    outputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.module.register_forward_hook(
            lambda module, args, out, held=outputs[name]: held.append(
                out.transpose(0, 1).flatten(1)
            )
        )
    for count in (1, 40):
        inputs = subspaces.layer_inputs(work, layers, images[:count])
        for name, layer in layers.items():
            found = layer.matrix(work.model.parameters).double() @ inputs[name]
            gram = inputs[name].shape == (layer.shape[1],) * 2
            assert gram or inputs[name].shape[1] < layer.shape[1]
            z = torch.cat(outputs[name], 1).double()
            outputs[name].clear()
            if gram:  # W R R' W' = z z'
                found, z = found @ layer.matrix(work.model.parameters).double().T, z @ z.T
            torch.testing.assert_close(found, z, rtol=1e-5, atol=1e-5)
    assert not work.model.gradients.any() and torch.equal(work.model.buffers, work.untrained)


def test_layers_cover_all_parameters_but_normalisation() -> None:
    work = small.worker(tiny(network=BATCH_NORM)).work
    layers = subspaces.find_layers(work)
    assert {name: layer.shape for name, layer in layers.items()} == {
        "encoder.0": (4, 26),
        "encoder.5": (8, 17),
        "head": (10, 9),
    }
    counts = torch.zeros(small.BN_P)
    for layer in layers.values():
        counts[layer.weight] += 1
        counts[layer.bias] += 1
    assert counts.max() == 1 and (counts == 0).nonzero().flatten().tolist() == [*range(104, 112)]
    apart = subspaces.find_layers(work, joint=False, head=False)
    assert {name: layer.shape for name, layer in apart.items()} == {
        "encoder.0": (4, 25),
        "encoder.5": (8, 16),
    }


def test_a_network_that_hides_inputs_of_layers_is_refused() -> None:
    work: Any = SimpleNamespace(setting=SimpleNamespace(network=SimpleNamespace(kind="swin_t")))
    with pytest.raises(ParameterError, match=r"network\.kind is 'swin_t'; it must be another"):
        subspaces.find_layers(work)


# --- the rank rule


@pytest.mark.parametrize(("epsilon", "columns"), [(0.0, 0), (0.85, 1), (0.95, 2), (1.0, 2)])
def test_the_number_of_columns_by_hand(epsilon: float, columns: int) -> None:
    """R = 3 e1, e2: squares 9 and 1, of which the first column holds 0.9."""
    inputs = torch.zeros(3, 2, dtype=torch.float64)
    inputs[0, 0], inputs[1, 1] = 3, 1
    for form in both_forms(inputs):
        basis = grow(torch.zeros(3, 0, dtype=torch.float64), form, epsilon)
        torch.testing.assert_close(basis.abs(), torch.eye(3, dtype=torch.float64)[:, :columns])


@pytest.mark.parametrize(("epsilon", "columns"), [(0.3, 1), (0.5, 2), (1.0, 2)])
def test_a_second_task_by_hand(epsilon: float, columns: int) -> None:
    """M = e1 holds 9 of the 25 of R = (3, 4)', a share of 0.36; the rest is 4 e2."""
    identity = torch.eye(3, dtype=torch.float64)
    for form in both_forms(torch.tensor([[3.0], [4.0], [0.0]], dtype=torch.float64)):
        basis = grow(identity[:, :1], form, epsilon)
        torch.testing.assert_close(basis.abs(), identity[:, :columns])


def test_a_basis_grows_with_epsilon_and_holds_that_share() -> None:
    """And no fewer columns do: without the last one the share is below epsilon."""
    held = orthonormal(12, 3)
    for inputs in both_forms(draw(12, 9, seed=1)):
        total, before = draw(12, 9, seed=1).square().sum(), 3
        for epsilon in (0.2, 0.5, 0.8, 0.95, 1.0):
            basis = grow(held, inputs, epsilon)
            share = (basis.T @ draw(12, 9, seed=1)).square().sum() / total
            assert share >= epsilon - 1e-12 and basis.shape[1] >= before
            if basis.shape[1] > 3:
                fewer = (basis[:, :-1].T @ draw(12, 9, seed=1)).square().sum() / total
                assert fewer < epsilon
            before = basis.shape[1]
        assert before == 12


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_inputs_without_a_direction_add_nothing(value: float) -> None:
    basis = orthonormal(5, 2)
    for shape in ((5, 1), (5, 5)):
        inputs = torch.full(shape, value, dtype=torch.float64)
        assert torch.equal(grow(basis, inputs, 1.0), basis)


def test_columns_stay_orthonormal_over_ten_tasks_in_float32() -> None:
    """Inputs that repeat add no direction of rounding noise, and a full basis stays full."""
    basis = torch.zeros(30, 0)
    for task in range(10):
        inputs = draw(30, 4, seed=task % 8)
        basis = grow(basis.double(), inputs, 1.0).float()
        assert basis.shape[1] == min(30, 4 * min(task + 1, 8))
        identity = torch.eye(basis.shape[1])
        torch.testing.assert_close(basis.T @ basis, identity, rtol=0, atol=1e-6)


# --- projection


def test_a_component_is_idempotent_and_depends_on_the_space_alone() -> None:
    layers, vector = one_layer(3, 8), draw(24)
    basis = orthonormal(8, 4)
    inside = component(vector, layers, {"all": basis})
    again = component(inside, layers, {"all": basis})
    torch.testing.assert_close(again, inside, rtol=0, atol=1e-14)
    turned = component(vector, layers, {"all": basis @ orthonormal(4, 4, seed=1)})
    torch.testing.assert_close(turned, inside, rtol=0, atol=1e-14)
    assert float((vector - inside) @ inside) == pytest.approx(0, abs=1e-13)
    assert share_inside(vector, layers, {"all": basis}) == pytest.approx(
        float(inside.norm() / vector.norm())
    )


def test_weights_of_columns_by_definition() -> None:
    """sum_i w_i (G m_i) m_i'; where no layer has a column it is `others`."""
    layers, g, basis = one_layer(3, 8), draw(24), orthonormal(8, 4)
    weights = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    expected = sum(
        w * torch.outer(g.view(3, 8) @ m, m) for w, m in zip(weights, basis.T, strict=True)
    )
    found = component(g, layers, {"all": basis}, {"all": weights}, others=g)
    torch.testing.assert_close(found, expected.flatten(), rtol=0, atol=1e-14)
    assert torch.equal(component(g, layers, {"all": basis[:, :0]}, others=g), g)
    assert not component(g, layers, {"all": basis[:, :0]}).any()


def test_gradients_of_inputs_in_the_space_vanish() -> None:
    """The gradient is sum_i delta_i x_i' with x_i in span(M); a full basis leaves nothing."""
    layers, basis = one_layer(3, 8), orthonormal(8, 4)
    g = (draw(3, 5, seed=1) @ (basis @ draw(4, 5, seed=2)).T).flatten()
    left = g - component(g, layers, {"all": basis})
    torch.testing.assert_close(left, torch.zeros(24).double(), rtol=0, atol=1e-13)
    any_, full = draw(24, seed=3), orthonormal(8, 8)
    left = any_ - component(any_, layers, {"all": full})
    torch.testing.assert_close(left, torch.zeros(24).double(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("epsilon", [0.5, 0.8, 0.95])
def test_past_outputs_move_by_no_more_than_the_bound(epsilon: float) -> None:
    """For D M = 0: |D R| = |D (R - M M' R)| <= |D|_2 sqrt(1 - epsilon) |R|, in Frobenius norms."""
    layers, inputs = one_layer(3, 8), draw(8, 6) * torch.logspace(0, -2, 6).double()
    basis = grow(torch.zeros(8, 0).double(), inputs, epsilon)
    d = draw(24, seed=1)
    d = (d - component(d, layers, {"all": basis})).view(3, 8)
    moved = (d @ inputs).norm()
    bound = torch.linalg.matrix_norm(d, 2) * (1 - epsilon) ** 0.5 * inputs.norm()
    assert 0 < moved <= bound


def test_the_drift_of_an_average_by_hand() -> None:
    """W = (0, 0, 0, 0), M_1 = e1, M_2 = e2, gradient (1, 1, 1, 1) at both, learning rate 1:
    updates (0, -1, -1, -1) and (-1, 0, -1, -1), mean (-.5, -.5, -1, -1), whose length is
    sqrt(2.5), of which .5 is in either client's direction. With equal bases it is 0."""
    layers, identity, g = one_layer(1, 4), torch.eye(4), torch.ones(4)
    bases = [{"all": identity[:, :1]}, {"all": identity[:, 1:2]}]
    updates = [component(g, layers, basis) - g for basis in bases]
    mean = (updates[0] + updates[1]) / 2
    assert mean.tolist() == [-0.5, -0.5, -1, -1]
    for basis in bases:
        assert share_inside(mean, layers, basis) == pytest.approx(0.5 / np.sqrt(2.5))
    assert share_inside(updates[0], layers, bases[0]) == 0


def test_a_step_with_weight_decay_is_what_is_projected() -> None:
    work: Workspace = small.worker(tiny(training={"weight_decay": 0.5})).work
    work.model.gradients.fill_(1)
    expected = 1 + 0.5 * work.model.parameters
    torch.testing.assert_close(subspaces.descent_direction(work), expected)
    assert (work.model.gradients == 1).all()
