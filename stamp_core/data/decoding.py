"""Image files, decoded once into arrays that may be larger than memory, chunk by chunk."""

import hashlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from stamp_core.core import fingerprint
from stamp_core.data import cache
from stamp_core.data.cache import SUBSETS, Bytes, NamedArrays, Numbers

CHUNK_BYTES = 1 << 25  # of the images that are decoded, written and recorded at a time
# Of a file, and of its image before it is cropped. Pillow warns of more. Each takes at most eight
# bytes: a thread needs at most 0.7 GB.
MAX_PIXELS = 89_478_485
# Pillow opens any format under any name, and runs Ghostscript to decode one of them.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """The image files for training, or those for testing."""

    files: list[str]  # [N], paths below the listing's root
    labels: Numbers  # [N]
    domains: Numbers  # [N]


@dataclass(frozen=True, eq=False)
class Listing:
    """What `listing(options)` of a source returns: all image files, their labels and domains."""

    root: Path
    train: ImageFiles
    test: ImageFiles
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    size: int  # pixels per side
    grey: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of a decoded image."""
        return self.size, self.size, 1 if self.grey else 3


def key(listing: Listing, make: bool) -> str:
    """A hash of all that decides the arrays: names, sizes, times, labels; this code; Pillow."""
    code = [fingerprint.code_digest(str(file)) for file in (__file__, cache.__file__)]
    shared = [version("pillow"), code, listing.classes, listing.domains, listing.shape]
    digest = hashlib.sha256(json.dumps(shared).encode())
    for images in (listing.train, listing.test):
        digest.update(images.labels.tobytes() + images.domains.tobytes())
        for name in images.files:
            path = listing.root / name
            if not path.is_file():  # but a broken link, or a pipe, which would wait
                raise ValueError(f"{path} is not a regular file; remove it")
            found = path.stat()
            digest.update(os.fsencode(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0"))
    return digest.hexdigest()


def write(listing: Listing, draft: Path) -> None:
    """Decode all images that `draft` does not hold yet, then complete the data set."""
    arrays: NamedArrays = {}
    for name, images in zip(SUBSETS, (listing.train, listing.test), strict=True):
        _decode_files(listing, images.files, draft / f"x_{name}.npy")
        arrays |= {f"y_{name}": images.labels, f"domain_{name}": images.domains}
    names = [list(listing.classes), list(listing.domains)]
    cache.complete(draft, arrays | cache.train_moments(draft), names)


def decode_image(path: Path, size: int, grey: bool) -> Bytes:
    """One image, as by torchvision's Resize(size) and CenterCrop(size).  # [size, size, C]"""
    from PIL import Image  # only here: a cached data set needs no decoding

    try:
        with Image.open(path, formats=FORMATS) as file:
            _check_shape(*file.size, size)  # before any pixel is decoded
            image = file.convert("L" if grey else "RGB")
    except Exception as error:  # for damaged files, Pillow raises errors of almost any type
        raise ValueError(f"{path} is not a readable image: {error}; remove it") from error
    short = min(image.size)
    width, height = (int(size * side / short) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    image = image.crop((left, top, left + size, top + size))
    return np.asarray(image, np.uint8).reshape(size, size, -1)


def _check_shape(width: int, height: int, size: int) -> None:
    """Validate that an image takes little memory to decode and to resize."""
    shorter, longer = sorted((width, height))
    pixels = max(width * height, size * int(size * longer / shorter))
    if pixels > MAX_PIXELS:
        what = f"it has {width} x {height} pixels, {pixels:,} where it is larger"
        raise ValueError(f"{what}, as read or resized; it must have at most {MAX_PIXELS:,}")


def _decode_files(listing: Listing, files: list[str], path: Path) -> None:
    """Decode the files whose images the array at `path` lacks."""
    decode = partial(decode_image, size=listing.size, grey=listing.grey)
    step = max(1, CHUNK_BYTES // math.prod(listing.shape))
    shape, at = (len(files), *listing.shape), listing.root.joinpath
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cache.write_chunks(
            path, shape, step, lambda part: [*pool.map(decode, map(at, files[part]))]
        )
