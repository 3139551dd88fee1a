"""SVHN: digits of house numbers, 32 x 32 in colour, from torchvision."""

from pathlib import Path
from typing import Any

from stamp_core.core import paths, vision
from stamp_core.data.counts import Counts, count_images
from stamp_core.data.dataset import ImageArrays
from stamp_core.data.store import downloads
from stamp_core.data.store.cache import SUBSETS

PACKAGES = (*downloads.PACKAGES, "scipy")
Options = downloads.ImageOptions
TRAIN = (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659)  # images of each digit
TEST = (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595)


def make(options: Options) -> ImageArrays:
    """All 73,257 training and 26,032 test images, without the easier ones of "extra"."""
    kind = vision.load_torchvision().datasets.SVHN
    files = {file: md5 for _, file, md5 in map(kind.split_list.get, SUBSETS)}

    def load(root: Path, download: bool = True) -> list[Any]:
        return [kind(root, split=subset, download=download) for subset in SUBSETS]

    downloads.provide_files("svhn", files, files, load)
    train, test = ((each.data, each.labels) for each in load(paths.RAW, download=False))
    images = ImageArrays(*train, *test, tuple("0123456789"))
    return downloads.convert_images(images, options)


def expected(options: Options) -> Counts:
    """The published numbers of images."""
    return count_images((3, 32, 32), options, TRAIN, TEST)
