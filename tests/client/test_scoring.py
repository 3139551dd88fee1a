"""Accuracies of all scorings against a loop over images."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from four_classes import images, labelled

from stamp_core.client import runtime as runtimes
from stamp_core.client.runtime import ClientRuntime
from stamp_core.client.scoring import score
from stamp_core.config.schema import Network, Setting, Split, Training
from stamp_core.data.plan import Plan, Task
from stamp_core.results.records import SCORINGS

MLP = Network("mlp", features=16)
SPLIT = Split("classes", clients=2, tasks=2, classes_per_task=2)
TRAINING = Training(rounds=1, epochs=3, batch_size=16, lr=0.1)


TASKS = (  # client 0 has class b twice, client 1 none twice; there is no test image of d
    (Task((0, 1)), Task((1, 2))),
    (Task((2, 3)), Task((0, 1))),
    (Task((0, 2)), Task((3,))),
)


@pytest.fixture
def scored(monkeypatch):
    """An untrained network and 30 test images of the classes a, b and c, in batches of 7."""
    monkeypatch.setattr(runtimes, "EVALUATION_BATCH", 7)
    dataset = labelled(images(4, 1, 5, 5), images(30, 1, 5, 5, seed=1), torch.arange(30) % 3)
    dataset = replace(dataset, mean=torch.full((1,), 0.5), std=torch.full((1,), 0.3))
    split = replace(SPLIT, clients=3, cycles=2)
    plan = Plan(split, seed=0, data_digest="by hand", clients=TASKS, classes=4)
    return ClientRuntime(Setting("by hand", {}, split, MLP, TRAINING), dataset), plan


def expected(
    runtime: ClientRuntime, client: int, experience: int, task: int, scoring: str
) -> float:
    if scoring == "nearest mean":
        return expected_by_means(runtime, TASKS[client][task].classes)
    own, met = TASKS[client][task].classes, TASKS[client][: experience + 1]
    seen = {label for past in met for label in past.classes}
    allowed = {"all": {0, 1, 2, 3}, "seen": seen, "task": set(own)}[scoring]
    right = []
    for image, label in zip(runtime.dataset.x_test, runtime.dataset.y_test.tolist(), strict=True):
        if label in own:
            with torch.no_grad():
                logits = runtime.model.module.eval()(runtime.normalise(image[None]))[0].tolist()
            right.append(max(allowed, key=lambda label_: logits[label_]) == label)
    if not right or not set(own) <= allowed:
        return float("nan")
    return sum(right) / len(right)


@torch.no_grad()
def expected_by_means(runtime: ClientRuntime, own: Sequence[int]) -> float:
    """The accuracy if the nearest mean feature of a class's training images decides."""
    encode, data = runtime.classifier.eval().encode, runtime.dataset
    means = {
        label: encode(runtime.normalise(data.x_train[data.y_train == label])).mean(0)
        for label in data.y_train.unique().tolist()
    }
    right = []
    for image, label in zip(data.x_test, data.y_test.tolist(), strict=True):
        if label in own:
            feature = encode(runtime.normalise(image[None]))[0]
            nearest = min(means, key=lambda each: float((feature - means[each]).norm()))
            right.append(nearest == label)
    return sum(right) / len(right) if right else float("nan")


@pytest.mark.parametrize("clients", [[0, 1, 2], [2], [1, 0]])
@pytest.mark.parametrize("experience", [0, 1, 3])
def test_scores_are_those_of_a_loop(scored, clients, experience):
    runtime, plan = scored
    scores = score(runtime, plan, clients, experience, nearest_mean=True).numpy()
    wanted = [
        [
            [expected(runtime, client, experience, task, scoring) for task in range(2)]
            for client in clients
        ]
        for scoring in SCORINGS
    ]
    np.testing.assert_allclose(scores, wanted, atol=1e-6)
