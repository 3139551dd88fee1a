"""Data sets in torchvision's files: read from data/raw, downloaded, or an error that names them."""

import hashlib
import socket
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from stamp_core.config.decode import require_at_least
from stamp_core.core import paths
from stamp_core.core.atomic import add_path_to_errors
from stamp_core.data.dataset import ImageArrays
from stamp_core.data.store.cache import Bytes

PACKAGES = ("numpy", "pillow", "torchvision")
STALL_SECONDS = 60  # seconds without a byte before a download is given up
Checksums = Mapping[str, str | None]  # paths below data/raw with their MD5 where it is known


@dataclass(frozen=True)
class ImageOptions:
    """Parameters of the sources whose images have one size."""

    size: int | None = None  # pixels a side; None: unchanged
    grey: bool = False  # one channel

    def __post_init__(self) -> None:
        """Refuse images without pixels."""
        if self.size is not None:
            require_at_least(self, 1, "size")


def provide_files(
    name: str, files: Checksums, archives: Checksums, download: Callable[[Path], object]
) -> None:
    """Download `files` of the data set `name` into data/raw unless they are there; check them.

    `download(root)` has torchvision unpack them below `root` from `archives`, which it downloads.
    """
    if not all((paths.RAW / file).is_file() for file in files):
        _check({file: md5 for file, md5 in archives.items() if (paths.RAW / file).exists()})
        _download(name, files, archives, download)
    _check(files)


def convert_images(images: ImageArrays, options: ImageOptions) -> ImageArrays:
    """The same images in the size and colours of `options`."""
    train, test = (_convert(x, options) for x in (images.x_train, images.x_test))
    return replace(images, x_train=train, x_test=test)


def join_domains(parts: Sequence[ImageArrays], domains: tuple[str, ...]) -> ImageArrays:
    """Several data sets with the same classes as the domains of one."""
    arrays: dict[str, Any] = {
        key: np.concatenate([getattr(part, key) for part in parts])
        for key in ("x_train", "y_train", "x_test", "y_test")
    }
    numbers = np.arange(len(parts))
    return ImageArrays(
        **arrays,
        classes=parts[0].classes,
        domains=domains,
        domain_train=np.repeat(numbers, [len(part.y_train) for part in parts]),
        domain_test=np.repeat(numbers, [len(part.y_test) for part in parts]),
    )


def _download(
    name: str, files: Checksums, archives: Checksums, download: Callable[[Path], object]
) -> None:
    """Download and unpack in a temporary folder of data/raw, then move the missing files."""
    try:
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
    except (OSError, RuntimeError, HTTPException, tarfile.TarError) as error:
        raise _download_error(name, archives, error) from error  # RuntimeError: a wrong checksum


@contextmanager
def _guarded() -> Iterator[None]:
    """A context in which downloads cannot stall, and tar archives unpack files and folders only."""
    timeout, trusted = socket.getdefaulttimeout(), tarfile.TarFile.extraction_filter
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
    """Refuse a file with another checksum than the published one."""
    for path, md5 in ((paths.RAW / file, md5) for file, md5 in files.items() if md5 is not None):
        # Some systems allow MD5 only if it is not for security.
        with add_path_to_errors(path), path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        if (found := digest.hexdigest()) != md5:
            raise ValueError(
                f"{path} is damaged or another file: its MD5 is {found}; it must be {md5}; "
                "delete it to have it downloaded again"
            )


def _convert(x: Bytes, options: ImageOptions) -> Bytes:
    """Images [N, C, H, W] in the size and colours of `options`."""
    channels, size = 1 if options.grey else x.shape[1], (options.size,) * 2
    shape = (channels, *(x.shape[2:] if options.size is None else size))
    if shape == x.shape[1:]:
        return x
    converted = np.empty((len(x), *shape), np.uint8)
    for place, pixels in enumerate(x):  # Pillow computes with integers: equal on every machine
        image = Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0])
        if options.grey:
            image = image.convert("L")  # 0.299 red + 0.587 green + 0.114 blue
        if options.size is not None:  # this filter averages all pixels of a larger image
            image = image.resize((options.size, options.size), Image.Resampling.BILINEAR)
        converted[place] = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
    return converted
