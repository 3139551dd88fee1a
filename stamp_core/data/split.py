"""Which client learns which classes when: each client's task sequence, stored with its hash.

The draws come from numpy generators, whose streams may change between numpy releases. A run is
therefore bound to the stored plan and its hash, not to the seed alone.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stamp_core.config.decode import ParameterError, build, invalid, to_plain
from stamp_core.config.schema import Split
from stamp_core.core.atomic import atomic_write
from stamp_core.data.dataset import ImageDataset

Indices = NDArray[np.int64]

# Draws of a task's Dirichlet split before it is refused. At the paper's alpha 0.1 with 10 clients,
# 1 draw in 4 gives every client images of a CIFAR10 task (2 classes), so 100 draws suffice. If
# fewer than 1 in 100 are accepted, an accepted draw no longer has the distribution of that alpha.
DRAWS = 100
EPSILON = 1e-5  # added to a client's shares of classes, so that it may draw from any that is left
# Fields that Split had not when the first plans were stored. At their defaults they are left out of
# files and hashes, which so stay what they are.
LATER = ("sizes", "joining", "old_share", "classes_per_client")


class Purpose(IntEnum):
    """The purpose of a draw, the second part of its address; renumbering changes every plan."""

    COMMON = 0  # the order that clients share
    OWN = 1  # a client's own order
    IMAGES = 3  # a client's images of a class
    SHARES = 4  # the clients' shares of a task's images
    CLASSES = 5  # a client's classes of a task
    OLD = 6  # the clients that do not learn a task


@dataclass(frozen=True)
class Task:
    """What a client learns in one experience."""

    classes: tuple[int, ...]  # sorted; none where the client has no part in the task
    domain: int | None = None  # None: all domains
    train: tuple[int, ...] | None = None  # sorted indices; None: all images of classes and domain


NO_TASK = Task(())


@dataclass(frozen=True)
class Plan:
    """The task sequences of all clients, each repeated `split.cycles` times."""

    split: Split
    seed: int
    data_digest: str
    clients: tuple[tuple[Task, ...], ...]  # [U][T]
    classes: int  # number in the data set, learnt or not

    @property
    def tasks(self) -> int:
        """The number of tasks T of each client."""
        return self.split.tasks

    @property
    def experiences(self) -> int:
        """The number of experiences of each client; experience e learns task e % T."""
        return self.split.tasks * self.split.cycles

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the plan's canonical JSON."""
        text = json.dumps(_content(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def joined(self, experience: int) -> list[int]:
        """The clients that have joined by an experience, ascending."""
        clients = range(self.split.clients)
        return [client for client in clients if _joins(self.split, client) <= experience]

    def seen(self, client: int, experience: int) -> tuple[int, ...]:
        """The sorted classes of the experiences 0..experience of `client`; () for -1."""
        tasks = self.clients[client][: experience + 1]  # a later cycle brings no new task
        return tuple(sorted({label for task in tasks for label in task.classes}))

    def train_indices(self, dataset: ImageDataset, client: int, task: int) -> torch.Tensor:
        """The sorted indices, int64, of the training images of a client's task."""
        found = self._task(dataset, client, task)
        if found.train is not None:
            return torch.tensor(found.train, dtype=torch.int64)
        return torch.from_numpy(_find_images(dataset.y_train, dataset.domain_train, found))

    def test_indices(self, dataset: ImageDataset, client: int, task: int) -> torch.Tensor:
        """The sorted indices, int64, of all test images of a task's classes and domain."""
        found = self._task(dataset, client, task)
        return torch.from_numpy(_find_images(dataset.y_test, dataset.domain_test, found))

    def save(self, path: Path) -> None:
        """Write the plan and its hash as JSON; `path` is replaced atomically."""
        text = json.dumps({"hash": self.hash, **_content(self)}, indent=1)
        text = re.sub(r"(?<=\d,)\s+(?=\d)", " ", text)  # lists of numbers on one line
        text = re.sub(r"(?<=\[)\s+(?=\d)|(?<=\d)\s+(?=\])", "", text)
        with atomic_write(path) as part:
            part.write_text(text + "\n")

    @classmethod
    def load(cls, path: Path, dataset: ImageDataset | None = None) -> "Plan":
        """The plan in the file `path`; refused if damaged, altered or impossible with `dataset`.

        A plan for other data than `dataset` comes back as it is.
        """
        try:
            plan = _read_plan(path)
            known = dataset is not None and dataset.digest == plan.data_digest
            check_plan(f"{path}: plan", plan, dataset if known else None)
        except ParameterError as error:
            raise ParameterError(f"{error}; delete it to have the plan drawn again") from None
        return plan

    def _task(self, dataset: ImageDataset, client: int, task: int) -> Task:
        """A client's task, if the plan was made for this data set."""
        if dataset.digest != self.data_digest:
            expected = f"the plan's, {self.data_digest}"
            raise invalid("the digest of the data", dataset.digest, expected)
        return self.clients[client][task]


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


def _content(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, without later fields of its split that are at their defaults."""
    content: dict[str, Any] = to_plain(plan)
    unset = {each.name: each.default for each in fields(Split) if each.name in LATER}
    split = content["split"].items()
    return {**content, "split": {k: v for k, v in split if k not in unset or v != unset[k]}}


def read_json(path: Path) -> object:
    """The content of a JSON file; ParameterError if it is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # not JSON, or not even UTF-8
        raise ParameterError(f"{path} is damaged: {error}") from None


def _read_plan(path: Path) -> Plan:
    """The plan in the file `path`, of the right types and with its own hash."""
    values = read_json(path)
    if not isinstance(values, dict) or "hash" not in values:
        raise ParameterError(f"{path} is not a plan: it has no hash")
    stored = values.pop("hash")
    plan = build(Plan, values, f"{path}: plan")
    check_hash(path, plan, stored)
    return plan


def check_hash(path: Path, plan: Plan, stored: object) -> None:
    """Validate that a plan has the hash that its file says."""
    if plan.hash != stored:
        raise ParameterError(f"{path} was altered: it says hash {stored}, it has {plan.hash}")


def check_plan(where: str, plan: Plan, dataset: ImageDataset | None) -> None:
    """Validate a plan by its split and, if there is one, by its data set."""
    for name, least in (("seed", 0), ("classes", 1)):
        if getattr(plan, name) < least:
            raise invalid(f"{where}.{name}", getattr(plan, name), f"at least {least}")
    if dataset is not None and plan.classes != len(dataset.classes):
        raise invalid(f"{where}.classes", plan.classes, f"{len(dataset.classes)}, as in the data")
    clients, tasks = plan.split.clients, plan.split.tasks
    _check_length(f"{where}.clients", plan.clients, clients, clients)
    for client, own in enumerate(plan.clients):
        _check_length(f"{where}.clients[{client}]", own, tasks, tasks)
        first = _joins(plan.split, client)
        for t, task in enumerate(own):
            place = f"{where}.clients[{client}][{t}]"
            if t >= first and not (t > first and plan.split.old_share and not task.classes):
                _check_task(place, task, plan, dataset)
            elif task != NO_TASK:
                raise ParameterError(f"{place} must be without classes, domain and images")


def _check_task(where: str, task: Task, plan: Plan, dataset: ImageDataset | None) -> None:
    """Validate a task by the split of its plan and, if there is one, by the data set."""
    split, listed = plan.split, plan.split.kind == "file"
    size = split.classes_per_client or split.classes_per_task or plan.classes
    count = split.images_per_class
    sizes = (1, math.inf) if listed else (size, size)
    _check_numbers(f"{where}.classes", task.classes, plan.classes, *sizes)
    domains = math.inf if dataset is None else len(dataset.domains)
    if split.kind == "classes" and task.domain is not None:
        raise invalid(f"{where}.domain", task.domain, "absent, as kind is 'classes'")
    needed = split.kind == "domains" or task.domain is not None
    if needed and (task.domain is None or not 0 <= task.domain < domains):
        right = f"a number from 0 and below {domains}, as kind is {split.kind!r}"
        raise invalid(f"{where}.domain", task.domain, right)
    if not listed and (task.train is None) == (count is not None or split.alpha is not None):
        right = "a list of indices" if task.train is None else "absent"
        raise ParameterError(f"{where}.train must be {right}, by alpha and images_per_class")
    if task.train is None:
        return
    images = math.inf if dataset is None else len(dataset.y_train)
    lengths = (split.min_samples, math.inf) if count is None else (count * size, count * size)
    _check_numbers(f"{where}.train", task.train, images, *lengths)
    if dataset is not None:
        train = np.array(task.train, np.int64)
        own = _fits(dataset.y_train[train], dataset.domain_train[train], task)
        for k in np.flatnonzero(~own)[:1]:
            right = "an image of the task's classes and domain"
            raise invalid(f"{where}.train[{k}]", task.train[k], right)


def _check_length(where: str, values: Sequence[object], least: int, most: float) -> None:
    """Validate the length of a list."""
    if not least <= len(values) <= most:
        right = f"{least}" if least == most else f"at least {least}"
        raise ParameterError(f"{where} is a list of {len(values)}; it must be of {right}")


def _check_numbers(where: str, values: Sequence[int], end: float, least: int, most: float) -> None:
    """Validate that a list has its length, and that its numbers rise from 0 to below `end`."""
    _check_length(where, values, least, most)
    for k, (low, value) in enumerate(pairwise((-1, *values))):
        if not low < value < end:
            raise invalid(f"{where}[{k}]", value, f"above {low} and below {end}")


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


def _joins(split: Split, client: int) -> int:
    """The task with which a client joins: the last ones join last."""
    late = client - (split.clients - split.joining * (split.tasks - 1))
    return 0 if late < 0 else late // split.joining + 1


def _draw_parts(split: Split, tasks: list[list[Task]], seed: int) -> list[list[Task]]:
    """The tasks as clients have parts in them: none, or some classes, or all as before.  # [U][T]

    A client has none before it joins, and in tasks for which it is drawn as an old one.
    """
    old = [_draw_old(split, t, seed) for t in range(split.tasks)]

    def part(client: int, t: int) -> Task:
        if t < _joins(split, client) or client in old[t]:
            return NO_TASK
        return _draw_classes(split, tasks[client][t], seed, client, t)

    return [[part(client, t) for t in range(split.tasks)] for client in range(split.clients)]


def _draw_old(split: Split, index: int, seed: int) -> set[int]:
    """The clients that joined before task `index` and do not learn it."""
    earlier = sum(_joins(split, client) < index for client in range(split.clients))
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


def _fits(labels: torch.Tensor, domains: torch.Tensor, task: Task) -> NDArray[np.bool_]:
    """Which images are of the task's classes and domain.  # [N]"""
    matches = np.isin(np.asarray(labels), task.classes)
    if task.domain is not None:
        matches &= np.asarray(domains) == task.domain
    return matches


def _find_images(labels: torch.Tensor, domains: torch.Tensor, task: Task) -> Indices:
    """The sorted indices of the images of the task's classes and domain."""
    return np.flatnonzero(_fits(labels, domains, task))


def _draw_images(dataset: ImageDataset, task: Task, count: int, seed: int, client: int) -> Task:
    """A client's task with `count` images of each class, drawn without replacement."""
    if task == NO_TASK:
        return task
    train: list[int] = []
    for label in task.classes:
        own = _find_images(dataset.y_train, dataset.domain_train, replace(task, classes=(label,)))
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
    images = _find_images(dataset.y_train, dataset.domain_train, task)  # [N]
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
    """The client of each image, class by class with p ~ Dirichlet(alpha * 1).  # [N]

    PFLlib's balance rule: a client with N / U images or more gets none of the next class.
    """
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
