"""SVHN: house numbers cut into digits, 32 x 32 in colour, by torchvision."""

from functools import partial
from pathlib import Path
from typing import Any

from stamp_core import downloads, paths, vision
from stamp_core.data import Pictures

PACKAGES = (*downloads.PACKAGES, "scipy")
Options = downloads.Options
PARTS = ("train", "test")  # without "extra", easier ones


def make(options: Options) -> Pictures:
    """All 73,257 training and 26,032 test pictures."""
    kind = vision.load().datasets.SVHN
    read = {file: md5 for _, file, md5 in map(kind.split_list.get, PARTS)}
    downloads.provide("svhn", read, read, partial(_parts, kind, download=True))
    train, test = _parts(kind, paths.RAW)
    classes = tuple("0123456789")
    made = Pictures(train.data, train.labels, test.data, test.labels, classes)
    return downloads.fit(made, options)


def _parts(kind: Any, root: Path, download: bool = False) -> list[Any]:
    """torchvision's training and test set below `root`."""
    return [kind(root, split=part, download=download) for part in PARTS]
