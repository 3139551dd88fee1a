"""Small sets in torchvision's own files: found in data/raw, downloaded, or refused by name."""

import hashlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from stamp_core import paths
from stamp_core.config import at_least
from stamp_core.data import Bytes, Pictures

PACKAGES = ("numpy", "pillow", "torchvision")
PATIENCE = 60  # seconds without a byte before a download is given up
Sums = Mapping[str, str | None]  # files below data/raw, and the MD5 of those that have a known one


@dataclass(frozen=True)
class Options:
    """What can be chosen."""

    size: int | None = None  # pixels a side; None: as they are
    grey: bool = False  # one channel

    def __post_init__(self) -> None:
        """Refuse pictures without pixels."""
        if self.size is not None:
            at_least(self, 1, "size")


def provide(name: str, read: Sums, fetched: Sums, fetch: Callable[[Path], object]) -> None:
    """Put the files that a set is `read` from into data/raw unless they are there; intact they are.

    `fetch(root)` has torchvision put them below `root`, out of its downloads, the files `fetched`.
    """
    if not all((paths.RAW / file).is_file() for file in read):
        _intact({file: md5 for file, md5 in fetched.items() if (paths.RAW / file).exists()})
        _fetch(name, read, fetched, fetch)
    _intact(read)


def fit(pictures: Pictures, options: Options) -> Pictures:
    """The same pictures in the size and the colours that are asked for."""
    train, test = (_fitting(x, options) for x in (pictures.x_train, pictures.x_test))
    return replace(pictures, x_train=train, x_test=test)


def join(parts: Sequence[Pictures], domains: tuple[str, ...]) -> Pictures:
    """Sets with the same classes as the domains of one."""
    arrays = {
        key: np.concatenate([getattr(part, key) for part in parts])
        for key in ("x_train", "y_train", "x_test", "y_test")
    }
    numbers = np.arange(len(parts))
    train = np.repeat(numbers, [len(part.y_train) for part in parts])
    test = np.repeat(numbers, [len(part.y_test) for part in parts])
    classes = parts[0].classes
    return Pictures(
        **arrays, classes=classes, domains=domains, domain_train=train, domain_test=test
    )


def _fetch(name: str, read: Sums, fetched: Sums, fetch: Callable[[Path], object]) -> None:
    """Download and unpack a set beside data/raw's files, then move what is missing among them."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        paths.RAW.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=paths.RAW, prefix=f".{name}.") as scratch:
            _lend(fetched, Path(scratch))
            fetch(Path(scratch))
            for file in read:
                if not (paths.RAW / file).exists():
                    (paths.RAW / file).parent.mkdir(parents=True, exist_ok=True)
                    Path(scratch, file).replace(paths.RAW / file)
    except (OSError, RuntimeError, HTTPException) as error:  # RuntimeError: a wrong checksum
        raise _absent(name, fetched, error) from error
    finally:
        socket.setdefaulttimeout(before)


def _lend(fetched: Sums, root: Path) -> None:
    """Show the downloads that are there already to torchvision, which then only unpacks them."""
    for file in fetched:
        if (paths.RAW / file).exists():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).symlink_to((paths.RAW / file).resolve())


def _absent(name: str, fetched: Sums, error: Exception) -> OSError:
    """The error for a set that could not be had, with the files to put into data/raw by hand."""
    reason = (str(error).splitlines() or [type(error).__name__])[-1]
    wanted = [
        f"{file} (MD5 {md5})" for file, md5 in fetched.items() if not (paths.RAW / file).exists()
    ]
    if not wanted:
        return OSError(f"{name} could not be unpacked in {paths.RAW}: {reason}")
    return FileNotFoundError(
        f"{name} is not in {paths.RAW} and could not be downloaded ({reason}); put there: "
        + ", ".join(wanted)
    )


def _intact(files: Sums) -> None:
    """Refuse a file with another checksum than it must have."""
    for file, md5 in files.items():
        if md5 is not None and (found := _checksum(paths.RAW / file)) != md5:
            raise ValueError(
                f"{paths.RAW / file} is damaged or another file: its MD5 is {found}; it must be "
                f"{md5}; delete it to have it downloaded again"
            )


def _checksum(path: Path) -> str:
    """The MD5 of a file, also where MD5 is forbidden as a secret."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fitting(x: Bytes, options: Options) -> Bytes:
    """Pictures [N, C, H, W] in the size and the colours that are asked for."""
    channels, size = 1 if options.grey else x.shape[1], (options.size,) * 2
    shape = (channels, *(x.shape[2:] if options.size is None else size))
    if shape == x.shape[1:]:
        return x
    made = np.empty((len(x), *shape), np.uint8)
    for place, picture in enumerate(x):
        made[place] = _one(picture, options)
    return made


def _one(picture: Bytes, options: Options) -> Bytes:
    """One picture [C, H, W]; Pillow computes in whole numbers, so everywhere the same bytes."""
    image = Image.fromarray(picture.transpose(1, 2, 0) if len(picture) == 3 else picture[0])
    if options.grey:
        image = image.convert("L")  # 0.299 red + 0.587 green + 0.114 blue
    if options.size is not None:  # smaller pictures are averages: this filter widens as they shrink
        image = image.resize((options.size, options.size), Image.Resampling.BILINEAR)
    return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
