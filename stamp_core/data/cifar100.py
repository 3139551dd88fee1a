"""CIFAR-100: photographs of a hundred kinds of things (fine labels), by torchvision."""

from stamp_core import downloads, vision
from stamp_core.data import Pictures
from stamp_core.data.cifar10 import photographs

PACKAGES = downloads.PACKAGES
Options = downloads.Options


def make(options: Options) -> Pictures:
    """All 50,000 training and 10,000 test pictures, 32 x 32 in colour."""
    return photographs("cifar100", vision.load().datasets.CIFAR100, options)
