"""Images as a source returns them, in any size and colours, and what several sources need."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from stamp_core.config.limits import Limit, PositiveInt
from stamp_core.data.cache import Bytes, Numbers

Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """What `make(options)` of a source returns; without domains, all images belong to one."""

    x_train: Bytes  # [N, C, H, W]
    y_train: Numbers  # [N]
    x_test: Bytes
    y_test: Numbers
    classes: tuple[str, ...]
    domains: tuple[str, ...] = ("all",)
    domain_train: Numbers | None = None  # [N], indices into `domains`
    domain_test: Numbers | None = None
    masks: bool = False  # whether the last channel is the mask of an image, as in ImageDataset


@dataclass(frozen=True, eq=False)
class Counts:
    """What `expected(options)` of a source returns: the numbers of images before they are there."""

    shape: Shape  # of an image
    train: Numbers  # [D, C], training images by domain and class
    test: Numbers
    domains: tuple[str, ...] = ("all",)


def _inside(path: str) -> bool:
    """Whether a path, if relative, stays in its folder."""
    return ".." not in Path(path).parts or Path(path).is_absolute()


PathInside = Annotated[str, Limit("a path without '..', or an absolute one", _inside)]


@dataclass(frozen=True)
class ImageOptions:
    """Parameters of the sources whose images have one size."""

    size: PositiveInt | None = None  # pixels a side; None: unchanged
    grey: bool = False  # one channel


def array_error(where: object, name: str, array: npt.NDArray[Any], expected: str) -> ValueError:
    """The error for an array of the wrong type or shape."""
    return ValueError(f"{where}: {name} is {array.dtype} {[*array.shape]}; it must be {expected}")


def convert_images(images: ImageArrays, options: ImageOptions) -> ImageArrays:
    """The same images in the size and colours of `options`."""
    train, test = (convert(x, options) for x in (images.x_train, images.x_test))
    return replace(images, x_train=train, x_test=test)


def convert(x: Bytes, options: ImageOptions) -> Bytes:
    """Images [N, C, H, W] in the size and colours of `options`."""
    from PIL import Image  # only here: a cached data set needs no conversion

    channels = 1 if options.grey else x.shape[1]
    size = x.shape[2:] if options.size is None else (options.size, options.size)
    if (channels, *size) == x.shape[1:]:
        return x
    converted = np.empty((len(x), channels, *size), np.uint8)
    for index, pixels in enumerate(x):  # Pillow computes with integers: equal on every machine
        image = Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0])
        if options.grey:
            image = image.convert("L")  # 0.299 red + 0.587 green + 0.114 blue
        if options.size is not None:  # this filter averages all pixels of a larger image
            image = image.resize(size, Image.Resampling.BILINEAR)
        converted[index] = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
    return converted
