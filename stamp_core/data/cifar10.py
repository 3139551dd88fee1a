"""CIFAR-10: photographs of ten kinds of things, 32 x 32 in colour, by torchvision."""

from typing import Any

import numpy as np

from stamp_core import downloads, paths, vision
from stamp_core.data import Bytes, Numbers, Pictures
from stamp_core.downloads import provide

PACKAGES = downloads.PACKAGES
Options = downloads.Options


def make(options: Options) -> Pictures:
    """All 50,000 training and 10,000 test pictures."""
    return photographs("cifar10", vision.load().datasets.CIFAR10, options)


def photographs(name: str, kind: Any, options: Options) -> Pictures:
    """The set that torchvision's class `kind`, CIFAR10 or one made like it, reads."""
    listed = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    read = {f"{kind.base_folder}/{file}": md5 for file, md5 in listed}
    fetched = {kind.filename: kind.tgz_md5}
    provide(name, read, fetched, lambda root: kind(root, download=True))
    train, test = kind(paths.RAW), kind(paths.RAW, train=False)
    made = Pictures(*_arrays(train), *_arrays(test), tuple(train.classes))
    return downloads.fit(made, options)


def _arrays(part: Any) -> tuple[Bytes, Numbers]:
    """The pictures [N, 3, 32, 32] and labels of one part."""
    return part.data.transpose(0, 3, 1, 2), np.asarray(part.targets, np.int64)
