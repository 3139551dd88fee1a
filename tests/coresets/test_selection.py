"""Rules on features choose what their definitions say."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_tasks import candidates_of, normal
from torch import Tensor

from stamp_core.coresets.selection import herding
from stamp_core.coresets.selection.base import Candidates, choose_exemplars
from stamp_core.coresets.selection.herding import extend_by_herding
from workbench.selection import k_centre, least_squares, nonnegative
from workbench.selection.least_squares import minimum_norm, solve_printed_problem
from workbench.selection.nonnegative import nonnegative_solution

quick = settings(deadline=None, max_examples=50, derandomize=True)


def test_uniform_choice_depends_on_the_generator_alone():
    """Each of the 12 ordered pairs out of 4 should come 1 time in 12: 5 deviations are 48."""
    counts = Counter(
        tuple(choose_exemplars("uniform", candidates_of(normal(4, 2, seed=s), 2, seed=s)).tolist())
        for s in range(1200)
    )
    assert len(counts) == 12 and all(abs(times - 100) < 48 for times in counts.values())
    several = [candidates_of(normal(50, 2, seed=s), 9, seed=5) for s in range(2)]
    assert torch.equal(*(choose_exemplars("uniform", candidates) for candidates in several))


vectors = st.integers(1, 3).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-3, 3), min_size=width, max_size=width), min_size=2, max_size=8
    )
)


def distance(one: Sequence[Fraction], other: Sequence[Fraction]) -> Fraction:
    return sum(((a - b) ** 2 for a, b in zip(one, other, strict=True)), Fraction())


def exact_herding(rows: list[list[int]], target: list[Fraction], chosen: list[int]) -> list[int]:
    """All images in the order of their choice: min || p - mean(S + i) || in exact fractions."""
    chosen = list(chosen)
    while len(chosen) < len(rows):

        def error(i: int) -> Fraction:
            several = [rows[k] for k in (*chosen, i)]
            means = [Fraction(sum(c), len(several)) for c in zip(*several, strict=True)]
            return distance(target, means)

        free = [i for i in range(len(rows)) if i not in chosen]
        chosen.append(min(free, key=error))  # the first of equals
    return chosen


@quick
@given(rows=vectors, quarters=st.lists(st.integers(-12, 12), min_size=3, max_size=3))
def test_herding_is_the_greedy_choice_in_exact_arithmetic(rows, quarters):
    """Duplicates and other ties are frequent here, and quarters are exact in float64 too."""
    target = [Fraction(q, 4) for q in quarters[: len(rows[0])]]
    candidates = candidates_of(torch.tensor(rows).float(), len(rows))
    candidates = replace(candidates, prototype=torch.tensor([float(t) for t in target]).double())
    assert herding.choose(candidates).tolist() == exact_herding(rows, target, [])
    first = torch.tensor([len(rows) - 1])
    extended = extend_by_herding(candidates, first).tolist()
    assert extended == exact_herding(rows, target, first.tolist())


def test_ties_go_to_the_lowest_index():
    for width in (1, 2, 3, 5, 8, 33, 512):
        features = normal(7, width, seed=width).repeat(9, 1)  # row i equals rows i + 7, i + 14 ...
        for rule in ("herding", "k_centre"):
            chosen = choose_exemplars(rule, candidates_of(features, 63)).tolist()
            for row in range(7):
                copies = [index for index in chosen if index % 7 == row]
                assert copies == sorted(copies)


def with_memory(features: Tensor) -> Candidates:
    """Candidates of a class with exemplars elsewhere, so that the printed problem selects."""
    mean = normal(features.shape[1], seed=1).double()
    return candidates_of(features, len(features), mean, seen=9)


SHAPES = [(3, 8), (8, 8), (30, 8), (30, 1), (1, 5)]


def problem(candidates: Candidates) -> tuple[Tensor, Tensor]:
    matrix = candidates.features.double().T / len(candidates.features)
    return matrix, candidates.prototype - candidates.exemplar_mean


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_least_squares_is_the_shortest_solution_of_the_normal_equations(shape, seed):
    """Compared with the pseudo-inverse; the last images are copies, so that ranks are low."""
    features = normal(*shape, seed=seed)
    features[-2:] = features[0]
    candidates = with_memory(features)
    matrix, target = problem(candidates)
    a = solve_printed_problem(candidates, minimum_norm)
    torch.testing.assert_close(matrix.T @ (matrix @ a), matrix.T @ target, rtol=0, atol=1e-10)
    shortest = torch.linalg.pinv(matrix, rtol=1e-9) @ target
    torch.testing.assert_close(a, shortest, rtol=1e-8, atol=1e-8)
    ranks = least_squares.choose(candidates)
    assert (a[ranks].diff() <= 1e-6).all()


def test_without_exemplars_the_printed_problem_selects_the_lowest_indices():
    """a = 1 is the only solution of both."""
    features = normal(20, 50)
    for rule, solver in ((least_squares, minimum_norm), (nonnegative, nonnegative_solution)):
        a = solve_printed_problem(candidates_of(features, 5), solver)
        torch.testing.assert_close(a, torch.ones(20).double())
        assert rule.choose(candidates_of(features, 5)).tolist() == [0, 1, 2, 3, 4]


def test_singular_values_below_the_precision_of_features_are_cut_off():
    """Otherwise the target's part along the second feature would need a of 10^6 and more."""
    features = torch.ones(40, 2)
    features[:, 1] = 1e-7 * normal(40, seed=2)
    a = solve_printed_problem(with_memory(features), minimum_norm)
    assert a.abs().max() < 10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_nonnegative_coefficients_satisfy_karush_kuhn_tucker(shape, seed):
    """a >= 0, gradient >= 0, and one of the two is 0 for each image."""
    candidates = with_memory(normal(*shape, seed=seed))
    matrix, target = problem(candidates)
    a = solve_printed_problem(candidates, nonnegative_solution)
    gradient = matrix.T @ (matrix @ a - target)
    assert (a >= 0).all() and (gradient > -1e-10).all()
    assert (a * gradient).abs().max() < 1e-10


def test_herding_fills_up_what_positive_coefficients_leave():
    candidates = with_memory(normal(30, 8, seed=2))
    a = solve_printed_problem(candidates, nonnegative_solution)
    positive = int((a > 0).sum())
    assert 2 < positive < 20
    for count in (2, positive, 20):
        limited = replace(candidates, exemplars_per_class=count)
        chosen = nonnegative.choose(limited)
        first = a.argsort(descending=True)[: min(count, positive)]
        assert torch.equal(chosen[: len(first)], first)
        assert torch.equal(chosen, extend_by_herding(limited, first))


@quick
@given(rows=vectors)
def test_k_centre_is_farthest_first_from_the_image_nearest_to_the_prototype(rows):
    exact = [[Fraction(value) for value in row] for row in rows]
    candidates = candidates_of(torch.tensor(rows).float(), len(rows))
    expected = herding.choose(candidates).tolist()[:1]
    while len(expected) < len(rows):
        free = [i for i in range(len(rows)) if i not in expected]
        expected.append(
            max(free, key=lambda i: min(distance(exact[i], exact[k]) for k in expected))
        )
    assert k_centre.choose(candidates).tolist() == expected
