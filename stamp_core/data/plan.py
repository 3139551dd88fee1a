"""Which client learns which classes when: each client's task sequence, stored with its hash."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
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
Plans = Mapping[int, "Plan"]  # by seed

# Fields that Split had not when the first plans were stored. At their defaults they are left out of
# files and hashes, which so stay what they are.
LATER = ("sizes", "joining", "old_share", "classes_per_client")


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
        return self.split.tasks

    @property
    def experiences(self) -> int:
        """The number of experiences of each client; experience e learns task e % T."""
        return self.split.tasks * self.split.cycles

    @cached_property
    def hash(self) -> str:
        text = json.dumps(_content(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def joined(self, experience: int) -> list[int]:
        """The clients that have joined by an experience, ascending."""
        clients = range(self.split.clients)
        return [client for client in clients if joins(self.split, client) <= experience]

    def seen(self, client: int, experience: int) -> tuple[int, ...]:
        """The sorted classes of the experiences 0..experience of `client`; () for -1."""
        tasks = self.clients[client][: experience + 1]  # a later cycle brings no new task
        return tuple(sorted({label for task in tasks for label in task.classes}))

    def train_indices(self, dataset: ImageDataset, client: int, task: int) -> torch.Tensor:
        """The sorted indices, int64, of the training images of a client's task."""
        found = self._task(dataset, client, task)
        if found.train is not None:
            return torch.tensor(found.train, dtype=torch.int64)
        return torch.from_numpy(find_images(dataset.y_train, dataset.domain_train, found))

    def test_indices(self, dataset: ImageDataset, client: int, task: int) -> torch.Tensor:
        """The sorted indices, int64, of all test images of a task's classes and domain."""
        found = self._task(dataset, client, task)
        return torch.from_numpy(find_images(dataset.y_test, dataset.domain_test, found))

    def save(self, path: Path) -> None:
        text = json.dumps({"hash": self.hash, **_content(self)}, indent=1)
        text = re.sub(r"(?<=\d,)\s+(?=\d)", " ", text)  # lists of numbers on one line
        text = re.sub(r"(?<=\[)\s+(?=\d)|(?<=\d)\s+(?=\])", "", text)
        with atomic_write(path) as part:
            part.write_text(text + "\n")

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """The plan in the file `path`; refused if it is damaged or altered."""
        try:
            values = read_json(path)
            if not isinstance(values, dict) or "hash" not in values:
                raise ParameterError(f"{path} is not a plan: it has no hash")
            stored = values.pop("hash")
            plan = build(cls, values, f"{path}: plan")
            check_hash(path, plan, stored)
        except ParameterError as error:
            raise ParameterError(f"{error}; delete it to have the plan drawn again") from None
        return plan

    def _task(self, dataset: ImageDataset, client: int, task: int) -> Task:
        """A client's task, if the plan was made for this data set."""
        if dataset.digest != self.data_digest:
            expected = f"the plan's, {self.data_digest}"
            raise invalid("the digest of the data", dataset.digest, expected)
        return self.clients[client][task]


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


def check_hash(path: Path, plan: Plan, stored: object) -> None:
    """Validate that a plan has the hash that its file says."""
    if plan.hash != stored:
        raise ParameterError(f"{path} was altered: it says hash {stored}, it has {plan.hash}")


def joins(split: Split, client: int) -> int:
    """The task with which a client joins: the last ones join last."""
    late = client - (split.clients - split.joining * (split.tasks - 1))
    return 0 if late < 0 else late // split.joining + 1


def find_images(labels: torch.Tensor, domains: torch.Tensor, task: Task) -> Indices:
    """The sorted indices of the images of the task's classes and domain."""
    matches = np.isin(np.asarray(labels), task.classes)
    if task.domain is not None:
        matches &= np.asarray(domains) == task.domain
    return np.flatnonzero(matches)
