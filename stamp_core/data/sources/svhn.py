"""SVHN: digits of house numbers, 32 x 32 in colour, from torchvision."""

from pathlib import Path
from typing import Any

from stamp_core.core import paths, vision
from stamp_core.data.dataset import ImageArrays
from stamp_core.data.store import downloads
from stamp_core.data.store.cache import SUBSETS

PACKAGES = (*downloads.PACKAGES, "scipy")
Options = downloads.ImageOptions


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
