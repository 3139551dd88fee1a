"""CIFAR-100: photographs in a hundred classes (fine labels), from torchvision."""

from stamp_core.core import vision
from stamp_core.data.counts import Counts, count_images
from stamp_core.data.dataset import ImageArrays
from stamp_core.data.sources.cifar10 import load_cifar
from stamp_core.data.store import downloads

PACKAGES = downloads.PACKAGES
Options = downloads.ImageOptions


def make(options: Options) -> ImageArrays:
    """All 50,000 training and 10,000 test images, 32 x 32 in colour."""
    return load_cifar("cifar100", vision.load_torchvision().datasets.CIFAR100, options)


def expected(options: Options) -> Counts:
    """The published numbers of images."""
    return count_images((3, 32, 32), options, [500] * 100, [100] * 100)
