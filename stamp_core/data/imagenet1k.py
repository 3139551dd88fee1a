"""ImageNet-1K as torchvision lays it out: <root>/train/<wnid>/*.JPEG and <root>/val/<wnid>/*.JPEG.

The subset of the paper's public code is `size: 32, per_class_train: 600, per_class_test: 100,
test: train`. Of a limited number, the first by name are taken.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stamp_core import paths
from stamp_core.config import at_least, wrong
from stamp_core.data import Listing
from stamp_core.data.folder import Tree, listed, trees


@dataclass(frozen=True)
class Options:
    """What can be chosen."""

    root: str = "imagenet1k"  # in data/raw, or an absolute path
    size: int = 224  # pixels a side
    per_class_train: int | None = None  # pictures; None: all
    per_class_test: int | None = None
    test: Literal["val", "train"] = "val"  # train: behind those for training, as in that subset

    def __post_init__(self) -> None:
        """Refuse nothing to see, and testing on all that is behind everything."""
        at_least(self, 1, "size")
        for name in ("per_class_train", "per_class_test"):
            if getattr(self, name) is not None:
                at_least(self, 1, name)
        if self.test == "train" and self.per_class_train is None:
            raise wrong("per_class_train", None, "a number, as test is 'train'")


def listing(options: Options) -> Listing:
    """The pictures of all classes, which are named by their wnids."""
    root, first, then = paths.RAW / options.root, options.per_class_train, options.per_class_test
    needed = {"train": first or 1, "val": then or 1}
    if options.test == "train":
        needed = {"train": (first or 0) + (then or 1)}
    layout = "train/<wnid>/*.JPEG and val/<wnid>/*.JPEG"
    found = dict(zip(needed, trees(root, tuple(needed), layout), strict=True))
    for folder, tree in found.items():
        _refuse_few(root / folder, tree, needed[folder])
    behind = {name: files[first:] for name, files in found["train"].items()}
    train, test = _first(found["train"], first), _first(found.get("val", behind), then)
    return listed(root, [train], [test], ("all",), options.size, False)


def _refuse_few(folder: Path, tree: Tree, needed: int) -> None:
    """Refuse a class with fewer pictures than are asked for."""
    for name, files in tree.items():
        if len(files) < needed:
            right = f"must hold {needed}, as per_class_train and per_class_test ask for"
            raise ValueError(f"{folder / name} holds {len(files)} pictures; it {right}")


def _first(tree: Tree, count: int | None) -> Tree:
    """The first pictures of each class, or all."""
    return {name: files[:count] for name, files in tree.items()}
