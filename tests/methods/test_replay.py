"""Rehearsal against a naive reference in NumPy, and classes and tasks that are met again."""

import numpy as np
import pytest
import reference
import small
import torch
from reference import GROWING, Array, Numbers, RehearsalReference, State, Visit, herded
from small import kept, plan, run, tiny
from test_methods import client_rounds
from torch import Tensor

from stamp_core.engine.experiment import Experiment

FACES = {"source": "glyphs", "classes": 2, "train_per_class": 32, "test_per_class": 16}
FACES |= {"size": 16, "face_domains": True}
DOMAINS = {"kind": "domains", "classes_per_task": None, "cycles": 2}
REPEATED = "memory: a class was met again"


class ReplayReference(RehearsalReference):
    def sgd(self, visit: Visit, theta: Array, state: State) -> Array:
        state["next"] = iter(self.replayed(visit, state))
        self.trained = super().sgd(visit, theta, state)
        return self.trained

    def order(self, visit: Visit, label: int, own: Numbers) -> list[int]:
        if self.params.memory.selection == "uniform":
            return super().order(visit, label, own)
        return herded(self.features(self.trained, self.x[own]), len(own))

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """One mean over all images, or that of new images and of exemplars, 1 to `weight`."""
        past, weight = next(state["next"]), self.params.weight
        if not len(past):
            return self.gradient(theta, x, y)
        if weight is None:
            both = np.concatenate([x, self.x[past]]), np.concatenate([y, self.y[past]])
            return self.gradient(theta, *both)
        of_past = self.gradient(theta, self.x[past], self.y[past])
        return (self.gradient(theta, x, y) + weight * of_past) / (1 + weight)


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(
    "params",
    [
        {"ratio": 1.0, "memory": kept(4)},
        {"ratio": 0.5, "weight": 2.0, "memory": kept(4)},
        {"ratio": 1.0, "memory": kept(4, selection="herding")},
    ],
    ids=["one mean", "weighted", "herding"],
)
def test_replay_is_the_reference(params, configuration, tmp_path):
    """With its memories, for which images are counted once, also where they are chosen twice."""
    kind = ReplayReference
    _, naive, states = reference.compare("replay", configuration, kind, tmp_path, **params)
    for client, (state, own) in enumerate(zip(states, naive.clients, strict=True)):
        memory, tasks = state["memory"], own["memory"]
        chosen = np.concatenate([np.empty(0, np.int64), *tasks.values()])
        assert torch.equal(memory["images"], naive.data.x_train[chosen])
        assert memory["tasks"].tolist() == [task for task, each in tasks.items() for _ in each]
        met = np.concatenate([naive.y[naive.indices(client, task)] for task in tasks])
        assert memory["seen"].tolist() == np.bincount(met, minlength=10).tolist()


def memories(experiment: Experiment) -> list[State]:
    """Client 0's memory after every experience."""
    worker = small.worker(experiment, plan(experiment))
    rounds = client_rounds(worker, plan(experiment))
    return [e.result.reply.state["memory"] for e in rounds if e.client_round.client == 0]


def as_bytes(images: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


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
