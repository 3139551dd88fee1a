"""Some classes of another source, for a network that learns others first."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stamp_core.config.decode import invalid
from stamp_core.config.params import parse_seeds
from stamp_core.core.fingerprint import code_digest
from stamp_core.data import cache
from stamp_core.data.cache import SUBSETS
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.images import Counts
from stamp_core.data.loading import find_source, load_dataset
from workbench.counts import count_images


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    of: Mapping[str, Any]  # the block `data` of the whole set
    classes: str  # the numbers of its classes that are kept, such as "40to99"

    def __post_init__(self) -> None:
        find_source(self.of, "of")
        parse_seeds(self.classes)


def key(options: Options, make: bool) -> str:
    """A hash of the whole set, the classes and this code."""
    parts = load_dataset(options.of, make).digest, options.classes, code_digest(__file__)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write(options: Options, draft: Path) -> None:
    """Write the images of the classes, which are numbered from 0, and their own moments."""
    whole, arrays = load_dataset(options.of), dict[str, Any]()
    kept = _kept(options, len(whole.classes))
    for subset in SUBSETS:
        for name, values in _select(whole, subset, kept).items():
            arrays[f"{name}_{subset}"] = values.numpy()
    pixels = arrays["x_train"][:, : whole.shape[0]]
    arrays |= cache.channel_moments(cache.channel_sums(pixels), pixels[:, 0].size)
    names = [[whole.classes[number] for number in kept], list(whole.domains)]
    cache.complete(draft, arrays, [*names, ["mask"]] if whole.masks else names)


def expected(options: Options) -> Counts:
    """The numbers of images of the other source, of the kept classes."""
    counts = count_images(options.of)
    kept = _kept(options, counts.train.shape[1])
    return replace(counts, train=counts.train[:, kept], test=counts.test[:, kept])


def _kept(options: Options, classes: int) -> list[int]:
    kept = parse_seeds(options.classes)
    if kept[-1] >= classes:
        raise invalid("data.classes", options.classes, f"at most {classes - 1}, the last class")
    return kept


def _select(whole: ImageDataset, subset: str, kept: list[int]) -> dict[str, Tensor]:
    """Images, labels and domains of the kept classes."""
    y: Tensor = getattr(whole, f"y_{subset}")
    where = torch.isin(y, torch.tensor(kept))
    values = {name: getattr(whole, f"{name}_{subset}")[where] for name in ("x", "y", "domain")}
    return {**values, "y": values["y"] - kept[0]}
