"""EMNIST's digits: handwritten, 28 x 28 in grey, downloaded by torchvision."""

from stamp_core import downloads, vision
from stamp_core.data import Bytes, Numbers, Pictures, mnist

PACKAGES = downloads.PACKAGES
Options = downloads.Options
FOLDER = "EMNIST/raw"
FILES = tuple(
    f"{FOLDER}/emnist-digits-{part}-{what}-ubyte"
    for part in ("train", "test")
    for what in ("images-idx3", "labels-idx1")
)


def make(options: Options) -> Pictures:
    """All 240,000 training and 40,000 test pictures."""
    kind = vision.load().datasets.EMNIST
    # No checksum of the unpacked files is published; their heads say how long they must be.
    read, fetched = dict.fromkeys(FILES), {f"{FOLDER}/gzip.zip": kind.md5}
    downloads.provide(
        "emnist_digits", read, fetched, lambda root: kind(root, "digits", download=True)
    )
    made = Pictures(*_upright("train"), *_upright("test"), tuple(kind.classes_split_dict["digits"]))
    return downloads.fit(made, options)


def _upright(part: str) -> tuple[Bytes, Numbers]:
    """The pictures and labels of one part; its files hold rows for columns."""
    x, y = mnist.part(f"{FOLDER}/emnist-digits-{part}")
    return x.transpose(0, 1, 3, 2), y
