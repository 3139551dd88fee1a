"""MNIST: handwritten digits, 28 x 28 in grey, downloaded by torchvision."""

import math
from pathlib import Path

import numpy as np

from stamp_core import downloads, paths, vision
from stamp_core.data import Bytes, Numbers, Pictures

PACKAGES = downloads.PACKAGES
Options = downloads.Options
FOLDER = "MNIST/raw"
MD5 = {  # of the unpacked files, for which torchvision has none
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def make(options: Options) -> Pictures:
    """All 60,000 training and 10,000 test pictures."""
    kind = vision.load().datasets.MNIST
    read = {f"{FOLDER}/{file}": md5 for file, md5 in MD5.items()}
    fetched = {f"{FOLDER}/{file}": md5 for file, md5 in kind.resources}
    downloads.provide("mnist", read, fetched, lambda root: kind(root, download=True))
    train, test = (part(f"{FOLDER}/{name}") for name in ("train", "t10k"))
    return downloads.fit(Pictures(*train, *test, tuple(kind.classes)), options)


def part(start: str) -> tuple[Bytes, Numbers]:
    """The pictures [N, 1, 28, 28] and labels of the two files whose names begin with `start`."""
    x = idx(paths.RAW / f"{start}-images-idx3-ubyte", 3)[:, None]
    return x, idx(paths.RAW / f"{start}-labels-idx1-ubyte", 1).astype(np.int64)


def idx(path: Path, axes: int) -> Bytes:
    """The array in an idx file of bytes: its kind, the lengths of its axes, then the bytes."""
    content, start = path.read_bytes(), 4 + 4 * axes
    kind, *lengths = np.frombuffer(content[:start].ljust(start, b"\0"), ">u4").tolist()
    if kind != 0x0800 + axes:
        raise ValueError(f"{path} is no idx file of bytes with {axes} axes")
    expected = start + math.prod(lengths)
    if len(content) != expected:
        raise ValueError(f"{path} has {len(content)} bytes; by its head it must have {expected}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(lengths)
