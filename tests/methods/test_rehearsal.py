"""Rehearsal: the batches, what is remembered when, and what does not show in the reference."""

import pytest
import small
import torch
from small import kept, network, normalised, plan, run, tiny
from test_methods import client_rounds
from torch import Tensor

from stamp_core.client.runtime import RoundId
from stamp_core.data.plan import Plan
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.method import State

FACES = {"source": "glyphs", "classes": 2, "train_per_class": 32, "test_per_class": 16}
FACES |= {"size": 16, "face_domains": True}
DOMAINS = {"kind": "domains", "classes_per_task": None, "cycles": 2}
REPEATED = "memory: a class was met again"


def memories(experiment: Experiment) -> list[State]:
    """Client 0's memory after every experience."""
    worker = small.worker(experiment, plan(experiment))
    rounds = client_rounds(worker, plan(experiment))
    return [e.result.reply.state["memory"] for e in rounds if e.client_round.client == 0]


def as_bytes(images: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


@pytest.mark.parametrize("ratio", [0.0, 0.5, 4.0])
def test_batches_end_with_exemplars_of_other_tasks(ratio):
    """After n new images come min(ratio n, all) exemplars, no two the same, and the batch says how
    many and of which tasks. 10 are kept per task; batches are of 16 images or, the last ones, of
    fewer."""
    experiment = tiny("replay", split={"cycles": 2}, memory=kept(5), ratio=ratio)
    worker = small.worker(experiment, plan(experiment))
    for client_round in (each.client_round for each in client_rounds(worker, plan(experiment))):
        memory = client_round.state["memory"]
        past = memory["tasks"] != client_round.task
        images = as_bytes(worker.runtime.normalise(memory["images"][past]))
        labels = zip(memory["labels"][past].tolist(), memory["tasks"][past].tolist(), strict=True)
        known = dict(zip(images, labels, strict=True))
        new = worker.runtime.batches(client_round, client_round.indices)
        mixed = worker.method.batches(client_round, small.started(worker.method, client_round))
        for plain, batch in zip(new, mixed, strict=True):
            count = min(round(ratio * len(plain)), len(known))
            assert (batch.new, batch.exemplars, batch.soft) == (len(plain), count, None)
            assert torch.equal(batch.images[: batch.new], plain.images)
            assert torch.equal(batch.targets[: batch.new], plain.targets)
            if count:
                assert batch.tasks is not None
                exemplars = as_bytes(batch.images[batch.new :])
                found = zip(batch.targets[batch.new :].tolist(), batch.tasks.tolist(), strict=True)
                assert len(set(exemplars)) == count
                assert [known[each] for each in exemplars] == list(found)


def test_where_rounds_may_be_missed_a_memory_is_selected_in_the_first_and_in_the_last():
    """So that a client that misses the others has one; herding selects others in the last round, by
    the trained encoder. Images are counted once."""
    memory = {"selection": "herding", "exemplars_per_class": 5}
    experiment = tiny("stamp", training={"participation": 0.75, "rounds": 3}, memory=memory)
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    state, picked = states[0], []
    for round_, last in ((0, False), (1, False), (2, True)):
        round_id = RoundId(0, 0, 0, round_, last)
        reply = worker.train_client(round_id, state, worker.method.broadcast(server, 0)).reply
        state, trained = reply.state, reply.message["parameters"]
        chosen = {
            label: as_bytes(state["memory"]["images"][state["memory"]["labels"] == label])
            for label in plan_.clients[0][0].classes
        }
        expected = {label: herded(experiment, plan_, label, trained, 5) for label in chosen}
        assert (chosen == expected) == (round_ != 1), round_
        picked.append(chosen)
    assert picked[0] == picked[1] != picked[2]
    own = plan_.train_indices(experiment.dataset(), 0, 0)
    assert int(state["memory"]["seen"].sum()) == len(own)


def herded(
    experiment: Experiment, plan_: Plan, label: int, parameters: Tensor, count: int
) -> list[bytes]:
    """The greedy choice among a class's images of client 0's first task, in float64.

    Each next image brings the mean of the chosen features nearest to that of all of them.
    """
    dataset = experiment.dataset()
    own = plan_.train_indices(dataset, 0, 0)
    own = own[dataset.y_train[own] == label]
    encode = network(experiment, parameters).encoder
    with torch.no_grad():
        z = encode(normalised(experiment, dataset.x_train[own])).double()
    picks: list[int] = []
    for k in range(count):
        left = [i for i in range(len(own)) if i not in picks]
        away = [float((z.mean(0) - (z[picks].sum(0) + z[i]) / (k + 1)).norm()) for i in left]
        picks.append(left[away.index(min(away))])
    return as_bytes(dataset.x_train[own[picks]])


def test_a_task_is_added_once_even_if_none_of_its_exemplars_stayed():
    """One image of each of two classes is kept: at least one of three domains has none."""
    experiment = tiny("replay", memory=kept(1), source=FACES, split=DOMAINS)
    *_, third, fourth, fifth, sixth = memories(experiment)
    tasks = range(3)
    own = torch.cat([plan(experiment).train_indices(experiment.dataset(), 0, t) for t in tasks])
    assert third["seen"].tolist() == experiment.dataset().y_train[own].bincount().tolist()
    assert third["labels"].tolist() == [0, 1]
    for memory in (fourth, fifth, sixth):
        small.assert_equal_trees(memory, third)


@pytest.mark.parametrize(
    ("options", "first", "classes"),
    [({"split": {"cycles": 2}}, 3, 2), ({"source": FACES, "split": DOMAINS}, 1, 2)],
    ids=["cycles", "domains"],
)
def test_a_class_met_again_is_merged_once_in_the_last_round(options, first, classes):
    """MixStyle changes its exemplars, not their number; each of four clients logs it."""
    memory = {"exemplars_per_class": 2, "mixstyle_alpha": 2.0}
    experiment = tiny("stamp", memory=memory, **options)
    before, after = memories(experiment)[first - 1 : first + 1]
    assert len(before["labels"]) <= len(after["labels"])
    assert set(as_bytes(after["images"])) != set(as_bytes(before["images"]))
    own = plan(experiment).train_indices(experiment.dataset(), 0, first % 3)
    assert int((after["seen"] - before["seen"]).sum()) == len(own)
    for entry in run(experiment).history:
        again = entry["experience"] >= first and entry["round"]
        assert entry["events"].get(REPEATED, 0) == (4 * classes if again else 0)
