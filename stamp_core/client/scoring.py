"""How well a model predicts the test images of clients' tasks: accuracies, or scores of masks."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from stamp_core.client.pixels import count_pixels, intersection_over_union, predict_pixels
from stamp_core.client.runtime import ClientRuntime
from stamp_core.data.split import Plan
from stamp_core.results.records import SCORINGS

Classes = tuple[int, ...]


@torch.no_grad()
def score(
    runtime: ClientRuntime,
    plan: Plan,
    clients: list[int],
    experience: int,
    nearest_mean: bool = False,
) -> Tensor:
    """The live model's scores.  # [scorings, U, T], NaN where undefined

    Those by the nearest class mean of training features only if `nearest_mean`.
    """
    if runtime.dataset.masks:
        return mask_scores(runtime, plan, clients, experience)
    needed = indices_of_tests(runtime, plan, clients).to(runtime.device)
    means = class_means(runtime) if nearest_mean else None
    logits = runtime.scale.new_empty(len(runtime.y_test), runtime.classes)
    nearest = torch.empty_like(runtime.y_test) if means else None
    for part in needed.split(runtime.chunk):  # never all images of a large data set at once
        features = runtime.outputs_there(runtime.test_images(part), runtime.classifier.encode)
        logits[part] = runtime.classifier.head(features)
        if means and nearest is not None:
            nearest[part] = means[1][torch.cdist(features, means[0]).argmin(1)]
    return accuracies(runtime, plan, clients, experience, logits, nearest)


def accuracies(
    runtime: ClientRuntime,
    plan: Plan,
    clients: list[int],
    experience: int,
    logits: Tensor,
    nearest: Tensor | None = None,
) -> Tensor:
    """Accuracies of predictions for all test images.  # [scorings, U, T], NaN where undefined

    By the logits, and by the class of the nearest mean feature if it is given; on the CPU.
    """
    logits = logits.to(runtime.device)
    shape = len(SCORINGS), len(clients), plan.tasks
    scores = logits.new_full(shape, torch.nan, dtype=torch.float32)
    for place, task, (test, *allowed) in _test_sets(runtime, plan, clients, experience):
        labels, of_test = runtime.y_test[test], logits[test]
        for scoring, classes in enumerate(allowed):  # as SCORINGS
            if len(classes):
                predicted = classes[of_test[:, classes].argmax(1)]
                scores[scoring, place, task] = (predicted == labels).double().mean()
        if nearest is not None:
            correct = nearest.to(runtime.device)[test] == labels
            scores[SCORINGS.index("nearest mean"), place, task] = correct.double().mean()
    return scores.cpu()


def _test_sets(
    runtime: ClientRuntime, plan: Plan, clients: list[int], experience: int
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """The place of a client and a task, its test images, and what may be predicted.

    That is all classes, those seen and those of the task; none where the task's are not among
    them. All tensors go to the device at once.
    """
    places, parts = [], list[Tensor]()
    for place, client in enumerate(clients):
        seen = plan.seen(client, experience)
        for task in range(plan.tasks):
            test, own = runtime.tests(plan, client, task), plan.clients[client][task].classes
            if not len(test):
                continue
            scored = [c if set(own) <= set(c) else () for c in (range(runtime.classes), seen, own)]
            places.append((place, task))
            parts += [test, *(torch.tensor(list(c), dtype=torch.int64) for c in scored)]
    if not parts:
        return
    moved = iter(torch.cat(parts).to(runtime.device).split([len(part) for part in parts]))
    for place, task in places:
        yield place, task, [next(moved) for _ in range(4)]


def indices_of_tests(runtime: ClientRuntime, plan: Plan, clients: list[int]) -> Tensor:
    """Indices of the test images of some clients' tasks.  # [n]"""
    tasks = range(plan.tasks)
    tests = torch.cat([runtime.tests(plan, client, task) for client in clients for task in tasks])
    unique: Tensor = tests.unique()
    return unique


def class_means(runtime: ClientRuntime) -> tuple[Tensor, Tensor]:
    """Mean features of each class's first training images, and the classes.  # [L, D], [L]"""
    indices, matrix, classes = runtime.mean_images
    features = runtime.outputs_there(runtime.x_train[indices], runtime.classifier.encode)
    return matrix @ features, classes


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
    for place, client in enumerate(clients):
        rows = torch.searchsorted(needed, indices_of_tests(runtime, plan, [client]))
        for task in range(plan.tasks):
            tests, own = runtime.tests(plan, client, task), plan.clients[client][task].classes
            for scoring, allowed in enumerate((every, seen[client], own)):
                if len(tests) and set(own) <= set(allowed):
                    shares = intersection_over_union(counts[allowed][rows].sum(0))
                    scores[scoring, place, task] = shares[list(own)].mean()
            right, _, true = counts[every][torch.searchsorted(needed, tests)].sum((0, 2))
            scores[-1, place, task] = right / true
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
