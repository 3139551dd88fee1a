"""Digit-10: the ten digits in several sets, each a domain, 28 x 28 in grey.

The paper gives four tasks and 110,000 pictures, but neither the sets nor their order. These four
are a guess; whole they are more pictures.
"""

from dataclasses import dataclass, replace

import numpy as np

from stamp_core import downloads
from stamp_core.config import at_least, unknown, wrong
from stamp_core.data import Numbers, Pictures, emnist_digits, mnist, svhn, usps

PACKAGES = svhn.PACKAGES
SETS = {"mnist": mnist, "emnist": emnist_digits, "usps": usps, "svhn": svhn}
LOOK = downloads.Options(size=28, grey=True)


@dataclass(frozen=True)
class Options:
    """What can be chosen."""

    sets: tuple[str, ...] = ("mnist", "emnist", "usps", "svhn")  # the domains, in this order
    per_class: int | None = None  # the first of each class and domain, for training as for testing

    def __post_init__(self) -> None:
        """Refuse sets nobody knows, none, or one twice."""
        for name in self.sets:
            if name not in SETS:
                raise unknown("sets:", name, SETS)
        if not self.sets or len(set(self.sets)) < len(self.sets):
            raise wrong("sets", list(self.sets), "at least one set, and none twice")
        if self.per_class is not None:
            at_least(self, 1, "per_class")


def make(options: Options) -> Pictures:
    """The sets one after the other."""
    parts = [SETS[name].make(LOOK) for name in options.sets]
    if options.per_class is not None:
        parts = [_cut(part, options.per_class) for part in parts]
    return replace(downloads.join(parts, options.sets), classes=tuple("0123456789"))


def _cut(part: Pictures, count: int) -> Pictures:
    """A set with its first `count` pictures of each class alone."""
    train, test = _first(part.y_train, count), _first(part.y_test, count)
    x_train, y_train = part.x_train[train], part.y_train[train]
    return Pictures(x_train, y_train, part.x_test[test], part.y_test[test], part.classes)


def _first(y: Numbers, count: int) -> Numbers:
    """The places, rising, of the first `count` pictures of each class."""
    return np.sort(np.concatenate([np.flatnonzero(y == label)[:count] for label in range(10)]))
