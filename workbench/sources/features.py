"""Features: the images of another source through a pre-trained encoder, once.

A value is stored in one byte: a channel has 256 levels, from its least to its largest value over
some training images. Floats of two kinds of CPU may differ in their last digits; rounded they are
equal nearly always, and the digest of the data set tells.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from stamp_core.config.decode import invalid, require
from stamp_core.config.limits import at_least
from stamp_core.core import fingerprint
from stamp_core.core.atomic import atomic_write
from stamp_core.data import cache, images
from stamp_core.data.cache import SUBSETS, Bytes
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.images import Counts, ImageOptions, Shape
from stamp_core.data.loading import find_source, load_dataset
from workbench.counts import count_images
from workbench.efficientnet import FEATURES, VARIANTS, EfficientNetLite, load_encoder

SMALLEST = 32  # pixels a side of an image that is encoded
CHUNK = 1024  # images that are encoded, written and recorded at a time: some seconds
BATCH = 32  # images in a forward pass
RANGE_IMAGES = 2000  # whose least and largest values are the first and the last level

Encode = Callable[[Tensor], Tensor]  # uint8 [n, 3, H, W] -> float32 [n, h, w, C]


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    of: Mapping[str, Any]  # the block `data` of the images
    # a network whose weights `make pretrained` installs
    encoder: Literal["efficientnet_lite0", "efficientnet_lite2"] = "efficientnet_lite2"
    # pixels a side to which an image is resized before it is encoded
    size: Annotated[int, at_least(64)] = 128
    # the mean of the encoder's last maps, or the input of its last block
    output: Literal["pooled", "maps"] = "pooled"

    def __post_init__(self) -> None:
        find_source(self.of, "of")
        other = self.of["source"] != "features"
        require(self, "of", other, "a source of images: features are not encoded again")

    @property
    def shape(self) -> Shape:
        """Channels, height and width of the features of an image."""
        if self.output == "pooled":
            return FEATURES, 1, 1
        side = -(-self.size // 32)
        return VARIANTS[self.encoder].widths[-2], side, side


def key(options: Options, make: bool) -> str:
    """A hash of all that decides the features: images, weights, options, code and packages."""
    files = (__file__, inspect.getfile(EfficientNetLite), cache.__file__, images.__file__)
    parts = [
        _load_images(options, make).digest,
        VARIANTS[options.encoder].sha256,
        [options.size, options.output],
        [fingerprint.code_digest(str(file)) for file in files],
        [version(name) for name in ("pillow", "torch")],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write(options: Options, draft: Path) -> None:
    """Encode all images that `draft` does not hold yet, then complete the data set."""
    dataset, arrays = _load_images(options), dict[str, Any]()
    with _encoding(options) as encode:
        low, span = _range(draft, dataset.x_train, encode)
        for subset in SUBSETS:
            x: Tensor = getattr(dataset, f"x_{subset}")

            def encode_part(part: slice, x: Tensor = x) -> Bytes:
                levels = (encode(x[part]) - low).mul(255 / span).round().clamp(0, 255)
                return np.asarray(levels.to(torch.uint8))

            channels, *sides = options.shape
            shape = (len(x), *sides, channels)
            cache.write_chunks(draft / f"x_{subset}.npy", shape, CHUNK, encode_part)
            for name in ("y", "domain"):
                arrays[f"{name}_{subset}"] = getattr(dataset, f"{name}_{subset}").numpy()
    if options.output == "pooled":
        arrays |= cache.train_moments(draft)
    else:  # normalised with these, a map has the encoder's own values, as the last block needs
        arrays |= {"mean": (-low / span).numpy(), "std": (1 / span).numpy()}
    cache.complete(draft, arrays, [list(dataset.classes), list(dataset.domains)])


def expected(options: Options) -> Counts:
    """The numbers of images of the other source."""
    return replace(count_images(options.of), shape=options.shape)


def _load_images(options: Options, make: bool = True) -> ImageDataset:
    """The images of the other source, refused if the encoder cannot take them."""
    dataset = load_dataset(options.of, make)
    channels, height, width = dataset.shape
    if channels != 3 or min(height, width) < SMALLEST or dataset.masks:
        masks = ", and masks" * dataset.masks
        right = f"a source of colour images of at least {SMALLEST} x {SMALLEST}, without masks"
        found = f"those of {dataset.name} are {channels} x {height} x {width}{masks}"
        raise invalid("data.of", dict(options.of), f"{right}: {found}")
    return dataset


@contextmanager
def _encoding(options: Options) -> Iterator[Encode]:
    """A context with the encoder, which gives equal values with any number of threads.

    Each batch is computed by one thread: sums that several share depend on their number.
    """
    network = load_encoder(options.encoder)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            encode = partial(_encode_batch, network, options)
            yield lambda x: torch.cat([*pool.map(encode, x.split(BATCH))])
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _encode_batch(network: EfficientNetLite, options: Options, x: Tensor) -> Tensor:
    """The features of some images.  # uint8 [n, 3, H, W] -> float32 [n, h, w, C]"""
    resized = torch.from_numpy(images.convert(x.numpy(), ImageOptions(size=options.size)))
    resized = resized.contiguous(memory_format=torch.channels_last)
    if options.output == "maps":
        return network.maps(resized).permute(0, 2, 3, 1)
    pooled: Tensor = network(resized)
    return pooled[:, None, None]


def _range(draft: Path, x: Tensor, encode: Encode) -> Tensor:
    """Each channel's least value and the span to its largest, over some images.  # [2, C]"""
    path = draft / "range.npy"
    if not path.exists():
        count = min(len(x), RANGE_IMAGES)  # from all classes: images may be ordered by class
        values = encode(x[torch.arange(count) * len(x) // count]).flatten(0, 2)
        low, span = values.amin(0), values.amax(0) - values.amin(0)
        span[span == 0] = 1  # of a constant channel
        with atomic_write(path) as scratch, scratch.open("wb") as file:
            np.save(file, torch.stack([low, span]).numpy())
    return torch.from_numpy(np.load(path))
