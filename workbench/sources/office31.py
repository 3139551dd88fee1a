"""Office-31: 31 classes of objects in the images of three domains.

The layout is <domain>/<class>/* or, as distributed, <domain>/images/<class>/*.
"""

from dataclasses import dataclass

import numpy as np

from stamp_core.config.limits import OpenFraction, PositiveInt
from stamp_core.core import paths
from stamp_core.data.decoding import Listing
from stamp_core.data.images import Counts, PathInside
from stamp_core.data.sources import folder

_CLASSES = 31
_IMAGES = {  # of each class, in the order of their names
    "amazon": (
        "92 82 72 82 36 94 91 97 97 81 99 100 100 98 100 99 "
        "100 94 96 95 93 100 98 98 90 75 100 99 99 96 64"
    ),
    "dslr": (
        "12 21 24 12 16 12 13 14 15 15 13 10 24 16 31 22 12 8 10 10 13 15 23 18 10 7 18 26 21 22 15"
    ),
    "webcam": (
        "29 21 28 12 16 31 40 18 21 19 27 27 30 19 30 43 "
        "30 27 28 32 16 20 30 27 40 11 25 30 24 23 21"
    ),
}


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    root: PathInside = "office31"  # in data/raw, or an absolute path
    size: PositiveInt = 300  # pixels per side
    test_share: OpenFraction = 0.25  # of each class of a domain


def listing(options: Options) -> Listing:
    """The images of all classes in each domain."""
    root = paths.RAW / options.root
    inner = [f"{name}/images" for name in _IMAGES]
    folders = [path if (root / path).is_dir() else path.removesuffix("/images") for path in inner]
    found = folder.find_images(root, folders, "<domain>/<class>/* or <domain>/images/<class>/*")
    if (count := len(found[0])) != _CLASSES:
        raise ValueError(f"{root / folders[0]} holds {count} classes; it must hold {_CLASSES}")
    subsets = folder.divide(root, found, options.test_share)
    return folder.make_listing(root, subsets, tuple(_IMAGES), options.size)


def expected(options: Options) -> Counts:
    """The published numbers of images, divided by `test_share`."""
    images = np.array([[int(count) for count in each.split()] for each in _IMAGES.values()])
    counts = [[len(folder.held_out_indices(n, options.test_share)) for n in row] for row in images]
    test = np.array(counts)  # [D, C]
    return Counts((3, options.size, options.size), images - test, test, tuple(_IMAGES))
