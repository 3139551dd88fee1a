"""CIFAR-10: photographs in ten classes, 32 x 32 in colour, from torchvision."""

from typing import Any

import numpy as np

from stamp_core.core import paths, vision
from stamp_core.data.counts import Counts, count_images
from stamp_core.data.dataset import ImageArrays
from stamp_core.data.store import downloads

PACKAGES = downloads.PACKAGES
Options = downloads.ImageOptions


def make(options: Options) -> ImageArrays:
    """All 50,000 training and 10,000 test images."""
    return load_cifar("cifar10", vision.load_torchvision().datasets.CIFAR10, options)


def expected(options: Options) -> Counts:
    """The published numbers of images."""
    return count_images((3, 32, 32), options, [5000] * 10, [1000] * 10)


def load_cifar(name: str, kind: Any, options: Options) -> ImageArrays:
    """The images of torchvision's class `kind`, CIFAR10 or CIFAR100."""
    listed = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    files = {f"{kind.base_folder}/{file}": md5 for file, md5 in listed}
    archive = {kind.filename: kind.tgz_md5}
    downloads.provide_files(name, files, archive, lambda root: kind(root, download=True))
    subsets = [kind(paths.RAW, train=train) for train in (True, False)]
    train, test = (
        (each.data.transpose(0, 3, 1, 2), np.asarray(each.targets, np.int64)) for each in subsets
    )
    images = ImageArrays(*train, *test, tuple(subsets[0].classes))
    return downloads.convert_images(images, options)
