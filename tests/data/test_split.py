"""Plans: sizes, orders, shares, reproducible draws, and files whose changes are detected."""

import json
import os
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from folders import edit
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import images

from stamp_core.config.decode import ParameterError
from stamp_core.config.schema import Split
from stamp_core.data import split as module
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import LATER, Plan
from stamp_core.data.split import make_plan

quick = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**31)


TEN = images(10)
THREE_DOMAINS = images(4, each=6, domains=3)
OWN = Split("classes", clients=3, tasks=5, classes_per_task=2)
SHARED = Split("classes", clients=3, tasks=2, classes_per_task=3, order="common", alpha=0.5)
DOMAINS = Split("domains", clients=3, tasks=3)
LATE = replace(OWN, joining=1, tasks=3, order="given", old_share=0.4)


@st.composite
def splits(draw: st.DrawFn, *orders: str) -> tuple[Split, ImageDataset]:
    size, tasks, clients = (draw(st.integers(1, 4)) for _ in range(3))
    order = draw(st.sampled_from(orders or ("independent", "common", "given", "mixed")))
    common = draw(st.integers(0, clients)) if order == "mixed" else 0
    dataset = images(size * tasks + draw(st.integers(0, 5)), each=2)
    cycles = draw(st.integers(1, 3))
    return Split("classes", clients, tasks, size, cycles, order, common), dataset


def orders(plan: Plan) -> list[list[tuple[int, ...]]]:
    return [[task.classes for task in tasks] for tasks in plan.clients]


@quick
@given(splits(), seeds, st.integers(1, 3))
def test_a_plan_is_made_of_tasks_of_other_classes_and_depends_on_seed_and_data_alone(
    case, seed, more
):
    split, dataset = case
    plan = make_plan(split, dataset, seed)
    assert (len(plan.clients), plan.tasks) == (split.clients, split.tasks)
    assert plan.experiences == split.tasks * split.cycles
    for tasks in orders(plan):
        met = [label for classes in tasks for label in classes]
        assert [len(classes) for classes in tasks] == [split.classes_per_task] * split.tasks
        assert len(set(met)) == len(met) and set(met) <= set(range(plan.classes))
    again = make_plan(split, dataset, seed)
    assert plan == again and plan.hash == again.hash
    assert plan.hash != make_plan(split, dataset, seed + 1).hash
    assert plan.hash != make_plan(split, replace(dataset, digest="other"), seed).hash
    grown = make_plan(replace(split, clients=split.clients + more), dataset, seed)
    assert grown.clients[: split.clients] == plan.clients


def test_seeds_and_clients_have_different_orders():
    assert len({str(orders(make_plan(OWN, TEN, seed))) for seed in range(20)}) == 20
    assert len(set(map(str, orders(make_plan(Split("classes", 8, 10, 1), TEN, 0))))) == 8
    plan = make_plan(replace(DOMAINS, clients=20), THREE_DOMAINS, 0)
    assert len({tuple(task.domain for task in tasks) for tasks in plan.clients}) > 3


@pytest.mark.parametrize(
    ("split", "dataset", "digest"),
    [
        (OWN, TEN, "42812be2fa2d3e2e"),
        (SHARED, TEN, "1b604cab05e53bbb"),
        (DOMAINS, THREE_DOMAINS, "118bd7fe8988e4cb"),
        (replace(OWN, order="mixed", common_clients=2, cycles=2), TEN, "d8648a5396d400ba"),
        (replace(DOMAINS, images_per_class=3), THREE_DOMAINS, "9322a190b336ec81"),
        (replace(SHARED, order="given", min_samples=0), TEN, "59facd3fdf333778"),
    ],
)
def test_the_hash_is_pinned(split, dataset, digest, tmp_path):
    """Options that a split does not use are in no plan: those stored before them stay valid."""
    plan = make_plan(split, dataset, 7)
    assert plan.hash.startswith(digest)
    plan.save(tmp_path / "plan.json")
    assert not set(LATER) & set(json.loads((tmp_path / "plan.json").read_text())["split"])


@quick
@given(splits("independent", "common", "mixed"), seeds)
def test_common_clients_have_the_common_order_and_the_others_their_own(case, seed):
    split, dataset = case
    followers = split.clients if split.order == "common" else split.common_clients
    common = orders(make_plan(replace(split, order="common", common_clients=0), dataset, seed))
    own = orders(make_plan(replace(split, order="independent", common_clients=0), dataset, seed))
    assert len(set(map(str, common))) == 1
    assert orders(make_plan(split, dataset, seed)) == common[:followers] + own[followers:]


def test_in_the_given_order_all_clients_learn_in_the_order_of_the_data():
    """For every seed; three tasks of two classes leave out the last four of ten."""
    split = Split("classes", clients=3, tasks=3, classes_per_task=2, cycles=2, order="given")
    for seed in range(5):
        assert orders(make_plan(split, TEN, seed)) == 3 * [[(0, 1), (2, 3), (4, 5)]]
    plan = make_plan(replace(DOMAINS, order="given", tasks=2), THREE_DOMAINS, 7)
    assert [[task.domain for task in tasks] for tasks in plan.clients] == 3 * [[0, 1]]
    assert {task.classes for tasks in plan.clients for task in tasks} == {(0, 1, 2, 3)}


def test_seen_classes_grow_by_task_and_stay_in_later_cycles():
    plan = make_plan(replace(OWN, tasks=3, cycles=2), TEN, 0)
    a, b, c = orders(plan)[1]
    assert plan.experiences == 6
    assert plan.seen(1, -1) == ()
    assert plan.seen(1, 0) == a
    assert plan.seen(1, 1) == tuple(sorted(a + b))
    assert plan.seen(1, 2) == plan.seen(1, 3) == plan.seen(1, 5) == tuple(sorted(a + b + c))


def test_indices_of_other_images_are_refused():
    plan = make_plan(OWN, TEN, 0)
    for indices in (plan.train_indices, plan.test_indices):
        with pytest.raises(ParameterError, match=r"digest .* 'another'; .* plan's, the digest"):
            indices(replace(TEN, digest="another"), 0, 0)


# --- each client's own draw


@quick
@given(st.one_of(splits(), st.just((DOMAINS, THREE_DOMAINS))), seeds, st.integers(1, 6))
def test_own_images(case, seed, count):
    split, dataset = case[0], images(len(case[1].classes), each=6, domains=len(case[1].domains))
    plan = make_plan(replace(split, images_per_class=count), dataset, seed)
    assert orders(plan) == orders(make_plan(split, dataset, seed))
    for client, tasks in enumerate(orders(plan)):
        for t, classes in enumerate(tasks):
            chosen = plan.train_indices(dataset, client, t)
            assert chosen.tolist() == sorted(set(chosen.tolist()))
            held = torch.bincount(dataset.y_train[chosen], minlength=plan.classes)
            assert held.tolist() == [count * (label in classes) for label in range(plan.classes)]
            domains = {plan.clients[client][t].domain or 0}
            assert {*dataset.domain_train[chosen].tolist()} == domains
            assert len(plan.test_indices(dataset, client, t)) == 2 * len(classes)


def test_own_images_differ_by_client_and_not_by_order():
    dataset = images(10, each=50)
    independent = make_plan(replace(OWN, images_per_class=10), dataset, 0)
    common = make_plan(replace(OWN, images_per_class=10, order="common"), dataset, 0)

    def held(plan: Plan, client: int) -> list[int]:
        return sorted(i for task in plan.clients[client] for i in task.train or ())

    assert orders(independent) != orders(common)
    assert held(independent, 1) == held(common, 1) != held(common, 0)


def test_own_images_of_each_domain_have_a_draw_of_their_own():
    plan = make_plan(replace(DOMAINS, images_per_class=5), THREE_DOMAINS, 0)
    draws = {str((plan.train_indices(THREE_DOMAINS, 0, t) // 12).tolist()) for t in range(3)}
    assert len(draws) == 3


@quick
@given(
    splits("independent", "common", "given"),
    seeds,
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 0.34, 0.9]),
    st.booleans(),
)
def test_a_client_has_no_part_before_it_joins_nor_as_an_old_one(case, seed, joining, share, few):
    """Of its other tasks it has as many classes as it should; a task without a part is empty."""
    split, dataset = case
    split = replace(split, clients=split.clients + joining * (split.tasks - 1))
    whole = orders(make_plan(split, dataset, seed))
    size = 1 if few else split.classes_per_task
    changed = replace(
        split, joining=joining, old_share=share, classes_per_client=size if few else None
    )
    plan = make_plan(changed, dataset, seed)
    first = split.clients - joining * (split.tasks - 1)
    for t in range(split.tasks):
        here, before = range(first + joining * t), range(first + joining * (t - 1)) if t else ()
        learning = [u for u, tasks in enumerate(orders(plan)) if tasks[t]]
        assert plan.joined(t) == list(here) and set(learning) <= set(here)
        assert len(here) - len(learning) == sum(k < share * len(before) - 1e-9 for k in before)
        assert set(here) - set(before) <= set(learning)
        for u in learning:
            assert len(plan.clients[u][t].classes) == size
            assert set(plan.clients[u][t].classes) <= set(whole[u][t])
        for u in set(range(split.clients)) - set(learning):
            assert plan.clients[u][t] == module.NO_TASK
            assert not len(plan.train_indices(dataset, u, t))
            assert not len(plan.test_indices(dataset, u, t))
    assert plan.joined(split.tasks * split.cycles - 1) == list(range(split.clients))


# --- Dirichlet shares


@quick
@given(
    st.integers(1, 7),
    st.sampled_from([1e-300, 0.01, 0.1, 1.0, 100.0, 1e308]),
    st.sampled_from(["common", "given"]),
    st.sampled_from(["drawn", "equal"]),
    seeds,
)
def test_shares_partition_the_images_of_a_task(clients, alpha, order, sizes, seed):
    """Equal shares differ by one image at most."""
    split = replace(SHARED, clients=clients, alpha=alpha, order=order, sizes=sizes, min_samples=0)
    plan = make_plan(split, TEN, seed)
    assert len(set(map(str, orders(plan)))) == 1
    for t, classes in enumerate(orders(plan)[0]):
        parts = [plan.train_indices(TEN, client, t).tolist() for client in range(clients)]
        assert all(part == sorted(part) for part in parts)
        assert sorted(chain(*parts)) == [i for i in range(40) if i % 10 in classes]
        assert sizes == "drawn" or max(map(len, parts)) - min(map(len, parts)) <= 1
        tests = [plan.test_indices(TEN, client, t).tolist() for client in range(clients)]
        assert tests == [[i for i in range(20) if i % 10 in classes]] * clients


def test_shares_are_drawn_anew_for_each_task_and_at_random_inside_a_class():
    dataset = images(10, each=100)
    plan = make_plan(Split("classes", 2, 10, 1, order="common", alpha=1.0), dataset, 0)
    parts = [plan.train_indices(dataset, 0, t) // 10 for t in range(10)]  # in the class
    assert len({len(part) for part in parts}) > 5
    assert all(part.tolist() != list(range(len(part))) for part in parts if len(part) < 100)


def test_the_balance_rule_by_hand():
    """3 clients, 3 classes of 4 images: a client with N / U = 4 gets no more.

    Class 0, p = (1, 0, 0): client 0 is full. Class 1, p = (1, 0, 0) draws no client with room:
    equal among clients 1 and 2. Class 2, p = (.5, .25, .25) becomes (0, .5, .5).
    """
    labels = np.repeat(np.arange(3), 4)
    shares = iter(np.array([(1, 0, 0), (1, 0, 0), (0.5, 0.25, 0.25)]))
    draw = SimpleNamespace(permutation=np.array, dirichlet=lambda alphas: next(shares))
    owners = module._draw_dirichlet(SHARED, labels, draw)
    assert owners.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 1, 1, 2, 2]


def test_equal_shares_have_the_distribution_of_one_draw_after_the_other():
    """A class without images leaves the draw. Alpha 0.5, 6 clients with 2 of 12 images each.

    The mean numbers, of the first and of the last client, of images of its largest class.
    """
    labels, draw = np.repeat(np.arange(3), 4), np.random.default_rng(0)
    split = replace(SHARED, clients=6, sizes="equal")

    def one_by_one() -> np.ndarray:
        left, counts = np.full(3, 4), np.zeros((6, 3), int)
        for client in range(6):
            p = draw.dirichlet(np.full(3, 0.5)) + module.EPSILON
            for _ in range(2):
                others = p * (left > 0)
                label = draw.choice(3, p=others / others.sum())
                left[label] -= 1
                counts[client, label] += 1
        return counts

    def at_once() -> np.ndarray:
        owners = module._draw_equal(split, labels, draw)
        return np.array([np.bincount(labels[owners == u], minlength=3) for u in range(6)])

    means = [
        np.mean([each().max(1)[[0, -1]] for _ in range(1500)], axis=0)
        for each in (one_by_one, at_once)
    ]
    np.testing.assert_allclose(*means, atol=0.06)  # five standard errors


def test_shares_are_redrawn_until_each_client_has_enough():
    split, dataset = replace(SHARED, tasks=1, alpha=1.0, min_samples=0), images(10, each=20)

    def smallest(split: Split, seed: int) -> int:
        return min(len(own[0].train or ()) for own in make_plan(split, dataset, seed).clients)

    seed = next(s for s in range(99) if smallest(split, s) < 15)
    assert smallest(replace(split, min_samples=15), seed) >= 15


def test_redrawing_ends(monkeypatch):
    """12 images cannot give 3 clients 5 each: 100 draws, then the best of them is named."""
    draws: list[int] = []
    once = module._draw_dirichlet

    def counted(*given: Any) -> np.ndarray:
        owners = once(*given)
        draws.append(np.bincount(owners, minlength=3).min())
        return owners

    monkeypatch.setattr(module, "_draw_dirichlet", counted)
    with pytest.raises(ParameterError) as error:
        make_plan(replace(SHARED, min_samples=5), TEN, 0)
    assert len(draws) == 100
    assert str(error.value).startswith(
        "alpha 0.5 leaves a client of task 0 with fewer than min_samples = 5 of its 12 images: "
        f"in 100 draws the smallest of 3 clients had {max(draws)} at best; raise alpha, "
    )


@pytest.mark.parametrize("order", ["independent", "common"])
def test_a_task_is_a_domain_with_all_classes(order):
    plan = make_plan(replace(DOMAINS, order=order), THREE_DOMAINS, 1)
    domains = [[task.domain for task in tasks] for tasks in plan.clients]
    assert all(sorted(own) == [0, 1, 2] for own in domains)
    assert order != "common" or len(set(map(tuple, domains))) == 1
    assert all(plan.seen(client, 0) == (0, 1, 2, 3) for client in range(3))
    for t, domain in enumerate(domains[2]):
        train, test = (f(THREE_DOMAINS, 2, t) for f in (plan.train_indices, plan.test_indices))
        assert THREE_DOMAINS.domain_train[train].tolist() == [domain] * 24
        assert THREE_DOMAINS.domain_test[test].tolist() == [domain] * 8


@pytest.mark.parametrize(
    ("split", "dataset", "message"),
    [
        *(
            (
                replace(OWN, tasks=6, order=order),
                TEN,
                "tasks * classes_per_task = 6 * 2 is 12; it must be at most 10, the number of cla",
            )
            for order in ("independent", "given")
        ),
        (replace(DOMAINS, tasks=4), THREE_DOMAINS, "tasks is 4; it must be at most 3, the number"),
        (
            replace(DOMAINS, tasks=1, order="common", images_per_class=7),
            replace(THREE_DOMAINS, domains=("a",)),
            "images_per_class is 7; it must be at most 6, the training images of class 'class 0' "
            "in domain 'a'",
        ),
        (replace(OWN, tasks=2.0), TEN, "split.tasks is 2.0; it must be a whole number"),
    ],
)
def test_an_impossible_split_is_refused(split, dataset, message):
    with pytest.raises(ParameterError) as error:
        make_plan(split, dataset, 0)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("split", "dataset"),
    [
        (replace(SHARED, alpha=1, min_samples=0), TEN),
        (DOMAINS, THREE_DOMAINS),
        (replace(LATE, classes_per_client=1, images_per_class=3), TEN),
        (replace(SHARED, sizes="equal"), TEN),
    ],
)
def test_a_saved_plan_comes_back(split, dataset, tmp_path):
    plan, path = make_plan(split, dataset, 7), tmp_path / "new" / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan and loaded.hash == plan.hash
    assert json.loads(path.read_text())["hash"] == plan.hash


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 500), "is damaged: "),
        (edit('"hash"', '"hush"'), "is not a plan: it has no hash"),
        (edit('"tasks": 5,', ""), ": plan.split.tasks is missing"),
        (edit('"seed": 0', '"seed": 1'), "was altered: it says hash "),
    ],
)
def test_a_broken_file_is_refused(damage, message, tmp_path):
    path = tmp_path / "plan.json"
    make_plan(OWN, TEN, 0).save(path)
    damage(path)
    with pytest.raises(ParameterError) as error:
        Plan.load(path)
    text = str(error.value)
    assert text.startswith(f"{path}") and message in text
    assert text.endswith("; delete it to have the plan drawn again")
