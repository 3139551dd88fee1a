"""The built-in sets, digits and glyphs: the same bytes on every machine, and learnable."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import ft2font, get_data_path
from sklearn.neighbors import NearestCentroid

from stamp_core.data.cache import Bytes
from stamp_core.data.images import ImageArrays
from stamp_core.data.loading import load_dataset
from stamp_core.data.sources import digits, glyphs

SMALL = {"source": "glyphs", "classes": 5, "train_per_class": 6, "test_per_class": 4}
OPTIONS = glyphs.Options(classes=5, train_per_class=6, test_per_class=4)
WIDE = glyphs.Options(classes=100, train_per_class=20, test_per_class=2)
FACES = len(glyphs.FACES)


@pytest.fixture(scope="module")
def wide() -> ImageArrays:
    """Some images of every character."""
    return glyphs.make(WIDE)


@pytest.fixture(scope="module")
def shapes() -> Bytes:
    """Every character in every face."""
    return glyphs.draw_outlines(glyphs.CHARACTERS, 12)


# ------------------------------------------------------------------ digits


def test_the_bytes_of_digits_are_pinned() -> None:
    pinned = "4ef76bfc618f56bf8ca4aa41438143ae5c333aedd5b1efe30931e9ce4fd08230"
    assert load_dataset({"source": "digits"}).digest == pinned


def test_digits_have_the_same_share_of_test_images_in_each_class() -> None:
    found = digits.make(digits.Options())
    train, test = np.bincount(found.y_train), np.bincount(found.y_test)
    assert len(found.x_train) + len(found.x_test) == 1797
    assert np.abs(test / (train + test) - 0.25).max() < 0.005
    assert found.x_train.min() == 0 and found.x_train.max() == 255
    assert found.x_train.shape[1:] == (1, 8, 8)


# ------------------------------------------------------------------ glyphs


def test_the_bytes_of_glyphs_are_pinned() -> None:
    """Other versions of FreeType draw other edges; the pinned matplotlib has this one."""
    assert ft2font.__freetype_version__ == "2.14.3", "not the pinned matplotlib"
    pinned = "5b1f14cd5ce72459033e1d83494d81d70512393580c59dc6bfbb972ce29dec8f"
    assert load_dataset(SMALL).digest == pinned


def test_the_bytes_of_images_of_given_outlines_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def outlines(characters: str, box: int) -> np.ndarray:
        row, column = np.mgrid[: 2 * box + 4, : 2 * box + 4]
        shape = (row * column) % 251 * (abs(row - column) < box)
        return np.broadcast_to(shape, (len(characters), FACES, *shape.shape)).astype(np.uint8)

    monkeypatch.setattr(glyphs, "draw_outlines", outlines)
    pinned = "159d2398bc8c677b17fcfcaeaf6e7f0148bba4e7d539f154d0e51c4fd094c7ac"
    assert load_dataset(SMALL).digest == pinned


def test_every_face_has_every_character(shapes: Bytes) -> None:
    assert len(set(glyphs.CHARACTERS)) == 100 and len(set(glyphs.FACES)) == 16
    folder = Path(get_data_path(), "fonts", "ttf")
    for face in glyphs.FACES:
        font = ft2font.FT2Font(str(folder / f"{face}.ttf"))
        assert all(font.get_char_index(ord(character)) for character in glyphs.CHARACTERS)
    assert (shapes.max((2, 3)) > 200).all()
    assert not shapes[:, :, [0, -1]].any() and not shapes[:, :, :, [0, -1]].any()


@pytest.mark.parametrize("face", range(FACES))
def test_no_two_characters_are_the_same_up_to_size(shapes: Bytes, face: int) -> None:
    flat = shapes[:, face].reshape(100, -1).astype(float)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    alike = flat @ flat.T - np.eye(100)  # of two images: 1 if they are the same
    assert alike.max() < 0.95


def test_more_classes_change_no_earlier_one(wide: ImageArrays) -> None:
    few = glyphs.make(replace(WIDE, classes=3))
    assert np.array_equal(few.x_train, wide.x_train[:60])
    assert np.array_equal(few.x_test, wide.x_test[:6])
    assert few.classes == wide.classes[:3]


@pytest.mark.parametrize("face_domains", [False, True])
def test_more_images_of_a_class_change_no_earlier_one(face_domains: bool) -> None:
    counts = {"train_per_class": 16, "test_per_class": 17}
    options = replace(OPTIONS, **counts, face_domains=face_domains)
    few = glyphs.make(options)
    more = glyphs.make(replace(options, train_per_class=130, test_per_class=20))
    assert np.array_equal(few.x_train, of_class(more.x_train, 5)[:, :16].reshape(few.x_train.shape))
    assert np.array_equal(few.x_test, of_class(more.x_test, 5)[:, :17].reshape(few.x_test.shape))


def of_class(x: np.ndarray, classes: int) -> np.ndarray:
    """The images by class: [classes, images of a class, C, H, W]."""
    return x.reshape(classes, -1, *x.shape[1:])


def test_parts_and_classes_are_drawn_independently(wide: ImageArrays) -> None:
    everything = np.concatenate([wide.x_train, wide.x_test]).reshape(2200, -1)
    assert len(np.unique(everything, axis=0)) == 2200
    noise = glyphs._draw_numbers(20, 0, glyphs.TRAIN, 6)
    for label, subset in ((0, glyphs.TEST), (1, glyphs.TRAIN)):
        assert (glyphs._draw_numbers(20, label, subset, 6) == noise).mean() < 0.01


@pytest.mark.parametrize("size", [8, 20])
def test_no_image_is_empty(size: int) -> None:
    x = glyphs.make(replace(WIDE, train_per_class=8, size=size)).x_train.astype(int)
    assert x.std((1, 2, 3)).min() > 2


def test_faces_as_domains_are_balanced_in_every_class() -> None:
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


def test_ten_classes_can_be_learned() -> None:
    images = glyphs.make(glyphs.Options(10, 200, 30))
    train, test = (x.mean(1).reshape(len(x), -1) / 255 for x in (images.x_train, images.x_test))
    model = NearestCentroid().fit(train, images.y_train)
    assert model.score(test, images.y_test) > 0.5
