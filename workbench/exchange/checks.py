"""Checks of plans that were not drawn here."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from stamp_core.config.decode import ParameterError, invalid
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import NO_TASK, Plan, Task, find_images, joins


def check_plan(where: str, plan: Plan, dataset: ImageDataset) -> None:
    """Validate a plan by its split and its data set."""
    if plan.classes != len(dataset.classes):
        raise invalid(f"{where}.classes", plan.classes, f"{len(dataset.classes)}, as in the data")
    clients, tasks = plan.split.clients, plan.split.tasks
    _check_length(f"{where}.clients", plan.clients, clients, clients)
    for client, own in enumerate(plan.clients):
        _check_length(f"{where}.clients[{client}]", own, tasks, tasks)
        first = joins(plan.split, client)
        for t, task in enumerate(own):
            key = f"{where}.clients[{client}][{t}]"
            if t >= first and not (t > first and plan.split.old_share and not task.classes):
                _check_task(key, task, plan, dataset)
            elif task != NO_TASK:
                raise ParameterError(f"{key} must be without classes, domain and images")


def check_owners(where: str, parts: Iterable[Iterable[int]]) -> None:
    """Validate that no image is of two clients, or of one client twice."""
    owners: dict[int, int] = {}
    for client, images in enumerate(parts):
        for image in images:
            if image in owners:
                both = f"client {owners[image]} and then for client {client}"
                raise ParameterError(f"{where}: {image} is listed for {both}; it must be once")
            owners[image] = client


def _check_task(where: str, task: Task, plan: Plan, dataset: ImageDataset) -> None:
    split, listed = plan.split, plan.split.kind == "file"
    size = split.classes_per_client or split.classes_per_task or plan.classes
    count = split.images_per_class
    sizes = (1, math.inf) if listed else (size, size)
    _check_numbers(f"{where}.classes", task.classes, plan.classes, *sizes)
    if split.kind == "classes" and task.domain is not None:
        raise invalid(f"{where}.domain", task.domain, "absent, as kind is 'classes'")
    needed = split.kind == "domains" or task.domain is not None
    if needed and (task.domain is None or not 0 <= task.domain < len(dataset.domains)):
        right = f"a number from 0 and below {len(dataset.domains)}, as kind is {split.kind!r}"
        raise invalid(f"{where}.domain", task.domain, right)
    if not listed and (task.train is None) == (count is not None or split.alpha is not None):
        right = "a list of indices" if task.train is None else "absent"
        raise ParameterError(f"{where}.train must be {right}, by alpha and images_per_class")
    if task.train is None:
        return
    lengths = (1, math.inf) if count is None else (count * size, count * size)
    _check_numbers(f"{where}.train", task.train, len(dataset.y_train), *lengths)
    own = find_images(dataset.y_train, dataset.domain_train, task)
    for index in np.setdiff1d(task.train, own)[:1].tolist():
        right = "an image of the task's classes and domain"
        raise invalid(f"{where}.train[{task.train.index(index)}]", index, right)


def _check_length(where: str, values: Sequence[object], least: int, most: float) -> None:
    if not least <= len(values) <= most:
        right = f"{least}" if least == most else f"at least {least}"
        raise ParameterError(f"{where} is a list of {len(values)}; it must be of {right}")


def _check_numbers(where: str, values: Sequence[int], end: float, least: int, most: float) -> None:
    """Validate that a list has its length, and that its numbers rise from 0 to below `end`."""
    _check_length(where, values, least, most)
    for k, (low, value) in enumerate(pairwise((-1, *values))):
        if not low < value < end:
            raise invalid(f"{where}[{k}]", value, f"above {low} and below {end}")
