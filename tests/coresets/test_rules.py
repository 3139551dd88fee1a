"""What holds for every selection rule: on features, on whole tasks, and in clients."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_tasks import (
    BATCH_NORM,
    NETWORKS,
    bcsr_task,
    candidates_of,
    csrel_task,
    generator,
    indices_of,
    normal,
    ocs_task,
    sre2l_task,
)
from small import plan, run, tiny
from torch import Tensor

from stamp_core.coresets.selection import base
from stamp_core.coresets.selection.base import TaskData
from stamp_core.data.plan import Plan
from stamp_core.engine.worker import Worker
from stamp_core.methods.base.method import State

RULES = base.selection_rules()
CHOOSING = [rule for rule in RULES if not base.proposes(rule)]
COMPARING = [rule for rule in CHOOSING if base.needs_features(rule)]
PROPOSING = {"bcsr": bcsr_task, "csrel": csrel_task, "ocs": ocs_task, "sre2l": sre2l_task}
SYNTHETIC = {"sre2l"}
Options = Mapping[str, Any]


# ------------------------------------------------------------- rules on the features of a class


UNUSUAL = {
    "none": torch.zeros(0, 3),
    "one": torch.ones(1, 3),
    "constant": torch.ones(6, 3),
    "zero": torch.zeros(6, 3),
    "one feature": normal(6, 1),
    "duplicates": normal(3, 2).repeat(3, 1),
    "more features than images": normal(5, 40),
    "nan": torch.full((4, 2), torch.nan),
    "infinite": torch.cat([torch.full((2, 2), torch.inf), normal(4, 2), torch.full((1, 2), -1e38)]),
    "large": 1e38 * normal(6, 3).sign(),
}


@pytest.mark.parametrize("features", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("rule", CHOOSING)
def test_the_indices_are_distinct_and_as_many_as_possible(rule, features):
    for count in (0, 1, 3, 50):
        before, candidates = features.clone(), candidates_of(features, count)
        chosen = base.choose_exemplars(rule, candidates)
        assert chosen.dtype == torch.int64 and chosen.shape == (min(count, len(features)),)
        assert len(chosen.unique()) == len(chosen)
        assert set(chosen.tolist()) <= set(range(len(features)))
        assert features.numpy().tobytes() == before.numpy().tobytes()


@pytest.mark.parametrize("seen", [0, 7])
@pytest.mark.parametrize("rule", COMPARING)
def test_images_without_finite_features_come_last_and_change_nothing(rule, seen):
    features = normal(9, 4, seed=3)
    features[[1, 4, 7], [0, 2, 3]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    finite = torch.tensor([0, 2, 3, 5, 6, 8])
    mean = normal(4, seed=5).double() * seen
    chosen = base.choose_exemplars(rule, candidates_of(features, 9, mean, seen))
    alone = base.choose_exemplars(rule, candidates_of(features[finite], 6, mean, seen))
    assert torch.equal(chosen[:6], finite[alone])
    assert chosen[6:].tolist() == [1, 4, 7]


@pytest.mark.parametrize("rule", COMPARING)
@settings(deadline=None, max_examples=50, derandomize=True)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30), width=st.integers(1, 12))
def test_rules_on_features_use_neither_order_nor_draws(rule, seed, n, width):
    features, order = normal(n, width, seed=seed), torch.randperm(n, generator=generator(seed))
    candidates = candidates_of(features, 7, normal(width, seed=1).double(), seen=9)
    shuffled = replace(candidates, features=features[order])
    chosen = base.choose_exemplars(rule, candidates)
    assert torch.equal(order[base.choose_exemplars(rule, shuffled)], chosen)
    assert torch.equal(candidates.generator.get_state(), generator().get_state())


# ------------------------------------------------------------------------ rules on whole tasks


def make_task(rule: str, *sizes: int, **options: Any) -> TaskData:
    """A task with so many images of the classes 0, 1, ..."""
    if rule in ("csrel", "sre2l"):
        return PROPOSING[rule](*sizes, **options)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return replace(PROPOSING[rule](sum(sizes), **options), labels=labels)


VARIANTS: list[tuple[str, Options]] = [
    *(("bcsr", {"batch_size": size}) for size in (1, 4, 250)),
    ("bcsr", {"space": "head"}),
    *(("ocs", {"gradients": g, "batch_size": 1, "batch_candidates": 1}) for g in ("all", "head")),
    *(("ocs", {"gradients": g, "batch_size": 100}) for g in ("all", "head")),
    *(("ocs", {"gradients": g, "network": BATCH_NORM}) for g in ("all", "head")),
    *(("csrel", {"network": network}) for network in NETWORKS.values()),
    ("csrel", {"balanced": False}),
    *(("sre2l", {"network": network}) for network in NETWORKS.values()),
]
REAL = [(rule, options) for rule, options in VARIANTS if rule not in SYNTHETIC]


def name_of(value: object) -> str | None:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else None


@pytest.mark.parametrize("sizes", [(1,), (6,), (1, 1), (0, 4, 0, 2), (4, 1, 8)], ids=str)
@pytest.mark.parametrize(("rule", "options"), REAL, ids=name_of)
def test_a_proposal_has_every_image_of_the_task_once(rule, options, sizes):
    for count, past in itertools.product([1, 3, 50], [True, False]):
        task = make_task(rule, *sizes, exemplars_per_class=count, **options)
        if not past:
            task = replace(task, past=(task.images[:0], task.labels[:0]))
        proposal = base.propose_exemplars(rule, task)
        assert sorted(indices_of(proposal, task)) == list(range(sum(sizes))), (count, past)
        assert set(task.events) <= {"ocs: a class had too few candidates"}


@pytest.mark.parametrize(("rule", "options"), VARIANTS, ids=name_of)
def test_a_proposal_depends_on_contents_and_generator_alone(rule, options):
    """Not on the order of the images, on torch's generator or on what the learner did before.

    The rule writes to nothing that it is given.
    """
    task = make_task(rule, 17, 9, 6, **options)
    weights = *task.learner.client_weights, *task.learner.initial_weights
    held = [task.images, task.labels, *task.past, *weights]
    before = [tensor.clone() for tensor in held]
    order = torch.randperm(32, generator=generator(3))
    assert not torch.equal(order, torch.arange(32))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = base.propose_exemplars(rule, task)
    assert torch.equal(torch.get_rng_state(), state)
    small.assert_equal_trees(held, before)
    task.learner.model.parameters.fill_(torch.nan)
    torch.manual_seed(2)
    if rule == "ocs":  # it uses the learner's weights as it is given them
        task.learner.load_client_weights()
    shuffled = replace(task, images=task.images[order], labels=task.labels[order])
    again = base.propose_exemplars(rule, replace(shuffled, generator=generator()))
    small.assert_equal_trees(vars(again), vars(first))
    others = [
        base.propose_exemplars(rule, replace(task, generator=generator(seed))) for seed in (1, 2, 3)
    ]
    if rule != "ocs" or "batch_size" not in options:  # scores of a single batch need no draws
        assert any(not torch.equal(other.images, first.images) for other in others)


# ------------------------------------------------------------------------------ rules in clients

QUICK: Mapping[str, Options] = {  # options that take little time
    "csrel": {"reference_epochs": 1, "selection_steps": 2, "train_steps": 2},
    "sre2l": {"squeeze_epochs": 1, "iterations": 3},
}


def replaying(rule: str, exemplars_per_class: int = 3, **options: Any) -> Any:
    memory = small.kept(exemplars_per_class, selection=rule, options=QUICK.get(rule, {}))
    return tiny("replay", memory=memory, balanced=True, weight=1.0, **options)


def memory_after(worker: Worker, plan_: Plan, experience: int) -> State:
    arrived = small.arrived(worker, plan_, experience)
    return worker.method.train_client(arrived).state["memory"]


def contents(images: Tensor) -> list[bytes]:
    return sorted(image.contiguous().numpy().tobytes() for image in images)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("network", [small.NETWORK, small.BATCH_NORM], ids=["mlp", "batch norm"])
def test_each_class_keeps_its_exemplars(rule, network):
    experiment = replaying(rule, network=network)
    worker, dataset = small.worker(experiment, plan(experiment)), experiment.dataset()
    for experience in range(3):
        memory = memory_after(worker, plan(experiment), experience)
        met = {c for task in plan(experiment).clients[0][: experience + 1] for c in task.classes}
        labels = memory["labels"]
        assert {c: (labels == c).sum().item() for c in met} == dict.fromkeys(met, 3)
        assert set(labels.tolist()) == met
        for label in met if rule not in SYNTHETIC else ():
            real = set(contents(dataset.x_train[dataset.y_train == label]))
            kept = contents(memory["images"][labels == label])
            assert set(kept) <= real and len(set(kept)) == 3


@pytest.mark.parametrize("rule", RULES)
def test_a_class_with_fewer_images_than_its_budget_keeps_all(rule):
    experiment = replaying(rule, exemplars_per_class=9, split={"images_per_class": 4})
    worker, dataset = small.worker(experiment, plan(experiment)), experiment.dataset()
    memory = memory_after(worker, plan(experiment), 0)
    if rule in SYNTHETIC:
        assert len(memory["labels"]) == 18
        return
    event = "memory: a class has fewer images than may be kept"
    assert [row["events"].get(event) for row in run(experiment).history] == 3 * [None, 8]
    own = plan(experiment).train_indices(dataset, 0, 0)
    assert contents(memory["images"]) == contents(dataset.x_train[own]) and len(own) == 8


@pytest.mark.parametrize("rule", RULES)
def test_clients_with_one_image_one_class_or_nothing_stay_finite(rule):
    experiment = replaying(rule)
    plan_ = small.awkward(experiment)
    worker = small.worker(experiment, plan_)
    for client, expected in enumerate([3 if rule in SYNTHETIC else 1, 3, 0]):
        reply = worker.method.train_client(small.arrived(worker, plan_, 2, client))
        for task in range(3):
            assert int((reply.state["memory"]["tasks"] == task).sum()) == expected
        assert torch.isfinite(reply.message["parameters"]).all()


@pytest.mark.parametrize("rule", RULES)
def test_selecting_changes_nothing_but_the_memory(rule):
    """The first task, in which nothing is replayed, is bit-identical to FedAvg's."""
    split = {"tasks": 1}
    small.assert_same_weights(run(replaying(rule, split=split)), run(tiny(split=split)))
