"""Projections on all kinds of gradients: no conflict is left, and the nearest vector is found."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stamp_core.matching.gram import Difference
from workbench.methods.base.gradient_projection import (
    NOT_FINITE,
    NOT_SOLVED,
    RESIDUAL,
    Projection,
    project_gradient,
)

quick = settings(deadline=None, max_examples=60, derandomize=True)

FAMILIES = "independent", "equal", "opposite", "nearly opposite", "rank 3", "some zero", "all norms"
instances = st.tuples(
    st.sampled_from(FAMILIES),
    st.integers(1, 50),
    st.sampled_from([2, 10, 60, 5000]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 10**6),
)
Instance = tuple[str, int, int, torch.dtype, int]


def drawn(instance: Instance) -> tuple[Tensor, Tensor]:
    """The gradients of a family [K, P] and a vector [P]."""
    family, count, width, dtype, seed = instance
    draw = np.random.default_rng(seed)
    gradients = draw.standard_normal((count, width))
    if family in ("equal", "opposite", "nearly opposite"):
        gradients = gradients[draw.integers(0, (count + 1) // 2, count)]
    if "opposite" in family:
        gradients *= draw.choice([-1, 1], (count, 1))
    if family == "nearly opposite":
        gradients += 1e-3 * draw.standard_normal(gradients.shape)
    if family == "rank 3":
        gradients = draw.standard_normal((count, 3)) @ draw.standard_normal((3, width))
    if family == "some zero":
        gradients *= draw.integers(0, 2, (count, 1))
    if family == "all norms":
        gradients *= np.exp(5 * draw.standard_normal((count, 1)))
    vector = draw.standard_normal(width)
    return torch.tensor(gradients, dtype=dtype), torch.tensor(vector, dtype=dtype)


def projected(vector: Tensor, projection: Projection) -> Tensor:
    """The projected vector in float64."""
    return vector.double() if projection.added is None else vector.double() + projection.added


def cosines(gradients: Tensor, result: Tensor, vector: Tensor) -> Tensor:
    """<g_k, result> / (|g_k| |vector|) for the gradients that are not 0."""
    norms = gradients.double().norm(dim=1)
    return (gradients.double() @ result)[norms > 0] / (norms[norms > 0] * vector.double().norm())


@quick
@given(instances)
def test_the_result_has_no_conflict_and_is_the_nearest(instance):
    """<g_k, x> >= 0 for all; x - p is a sum of gradients with v >= 0 and orthogonal to x. So for
    every other y without conflict <x - p, y> >= 0 = <x - p, x>: x is the projection of p."""
    gradients, vector = drawn(instance)
    projection = project_gradient(vector, list(gradients))
    result = projected(vector, projection)
    assert projection.troubles == ()
    least = cosines(gradients, result, vector).tolist()
    assert min(least, default=0.0) >= -2 * RESIDUAL
    assert result.norm() <= vector.double().norm() * (1 + RESIDUAL)  # a projection is never longer
    if projection.added is not None:
        square = float(vector.double() @ vector.double())
        assert abs(float(projection.added @ result)) <= 1e-4 * square
    else:
        assert min(cosines(gradients, vector.double(), vector).tolist(), default=0.0) >= -1e-12


def test_without_a_conflict_nothing_is_added():
    """Also to the vector itself, twice, and to zeros, as in GradMA's first step."""
    vector = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for gradients in ([], [vector, vector, torch.zeros(100)], [torch.zeros(100)]):
        assert project_gradient(vector, gradients) == Projection(None)
    assert project_gradient(torch.zeros(100), [vector, -vector]).added is None
    assert project_gradient(vector, [vector], margin=0.5).added is None


def nearly_dependent(seed: int) -> tuple[list[Tensor], Tensor]:
    draw = np.random.default_rng(seed)
    count, width = int(draw.integers(2, 11)), int(draw.choice([3, 10, 300]))
    basis = draw.standard_normal((int(draw.integers(1, 3)), width))
    scales = draw.choice([-1, 1], (count, 1)) * np.exp(draw.standard_normal((count, 1)))
    gradients = scales * basis[draw.integers(0, len(basis), count)]
    gradients += draw.choice([0.0, 1e-9, 1e-7, 1e-6, 1e-5]) * draw.standard_normal((count, width))
    dtype = [torch.float32, torch.float64][draw.integers(2)]
    vector = torch.tensor(draw.standard_normal(width), dtype=dtype)
    return list(torch.tensor(gradients, dtype=dtype)), vector


def test_the_projection_on_nearly_dependent_gradients_is_accurate_or_refused():
    """x - p is orthogonal to x, which the products alone do not show if multipliers of 1e7 cancel.
    A Gram matrix is too coarse for some gradients that differ by 1e-6 to 1e-5 of their norm."""
    refused = 0
    for seed in range(400):
        gradients, vector = nearly_dependent(seed)
        projection = project_gradient(vector, gradients)
        if projection.troubles:
            assert projection == Projection(None, (NOT_SOLVED,))
            refused += 1
            continue
        result, square = projected(vector, projection), float(vector.double() @ vector.double())
        assert cosines(torch.stack(gradients), result, vector).min() >= -2 * RESIDUAL, seed
        assert abs(float((result - vector.double()) @ result)) <= 1e-5 * square, seed
    assert refused <= 50


def test_contradictory_constraints_are_reported():
    """No x has <g, x> > 0 and <-g, x> > 0."""
    gradient, vector = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    projection = project_gradient(vector, [gradient, -gradient], rho=0.5)
    assert projection.added is None and projection.troubles == (NOT_SOLVED,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_values_that_are_not_finite_are_reported(bad):
    gradient, vector = torch.tensor([[-1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    wrong = torch.tensor([bad, 0.0], dtype=torch.float64)
    for projection in (
        project_gradient(vector, [gradient, wrong]),
        project_gradient(wrong, [gradient]),
    ):
        assert projection.added is None and projection.troubles == (NOT_FINITE,)
    assert project_gradient(vector, [gradient]).added is not None


def test_blocks_are_projected_separately():
    """One in conflict, one without, one not finite: only the first is changed."""
    draw = torch.Generator().manual_seed(3)
    gradient = torch.randn(9, generator=draw)
    vector = torch.cat([-gradient[:4] + 1, gradient[4:7], torch.ones(2)])
    gradient[7:] = torch.inf
    projection = project_gradient(vector, [gradient], [4, 3, 2])
    alone = project_gradient(vector[:4], [gradient[:4]])
    assert projection.troubles == (NOT_FINITE,) and projection.added is not None
    assert alone.added is not None and torch.equal(projection.added[:4], alone.added)
    assert not projection.added[4:].any() and alone.added.abs().min() > 0.01


def test_differences_are_gradients_and_arguments_are_not_changed():
    left, right, vector = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    before = left.clone(), right.clone(), vector.clone()
    sign = -1.0 if (left - right) @ vector > 0 else 1.0
    projection = project_gradient(sign * vector, [Difference(left, right)])
    other = project_gradient(sign * vector, [left - right])
    assert projection.added is not None and other.added is not None
    assert torch.equal(projection.added, other.added) and projection.added.dtype == torch.float64
    assert all(torch.equal(a, b) for a, b in zip(before, (left, right, vector), strict=True))
