"""Rules that propose from whole tasks: what they are given, and what becomes of proposals."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import plan, run, tiny

from stamp_core.client.runtime import RoundId
from stamp_core.core.seeding import generator
from stamp_core.coresets import memory
from stamp_core.coresets.memory import MemoryParams
from stamp_core.coresets.selection import base
from stamp_core.coresets.selection.base import Proposal, TaskData

CLASSES = 10
GIVEN: list[TaskData] = []  # what the rule `recording` was given


@dataclass(frozen=True)
class Options:
    soft: bool = True


def propose_synthetic(task: TaskData) -> Proposal:
    labels = task.labels.unique().repeat_interleave(task.exemplars_per_class + 1)
    images = torch.arange(len(labels), dtype=torch.uint8).flip(0)[:, None, None, None]
    images = images.expand(-1, *task.images.shape[1:]).contiguous()
    width = CLASSES if task.options.soft else 0
    soft = torch.arange(float(len(labels) * width)).view(len(labels), width).flip(0)
    task.events.append("synthetic: an event")
    return Proposal(images, labels, soft)


def propose_recording(task: TaskData) -> Proposal:
    GIVEN.append(task)
    return task.proposal(torch.arange(len(task.labels)))


@pytest.fixture(autouse=True)
def two_more_rules(monkeypatch):
    GIVEN.clear()
    known = base.load_rule
    more = {
        "synthetic": SimpleNamespace(propose=propose_synthetic, Options=Options),
        "recording": SimpleNamespace(propose=propose_recording),
    }
    monkeypatch.setattr(base, "load_rule", lambda rule: more.get(rule) or known(rule))
    monkeypatch.setattr(small.Quick, "files", lambda self: [])  # the rules have none


def replaying(rule: str, exemplars_per_class: int = 3, **params: Any) -> Any:
    memory = small.kept(exemplars_per_class, selection=rule)
    return tiny("replay", **{"memory": memory, "weight": 1.0, **params})


def arrived(experiment: Any, experience: int) -> tuple[Any, Any]:
    """A worker, and a client's round in an experience after such rounds in all earlier ones."""
    worker = small.worker(experiment, plan(experiment))
    return worker, small.arrived(worker, plan(experiment), experience)


# ----------------------------------------------------------------------------------- the memory


def test_what_a_rule_is_given():
    """The second task's images, the model after training, the first task's exemplars."""
    experiment = replaying("recording", exemplars_per_class=4)
    worker, client_round = arrived(experiment, 1)
    args = client_round, client_round.state, client_round.message
    reply = worker.train_client(*args).reply
    first, task = GIVEN
    dataset = experiment.dataset()
    own = plan(experiment).train_indices(dataset, 0, 1).tolist()
    own.sort(key=lambda i: (int(dataset.y_train[i]), dataset.x_train[i].flatten().tolist()))
    assert torch.equal(task.images, dataset.x_train[own])
    assert torch.equal(task.labels, dataset.y_train[own])
    assert not len(first.past[1]) and len(task.past[1]) == 8
    assert torch.equal(task.past[0], client_round.state["memory"]["images"])
    assert torch.equal(task.past[1], client_round.state["memory"]["labels"])
    assert task.exemplars_per_class == 4 and task.options == base.NoOptions()
    assert torch.equal(task.learner.model.parameters, reply.message["parameters"])
    task.learner.load_initial_weights()
    untrained = client_round.message["parameters"]
    assert torch.equal(task.learner.model.parameters, untrained)
    inputs, labels = task.inputs()
    torch.testing.assert_close(inputs, small.normalised(experiment, task.images))
    assert torch.equal(labels, task.labels)


def test_draws_are_the_same_in_every_round_of_an_experience():
    experiment = replaying("recording", training={"participation": 0.75})
    worker = small.worker(experiment, plan(experiment))
    server, states, *_ = worker.initial_states(0)
    draws = []
    for round_id in (RoundId(0, 0, 0, 0), RoundId(0, 0, 0, 1, True), RoundId(0, 0, 1, 1, True)):
        worker.train_client(round_id, states[0], worker.method.broadcast(server, 0))
        draws.append(int(torch.randint(2**40, (), generator=GIVEN[-1].generator)))
    assert draws[0] == draws[1] != draws[2]


def test_synthetic_images_are_kept_with_their_soft_labels():
    """4 of each class are proposed and the first 3 kept; `seen` counts the real ones."""
    experiment = replaying("synthetic", exemplars_per_class=3)
    _, client_round = arrived(experiment, 1)
    kept = client_round.state["memory"]
    levels = kept["images"][:, 0, 0, 0].tolist()
    assert levels == [7, 6, 5, 3, 2, 1]
    assert kept["soft"].tolist() == [[10.0 * level + k for k in range(10)] for level in levels]
    assert int(kept["seen"].sum()) == len(
        plan(experiment).train_indices(experiment.dataset(), 0, 0)
    )


def test_events_of_a_rule_are_in_the_history():
    history = run(replaying("synthetic")).history
    assert [row["events"] for row in history] == 3 * [{}, {"synthetic: an event": 4}]


@pytest.mark.parametrize("merge", ["mixstyle", "reservoir"])
def test_soft_labels_stay_with_their_images_when_classes_are_merged(merge):
    """3 images of one task, then 2 of another, where 4 are kept: their first ones.

    For MixStyle all old ones stay, in the new one's style.
    """
    params = MemoryParams(selection="synthetic", exemplars_per_class=4, merge=merge)
    levels = set()
    for seed in range(20):
        kept = memory.empty_memory(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), CLASSES, soft=True)
        for task, level in enumerate((10, 20)):
            own = torch.arange(level, level + 3 - task)
            images = own.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
            soft = own[:, None].expand(-1, CLASSES).float()
            proposal = Proposal(images, torch.zeros(len(own), dtype=torch.int64), soft)
            new = memory.class_samples(proposal, 0, task, torch.zeros(len(own), 0))
            old = torch.zeros(len(kept["labels"]), 0)
            kept = memory.update_memory(kept, 0, new, 9, old, params, generator(seed))
        soft_levels = kept["soft"][:, 4].tolist()
        if merge == "reservoir":
            assert kept["images"][:, 0, 0, 0].tolist() == soft_levels
        assert kept["tasks"].tolist() == [int(level >= 20) for level in soft_levels]
        assert int(kept["seen"][0]) == 18
        levels.add(tuple(soft_levels))
    pairs = {(a, b, 20, 21) for a, b in ((10, 11), (10, 12), (11, 12))}
    assert levels == {(10, 11, 12, 20)} | (pairs if merge == "reservoir" else set())


# --------------------------------------------------------------------------------- the training


def test_the_loss_of_soft_labels_by_definition():
    """1 / n sum_i sum_c q_ic (log q_ic - log p_ic), q and p the softmax of logits."""
    experiment = replaying("synthetic")
    method: Any = small.worker(experiment, plan(experiment)).method
    logits, soft = (torch.randn(5, CLASSES, generator=generator(k)).double() for k in (1, 2))

    q, p = soft.softmax(1), logits.softmax(1)
    expected = float((q * (q / p).log()).sum()) / 5
    labels = torch.zeros(5, dtype=torch.int64)
    assert float(method.exemplar_loss(logits, labels, soft)) == pytest.approx(expected)
    assert float(method.exemplar_loss(soft, labels, soft)) == pytest.approx(0)
    hard = method.exemplar_loss(logits, labels, None)
    torch.testing.assert_close(hard, F.cross_entropy(logits, labels))


def test_balanced_batches_have_as_many_exemplars_of_each_class():
    """Of 8 old classes with 3 exemplars each, 16 are sampled: 2 of each class in every batch."""
    experiment = replaying("uniform", split={"clients": 1, "tasks": 5}, balanced=True)
    worker, client_round = arrived(experiment, 4)
    memory, sums = client_round.state["memory"], set()
    stored = worker.runtime.normalise(memory["images"]).flatten(1)
    context = small.started(worker.method, client_round)
    for batch in worker.method.batches(client_round, context):
        if len(batch) == 32:
            images, old = batch.images[16:], batch.targets[16:]
            assert sorted(old.unique(return_counts=True)[1].tolist()) == 8 * [2]
            distances = torch.cdist(images.flatten(1), stored)
            assert torch.equal(old, memory["labels"][distances.argmin(1)])
            sums.add(images.sum().item())
    assert len(sums) > 5


def test_a_record_has_the_first_exemplars_of_each_class_where_asked():
    experiment = replaying("uniform", exemplars_per_class=5, diagnostics={"memory": 2})
    recorded, dataset = run(experiment).memory, experiment.dataset()
    assert recorded["images"].shape == (16, 1, 8, 8)  # 4 after the first experience, 12 at the end
    last = recorded["experiences"] > 0
    assert sorted(np.unique(recorded["labels"][last], return_counts=True)[1].tolist()) == 6 * [2]
    assert recorded["experiences"].tolist() == 4 * [0] + 12 * [2]
    pairs = zip(dataset.x_train, dataset.y_train, strict=True)
    known = {image.numpy().tobytes(): int(y) for image, y in pairs}
    for image, label in zip(recorded["images"], recorded["labels"], strict=True):
        assert known[image.tobytes()] == label
    assert run(tiny("replay")).memory == {} and run(tiny(diagnostics={"memory": 2})).memory == {}
