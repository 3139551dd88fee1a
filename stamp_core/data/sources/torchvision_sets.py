"""Published sets that torchvision reads from data/raw, or downloads there and checks."""

import hashlib
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from stamp_core.core import paths, vision
from stamp_core.data.cache import SUBSETS, Bytes, Numbers
from stamp_core.data.images import Counts, ImageArrays, ImageOptions, Shape, convert_images
from stamp_core.data.sources import npz

READ_ERRORS = (OSError, EOFError, RuntimeError, ValueError, AssertionError, HTTPException)


@dataclass(frozen=True)
class TorchvisionSet:
    """A source: the class `kind` of torchvision."""

    name: str
    kind: str
    shape: Shape
    train: tuple[int, ...]  # published numbers of images of each class
    test: tuple[int, ...]
    files: tuple[str, ...]  # what torchvision downloads to data/raw
    arguments: tuple[dict[str, Any], ...] = ({"train": True}, {"train": False})  # for each subset
    labels: str = "targets"  # torchvision's name
    PACKAGES: tuple[str, ...] = ("numpy", "pillow", "torchvision")
    in_npz: bool = False  # whether `NAME.npz` in data/raw may hold the set
    digest: str | None = None  # of its images in order, where it is known
    Options = ImageOptions

    def inputs(self, options: ImageOptions) -> list[Path]:
        """`NAME.npz`, if it is there; torchvision's files have published checksums."""
        file = paths.RAW / f"{self.name}.npz"
        return [file] if self.in_npz and file.is_file() else []

    def make(self, options: ImageOptions) -> ImageArrays:
        """All training and test images; those that an .npz file may hold in one order."""
        files = self.inputs(options)
        images = npz.read_npz(files[0]) if files else self._read()
        if self.in_npz:
            images = in_digest_order(images)
        if files:
            self._check(files[0], images)
        return convert_images(images, options)

    def expected(self, options: ImageOptions) -> Counts:
        channels, height, width = self.shape
        shape = (1 if options.grey else channels, options.size or height, options.size or width)
        return Counts(shape, np.array([self.train]), np.array([self.test]))

    def _read(self) -> ImageArrays:
        """The images in torchvision's files, which it downloads if they are not there."""
        kind = getattr(vision.load_torchvision().datasets, self.kind)
        try:
            train, test = (kind(paths.RAW, download=True, **each) for each in self.arguments)
        except READ_ERRORS as error:
            reason = (str(error).splitlines() or [type(error).__name__])[-1]
            raise FileNotFoundError(
                f"{self.name} is not whole in {paths.RAW} and could not be downloaded ({reason}); "
                f"put there, in place of what is damaged: {', '.join(self.files)}"
            ) from error
        classes = tuple(getattr(train, "classes", "0123456789"))
        return ImageArrays(*self._arrays(train), *self._arrays(test), classes)

    def _arrays(self, subset: Any) -> tuple[Bytes, Numbers]:
        x, y = np.asarray(subset.data), np.asarray(getattr(subset, self.labels), np.int64)
        if self.kind == "EMNIST":  # its files hold transposed images
            x = x.transpose(0, 2, 1)
        if x.ndim == 3:
            return x[:, None], y
        return x.transpose(0, 3, 1, 2) if x.shape[3] == 3 else x, y

    def _check(self, path: Path, images: ImageArrays) -> None:
        y = images.y_train, images.y_test
        counts = [tuple(np.bincount(each, minlength=len(self.train)).tolist()) for each in y]
        whole = counts == [self.train, self.test] and images.x_train.shape[1:] == self.shape
        if not whole or self.digest not in (None, digest_of(images)):
            cure = "replace it, or remove it to have torchvision's files read or downloaded"
            raise ValueError(f"{path} does not hold the published images of {self.name}; {cure}")


def in_digest_order(images: ImageArrays) -> ImageArrays:
    """The images by class, then by the SHA-256 of their pixels: an order that no file decides."""
    ordered = dict[str, Any]()
    for subset in SUBSETS:
        x, y = getattr(images, f"x_{subset}"), getattr(images, f"y_{subset}")
        digests = [hashlib.sha256(_pixels(image)).digest() for image in x]
        order = sorted(range(len(y)), key=lambda index: (y[index], digests[index]))
        ordered |= {f"x_{subset}": x[order], f"y_{subset}": y[order]}
    return replace(images, **ordered)


def digest_of(images: ImageArrays) -> str:
    """The SHA-256 of x_train, y_train, x_test and y_test, images as [H, W, C], labels as bytes."""
    digest = hashlib.sha256()
    for subset in SUBSETS:
        for image in getattr(images, f"x_{subset}"):
            digest.update(_pixels(image))
        digest.update(getattr(images, f"y_{subset}").astype(np.uint8).tobytes())
    return digest.hexdigest()


def _pixels(image: Bytes) -> bytes:
    """The bytes of an image [C, H, W] as [H, W, C]."""
    return np.ascontiguousarray(image.transpose(1, 2, 0)).tobytes()


_MNIST = [f"{part}-{what}" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]
SETS = {
    each.name: each
    for each in (
        TorchvisionSet(
            "cifar10",
            "CIFAR10",
            (3, 32, 32),
            (5000,) * 10,
            (1000,) * 10,
            ("cifar-10-python.tar.gz",),
            in_npz=True,
        ),
        TorchvisionSet(
            "cifar100",
            "CIFAR100",
            (3, 32, 32),
            (500,) * 100,
            (100,) * 100,
            ("cifar-100-python.tar.gz",),
            in_npz=True,
            digest="bd7a478dc9534eaf02942fc2b179ac8dba2c5892ed563add3413f9aa9be96826",
        ),
        TorchvisionSet(
            "mnist",
            "MNIST",
            (1, 28, 28),
            (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
            (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
            tuple(f"MNIST/raw/{file}-ubyte.gz" for file in _MNIST),
        ),
        TorchvisionSet(
            "emnist_digits",
            "EMNIST",
            (1, 28, 28),
            (24_000,) * 10,
            (4000,) * 10,
            ("EMNIST/raw/gzip.zip",),
            ({"split": "digits", "train": True}, {"split": "digits", "train": False}),
        ),
        TorchvisionSet(
            "usps",
            "USPS",
            (1, 16, 16),
            (1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644),
            (359, 264, 198, 166, 200, 160, 170, 147, 166, 177),
            ("usps.bz2", "usps.t.bz2"),
        ),
        TorchvisionSet(
            "svhn",
            "SVHN",
            (3, 32, 32),
            (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
            (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
            ("train_32x32.mat", "test_32x32.mat"),
            ({"split": "train"}, {"split": "test"}),
            "labels",
            ("numpy", "pillow", "torchvision", "scipy"),
        ),
    )
}
