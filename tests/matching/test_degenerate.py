"""Matching of opposite, dependent and hugely unequal gradients, against an independent solver.

In all tests g are the gradients [K, P], g0 their mean and d the direction with its free length.
A product <g_i, d> is at most |g_i| |d| <= (1 + kappa) |g0| max_i |g_i|: the unit of products.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

from stamp_core.matching import match as matching_module
from stamp_core.matching import simplex
from stamp_core.matching.gram import gram, products_with_sums
from stamp_core.matching.match import MatchingParams, MatchResult, match, match_gram
from stamp_core.matching.simplex import Optimum, Problem, solve

Array = NDArray[np.float64]
Draw = np.random.Generator
FREE = MatchingParams(length="free")
ROUNDING = 1e-7  # of d in float32, and of what double precision tells of nearly opposite gradients


def independent(draw: Draw, g: Array, noise: float) -> Array:
    """As drawn: half of the instances have a common part."""
    return g


def opposite(draw: Draw, g: Array, noise: float) -> Array:
    one, other = draw.choice(len(g), 2, replace=False)
    scale = np.exp(draw.standard_normal())
    g[one] = -scale * g[other] + noise * draw.standard_normal(g.shape[1])
    return g


def duplicate(draw: Draw, g: Array, noise: float) -> Array:
    return g[draw.integers(0, 2, len(g))] + noise * draw.standard_normal(g.shape)


def nearly_collinear(draw: Draw, g: Array, noise: float) -> Array:
    """All gradients are on one line, some of them in the other direction, up to noise."""
    scales = draw.choice([-1, 1, 1], (len(g), 1)) * np.exp(draw.standard_normal((len(g), 1)))
    return scales * g[0] + noise * draw.standard_normal(g.shape)


def rank_deficient(draw: Draw, g: Array, noise: float) -> Array:
    rank = draw.integers(1, len(g))
    low = draw.standard_normal((len(g), rank)) @ draw.standard_normal((rank, g.shape[1]))
    return low + noise * draw.standard_normal(g.shape)


def unequal(draw: Draw, g: Array, noise: float) -> Array:
    """Norms between 1e-7 and 1 of the longest."""
    return 10.0 ** draw.uniform(-7, 0, (len(g), 1)) * g


def cancelling(draw: Draw, g: Array, noise: float) -> Array:
    g[-1] = -g[:-1].sum(0) + max(noise, 1e-5) * draw.standard_normal(g.shape[1])
    return g


KINDS = (independent, opposite, duplicate, nearly_collinear, rank_deficient, unequal, cancelling)
FAMILIES: dict[str, Callable[[Draw, Array, float], Array]] = {each.__name__: each for each in KINDS}
Instance = tuple[str, torch.dtype, int, int, float, float, int]
instances = st.tuples(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(2, 10),
    st.sampled_from([3, 10, 300]),
    st.sampled_from([0.0, 1e-9, 1e-7, 1e-6, 1e-5, 1e-3]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0, 1.5, 3.0]),
    st.integers(0, 10**6),
)


def matched(instance: Instance) -> tuple[Array, float, Array, MatchResult]:
    """g and d in float64, kappa and the result."""
    family, dtype, count, width, noise, kappa, seed = instance
    draw = np.random.default_rng(seed)
    g = draw.standard_normal((count, width)) + draw.integers(0, 2) * draw.standard_normal(width)
    gradients = torch.tensor(FAMILIES[family](draw, g, noise), dtype=dtype)
    d, result = match(gradients, replace(FREE, kappa=kappa))
    return gradients.double().numpy(), kappa, d.double().numpy(), result


def dual(g: Array, kappa: float, w: Array) -> float:
    """F(w), which no min_i <g_i, x> exceeds for x in the ball."""
    g0, combined = g.mean(0), w @ g
    return float(combined @ g0 + kappa * np.linalg.norm(g0) * np.linalg.norm(combined))


def unit_of_products(g: Array, kappa: float) -> float:
    """The bound of all <g_i, x> for x in the ball."""
    longest = np.linalg.norm(g, axis=1).max()
    return float((1 + kappa) * np.linalg.norm(g.mean(0)) * longest)


def slsqp(g: Array, kappa: float) -> float:
    """The largest min_i <g_i, x> over the ball that SLSQP finds: over t and the point in the ball.

    In coordinates of the span of g. A point outside the ball is pulled back into it.
    """
    rows = np.linalg.qr(g.T, mode="r").T  # [K, k]
    g0 = rows.mean(0)
    radius = kappa * float(np.linalg.norm(g0))
    scale = float(np.linalg.norm(rows, axis=1).max())
    rows, base = rows / scale, rows @ g0 / (scale * radius)
    down = np.append(np.zeros(len(g0)), -1.0)
    constraints: Any = (
        {
            "type": "ineq",
            "fun": lambda x: base + rows @ x[:-1] - x[-1],
            "jac": lambda x: np.column_stack([rows, -np.ones(len(rows))]),
        },
        {
            "type": "ineq",
            "fun": lambda x: 1 - x[:-1] @ x[:-1],
            "jac": lambda x: np.append(-2 * x[:-1], 0.0),
        },
    )
    best = -np.inf
    for point in (np.zeros(len(g0)), g0 * kappa / radius):
        start = np.append(point, (base + rows @ point).min())
        found = minimize(
            lambda x: -x[-1],
            start,
            jac=lambda x: down,
            method="SLSQP",
            constraints=constraints,
            options={"ftol": 1e-15, "maxiter": 500},
        )
        point = found.x[:-1] / max(1.0, float(np.linalg.norm(found.x[:-1])))
        best = max(best, float((base + rows @ point).min()))
    return best * scale * radius


@settings(deadline=None, max_examples=400, derandomize=True)
@given(instances)
def test_d_is_in_the_ball_and_as_good_as_that_of_an_independent_solver(instance):
    """The recorded gap bounds the distance to the optimum, up to the rounding of d.

    F(w), min_i <g_i, d> and the gap are recorded with inner products of the gradients themselves:
    a Gram matrix would leave 1e-8 of |g_w|.
    """
    g, kappa, d, result = matched(instance)
    g0, unit = g.mean(0), unit_of_products(g, kappa)
    rho = float(np.linalg.norm(g0))
    if result.status == "reference is zero":
        assert rho <= 1e-7 * np.linalg.norm(g, axis=1).mean() and np.allclose(d, g0)
        return
    assert np.linalg.norm(d - g0) <= kappa * rho * (1 + 1e-6)
    best, worst = slsqp(g, kappa), float((g @ d).min())
    assert worst >= best - ROUNDING * unit
    assert best <= worst + result.gap * rho**2 + ROUNDING * unit
    assert result.gap * rho**2 <= ROUNDING * unit and "not solved" not in result.status
    rounding = 1e-14 * float((g**2).sum())
    value = dual(g, kappa, result.weights[0].numpy())
    assert result.value * rho**2 == pytest.approx(value, abs=rounding)
    assert result.worst_product * rho**2 == pytest.approx(worst, abs=ROUNDING * unit)
    difference = max(result.value - result.worst_product, 0.0)
    assert result.gap == pytest.approx(difference, abs=rounding / rho**2)


@pytest.mark.parametrize("seed", range(20))
def test_a_wrong_solution_is_pulled_back_and_noticed(seed, monkeypatch):
    """The certificate comes from the gradients and not from the solver: of weights e_1 and a shift
    three times too long, the gap is that of the shift in the ball."""

    def too_far(problem: Problem) -> Optimum:
        return replace(solve(problem), weights=np.eye(4)[0], shift=3 * solve(problem).shift)

    g = np.random.default_rng(seed).standard_normal((4, 30))
    right, _ = match(torch.tensor(g), FREE)
    monkeypatch.setattr(matching_module, "solve", too_far)
    d, result = match(torch.tensor(g), FREE)
    torch.testing.assert_close(d, right, rtol=0, atol=1e-9)  # three times the optimum, pulled back
    square = float(g.mean(0) @ g.mean(0))
    gap = dual(g, 0.5, np.eye(4)[0]) - float((g @ d.numpy()).min())
    assert result.gap * square == pytest.approx(gap, rel=1e-9) and result.gap > 0.01
    assert result.status == "not solved to the end"


def test_without_a_solution_d_is_g0_and_the_gap_that_of_uniform_weights(monkeypatch):
    """Too many iterations are an event of the round, not the end of the training."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(simplex, "least_distance", fails)
    g = np.random.default_rng(0).standard_normal((4, 30))
    d, result = match(torch.tensor(g), FREE)
    np.testing.assert_allclose(d, g.mean(0), rtol=0, atol=1e-15)
    gap = dual(g, 0.5, np.full(4, 0.25)) - float((g @ g.mean(0)).min())
    assert result.gap * float(g.mean(0) @ g.mean(0)) == pytest.approx(gap)
    assert result.status == "not solved to the end"


def test_where_g0_is_the_optimum_nothing_is_added():
    """e_1, -e_1 and e_2: g0 = e_2 / 3 is in conflict with none, and no d has all products above 0.
    The multipliers of the solver's path are 0 and say nothing about the weights."""
    d, result = match(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]), FREE)
    torch.testing.assert_close(d, torch.tensor([0, 1 / 3]), rtol=0, atol=1e-7)
    assert result.weights.tolist() == [pytest.approx([0.5, 0.5, 0], abs=1e-9)]


def test_an_orthonormal_basis_tells_nearly_opposite_gradients_apart():
    """e_1 and -e_1 + 1e-5 e_2: F is least at w = (1/2, 1/2), so d = (1 + kappa) g0 = 7.5e-6 e_2.
    In the Gram matrix alone, |2 g0|^2 = 1e-10 has a rounding of 1e-16."""
    g = torch.tensor([[1.0, 0.0], [-1.0, 1e-5]], dtype=torch.float64)
    d, result = match(g, FREE)
    alone = match_gram(gram(g), FREE).coefficients[0] @ g
    expected = torch.tensor([0.0, 7.5e-6], dtype=torch.float64)
    errors = [float((each - expected).norm() / expected.norm()) for each in (d, alone)]
    assert errors[0] < 2e-5 < 5e-5 < errors[1] and result.status == "exact"


def exact_gap(gradients: torch.Tensor, kappa: float, result: MatchResult) -> tuple[float, float]:
    """F(w) - min_i <g_i, d> and |d - g0| / |g0| in long double, both relative to |g0|."""
    g = gradients.double().numpy().astype(np.longdouble)
    g0 = g.mean(0)
    d = result.coefficients[0].numpy().astype(np.longdouble) @ g
    combined = result.weights[0].numpy().astype(np.longdouble) @ g
    square = g0 @ g0
    value = combined @ g0 + kappa * np.sqrt(square * (combined @ combined))
    away = np.sqrt((d - g0) @ (d - g0) / square)
    return float((value - (g @ d).min()) / square), float(away)


def counted_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    passes: list[int] = []

    def counting(*args: Any) -> torch.Tensor:
        passes.append(len(passes))
        return products_with_sums(*args)

    monkeypatch.setattr(matching_module, "products_with_sums", counting)
    monkeypatch.setattr(matching_module, "_LARGE", 0)
    return passes


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("solver", ["exact", "softmax_sgd"])
def test_what_the_gram_matrix_certifies_is_true(family, solver, monkeypatch):
    """The gap holds whatever rounding did to the Gram matrix; what it cannot certify is measured on
    the gradients, with the same result as for small ones."""
    certified = 0
    draw = np.random.default_rng(len(family))
    for _ in range(60):
        g = draw.standard_normal((draw.integers(2, 11), 300))
        g += draw.integers(0, 2) * draw.standard_normal(300)
        noise = float(draw.choice([0.0, 1e-9, 1e-7, 1e-5, 1e-3]))
        dtype = [torch.float32, torch.float64][draw.integers(2)]
        gradients = torch.tensor(FAMILIES[family](draw, g, noise), dtype=dtype)
        kappa = float(draw.choice([0.0, 0.5, 0.9, 1.5]))
        matching = replace(FREE, kappa=kappa, solver=solver)
        measured = match(gradients, matching)[1]
        with monkeypatch.context() as patch:
            passes = counted_passes(patch)
            result = match(gradients, matching)[1]
        if passes:
            assert len(passes) <= 2  # nearly opposite gradients need an orthonormal basis
            torch.testing.assert_close(result.coefficients, measured.coefficients, rtol=0, atol=0)
            assert result.gap == measured.gap
            continue
        certified += 1
        gap, away = exact_gap(gradients, kappa, result)
        if solver == "exact":
            assert gap <= result.gap <= 1e-8 and away <= kappa * (1 + 1e-8) + 1e-15
        assert result.status == measured.status
        for name in ("value", "worst_product", "worst_product_reference", "length", "cosine"):
            assert getattr(result, name) == pytest.approx(getattr(measured, name), abs=1e-8)
        assert measured.gap <= result.gap <= measured.gap + 1e-8
    least, most = {"independent": (40, 60), "cancelling": (0, 0)}.get(family, (4, 60))
    assert least <= certified <= most
