"""EMNIST's digits: handwritten, 28 x 28 in grey, downloaded by torchvision."""

from stamp_core.core import vision
from stamp_core.data.counts import Counts, count_images
from stamp_core.data.dataset import ImageArrays
from stamp_core.data.sources import mnist
from stamp_core.data.store import downloads
from stamp_core.data.store.cache import Bytes, Numbers

PACKAGES = downloads.PACKAGES
Options = downloads.ImageOptions
_FOLDER = "EMNIST/raw"


def make(options: Options) -> ImageArrays:
    """All 240,000 training and 40,000 test images."""
    kind = vision.load_torchvision().datasets.EMNIST
    # No checksums of the unpacked files are published; their headers state their lengths.
    starts = [f"{_FOLDER}/emnist-digits-{subset}" for subset in ("train", "test")]
    kinds = ("images-idx3", "labels-idx1")
    files = dict.fromkeys(f"{start}-{what}-ubyte" for start in starts for what in kinds)
    archive = {f"{_FOLDER}/gzip.zip": kind.md5}
    download = lambda root: kind(root, "digits", download=True)  # noqa: E731
    downloads.provide_files("emnist_digits", files, archive, download)
    train, test = map(_read_upright, starts)
    images = ImageArrays(*train, *test, tuple(kind.classes_split_dict["digits"]))
    return downloads.convert_images(images, options)


def expected(options: Options) -> Counts:
    """The published numbers of images."""
    return count_images((1, 28, 28), options, [24_000] * 10, [4000] * 10)


def _read_upright(start: str) -> tuple[Bytes, Numbers]:
    """The images and labels of a subset; its files hold transposed images."""
    x, y = mnist.read_idx_pair(start)
    return x.transpose(0, 1, 3, 2), y
