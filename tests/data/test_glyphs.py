"""The built-in sets, digits, glyphs and scenes: the same bytes everywhere, class by class."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib import ft2font

from stamp_core.data.loading import load_dataset
from workbench.sources import glyphs, scenes

SMALL = {"source": "glyphs", "classes": 5, "train_per_class": 6, "test_per_class": 4}
OPTIONS = glyphs.Options(classes=5, train_per_class=6, test_per_class=4)
WIDE = glyphs.Options(classes=100, train_per_class=20, test_per_class=2)
FACES = len(glyphs.FACES)
SCENES = scenes.Options(train_per_class=40, test_per_class=40)


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
    for part, count in (("x_train", 16), ("x_test", 17)):
        x, larger = (getattr(each, part).reshape(5, -1, 3, 20, 20) for each in (few, more))
        assert np.array_equal(x, larger[:, :count])


def test_no_two_images_are_equal(wide):
    everything = np.concatenate([wide.x_train, wide.x_test]).reshape(2200, -1)
    assert len(np.unique(everything, axis=0)) == 2200


def test_faces_as_domains_are_balanced_in_every_class():
    options = replace(OPTIONS, train_per_class=2 * FACES, test_per_class=FACES + 3)
    found = glyphs.make(replace(options, face_domains=True))
    assert found.domains == glyphs.FACES
    pairs = np.stack([found.y_train, found.domain_train])
    assert (np.unique(pairs, axis=1, return_counts=True)[1] == 2).all()
    assert np.unique(pairs, axis=1).shape[1] == 5 * FACES
    pairs = np.stack([found.y_test, found.domain_test])
    assert set(np.unique(pairs, axis=1, return_counts=True)[1]) == {1, 2}
    assert glyphs.make(options).domains == ("all",)


# ------------------------------------------------------------------ scenes


@pytest.fixture(scope="module")
def made():
    """Scenes of five classes, 40 each for training and for testing."""
    return scenes.make(SCENES)


def test_the_bytes_of_scenes_of_given_outlines_are_pinned(monkeypatch):
    def outlines(characters: str, box: int) -> np.ndarray:
        row, column = np.mgrid[: 2 * box + 4, : 2 * box + 4]
        shape = (row * column) % 251 * (abs(row - column) < box)
        return np.broadcast_to(shape, (len(characters), FACES, *shape.shape)).astype(np.uint8)

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
    few = scenes.make(replace(SCENES, train_per_class=7, test_per_class=3))
    assert np.array_equal(few.x_train.reshape(5, 7, -1), made.x_train.reshape(5, 40, -1)[:, :7])
    everything = np.concatenate([made.x_train, made.x_test]).reshape(400, -1)
    assert len(np.unique(everything, axis=0)) == 400
