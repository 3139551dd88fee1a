"""Digit-10: the ten digits from several data sets, each a domain, 28 x 28 in grey.

The paper states four tasks and 110,000 images, but neither the data sets nor their order. These
four are a guess; together they have more images.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stamp_core.config.decode import require, unknown_name
from stamp_core.config.limits import PositiveInt
from stamp_core.data.cache import SUBSETS
from stamp_core.data.images import Counts, ImageArrays, ImageOptions
from stamp_core.data.sources.torchvision_sets import SETS as TORCHVISION

PACKAGES = TORCHVISION["svhn"].PACKAGES
SETS = {
    "mnist": TORCHVISION["mnist"],
    "emnist": TORCHVISION["emnist_digits"],
    "usps": TORCHVISION["usps"],
    "svhn": TORCHVISION["svhn"],
}


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    sets: tuple[str, ...] = ("mnist", "emnist", "usps", "svhn")  # the domains, in this order
    # the first images of each class and domain, train and test each
    per_class: PositiveInt | None = None

    def __post_init__(self) -> None:
        for name in self.sets:
            if name not in SETS:
                raise unknown_name("sets:", name, SETS)
        once = 0 < len(self.sets) == len(set(self.sets))
        require(self, "sets", once, "at least one set, and none twice")


def make(options: Options) -> ImageArrays:
    """The images of all sets, one set after the other."""
    parts = [SETS[name].make(ImageOptions(size=28, grey=True)) for name in options.sets]
    if options.per_class is not None:
        parts = [_take_first(part, options.per_class) for part in parts]
    arrays: dict[str, Any] = {
        key: np.concatenate([getattr(part, key) for part in parts])
        for key in ("x_train", "y_train", "x_test", "y_test")
    }
    for subset in SUBSETS:
        lengths = [len(getattr(part, f"y_{subset}")) for part in parts]
        arrays[f"domain_{subset}"] = np.repeat(np.arange(len(parts)), lengths)
    return ImageArrays(**arrays, classes=tuple("0123456789"), domains=options.sets)


def expected(options: Options) -> Counts:
    """The published numbers of images, cut to `per_class`."""
    parts = [SETS[name].expected(ImageOptions(size=28, grey=True)) for name in options.sets]
    most = np.iinfo(np.int64).max if options.per_class is None else options.per_class
    train = np.minimum(np.concatenate([part.train for part in parts]), most)
    test = np.minimum(np.concatenate([part.test for part in parts]), most)
    return Counts(parts[0].shape, train, test, options.sets)


def _take_first(part: ImageArrays, count: int) -> ImageArrays:
    """The first `count` images of each class, for training and for testing."""
    train, test = (
        np.sort(np.concatenate([np.flatnonzero(y == label)[:count] for label in range(10)]))
        for y in (part.y_train, part.y_test)
    )
    x_train, y_train = part.x_train[train], part.y_train[train]
    return ImageArrays(x_train, y_train, part.x_test[test], part.y_test[test], part.classes)
