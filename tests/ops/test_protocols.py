"""Published protocols: the numbers of their papers and code, from the plans that are drawn.

The labels are those of CIFAR-100: 500 training and 100 test images of each of 100 classes.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from stamp_core.config.params import read_setting
from stamp_core.config.schema import Setting
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan
from stamp_core.data.split import make_plan
from workbench.workflow.profiles import PAPER, read_profile
from workbench.workflow.synthetic import published_dataset

# Rounds a task, epochs, batch size; clients in a round, by task; lr in a task's first round and at
# its end: what the papers and their code say.
PUBLISHED: dict[str, dict[str, Any]] = {
    "stamp_cycles": {"training": (25, 5, 128), "selected": [10] * 50, "lr": (0.005, 0.005)},
    "glfc_protocol": {"training": (10, 20, 128), "selected": [10] * 10, "lr": (0.005, 0.005)},
    "target_protocol": {"training": (100, 5, 128), "selected": [5] * 5, "lr": (0.01, 0.01)},
    "lander_protocol": {"training": (100, 2, 128), "selected": [5] * 5, "lr": (0.04, 0.001)},
    "mfcl_protocol": {"training": (100, 10, 32), "selected": [5] * 10, "lr": (0.1, 0.01)},
    "fedprotip_protocol": {"training": (50, 5, 64), "selected": [5] * 10, "lr": (0.01, 0.01)},
}
SHARED = {"target": (5, 5, 20), "lander": (5, 5, 20), "fedprotip": (5, 10, 10)}


def setting(name: str) -> Setting:
    return read_setting(name, read_profile(PAPER))


@cache
def images(shuffled: bool = False) -> ImageDataset:
    """The labels of CIFAR-100, in the order of classes or in a random one."""
    dataset = published_dataset({"source": "cifar100"})
    if not shuffled:
        return dataset
    order = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))
    return replace(dataset, y_train=dataset.y_train[order])


@cache
def drawn(name: str, shuffled: bool = False) -> tuple[Plan, np.ndarray]:
    """The plan of a setting and the images of each class that each client has of each task.

    # [U, T, 100]
    """
    dataset = images(shuffled)
    plan = make_plan(setting(name).split, dataset, seed=0)
    counts = np.zeros((len(plan.clients), plan.tasks, 100), int)
    for u, tasks in enumerate(plan.clients):
        for t in range(len(tasks)):
            own = dataset.y_train[plan.train_indices(dataset, u, t)]
            counts[u, t] = torch.bincount(own, minlength=100).numpy()
    return plan, counts


def pair(name: str) -> list[tuple[str, bool]]:
    return [(f"{name}_protocol", False), (f"{name}_small", True)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_training_is_the_published_one(name):
    training, expected = setting(name).training, PUBLISHED[name]
    assert (training.rounds, training.epochs, training.batch_size) == expected["training"]
    plan = make_plan(setting(name).split, images(), seed=0)
    joined = [len(plan.joined(task)) for task in range(plan.tasks)]
    assert [training.count_selected(clients) for clients in joined] == expected["selected"]
    rates = training.lr_in(0), training.lr_in(training.rounds)
    assert rates == pytest.approx(expected["lr"])


@pytest.mark.parametrize(("name", "shuffled"), pair("glfc"))
def test_glfc_has_growing_clients_of_three_kinds(name, shuffled):
    """30 clients and 10 more with each task; of those before, a tenth, rounded up, stays behind.

    In the released code 30 - int(0.9 * 30) = 3 old clients at task 1, and 11 of 110 at the last.
    """
    plan, counts = drawn(name, shuffled)
    each = setting(name).split.images_per_class or 500
    assert [len(plan.joined(task)) for task in range(10)] == list(range(30, 121, 10))
    has = counts.sum(2) > 0  # [U, T]
    learning = [int(has[:, task].sum()) for task in range(10)]
    assert learning == [30, *(n + 10 - (n - int(0.9 * n)) for n in range(30, 120, 10))]
    assert has[:30, 0].all() and all(has[20 + 10 * t : 30 + 10 * t, t].all() for t in range(1, 10))
    assert not any(has[30 + 10 * t :, t].any() for t in range(10))
    assert set(counts[has].sum(1).tolist()) == {6 * each} and set(np.unique(counts)) == {0, each}
    for t in range(10):
        assert counts[:, t].any(0).nonzero()[0].tolist() == list(range(10 * t, 10 * t + 10))
    assert len({str(row) for row in counts[:30, 0]}) > 15


@pytest.mark.parametrize(("name", "shuffled"), pair("mfcl"))
def test_mfcl_gives_each_client_a_hundred_images_of_a_task(name, shuffled):
    """Those of the first clients are multinomial with p ~ Dirichlet(1): no class has run out.

    Then E[sum_k n_k^2] = 100 * 99 * 10 * 2 / (10 * 11) + 100 = 1900.
    """
    _, counts = drawn(name, shuffled)
    assert counts.shape == (50, 10, 100) and (counts.sum(2) == 100).all()
    for t in range(10):
        assert (counts[:, t].sum(0) == 500 * (np.arange(100) // 10 == t)).all()
    assert (counts[:10] ** 2).sum(2).mean() == pytest.approx(1900, rel=0.1)


@pytest.mark.parametrize(
    ("name", "shuffled"), [*pair("target"), ("lander_protocol", False), *pair("fedprotip")]
)
def test_clients_share_the_images_of_common_tasks(name, shuffled):
    """Each image has one client, and each client some of each task, but unequally many."""
    clients, tasks, classes = SHARED[name.partition("_")[0]]
    plan, counts = drawn(name, shuffled)
    assert counts.shape == (clients, tasks, 100) and (counts.sum(2) > 0).all()
    assert (counts.sum((0, 1)) == 500).all()
    assert ((counts.sum(0) > 0).sum(1) == classes).all()
    sizes = counts.sum(2)
    assert sizes.max() > 1.3 * sizes.min()
    given = [task.classes[0] for task in plan.clients[0]] == list(range(0, 100, classes))
    assert given == name.startswith("fedprotip")


@pytest.mark.parametrize(
    ("name", "tasks", "each"), [("stamp_cycles", 50, 500), ("stamp_cycles_small", 5, 150)]
)
def test_stamps_sequence_is_repeated_five_times(name, tasks, each):
    plan, counts = drawn(name)
    assert (plan.tasks, plan.experiences) == (tasks, 5 * tasks)
    assert set(np.unique(counts)) == {0, each} and ((counts > 0).sum(2) == 2).all()
    assert len({str(tasks) for tasks in plan.clients}) == len(plan.clients) == 10
