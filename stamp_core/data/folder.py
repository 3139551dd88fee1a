"""Any folder of pictures, as torchvision's ImageFolder reads it: a folder a class.

It holds train/<class>/* and test/<class>/* (or val/); or, where test_share cuts each class in two,
<class>/* or <domain>/<class>/*. Pictures in folders inside those of the classes count as theirs.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stamp_core import paths
from stamp_core.config import at_least, wrong
from stamp_core.data import Listing, Part

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
Tree = dict[str, list[str]]  # the pictures of each class, as paths below the root


@dataclass(frozen=True)
class Options:
    """What can be chosen."""

    root: str  # in data/raw, or an absolute path
    size: int  # pixels a side: as long becomes the shorter side, then the middle is cut out
    grey: bool = False  # one channel
    test_share: float | None = None  # of each class; None: there are folders train and test
    domains: tuple[str, ...] = ()  # folders above those of the classes; their order is kept

    def __post_init__(self) -> None:
        """Refuse pictures without pixels and domains that cannot be told apart or cut."""
        at_least(self, 1, "size")
        if self.test_share is not None or self.domains:
            check_cut(self.test_share, self.domains or ("all",))


def listing(options: Options) -> Listing:
    """All pictures below the root."""
    root = paths.RAW / options.root
    names, look = options.domains or ("all",), (options.size, options.grey)
    if options.test_share is not None:
        layout = "<domain>/<class>/*" if options.domains else "<class>/*"
        found = trees(root, options.domains or (".",), layout)
        return listed(root, *halves(root, found, options.test_share), names, *look)
    held = "val" if (root / "val").is_dir() and not (root / "test").is_dir() else "test"
    layout = "train/<class>/* and test/<class>/* (or val/), unless test_share is set"
    train, test = trees(root, ("train", held), layout)
    return listed(root, [train], [test], names, *look)


def check_cut(share: float | None, domains: Sequence[str]) -> None:
    """Refuse a share that leaves one side empty, and domains that are none or the same."""
    if share is None or not 0 < share < 1:
        raise wrong("test_share", share, "above 0 and below 1")
    if not domains or len(set(domains)) < len(domains):
        raise wrong("domains", list(domains), "at least one folder, each named once")


def trees(root: Path, folders: Sequence[str], layout: str) -> list[Tree]:
    """The pictures in some folders below `root`, which must be of the same classes."""
    for place in (root, *(root / folder for folder in folders)):
        if not place.is_dir():
            raise FileNotFoundError(f"{place} does not exist; {root} must hold {layout}")
    found = [_tree(root, folder) for folder in folders]
    every = {name: folder for folder, tree in zip(folders, found, strict=True) for name in tree}
    if not every:
        raise FileNotFoundError(f"{root} holds no folders of classes; it must hold {layout}")
    for name in sorted(every):
        for folder, tree in zip(folders, found, strict=True):
            if name not in tree:
                other = root / every[name] / name
                raise FileNotFoundError(f"{root / folder / name} does not exist, but {other} does")
    return found


def halves(root: Path, found: Sequence[Tree], share: float) -> tuple[list[Tree], list[Tree]]:
    """Trees cut for training and testing: test pictures lie evenly among those of their class."""
    train, test = [Tree() for _ in found], [Tree() for _ in found]
    for place, tree in enumerate(found):
        for name, files in tree.items():
            if len(files) < 2:
                where = (root / files[0]).parent
                raise ValueError(f"{where} holds 1 picture; to be cut in two it must hold 2")
            count = min(max(round(share * len(files)), 1), len(files) - 1)
            held = set(((2 * np.arange(count) + 1) * len(files) // (2 * count)).tolist())
            train[place][name] = [file for k, file in enumerate(files) if k not in held]
            test[place][name] = [files[k] for k in sorted(held)]
    return train, test


def listed(
    root: Path,
    train: Sequence[Tree],
    test: Sequence[Tree],
    domains: tuple[str, ...],
    size: int,
    grey: bool,
) -> Listing:
    """The listing of a tree a domain for training and for testing."""
    return Listing(root, _part(train), _part(test), tuple(train[0]), domains, size, grey)


def _part(found: Sequence[Tree]) -> Part:
    """The pictures of some trees, domain after domain, class after class."""
    counts = np.array([[len(files) for files in tree.values()] for tree in found])  # [D, C]
    domains, labels = np.indices(counts.shape).reshape(2, -1).repeat(counts.ravel(), axis=1)
    files = [file for tree in found for held in tree.values() for file in held]
    return Part(files, labels, domains)


def _tree(root: Path, folder: str) -> Tree:
    """The pictures in each folder of a folder, classes and pictures sorted by name."""
    inside = sorted(path.name for path in (root / folder).iterdir() if path.is_dir())
    found = {name: sorted(_files(root, root / folder / name)) for name in inside if name[0] != "."}
    for name, files in found.items():
        if not files:
            kinds = ", ".join(SUFFIXES)
            raise FileNotFoundError(f"{root / folder / name} holds no pictures ({kinds})")
    return found


def _files(root: Path, folder: Path) -> Iterator[str]:
    """The pictures in a folder and in those inside, as paths below the root."""
    for where, _, names in os.walk(folder, onerror=_refuse, followlinks=True):
        within = Path(where).relative_to(root).as_posix()
        for name in names:
            if name.lower().endswith(SUFFIXES) and name[0] != ".":
                yield f"{within}/{name}"


def _refuse(error: OSError) -> None:
    """Pass on what os.walk would keep to itself: a folder that cannot be read."""
    raise error
