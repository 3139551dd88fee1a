"""Exemplar memories: prototypes, what a rule is given, merging, bounds, checkpoints."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_tasks import candidates_of, generator, normal, zeros
from rule_tasks import colour_images as images
from torch import Tensor

from stamp_core.coresets import memory
from stamp_core.coresets.memory import Memory, MemoryParams, class_prototype
from stamp_core.coresets.mixstyle import mixstyle_images
from stamp_core.coresets.selection import base, herding
from stamp_core.coresets.selection.base import Candidates
from stamp_core.engine import trees
from stamp_core.results.records import tree_bytes

RULES = [rule for rule in base.selection_rules() if not base.proposes(rule)]
MERGES = ("mixstyle", "reservoir")
quick = settings(deadline=None, max_examples=50, derandomize=True)


# -------------------------------------------------------------------------------------- prototypes


def test_the_prototype_by_hand() -> None:
    """(3 * [1, 2] + [2, 0] + [3, 6]) / 5 = [8/5, 12/5]."""
    features = torch.tensor([[2.0, 0.0], [3.0, 6.0]])
    prototype = class_prototype(features, torch.tensor([1.0, 2.0]).double(), 3)
    assert prototype.dtype == torch.float64
    assert prototype.tolist() == [8 / 5, 12 / 5]
    assert class_prototype(features, zeros(2), 0).tolist() == [2.5, 3]


def test_the_prototype_without_features_and_without_finite_ones() -> None:
    assert class_prototype(torch.empty(0, 2), zeros(2), 0).tolist() == [0, 0]
    assert class_prototype(torch.empty(0, 1), zeros(1) + 7, 5).tolist() == [7]
    features = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [3.0, torch.inf], [5.0, 4.0]])
    assert class_prototype(features, zeros(2), 0).tolist() == [3, 3]


@quick
@given(seed=st.integers(0, 10**6), parts=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_the_running_prototype_is_the_mean_of_all_features(seed: int, parts: list[int]) -> None:
    """When each mean is exactly that of all earlier features."""
    features = normal(sum(parts), 3, seed=seed)
    running, seen = zeros(3), 0
    for part in features.split(parts):
        running, seen = class_prototype(part, running, seen), seen + len(part)
    expected = features.double().mean(0) if seen else zeros(3)
    torch.testing.assert_close(running, expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------ memory


def encode(images: Tensor) -> Tensor:
    """A frozen encoder: the pixels themselves."""
    return images.flatten(1).float() / 255


def updated(
    before: Memory, label: int, task: int, images: Tensor, params: MemoryParams, seed: int = 0
) -> Memory:
    """The memory after one more task, under the frozen encoder."""
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


def herded(among: Tensor, count: int, new: Tensor, old: Tensor, seen: int) -> Tensor:
    """Indices by herding among some images, for the prototype of new and old ones."""
    prototype = class_prototype(encode(new), encode(old).double().mean(0), seen)
    return herding.choose(replace(candidates_of(encode(among), count), prototype=prototype))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Candidates]:
    """The candidates of every choice; the first images are chosen."""
    every: list[Candidates] = []

    def choose(rule: str, candidates: Candidates) -> Tensor:
        every.append(candidates)
        return torch.arange(candidates.count)

    monkeypatch.setattr(memory, "choose_exemplars", choose)
    return every


def as_bytes(several: Tensor) -> list[bytes]:
    return [image.contiguous().numpy().tobytes() for image in several]


def test_an_empty_memory() -> None:
    empty = memory.empty_memory(images(5), classes=4)
    assert empty["images"].shape == (0, 3, 4, 4) and empty["images"].dtype == torch.uint8
    assert empty["seen"].tolist() == [0, 0, 0, 0]
    assert all(empty[name].dtype == torch.int64 for name in ("labels", "tasks", "seen"))
    assert memory.past_tasks(empty, 0) == []


def test_tasks_and_bytes_of_a_memory() -> None:
    """6 images of 3 * 4 * 4 bytes, and 8 bytes each for 6 labels, 6 tasks and 2 counts."""
    params = MemoryParams(exemplars_per_class=6)
    after = memory_of(params, (4, images(1)), (1, images(3, seed=1)), (2, images(2, seed=2)))
    assert after["tasks"].tolist() == [4, 1, 1, 1, 2, 2]
    assert memory.task_indices(after, 1).tolist() == [1, 2, 3]
    assert memory.task_indices(after, 3).tolist() == []
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
def test_a_memory_keeps_its_bounds(
    sequence: list[tuple[int, int]], sizes: list[int], params: MemoryParams
) -> None:
    """Each class has all images it met, or `exemplars_per_class`; nothing changes in place.

    A reservoir is given no task twice; for MixStyle a repeated one adds no image.
    """
    pool = {(c, t): images(sizes[4 * c + t], seed=4 * c + t) for c in (0, 1) for t in range(4)}
    if params.merge == "reservoir":
        sequence = list(dict.fromkeys(sequence))
    now = memory.empty_memory(images(1), classes=2)
    for number, (label, task) in enumerate(sequence):
        before, untouched = now, small.copied(now)
        now = updated(before, label, task, pool[label, task], params, seed=number)
        small.assert_equal_trees(before, untouched)
        assert now["seen"][label] == before["seen"][label] + len(pool[label, task])
        small.assert_equal_trees(of_class(now, 1 - label), of_class(before, 1 - label))
        for c in (0, 1):
            met = {t for a, t in sequence[: number + 1] if a == c}
            offered = sum(len(pool[c, t]) for t in met)
            own = now["labels"] == c
            assert int(own.sum()) == min(params.exemplars_per_class, offered)
            if params.merge == "reservoir":
                contents = as_bytes(now["images"][own])
                assert len(set(contents)) == len(contents)
                for content, t in zip(contents, now["tasks"][own].tolist(), strict=True):
                    assert content in as_bytes(pool[c, t])


def of_class(whole: Memory, label: int) -> Memory:
    own = whole["labels"] == label
    fields = {name: whole[name][own] for name in ("images", "labels", "tasks")}
    return {**fields, "seen": whole["seen"][label]}


@pytest.mark.parametrize("merge", MERGES)
def test_an_update_depends_on_its_arguments_and_its_generator(merge: Any) -> None:
    params = MemoryParams(selection="uniform", exemplars_per_class=4, merge=merge)
    args = (memory_of(params, (0, images(9))), 0, 1, images(9, seed=1), params)
    small.assert_equal_trees(updated(*args, seed=3), updated(*args, seed=3))
    assert not torch.equal(updated(*args, seed=3)["images"], updated(*args, seed=4)["images"])


@pytest.mark.parametrize("merge", MERGES)
def test_a_new_class_keeps_what_the_rule_chooses(merge: Any) -> None:
    several = images(30)
    after = memory_of(MemoryParams(exemplars_per_class=5, merge=merge), (3, several))
    expected = several[herding.choose(candidates_of(encode(several), 5))]
    assert torch.equal(after["images"], expected)
    assert after["tasks"].tolist() == [3] * 5 and after["labels"].tolist() == [0] * 5
    assert after["seen"].tolist() == [30, 0]


@pytest.mark.parametrize("merge", MERGES)
def test_the_candidates_that_a_rule_is_given(merge: Any, recorded: list[Candidates]) -> None:
    """The memory holds the whole class and the encoder is frozen, so p is the mean of all."""
    one, two = images(3), images(5, seed=1)
    both, old_mean = torch.cat([one, two]), encode(one).double().mean(0)
    after = memory_of(MemoryParams(exemplars_per_class=4, merge=merge), (0, one), (1, two))
    first, second = recorded
    torch.testing.assert_close(first.prototype, old_mean)
    assert not first.exemplar_mean.any() and torch.equal(first.images, one)
    torch.testing.assert_close(second.prototype, encode(both).double().mean(0))
    stay = after["images"][after["tasks"] == 0]
    assert len(stay) == (3 if merge == "mixstyle" else 1)
    expected = old_mean if merge == "mixstyle" else encode(stay).double().mean(0)
    torch.testing.assert_close(second.exemplar_mean, expected)
    assert torch.equal(second.images, two) and torch.equal(second.features, encode(two))
    assert second.count == 4


def test_without_exemplars_the_prototype_is_the_mean_of_new_features(
    recorded: list[Candidates],
) -> None:
    two = images(5, seed=1)
    after = memory_of(MemoryParams(exemplars_per_class=0), (0, images(3)), (1, two))
    torch.testing.assert_close(recorded[-1].prototype, encode(two).double().mean(0))
    assert not len(after["images"]) and after["seen"].tolist() == [8, 0]


def test_old_exemplars_take_the_style_of_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the new ones lends its style to one old exemplar, whose label and task stay."""
    one, two = images(9), images(30, 60, 120, seed=1)
    params = MemoryParams(exemplars_per_class=6)
    before, calls = memory_of(params, (0, one)), []

    def recording(content: Tensor, style: Tensor, weights: Tensor) -> Tensor:
        calls.append((content, style, weights))
        return mixstyle_images(content, style, weights)

    monkeypatch.setattr(memory, "mixstyle_images", recording)
    after = updated(before, 0, 1, two, params)
    ((content, style, weights),) = calls
    assert torch.equal(content, before["images"])
    selected = two[herded(two, 6, two, content, 9)]
    assert sorted(as_bytes(style)) == sorted(as_bytes(selected))
    assert as_bytes(style) != as_bytes(selected), "the pairs are not random"
    assert len(weights.unique()) == 6
    assert torch.equal(after["images"], mixstyle_images(content, style, weights))
    assert after["tasks"].tolist() == [0] * 6 and after["seen"].tolist() == [39, 0]


@pytest.mark.parametrize(("alpha", "levels"), [(1e-6, {30, 210}), (1e6, {120})])
def test_mixstyle_uses_alpha(alpha: float, levels: set[int]) -> None:
    """Near 0 an image keeps its style or takes the other's whole; near infinity, half."""
    one, two = images(6, 0, 60), images(6, 180, 240, seed=1)
    after = memory_of(MemoryParams(exemplars_per_class=6, mixstyle_alpha=alpha), (0, one), (1, two))
    for mean in after["images"].double().mean((1, 2, 3)).tolist():
        assert min(abs(mean - level) for level in levels) < 10


def test_few_new_exemplars_lend_their_style_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    styles: list[bytes] = []

    def recording(content: Tensor, style: Tensor, weights: Tensor) -> Tensor:
        styles.extend(as_bytes(style))
        return content

    monkeypatch.setattr(memory, "mixstyle_images", recording)
    memory_of(MemoryParams(exemplars_per_class=7), (0, images(7)), (1, images(3, seed=1)))
    assert sorted(Counter(styles).values()) == [2, 2, 3]


def test_with_mixstyle_a_later_task_fills_up_a_class() -> None:
    """With its first choices unchanged; the same task again has nothing to add."""
    one, two = images(3), images(9, seed=1)
    params = MemoryParams(exemplars_per_class=5)
    before = memory_of(params, (0, one), (0, one))
    assert before["tasks"].tolist() == [0, 0, 0]
    after = updated(before, 0, 1, two, params)
    assert after["tasks"].tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(after["images"][3:], two[herded(two, 2, two, before["images"], 6)])


# --------------------------------------------------------------------------------- the reservoir


def numbered(*sizes: int) -> list[Tensor]:
    """So many images for each task, as bright as their number in all of them."""
    levels = torch.arange(sum(sizes), dtype=torch.uint8).view(-1, 1, 1, 1)
    return list(levels.expand(-1, 1, 2, 2).contiguous().split(list(sizes)))


def reservoir_of(sizes: tuple[int, ...], params: MemoryParams, seed: int = 0) -> list[int]:
    """The numbers of the images kept after tasks with so many images of a class, in order."""
    draws, tasks = generator(seed), numbered(*sizes)
    now = memory.empty_memory(tasks[0], classes=1)
    for task, several in enumerate(tasks):
        old, labels = encode(now["images"]), torch.zeros(len(several), dtype=torch.int64)
        proposal = base.hard_label_proposal(several, labels)
        new = memory.class_samples(proposal, 0, task, encode(several))
        now = memory.update_memory(now, 0, new, len(several), old, params, draws)
    kept: list[int] = now["images"][:, 0, 0, 0].tolist()
    return kept


def every_outcome(
    draw: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Fraction, list[int]]]:
    """Every result of a function that draws random permutations alone, with its probability.

    The permutations drawn are the branches of a tree, which is visited depth first.
    """
    path: list[int] = []  # the branch that is taken at each draw
    sizes: list[int] = []

    def randperm(n: int, generator: torch.Generator) -> Tensor:
        orders = list(itertools.permutations(range(n)))
        path.extend([0] * (len(sizes) == len(path)))
        sizes.append(len(orders))
        return torch.tensor(orders[path[len(sizes) - 1]], dtype=torch.int64)

    monkeypatch.setattr(torch, "randperm", randperm)
    while True:
        sizes.clear()
        result = draw()
        yield Fraction(1, math.prod(sizes)), result
        while path and path[-1] + 1 == sizes[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1


@pytest.mark.parametrize(
    ("sizes", "count"), [((2, 2), 1), ((2, 2), 3), ((3, 1), 2), ((1, 2, 1), 2), ((1, 1, 2), 3)]
)
def test_a_random_reservoir_is_a_uniform_sample_of_all_images(
    sizes: tuple[int, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: every subset of that size has the same probability."""
    params = MemoryParams(selection="uniform", exemplars_per_class=count, merge="reservoir")
    found: dict[frozenset[int], Fraction] = defaultdict(Fraction)
    for probability, kept in every_outcome(lambda: reservoir_of(sizes, params), monkeypatch):
        found[frozenset(kept)] += probability
    subsets = [frozenset(each) for each in itertools.combinations(range(sum(sizes)), count)]
    assert found == dict.fromkeys(subsets, Fraction(1, len(subsets)))


@pytest.mark.parametrize(("sizes", "count"), [((30, 4, 1, 45), 7), ((3, 2, 9), 5), ((8, 8, 8), 2)])
def test_early_and_late_images_are_kept_equally_often(sizes: tuple[int, ...], count: int) -> None:
    """A number of times that is binomial with p = count / all, up to 5 deviations."""
    params = MemoryParams(selection="uniform", exemplars_per_class=count, merge="reservoir")
    runs, p = 200, count / sum(sizes)
    times = Counter(image for seed in range(runs) for image in reservoir_of(sizes, params, seed))
    deviation = math.sqrt(runs * p * (1 - p))
    assert times.total() == runs * count
    assert all(abs(times[image] - runs * p) < 5 * deviation for image in range(sum(sizes)))


@pytest.mark.parametrize("rule", [rule for rule in RULES if base.needs_features(rule)])
def test_how_many_exemplars_stay_is_hypergeometric_for_every_rule(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 old and 2 new images 2 are kept: j old ones with probability C(3, j) C(2, 2 - j) / 10.

    Every old exemplar stays equally often.
    """
    params = MemoryParams(selection=rule, exemplars_per_class=2, merge="reservoir")
    first = reservoir_of((3,), params)
    staying, times = defaultdict[int, Fraction](Fraction), defaultdict[int, Fraction](Fraction)
    for probability, kept in every_outcome(lambda: reservoir_of((3, 2), params), monkeypatch):
        old = [image for image in kept if image < 3]
        staying[len(old)] += probability
        for image in old:
            times[image] += probability
    assert staying == {j: Fraction(math.comb(3, j) * math.comb(2, 2 - j), 10) for j in (0, 1, 2)}
    assert times == dict.fromkeys(first, Fraction(3, 5))


def test_free_places_go_to_the_first_choices_of_the_rule() -> None:
    """The exemplars that stay keep their order and come first."""
    one, two = images(9), images(7, seed=1)
    params = MemoryParams(exemplars_per_class=5, merge="reservoir")
    before, numbers = memory_of(params, (0, one)), set()
    chosen = two[herded(two, 5, two, before["images"], 9)]
    for seed in range(20):
        after = updated(before, 0, 1, two, params, seed)
        stay = int((after["tasks"] == 0).sum())
        assert after["tasks"].tolist() == stay * [0] + (5 - stay) * [1]
        assert torch.equal(after["images"][stay:], chosen[: 5 - stay])
        old = as_bytes(before["images"])
        places = [old.index(image) for image in as_bytes(after["images"][:stay])]
        assert places == sorted(set(places))
        assert after["seen"].tolist() == [16, 0]
        numbers.add(stay)
    assert len(numbers) > 2


@settings(quick, max_examples=200)
@given(
    count=st.integers(1, 9),
    old=st.integers(1, 9),
    new=st.integers(1, 12),
    seen=st.integers(1, 30),
    met=st.integers(1, 30),
    seed=st.integers(0, 10**6),
)
def test_all_places_are_filled_whatever_a_rule_proposes(
    count: int, old: int, new: int, seen: int, met: int, seed: int
) -> None:
    """Fewer candidates than images of the class, or synthetic ones that are more."""
    old = min(old, count)
    stay = memory._draw_remaining(old, new, seen, met, count, generator(seed)).tolist()
    assert stay == sorted(set(stay)) and set(stay) <= set(range(old))
    assert len(stay) + min(new, count - len(stay)) == min(count, old + new)


def test_synthetic_exemplars_share_the_memory_with_as_many_new_ones() -> None:
    """9 for the 4 images of each of two tasks, so 4.5 stay on average, up to 5 deviations.

    The variance is that of 9 draws from 9 and 9 images: 9 / 4 (18 - 9) / (18 - 1) = 81 / 68.
    """
    runs = 400
    draws = [memory._draw_remaining(9, 9, 4, 4, 9, generator(seed)) for seed in range(runs)]
    mean = sum(map(len, draws)) / runs
    assert abs(mean - 4.5) < 5 * math.sqrt(81 / 68 / runs)


@pytest.mark.parametrize("merge", MERGES)
def test_a_task_without_images_changes_nothing(merge: Any) -> None:
    params = MemoryParams(exemplars_per_class=5, merge=merge)
    before = memory_of(params, (0, images(9)))
    small.assert_equal_trees(updated(before, 0, 0, images(0), params), before)


def test_a_memory_survives_a_checkpoint(tmp_path: Path) -> None:
    """With its strides, on which the last bit of a convolution can depend, and its successor."""
    several = images(9).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # as in data sets
    params = MemoryParams(exemplars_per_class=4)
    first = updated(memory.empty_memory(several, classes=2), 0, 0, several, params)
    after = updated(first, 0, 1, several, params)
    assert first["images"].is_contiguous()
    trees.write_tree(tmp_path / "a.safetensors", {"memory": after}, {})
    loaded, _ = trees.read_tree(tmp_path / "a.safetensors")
    assert loaded is not None
    small.assert_equal_trees(loaded["memory"], after)
    for name, tensor in after.items():
        if tensor.numel():
            assert loaded["memory"][name].stride() == tensor.stride(), name
    args = (0, 2, several, params)
    small.assert_equal_trees(updated(loaded["memory"], *args), updated(after, *args))
