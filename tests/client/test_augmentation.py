"""How images are mirrored and shifted."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from four_classes import images
from stamp_core.client.augmentation import augment

from stamp_core.config.schema import Training
from stamp_core.core.seeding import generator

TRAINING = Training(rounds=1, epochs=3, batch_size=16, lr=0.1)


def numbers(*parts: int) -> torch.Generator:
    return generator("augment", *parts)


def test_without_augmentation_images_do_not_change() -> None:
    x = images(5, 3, 4, 4)
    assert torch.equal(augment(x, TRAINING, numbers()), x)


def test_a_shift_is_a_translation_with_repeated_edges() -> None:
    """Each image is one of the 25 cuts out of itself with its edges repeated twice, the same cut
    in every channel; 500 images meet every cut (one is missed with 25 * 0.96^500 < 1e-7)."""
    x = images(500, 3, 7, 5)
    moved = augment(x, replace(TRAINING, shift=2), numbers())
    assert moved.shape == x.shape and moved.dtype == torch.uint8
    counts: Counter[tuple[int, int]] = Counter()
    for before, after in zip(x.numpy(), moved.numpy(), strict=True):
        wide = np.pad(before, ((0, 0), (2, 2), (2, 2)), mode="edge")
        cuts = [
            (dy, dx)
            for dy, dx in product(range(5), range(5))
            if np.array_equal(wide[:, dy : dy + 7, dx : dx + 5], after)
        ]
        assert len(cuts) == 1
        counts.update(cuts)
    assert len(counts) == 25


def test_a_shift_beyond_the_image_repeats_its_edge() -> None:
    x = images(50, 1, 2, 2)
    assert set(augment(x, replace(TRAINING, shift=9), numbers()).unique().tolist()) <= set(
        x.unique().tolist()
    )


def test_half_of_the_images_are_mirrored_left_to_right() -> None:
    """Of 1000 images 500, give or take 5 standard deviations of sqrt(250) = 16."""
    x = images(1000, 3, 4, 5)
    flipped = augment(x, replace(TRAINING, flip=True), numbers())
    mirrored = (flipped == x.flip(3)).flatten(1).all(1)
    assert (mirrored ^ (flipped == x).flatten(1).all(1)).all()
    assert 420 < mirrored.sum() < 580


def test_augmentation_follows_its_address() -> None:
    x, training = images(20, 1, 6, 6), replace(TRAINING, shift=2, flip=True)
    assert torch.equal(augment(x, training, numbers(1)), augment(x, training, numbers(1)))
    assert not torch.equal(augment(x, training, numbers(1)), augment(x, training, numbers(2)))
