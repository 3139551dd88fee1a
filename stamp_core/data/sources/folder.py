"""Any folder of images, as torchvision's ImageFolder reads it: one folder per class.

The layout is train/<class>/* and test/<class>/* (or val/). With test_share, which divides each
class, it is <class>/* or <domain>/<class>/*. Images in subfolders of a class belong to the class.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stamp_core.config.decode import invalid, require
from stamp_core.config.limits import OpenFraction, PositiveInt
from stamp_core.core import paths
from stamp_core.data.cache import Numbers
from stamp_core.data.decoding import ImageFiles, Listing
from stamp_core.data.images import PathInside

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
ClassFiles = dict[str, list[str]]  # the images of each class, as paths below the root
Seen = dict[tuple[int, int], str]  # folders that were read, by device and inode


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    root: PathInside  # in data/raw, or an absolute path
    # pixels per side: the shorter side is resized to it, then the centre is cropped
    size: PositiveInt
    grey: bool = False  # one channel
    test_share: OpenFraction | None = None  # of each class; None: there are folders train and test
    domains: tuple[str, ...] = ()  # folders above those of the classes, in this order

    def __post_init__(self) -> None:
        if self.domains:
            require(self, "test_share", self.test_share is not None, "above 0 and below 1")
            check_domains(self.domains)


def listing(options: Options) -> Listing:
    """All images below the root."""
    root = paths.RAW / options.root
    if options.test_share is not None:
        layout = "<domain>/<class>/*" if options.domains else "<class>/*"
        found = find_images(root, options.domains or (".",), layout)
        subsets = divide(root, found, options.test_share)
    else:
        held_out = "val" if (root / "val").is_dir() and not (root / "test").is_dir() else "test"
        layout = "train/<class>/* and test/<class>/* (or val/), unless test_share is set"
        train, test = find_images(root, ("train", held_out), layout)
        subsets = [train], [test]
    return make_listing(root, subsets, options.domains or ("all",), options.size, options.grey)


def check_domains(domains: Sequence[str]) -> None:
    """Validate that domains are different folders inside the root."""
    for name in domains:
        path = Path(name)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise invalid("domains", name, "the name of a folder inside the root")
    if not domains or len(set(domains)) < len(domains):
        raise invalid("domains", list(domains), "at least one folder, each named once")


def find_images(root: Path, folders: Sequence[str], layout: str) -> list[ClassFiles]:
    """The images in folders below `root`, each with the same classes; `layout` is for errors."""
    for path in (root, *map(root.joinpath, folders)):
        if not path.is_dir():
            raise FileNotFoundError(f"{path} does not exist; {root} must hold {layout}")
    seen = Seen()
    found = {folder: _find_classes(root, folder, seen) for folder in folders}
    holders = {name: folder for folder, classes in found.items() for name in classes}
    if not holders:
        raise FileNotFoundError(f"{root} holds no folders of classes; it must hold {layout}")
    for name in sorted(holders):
        for folder, classes in found.items():
            if name not in classes:
                other = root / holders[name] / name
                raise FileNotFoundError(f"{root / folder / name} does not exist, but {other} does")
    return list(found.values())


def divide(
    root: Path, found: Sequence[ClassFiles], share: float
) -> tuple[list[ClassFiles], list[ClassFiles]]:
    """The images for training and those for testing, a share of each class in each domain."""
    train, test = [ClassFiles() for _ in found], [ClassFiles() for _ in found]
    for domain, classes in enumerate(found):
        for name, files in classes.items():
            if len(files) < 2:
                where = (root / files[0]).parent
                raise ValueError(f"{where} holds 1 image; to be divided it must hold 2")
            held_out = set(held_out_indices(len(files), share).tolist())
            train[domain][name] = [file for k, file in enumerate(files) if k not in held_out]
            test[domain][name] = [file for k, file in enumerate(files) if k in held_out]
    return train, test


def held_out_indices(images: int, share: float) -> Numbers:
    """The indices of the test images of a class: evenly spaced, at least one, but not all."""
    count = min(max(round(share * images), 1), images - 1)
    return (2 * np.arange(count) + 1) * images // (2 * count)


def make_listing(
    root: Path,
    subsets: tuple[Sequence[ClassFiles], Sequence[ClassFiles]],
    domains: tuple[str, ...],
    size: int,
    grey: bool = False,
) -> Listing:
    """The listing of images for training and for testing, given by domain and class."""
    train, test = subsets
    return Listing(root, _label(train), _label(test), tuple(train[0]), domains, size, grey)


def _label(found: Sequence[ClassFiles]) -> ImageFiles:
    """The images with labels and domains: domain after domain, class after class."""
    counts = np.array([[len(files) for files in classes.values()] for classes in found])  # [D, C]
    domains, labels = np.indices(counts.shape).reshape(2, -1).repeat(counts.ravel(), axis=1)
    files = [file for classes in found for files in classes.values() for file in files]
    return ImageFiles(files, labels, domains)


def _find_classes(root: Path, folder: str, seen: Seen) -> ClassFiles:
    """The images in each folder inside a folder, classes and images sorted by name."""
    found = ClassFiles()
    for path in sorted((root / folder).iterdir()):
        if path.is_dir() and path.name[0] != ".":
            found[path.name] = sorted(_walk(root, path, seen))
            if not found[path.name]:
                raise FileNotFoundError(f"{path} holds no images ({', '.join(SUFFIXES)})")
    return found


def _walk(root: Path, folder: Path, seen: Seen) -> Iterator[str]:
    """The images in a folder, as paths below the root; one read before, by a link, is refused."""
    for where, _, names in os.walk(folder, onerror=_raise, followlinks=True):
        status = Path(where).stat()
        first = seen.setdefault((status.st_dev, status.st_ino), where)
        if first != where:
            raise ValueError(f"{where} is {first} again, by a link; remove the link")
        within = Path(where).relative_to(root).as_posix()
        for name in names:
            if name.lower().endswith(SUFFIXES) and name[0] != ".":
                yield f"{within}/{name}"


def _raise(error: OSError) -> None:
    """Raise what os.walk ignores by default: a folder that cannot be read."""
    raise error
