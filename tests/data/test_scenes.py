"""Drawn scenes with masks: the same bytes everywhere, a quarter a character, masks of strokes."""

from dataclasses import replace

import numpy as np
import pytest

from stamp_core.data.loading import load_dataset
from workbench.sources import glyphs, scenes

OPTIONS = scenes.Options(train_per_class=40, test_per_class=40)


@pytest.fixture(scope="module")
def made():
    """Scenes of five classes, 40 each for training and for testing."""
    return scenes.make(OPTIONS)


def test_the_bytes_of_scenes_of_given_outlines_are_pinned(monkeypatch):
    def outlines(characters: str, box: int) -> np.ndarray:
        row, column = np.mgrid[: 2 * box + 4, : 2 * box + 4]
        shape = (row * column) % 251 * (abs(row - column) < box)
        faces = len(glyphs.FACES)
        return np.broadcast_to(shape, (len(characters), faces, *shape.shape)).astype(np.uint8)

    monkeypatch.setattr(scenes, "draw_outlines", outlines)
    spec = {"source": "scenes", "train_per_class": 6, "test_per_class": 4}
    pinned = "31559e59681c9eaa17586cfd8806e8f0fd192b3718a7011adc2b9daf1e890f73"
    assert load_dataset(spec).digest == pinned


def test_masks_for_training_show_the_scenes_own_class_alone(made):
    for x, label in zip(made.x_train, made.y_train, strict=True):
        assert set(np.unique(x[1])) == {label, 5}


def test_masks_for_testing_show_three_classes(made):
    """Every scene its own and two others; every pair comes."""
    found = [set(np.unique(mask).tolist()) - {5} for mask in made.x_test[:, 1]]
    assert all(
        label in each and len(each) == 3 for label, each in zip(made.y_test, found, strict=True)
    )
    assert len({frozenset(each) for each in found}) == 10  # of five classes, all threes


def test_each_character_has_a_quarter_of_its_own(made):
    """Its mask reaches two pixels into others; all quarters are used by every class."""
    for label in range(5):
        own = made.x_train[made.y_train == label, 1] == label
        corners = own.reshape(40, 2, 16, 2, 16)[:, :, 3:13, :, 3:13].any((2, 4))
        assert (corners.sum((1, 2)) == 1).all()
        assert corners.any(0).all()


def test_widening_by_hand():
    """A pixel becomes a square of 5 x 5, cut off at the border."""
    cover = np.zeros((1, 9, 9), np.int64)
    cover[0, 1, 4] = scenes.STROKE + 1
    cover[0, 8, 8] = scenes.STROKE
    wide = np.zeros((9, 9), bool)
    wide[:4, 2:7] = True
    assert np.array_equal(scenes._widen(cover)[0], wide)


def test_more_scenes_change_no_earlier_one_and_no_two_are_equal(made):
    few = scenes.make(replace(OPTIONS, train_per_class=7, test_per_class=3))
    assert np.array_equal(few.x_train.reshape(5, 7, -1), made.x_train.reshape(5, 40, -1)[:, :7])
    everything = np.concatenate([made.x_train, made.x_test]).reshape(400, -1)
    assert len(np.unique(everything, axis=0)) == 400
