"""Who learns which classes when: each client's task sequence, drawn once and kept as a hashed file.

The numbers come from numpy generators, whose streams may change between numpy releases; what
binds a run is therefore the stored plan and its hash, not the seed alone.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from stamp_core.config import ParameterError, Split, build, plain, wrong

if TYPE_CHECKING:
    from stamp_core.data import ImageSet

Indices = NDArray[np.int64]

# Draws of one task before its Dirichlet split is given up. At the paper's alpha 0.1 with 10 clients
# 1 draw in 4 leaves no client of a CIFAR10 task (2 classes) without pictures, so 100 draws do. A
# split that needs more is better refused: the rare draw that passes is no longer what alpha says.
DRAWS = 100


class Purpose(IntEnum):
    """What a draw is for, the second part of its address; a renumbering changes every plan."""

    COMMON = 0  # the order that clients share, and what disjoint blocks are cut from
    OWN = 1  # a client's own order
    ROTATION = 2  # who has which disjoint block when
    IMAGES = 3  # a client's pictures of a class
    SHARES = 4  # a task's pictures among the clients


@dataclass(frozen=True)
class Task:
    """What one client learns at one step; `train` None stands for all pictures that fit."""

    classes: tuple[int, ...]  # rising
    domain: int | None = None  # None: whatever the domain
    train: tuple[int, ...] | None = None  # rising indices of training pictures


@dataclass(frozen=True)
class Plan:
    """The task sequences of all clients: `clients[u][t]`, gone through `split.cycles` times."""

    split: Split
    seed: int
    data_digest: str
    clients: tuple[tuple[Task, ...], ...]  # [U][T]
    classes: int  # of the data, met or not

    @property
    def tasks(self) -> int:
        """The number of tasks T of each client."""
        return self.split.tasks

    @property
    def steps(self) -> int:
        """The number of steps; step s visits task s % T."""
        return self.split.tasks * self.split.cycles

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the plan's canonical JSON."""
        text = json.dumps(plain(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def seen(self, client: int, step: int) -> tuple[int, ...]:
        """The classes, rising, of the tasks that `client` met in steps 0..step; () for step -1."""
        met = self.clients[client][: max(step + 1, 0)]  # a later cycle brings no new task
        return tuple(sorted({label for task in met for label in task.classes}))

    def train_indices(self, images: "ImageSet", client: int, task: int) -> torch.Tensor:
        """The rising indices, int64, of the training pictures of a client's task."""
        part = self._task(images, client, task)
        if part.train is not None:
            return torch.tensor(part.train, dtype=torch.int64)
        return torch.from_numpy(_fitting(images.y_train, images.domain_train, part))

    def test_indices(self, images: "ImageSet", client: int, task: int) -> torch.Tensor:
        """The rising indices, int64, of all test pictures of a task's classes and domain."""
        part = self._task(images, client, task)
        return torch.from_numpy(_fitting(images.y_test, images.domain_test, part))

    def save(self, path: Path) -> None:
        """Write the plan and its hash as JSON, in one move: `path` is never half written."""
        text = json.dumps({"hash": self.hash, **plain(self)}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(re.sub(r"\[[\s\d,]+\]", _one_line, text) + "\n")
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """The plan that `path` holds; a damaged or altered file is refused."""
        try:
            values = json.loads(path.read_text())
        except ValueError as error:  # neither JSON nor, above it, UTF-8
            raise ParameterError(f"{path} is damaged: {error}") from None
        if not isinstance(values, dict) or "hash" not in values:
            raise ParameterError(f"{path} is not a plan: it has no hash")
        stored = values.pop("hash")
        plan = build(cls, values, f"{path}: plan")
        if plan.hash != stored:
            raise ParameterError(f"{path} was altered: it says hash {stored}, it has {plan.hash}")
        return plan

    def _task(self, images: "ImageSet", client: int, task: int) -> Task:
        """The task, once `images` are known to be the pictures its indices point into."""
        if images.digest != self.data_digest:
            raise wrong("the digest of the data", images.digest, f"the plan's, {self.data_digest}")
        return self.clients[client][task]


def make(split: Split, images: "ImageSet", seed: int) -> Plan:
    """The plan for `split` of `images`; the same three give the same plan."""
    split = build(Split, asdict(split), "split")  # alpha 1 and 1.0 must have one hash
    items = len(images.classes if split.kind == "classes" else images.domains)
    _refuse_too_many(split, items)
    everyone = range(split.clients)
    clients = [_sequence(split, images, _order(split, items, seed, u)) for u in everyone]
    if split.images_per_class is not None:
        count = split.images_per_class
        clients = [
            [replace(task, train=_sample(images, task, count, seed, u)) for task in clients[u]]
            for u in everyone
        ]
    if split.alpha is not None:
        parted = [_parts(split, images, t, task, seed) for t, task in enumerate(clients[0])]
        clients = [[tasks[u] for tasks in parted] for u in everyone]
    return Plan(split, seed, images.digest, tuple(map(tuple, clients)), len(images.classes))


def _generator(seed: int, purpose: Purpose, *rest: int) -> np.random.Generator:
    """The generator at an address; one purpose always has one length, as numpy pads with 0."""
    return np.random.default_rng([seed, purpose, *rest])


def _refuse_too_many(split: Split, items: int) -> None:
    """Refuse more tasks, or clients at a time, than there are classes or domains for."""
    size = split.classes_per_task or 1
    bounds = {"tasks": ""}
    if split.order == "disjoint":
        bounds["clients"] = ", as order is 'disjoint'"
    for name, reason in bounds.items():
        count = getattr(split, name)
        key = f"{name} * classes_per_task = {count} * {size}" if split.classes_per_task else name
        if count * size > items:
            raise wrong(key, count * size, f"at most {items}, the number of {split.kind}{reason}")


def _order(split: Split, items: int, seed: int, client: int) -> Indices:
    """A client's classes or domains, task by task: [T, size]; the number of clients has no say."""
    size = split.classes_per_task or 1
    if split.order == "given":
        return np.arange(split.tasks * size).reshape(-1, size)
    if split.order == "disjoint":
        blocks = _rotation(items // size, split.tasks, seed, client)
        shuffled = _generator(seed, Purpose.COMMON).permutation(items)
        return shuffled[: items // size * size].reshape(-1, size)[blocks]
    common = split.order == "common" or client < split.common_clients
    draw = _generator(seed, Purpose.COMMON) if common else _generator(seed, Purpose.OWN, client)
    return draw.permutation(items)[: split.tasks * size].reshape(-1, size)


def _rotation(blocks: int, tasks: int, seed: int, client: int) -> Indices:
    """Row `client`, cut to `tasks`, of a cyclic Latin square with shuffled rows and columns: [T].

    Its rows and columns hold each block once; shuffled, as else a client would repeat at each
    step what its neighbour learnt the step before.
    """
    draw = _generator(seed, Purpose.ROTATION)
    rows, columns = draw.permutation(blocks), draw.permutation(blocks)
    return np.asarray((rows[client] + columns[:tasks]) % blocks)


def _sequence(split: Split, images: "ImageSet", order: Indices) -> list[Task]:
    """The tasks of an order [T, size], each with all its pictures."""
    if split.kind == "classes":
        return [Task(tuple(sorted(row.tolist()))) for row in order]
    every = tuple(range(len(images.classes)))
    return [Task(every, domain) for domain in order[:, 0].tolist()]


def _fitting(labels: torch.Tensor, domains: torch.Tensor, task: Task) -> Indices:
    """The rising indices of the pictures of the task's classes and domain."""
    fits = np.isin(np.asarray(labels), task.classes)
    if task.domain is not None:
        fits &= np.asarray(domains) == task.domain
    return np.flatnonzero(fits)


def _sample(images: "ImageSet", task: Task, count: int, seed: int, client: int) -> tuple[int, ...]:
    """`count` pictures of each class of a client's task, drawn without replacement."""
    chosen: list[int] = []
    for label in task.classes:
        own = _fitting(images.y_train, images.domain_train, replace(task, classes=(label,)))
        if count > len(own):
            where = "" if task.domain is None else f" in domain {images.domains[task.domain]!r}"
            held = f"training pictures of class {images.classes[label]!r}{where}"
            raise wrong("images_per_class", count, f"at most {len(own)}, the {held}")
        draw = _generator(seed, Purpose.IMAGES, client, label, task.domain or 0)
        chosen += draw.choice(own, count, replace=False).tolist()
    return tuple(sorted(chosen))


def _parts(split: Split, images: "ImageSet", index: int, task: Task, seed: int) -> list[Task]:
    """A common task cut up: [U] tasks that share its classes and part its training pictures."""
    pictures = _fitting(images.y_train, images.domain_train, task)  # [N]
    owners = _owners(split, np.asarray(images.y_train)[pictures], index, seed)  # [N]
    parts = [pictures[owners == client].tolist() for client in range(split.clients)]
    return [replace(task, train=tuple(part)) for part in parts]


def _owners(split: Split, labels: Indices, index: int, seed: int) -> Indices:
    """The client of each picture of task `index`, redrawn until each has `min_samples`: [N]."""
    draw, best = _generator(seed, Purpose.SHARES, index), 0
    for _ in range(DRAWS):
        owners = _dirichlet(split, labels, draw)
        smallest = int(np.bincount(owners, minlength=split.clients).min())
        if smallest >= split.min_samples:
            return owners
        best = max(best, smallest)
    raise ParameterError(
        f"alpha {split.alpha} leaves a client of task {index} with fewer than min_samples = "
        f"{split.min_samples} of its {len(labels)} pictures: in {DRAWS} draws the smallest of "
        f"{split.clients} clients had {best} at best; raise alpha, lower min_samples, or have "
        "fewer clients or more pictures"
    )


def _dirichlet(split: Split, labels: Indices, draw: np.random.Generator) -> Indices:
    """One draw of each picture's client, class by class with p ~ Dirichlet(alpha * 1): [N].

    PFLlib's balance rule: who holds N / U pictures or more gets none of the next class.
    """
    owners = np.zeros(len(labels), dtype=np.int64)
    sizes = np.zeros(split.clients, dtype=np.int64)
    for label in np.unique(labels):
        own = draw.permutation(np.flatnonzero(labels == label))
        room = sizes < len(labels) / split.clients  # never empty: a picture is left to give
        shares = draw.dirichlet(np.full(split.clients, split.alpha)) * room
        shares = np.where(shares.sum() > 0, shares, room)  # equal where only full clients were hit
        cuts = (np.cumsum(shares / shares.sum())[:-1] * len(own)).astype(np.int64)  # [U - 1]
        owners[own] = np.searchsorted(cuts, np.arange(len(own)), side="right")
        sizes += np.bincount(owners[own], minlength=split.clients)
    return owners


def _one_line(numbers: re.Match[str]) -> str:
    """A list of numbers written in one line."""
    return "[" + ", ".join(re.findall(r"\d+", numbers[0])) + "]"
