"""USPS: digits from envelopes, 16 x 16 in grey, from torchvision."""

from pathlib import Path
from typing import Any

import numpy as np

from stamp_core.core import paths, vision
from stamp_core.data.counts import Counts, count_images
from stamp_core.data.dataset import ImageArrays
from stamp_core.data.store import downloads

PACKAGES = downloads.PACKAGES
Options = downloads.ImageOptions
TRAIN = (1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644)  # images of each digit
TEST = (359, 264, 198, 166, 200, 160, 170, 147, 166, 177)


def make(options: Options) -> ImageArrays:
    """All 7,291 training and 2,007 test images."""
    kind = vision.load_torchvision().datasets.USPS
    files = {file: md5 for _, file, md5 in kind.split_list.values()}

    def load(root: Path, download: bool = True) -> list[Any]:
        return [kind(root, train=train, download=download) for train in (True, False)]

    downloads.provide_files("usps", files, files, load)
    subsets = load(paths.RAW, download=False)
    train, test = ((each.data[:, None], np.asarray(each.targets, np.int64)) for each in subsets)
    images = ImageArrays(*train, *test, tuple("0123456789"))
    return downloads.convert_images(images, options)


def expected(options: Options) -> Counts:
    """The published numbers of images."""
    return count_images((1, 16, 16), options, TRAIN, TEST)
