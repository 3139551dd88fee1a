"""Handwritten digits, 8 x 8, that come with scikit-learn: no download, seconds to learn."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stamp_core.config import wrong
from stamp_core.data import Numbers, Pictures

PACKAGES = ("numpy", "scikit-learn")


@dataclass(frozen=True)
class Options:
    """What can be chosen."""

    test_share: float = 0.25  # of each class

    def __post_init__(self) -> None:
        """Refuse a share that leaves one side empty."""
        if not 0 < self.test_share < 1:
            raise wrong("test_share", self.test_share, "above 0 and below 1")


def make(options: Options) -> Pictures:
    """All 1797 pictures, the same share of each class for testing."""
    # Imported only here: it is slow, and the cache needs none of it.
    from sklearn.datasets import load_digits

    found = load_digits()
    y = found.target.astype(np.int64)
    x = (found.images[:, None].astype(np.int64) * 255 + 8) // 16  # [N, 1, 8, 8] in 0..255
    x = x.astype(np.uint8)
    test = _test(y, options.test_share)
    return Pictures(x[~test], y[~test], x[test], y[test], tuple("0123456789"))


def _test(y: Numbers, share: float) -> npt.NDArray[np.bool_]:
    """Which pictures are for testing: evenly spaced in each class, so that all writers occur."""
    test = np.zeros(len(y), bool)
    for label in range(10):
        (places,) = np.nonzero(y == label)
        count = min(max(round(share * len(places)), 1), len(places) - 1)
        test[places[(2 * np.arange(count) + 1) * len(places) // (2 * count)]] = True
    return test
