"""Exemplar memories: merging, bounds, the reservoir, mixed styles."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_tasks import Array, generator
from rule_tasks import colour_images as images
from scipy import stats
from torch import Tensor

from stamp_core.coresets import memory
from stamp_core.coresets.memory import (
    Memory,
    MemoryParams,
    mix_statistics,
    mixing_weights,
    mixstyle_images,
)
from stamp_core.coresets.selection import base
from stamp_core.results.records import tree_bytes

RULES = [rule for rule in base.selection_rules() if not base.proposes(rule)]
MERGES = ("mixstyle", "reservoir")
quick = settings(deadline=None, max_examples=50, derandomize=True)


def encode(images: Tensor) -> Tensor:
    """A frozen encoder: the pixels themselves."""
    return images.flatten(1).float() / 255


def updated(
    before: Memory, label: int, task: int, images: Tensor, params: MemoryParams, seed: int = 0
) -> Memory:
    features = encode(before["images"][before["labels"] == label])
    proposal = base.hard_label_proposal(images, torch.full((len(images),), label))
    new = memory.class_samples(proposal, label, task, encode(images))
    args = (before, label, new, len(images), features, params, generator(seed))
    return memory.update_memory(*args)


def memory_of(params: MemoryParams, *tasks: tuple[int, Tensor]) -> Memory:
    """The memory of class 0 after some tasks with their images."""
    after = memory.empty_memory(images(1), classes=2)
    for seed, (task, several) in enumerate(tasks):
        after = updated(after, 0, task, several, params, seed=seed)
    return after


def test_tasks_and_bytes_of_a_memory():
    """6 images of 3 * 4 * 4 bytes, and 8 bytes each for 6 labels, 6 tasks and 2 counts."""
    params = MemoryParams(exemplars_per_class=6)
    after = memory_of(params, (4, images(1)), (1, images(3, seed=1)), (2, images(2, seed=2)))
    assert after["tasks"].tolist() == [4, 1, 1, 1, 2, 2]
    assert memory.past_tasks(after, 2) == [1, 4] and memory.past_tasks(after, 9) == [1, 2, 4]
    assert tree_bytes(after) == 6 * 48 + 8 * (6 + 6 + 2)


@settings(quick, max_examples=150)
@given(
    sequence=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 7), min_size=8, max_size=8),
    params=st.builds(
        MemoryParams,
        selection=st.sampled_from(RULES),
        exemplars_per_class=st.integers(0, 9),
        merge=st.sampled_from(MERGES),
    ),
)
def test_a_memory_keeps_its_bounds(sequence, sizes, params):
    """Each class has all images it met, or `exemplars_per_class`; nothing changes in place.

    A reservoir is given no task twice; for MixStyle a repeated one adds no image.
    """
    pool = {(c, t): images(sizes[4 * c + t], seed=4 * c + t) for c in (0, 1) for t in range(4)}
    if params.merge == "reservoir":
        sequence = list(dict.fromkeys(sequence))
    now = memory.empty_memory(images(1), classes=2)
    for number, (label, task) in enumerate(sequence):
        before, untouched = now, deepcopy(now)
        now = updated(before, label, task, pool[label, task], params, seed=number)
        small.assert_equal_trees(before, untouched)
        assert now["seen"][label] == before["seen"][label] + len(pool[label, task])
        small.assert_equal_trees(of_class(now, 1 - label), of_class(before, 1 - label))
        for c in (0, 1):
            met = {t for a, t in sequence[: number + 1] if a == c}
            offered = sum(len(pool[c, t]) for t in met)
            assert int((now["labels"] == c).sum()) == min(params.exemplars_per_class, offered)


def of_class(whole: Memory, label: int) -> Memory:
    own = whole["labels"] == label
    fields = {name: whole[name][own] for name in ("images", "labels", "tasks")}
    return {**fields, "seen": whole["seen"][label]}


def chosen(rule: str, features: Array, prototype: Array, exemplar_mean: Array) -> list[int]:
    """All images in the order of their choice: by herding, or by the coefficients as printed."""
    if rule == "least_squares":
        a = np.linalg.pinv(features.T / len(features), 1e-6) @ (prototype - exemplar_mean)
        return np.argsort(-a.round(6), kind="stable").tolist()
    order: list[int] = []
    while len(order) < len(features):
        means = (features[order].sum(0) + features) / (len(order) + 1)
        errors = np.linalg.norm(means - prototype, axis=1)
        order.append(min(set(range(len(features))) - set(order), key=lambda i: (errors[i], i)))
    return order


def defined_update(
    before: Memory, task: int, new: Tensor, params: MemoryParams, seed: int
) -> tuple[Tensor, list[int]]:
    """Images and tasks of class 0 after images of one more task, one step at a time.

    The prototype is a running mean: old exemplars stand for all images seen. Their style, or which
    of them stay, is drawn; free places go to the rule's first choices among the new images.
    """
    draws, count = generator(seed), params.exemplars_per_class
    old, tasks = before["images"], before["tasks"].tolist()
    seen, width = int(before["seen"][0]), encode(new).shape[1]
    x, y = encode(old).double().numpy(), encode(new).double().numpy()
    if not len(old):
        first = chosen(params.selection, y, y.mean(0), np.zeros(width))[:count]
        return new[first], len(first) * [task]
    prototype = (seen * x.mean(0) + y.sum(0)) / (seen + len(new))
    if params.merge == "reservoir":
        sample = torch.randperm(seen + len(new), generator=draws)[: min(count, len(old) + len(new))]
        number = min(max(int((sample < seen).sum()), len(sample) - len(new)), len(old))
        stay = sorted(torch.randperm(len(old), generator=draws)[:number].tolist())
        mean = x[stay].mean(0) if stay else np.zeros(width)
        first = chosen(params.selection, y, prototype, mean)
        every, origins = torch.cat([old[stay], new[first]]), [tasks[i] for i in stay]
    else:
        first = chosen(params.selection, y, prototype, x.mean(0))[:count]
        order = torch.randperm(len(first), generator=draws)
        styles = new[first][[int(order[i % len(order)]) for i in range(len(old))]]
        weights = mixing_weights(len(old), draws, params.mixstyle_alpha)
        restyled = mixstyle_images(old, styles, weights)
        every, origins = torch.cat([restyled, new[first]]), list(tasks)
        if task in tasks:
            return restyled, tasks
    return every[:count], (origins + len(first) * [task])[:count]


@pytest.mark.parametrize("rule", ["herding", "least_squares"])
@pytest.mark.parametrize("merge", MERGES)
def test_a_class_is_merged_by_its_definition(merge, rule):
    """A task may be met again; a class may have fewer images than places, or more."""
    for seed in range(12):
        params = MemoryParams(selection=rule, exemplars_per_class=2 + 3 * (seed % 3), merge=merge)
        now = memory.empty_memory(images(1), classes=2)
        for number, task in enumerate((4, 0, 0, 7) if merge == "mixstyle" else (4, 0, 7)):
            new = images(1 + (seed * 5 + number * 3) % 9, seed=10 * seed + number)
            expected, tasks = defined_update(now, task, new, params, seed)
            now = updated(now, 0, task, new, params, seed)
            assert torch.equal(now["images"], expected)
            assert now["tasks"].tolist() == tasks and now["labels"].tolist() == len(tasks) * [0]


# --------------------------------------------------------------------------------- the reservoir


def every_outcome(
    draw: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[int]]:
    """Every result of a function that draws as many random permutations of fixed sizes each time.

    All are equally likely.
    """
    sizes: list[int] = []
    monkeypatch.setattr(torch, "randperm", lambda n, generator: sizes.append(n) or torch.arange(n))
    draw()
    for orders in itertools.product(*(itertools.permutations(range(n)) for n in sizes)):
        left = iter(orders)

        def randperm(n: int, generator: torch.Generator, left: Any = left) -> Tensor:
            order = next(left)
            assert len(order) == n
            return torch.tensor(order, dtype=torch.int64)

        monkeypatch.setattr(torch, "randperm", randperm)
        yield draw()
        assert next(left, None) is None


@pytest.mark.parametrize(
    ("sizes", "count"), [((2, 2), 1), ((2, 2), 3), ((3, 1), 2), ((1, 2, 1), 2), ((1, 1, 2), 3)]
)
def test_a_random_reservoir_is_a_uniform_sample_of_all_images(sizes, count, monkeypatch):
    params = MemoryParams(selection="uniform", exemplars_per_class=count, merge="reservoir")
    levels = torch.arange(sum(sizes), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)
    tasks = list(enumerate(levels.split(list(sizes))))
    found = Counter(
        frozenset(kept)
        for kept in every_outcome(
            lambda: memory_of(params, *tasks)["images"][:, 0, 0, 0].tolist(), monkeypatch
        )
    )
    subsets = {frozenset(each) for each in itertools.combinations(range(sum(sizes)), count)}
    assert found.keys() == subsets and len(set(found.values())) == 1


@settings(quick, max_examples=200)
@given(
    count=st.integers(1, 9),
    old=st.integers(1, 9),
    new=st.integers(1, 12),
    seen=st.integers(1, 30),
    met=st.integers(1, 30),
    seed=st.integers(0, 10**6),
)
def test_all_places_are_filled_whatever_a_rule_proposes(count, old, new, seen, met, seed):
    """Fewer candidates than images of the class, or synthetic ones that are more."""
    old = min(old, count)
    stay = memory._draw_remaining(old, new, seen, met, count, generator(seed)).tolist()
    assert stay == sorted(set(stay)) and set(stay) <= set(range(old))
    assert len(stay) + min(new, count - len(stay)) == min(count, old + new)


def test_synthetic_exemplars_share_the_memory_with_as_many_new_ones():
    """9 for the 4 images of each of two tasks, so 4.5 stay on average, up to 5 deviations.

    The variance is that of 9 draws from 9 and 9 images: 9 / 4 (18 - 9) / (18 - 1) = 81 / 68.
    """
    runs = 400
    draws = [memory._draw_remaining(9, 9, 4, 4, 9, generator(seed)) for seed in range(runs)]
    mean = sum(map(len, draws)) / runs
    assert abs(mean - 4.5) < 5 * math.sqrt(81 / 68 / runs)


# ----------------------------------------------------------------------------------- mixed styles


@quick
@given(
    seed=st.integers(0, 10**6), side=st.sampled_from([1, 2, 5]), spread=st.sampled_from([1, 2, 256])
)
def test_a_weight_of_one_is_the_identity_bit_for_bit(seed, side, spread):
    content, style = images(4, 0, spread, seed, side), images(4, seed=seed + 1, side=side)
    assert torch.equal(mixstyle_images(content, style, torch.ones(4)), content)


@pytest.mark.parametrize("side", [1, 4])
def test_constant_images_stay_finite(side):
    """Constant content becomes the style's mean; a constant style leaves almost no contrast."""
    flat, rich = torch.full((2, 3, side, side), 7, dtype=torch.uint8), images(2, side=side)
    half = torch.full((2,), 0.5)
    assert torch.isfinite(mix_statistics(flat / 255.0, rich / 255.0, half)).all()
    expected = rich.double().mean((2, 3), keepdim=True).round().expand(rich.shape)
    assert torch.equal(mixstyle_images(flat, rich, torch.zeros(2)), expected.to(torch.uint8))
    faded = mixstyle_images(rich, flat, torch.zeros(2)).int()
    assert (faded - 7).abs().max() <= 1


@pytest.mark.parametrize("alpha", [0.1, 1.0, 4.0])
def test_mixing_weights_follow_the_beta_distribution(alpha):
    found = mixing_weights(5000, generator(), alpha).numpy()
    assert found.dtype == np.float64
    assert stats.kstest(found, stats.beta(alpha, alpha).cdf).pvalue > 0.01
