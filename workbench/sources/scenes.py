"""Scenes: grey images of three drawn characters of different classes, with masks of their strokes.

A scene is drawn for one class, its label, and shows two others as well. As where tasks overlap, its
mask for training shows its own class alone: the others are background. A mask for testing shows
all. With a single character a network would learn that what is drawn is the class of the task.
All arithmetic is on integers, as in glyphs.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from stamp_core.config.limits import between
from stamp_core.data.cache import Bytes, Numbers
from stamp_core.data.images import ImageArrays
from workbench.sources.glyphs import (
    CHARACTERS,
    FACES,
    ONE,
    TEST,
    TRAIN,
    coverage,
    draw_outlines,
    positions,
)

PACKAGES = ("numpy", "matplotlib")

SHOWN = 3  # characters, each in a quarter of the scene
NUMBERS = 8  # random ones of a character: its face, five of its shape, two of its position
STROKE = 3 * ONE // 10  # a pixel that is covered more is part of a stroke
REACH = 2  # pixels by which the mask of a stroke is wider: thin strokes are hardly learnt
DARK, LIGHT = 25, 205
NOISE = 4  # the part of a number in -255..255 that is added: a deviation of a tenth of 255


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    classes: Annotated[int, between(SHOWN, len(CHARACTERS))] = 5  # the first characters
    train_per_class: Annotated[int, between(1, 10_000)] = 150  # images for training
    test_per_class: Annotated[int, between(1, 10_000)] = 30  # images for testing
    # pixels per side; a character is drawn in 7/16 of it
    size: Annotated[int, between(16, 64)] = 32


def make(options: Options) -> ImageArrays:
    """All scenes, class after class; more scenes do not change the earlier ones."""
    shapes = draw_outlines(CHARACTERS[: options.classes], 3 * _box(options) // 4)
    x_train, y_train = _draw_subset(shapes, options, TRAIN, options.train_per_class)
    x_test, y_test = _draw_subset(shapes, options, TEST, options.test_per_class)
    classes = tuple(CHARACTERS[: options.classes])
    return ImageArrays(x_train, y_train, x_test, y_test, classes, masks=True)


def _box(options: Options) -> int:
    return 7 * options.size // 16


def _draw_subset(shapes: Bytes, options: Options, subset: int, count: int) -> tuple[Bytes, Numbers]:
    parts = [_draw_class(shapes, options, label, subset, count) for label in range(options.classes)]
    return np.concatenate(parts), np.repeat(np.arange(options.classes), count)


def _draw_class(shapes: Bytes, options: Options, label: int, subset: int, count: int) -> Bytes:
    """The scenes of one class with their masks, of which its own is in front.  # [n, 2, H, W]"""
    generator = np.random.Generator(np.random.PCG64([0, label, subset]))
    shape = (count, options.classes + 4 + SHOWN * NUMBERS + options.size**2)
    draws = generator.integers(0, ONE, shape, dtype=np.uint16).astype(np.int64)
    ends = np.cumsum([options.classes, 4, *[NUMBERS] * SHOWN])
    order, quarters, *characters, noise = np.split(draws, ends, axis=1)
    order[:, label] = -1  # the scene's own class comes first
    labels, corners = (np.argsort(each, 1, kind="stable") for each in (order, quarters))
    grey = np.zeros((count, options.size, options.size), np.int64)
    mask = np.full_like(grey, options.classes)
    for k in reversed(range(SHOWN)):
        cover = _draw_character(shapes, labels[:, k], corners[:, k], characters[k], options)
        grey = np.maximum(grey, cover)
        if k == 0 or subset == TEST:
            mask = np.where(_widen(cover), labels[:, k, None, None], mask)
    noise = ((noise >> 8) + (noise & 255) - 255).reshape(grey.shape)  # mostly small, as in glyphs
    grey = DARK + (grey * LIGHT >> 16) + noise // NOISE
    return np.stack([np.clip(grey, 0, 255), mask], 1).astype(np.uint8)


def _draw_character(
    shapes: Bytes, labels: Numbers, quarters: Numbers, draws: Numbers, options: Options
) -> Numbers:
    """How much of each pixel a character of each label covers, in 0..ONE.  # [n, size, size]"""
    box, size = _box(options), options.size
    flat = shapes.reshape(-1, *shapes.shape[2:])  # [classes * faces, side, side]
    faces = labels * len(FACES) + draws[:, 0] % len(FACES)
    cover = coverage(flat, faces, *positions(draws[:, 1:6].T, box))  # [n, box, box]
    scenes = np.zeros((len(labels), size, size), np.int64)
    rows, columns = (draws[:, 6:] % (size // 2 - box + 1)).T
    rows, columns = rows + quarters // 2 * (size // 2), columns + quarters % 2 * (size // 2)
    for scene, drawn, row, column in zip(scenes, cover, rows, columns, strict=True):
        scene[row : row + box, column : column + box] = drawn
    return scenes


def _widen(cover: Numbers) -> npt.NDArray[np.bool_]:
    padded = np.pad(cover > STROKE, ((0, 0), (REACH, REACH), (REACH, REACH)))
    side = 2 * REACH + 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), (1, 2))
    return np.asarray(windows.any((3, 4)))
