"""Gradient matching: what must hold for all rows, closed forms, and every way to degenerate."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from stamp_core.config import ParameterError, build
from stamp_core.matching import (
    Matched,
    Matching,
    Sketch,
    Softmax,
    combine,
    gram,
    layers,
    match,
    solve,
)
from stamp_core.paths import ROOT
from stamp_core.rows import Difference, squares
from stamp_core.simplex import Problem, minimise

quick = settings(deadline=None, max_examples=40, derandomize=True)
FREE = Matching(length="free")
KAPPAS = (0.05, 0.25, 0.5, 0.9, 1.0, 2.0)
Array = np.ndarray


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


FAMILIES: dict[str, Callable[[int, int, int], Tensor]] = {
    "independent": lambda k, d, s: normal(k, d, seed=s),
    "a common part": lambda k, d, s: normal(k, d, seed=s) + normal(d, seed=s + 1),
    "cosine 0.99": lambda k, d, s: normal(k, d, seed=s) + 10 * normal(d, seed=s + 1),
    "log-normal lengths": lambda k, d, s: (
        (normal(k, d, seed=s) + normal(d, seed=s + 1)) * normal(k, 1, seed=s + 2).exp()
    ),
    "rank 5": lambda k, d, s: (normal(k, 5, seed=s) + 1) @ normal(5, d, seed=s + 1),
    "two opposed groups": lambda k, d, s: (
        normal(d, seed=s + 1) * (torch.arange(k) % 3 - 0.8).sign()[:, None]
        + normal(k, d, seed=s) / 2
    ),
}
instances = st.tuples(
    st.sampled_from(sorted(FAMILIES)), st.integers(2, 9), st.integers(3, 40), st.integers(0, 10**6)
)
any_kappa = st.sampled_from([0.0, *KAPPAS])
any_reference = st.sampled_from(["mean", "current", "half", "weighted"])


def rows_of(instance: tuple[str, int, int, int]) -> Tensor:
    family, count, width, seed = instance
    return FAMILIES[family](count, width, seed)


def reference_of(rows: Tensor, matching: Matching, weights: Tensor | None = None) -> Tensor:
    """g0 as its definition says, from the rows."""
    if matching.reference == "weighted":
        assert weights is not None
        return (weights[:, None] * rows).sum(0) / weights.sum()
    if matching.reference == "mean" or len(rows) == 1:
        return rows.mean(0)
    if matching.reference == "current":
        return rows[-1]
    return (rows[-1] + rows[:-1].mean(0)) / 2


def dual(rows: Tensor, reference: Tensor, kappa: float, w: Tensor) -> float:
    """F(w), from the rows."""
    g_w = w @ rows
    return float(g_w @ reference + kappa * reference.norm() * g_w.norm())


def close(one: Tensor, other: Tensor, tolerance: float = 1e-6) -> bool:
    return float((one - other).norm()) <= tolerance * max(float(other.norm()), 1e-300)


# --- what holds for every match (d before it is put to a length)


@quick
@given(instances, any_kappa, any_reference)
def test_the_certificate(instance, kappa, reference) -> None:
    """Where F has a slope, w.grad F = F and grad_i F = <g_i, d(w)>: F(w) - min_i <g_i, d(w)> >= 0
    bounds the distance to the optimum, as d(w) is allowed in the maximum that F(w) bounds."""
    rows, weights = rows_of(instance), normal(instance[1], seed=instance[3]).abs()
    matching = replace(FREE, kappa=kappa, reference=reference)
    d, found = match(rows, matching, weights)
    g0 = reference_of(rows, matching, weights)
    square = float(g0 @ g0)
    assert found.gap <= 1e-8 and found.status.split(":")[0] in ("exact", "pareto")
    assert float((rows @ d).min()) == pytest.approx(found.least * square, abs=1e-7 * square)
    assert found.least == pytest.approx(found.value, abs=2e-8 + 2e-7 * (found.status[0] == "p"))
    assert float((rows @ g0).min()) == pytest.approx(found.least_reference * square, rel=1e-6)
    assert float(d.norm()) == pytest.approx(found.length * square**0.5, rel=1e-6, abs=1e-9)
    if found.status == "exact":
        w = found.weights[0]
        assert dual(rows, g0, kappa, w) == pytest.approx(found.value * square, abs=1e-7 * square)
        assert float(w.sum()) == pytest.approx(1) and w.min() >= 0


@quick
@given(instances, any_kappa, any_reference, st.integers(0, 10**6))
def test_no_weights_are_better_and_no_direction(instance, kappa, reference, seed) -> None:
    """F* <= F(w) for any w, uniform and corners among them; min_i <g_i, x> <= F* for any x of the
    ball, g0 among them: the match is never worse for the worst row than g0."""
    rows, weights = rows_of(instance), normal(instance[1], seed=instance[3]).abs()
    matching = replace(FREE, kappa=kappa, reference=reference)
    _, found = match(rows, matching, weights)
    g0, count = reference_of(rows, matching, weights), len(rows)
    square = float(g0 @ g0)
    some = normal(count, seed=seed).abs()
    for w in [*torch.eye(count, dtype=torch.float64), torch.full_like(some, 1 / count), some]:
        assert found.value * square <= dual(rows, g0, kappa, w / w.sum()) + 1e-7 * square
    x = normal(len(g0), seed=seed)
    for inside in (g0, g0 + kappa * g0.norm() * x / x.norm()):
        assert float((rows @ inside).min()) <= (found.least + 2e-7) * square
    assert found.least >= found.least_reference - 2e-7


@quick
@given(instances, any_kappa, any_reference)
def test_d_lies_on_the_ball(instance, kappa, reference) -> None:
    """|d - g0| = kappa rho, so 2 <g0, d> = |d|^2 + (1 - kappa^2) rho^2 and |d| within
    (1 -+ kappa) rho; the angle is largest where d is tangent to the ball, sin = kappa."""
    rows, weights = rows_of(instance), normal(instance[1], seed=instance[3]).abs()
    matching = replace(FREE, kappa=kappa, reference=reference)
    d, found = match(rows, matching, weights)
    g0 = reference_of(rows, matching, weights)
    rho = float(g0.norm())
    if found.status != "exact":
        assert float((d - g0).norm()) <= kappa * rho * (1 + 1e-7)
        return
    assert float((d - g0).norm()) == pytest.approx(kappa * rho, rel=1e-6, abs=1e-9 * rho)
    both = float(d @ d) + (1 - kappa**2) * rho**2
    assert 2 * float(g0 @ d) == pytest.approx(both, abs=1e-6 * rho**2)
    assert abs(1 - kappa) * rho * (1 - 1e-6) <= float(d.norm()) <= (1 + kappa) * rho * (1 + 1e-6)
    if kappa < 1:
        assert found.cosine >= (1 - kappa**2) ** 0.5 - 1e-6
        assert found.cosine == pytest.approx(float(d @ g0 / d.norm() / rho), abs=1e-6)


@quick
@given(instances, st.sampled_from([1.0, 1.5, 2.0, 10.0]), any_reference)
def test_from_kappa_1_on_no_row_is_hurt(instance, kappa, reference) -> None:
    """0 is in the ball, so the best worst row gets at least <g_i, 0> = 0."""
    rows, weights = rows_of(instance), normal(instance[1], seed=instance[3]).abs()
    matching = replace(FREE, kappa=kappa, reference=reference)
    d, _ = match(rows, matching, weights)
    lengths = rows.norm(dim=1) * float(reference_of(rows, matching, weights).norm())
    assert ((rows @ d) / lengths >= -1e-6 * kappa).all()


def test_below_kappa_1_a_row_may_be_hurt() -> None:
    """g0 = (-0.5, 0.05), and no d within half its length of it has <(1, 0), d> >= 0."""
    d, found = match(torch.tensor([[1.0, 0.0], [-2.0, 0.1]]), FREE)
    assert d[0] < -0.2 and found.least < 0 and found.least > found.least_reference


@quick
@given(instances, any_reference)
def test_more_kappa_is_no_worse(instance, reference) -> None:
    """A larger ball holds the smaller one."""
    rows, weights = rows_of(instance), normal(instance[1], seed=instance[3]).abs()
    values = [
        match(rows, replace(FREE, kappa=kappa, reference=reference), weights)[1].value
        for kappa in (0.0, *KAPPAS)
    ]
    assert all(b >= a - 3e-8 for a, b in itertools.pairwise(values))


@quick
@given(instances)
def test_kappa_0_is_the_reference_bit_for_bit_in_its_coefficients(instance) -> None:
    rows = rows_of(instance)
    for reference, expected in {"mean": rows.mean(0), "current": rows[-1]}.items():
        d, found = match(rows, Matching(kappa=0.0, reference=reference))
        assert close(d, expected, 1e-13)
        assert found.value == pytest.approx(found.least_reference) and found.gap == 0
    assert (solve(gram(rows), Matching(kappa=0.0)).coefficients == 1 / len(rows)).all()


def test_large_kappa_is_the_shortest_vector_of_the_hull() -> None:
    """(d - g0) / r -> g_w / |g_w| of the shortest g_w, which has <g_i, g_w> >= |g_w|^2. Two rows:
    the foot of the perpendicular from 0 to the line through them."""
    rows = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)  # the foot is (0.4, 0.8)
    d, _ = match(rows, replace(FREE, kappa=1e6))
    g0 = rows.mean(0)
    unit = (d - g0) / (1e6 * g0.norm())
    assert close(unit, torch.tensor([0.4, 0.8], dtype=torch.float64) / 0.8**0.5, 1e-5)
    assert (rows @ unit >= 0.8**0.5 - 1e-5).all()


@quick
@given(instances, any_kappa, st.integers(0, 10**6))
def test_symmetries(instance, kappa, seed) -> None:
    """Order, scale, sign and rotation of the rows go through; so does counting all rows m times."""
    rows, matching = rows_of(instance), Matching(kappa=kappa)
    d, found = match(rows, matching)
    if found.status != "exact" or found.value < 1e-4:  # where g_w is nearly 0, so is its direction
        return
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    rotation = torch.linalg.qr(normal(rows.shape[1], rows.shape[1], seed=seed))[0]
    assert close(match(rows[order], matching)[0], d, 1e-4)
    assert close(match(1e-3 * rows, matching)[0], 1e-3 * d, 1e-4)
    assert close(match(-rows, matching)[0], -d, 1e-4)
    assert close(match(rows @ rotation, matching)[0], d @ rotation, 1e-4)
    assert close(match(rows.repeat(3, 1), matching)[0], d, 1e-4)


def test_one_row_twice_is_another_problem() -> None:
    """It moves the mean."""
    rows = normal(3, 20)
    assert not close(match(rows[[0, 1, 2, 2]], Matching())[0], match(rows, Matching())[0], 1e-2)


@quick
@given(instances, any_kappa)
def test_the_sum_in_place_of_the_mean(instance, kappa) -> None:
    """F scales by K as g0 does, so the same w, and d is K times as long: rows K g_i with g0 the
    sum of g_i have d' = K d(mean), up to the K of the rows themselves."""
    rows, count = rows_of(instance), instance[1]
    a = gram(rows)[0].numpy()
    rho = max(float(a.mean()), 0.0) ** 0.5
    scale = a.diagonal().mean()
    mean = Problem(a[None] / scale, a.mean(1) / scale, np.array([kappa * rho / scale**0.5]), rho**2)
    double = replace(mean, linear=count * mean.linear, radii=count * mean.radii)
    one, other = (minimise(problem).weights for problem in (mean, double))
    assert mean.at(one)[0] == pytest.approx(mean.at(other)[0], abs=1e-7 * rho**2)


# --- the optimum itself


def slsqp(problem: Problem) -> float:
    """The least F that SLSQP finds with the gradient, from the middle."""
    count = len(problem.linear)
    found = minimize(
        lambda w: problem.at(w)[:2],
        np.full(count, 1 / count),
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-14, "maxiter": 100},
    )
    w = np.maximum(found.x, 0)
    return problem.at(w / w.sum())[0]


def adversarial(seed: int) -> tuple[Tensor, float]:
    """Rows of every family, some of them nearly equal, opposed or much shorter than others."""
    draw = np.random.default_rng(seed)
    family, count = draw.choice(sorted(FAMILIES)), int(draw.integers(2, 7))
    rows = FAMILIES[family](count, int(draw.integers(2, 30)), seed)
    twist = draw.integers(5)
    if twist == 1:
        rows[0] = rows[-1] * (1 + 1e-6)
    if twist == 2:
        rows[0] = -rows[-1] + 1e-3 * rows[0]
    if twist == 3:
        rows[0] *= 1e-3
    return rows, float(draw.choice(KAPPAS))


@pytest.mark.parametrize("block", range(4))
def test_slsqp_finds_no_better_in_1000_instances(block: int) -> None:
    """F is compared, not w: several w may be best."""
    near = 0
    for seed in range(250 * block, 250 * block + 250):
        rows, kappa = adversarial(seed)
        a = gram(rows)[0].numpy()
        scale, rho = a.diagonal().mean(), max(float(a.mean()), 0.0) ** 0.5
        if rho**2 < 1e-8 * scale:  # two rows, exactly opposed
            near += 1
            continue
        radius = np.array([kappa * rho / scale**0.5])
        problem = Problem(a[None] / scale, a.mean(1) / scale, radius, rho**2 / scale)
        found = minimise(problem)
        value = problem.at(found.weights)[0]
        best = slsqp(problem)
        slack = 1e-8 if found.cone is None else 1e-6  # g_w = 0 to 1e-7
        assert value <= best + slack * problem.unit, seed
        near += value >= best - 1e-6 * problem.unit
    assert near > 240  # so SLSQP has come as far nearly always, and was a yardstick


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("count", [2, 3, 5, 10, 24, 25, 50, 100, 500])
def test_solved_at_every_size(family: str, count: int) -> None:
    a = gram(FAMILIES[family](count, 700, count))
    for kappa in KAPPAS:
        found = solve(a, Matching(kappa=kappa))
        assert found.status == "exact" or found.status.startswith("pareto"), kappa
        assert found.gap <= 1e-8, (kappa, found.gap)
        assert found.least >= found.least_reference


def test_a_small_problem_takes_faces_not_hundreds_of_steps() -> None:
    for family, rows in FAMILIES.items():
        for count in (2, 3, 5, 10):
            assert solve(gram(rows(count, 100, 1)), Matching()).iterations <= 2 * count, family


def test_the_worst_starting_point_is_left() -> None:
    """The middle of (g, -g, ..) with g0 = the last row is g_w = 0, where F has a kink: but
    F(e_1) = -|g|^2 + kappa |g|^2 < 0 is less. In two dimensions d = g0 - kappa |g0| g0 / |g0|."""
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    for some in (rows[:2], rows):
        d, found = match(some, replace(FREE, reference="current"))
        assert found.status == "exact" and found.gap <= 1e-8
        assert close(d, some[-1] / 2) and found.value == pytest.approx(-0.5)


# --- closed forms


@quick
@given(st.integers(0, 10**6), any_kappa, any_reference)
def test_one_row(seed, kappa, reference) -> None:
    """d = (1 + kappa) g."""
    rows = normal(1, 7, seed=seed)
    d, found = match(rows, replace(FREE, kappa=kappa, reference=reference), torch.ones(1))
    assert close(d, (1 + kappa) * rows[0]) and found.status == "one row"
    assert found.weights.tolist() == [[1.0]] and found.value == pytest.approx(1 + kappa)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 40])
def test_identical_rows_give_themselves(count: int) -> None:
    """Back at their length with "1+kappa"; with the authors' 1 + kappa^2 longer: 1.25 / 1.0625 at
    kappa 0.25 and 1.5 / 1.25 at 0.5."""
    row = normal(50)
    rows = row.repeat(count, 1)
    for kappa, factor in ((0.25, 1.25 / 1.0625), (0.5, 1.2)):
        assert close(match(rows, Matching(kappa=kappa))[0], row)
        assert close(match(rows, Matching(kappa=kappa, length="1+kappa^2"))[0], factor * row)
        longer = Matching(kappa=kappa, length="1+kappa^2", solver="authors")
        assert close(match(rows, longer)[0], factor * row, 1e-4)


@quick
@given(st.integers(0, 10**6), st.sampled_from(KAPPAS))
def test_two_rows_of_one_length(seed, kappa) -> None:
    """F is the same with the rows swapped, and convex: w = (1/2, 1/2), d = (1 + kappa) g0."""
    rows = normal(2, 10, seed=seed)
    d, found = match(rows, Matching(kappa=kappa, normalise="mean"))
    scaled = rows / rows.norm(dim=1, keepdim=True) * rows.norm(dim=1).mean()
    assert close(d, scaled.mean(0)) and found.weights[0].tolist() == pytest.approx([0.5, 0.5])


@quick
@given(st.integers(0, 10**6), st.sampled_from(KAPPAS), any_reference)
def test_two_rows_are_solved_to_the_last_digit(seed, kappa, reference) -> None:
    """One dimension of w, so a fine search over it (ternary, F being convex) finds the same F."""
    rows, weights = normal(2, 4, seed=seed) * normal(2, 1, seed=seed + 1).exp(), torch.ones(2)
    matching = replace(FREE, kappa=kappa, reference=reference)
    _, found = match(rows, matching, weights)
    g0 = reference_of(rows, matching, weights)

    def value(x: float) -> float:
        return dual(rows, g0, kappa, torch.tensor([x, 1 - x], dtype=torch.float64))

    low, high = 0.0, 1.0
    for _ in range(80):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if value(a) < value(b) else (a, high)
    assert found.value * float(g0 @ g0) == pytest.approx(value(low), abs=1e-9 * float(g0 @ g0))
    assert found.gap < 1e-11 and found.iterations == 1


def test_orthogonal_rows_of_one_length() -> None:
    """By symmetry w is uniform and d = (1 + kappa) g0."""
    for count in (3, 5, 30):
        d, found = match(7 * torch.eye(count), Matching(kappa=0.4))
        assert close(d, torch.full((count,), 7 / count)) and found.entropy == pytest.approx(
            np.log(count)
        )
        assert found.support == count and found.cosine == pytest.approx(1)


# --- parameters


def test_references_and_lengths_by_hand() -> None:
    """Rows a = (4, 0), b = (0, 2), c = (0, 0.5), kappa 0, so d = g0 before it is put to a length:
    mean (4, 2.5) / 3, weights 1 : 1 : 2 (1, 0.75), current c, half (c + (2, 1)) / 2."""
    rows = torch.tensor([[4.0, 0.0], [0.0, 2.0], [0.0, 0.5]])
    weights = torch.tensor([1, 1, 2])
    expected = {
        "mean": [4 / 3, 2.5 / 3],
        "weighted": [1, 0.75],
        "current": [0, 0.5],
        "half": [1, 0.75],
    }
    for reference, g0 in expected.items():
        d, _ = match(rows, Matching(kappa=0, reference=reference), weights)
        assert d.tolist() == pytest.approx(g0)
        d, found = match(rows, Matching(kappa=0, reference=reference, length="current"), weights)
        assert float(d.norm()) == pytest.approx(0.5)
        assert found.length == pytest.approx(0.5 / np.hypot(*g0))


@quick
@given(instances, st.sampled_from(KAPPAS), st.sampled_from(["none", "mean", "current"]))
def test_lengths(instance, kappa, normalise) -> None:
    """The direction is one; "current" means the last row as it came in."""
    rows = rows_of(instance)
    last = float(rows[-1].norm())
    ways = {
        how: match(rows, Matching(kappa=kappa, length=how, normalise=normalise))
        for how in ("free", "1+kappa", "1+kappa^2", "reference", "current")
    }
    free, found = ways["free"]
    if float(free.norm()) < 1e-4 * last:  # no direction to speak of
        return
    rho = float(free.norm()) / found.length
    wanted = {
        "1+kappa": float(free.norm()) / (1 + kappa),
        "1+kappa^2": float(free.norm()) / (1 + kappa**2),
        "reference": rho,
        "current": last,
    }
    for how, length in wanted.items():
        assert float(ways[how][0].norm()) == pytest.approx(length, rel=1e-6), how
        assert close(ways[how][0] / length, free / free.norm(), 1e-6)
        assert ways[how][1].length * rho == pytest.approx(length, rel=1e-6)
        assert ways[how][1].least == found.least


@quick
@given(instances, st.sampled_from(KAPPAS), any_reference)
def test_normalised_rows_are_the_game(instance, kappa, reference) -> None:
    """Scaling the rows beforehand gives the same d; the coefficients are those of the rows as they
    came in."""
    rows, weights = rows_of(instance), normal(instance[1], seed=instance[3]).abs()
    norms = rows.norm(dim=1, keepdim=True)
    for normalise, target in {"mean": norms.mean(), "current": norms[-1]}.items():
        matching = Matching(kappa=kappa, reference=reference, normalise=normalise)
        d, found = match(rows, matching, weights)
        plain, other = match(rows / norms * target, replace(matching, normalise="none"), weights)
        assert found.value == pytest.approx(other.value, abs=1e-7)
        assert close(found.coefficients[0] @ rows, d, 1e-9)
        if found.status == other.status == "exact" and found.value > 1e-4:
            assert close(d, plain, 1e-4)


@quick
@given(instances, st.sampled_from(KAPPAS), any_reference)
def test_direction_is_d_without_the_reference(instance, kappa, reference) -> None:
    rows, weights = rows_of(instance), normal(instance[1], seed=instance[3]).abs()
    matching = replace(FREE, kappa=kappa, reference=reference)
    d, found = match(rows, matching, weights)
    without, _ = match(rows, replace(matching, form="direction"), weights)
    if found.status == "exact":
        g0 = reference_of(rows, matching, weights)
        assert float((d - without - g0).norm()) <= 1e-7 * float(g0.norm())
        assert float(without.norm()) == pytest.approx(kappa * float(g0.norm()), rel=1e-6)
    else:
        assert close(without, d)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"kappa": -0.1}, "kappa is -0.1; it must be at least 0"),
        ({"kappa": "0.5"}, "it must be a number"),
        ({"reference": "men"}, "did you mean 'mean'"),
        ({"solver": "authors", "blocks": "coupled"}, "solver is 'authors'; it must be 'exact'"),
        ({"solver": "authors", "blocks": "elements"}, "solver is 'authors'; it must be 'exact'"),
        ({"softmax": {"rate": 0.0}}, "rate is 0.0; it must be above 0"),
        ({"softmax": {"momentum": 1.0}}, "momentum is 1.0; it must be at least 0 and below 1"),
        ({"softmax": {"schedule": 0}}, "schedule is 0; it must be at least 1"),
        ({"softmax": {"rounds": -1}}, "rounds is -1; it must be at least 0"),
        ({"softmax": {"decay": 0.0}}, "decay is 0.0; it must be above 0"),
    ],
)
def test_nonsense_is_refused(block: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build(Matching, block, "matching")
    assert build(Matching, {"kappa": 2, "softmax": {"rounds": 7}}, "m").softmax == Softmax(rounds=7)


def test_calls_that_cannot_be_right_are_refused() -> None:
    rows, weighted = torch.eye(3), Matching(reference="weighted")
    for weights in (None, torch.ones(2), torch.zeros(3), torch.tensor([1.0, -1.0, 1.0])):
        with pytest.raises(ParameterError, match="weights is"):
            match(rows, weighted, weights)
    with pytest.raises(ParameterError, match="sizes is None"):
        match(rows, Matching(blocks="layers"))
    with pytest.raises(ParameterError, match="3 elements in all"):
        match(rows, Matching(blocks="layers"), sizes=[1, 1])
    with pytest.raises(ParameterError, match="blocks is 'elements'"):
        solve(gram(rows), Matching(blocks="elements"))


# --- degenerate rows, in the order in which they are decided


def finite(found: Matched) -> bool:
    numbers = [value for value in vars(found).values() if isinstance(value, float)]
    tensors = torch.isfinite(found.coefficients).all() and torch.isfinite(found.weights).all()
    return bool(np.isfinite(numbers).all() and tensors)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("blocks", ["model", "layers", "coupled", "elements"])
@pytest.mark.parametrize("listed", [False, True])
def test_rows_that_are_not_finite_are_as_if_absent(bad: float, blocks: str, listed: bool) -> None:
    """1e30 is finite in single precision, but its square is not."""
    rows = normal(5, 30).float()
    rows[1, 3], rows[3, 20] = bad, bad
    kept = [0, 2, 4]
    weights = torch.arange(1.0, 6)
    for matching in (
        Matching(blocks=blocks, reference="weighted", normalise="mean"),
        Matching(blocks=blocks, reference="half", length="current", normalise="current"),
    ):
        d, found = match(list(rows) if listed else rows, matching, weights, sizes=[10, 20])
        expected, _ = match(rows[kept], matching, weights[kept], sizes=[10, 20])
        assert close(d, expected, 1e-6) and found.dropped == 2 and finite(found)
        if blocks != "elements":
            assert not found.coefficients[:, [1, 3]].any()


@pytest.mark.parametrize("blocks", ["model", "layers", "coupled", "elements"])
def test_without_a_usable_row_nothing_moves(blocks: str) -> None:
    for rows in (torch.full((3, 30), float("nan")), torch.zeros(3, 30)):
        d, found = match(rows, Matching(blocks=blocks), sizes=[10, 20])
        assert not d.any() and found.status == "no usable row" and found.dropped == 3
        assert finite(found)


@pytest.mark.parametrize(
    "change",
    [
        {"reference": "current"},
        {"reference": "half"},
        {"length": "current"},
        {"normalise": "current"},
    ],
)
def test_without_the_current_row_what_needs_it_does_not_move(change: dict) -> None:
    rows = normal(3, 30)
    rows[-1, 0] = float("nan")
    d, found = match(rows, Matching(**change))
    assert not d.any() and found.status == "the current row is not finite" and finite(found)
    assert match(rows, Matching())[1].status == "exact"


def test_rows_too_small_are_in_the_reference_only() -> None:
    """d = g0 + kappa rho g_w / |g_w| with g_w from rows 0 and 1, g0 from all three."""
    rows = normal(3, 30)
    for share in (0.0, 1e-9, 1e-12):
        rows[2] = normal(30, seed=9)
        rows[2] *= share * rows[:2].norm(dim=1).max() / rows[2].norm()
        d, found = match(rows, FREE)
        two, _ = match(rows[:2], replace(FREE, reference="mean"))
        assert found.dropped == 1 and found.weights[0, 2] == 0 and found.status == "exact"
        assert close(d, two * 2 / 3, 1e-6)
    rows[2] = 1e-6 * normal(30, seed=9)
    assert match(rows, FREE)[1].dropped == 0


def test_normalising_does_not_blow_up_noise() -> None:
    rows = normal(3, 30)
    rows[0] = 1e-20 * rows[0]
    for normalise in ("mean", "current"):
        d, found = match(rows, Matching(normalise=normalise))
        assert found.dropped == 1 and found.coefficients[0, 0] < 1 and torch.isfinite(d).all()


def test_one_usable_row_has_a_closed_form() -> None:
    """g0 = g / 2, d = g0 + kappa |g0| g / |g|."""
    row = normal(10)
    d, found = match(torch.stack([row, torch.zeros(10)]), FREE)
    assert close(d, 0.75 * row) and found.status == "one row" and found.dropped == 1


def test_without_a_reference_d_is_the_reference() -> None:
    """g - g = 0 has no length for a ball; three rows that add up to 0 leave rounding."""
    pair = normal(1, 30)
    three = normal(2, 30).float()
    three = torch.stack([*three, -three.sum(0)])
    for rows in (torch.cat([pair, -pair]), three):
        for matching in (Matching(), Matching(length="current"), Matching(form="direction")):
            d, found = match(rows.double(), matching)
            assert found.status == "reference is zero" and finite(found)
            assert d.norm() <= 1e-6 * rows.norm()
    rows = torch.cat([normal(2, 30), torch.zeros(1, 30)])
    d, found = match(rows, Matching(reference="current", length="current"))
    assert found.status == "reference is zero" and not d.any()


PARETO = {
    "0 between opposed rows": torch.tensor([[1.0, 0], [-1, 0], [0, 1]]),
    "0 inside": torch.tensor([[1.0, 0.2], [-1, 0.2], [0, 1], [0.1, -1]]),
    "more rows than dimensions": normal(40, 3).float(),
}


@pytest.mark.parametrize("name", sorted(PARETO))
def test_where_0_is_in_the_hull_g0_is_projected_on_the_cone(name: str) -> None:
    """F* = 0 at g_w = 0, which has no direction. p = proj g0 solves min |p - g0|, <g_i, p> >= 0, so
    p and p - g0 are orthogonal (the cone's Moreau decomposition), and p - g0 = G'v with v >= 0."""
    rows = PARETO[name].double()
    for kappa in (1.5, 2.0, 5.0):
        d, found = match(rows, replace(FREE, kappa=kappa))
        g0 = rows.mean(0)
        assert found.status == "pareto: projected on the cone" and finite(found)
        assert (rows @ d >= -1e-8).all() and abs(float(d @ (d - g0))) <= 1e-8
        assert (found.coefficients[0] >= 1 / len(rows) - 1e-9).all()
        assert found.gap <= 1e-8 and found.value == 0
        d, _ = match(rows, Matching(kappa=kappa))
        assert torch.isfinite(d).all()


def test_0_on_the_edge_of_the_hull_below_kappa_1() -> None:
    """Rows (1, 0), (-1, 0), (0, 1): g0 = (0, 1/3) hurts nobody, F* = 0: d is g0 itself."""
    d, found = match(PARETO["0 between opposed rows"].double(), FREE)
    assert found.status == "pareto: projected on the cone" and close(d, d.new_tensor([0, 1 / 3]))


@quick
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e-9, 1e4, 3.0]), min_size=3, max_size=3),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([0.0, *KAPPAS, 100.0]),
    st.sampled_from(["mean", "current", "half"]),
    st.sampled_from(["model", "layers", "coupled", "elements"]),
    st.sampled_from(["none", "mean", "current"]),
    st.sampled_from(["free", "1+kappa", "reference", "current"]),
    st.booleans(),
)
def test_never_nan(values, kappa, reference, blocks, normalise, length, authors) -> None:
    """Few values, so that rows are equal, opposed, dependent or 0."""
    rows = torch.tensor(values)
    solver = "authors" if authors and blocks in ("model", "layers") else "exact"
    matching = Matching(kappa, reference, "full", length, normalise, blocks, solver)
    for form in ("full", "direction"):
        d, found = match(rows, replace(matching, form=form), sizes=[1, 2])
        assert torch.isfinite(d).all() and finite(found)
        if solver == "exact" and blocks in ("model", "layers"):
            assert "not solved" not in found.status


# --- layers, shared weights, elements


SIZES = [7, 1, 22]


@quick
@given(st.sampled_from(sorted(FAMILIES)), st.integers(2, 6), st.integers(0, 999), any_kappa)
def test_layers_promise_less_than_the_model(family, count, seed, kappa) -> None:
    """Each layer has its own ball and its own worst row: sum_l F_l* <= min_i <g_i, d> <= F*, and
    the balls make up |d - g0| = kappa |g0|. Sharing w among layers lies between."""
    rows = FAMILIES[family](count, sum(SIZES), seed)
    matching = replace(FREE, kappa=kappa)
    d, own = match(rows, replace(matching, blocks="layers"), sizes=SIZES)
    shared, coupled = match(rows, replace(matching, blocks="coupled"), sizes=SIZES)
    _, model = match(rows, matching)
    g0 = rows.mean(0)
    square = float(g0 @ g0)
    assert own.value <= own.least + 1e-6 and own.least <= model.value + 1e-6
    assert own.value - 1e-6 <= coupled.value <= model.value + 1e-6
    assert float((rows @ d).min()) == pytest.approx(own.least * square, abs=1e-6 * square)
    assert own.gap <= 1e-7 and coupled.gap <= 1e-7, (own.gap, coupled.gap)
    assert own.weights.shape == (3, count) and coupled.weights.shape == (1, count)
    for each, found in ((d, own), (shared, coupled)):
        if found.status == "exact":
            parts = zip(each.split(SIZES), g0.split(SIZES), strict=True)
            for part, middle in parts:
                assert float((part - middle).norm()) == pytest.approx(
                    kappa * float(middle.norm()), rel=1e-5, abs=1e-9
                )
    if coupled.status == "exact":
        assert coupled.least == pytest.approx(coupled.value, abs=1e-6)


def test_layers_are_single_problems() -> None:
    rows = normal(4, sum(SIZES))
    together, found = match(rows, Matching(blocks="layers"), sizes=SIZES)
    alone = [match(part, Matching())[0] for part in rows.split(SIZES, 1)]
    assert close(together, torch.cat(alone)) and found.coefficients.shape == (3, 4)


def test_coupled_layers_have_the_least_sum() -> None:
    """No w of a fine grid on the simplex of three has a smaller sum_l F_l(w)."""
    rows = normal(3, sum(SIZES)) * torch.tensor([[1.0], [0.5], [2.0]])
    _, found = match(rows, replace(FREE, blocks="coupled"), sizes=SIZES)
    parts = [(part, part.mean(0)) for part in rows.split(SIZES, 1)]
    grid = [(a / 60, b / 60, (60 - a - b) / 60) for a in range(61) for b in range(61 - a)]
    sums = [
        sum(dual(part, g0, 0.5, torch.tensor(w, dtype=torch.float64)) for part, g0 in parts)
        for w in grid
    ]
    square = float(rows.mean(0).square().sum())
    assert found.value * square <= min(sums) + 1e-9
    assert found.value * square == pytest.approx(min(sums), abs=2e-3 * square)


def test_one_layer_is_the_model_and_an_empty_layer_is_left_alone() -> None:
    rows = normal(4, 20)
    d, _ = match(rows, Matching())
    for blocks in ("layers", "coupled"):
        assert close(match(rows, Matching(blocks=blocks), sizes=[20])[0], d, 1e-5)
        padded = torch.cat([rows, torch.zeros(4, 5)], 1)
        whole, found = match(padded, Matching(blocks=blocks), sizes=[20, 5])
        assert close(whole[:20], d, 1e-5) and not whole[20:].any() and finite(found)


@quick
@given(st.integers(0, 10**6), st.integers(1, 6), any_kappa, any_reference)
def test_elements_are_blocks_of_one(seed, count, kappa, reference) -> None:
    """The closed form against the solver, element by element; and by a fine search in the ball."""
    rows, weights = normal(count, 12, seed=seed), normal(count, seed=seed + 1).abs()
    rows[:, ::3] = rows[:, ::3].abs()  # some elements on which all agree
    matching = replace(FREE, kappa=kappa, reference=reference)
    d, found = match(rows, replace(matching, blocks="elements"), weights)
    _, layered = match(rows, replace(matching, blocks="layers"), weights, [1] * 12)
    assert found.value == pytest.approx(layered.value, abs=1e-6)
    g0 = reference_of(rows, matching, weights)
    line = torch.linspace(-1, 1, 401, dtype=torch.float64)[:, None]
    tries = g0 + kappa * g0.abs() * line  # [401, 12]
    worst = (rows[:, None] * tries).amin(0).amax(0)
    own = (rows * d).amin(0)
    assert (own >= worst - 1e-9).all() and ((d - g0).abs() <= kappa * g0.abs() + 1e-9).all()
    assert float(own.sum() / (g0 @ g0)) == pytest.approx(found.value, abs=1e-6)
    assert float((rows @ d).min() / (g0 @ g0)) == pytest.approx(found.least, abs=1e-6)
    assert found.cosine == pytest.approx(float(d @ g0 / d.norm() / g0.norm()), abs=1e-6) or not (
        d.any()
    )


def test_elements_by_hand() -> None:
    """Columns: agreed (1 + kappa) g0; opposed (1 - kappa) g0, or 0 from kappa 1 on; g0 = 0. Without
    g0: its kappa-th part forth or back."""
    rows = torch.tensor([[2.0, 3.0, 1.0, 0.0], [4.0, -1.0, -1.0, 2.0]])  # mean 3, 1, 0, 1
    for kappa, full, alone in (
        (0.5, [4.5, 0.5, 0, 1.5], [1.5, -0.5, 0, 0.5]),
        (1.0, [6, 0, 0, 2], [3, 0, 0, 1]),
        (2.0, [9, 0, 0, 3], [6, 0, 0, 2]),
    ):
        matching = Matching(kappa=kappa, blocks="elements", length="free")
        assert match(rows, matching)[0].tolist() == full
        assert match(rows, replace(matching, form="direction"))[0].tolist() == alone
        short, found = match(rows, replace(matching, length="reference"))
        assert float(short.norm()) == pytest.approx(11**0.5) and found.length == pytest.approx(1)


@pytest.mark.parametrize(
    ("numels", "expected"),
    [
        ([5000, 64, 64, 3000], [5128, 3000]),
        ([10, 20, 3000, 2000], [3030, 2000]),
        ([600, 600, 5, 4000], [1205, 4000]),
        ([600, 600, 600, 600], [1200, 1200]),
        ([10, 20], [30]),
        ([1024], [1024]),
        ([], [0]),
    ],
)
def test_small_tensors_are_merged(numels: list[int], expected: list[int]) -> None:
    assert layers(numels) == expected


# --- the public code


def authors_by_torch(rows: Tensor, kappa: float, softmax: Softmax) -> Tensor:
    """The optimiser of the public code in the words of its framework: autograd, SGD, StepLR."""
    a = rows @ rows.T
    scale = (a.diagonal() + 1e-4).sqrt().mean()
    a = a / scale**2
    b, c = a.mean(1), kappa * (a.mean() + 1e-4).sqrt()
    z = torch.zeros(len(rows), dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([z], lr=softmax.rate, momentum=softmax.momentum)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, softmax.schedule, softmax.decay)
    best, least = z.detach().clone(), float("inf")
    for rounds in range(softmax.rounds + 1):
        sgd.zero_grad()
        w = torch.softmax(z, 0)
        objective = w @ b + c * (w @ a @ w + 1e-4).sqrt()
        if objective.item() < least:
            best, least = z.detach().clone(), objective.item()
        if rounds < softmax.rounds:
            objective.backward()
            sgd.step()
            schedule.step()
    w = torch.softmax(best, 0)
    strength = c / ((w @ a @ w + 1e-4).sqrt() + 1e-4)
    return ((1 / len(rows) + strength * w) @ rows) / (1 + kappa**2)


@pytest.mark.parametrize("family", ["a common part", "two opposed groups"])
@pytest.mark.parametrize("softmax", [Softmax(), Softmax(25, momentum=0.1), Softmax(70, 5.0)])
def test_the_public_code_step_for_step(family: str, softmax: Softmax) -> None:
    for count, scale in ((1, 1.0), (5, 0.01), (20, 1e-3)):
        rows = scale * FAMILIES[family](count, 60, count)
        matching = Matching(0.25, length="1+kappa^2", solver="authors", softmax=softmax)
        d, found = match(rows, matching)
        assert close(d, authors_by_torch(rows, 0.25, softmax), 1e-7)
        assert found.status == "authors" and found.iterations == softmax.rounds
        layered, _ = match(rows, replace(matching, blocks="layers"), sizes=[20, 40])
        parts = [authors_by_torch(part, 0.25, softmax) for part in rows.split([20, 40], 1)]
        assert close(layered, torch.cat(parts), 1e-7)


def test_the_public_code_is_not_free_of_scale() -> None:
    """Its 1e-4 are larger than rows of length 1e-4: the weights stay uniform. Ours do not care."""
    rows = normal(6, 40) * torch.arange(1, 7)[:, None]
    rows /= rows.norm(dim=1).mean()
    for solver, moved in (("authors", False), ("exact", True)):
        away = [
            float((solve(gram(s * rows), Matching(solver=solver)).weights - 1 / 6).abs().sum())
            for s in (1e-4, 1.0)
        ]
        assert away[1] > 0.1 and (away[0] == pytest.approx(away[1], rel=1e-6)) is moved
        assert moved or away[0] < 0.01


def test_the_public_code_comes_near_for_similar_rows_and_never_below() -> None:
    rows = FAMILIES["cosine 0.99"](6, 400, 3)
    exact = solve(gram(rows), Matching())
    short = solve(gram(rows), Matching(solver="authors"))
    long = solve(gram(rows), Matching(solver="authors", softmax=Softmax(3000, schedule=1000)))
    assert (
        exact.gap < 1e-9 < long.gap < 1e-4 < short.gap
        and exact.value <= long.value <= short.value + 1e-12
    )
    assert close(long.coefficients @ rows, exact.coefficients @ rows, 1e-2)
    wild = FAMILIES["independent"](50, 400, 3) * normal(50, 1, seed=4).exp()
    assert solve(gram(wild), Matching(solver="authors")).gap > 1e-3 > solve(gram(wild), FREE).gap


# --- long rows


@pytest.mark.parametrize("width", [1, 100, 70_000, 1_200_000])
def test_inner_products_of_single_precision(width: int) -> None:
    """Relative to the lengths of the two rows the error stays near the 6e-8 of one rounding,
    whatever d; adding up all of 10^6 products in float32 leaves 1e-5."""
    rows = torch.randn(4, width, generator=torch.Generator().manual_seed(0)) + 0.5
    expected = rows.double() @ rows.double().T
    lengths = expected.diagonal().sqrt()
    for given_rows in (rows, list(rows)):
        found = gram(given_rows)
        assert found.shape == (1, 4, 4) and found.dtype == torch.float64
        assert ((found[0] - expected).abs() <= 1.2e-7 * lengths[:, None] * lengths).all()
        assert (found == found.mT).all()
    np.testing.assert_allclose(squares(rows), expected.diagonal(), rtol=2e-7)


def test_blocks_and_sums_of_long_rows() -> None:
    rows = normal(3, 1_000_003)
    sizes = [300_001, 2, 700_000]
    found = gram(rows, sizes)
    for block, part in zip(found, rows.split(sizes, 1), strict=True):
        torch.testing.assert_close(block, part @ part.T)
    coefficients = normal(3, 3)
    parts = zip(coefficients, rows.split(sizes, 1), strict=True)
    expected = torch.cat([c @ part for c, part in parts])
    for given_rows in (rows, list(rows), list(rows.float())):
        d = combine(given_rows, coefficients, sizes)
        assert d.dtype == given_rows[0].dtype and close(d.double(), expected, 1e-6)


def test_half_precision_rows() -> None:
    """bfloat16 rows are matched as what they are, in float32."""
    rows = normal(4, 5000).bfloat16()
    for matching in (Matching(), Matching(blocks="elements")):
        d, _ = match(rows, matching)
        assert d.dtype == torch.float32
        assert close(d.double(), match(rows.double(), matching)[0], 1e-5)


def test_single_and_double_precision_agree_for_equal_rows_too() -> None:
    """Rounding makes the smallest eigenvalues negative, which must not be taken for descent."""
    for seed in range(6):
        base, noise = normal(1, 2000, seed=seed), normal(12, 2000, seed=seed + 1)
        for rows in (base + 1e-4 * noise, base.repeat(12, 1), (base + noise)[[0, 0, 0, 1, 1, 2]]):
            for kappa in (0.5, 0.9):
                d, _ = match(rows, Matching(kappa=kappa))
                single, found = match(rows.float(), Matching(kappa=kappa))
                assert found.gap <= 1e-6 and close(single.double(), d, 1e-3)


def test_precision_of_products_is_set_and_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        rows = normal(8, 20_000)
        error = (gram(rows.float()) - gram(rows)).abs().max() / 20_000
        assert torch.get_float32_matmul_precision() == "medium" and error < 1e-6
    finally:
        torch.set_float32_matmul_precision(before)


MEMORY = """
import re, pathlib, torch
from stamp_core.matching import Matching, match
from stamp_core.rows import Difference
def memory(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(name + r":\\s+(\\d+)", status)[1])
torch.set_num_threads(1)
match(torch.randn(6, 300_000), Matching())
size = 16_000_000
rows = [torch.ones(size) for _ in range(6)]
ways = [Difference(row, rows[0]) for row in rows[1:]]
for given, blocks in ((rows, "model"), (ways, "model"), (rows, "elements")):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    match(given, Matching(blocks=blocks))
    print((memory("VmHWM") - before) / (4 * size))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says the peak there")
def test_memory_is_one_vector_more() -> None:
    """The result itself and blocks of columns of a few megabytes; a second vector would give 2."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, cwd=ROOT
    )
    model, ways, elements = map(float, done.stdout.split())
    assert all(0.5 < vectors < 2 for vectors in (model, ways, elements))


def test_rows_formed_where_they_are_looked_at_are_the_same_rows() -> None:
    base, others = normal(70_000).float(), normal(3, 70_000, seed=1).float()
    lazy = [Difference(base, other) for other in others]
    sizes = [1, 30_000, 39_999]
    for blocks in ("model", "layers", "elements"):
        matching = Matching(blocks=blocks)
        one, _ = match(lazy, matching, sizes=sizes)
        other, _ = match(base - others, matching, sizes=sizes)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(Sketch(70_000)(lazy[0]), Sketch(70_000)(base - others[0]))


def test_a_sketch_is_right_on_average_and_as_noisy_as_it_says() -> None:
    """Var <sa, sb> = sum over places of |a|^2 |b|^2 + <a, b>^2 - 2 <a^2, b^2>: with independent
    signs only products of two positions in a place vary, once as a_p b_q and once as a_q b_p."""
    width, length, draws = 16, 200, 3000
    a, b = normal(2, length)
    found = []
    for seed in range(draws):
        sketch = Sketch(length, seed, width=width)
        found.append(float(sketch(a) @ sketch(b)))
    padded = torch.zeros(2, 208, dtype=torch.float64)
    padded[:, :length] = torch.stack([a, b])
    x, y = padded.view(2, 13, width)
    variance = float(
        (x.square().sum(0) * y.square().sum(0) + (x * y).sum(0).square()).sum()
        - 2 * (x * y).square().sum()
    )
    assert np.mean(found) == pytest.approx(float(a @ b), abs=4 * (variance / draws) ** 0.5)
    assert np.var(found) == pytest.approx(variance, rel=0.15)


def test_sketched_rows_match_nearly_as_the_rows_themselves() -> None:
    """Width 2^16: inner products err by about |a| |b| / 256, so F by about that share of |g|^2."""
    rows = (normal(6, 300_000) + 2 * normal(300_000, seed=1)).float()
    sketch = Sketch(300_000, "rows", 7)
    assert sketch.signs.dtype == torch.int8 and sketch.signs.abs().min() == 1
    short = torch.stack([sketch(row) for row in rows])
    assert short.shape == (6, 2**16)
    assert torch.equal(sketch(rows[0]), Sketch(300_000, "rows", 7)(rows[0]))
    assert not torch.equal(sketch(rows[0]), Sketch(300_000, "rows", 8)(rows[0]))
    lengths = rows.norm(dim=1)
    error = (gram(short) - gram(rows))[0] / (lengths[:, None] * lengths)
    assert 1e-5 < error.abs().max() < 5 / 256
    d = combine(rows, solve(gram(short), Matching()).coefficients)
    assert close(d, match(rows, Matching())[0], 0.1)
