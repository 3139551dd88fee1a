"""The numbers of images of a source."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from stamp_core.data.images import Counts
from stamp_core.data.loading import find_source, load_dataset


def count_images(spec: Mapping[str, Any]) -> Counts:
    """As published, else as its data are."""
    source, options = find_source(spec, "of")
    if hasattr(source, "expected"):
        counts: Counts = source.expected(options)
        return counts
    dataset = load_dataset(spec)
    empty = torch.zeros(len(dataset.domains), len(dataset.classes), dtype=torch.int64)
    parts = [(dataset.domain_train, dataset.y_train), (dataset.domain_test, dataset.y_test)]
    train, test = (np.asarray(empty.index_put(each, torch.tensor(1), True)) for each in parts)
    return Counts(dataset.shape, train, test, dataset.domains)
