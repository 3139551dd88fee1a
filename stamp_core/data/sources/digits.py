"""Handwritten digits, 8 x 8, from scikit-learn: no download, learnt in seconds."""

from dataclasses import dataclass

import numpy as np

from stamp_core.config.limits import OpenFraction
from stamp_core.data.images import ImageArrays
from stamp_core.data.sources.folder import held_out_indices

PACKAGES = ("numpy", "scikit-learn")


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    test_share: OpenFraction = 0.25  # of each class


def make(options: Options) -> ImageArrays:
    """All 1797 images; those for testing are evenly spaced, so that all writers occur."""
    from sklearn.datasets import load_digits  # only here: a slow import, not needed when cached

    digits = load_digits()
    y = digits.target.astype(np.int64)
    x = ((digits.images[:, None].astype(np.int64) * 255 + 8) // 16).astype(np.uint8)  # in 0..255
    test = np.zeros(len(y), bool)
    for label in range(10):
        (own,) = np.nonzero(y == label)
        test[own[held_out_indices(len(own), options.test_share)]] = True
    return ImageArrays(x[~test], y[~test], x[test], y[test], tuple("0123456789"))
