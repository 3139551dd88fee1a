"""Folders of small images for the tests of folders and of decoding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stamp_core.core import paths
from stamp_core.data.cache import Bytes
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.loading import load_dataset

SIDE = 6
WHOLE = {"source": "folder", "root": "set", "size": SIDE}
DIVIDED = {**WHOLE, "test_share": 0.25}


def noise(seed: int, side: int = SIDE) -> Bytes:
    """An image of noise.  # [H, W, 3]"""
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def write_image(path: Path, content: Bytes) -> None:
    """Write an image, lossless if the suffix says so, and its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(content).save(path)


def fill(folder: Path, counts: dict[str, int], seed: int = 0) -> list[Bytes]:
    """Write that many images into each folder below `folder`; the images in order."""
    images = []
    for name, count in counts.items():
        for number in range(count):
            images.append(noise(seed := seed + 1))
            write_image(folder / name / f"{number:02d}.png", images[-1])
    return images


def all_images(found: ImageDataset) -> Bytes:
    """All images, those for training first.  # [N, H, W, C]"""
    images: Bytes = torch.cat([found.x_train, found.x_test]).numpy().transpose(0, 2, 3, 1)
    return images


def load_error(spec: dict[str, Any], kind: type[Exception] = FileNotFoundError) -> str:
    with pytest.raises(kind) as error:
        load_dataset(spec)
    assert type(error.value) is kind and "\n" not in str(error.value)
    return str(error.value)


def cached() -> list[Path]:
    return sorted(paths.CACHE.glob("[!.]*"))


def flip(path: Path) -> None:
    """Change the last bit of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit(old: str, new: str) -> Callable[[Path], object]:
    """What replaces a text in a file, once."""
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))
