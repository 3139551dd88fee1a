"""How well a model predicts the test images of clients' tasks: accuracies, or scores of masks."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.data.plan import Plan
from stamp_core.results.records import SCORINGS

LOCAL_TESTS = 250  # test images of a task, at most, on which a local model is scored

Classes = tuple[int, ...]


class Part(NamedTuple):
    """A part of the test images: those whose index leaves the remainder `number`."""

    number: int = 0
    of: int = 1


ALL = Part()


@dataclass(frozen=True, eq=False)
class TaskTests:
    """Test images of a client's task, on the device, and what may be predicted for them."""

    row: int  # of the client in a table of scores
    task: int
    indices: Tensor  # [n]
    allowed: list[Tensor]  # all classes, those seen, the task's; none where the task's are missing


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's predictions for all test images."""

    logits: Tensor  # [N, L]
    nearest: Tensor | None = None  # [N], the class of the nearest mean feature


@torch.no_grad()
def score(
    runtime: ClientRuntime,
    plan: Plan,
    clients: list[int],
    experience: int,
    nearest_mean: bool = False,
) -> Tensor:
    """The live model's scores.  # [scorings, U, T], NaN where undefined or not asked for"""
    if runtime.dataset.masks:
        return mask_scores(runtime, plan, clients, experience)
    counts = count_correct(runtime, plan, clients, experience, nearest_mean)
    return to_accuracies(counts, count_tests(runtime, plan, clients))


def count_correct(
    runtime: ClientRuntime,
    plan: Plan,
    clients: list[int],
    experience: int,
    nearest_mean: bool,
    part: Part = ALL,
) -> Tensor:
    """Correct predictions for a part of the test images.  # float64 [scorings, U, T], or NaN"""
    sets = [
        replace(each, indices=each.indices[each.indices % part.of == part.number])
        for each in tests_of_tasks(runtime, plan, clients, experience, range(plan.tasks))
    ]
    predictions = predict(runtime, sets, nearest_mean)
    return _count(runtime, sets, predictions, len(clients), plan.tasks)


@torch.no_grad()
def local_scores(runtime: ClientRuntime, plan: Plan, client: int, experience: int) -> Tensor:
    """Scores of a local model on the task just learnt, at last on all.  # [scorings, 1, T]"""
    if runtime.dataset.masks:
        return mask_scores(runtime, plan, [client], experience)
    last = experience == plan.experiences - 1
    tasks = range(plan.tasks) if last else [experience % plan.tasks]
    sets = tests_of_tasks(runtime, plan, [client], experience, tasks)
    steps = [math.ceil(len(each.indices) / LOCAL_TESTS) for each in sets]  # evenly spread
    sets = [replace(each, indices=each.indices[::n]) for each, n in zip(sets, steps, strict=True)]
    counts = _count(runtime, sets, predict(runtime, sets, nearest_mean=False), 1, plan.tasks)
    sizes = torch.zeros(1, plan.tasks)
    for each in sets:
        sizes[0, each.task] = len(each.indices)
    return to_accuracies(counts, sizes)


def accuracies(
    runtime: ClientRuntime, plan: Plan, clients: list[int], experience: int, logits: Tensor
) -> Tensor:
    """Accuracies of logits for all test images.  # [scorings, U, T], NaN where undefined"""
    sets = tests_of_tasks(runtime, plan, clients, experience, range(plan.tasks))
    predictions = Predictions(logits.to(runtime.device))
    counts = _count(runtime, sets, predictions, len(clients), plan.tasks)
    return to_accuracies(counts, count_tests(runtime, plan, clients))


def to_accuracies(correct: Tensor, tests: Tensor) -> Tensor:
    """The share of correct predictions.  # float32 [scorings, U, T]"""
    return (correct / tests).float()


def count_tests(runtime: ClientRuntime, plan: Plan, clients: Iterable[int]) -> Tensor:
    """How many test images each client has of each task.  # int64 [U, T]"""
    tasks = range(plan.tasks)
    return torch.tensor([[len(runtime.tests(plan, u, t)) for t in tasks] for u in clients])


def tests_of_tasks(
    runtime: ClientRuntime, plan: Plan, clients: list[int], experience: int, tasks: Iterable[int]
) -> list[TaskTests]:
    """The test images of some tasks of the clients; all tensors go to the device at once."""
    addresses = list[tuple[int, int]]()
    parts = list[Tensor]()
    for row, client in enumerate(clients):
        seen = plan.seen(client, experience)
        for task in tasks:
            tests = runtime.tests(plan, client, task)
            if not len(tests):
                continue
            own = plan.clients[client][task].classes
            allowed = [c if set(own) <= set(c) else () for c in (range(runtime.classes), seen, own)]
            addresses.append((row, task))
            parts += [tests, *(torch.tensor(list(c), dtype=torch.int64) for c in allowed)]
    if not parts:
        return []
    moved = iter(torch.cat(parts).to(runtime.device).split([len(part) for part in parts]))
    return [TaskTests(*at, next(moved), [next(moved) for _ in SCORINGS[:3]]) for at in addresses]


def predict(runtime: ClientRuntime, sets: list[TaskTests], nearest_mean: bool) -> Predictions:
    """The live model's predictions for the test images of some sets."""
    logits = runtime.scale.new_zeros(len(runtime.y_test), runtime.classes)
    nearest = torch.zeros_like(runtime.y_test) if nearest_mean else None
    if not sets:
        return Predictions(logits, nearest)
    if nearest is not None:  # of mean features of each class's first training images
        indices, matrix, classes = runtime.mean_images
        means = matrix @ runtime.outputs_there(runtime.x_train[indices], runtime.classifier.encode)
    needed = torch.cat([each.indices for each in sets]).unique()
    for part in needed.split(runtime.chunk):  # never all images of a large data set at once
        features = runtime.outputs_there(runtime.test_images(part), runtime.classifier.encode)
        logits[part] = runtime.classifier.head(features)
        if nearest is not None:
            squares = torch.addmm(means.square().sum(1), features, means.T, alpha=-2)
            nearest[part] = classes[squares.argmin(1)]  # less the same for all classes
    return Predictions(logits, nearest)


def _count(
    runtime: ClientRuntime, sets: list[TaskTests], predictions: Predictions, rows: int, tasks: int
) -> Tensor:
    """The correct predictions in each set, on the CPU.  # float64 [scorings, rows, tasks]"""
    shape = (len(SCORINGS), rows, tasks)
    counts = runtime.scale.new_full(shape, torch.nan, dtype=torch.float64)
    for each in sets:
        labels = runtime.y_test[each.indices]
        logits = predictions.logits[each.indices]
        for scoring, classes in enumerate(each.allowed):  # as SCORINGS
            if len(classes):
                predicted = classes[logits[:, classes].argmax(1)]
                counts[scoring, each.row, each.task] = (predicted == labels).sum()
        if predictions.nearest is not None:
            correct = predictions.nearest[each.indices] == labels
            counts[SCORINGS.index("nearest mean"), each.row, each.task] = correct.sum()
    return counts.cpu()


def indices_of_tests(runtime: ClientRuntime, plan: Plan, clients: list[int]) -> Tensor:
    """Indices of the test images of some clients' tasks.  # [n]"""
    tasks = range(plan.tasks)
    tests = torch.cat([runtime.tests(plan, client, task) for client in clients for task in tasks])
    unique: Tensor = tests.unique()
    return unique


def mask_scores(runtime: ClientRuntime, plan: Plan, clients: list[int], experience: int) -> Tensor:
    """The live model's scores on masks.  # [PIXEL_SCORINGS, U, T], NaN where undefined

    Intersection and union of a task's class are summed over the test images of all tasks of
    the client; the accuracy of pixels, of any class, is that on the task's own.
    """
    every, needed = tuple(range(runtime.classes)), indices_of_tests(runtime, plan, clients)
    seen = {client: plan.seen(client, experience) for client in clients}
    each = {task.classes for client in clients for task in plan.clients[client]}
    counts = pixel_counts(runtime, needed, {every, *seen.values(), *each})
    scores = torch.full((len(runtime.scorings), len(clients), plan.tasks), torch.nan)
    for row, client in enumerate(clients):
        images = torch.searchsorted(needed, indices_of_tests(runtime, plan, [client]))
        for task in range(plan.tasks):
            tests, own = runtime.tests(plan, client, task), plan.clients[client][task].classes
            for scoring, allowed in enumerate((every, seen[client], own)):
                if len(tests) and set(own) <= set(allowed):
                    shares = intersection_over_union(counts[allowed][images].sum(0))
                    scores[scoring, row, task] = shares[list(own)].mean()
            right, _, true = counts[every][torch.searchsorted(needed, tests)].sum((0, 2))
            scores[-1, row, task] = right / true
    return scores


def pixel_counts(
    runtime: ClientRuntime, tests: Tensor, choices: Collection[Classes]
) -> dict[Classes, Tensor]:
    """Right, predicted and true pixels where some classes are predicted.  # [n, 3, L + 1]"""
    parts: dict[Classes, list[Tensor]] = {choice: [] for choice in choices}
    for part in tests.split(runtime.chunk):
        images = runtime.test_images(part)
        logits, masks = runtime.outputs(images), images[:, -1].cpu()
        for choice, found in parts.items():
            predicted = predict_pixels(logits, choice)
            found.append(count_pixels(predicted, masks, runtime.classes + 1))
    return {choice: torch.cat(found) for choice, found in parts.items()}


def predict_pixels(logits: Tensor, classes: Sequence[int]) -> Tensor:
    """The class of each pixel among some and the last, that of no class.  # [n, H, W]"""
    allowed = torch.tensor([*classes, logits.shape[1] - 1])
    predicted: Tensor = allowed[logits[:, allowed].argmax(1)]
    return predicted


def count_pixels(predicted: Tensor, masks: Tensor, classes: int) -> Tensor:
    """The pixels of each image that are right, predicted and true in a class.  # [n, 3, classes]"""
    every = torch.arange(classes).view(-1, 1, 1)
    found, true = predicted[:, None] == every, masks[:, None] == every  # [n, classes, H, W]
    return torch.stack([each.sum((2, 3)) for each in (found & true, found, true)], 1)


def intersection_over_union(counts: Tensor) -> Tensor:
    """The right pixels among those predicted or true; NaN without any.  # [3, L] -> [L]"""
    right, predicted, true = counts.double()
    shares: Tensor = right / (predicted + true - right)
    return shares
