"""Data sets whose files are not there: their published counts, random images of their shape."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stamp_core.core.seeding import generator
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.images import Counts
from stamp_core.data.loading import find_source, load_dataset


def published_dataset(spec: Mapping[str, Any]) -> ImageDataset:
    """A data set with labels and domains but no pixels; read only without known counts."""
    source, options = find_source(spec)
    if hasattr(source, "expected"):
        return _from_counts(spec["source"], source.expected(options))
    try:
        return load_dataset(spec)
    except FileNotFoundError as error:
        reason = f"the source {spec['source']!r} has no published counts, so its data must be there"
        raise FileNotFoundError(f"{error} ({reason})") from None


def synthetic_data(dataset: ImageDataset, classes: int, count: int) -> ImageDataset:
    """Random images of the shape of a data set, of its first classes and its first domain."""
    labels = torch.arange(count) % classes
    shape = (count, *dataset.x_train.shape[1:])
    x = torch.randint(256, shape, dtype=torch.uint8, generator=generator("synthetic"))
    if dataset.masks:
        x[:, -1] %= len(dataset.classes) + 1
    domains = torch.zeros_like(labels)
    half = torch.full_like(dataset.mean, 0.5)
    parts: dict[str, Any] = {"x_train": x, "x_test": x, "y_train": labels, "y_test": labels}
    parts |= {"domain_train": domains, "domain_test": domains, "mean": half, "std": half}
    return replace(dataset, **parts, digest="synthetic")


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
