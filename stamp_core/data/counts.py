"""The published numbers of images of a data set: known before any file of it is there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stamp_core.data.images import ImageOptions
from stamp_core.data.store.cache import Numbers

Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True, eq=False)
class Counts:
    """The result of `expected(options)` of a source."""

    shape: Shape  # of an image
    train: Numbers  # [D, C], training images by domain and class
    test: Numbers
    domains: tuple[str, ...] = ("all",)


def count_images(
    shape: Shape, options: ImageOptions, train: npt.ArrayLike, test: npt.ArrayLike
) -> Counts:
    """The counts [C] of a data set of one domain, in the size and colours of `options`."""
    channels, height, width = shape
    size = (height, width) if options.size is None else (options.size, options.size)
    train, test = (np.asarray(each, np.int64)[None] for each in (train, test))
    return Counts((1 if options.grey else channels, *size), train, test)


def join_counts(parts: Sequence[Counts], domains: tuple[str, ...]) -> Counts:
    """The counts of several data sets as the domains of one."""
    train, test = (np.concatenate([getattr(p, s) for p in parts]) for s in ("train", "test"))
    return Counts(parts[0].shape, train, test, domains)
