"""Gradient matching: properties that hold for all gradients, closed forms and degenerate cases.

In all tests g are the gradients [K, P] and g0 is the reference [P].
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import normal
from torch import Tensor

from stamp_core.config.decode import ParameterError
from stamp_core.matching.gram import gram
from stamp_core.matching.match import MatchingParams, MatchResult, match, match_gram

quick = settings(deadline=None, max_examples=40, derandomize=True)
FREE = MatchingParams(length="free")
KAPPAS = (0.05, 0.25, 0.5, 0.9, 1.0, 2.0)
PARETO_STATUS = "pareto: projected on the cone"


FAMILIES: dict[str, Callable[[int, int, int], Tensor]] = {
    "independent": lambda k, d, s: normal(k, d, seed=s),
    "a common part": lambda k, d, s: normal(k, d, seed=s) + normal(d, seed=s + 1),
    "cosine 0.99": lambda k, d, s: normal(k, d, seed=s) + 10 * normal(d, seed=s + 1),
    "log-normal norms": lambda k, d, s: (
        (normal(k, d, seed=s) + normal(d, seed=s + 1)) * normal(k, 1, seed=s + 2).exp()
    ),
    "rank 5": lambda k, d, s: (normal(k, 5, seed=s) + 1) @ normal(5, d, seed=s + 1),
    "two opposite groups": lambda k, d, s: (
        normal(d, seed=s + 1) * (torch.arange(k) % 3 - 0.8).sign()[:, None]
        + normal(k, d, seed=s) / 2
    ),
}
Instance = tuple[str, int, int, int]
instances = st.tuples(
    st.sampled_from(sorted(FAMILIES)), st.integers(2, 9), st.integers(3, 40), st.integers(0, 10**6)
)
any_kappa = st.sampled_from([0.0, *KAPPAS])
any_reference = st.sampled_from(["mean", "current", "weighted"])


def drawn(instance: Instance) -> tuple[Tensor, Tensor]:
    """The gradients of an instance at some scale, and weights for the reference "weighted"."""
    family, count, width, seed = instance
    scale = 10.0 ** (seed % 7 - 3)
    return scale * FAMILIES[family](count, width, seed), normal(count, seed=seed).abs()


def reference_of(g: Tensor, name: str, weights: Tensor) -> Tensor:
    """g0 by its definition."""
    if name == "weighted":
        return (weights[:, None] * g).sum(0) / weights.sum()
    if name == "mean" or len(g) == 1:
        return g.mean(0)
    return g[-1]


def matched(
    instance: Instance, kappa: float, reference: Any, **changes: Any
) -> tuple[Tensor, Tensor, Tensor, MatchResult]:
    """g, g0, d and the result, d without a length of its own."""
    g, weights = drawn(instance)
    matching = replace(FREE, kappa=kappa, reference=reference, **changes)
    return g, reference_of(g, reference, weights), *match(g, matching, weights)


def dual(g: Tensor, g0: Tensor, kappa: float, w: Tensor) -> float:
    """F(w) from the gradients."""
    return float(w @ g @ g0 + kappa * g0.norm() * (w @ g).norm())


def close(one: Tensor, other: Tensor, tolerance: float = 1e-6) -> bool:
    return float((one - other).norm()) <= tolerance * max(float(other.norm()), 1e-300)


def finite(result: MatchResult) -> bool:
    numbers = [value for value in vars(result).values() if isinstance(value, float)]
    tensors = torch.isfinite(result.coefficients).all() and torch.isfinite(result.weights).all()
    return bool(np.isfinite(numbers).all() and tensors)


@quick
@given(instances, any_kappa, any_reference)
def test_the_duality_gap_certifies_the_result(instance, kappa, reference):
    """w.grad F = F and grad_i F = <g_i, d(w)>, so F(w) - min_i <g_i, d(w)> >= 0 bounds the distance
    to the optimum: d(w) is feasible in the maximum that F(w) bounds."""
    g, g0, d, result = matched(instance, kappa, reference)
    square = float(g0 @ g0)
    assert result.gap <= 1e-8 and result.status in ("exact", PARETO_STATUS)
    assert float((g @ d).min()) == pytest.approx(result.worst_product * square, abs=1e-7 * square)
    slack = 2e-8 + 2e-7 * (result.status == PARETO_STATUS)
    assert result.worst_product == pytest.approx(result.value, abs=slack)
    worst_reference = result.worst_product_reference * square
    assert float((g @ g0).min()) == pytest.approx(worst_reference, rel=1e-6)
    assert float(d.norm()) == pytest.approx(result.length * square**0.5, rel=1e-6, abs=1e-9)
    if result.status == "exact":
        w = result.weights[0]
        assert dual(g, g0, kappa, w) == pytest.approx(result.value * square, abs=1e-7 * square)
        assert float(w.sum()) == pytest.approx(1) and w.min() >= 0
        assert result.entropy == pytest.approx(float(torch.special.entr(w).sum()), abs=1e-9)
        assert result.support == int((w > 1e-6).sum())


@quick
@given(instances, any_kappa, any_reference)
def test_d_lies_on_the_ball(instance, kappa, reference):
    _, g0, d, result = matched(instance, kappa, reference)
    rho, away = float(g0.norm()), float((d - g0).norm())
    if result.status != "exact":
        assert away <= kappa * rho * (1 + 1e-7)
        return
    assert away == pytest.approx(kappa * rho, rel=1e-6, abs=1e-9 * rho)
    if kappa < 1:
        assert result.cosine == pytest.approx(float(d @ g0 / d.norm() / rho), abs=1e-6)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("count", [2, 5, 25, 300])
def test_every_size_is_solved(family, count):
    a = gram(FAMILIES[family](count, 700, count))
    for kappa in KAPPAS:
        result = match_gram(a, MatchingParams(kappa=kappa))
        assert result.status in ("exact", PARETO_STATUS), kappa
        assert result.gap <= 1e-8, (kappa, result.gap)
        assert result.worst_product >= result.worst_product_reference
    if count <= 10:
        assert match_gram(a, MatchingParams()).iterations <= 2 * count


def test_the_solver_leaves_a_start_at_the_kink():
    """Uniform weights of (g, -g, ..) with the last one as g0 are g_w = 0, where F has a kink: but
    F(e_1) = -|g|^2 + kappa |g|^2 < 0 is less. In two dimensions d = g0 - kappa |g0| g0 / |g0|."""
    g = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    for some in (g[:2], g):
        d, result = match(some, replace(FREE, reference="current"))
        assert result.status == "exact" and result.gap <= 1e-8
        assert close(d, some[-1] / 2) and result.value == pytest.approx(-0.5)


@quick
@given(st.integers(0, 10**6), any_kappa, any_reference)
def test_one_gradient(seed, kappa, reference):
    """d = (1 + kappa) g."""
    g = normal(1, 7, seed=seed)
    d, result = match(g, replace(FREE, kappa=kappa, reference=reference), torch.ones(1))
    assert close(d, (1 + kappa) * g[0]) and result.status == "one gradient"
    assert result.weights.tolist() == [[1.0]] and result.value == pytest.approx(1 + kappa)


@quick
@given(instances, st.sampled_from(KAPPAS), st.sampled_from(["none", "mean", "current"]))
def test_lengths_share_one_direction(instance, kappa, normalise):
    """ "current" is the norm of the last gradient before normalisation."""
    g, _ = drawn(instance)
    current = float(g[-1].norm())
    matching = MatchingParams(kappa=kappa, length="free", normalise=normalise)
    free, result = match(g, matching)
    if float(free.norm()) < 1e-4 * current:  # d = 0 has no direction
        return
    rho = float(free.norm()) / result.length
    for name, length in {
        "1+kappa": float(free.norm()) / (1 + kappa),
        "1+kappa^2": float(free.norm()) / (1 + kappa**2),
        "reference": rho,
        "current": current,
    }.items():
        d, other = match(g, replace(matching, length=name))
        assert float(d.norm()) == pytest.approx(length, rel=1e-6), name
        assert close(d / length, free / free.norm(), 1e-6)
        assert other.length * rho == pytest.approx(length, rel=1e-6)
        assert other.worst_product == result.worst_product


def test_invalid_arguments_are_refused():
    g, weighted = torch.eye(3), MatchingParams(reference="weighted")
    for weights in (None, torch.ones(2), torch.zeros(3), torch.tensor([1.0, -1.0, 1.0])):
        with pytest.raises(ParameterError, match="weights is"):
            match(g, weighted, weights)
    with pytest.raises(ParameterError, match="sizes is None"):
        match(g, MatchingParams(blocks="layers"))
    with pytest.raises(ParameterError, match="3 elements in all"):
        match(g, MatchingParams(blocks="layers"), sizes=[1, 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("blocks", ["model", "layers"])
@pytest.mark.parametrize("listed", [False, True])
def test_gradients_that_are_not_finite_are_dropped(bad, blocks, listed):
    """1e30 is finite in float32, but its square is not."""
    g, weights = normal(5, 30).float(), torch.arange(1.0, 6)
    g[1, 3], g[3, 20] = bad, bad
    others = [0, 2, 4]
    for matching in (
        MatchingParams(blocks=blocks, reference="weighted", normalise="mean"),
        MatchingParams(blocks=blocks, reference="current", normalise="current"),
    ):
        d, result = match(list(g) if listed else g, matching, weights, sizes=[10, 20])
        expected, _ = match(g[others], matching, weights[others], sizes=[10, 20])
        assert close(d, expected, 1e-6) and result.dropped == 2 and finite(result)
        assert not result.coefficients[:, [1, 3]].any()


@pytest.mark.parametrize("blocks", ["model", "layers"])
@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_without_a_usable_gradient_d_is_zero(blocks, value):
    d, result = match(torch.full((3, 30), value), MatchingParams(blocks=blocks), sizes=[10, 20])
    assert not d.any() and result.status == "no usable gradient" and result.dropped == 3
    assert finite(result)


@pytest.mark.parametrize(
    "change", [{"reference": "current"}, {"length": "current"}, {"normalise": "current"}]
)
def test_without_the_current_gradient_what_needs_it_is_zero(change):
    g = normal(3, 30)
    g[-1, 0] = float("nan")
    d, result = match(g, MatchingParams(**change))
    assert not d.any() and finite(result)
    assert result.status == "the current gradient is not finite"
    assert match(g, MatchingParams())[1].status == "exact"


def test_tiny_gradients_are_in_the_reference_only():
    """d = g0 + kappa rho g_w / |g_w| with g_w from the first two, g0 from all three."""
    g = normal(3, 30)
    for share in (0.0, 1e-9, 1e-12):
        g[2] = normal(30, seed=9)
        g[2] *= share * g[:2].norm(dim=1).max() / g[2].norm()
        d, result = match(g, FREE)
        assert result.dropped == 1 and result.weights[0, 2] == 0 and result.status == "exact"
        assert close(d, match(g[:2], FREE)[0] * 2 / 3, 1e-6)
    g[2] = 1e-6 * normal(30, seed=9)
    assert match(g, FREE)[1].dropped == 0


@pytest.mark.parametrize("changes", [{}, {"length": "current"}], ids=str)
def test_where_the_reference_is_zero_d_is_the_reference(changes):
    """g - g = 0 leaves no ball; three gradients that add up to 0 leave rounding."""
    one, two = normal(1, 30), normal(2, 30).float()
    for g in (torch.cat([one, -one]), torch.cat([two, -two.sum(0, keepdim=True)])):
        d, result = match(g.double(), MatchingParams(**changes))
        assert result.status == "reference is zero" and finite(result)
        assert d.norm() <= 1e-6 * g.norm()
    g = torch.cat([normal(2, 30), torch.zeros(1, 30)])
    d, result = match(g, MatchingParams(reference="current", **changes))
    assert result.status == "reference is zero" and not d.any()


PARETO = {
    "0 between opposite gradients": torch.tensor([[1.0, 0], [-1, 0], [0, 1]]),
    "0 inside the hull": torch.tensor([[1.0, 0.2], [-1, 0.2], [0, 1], [0.1, -1]]),
    "more gradients than dimensions": normal(40, 3).float(),
}


@pytest.mark.parametrize("name", sorted(PARETO))
@pytest.mark.parametrize("kappa", [1.5, 2.0, 5.0])
def test_where_0_is_in_the_hull_g0_is_projected_on_the_cone(name, kappa):
    """F* = 0 at g_w = 0, which has no direction. p = proj g0 solves min |p - g0|, <g_i, p> >= 0, so
    p and p - g0 are orthogonal (the cone's Moreau decomposition), and p - g0 = G'v with v >= 0."""
    g = PARETO[name].double()
    d, result = match(g, replace(FREE, kappa=kappa))
    assert result.status == PARETO_STATUS and finite(result)
    assert (g @ d >= -1e-8).all() and abs(float(d @ (d - g.mean(0)))) <= 1e-8
    assert (result.coefficients[0] >= 1 / len(g) - 1e-9).all()
    assert result.gap <= 1e-8 and result.value == pytest.approx(0, abs=1e-12)
    assert torch.isfinite(match(g, MatchingParams(kappa=kappa))[0]).all()


@quick
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e-9, 1e4, 3.0]), min_size=3, max_size=3),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([0.0, *KAPPAS, 100.0]),
    st.sampled_from(["mean", "current"]),
    st.sampled_from(["model", "layers"]),
    st.sampled_from(["none", "mean", "current"]),
    st.sampled_from(["free", "1+kappa", "reference", "current"]),
    st.booleans(),
)
def test_no_result_is_nan(values, kappa, reference, blocks, normalise, length, authors):
    """Few values, so that gradients are equal, opposite, dependent or 0."""
    solver = "softmax_sgd" if authors else "exact"
    matching = MatchingParams(kappa, reference, length, normalise, blocks, solver)
    d, result = match(torch.tensor(values), matching, sizes=[1, 2])
    assert torch.isfinite(d).all() and finite(result)
    assert "not solved" not in result.status


def test_the_direction_of_gradients_in_bfloat16_is_in_float32():
    g, matching = normal(4, 5000).bfloat16(), MatchingParams()
    d, _ = match(g, matching)
    assert d.dtype == torch.float32
    assert close(d.double(), match(g.double(), matching)[0], 1e-5)


@pytest.mark.parametrize("solver", ["exact", "softmax_sgd"])
@quick
@given(st.sampled_from(sorted(FAMILIES)), st.integers(2, 6), st.integers(0, 999), any_kappa)
def test_layers_are_separate_problems(solver, family, count, seed, kappa):
    """Each has its own ball and worst-served gradient; the record is of their sum."""
    sizes, matching = [7, 1, 22], replace(FREE, kappa=kappa, solver=solver)
    g = FAMILIES[family](count, sum(sizes), seed)
    d, own = match(g, replace(matching, blocks="layers"), sizes=sizes)
    parts = g.split(sizes, 1)
    alone = [match(part, matching) for part in parts]
    assert close(d, torch.cat([direction for direction, _ in alone]))
    square = float(g.mean(0) @ g.mean(0))
    values = [
        r.value * float(p.mean(0) @ p.mean(0)) for p, (_, r) in zip(parts, alone, strict=True)
    ]
    assert own.value * square == pytest.approx(sum(values), abs=1e-6 * square)
    assert own.worst_product * square == pytest.approx(float((g @ d).min()), abs=1e-6 * square)
    assert own.weights.shape == own.coefficients.shape == (3, count)
    if solver == "exact":
        assert own.gap <= 1e-7
    else:
        assert own.status == solver and own.iterations == 3 * matching.softmax.rounds
