"""Stand-ins for a data set that need none of its files: its published counts, and a small part."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stamp_core.data.counts import Counts
from stamp_core.data.dataset import ImageDataset, find_source, load_dataset
from stamp_core.data.split import Plan, Task


def expected_dataset(spec: Mapping[str, Any]) -> ImageDataset:
    """A data set with the labels and domains of the block `data`, its pixels all zero.

    No file is read and no image takes memory, unless the source knows no counts: then the data.
    """
    source, options = find_source(spec)
    if hasattr(source, "expected"):
        return _from_counts(spec["source"], source.expected(options))
    try:
        return load_dataset(spec)
    except FileNotFoundError as error:
        reason = f"the source {spec['source']!r} has no published counts, so its data must be there"
        raise FileNotFoundError(f"{error} ({reason})") from None


def cut_dataset(dataset: ImageDataset, plan: Plan, per_class: int) -> ImageDataset:
    """Random images in place of a data set: so many of each class of the cut plan's tasks."""
    pairs = {(task.domain or 0, label) for task in _first_tasks(plan) for label in task.classes}
    domains, labels = torch.tensor(sorted(pairs)).repeat_interleave(per_class, dim=0).T
    shape = (len(labels), *dataset.x_train.shape[1:])
    x = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if dataset.masks:
        x[:, -1] %= len(dataset.classes) + 1
    train = {"x_train": x, "y_train": labels, "domain_train": domains}
    test = {"x_test": x, "y_test": labels, "domain_test": domains}
    half = torch.full_like(dataset.mean, 0.5)
    return replace(dataset, **train, **test, mean=half, std=half, digest="cut")


def cut_plan(plan: Plan) -> Plan:
    """The first two tasks of the first client, on all their images of a cut data set."""
    own = tuple(replace(task, train=None) for task in _first_tasks(plan))
    split = replace(
        plan.split,
        clients=1,
        tasks=len(own),
        cycles=1,
        order="given",
        common_clients=0,
        alpha=None,
        min_samples=1,
        images_per_class=None,
    )
    return replace(plan, split=split, data_digest="cut", clients=(own,))


def _first_tasks(plan: Plan) -> tuple[Task, ...]:
    """The first two tasks of the first client: in the second one there is a past."""
    return plan.clients[0][:2]


def _from_counts(name: str, counts: Counts) -> ImageDataset:
    """The labels and domains of `counts`, with pixels that share the memory of one zero."""
    parts: dict[str, Any] = {}
    for subset, table in (("train", counts.train), ("test", counts.test)):
        pairs = np.indices(table.shape).reshape(2, -1).repeat(table.ravel(), axis=1)  # [2, N]
        parts[f"domain_{subset}"], parts[f"y_{subset}"] = torch.from_numpy(pairs)
        zero = torch.zeros(1, dtype=torch.uint8)
        parts[f"x_{subset}"] = zero.expand(pairs.shape[1], *counts.shape)
    channels = counts.shape[0]
    return ImageDataset(
        name,
        **parts,
        classes=tuple(map(str, range(counts.train.shape[1]))),
        domains=counts.domains,
        digest="expected",
        mean=torch.zeros(channels),
        std=torch.ones(channels),
    )
