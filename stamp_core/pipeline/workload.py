"""How much the clients of a plan train and evaluate: counted by class and domain."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stamp_core.config.schema import Training
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.split import Plan, Task
from stamp_core.data.store.cache import Numbers


def count_images(plan: Plan, dataset: ImageDataset) -> Numbers:
    """The number of training images of each client's tasks.  # [U, T]"""
    table = _count_pairs(dataset.y_train, dataset.domain_train, dataset)

    def count(task: Task) -> int:
        return int(table[_mask(task, table)].sum()) if task.train is None else len(task.train)

    return np.array([[count(task) for task in tasks] for tasks in plan.clients])


def count_steps(plan: Plan, dataset: ImageDataset, training: Training) -> int:
    """The number of SGD steps of all clients together."""
    batches = -(-count_images(plan, dataset) // training.batch_size)
    return int(batches.sum()) * training.epochs * training.rounds * plan.split.cycles


def count_evaluated(plan: Plan, dataset: ImageDataset) -> int:
    """The number of evaluated images: per experience those of all clients, and each client's."""
    table = _count_pairs(dataset.y_test, dataset.domain_test, dataset)
    own = [np.any([_mask(task, table) for task in tasks], axis=0) for tasks in plan.clients]
    images = [int(table[mask].sum()) for mask in (np.any(own, axis=0), *own)]
    return plan.experiences * sum(images)


def _count_pairs(labels: Tensor, domains: Tensor, dataset: ImageDataset) -> Numbers:
    """The number of images of each domain and class.  # [D, C]"""
    shape = len(dataset.domains), len(dataset.classes)
    pairs = domains * shape[1] + labels
    counts: Numbers = torch.bincount(pairs, minlength=shape[0] * shape[1]).numpy()
    return counts.reshape(shape)


def _mask(task: Task, table: Numbers) -> npt.NDArray[np.bool_]:
    """Which domains and classes a task has.  # [D, C]"""
    mask = np.zeros(table.shape, bool)
    mask[slice(None) if task.domain is None else task.domain, list(task.classes)] = True
    return mask
