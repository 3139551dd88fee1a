"""Rehearsal and its control, replay: what is remembered when, and what is mixed into batches."""

from typing import Any

import numpy as np
import pytest
import small
import torch
from small import kept, plan, run, tiny
from stamp_core.client.workspace import RoundId
from test_methods import FEW, client_rounds
from torch import Tensor

from stamp_core.coresets.selection.base import Proposal
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.base import rehearsal
from stamp_core.methods.base.method import ClientRound, Method, State

FACES = {"source": "glyphs", "classes": 2, "train_per_class": 32, "test_per_class": 16}
FACES |= {"size": 16, "face_domains": True}
DOMAINS = {"kind": "domains", "classes_per_task": None}


def memories(worker: Worker, plan_: Plan, client: int) -> list[State]:
    """A client's memory after every experience."""
    own = [each for each in client_rounds(worker, plan_) if each.client_round.client == client]
    states = [each.result.reply.state for each in own]
    experiences = [*range(plan_.experiences)]
    assert [state["experiences"] for state in states] == [experiences[: e + 1] for e in experiences]
    return [state["memory"] for state in states]


def as_bytes(images: Tensor) -> list[bytes]:
    """Each image as something that can be looked up."""
    return [image.numpy().tobytes() for image in images]


def exemplars(memory: State) -> list[tuple[bytes, int, int]]:
    """Every exemplar with its class and task, in a canonical order."""
    labels = memory["labels"].tolist(), memory["tasks"].tolist()
    return sorted(zip(as_bytes(memory["images"]), *labels, strict=True))


@pytest.mark.parametrize("exemplars_per_class", [5, 1000])
def test_replay_keeps_so_many_exemplars_of_each_class_once(exemplars_per_class: int) -> None:
    """Two cycles: the second has the same images and changes nothing."""
    experiment = tiny("replay", split={"cycles": 2}, memory=kept(exemplars_per_class))
    plan_, dataset = plan(experiment), experiment.dataset()
    states = memories(small.worker(experiment, plan_), plan_, 1)
    for experience, memory in enumerate(states):
        tasks, seen = range(min(experience + 1, 3)), torch.zeros(10, dtype=torch.int64)
        assert set(memory["tasks"].tolist()) == set(tasks)
        for task in tasks:
            own = plan_.train_indices(dataset, 1, task)
            for label in plan_.clients[1][task].classes:
                chosen = (memory["tasks"] == task) & (memory["labels"] == label)
                images = as_bytes(memory["images"][chosen])
                known = as_bytes(dataset.x_train[own[dataset.y_train[own] == label]])
                assert len(images) == len(set(images)) == min(exemplars_per_class, len(known))
                assert set(images) <= set(known)
                seen[label] = len(known)
        assert torch.equal(memory["seen"], seen)
    for memory in states[3:]:
        small.assert_equal_trees(memory, states[2])


@pytest.mark.parametrize("missing", [{"dropout": 0.1}, {"participation": 0.5}])
def test_if_clients_may_miss_rounds_replay_selects_in_the_first_one(missing: Any) -> None:
    """And keeps its selection: a random one does not depend on the encoder."""
    experiment = tiny("replay", training=missing, memory=kept(5))
    worker = small.worker(experiment, plan(experiment))
    server, states, *_ = worker.initial_states(0)
    message = worker.method.broadcast(server, 0)
    first = worker.train_client(RoundId(0, 0, 0, 0), states[0], message).reply.state
    assert len(first["memory"]["labels"]) == 10
    for last in (False, True):
        later = worker.train_client(RoundId(0, 0, 0, 1, last), first, message).reply.state
        small.assert_equal_trees(later, first)


def test_if_no_client_misses_rounds_replay_selects_in_the_last_one() -> None:
    """The images that it would have selected in the first round."""
    experiment = tiny("replay", memory=kept(5))
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    message, round_id = worker.method.broadcast(server, 0), RoundId(0, 0, 0, 0)
    first = worker.train_client(round_id, states[0], message).reply.state
    small.assert_equal_trees(first, states[0])
    last = worker.train_client(RoundId(0, 0, 0, 1, True), first, message).reply.state
    unsure = small.worker(tiny("replay", training={"dropout": 0.1}, memory=kept(5)), plan_)
    small.assert_equal_trees(last, unsure.train_client(round_id, states[0], message).reply.state)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 4.0])
def test_batches_end_with_exemplars_of_other_tasks(ratio: float) -> None:
    """After n new images come min(ratio n, all) exemplars, no two the same.

    10 are kept per task; batches are of 16 images or, the last ones, of fewer.
    """
    experiment = tiny("replay", split={"cycles": 2}, memory=kept(5), ratio=ratio)
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    for client_round in (each.client_round for each in client_rounds(worker, plan_)):
        memory, task = client_round.state["memory"], client_round.task
        past = memory["tasks"] != task
        images = as_bytes(worker.work.normalise(memory["images"][past]))
        known = dict(zip(images, memory["labels"][past].tolist(), strict=True))
        client_round.indices = worker.method.train_indices(client_round)
        new = worker.work.batches(client_round.round_id, client_round.indices)
        mixed = worker.method.batches(client_round)
        for (x, y), (images_, labels) in zip(new, mixed, strict=True):
            assert torch.equal(images_[: len(x)], x) and torch.equal(labels[: len(y)], y)
            old = as_bytes(images_[len(x) :])
            assert len(old) == len(set(old)) == min(round(ratio * len(x)), len(known))
            assert [known[each] for each in old] == labels[len(y) :].tolist()
        current = set(plan_.clients[client_round.client][task].classes)
        assert not set(memory["labels"][past].tolist()) & current


def test_a_task_missed_in_the_first_cycle_is_added_in_the_second() -> None:
    """Here task 0. A task added before changes nothing, in its first round or in its last."""
    experiment = tiny("replay", split={"cycles": 3}, training={"dropout": 0.1}, memory=kept(5))
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    state, message, found = states[0], worker.method.broadcast(server, 0), list[State]()
    for experience in (1, 2, 3, 4, 6):
        for round_id in (RoundId(0, 0, experience, 0), RoundId(0, 0, experience, 1, True)):
            state = worker.train_client(round_id, state, message).reply.state
            found.append(state["memory"])
    tasks = [memory["tasks"].unique().tolist() for memory in found]
    assert tasks == [[1], [1], [1, 2], [1, 2], *6 * [[0, 1, 2]]]
    for memory in found[6:]:
        small.assert_equal_trees(memory, found[5])


@pytest.mark.parametrize("missing", [{}, {"dropout": 0.1}])
def test_a_task_is_added_once_even_if_none_of_its_exemplars_stayed(missing: Any) -> None:
    """One image of each of two classes is kept: at least one of three domains has none."""
    options = {"source": FACES, "split": {**DOMAINS, "cycles": 2}, "training": missing}
    experiment = tiny("replay", memory=kept(1), **options)
    plan_ = plan(experiment)
    *_, third, fourth, fifth, sixth = memories(small.worker(experiment, plan_), plan_, 0)
    own = torch.cat([plan_.train_indices(experiment.dataset(), 0, task) for task in range(3)])
    assert third["seen"].tolist() == experiment.dataset().y_train[own].bincount().tolist()
    assert third["labels"].tolist() == [0, 1]
    for memory in (fourth, fifth, sixth):
        small.assert_equal_trees(memory, third)


def test_replay_at_ratio_zero_trains_like_fedavg() -> None:
    record, fedavg = run(tiny("replay", ratio=0.0)), run(tiny())
    small.assert_same_weights(record, fedavg)
    for model, values in fedavg.scores.items():
        np.testing.assert_array_equal(record.scores[model], values)


def test_replay_forgets_less_than_fedavg() -> None:
    replay, fedavg = (run(tiny(kind)).accuracy()[-1, :, 0].mean() for kind in ("replay", "fedavg"))
    assert replay > fedavg + 0.1


@pytest.mark.parametrize("selection", ["uniform", "herding", "k_centre"])
@pytest.mark.parametrize("missing", [{}, {"dropout": 0.1}])
def test_selection_class_by_class_equals_that_among_all_images_of_the_task(
    selection: str, missing: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's own images of one class at a time, never those of several in memory at once."""
    memory = kept(3, selection=selection)
    experiment = tiny("replay", split=FEW, training=missing, memory=memory)
    plan_, sizes = plan(experiment), list[int]()
    hard_label_proposal = rehearsal.hard_label_proposal

    def counted(images: Tensor, labels: Tensor) -> Proposal:
        assert len(labels.unique()) == 1
        sizes.append(len(labels))
        return hard_label_proposal(images, labels)

    def whole_task(self: Method, client_round: ClientRound, labels: Tensor, label: int) -> Proposal:
        return hard_label_proposal(self.work.dataset.x_train[client_round.indices], labels)

    monkeypatch.setattr(rehearsal, "hard_label_proposal", counted)
    by_class = memories(small.worker(experiment, plan_), plan_, 0)
    assert set(sizes) == {FEW["images_per_class"]} and len(by_class[-1]["labels"]) == 3 * 2 * 3
    monkeypatch.setattr(rehearsal.Rehearsal, "propose_class", whole_task)
    for one, other in zip(
        by_class, memories(small.worker(experiment, plan_), plan_, 0), strict=True
    ):
        small.assert_equal_trees(one, other)


def test_a_rule_for_whole_tasks_is_called_once_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each class the first images that it proposes are kept."""
    experiment = tiny("replay", split=FEW, memory=kept(3, selection="ocs"))
    plan_, proposals, propose = plan(experiment), list[Proposal](), rehearsal.propose_exemplars

    def noted(rule: str, task: Any) -> Proposal:
        assert len(task.labels) == 2 * FEW["images_per_class"]
        proposals.append(propose(rule, task))
        return proposals[-1]

    monkeypatch.setattr(rehearsal, "propose_exemplars", noted)
    memory = memories(small.worker(experiment, plan_), plan_, 0)[-1]
    assert len(proposals) == plan_.tasks * len(plan_.clients) and len(memory["labels"]) == 18
    for task, proposal in enumerate(proposals[:: len(plan_.clients)]):  # client 0 comes first
        for label in plan_.clients[0][task].classes:
            first = proposal.images[proposal.labels == label][:3]
            chosen = (memory["tasks"] == task) & (memory["labels"] == label)
            assert as_bytes(memory["images"][chosen]) == as_bytes(first)


def test_the_history_has_the_size_of_the_memory() -> None:
    """An image is 64 bytes, its label and its task 8 each; 2 classes x 5 images a task. The
    numbers of images seen of 10 classes take 80 more."""
    record = run(tiny("replay", memory=kept(5)))
    assert [entry["disk"] for entry in record.history] == [80, 880, 880, 1680, 1680, 2480]
