"""Rules choose what their definitions say, MixStyle moves moments, memories keep their bounds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from stamp_core import checkpoint, config, coresets, models
from stamp_core.config import Network
from stamp_core.coresets import Candidates, herding, k_centre, least_squares, memory, nonnegative
from stamp_core.coresets.memory import Keep, Memory
from stamp_core.coresets.mixstyle import (
    EPSILON,
    mixed_styles,
    mixstyle,
    restyle_features,
    same_class,
    shares,
)
from stamp_core.records import tree_bytes

quick = settings(deadline=None, max_examples=50, derandomize=True)
seeds = st.integers(0, 10**6)
RULES = [rule for rule in coresets.rules() if not coresets.proposes(rule)]
COMPARING = sorted(set(RULES) - {"uniform"})  # those that look at features
MERGES = ("mixstyle", "replace", "reselect")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def zeros(width: int) -> Tensor:
    return torch.zeros(width, dtype=torch.float64)


def offer(
    features: Tensor, count: int, kept: Tensor | None = None, seen: int = 0, seed: int = 0
) -> Candidates:
    """Candidates with these features, of a class of which `seen` were met with the mean `kept`."""
    kept = zeros(features.shape[1]) if kept is None else kept
    target = coresets.prototype(features, kept, seen)
    pictures = torch.zeros(len(features), 1, 2, 2, dtype=torch.uint8)
    return Candidates(pictures, features, target, kept, count, generator(seed))


def awkward(features: Tensor) -> Candidates:
    """Candidates of a class whose memory is elsewhere, so that the printed problem has a point."""
    return offer(features, len(features), kept=normal(features.shape[1], seed=1).double(), seen=9)


# ------------------------------------------------------------------------ what holds for all rules


def test_a_rule_is_a_file_and_its_companions_are_none() -> None:
    assert RULES == ["herding", "k_centre", "least_squares", "nonnegative", "uniform"]
    assert coresets.get("herding") is herding.choose
    with pytest.raises(config.ParameterError, match="rule 'hering' is unknown; did you mean 'herd"):
        coresets.get("hering")
    for companion in coresets.COMPANIONS:
        with pytest.raises(config.ParameterError, match=f"rule '{companion}' is unknown"):
            coresets.get(companion)


ODD = {
    "none": torch.zeros(0, 3),
    "one": torch.ones(1, 3),
    "constant": torch.ones(6, 3),
    "zero": torch.zeros(6, 3),
    "one feature": normal(6, 1),
    "duplicates": normal(3, 2).repeat(3, 1),
    "more features than pictures": normal(5, 40),
    "no number": torch.full((4, 2), torch.nan),
    "infinite": torch.cat([torch.full((2, 2), torch.inf), normal(4, 2), torch.full((1, 2), -1e38)]),
    "large": 1e38 * normal(6, 3).sign(),
}


@pytest.mark.parametrize("count", [0, 1, 3, 50])
@pytest.mark.parametrize("features", ODD.values(), ids=ODD)
@pytest.mark.parametrize("rule", RULES)
def test_as_many_distinct_pictures_as_there_can_be(rule: str, features: Tensor, count: int) -> None:
    before, candidates = features.clone(), offer(features, count)
    chosen = coresets.get(rule)(candidates)
    assert chosen.dtype == torch.int64 and chosen.shape == (min(count, len(features)),)
    assert len(chosen.unique()) == len(chosen)
    assert set(chosen.tolist()) <= set(range(len(features)))
    assert features.numpy().tobytes() == before.numpy().tobytes()


@pytest.mark.parametrize("seen", [0, 7])
@pytest.mark.parametrize("rule", COMPARING)
def test_pictures_without_finite_features_are_chosen_last(rule: str, seen: int) -> None:
    """And change nothing for the others, in whose order they stand at the end."""
    features = normal(9, 4, seed=3)
    features[[1, 4, 7], [0, 2, 3]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    fine = torch.tensor([0, 2, 3, 5, 6, 8])
    kept = normal(4, seed=5).double() * seen
    chosen = coresets.get(rule)(offer(features, 9, kept, seen))
    assert torch.equal(chosen[:6], fine[coresets.get(rule)(offer(features[fine], 6, kept, seen))])
    assert chosen[6:].tolist() == [1, 4, 7]


@pytest.mark.parametrize("rule", COMPARING)
@quick
@given(seed=seeds, n=st.integers(1, 30), width=st.integers(1, 12))
def test_the_order_of_the_pictures_does_not_matter(
    rule: str, seed: int, n: int, width: int
) -> None:
    features, order = normal(n, width, seed=seed), torch.randperm(n, generator=generator(seed))
    choose = coresets.get(rule)
    candidates = replace(awkward(features), count=7)
    shuffled = replace(candidates, features=features[order])
    assert torch.equal(order[choose(shuffled)], choose(candidates))


@pytest.mark.parametrize("rule", COMPARING)
def test_a_rule_that_compares_draws_nothing(rule: str) -> None:
    candidates = offer(normal(30, 4), 5)
    coresets.get(rule)(candidates)
    assert torch.equal(candidates.draw.get_state(), generator().get_state())


def test_a_uniform_choice_is_a_matter_of_the_generator_alone() -> None:
    """Each of the 12 ordered pairs out of 4 should come 1 time in 12: 5 deviations are 48."""
    choose = coresets.get("uniform")
    found = Counter(
        tuple(choose(offer(normal(4, 2, seed=s), 2, seed=s)).tolist()) for s in range(1200)
    )
    assert len(found) == 12 and all(abs(times - 100) < 48 for times in found.values())
    one, other = (choose(offer(normal(50, 2, seed=s), 9, seed=5)) for s in range(2))
    assert torch.equal(one, other)


# -------------------------------------------------------------------------------------- prototypes


def test_the_prototype_by_hand() -> None:
    """(3 * [1, 2] + [2, 0] + [3, 6]) / 5 = [8/5, 12/5]."""
    features = torch.tensor([[2.0, 0.0], [3.0, 6.0]])
    found = coresets.prototype(features, torch.tensor([1.0, 2.0]).double(), 3)
    assert found.dtype == torch.float64
    assert found.tolist() == [8 / 5, 12 / 5]
    assert coresets.prototype(features, zeros(2), 0).tolist() == [2.5, 3]


def test_the_prototype_of_nothing_and_of_what_is_no_number() -> None:
    assert coresets.prototype(torch.empty(0, 2), zeros(2), 0).tolist() == [0, 0]
    assert coresets.prototype(torch.empty(0, 1), zeros(1) + 7, 5).tolist() == [7]
    features = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [3.0, torch.inf], [5.0, 4.0]])
    assert coresets.prototype(features, zeros(2), 0).tolist() == [3, 3]


@quick
@given(seed=seeds, parts=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_the_running_prototype_is_the_mean_of_all(seed: int, parts: list[int]) -> None:
    """When each mean stands exactly for all that came before."""
    features = normal(sum(parts), 3, seed=seed)
    running, seen = zeros(3), 0
    for part in features.split(parts):
        running, seen = coresets.prototype(part, running, seen), seen + len(part)
    expected = features.double().mean(0) if seen else zeros(3)
    torch.testing.assert_close(running, expected, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------- herding

vectors = st.integers(1, 3).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-3, 3), min_size=width, max_size=width), min_size=2, max_size=8
    )
)


def distance(one: Sequence[Fraction], other: Sequence[Fraction]) -> Fraction:
    return sum(((a - b) ** 2 for a, b in zip(one, other, strict=True)), Fraction())


def exact_herding(rows: list[list[int]], target: list[Fraction], chosen: list[int]) -> list[int]:
    """All pictures in the order of their choice: min || p - mean(S + i) || in exact fractions."""
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
def test_herding_is_the_greedy_choice_in_exact_arithmetic(
    rows: list[list[int]], quarters: list[int]
) -> None:
    """Duplicates and other ties are frequent here, and quarters are exact in float64 too."""
    target = [Fraction(q, 4) for q in quarters[: len(rows[0])]]
    candidates = offer(torch.tensor(rows).float(), len(rows))
    candidates = replace(candidates, prototype=torch.tensor([float(t) for t in target]).double())
    assert herding.choose(candidates).tolist() == exact_herding(rows, target, [])
    first = torch.tensor([len(rows) - 1])
    found = herding.extend(candidates, first).tolist()
    assert found == exact_herding(rows, target, first.tolist())


@quick
@given(seed=seeds, scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_herding_is_the_greedy_choice_on_features(seed: int, scale: float) -> None:
    features = scale * normal(40, 16, seed=seed).relu()
    chosen = herding.choose(offer(features, 12)).tolist()
    many, goal = features.numpy().astype(float), features.numpy().astype(float).mean(0)
    for size, pick in enumerate(chosen):
        errors = {
            i: np.linalg.norm(goal - many[[*chosen[:size], i]].mean(0))
            for i in set(range(40)) - set(chosen[:size])
        }
        assert min(errors, key=lambda i: float(errors[i])) == pick


def test_equal_pictures_are_told_apart_by_their_place() -> None:
    """Wherever they stand in the matrix, and however wide it is."""
    for width in (1, 2, 3, 5, 8, 33, 512):
        features = normal(7, width, seed=width).repeat(9, 1)  # row i equals rows i + 7, i + 14 ...
        for rule in ("herding", "k_centre"):
            chosen = coresets.get(rule)(offer(features, 63)).tolist()
            for row in range(7):
                copies = [place for place in chosen if place % 7 == row]
                assert copies == sorted(copies)


def test_the_error_falls_on_average_and_ends_at_nothing() -> None:
    """Mean over 100 classes of 12 pictures, and below that of a random choice.

    The one picture left out of 11 is the one that fitted worst all along, so that the error rises
    once more before the last; such a choice is none.
    """
    errors = {"herding": np.zeros(12), "uniform": np.zeros(12)}
    for seed in range(100):
        features = normal(12, 4, seed=seed)
        for rule, error in errors.items():
            chosen = features[coresets.get(rule)(offer(features, 12, seed=seed))].double()
            means = chosen.cumsum(0) / torch.arange(1, 13)[:, None]
            error += (means - features.double().mean(0)).norm(dim=1).numpy() / 100
    assert (np.diff(errors["herding"])[:8] < 0).all()
    assert errors["herding"][10] > errors["herding"][9]
    assert (errors["herding"][:9] < 0.7 * errors["uniform"][:9]).all()
    assert max(error[-1] for error in errors.values()) < 1e-12


# ---------------------------------------------------------------- the printed problem and k-centre

SHAPES = [(3, 8), (8, 8), (30, 8), (30, 1), (1, 5)]


def problem(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """The printed problem as it is printed: the error of a, and its gradient, need these two."""
    matrix = candidates.features.double().T / len(candidates.features)
    return matrix, candidates.prototype - candidates.kept


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_least_squares_is_the_shortest_solution_of_the_normal_equations(
    shape: tuple[int, int], seed: int
) -> None:
    """Compared with the pseudo-inverse; the last pictures are copies, so that ranks are low."""
    features = normal(*shape, seed=seed)
    features[-2:] = features[0]
    candidates = awkward(features)
    matrix, gap = problem(candidates)
    a = least_squares.coefficients(candidates)
    torch.testing.assert_close(matrix.T @ (matrix @ a), matrix.T @ gap, rtol=0, atol=1e-10)
    shortest = torch.linalg.pinv(matrix, rtol=1e-9) @ gap
    torch.testing.assert_close(a, shortest, rtol=1e-8, atol=1e-8)
    ranks = least_squares.choose(candidates)
    assert (a[ranks].diff() <= 1e-6).all()


def test_with_nothing_kept_the_printed_problem_selects_nothing() -> None:
    """a = 1 is the only solution of both, so that what is chosen is what comes first."""
    features = normal(20, 50)
    for rule in (least_squares, nonnegative):
        torch.testing.assert_close(rule.coefficients(offer(features, 5)), torch.ones(20).double())
        assert rule.choose(offer(features, 5)).tolist() == [0, 1, 2, 3, 4]


def test_directions_below_the_precision_of_features_are_not_followed() -> None:
    """Followed, the part of the gap along the second feature would ask for a of 10^6 and more."""
    features = torch.ones(40, 2)
    features[:, 1] = 1e-7 * normal(40, seed=2)
    a = least_squares.coefficients(awkward(features))
    assert a.abs().max() < 10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_nonnegative_coefficients_satisfy_karush_kuhn_tucker(
    shape: tuple[int, int], seed: int
) -> None:
    """a >= 0, gradient >= 0, and one of the two is 0 for each picture."""
    candidates = awkward(normal(*shape, seed=seed))
    matrix, gap = problem(candidates)
    a = nonnegative.coefficients(candidates)
    gradient = matrix.T @ (matrix @ a - gap)
    assert (a >= 0).all() and (gradient > -1e-10).all()
    assert (a * gradient).abs().max() < 1e-10


def test_what_nonnegative_leaves_free_is_filled_by_herding() -> None:
    candidates = awkward(normal(30, 8, seed=2))
    a = nonnegative.coefficients(candidates)
    positive = int((a > 0).sum())
    assert 2 < positive < 20
    for count in (2, positive, 20):
        chosen = nonnegative.choose(replace(candidates, count=count))
        first = a.argsort(descending=True)[: min(count, positive)]
        assert torch.equal(chosen[: len(first)], first)
        assert torch.equal(chosen, herding.extend(replace(candidates, count=count), first))


@quick
@given(rows=vectors)
def test_k_centre_is_farthest_first_from_the_herding_pick(rows: list[list[int]]) -> None:
    exact = [[Fraction(value) for value in row] for row in rows]
    candidates = offer(torch.tensor(rows).float(), len(rows))
    expected = herding.choose(candidates).tolist()[:1]
    while len(expected) < len(rows):
        free = [i for i in range(len(rows)) if i not in expected]
        expected.append(
            max(free, key=lambda i: min(distance(exact[i], exact[k]) for k in expected))
        )
    assert k_centre.choose(candidates).tolist() == expected


@quick
@given(seed=seeds, count=st.integers(1, 4))
def test_k_centre_is_at_most_twice_the_best(seed: int, count: int) -> None:
    features = normal(9, 2, seed=seed)
    apart = torch.cdist(features.double(), features.double()).numpy()

    def radius(centres: Sequence[int]) -> float:
        return float(apart[:, list(centres)].min(1).max())

    best = min(map(radius, combinations(range(9), count)))
    assert radius(k_centre.choose(offer(features, count)).tolist()) <= 2 * best


# ---------------------------------------------------------------------------------------- MixStyle


def pictures(n: int, low: int = 0, high: int = 256, seed: int = 0, side: int = 4) -> Tensor:
    values = torch.randint(low, high, (n, 3, side, side), generator=generator(seed))
    return values.to(torch.uint8)


@quick
@given(seed=seeds)
def test_mixstyle_is_its_formula_and_moves_the_moments(seed: int) -> None:
    """Mean and deviation of each channel are the mixed ones, up to epsilon, before clipping."""
    content, style = pictures(3, seed=seed) / 255.0, pictures(3, seed=seed + 1) ** 1.5 / 4096
    share = torch.rand(3, generator=generator(seed), dtype=torch.float64)
    found = restyle_features(content.double(), style.double(), share).numpy()
    for n, own in enumerate(share.tolist()):
        for c in range(3):
            x, y = content[n, c].double().numpy(), style[n, c].double().numpy()
            spread, other = np.sqrt(x.var() + EPSILON), np.sqrt(y.var() + EPSILON)
            deviation = own * spread + (1 - own) * other
            mean = own * x.mean() + (1 - own) * y.mean()
            np.testing.assert_allclose(found[n, c], deviation * (x - x.mean()) / spread + mean)
            np.testing.assert_allclose(found[n, c].mean(), mean)
            np.testing.assert_allclose(found[n, c].std(), deviation, rtol=1e-4)


def test_mixstyle_by_hand() -> None:
    """100 and 150 have mean 125, deviation 25; 10 and 110 have 60, 50; halfway are 92.5, 37.5."""
    content = torch.tensor([100, 150], dtype=torch.uint8).view(1, 1, 1, 2)
    style = torch.tensor([10, 110], dtype=torch.uint8).view(1, 1, 1, 2)
    for share, expected in ((1.0, [100, 150]), (0.5, [55, 130]), (0.0, [10, 110])):
        found = mixstyle(content, style, torch.tensor([share]))
        assert found.dtype == torch.uint8 and found.flatten().tolist() == expected
    bright = torch.tensor([90, 90, 90, 190], dtype=torch.uint8).view(1, 1, 2, 2)
    harsh = torch.tensor([0, 0, 255, 255], dtype=torch.uint8).view(1, 1, 2, 2)
    # Mean 127.5, deviation 127.5: the three below the mean by 1 / sqrt(3), the other by sqrt(3).
    assert mixstyle(bright, harsh, torch.zeros(1)).flatten().tolist() == [54, 54, 54, 255]
    assert mixstyle(255 - bright, harsh, torch.zeros(1)).flatten().tolist() == [201, 201, 201, 0]


@quick
@given(seed=seeds, side=st.sampled_from([1, 2, 5]), spread=st.sampled_from([1, 2, 256]))
def test_a_share_of_one_is_the_identity_bit_for_bit(seed: int, side: int, spread: int) -> None:
    content, style = pictures(4, 0, spread, seed, side), pictures(4, seed=seed + 1, side=side)
    assert torch.equal(mixstyle(content, style, torch.ones(4)), content)


@quick
@given(seed=seeds)
def test_a_share_of_zero_takes_all_moments(seed: int) -> None:
    """Up to rounding: half a level for the mean, one for the deviation; nothing is clipped here."""
    content, style = pictures(4, 80, 176, seed, 8), pictures(4, 100, 140, seed + 1, 8)
    found = mixstyle(content, style, torch.zeros(4)).double()
    assert (found.mean((2, 3)) - style.double().mean((2, 3))).abs().max() <= 0.5
    assert (found.std((2, 3)) - style.double().std((2, 3))).abs().max() <= 1


@pytest.mark.parametrize("side", [1, 4])
def test_constant_pictures_stay_finite(side: int) -> None:
    """A constant content becomes the style's mean; a constant style leaves next to no contrast."""
    flat, rich = torch.full((2, 3, side, side), 7, dtype=torch.uint8), pictures(2, side=side)
    half = torch.full((2,), 0.5)
    assert torch.isfinite(restyle_features(flat / 255.0, rich / 255.0, half)).all()
    expected = rich.double().mean((2, 3), keepdim=True).round().expand(rich.shape)
    assert torch.equal(mixstyle(flat, rich, torch.zeros(2)), expected.to(torch.uint8))
    faded = mixstyle(rich, flat, torch.zeros(2)).int()
    assert (faded - 7).abs().max() <= 1


def test_gradients_flow_through_the_content_only_and_not_through_its_moments() -> None:
    content, style = (
        normal(2, 3, 4, 4).requires_grad_(),
        normal(2, 3, 4, 4, seed=1).requires_grad_(),
    )
    share = torch.tensor([0.25, 1.0], dtype=torch.float64)
    mixed = restyle_features(content, style, share)
    assert mixed.dtype == torch.float32
    weights = normal(2, 3, 4, 4, seed=2)
    (mixed * weights).sum().backward()
    spread = content.detach().var((2, 3), correction=0, keepdim=True).add(EPSILON).sqrt()
    other = style.detach().var((2, 3), correction=0, keepdim=True).add(EPSILON).sqrt()
    own = share.float().view(2, 1, 1, 1)
    assert content.grad is not None and style.grad is None
    torch.testing.assert_close(content.grad, weights * (own + (1 - own) * other / spread))
    torch.testing.assert_close(content.grad[1], weights[1])


@pytest.mark.parametrize("alpha", [0.1, 1.0, 4.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    found = shares(5000, generator(), alpha).numpy()
    assert found.dtype == np.float64
    assert stats.kstest(found, stats.beta(alpha, alpha).cdf).pvalue > 0.01


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.1])
def test_shares_are_numbers_where_small_alphas_underflow(alpha: float) -> None:
    """And lie at either end as often, not on one side."""
    found = shares(20000, generator(), alpha)
    assert ((found >= 0) & (found <= 1)).all()
    assert abs(float(found.mean()) - 0.5) < 0.02


def test_shares_are_a_matter_of_the_generator() -> None:
    draw = generator(1)
    first, second = shares(9, draw), shares(9, draw)
    assert torch.equal(first, shares(9, generator(1))) and not torch.equal(first, second)
    assert torch.equal(first, shares(9, generator(1), alpha=0.1))
    assert len(shares(0, draw)) == 0


@quick
@given(labels=st.lists(st.integers(0, 3), max_size=20), seed=seeds)
def test_partners_are_of_the_same_class_and_everyone_is_one(labels: list[int], seed: int) -> None:
    classes = torch.tensor(labels, dtype=torch.int64)
    partners = same_class(classes, generator(seed))
    assert torch.equal(classes[partners], classes)
    assert sorted(partners.tolist()) == list(range(len(labels)))
    assert torch.equal(partners, same_class(classes, generator(seed)))


def test_partners_are_drawn() -> None:
    """Of three of a class each is the partner of the first 1 time in 3; 5 deviations are 82."""
    classes = torch.tensor([1, 0, 1, 0, 1])
    first = Counter(int(same_class(classes, generator(seed))[0]) for seed in range(1200))
    assert first.keys() == {0, 2, 4} and all(abs(n - 400) < 82 for n in first.values())


def test_styles_are_mixed_after_the_first_pooling_as_long_as_asked_for() -> None:
    network = Network("cnn", features=8, channels=(4, 6), norm="group")
    encoder = models.build(network, (3, 20, 20), 10, seed=0).encoder
    assert isinstance(encoder, nn.Sequential)
    batch, labels = normal(6, 3, 20, 20), torch.tensor([0, 1, 0, 1, 0, 1])
    before = encoder(batch)
    with mixed_styles(encoder, labels, 0.7, generator(2)):
        mixed = encoder(batch)
    assert torch.equal(encoder(batch), before) and not torch.equal(mixed, before)
    lower, upper = encoder[:4], encoder[4:]  # convolution, norm, ReLU, pooling | the rest
    maps, draw = lower(batch), generator(2)
    partners, share = same_class(labels, draw), shares(6, draw, 0.7)
    torch.testing.assert_close(mixed, upper(restyle_features(maps, maps[partners], share)))


# ------------------------------------------------------------------------------------------ memory


def encode(pictures: Tensor) -> Tensor:
    """A frozen encoder: the pixels themselves."""
    return pictures.flatten(1).float() / 255


def visit(
    before: Memory, label: int, task: int, pictures: Tensor, options: Keep, seed: int = 0
) -> Memory:
    """The memory after one more visit, under the frozen encoder."""
    kept = encode(before["pictures"][before["labels"] == label])
    labels, draw = torch.full((len(pictures),), label), generator(seed)
    proposal = coresets.as_they_are(pictures, labels)
    new = memory.of_class(proposal, label, task, encode(pictures))
    return memory.update(before, label, new, len(pictures), kept, options, draw)


def visits(options: Keep, *given: tuple[int, Tensor]) -> Memory:
    """The memory of class 0 after visits of tasks with their pictures."""
    after = memory.empty(pictures(1), classes=2)
    for number, (task, several) in enumerate(given):
        after = visit(after, 0, task, several, options, seed=number)
    return after


def spied(monkeypatch: pytest.MonkeyPatch) -> list[Candidates]:
    """All that rules are asked from now on."""
    asked: list[Candidates] = []

    def choose(candidates: Candidates) -> Tensor:
        asked.append(candidates)
        return torch.arange(candidates.places)

    monkeypatch.setattr(memory, "get", lambda rule: choose)
    return asked


def as_bytes(several: Tensor) -> list[bytes]:
    return [picture.contiguous().numpy().tobytes() for picture in several]


def test_an_empty_memory() -> None:
    found = memory.empty(pictures(5), classes=4)
    assert found["pictures"].shape == (0, 3, 4, 4) and found["pictures"].dtype == torch.uint8
    assert found["seen"].tolist() == [0, 0, 0, 0]
    assert all(found[name].dtype == torch.int64 for name in ("labels", "tasks", "seen"))
    assert memory.size(found) == 0 and memory.past(found, 0) == []


def test_tasks_of_a_memory_and_what_it_costs() -> None:
    """6 pictures of 3 * 4 * 4 bytes; besides them, 8 bytes for 6 labels, 6 tasks and 2 counts."""
    options = Keep(per_class=6, merge="replace")
    found = visits(options, (4, pictures(1)), (1, pictures(3, seed=1)), (2, pictures(2, seed=2)))
    assert found["tasks"].tolist() == [2, 2, 1, 1, 1, 4]
    assert memory.of_task(found, 1).tolist() == [2, 3, 4] and not len(memory.of_task(found, 3))
    assert memory.past(found, 2) == [1, 4] and memory.past(found, 9) == [1, 2, 4]
    assert memory.size(found) == 6 * 48 and tree_bytes(found) == 6 * 48 + 8 * (6 + 6 + 2)


stories = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=8)
keeps = st.builds(
    Keep,
    rule=st.sampled_from(RULES),
    per_class=st.integers(0, 9),
    merge=st.sampled_from(MERGES),
    space=st.sampled_from(["image", "feature", "off"]),
)


@settings(quick, max_examples=150)
@given(story=stories, sizes=st.lists(st.integers(0, 7), min_size=8, max_size=8), options=keeps)
def test_whatever_happens_a_memory_keeps_its_promises(
    story: list[tuple[int, int]], sizes: list[int], options: Keep
) -> None:
    """Each class has all it was ever offered, or `per_class` of it; nothing changes in place."""
    pool = {(c, t): pictures(sizes[4 * c + t], seed=4 * c + t) for c in (0, 1) for t in range(4)}
    now = memory.empty(pictures(1), classes=2)
    for number, (label, task) in enumerate(story):
        before, untouched = now, small.copied(now)
        now = visit(before, label, task, pool[label, task], options, seed=number)
        small.assert_equal_trees(before, untouched)
        assert now["seen"][label] == before["seen"][label] + len(pool[label, task])
        small.assert_equal_trees(of_class(now, 1 - label), of_class(before, 1 - label))
        for c in (0, 1):
            met = {t for a, t in story[: number + 1] if a == c}
            offered = sum(len(pool[c, t]) for t in met)
            kept = now["labels"] == c
            assert int(kept.sum()) == min(options.per_class, offered)
            if options.merge != "mixstyle" or options.space != "image":
                contents = as_bytes(now["pictures"][kept])
                assert len(set(contents)) == len(contents)
                for content, t in zip(contents, now["tasks"][kept].tolist(), strict=True):
                    assert content in as_bytes(pool[c, t])


def of_class(found: Memory, label: int) -> Memory:
    mine = found["labels"] == label
    rows = {name: found[name][mine] for name in ("pictures", "labels", "tasks")}
    return {**rows, "seen": found["seen"][label]}


@pytest.mark.parametrize("merge", MERGES)
def test_a_visit_is_a_matter_of_its_arguments_and_its_generator(merge: Any) -> None:
    options = Keep(rule="uniform", per_class=4, merge=merge)
    first = visits(options, (0, pictures(9)))
    given = (first, 0, 1, pictures(9, seed=1), options)
    small.assert_equal_trees(visit(*given, seed=3), visit(*given, seed=3))
    assert not torch.equal(visit(*given, seed=3)["pictures"], visit(*given, seed=4)["pictures"])


@pytest.mark.parametrize("merge", MERGES)
def test_a_class_met_for_the_first_time_is_what_the_rule_chooses(merge: Any) -> None:
    several = pictures(30)
    found = visits(Keep(per_class=5, merge=merge), (3, several))
    expected = several[herding.choose(offer(encode(several), 5))]
    assert torch.equal(found["pictures"], expected)
    assert found["tasks"].tolist() == [3] * 5 and found["labels"].tolist() == [0] * 5
    assert found["seen"].tolist() == [30, 0]


def test_what_a_rule_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory holds the whole class and the encoder is frozen, so p is the mean of all."""
    one, two = pictures(3), pictures(5, seed=1)
    everything = encode(torch.cat([one, two])).double().mean(0)
    kept, nothing = encode(one).double().mean(0), zeros(48)
    among = {"mixstyle": (two, kept), "replace": (two, nothing)}
    among["reselect"] = (torch.cat([one, two]), nothing)
    asked = spied(monkeypatch)
    for merge, (candidates, beside) in among.items():
        visits(Keep(per_class=4, merge=merge), (0, one), (1, two))  # type: ignore[arg-type]
        torch.testing.assert_close(asked[-2].prototype, kept)
        assert not asked[-2].kept.any() and torch.equal(asked[-2].pictures, one)
        torch.testing.assert_close(asked[-1].prototype, everything)
        torch.testing.assert_close(asked[-1].kept, beside)
        assert torch.equal(asked[-1].pictures, candidates)
        assert torch.equal(asked[-1].features, encode(candidates))
        assert asked[-1].count == 4


def test_what_is_not_remembered_has_no_weight_in_the_prototype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, two = spied(monkeypatch), pictures(5, seed=1)
    found = visits(Keep(per_class=0), (0, pictures(3)), (1, two))
    torch.testing.assert_close(asked[-1].prototype, encode(two).double().mean(0))
    assert not len(found["pictures"]) and found["seen"].tolist() == [8, 0]


def test_old_pictures_take_the_style_of_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pick lends its style to one old picture, which stays what and where it was."""
    one, two = pictures(9), pictures(30, 60, 120, seed=1)
    options = Keep(per_class=6)
    before, called = visits(options, (0, one)), []

    def lending(content: Tensor, style: Tensor, share: Tensor) -> Tensor:
        called.append((content, style, share))
        return mixstyle(content, style, share)

    monkeypatch.setattr(memory, "mixstyle", lending)
    after = visit(before, 0, 1, two, options)
    ((content, style, share),) = called
    assert torch.equal(content, before["pictures"])
    target = coresets.prototype(encode(two), encode(content).double().mean(0), 9)
    picks = two[herding.choose(replace(offer(encode(two), 6), prototype=target))]
    assert sorted(as_bytes(style)) == sorted(as_bytes(picks))
    assert as_bytes(style) != as_bytes(picks), "the pairs are not drawn"
    assert len(share.unique()) == 6
    assert torch.equal(after["pictures"], mixstyle(content, style, share))
    assert after["tasks"].tolist() == [0] * 6 and after["seen"].tolist() == [39, 0]


def test_the_parameter_of_the_beta_distribution_is_passed_on() -> None:
    """With alpha near 0 a picture keeps its style or takes another whole; near infinity, half."""
    one, two = pictures(6, 0, 60), pictures(6, 180, 240, seed=1)
    for alpha, expected in ((1e-6, {30, 210}), (1e6, {120})):
        found = visits(Keep(per_class=6, alpha=alpha), (0, one), (1, two))["pictures"]
        for level in found.double().mean((1, 2, 3)).tolist():
            assert min(abs(level - each) for each in expected) < 10


def test_few_picks_lend_their_style_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[bytes] = []

    def lending(content: Tensor, style: Tensor, share: Tensor) -> Tensor:
        lent.extend(as_bytes(style))
        return content

    monkeypatch.setattr(memory, "mixstyle", lending)
    visits(Keep(per_class=7), (0, pictures(7)), (1, pictures(3, seed=1)))
    assert sorted(Counter(lent).values()) == [2, 2, 3]


@pytest.mark.parametrize("space", ["feature", "off"])
def test_without_mixstyle_on_pictures_the_old_ones_stay(space: Any) -> None:
    options = Keep(per_class=6, space=space)
    before = visits(options, (0, pictures(9)))
    after = visit(before, 0, 1, pictures(9, seed=1), options)
    small.assert_equal_trees({**after, "seen": before["seen"]}, before)
    assert after["seen"].tolist() == [18, 0]


@pytest.mark.parametrize("space", ["image", "off"])
def test_a_later_task_fills_up_what_an_earlier_one_has_left(space: Any) -> None:
    """With the first of its picks as they are; the same task again has nothing to add."""
    one, two = pictures(3), pictures(9, seed=1)
    options = Keep(per_class=5, space=space)
    before = visits(options, (0, one), (0, one))
    assert before["tasks"].tolist() == [0, 0, 0]
    after = visit(before, 0, 1, two, options)
    assert after["tasks"].tolist() == [0, 0, 0, 1, 1]
    kept = encode(before["pictures"]).double().mean(0)
    target = coresets.prototype(encode(two), kept, 6)
    first = herding.choose(replace(offer(encode(two), 2), prototype=target))
    assert torch.equal(after["pictures"][3:], two[first])


def test_new_pictures_replace_only_as_many_as_they_are() -> None:
    one, two = pictures(9), pictures(2, seed=1)
    options = Keep(per_class=5, merge="replace")
    before = visits(options, (0, one))
    after = visit(before, 0, 1, two, options)
    assert after["tasks"].tolist() == [1, 1, 0, 0, 0]
    assert sorted(as_bytes(after["pictures"][:2])) == sorted(as_bytes(two))
    assert torch.equal(after["pictures"][2:], before["pictures"][:3])  # the first that were chosen
    assert visit(after, 0, 2, pictures(7, seed=2), options)["tasks"].tolist() == [2] * 5


def test_reselect_chooses_among_old_and_new_together() -> None:
    one, two = pictures(9), pictures(7, seed=1)
    options = Keep(per_class=5, merge="reselect")
    before = visits(options, (0, one))
    after = visit(before, 0, 1, two, options)
    together = torch.cat([before["pictures"], two])
    target = coresets.prototype(encode(two), encode(before["pictures"]).double().mean(0), 9)
    chosen = herding.choose(replace(offer(encode(together), 5), prototype=target))
    assert torch.equal(after["pictures"], together[chosen])
    assert after["tasks"].tolist() == (chosen >= 5).long().tolist()
    assert len(after["tasks"].unique()) == 2


def test_a_visit_without_pictures_changes_nothing() -> None:
    for merge in MERGES:
        options = Keep(per_class=5, merge=merge)  # type: ignore[arg-type]
        before = visits(options, (0, pictures(9)))
        small.assert_equal_trees(visit(before, 0, 0, pictures(0), options), before)


def test_a_memory_survives_a_checkpoint(tmp_path: Path) -> None:
    """Down to how it lies in memory, on which the last bit of a convolution can depend; whoever
    goes on with it goes on alike."""
    several = pictures(9).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # as data sets lie
    options = Keep(per_class=4)
    first = visit(memory.empty(several, classes=2), 0, 0, several, options)
    found = visit(first, 0, 1, several, options)
    assert first["pictures"].is_contiguous()
    checkpoint.save(tmp_path / "a.safetensors", {"memory": found}, {})
    loaded = checkpoint.load(tmp_path / "a.safetensors", {})
    assert loaded is not None
    small.assert_equal_trees(loaded["memory"], found)
    for name, tensor in found.items():
        if tensor.numel():
            assert loaded["memory"][name].stride() == tensor.stride(), name
    given = (0, 2, several, options)
    small.assert_equal_trees(visit(loaded["memory"], *given), visit(found, *given))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rule": "herdin"}, "here.rule 'herdin' is unknown; did you mean 'herding'"),
        ({"rule": "memory"}, "here.rule 'memory' is unknown"),
        ({"per_class": -1}, "here.per_class is -1; it must be at least 0"),
        ({"alpha": 0.0}, "here.alpha is 0.0; it must be above 0"),
        ({"merge": "mix"}, "here.merge 'mix' is unknown"),
        ({"space": "images"}, "here.space 'images' is unknown; did you mean 'image'"),
    ],
)
def test_impossible_parameters_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(config.ParameterError, match=message):
        config.build(Keep, values, "here")
