"""Scenes: grey images of one or two drawn characters at random places, with masks of their strokes.

A scene is drawn for one class, its label, and may show a character of another one as well. As where
tasks overlap, its mask for training shows its own class alone: other characters are background. A
mask for testing shows all. All arithmetic is on integers, as in glyphs.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stamp_core.config.decode import invalid, require_at_least
from stamp_core.data.dataset import ImageArrays
from stamp_core.data.sources.glyphs import (
    CHARACTERS,
    FACES,
    ONE,
    TEST,
    TRAIN,
    coverage,
    draw_outlines,
    positions,
)
from stamp_core.data.store.cache import Bytes, Numbers

PACKAGES = ("numpy", "matplotlib")

NUMBERS = 8  # random ones of a character: its face, five of its shape, two of its place
STROKE = 3 * ONE // 10  # a pixel that is covered more is part of a stroke
REACH = 2  # pixels by which the mask of a stroke is wider: thin strokes are hardly learnt
DARK, LIGHT = 25, 205
NOISE = 4  # the part of a number in -255..255 that is added: a deviation of a tenth of 255


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    classes: int = 5
    train_per_class: int = 150
    test_per_class: int = 30
    size: int = 32  # pixels per side; a character is drawn in five eighths of it
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot be drawn."""
        require_at_least(self, 1, "train_per_class", "test_per_class")
        require_at_least(self, 0, "seed")
        for name, (low, high) in {"classes": (2, len(CHARACTERS)), "size": (16, 64)}.items():
            if not low <= getattr(self, name) <= high:
                raise invalid(name, getattr(self, name), f"between {low} and {high}")


def make(options: Options) -> ImageArrays:
    """All scenes, class after class; more scenes do not change the earlier ones."""
    shapes = draw_outlines(CHARACTERS[: options.classes], 3 * _box(options) // 4)
    x_train, y_train = _draw_subset(shapes, options, TRAIN, options.train_per_class)
    x_test, y_test = _draw_subset(shapes, options, TEST, options.test_per_class)
    classes = tuple(CHARACTERS[: options.classes])
    return ImageArrays(x_train, y_train, x_test, y_test, classes, masks=True)


def _box(options: Options) -> int:
    """The side of the square in which a character is drawn."""
    return 5 * options.size // 8


def _draw_subset(shapes: Bytes, options: Options, subset: int, count: int) -> tuple[Bytes, Numbers]:
    """Scenes with masks [N, 2, size, size] and their labels."""
    parts = [_draw_class(shapes, options, label, subset, count) for label in range(options.classes)]
    return np.concatenate(parts), np.repeat(np.arange(options.classes), count)


def _draw_class(shapes: Bytes, options: Options, label: int, subset: int, count: int) -> Bytes:
    """The scenes of one class with their masks: half of them show a second class.  # [n, 2, H, W]

    Where strokes meet, that of the scene's own class is in front.
    """
    generator = np.random.Generator(np.random.PCG64([options.seed, label, subset]))
    shape = (count, 2 + 2 * NUMBERS + options.size**2)
    draws = generator.integers(0, ONE, shape, dtype=np.uint16).astype(np.int64)
    others = (label + 1 + draws[:, 1] % (options.classes - 1)) % options.classes  # [n]
    labels = np.full(count, label)
    own = _place(shapes, labels, draws[:, 2 : 2 + NUMBERS], options)
    second = _place(shapes, others, draws[:, 2 + NUMBERS : 2 + 2 * NUMBERS], options)
    second *= (draws[:, 0] % 2)[:, None, None]
    rest = draws[:, 2 + 2 * NUMBERS :].reshape(own.shape)
    noise = (rest >> 8) + (rest & 255) - 255  # mostly small, as in glyphs
    grey = DARK + (np.maximum(own, second) * LIGHT >> 16) + noise // NOISE
    mask = np.where(_widen(own), label, options.classes)
    if subset == TEST:
        mask = np.where(_widen(second) & ~_widen(own), others[:, None, None], mask)
    return np.stack([np.clip(grey, 0, 255), mask], 1).astype(np.uint8)


def _place(shapes: Bytes, labels: Numbers, draws: Numbers, options: Options) -> Numbers:
    """How much of each pixel a character of each label covers, in 0..ONE.  # [n, size, size]"""
    box, size = _box(options), options.size
    flat = shapes.reshape(-1, *shapes.shape[2:])  # [classes * faces, side, side]
    faces = labels * len(FACES) + draws[:, 0] % len(FACES)
    cover = coverage(flat, faces, *positions(draws[:, 1:6].T, box, ONE))  # [n, box, box]
    scenes = np.zeros((len(labels), size, size), np.int64)
    rows, columns = (draws[:, 6:] % (size - box + 1)).T
    for scene, drawn, row, column in zip(scenes, cover, rows, columns, strict=True):
        scene[row : row + box, column : column + box] = drawn
    return scenes


def _widen(cover: Numbers) -> npt.NDArray[np.bool_]:
    """The pixels near a stroke.  # [n, size, size]"""
    padded = np.pad(cover > STROKE, ((0, 0), (REACH, REACH), (REACH, REACH)))
    side = 2 * REACH + 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), (1, 2))
    return np.asarray(windows.any((3, 4)))
