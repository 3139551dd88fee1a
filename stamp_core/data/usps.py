"""USPS: digits from envelopes, 16 x 16 in grey, by torchvision."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stamp_core import downloads, paths, vision
from stamp_core.data import Bytes, Numbers, Pictures

PACKAGES = downloads.PACKAGES
Options = downloads.Options


def make(options: Options) -> Pictures:
    """All 7,291 training and 2,007 test pictures."""
    kind = vision.load().datasets.USPS
    read = {file: md5 for _, file, md5 in kind.split_list.values()}
    downloads.provide("usps", read, read, partial(_parts, kind, download=True))
    train, test = _parts(kind, paths.RAW)
    made = Pictures(*_arrays(train), *_arrays(test), tuple("0123456789"))
    return downloads.fit(made, options)


def _parts(kind: Any, root: Path, download: bool = False) -> list[Any]:
    """torchvision's training and test set below `root`."""
    return [kind(root, train=train, download=download) for train in (True, False)]


def _arrays(part: Any) -> tuple[Bytes, Numbers]:
    """The pictures [N, 1, 16, 16] and labels of one part."""
    return part.data[:, None], np.asarray(part.targets, np.int64)
