"""ImageNet-1K as torchvision lays it out: <root>/train/<wnid>/*.JPEG, and the same in val/."""

from dataclasses import dataclass

import numpy as np

from stamp_core.config.limits import PositiveInt
from stamp_core.core import paths
from stamp_core.data.decoding import Listing
from stamp_core.data.images import Counts, PathInside
from stamp_core.data.sources.folder import find_images, make_listing

CLASSES, VAL_IMAGES = 1000, 50  # images of each class
# 732 to 1300 a class; here they are spread evenly, as the numbers of the classes are not published.
TRAIN_IMAGES = 1_281_167


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    root: PathInside = "imagenet1k"  # in data/raw, or an absolute path
    size: PositiveInt = 224  # pixels per side


def listing(options: Options) -> Listing:
    """The images of all classes, which are named by their wnids."""
    root, layout = paths.RAW / options.root, "train/<wnid>/*.JPEG and val/<wnid>/*.JPEG"
    train, val = find_images(root, ("train", "val"), layout)
    return make_listing(root, ([train], [val]), ("all",), options.size)


def expected(options: Options) -> Counts:
    """The published numbers of images."""
    spread = (np.arange(CLASSES) + 1) * TRAIN_IMAGES // CLASSES
    train, test = np.diff(spread, prepend=0), np.full(CLASSES, VAL_IMAGES)
    return Counts((3, options.size, options.size), train[None], test[None])
