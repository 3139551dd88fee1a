"""Folders of small images for the tests of folders and of decoding."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stamp_core.core import paths
from stamp_core.data import cache
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


def fill_train_and_test(root: Path) -> list[Bytes]:
    """Write a set with folders train (4 + 3) and test (2 + 2); its images, training first."""
    train = fill(root / "train", {"cat": 4, "dog": 3})
    return train + fill(root / "test", {"cat": 2, "dog": 2}, seed=100)


def all_images(found: ImageDataset) -> Bytes:
    """All images, those for training first.  # [N, H, W, C]"""
    images: Bytes = torch.cat([found.x_train, found.x_test]).numpy().transpose(0, 2, 3, 1)
    return images


def load_error(spec: dict[str, Any], kind: type[Exception] = FileNotFoundError) -> str:
    with pytest.raises(kind) as error:
        load_dataset(spec)
    return str(error.value)


def load_in_two_threads(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[ImageDataset]:
    """A set as loaded by two threads, both of which find nothing in the cache."""
    meet, create = threading.Barrier(2, timeout=10), cache.create

    def create_together(*arguments: Any) -> None:
        meet.wait()
        create(*arguments)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(cache, "create", create_together)
        return [*pool.map(load_dataset, [spec, spec])]


def cached() -> list[str]:
    return sorted(path.name for path in paths.CACHE.glob("[!.]*"))


def flip(path: Path) -> None:
    """Change the last bit of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
