"""MNIST: handwritten digits, 28 x 28 in grey, downloaded by torchvision."""

import math
from pathlib import Path

import numpy as np

from stamp_core.core import paths, vision
from stamp_core.core.atomic import add_path_to_errors
from stamp_core.data.counts import Counts, count_images
from stamp_core.data.dataset import ImageArrays
from stamp_core.data.store import downloads
from stamp_core.data.store.cache import Bytes, Numbers

PACKAGES = downloads.PACKAGES
Options = downloads.ImageOptions
MD5 = {  # of the unpacked files; torchvision has those of the archives only
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
TRAIN = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)  # images of each digit
TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
_FOLDER = "MNIST/raw"


def make(options: Options) -> ImageArrays:
    """All 60,000 training and 10,000 test images."""
    kind = vision.load_torchvision().datasets.MNIST
    files = {f"{_FOLDER}/{file}": md5 for file, md5 in MD5.items()}
    archives = {f"{_FOLDER}/{file}": md5 for file, md5 in kind.resources}
    downloads.provide_files("mnist", files, archives, lambda root: kind(root, download=True))
    train, test = (read_idx_pair(f"{_FOLDER}/{name}") for name in ("train", "t10k"))
    return downloads.convert_images(ImageArrays(*train, *test, tuple(kind.classes)), options)


def expected(options: Options) -> Counts:
    """The published numbers of images."""
    return count_images((1, 28, 28), options, TRAIN, TEST)


def read_idx_pair(start: str) -> tuple[Bytes, Numbers]:
    """The images [N, 1, 28, 28] and labels in the two files whose names begin with `start`."""
    x = _read_idx(paths.RAW / f"{start}-images-idx3-ubyte", 3)[:, None]
    return x, _read_idx(paths.RAW / f"{start}-labels-idx1-ubyte", 1).astype(np.int64)


def _read_idx(path: Path, axes: int) -> Bytes:
    """The array in an idx file of bytes: type, lengths of the axes, content."""
    with add_path_to_errors(path):
        content, start = path.read_bytes(), 4 + 4 * axes
    kind, *lengths = np.frombuffer(content[:start].ljust(start, b"\0"), ">u4").tolist()
    if kind != 0x0800 + axes:
        raise ValueError(f"{path} is not an idx file of bytes with {axes} axes")
    expected = start + math.prod(lengths)
    if len(content) != expected:
        raise ValueError(f"{path} has {len(content)} bytes; its header states {expected}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(lengths)
