"""ImageNet-1K as torchvision lays it out: <root>/train/<wnid>/*.JPEG and <root>/val/<wnid>/*.JPEG.

The subset of the paper's public code is `size: 32, per_class_train: 600, per_class_test: 100,
test: train`. Where the number of images is limited, the first by name are used.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stamp_core.config.decode import require
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
    per_class_train: PositiveInt | None = None  # images; None: all
    per_class_test: PositiveInt | None = None  # images; None: all
    test: Literal["val", "train"] = "val"  # train: the images of train/ after those for training

    def __post_init__(self) -> None:
        if self.test == "train":
            limited = self.per_class_train is not None
            require(self, "per_class_train", limited, "a number, as test is 'train'")


def listing(options: Options) -> Listing:
    """The images of all classes, which are named by their wnids."""
    root, train, test = paths.RAW / options.root, options.per_class_train, options.per_class_test
    needed = {"train": train or 1, "val": test or 1}
    if options.test == "train":
        needed = {"train": (train or 0) + (test or 1)}
    layout = "train/<wnid>/*.JPEG and val/<wnid>/*.JPEG"
    found = dict(zip(needed, find_images(root, tuple(needed), layout), strict=True))
    for folder, classes in found.items():
        for name, files in classes.items():
            if len(files) < needed[folder]:
                right = f"{needed[folder]}, as per_class_train and per_class_test require"
                held = f"{root / folder / name} holds {len(files)} images"
                raise ValueError(f"{held}; it must hold {right}")
    rest = {name: files[train:] for name, files in found["train"].items()}
    first = {name: files[:train] for name, files in found["train"].items()}
    held_out = {name: files[:test] for name, files in found.get("val", rest).items()}
    return make_listing(root, ([first], [held_out]), ("all",), options.size)


def expected(options: Options) -> Counts:
    """The published numbers of images, cut to those that `options` take."""
    spread = (np.arange(CLASSES) + 1) * TRAIN_IMAGES // CLASSES
    train = np.diff(spread, prepend=0)
    test = np.full(CLASSES, VAL_IMAGES)
    if options.per_class_train is not None:
        first = np.minimum(train, options.per_class_train)
        train, test = first, train - first if options.test == "train" else test
    if options.per_class_test is not None:
        test = np.minimum(test, options.per_class_test)
    return Counts((3, options.size, options.size), train[None], test[None])
