"""Draws plans: orders of tasks, parts of tasks, and the clients' shares of images.

The draws come from numpy generators, whose streams may change between numpy releases. A run is
therefore bound to the stored plan and its hash, not to the seed alone.
"""

import math
from dataclasses import asdict, replace
from enum import IntEnum

import numpy as np

from stamp_core.config.decode import ParameterError, build, invalid
from stamp_core.config.schema import Split
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import NO_TASK, Indices, Plan, Task, find_images, joins

# Draws of a task's Dirichlet split before it is refused. At the paper's alpha 0.1 with 10 clients,
# 1 draw in 4 gives every client images of a CIFAR10 task (2 classes), so 100 draws suffice. If
# fewer than 1 in 100 are accepted, an accepted draw no longer has the distribution of that alpha.
DRAWS = 100
EPSILON = 1e-5  # added to a client's shares of classes, so that it may draw from any that is left


class Purpose(IntEnum):
    """The purpose of a draw, the second part of its address; renumbering changes every plan."""

    COMMON = 0  # the order that clients share
    OWN = 1  # a client's own order
    IMAGES = 3  # a client's images of a class
    SHARES = 4  # the clients' shares of a task's images
    CLASSES = 5  # a client's classes of a task
    OLD = 6  # the clients that do not learn a task


def make_plan(split: Split, dataset: ImageDataset, seed: int) -> Plan:
    """The plan for `split` of `dataset`; equal arguments give equal plans."""
    split = build(Split, asdict(split), "split")  # alpha 1 and 1.0 must give one hash
    if split.kind == "file":
        right = "'classes' or 'domains' to be drawn; name the file of this plan: --plan FILE"
        raise invalid("split.kind", split.kind, right)
    items = len(dataset.classes if split.kind == "classes" else dataset.domains)
    _check_sizes(split, items)
    orders = [_draw_order(split, items, seed, client) for client in range(split.clients)]
    tasks = [_make_tasks(split, dataset, order) for order in orders]  # [U][T]
    tasks = _draw_parts(split, tasks, seed)
    if split.images_per_class is not None:
        tasks = [
            [_draw_images(dataset, task, split.images_per_class, seed, client) for task in own]
            for client, own in enumerate(tasks)
        ]
    if split.alpha is not None:  # all clients have the same tasks
        shared = [_share_task(split, dataset, t, task, seed) for t, task in enumerate(tasks[0])]
        tasks = [list(own) for own in zip(*shared, strict=True)]
    return Plan(split, seed, dataset.digest, tuple(map(tuple, tasks)), len(dataset.classes))


def _generator(seed: int, purpose: Purpose, *rest: int) -> np.random.Generator:
    """The generator of an address; its length is fixed by the purpose, as numpy pads with 0."""
    return np.random.default_rng([seed, purpose, *rest])


def _check_sizes(split: Split, items: int) -> None:
    """Validate that there are classes or domains for all tasks."""
    size, key = split.classes_per_task or 1, "tasks"
    if split.classes_per_task:
        key = f"tasks * classes_per_task = {split.tasks} * {size}"
    if split.tasks * size > items:
        raise invalid(key, split.tasks * size, f"at most {items}, the number of {split.kind}")


def _draw_order(split: Split, items: int, seed: int, client: int) -> Indices:
    """A client's classes or domains by task, independent of the number of clients.  # [T, size]"""
    size = split.classes_per_task or 1
    order = np.arange(items)
    if split.order != "given":
        common = split.order == "common" or client < split.common_clients
        address = (Purpose.COMMON,) if common else (Purpose.OWN, client)
        order = _generator(seed, *address).permutation(items)
    return order[: split.tasks * size].reshape(-1, size)


def _make_tasks(split: Split, dataset: ImageDataset, order: Indices) -> list[Task]:
    """The tasks of an order [T, size], with all images of their classes and domains."""
    if split.kind == "classes":
        return [Task(tuple(sorted(row.tolist()))) for row in order]
    classes = tuple(range(len(dataset.classes)))
    return [Task(classes, domain) for domain in order[:, 0].tolist()]


def _draw_parts(split: Split, tasks: list[list[Task]], seed: int) -> list[list[Task]]:
    """The tasks as clients have parts in them; none before they join or as old ones.  # [U][T]"""
    old = [_draw_old(split, t, seed) for t in range(split.tasks)]

    def part(client: int, t: int) -> Task:
        if t < joins(split, client) or client in old[t]:
            return NO_TASK
        return _draw_classes(split, tasks[client][t], seed, client, t)

    return [[part(client, t) for t in range(split.tasks)] for client in range(split.clients)]


def _draw_old(split: Split, index: int, seed: int) -> set[int]:
    """The clients that joined before task `index` and do not learn it."""
    earlier = sum(joins(split, client) < index for client in range(split.clients))
    count = math.ceil(split.old_share * earlier - 1e-9)  # 0.1 * 30 > 3
    draw = _generator(seed, Purpose.OLD, index)
    return set(draw.choice(earlier, count, replace=False).tolist()) if count else set()


def _draw_classes(split: Split, task: Task, seed: int, client: int, index: int) -> Task:
    """A client's part of task `index`: some of its classes, or the whole task."""
    if split.classes_per_client is None:
        return task
    draw = _generator(seed, Purpose.CLASSES, client, index)
    chosen = draw.choice(task.classes, split.classes_per_client, replace=False)
    return replace(task, classes=tuple(sorted(chosen.tolist())))


def _draw_images(dataset: ImageDataset, task: Task, count: int, seed: int, client: int) -> Task:
    """A client's task with `count` images of each class, drawn without replacement."""
    if task == NO_TASK:
        return task
    train: list[int] = []
    for label in task.classes:
        own = find_images(dataset.y_train, dataset.domain_train, replace(task, classes=(label,)))
        if count > len(own):
            where = "" if task.domain is None else f" in domain {dataset.domains[task.domain]!r}"
            images = f"training images of class {dataset.classes[label]!r}{where}"
            raise invalid("images_per_class", count, f"at most {len(own)}, the {images}")
        draw = _generator(seed, Purpose.IMAGES, client, label, task.domain or 0)
        train += draw.choice(own, count, replace=False).tolist()
    return replace(task, train=tuple(sorted(train)))


def _share_task(
    split: Split, dataset: ImageDataset, index: int, task: Task, seed: int
) -> list[Task]:
    """The task once per client, its training images distributed among the clients.  # [U]"""
    images = find_images(dataset.y_train, dataset.domain_train, task)  # [N]
    owners = _draw_owners(split, np.asarray(dataset.y_train)[images], index, seed)  # [N]
    return [
        replace(task, train=tuple(images[owners == client].tolist()))
        for client in range(split.clients)
    ]


def _draw_owners(split: Split, labels: Indices, index: int, seed: int) -> Indices:
    """The client of each image of task `index`, redrawn until each has `min_samples`.  # [N]"""
    draw, best = _generator(seed, Purpose.SHARES, index), 0
    share = _draw_equal if split.sizes == "equal" else _draw_dirichlet
    for _ in range(DRAWS):
        owners = share(split, labels, draw)
        smallest = int(np.bincount(owners, minlength=split.clients).min())
        if smallest >= split.min_samples:
            return owners
        best = max(best, smallest)
    raise ParameterError(
        f"alpha {split.alpha} leaves a client of task {index} with fewer than min_samples = "
        f"{split.min_samples} of its {len(labels)} images: in {DRAWS} draws the smallest of "
        f"{split.clients} clients had {best} at best; raise alpha, lower min_samples, or have "
        "fewer clients or more images"
    )


def _draw_dirichlet(split: Split, labels: Indices, draw: np.random.Generator) -> Indices:
    """By class, p ~ Dirichlet(alpha); who has N / U images gets no more, as in PFLlib.  # [N]"""
    owners = np.zeros(len(labels), dtype=np.int64)
    sizes = np.zeros(split.clients, dtype=np.int64)
    for label in np.unique(labels):
        own = draw.permutation(np.flatnonzero(labels == label))
        room = sizes < len(labels) / split.clients  # never all False: an image is still unassigned
        shares = draw.dirichlet(np.full(split.clients, split.alpha)) * room
        shares = np.where(shares.sum() > 0, shares, room)  # equal if only full clients were drawn
        cuts = (np.cumsum(shares / shares.sum())[:-1] * len(own)).astype(np.int64)  # [U - 1]
        owners[own] = np.searchsorted(cuts, np.arange(len(own)), side="right")
        sizes += np.bincount(owners[own], minlength=split.clients)
    return owners


def _draw_equal(split: Split, labels: Indices, draw: np.random.Generator) -> Indices:
    """The client of each image, client by client with its own p ~ Dirichlet(alpha * 1).  # [N]

    p is over classes, and all clients get equally many images: latent Dirichlet allocation, as
    Flower's. Of a class with no image left the others take the share.
    """
    classes, counts = np.unique(labels, return_counts=True)  # [K], [K]
    pools = [draw.permutation(np.flatnonzero(labels == label)) for label in classes]
    owners = np.zeros(len(labels), dtype=np.int64)
    ends = np.zeros(len(classes), dtype=np.int64)  # how many images of each class are taken
    for client, images in enumerate(np.array_split(labels, split.clients)):
        p = draw.dirichlet(np.full(len(classes), split.alpha)) + EPSILON
        starts, missing = ends, len(images)
        while missing:
            left = p * (ends < counts)
            ends = np.minimum(ends + draw.multinomial(missing, left / left.sum()), counts)
            missing = len(images) - int((ends - starts).sum())
        for pool, start, end in zip(pools, starts, ends, strict=True):
            owners[pool[start:end]] = client
    return owners
