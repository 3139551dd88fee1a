"""CIFAR-10 and CIFAR-100, MNIST, EMNIST's digits, USPS and SVHN: published sets from torchvision.

Their files are read from data/raw, or downloaded there; an error names those that are missing.
"""

import hashlib
import math
import socket
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from stamp_core.core import paths, vision
from stamp_core.core.atomic import add_path_to_errors
from stamp_core.data.images import Counts, ImageArrays, ImageOptions, Shape, convert_images
from stamp_core.data.sources import npz
from stamp_core.data.store.cache import SUBSETS, Bytes, Numbers

STALL_SECONDS = 60  # seconds without a byte before a download is given up
MNIST_MD5 = {  # of the unpacked files; torchvision has those of the archives only
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
DIGITS = tuple("0123456789")
Checksums = Mapping[str, str | None]  # paths below data/raw with their MD5 where it is known


@dataclass(frozen=True)
class TorchvisionSet:
    """A source: the class `kind` of torchvision, read by `read(name, kind)`."""

    name: str
    kind: str
    read: Callable[[str, Any], ImageArrays]
    shape: Shape
    train: tuple[int, ...]  # published numbers of images of each class
    test: tuple[int, ...]
    PACKAGES: tuple[str, ...] = ("numpy", "pillow", "torchvision")
    in_npz: bool = False  # whether `NAME.npz` in data/raw may hold the set
    digest: str | None = None  # of its images in order, where it is known
    Options = ImageOptions

    def inputs(self, options: ImageOptions) -> list[Path]:
        """`NAME.npz`, if it is there; torchvision's files have published checksums."""
        file = paths.RAW / f"{self.name}.npz"
        return [file] if self.in_npz and file.is_file() else []

    def make(self, options: ImageOptions) -> ImageArrays:
        """All training and test images."""
        files = self.inputs(options)
        if files:
            images = self.read_complete(files[0])
        else:
            kind = getattr(vision.load_torchvision().datasets, self.kind)
            images = self.read(self.name, kind)
        return convert_images(images, options)

    def read_complete(self, path: Path) -> ImageArrays:
        """The whole set in an .npz file."""
        images = in_digest_order(npz.read_npz(path))
        for key, y, published in zip(
            ("y_train", "y_test"),
            (images.y_train, images.y_test),
            (self.train, self.test),
            strict=True,
        ):
            counts = np.bincount(y, minlength=len(published))
            for label in np.flatnonzero(counts != published)[:1]:
                found = f"{key} has {counts[label]} images of class {label}"
                raise _npz_error(path, self.name, f"{found}; it must have {published[label]}")
        if images.x_train.shape[1:] != self.shape:
            found = f"its images are {images.x_train.shape[1:]}"
            raise _npz_error(path, self.name, f"{found}; they must be {self.shape}")
        if self.digest and (found := digest_of(images)) != self.digest:
            right = f"it must be {self.digest}"
            raise _npz_error(path, self.name, f"the SHA-256 of its images is {found}; {right}")
        return images

    def expected(self, options: ImageOptions) -> Counts:
        """The published numbers of images."""
        channels, height, width = self.shape
        shape = (1 if options.grey else channels, options.size or height, options.size or width)
        return Counts(shape, np.array([self.train]), np.array([self.test]))


def read_cifar(name: str, kind: Any) -> ImageArrays:
    """CIFAR-10, or CIFAR-100 with its fine labels, in the order of `in_digest_order`."""
    listed = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    files = {f"{kind.base_folder}/{file}": md5 for file, md5 in listed}
    archive = {kind.filename: kind.tgz_md5}
    provide_files(name, files, archive, lambda root: kind(root, download=True))
    train, test = (kind(paths.RAW, train=train) for train in (True, False))
    arrays = [
        (each.data.transpose(0, 3, 1, 2), np.asarray(each.targets, np.int64))
        for each in (train, test)
    ]
    return in_digest_order(ImageArrays(*arrays[0], *arrays[1], tuple(train.classes)))


def in_digest_order(images: ImageArrays) -> ImageArrays:
    """The images by class and in it by the SHA-256 of their pixels [H, W, C].

    An order that does not depend on the file they were in: equal images give equal plans.
    """
    ordered = dict[str, Any]()
    for subset in SUBSETS:
        x, y = getattr(images, f"x_{subset}"), getattr(images, f"y_{subset}")
        digests = [hashlib.sha256(_pixels(image)).digest() for image in x]
        order = sorted(range(len(y)), key=lambda place: (y[place], digests[place]))
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


def _npz_error(path: Path, name: str, reason: str) -> ValueError:
    """The error for a file that is not the whole set."""
    cure = "replace it, or remove it to have torchvision's files read or downloaded"
    return ValueError(f"{path} is not {name}: {reason}; {cure}")


def read_mnist(name: str, kind: Any) -> ImageArrays:
    """MNIST."""
    files = {f"MNIST/raw/{file}": md5 for file, md5 in MNIST_MD5.items()}
    archives = {f"MNIST/raw/{file}": md5 for file, md5 in kind.resources}
    provide_files(name, files, archives, lambda root: kind(root, download=True))
    train, test = (_read_idx_pair(f"MNIST/raw/{subset}") for subset in ("train", "t10k"))
    return ImageArrays(*train, *test, tuple(kind.classes))


def read_emnist(name: str, kind: Any) -> ImageArrays:
    """EMNIST's digits; the files hold transposed images.

    No checksums of the unpacked files are published; their headers state their lengths.
    """
    starts = [f"EMNIST/raw/emnist-digits-{subset}" for subset in SUBSETS]
    parts = ("images-idx3", "labels-idx1")
    files = dict.fromkeys(f"{start}-{part}-ubyte" for start in starts for part in parts)
    archive = {"EMNIST/raw/gzip.zip": kind.md5}
    provide_files(name, files, archive, lambda root: kind(root, "digits", download=True))
    (x_train, y_train), (x_test, y_test) = map(_read_idx_pair, starts)
    upright = (0, 1, 3, 2)
    classes = tuple(kind.classes_split_dict["digits"])
    return ImageArrays(
        x_train.transpose(upright), y_train, x_test.transpose(upright), y_test, classes
    )


def read_usps(name: str, kind: Any) -> ImageArrays:
    """USPS."""

    def load(root: Path, download: bool = True) -> list[Any]:
        return [kind(root, train=train, download=download) for train in (True, False)]

    files = {file: md5 for _, file, md5 in kind.split_list.values()}
    provide_files(name, files, files, load)
    train, test = (
        (each.data[:, None], np.asarray(each.targets, np.int64))
        for each in load(paths.RAW, download=False)
    )
    return ImageArrays(*train, *test, DIGITS)


def read_svhn(name: str, kind: Any) -> ImageArrays:
    """SVHN without the easier images of "extra"."""

    def load(root: Path, download: bool = True) -> list[Any]:
        return [kind(root, split=subset, download=download) for subset in SUBSETS]

    files = {file: md5 for _, file, md5 in map(kind.split_list.get, SUBSETS)}
    provide_files(name, files, files, load)
    train, test = ((each.data, each.labels) for each in load(paths.RAW, download=False))
    return ImageArrays(*train, *test, DIGITS)


SETS = {
    each.name: each
    for each in (
        TorchvisionSet(
            "cifar10", "CIFAR10", read_cifar, (3, 32, 32), (5000,) * 10, (1000,) * 10, in_npz=True
        ),
        TorchvisionSet(
            "cifar100",
            "CIFAR100",
            read_cifar,
            (3, 32, 32),
            (500,) * 100,
            (100,) * 100,
            in_npz=True,
            digest="bd7a478dc9534eaf02942fc2b179ac8dba2c5892ed563add3413f9aa9be96826",
        ),
        TorchvisionSet(
            "mnist",
            "MNIST",
            read_mnist,
            (1, 28, 28),
            (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
            (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
        ),
        TorchvisionSet(
            "emnist_digits", "EMNIST", read_emnist, (1, 28, 28), (24_000,) * 10, (4000,) * 10
        ),
        TorchvisionSet(
            "usps",
            "USPS",
            read_usps,
            (1, 16, 16),
            (1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644),
            (359, 264, 198, 166, 200, 160, 170, 147, 166, 177),
        ),
        TorchvisionSet(
            "svhn",
            "SVHN",
            read_svhn,
            (3, 32, 32),
            (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
            (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
            PACKAGES=("numpy", "pillow", "torchvision", "scipy"),
        ),
    )
}


def _read_idx_pair(start: str) -> tuple[Bytes, Numbers]:
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


# ------------------------------------------------------------------------------------ downloads


def provide_files(
    name: str, files: Checksums, archives: Checksums, download: Callable[[Path], object]
) -> None:
    """Download `files` of the data set `name` into data/raw unless they are there; check them.

    `download(root)` has torchvision unpack them below `root` from `archives`, which it downloads.
    """
    if not all((paths.RAW / file).is_file() for file in files):
        _check({file: md5 for file, md5 in archives.items() if (paths.RAW / file).exists()})
        try:
            _download(name, files, archives, download)
        except (OSError, RuntimeError, HTTPException, tarfile.TarError) as error:
            raise _download_error(name, archives, error) from error  # RuntimeError: a checksum
    _check(files)


def _download(
    name: str, files: Checksums, archives: Checksums, download: Callable[[Path], object]
) -> None:
    """Download and unpack in a temporary folder of data/raw, then move the missing files."""
    paths.RAW.mkdir(parents=True, exist_ok=True)
    with _guarded(), TemporaryDirectory(dir=paths.RAW, prefix=f".{name}.") as scratch:
        for file in archives:  # torchvision only unpacks those that are there
            if (paths.RAW / file).exists():
                Path(scratch, file).parent.mkdir(parents=True, exist_ok=True)
                Path(scratch, file).symlink_to((paths.RAW / file).resolve())
        download(Path(scratch))
        for file in files:
            if not (paths.RAW / file).exists():
                (paths.RAW / file).parent.mkdir(parents=True, exist_ok=True)
                Path(scratch, file).replace(paths.RAW / file)


@contextmanager
def _guarded() -> Iterator[None]:
    """A context in which downloads cannot stall, and tar archives unpack files and folders only."""
    if not hasattr(tarfile, "data_filter"):
        raise OSError("Python 3.11.4 or newer is needed to unpack archives safely")
    timeout = socket.getdefaulttimeout()
    trusted = tarfile.TarFile.extraction_filter
    socket.setdefaulttimeout(STALL_SECONDS)
    tarfile.TarFile.extraction_filter = staticmethod(_plain_member)  # torchvision passes none
    try:
        yield
    finally:
        tarfile.TarFile.extraction_filter = trusted
        socket.setdefaulttimeout(timeout)


def _plain_member(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """The member of an archive, refused if it is neither file nor folder, or outside `folder`.

    No set has links, and a chain of them has led out of a folder in spite of Python's own filter.
    """
    if not (member.isfile() or member.isdir()):
        raise OSError(f"{member.name} in the archive is neither a file nor a folder")
    return tarfile.data_filter(member, folder)


def _download_error(name: str, archives: Checksums, error: Exception) -> OSError:
    """The error for a data set that is not available, with the files to put into data/raw."""
    reason = (str(error).splitlines() or [type(error).__name__])[-1]
    missing = {file: md5 for file, md5 in archives.items() if not (paths.RAW / file).exists()}
    if not missing:
        return OSError(f"{name} could not be unpacked in {paths.RAW}: {reason}")
    return FileNotFoundError(
        f"{name} is not in {paths.RAW} and could not be downloaded ({reason}); put there: "
        + ", ".join(f"{file} (MD5 {md5})" for file, md5 in missing.items())
    )


def _check(files: Checksums) -> None:
    """Validate that files have their published checksums."""
    for path, md5 in ((paths.RAW / file, md5) for file, md5 in files.items() if md5 is not None):
        # Some systems allow MD5 only if it is not for security.
        with add_path_to_errors(path), path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        if (found := digest.hexdigest()) != md5:
            raise ValueError(
                f"{path} is damaged or another file: its MD5 is {found}; it must be {md5}; "
                "delete it to have it downloaded again"
            )
