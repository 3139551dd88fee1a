"""The built-in sets, digits and glyphs: the same bytes on every machine, class by class."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib import ft2font

from stamp_core.data.loading import load_dataset
from workbench.sources import glyphs

SMALL = {"source": "glyphs", "classes": 5, "train_per_class": 6, "test_per_class": 4}
OPTIONS = glyphs.Options(classes=5, train_per_class=6, test_per_class=4)
WIDE = glyphs.Options(classes=100, train_per_class=20, test_per_class=2)
FACES = len(glyphs.FACES)


@pytest.fixture(scope="module")
def wide():
    return glyphs.make(WIDE)


@pytest.fixture(scope="module")
def shapes():
    return glyphs.draw_outlines(glyphs.CHARACTERS, 12)


def test_the_bytes_of_digits_are_pinned():
    pinned = "4ef76bfc618f56bf8ca4aa41438143ae5c333aedd5b1efe30931e9ce4fd08230"
    assert load_dataset({"source": "digits"}).digest == pinned


def test_the_bytes_of_glyphs_are_pinned():
    """Other versions of FreeType draw other edges; the pinned matplotlib has this one."""
    assert ft2font.__freetype_version__ == "2.14.3", "not the pinned matplotlib"
    pinned = "5b1f14cd5ce72459033e1d83494d81d70512393580c59dc6bfbb972ce29dec8f"
    assert load_dataset(SMALL).digest == pinned


@pytest.mark.parametrize("face", range(FACES))
def test_no_two_characters_are_the_same_up_to_size(shapes, face):
    flat = shapes[:, face].reshape(100, -1).astype(float)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    alike = flat @ flat.T - np.eye(100)  # of two images: 1 if they are the same
    assert alike.max() < 0.95


def test_more_classes_change_no_earlier_one(wide):
    few = glyphs.make(replace(WIDE, classes=3))
    assert np.array_equal(few.x_train, wide.x_train[:60])
    assert np.array_equal(few.x_test, wide.x_test[:6])
    assert few.classes == wide.classes[:3]


@pytest.mark.parametrize("face_domains", [False, True])
def test_more_images_of_a_class_change_no_earlier_one(face_domains):
    counts = {"train_per_class": 16, "test_per_class": 17}
    options = replace(OPTIONS, **counts, face_domains=face_domains)
    few = glyphs.make(options)
    more = glyphs.make(replace(options, train_per_class=130, test_per_class=20))
    assert np.array_equal(few.x_train, of_class(more.x_train, 5)[:, :16].reshape(few.x_train.shape))
    assert np.array_equal(few.x_test, of_class(more.x_test, 5)[:, :17].reshape(few.x_test.shape))


def of_class(x: np.ndarray, classes: int) -> np.ndarray:
    """The images by class: [classes, images of a class, C, H, W]."""
    return x.reshape(classes, -1, *x.shape[1:])


def test_parts_and_classes_are_drawn_independently(wide):
    everything = np.concatenate([wide.x_train, wide.x_test]).reshape(2200, -1)
    assert len(np.unique(everything, axis=0)) == 2200
    noise = glyphs._draw_numbers(20, 0, glyphs.TRAIN, 6)
    for label, subset in ((0, glyphs.TEST), (1, glyphs.TRAIN)):
        assert (glyphs._draw_numbers(20, label, subset, 6) == noise).mean() < 0.01


def test_faces_as_domains_are_balanced_in_every_class():
    options = replace(OPTIONS, train_per_class=2 * FACES, test_per_class=FACES + 3)
    found = glyphs.make(replace(options, face_domains=True))
    assert found.domains == glyphs.FACES
    assert found.domain_train is not None and found.domain_test is not None
    pairs = np.stack([found.y_train, found.domain_train])
    assert (np.unique(pairs, axis=1, return_counts=True)[1] == 2).all()
    assert np.unique(pairs, axis=1).shape[1] == 5 * FACES
    pairs = np.stack([found.y_test, found.domain_test])
    assert set(np.unique(pairs, axis=1, return_counts=True)[1]) == {1, 2}
    assert glyphs.make(options).domains == ("all",)
