"""Data sets: the same bytes everywhere and for ever, shared by processes, and fit to learn from."""

import importlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import ft2font, get_data_path
from sklearn.neighbors import NearestCentroid

from stamp_core import data, paths
from stamp_core.config import ParameterError
from stamp_core.data import Pictures, digits, glyphs

SMALL = {"source": "glyphs", "classes": 5, "train_per_class": 6, "test_per_class": 4}
OPTIONS = glyphs.Options(classes=5, train_per_class=6, test_per_class=4)
WIDE = glyphs.Options(classes=100, train_per_class=20, test_per_class=2)
FACES = len(glyphs.FACES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def wide() -> Pictures:
    """Some pictures of every character."""
    return glyphs.make(WIDE)


@pytest.fixture(scope="module")
def drawn() -> data.Bytes:
    """Every character in every face."""
    return glyphs.outlines(glyphs.CHARACTERS, 12)


def same(first: data.ImageSet, second: data.ImageSet) -> bool:
    """Whether two data sets are equal in every array and name."""
    arrays = all(torch.equal(getattr(first, key), getattr(second, key)) for key in data.ARRAYS)
    keys = ("name", "classes", "domains", "digest")
    return arrays and all(getattr(first, key) == getattr(second, key) for key in keys)


# ------------------------------------------------------------------ the cache


def test_the_first_load_makes_and_later_ones_map_the_same_bytes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data.load(SMALL)
    monkeypatch.setattr(glyphs, "make", None)
    second = data.load(SMALL)
    assert same(first, second)
    (folder,) = cache.iterdir()
    assert folder.name.startswith("glyphs-") and len(folder.name) == len("glyphs-") + 12
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert maps.read_text().count(f"{folder}/x_train.npy") == 2


def test_writing_into_a_loaded_set_stays_private() -> None:
    first = data.load(SMALL)
    first.x_train[:] = 0
    assert data.load(SMALL).x_train.any()


def test_types_shapes_and_moments() -> None:
    found = data.load(SMALL)
    assert found.x_train.shape == (30, 3, 20, 20) and found.x_test.shape == (20, 3, 20, 20)
    assert found.x_train.dtype == torch.uint8 and found.y_train.dtype == torch.int64
    assert found.classes == tuple("AC7M5") and found.domains == ("all",)
    assert torch.bincount(found.y_train).tolist() == [6] * 5
    assert not found.domain_train.any() and len(found.domain_test) == 20
    pixels = found.x_train.double() / 255
    assert torch.allclose(found.mean.double(), pixels.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(found.std.double(), pixels.std((0, 2, 3), correction=0), atol=1e-6)


def test_options_and_code_choose_the_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data.load(SMALL)
    data.load(SMALL | {"style": 1.0})  # its default: the same options
    assert len(list(cache.iterdir())) == 1
    assert data.load(SMALL | {"seed": 1}).digest != data.load(SMALL).digest
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr("stamp_core.fingerprint.combined", lambda *paths: "changed code")
    data.load(SMALL)
    assert len(list(cache.iterdir())) == 3


def truncate(folder: Path) -> None:
    """Cut an array short."""
    (folder / "x_train.npy").write_bytes((folder / "x_train.npy").read_bytes()[:500])


def empty(folder: Path) -> None:
    """Leave nothing of an array."""
    (folder / "y_test.npy").write_bytes(b"")


def lose(folder: Path) -> None:
    """Delete an array."""
    (folder / "std.npy").unlink()


def flip(folder: Path) -> None:
    """Change one pixel."""
    content = bytearray((folder / "x_test.npy").read_bytes())
    content[-1] ^= 1
    (folder / "x_test.npy").write_bytes(content)


def rename(folder: Path) -> None:
    """Change the name of a class."""
    meta = json.loads((folder / "meta.json").read_text())
    meta["classes"][0] = "B"
    (folder / "meta.json").write_text(json.dumps(meta))


def garble(folder: Path) -> None:
    """Leave a half of the names' file."""
    (folder / "meta.json").write_text('{"classes": [')


def strange(folder: Path) -> None:
    """Leave another file in its place."""
    (folder / "meta.json").write_text("[]")


@pytest.mark.parametrize("harm", [truncate, empty, lose, flip, rename, garble, strange])
def test_a_damaged_cache_is_made_again_with_a_warning(cache: Path, harm: Any) -> None:
    first = data.load(SMALL)
    kept = {key: getattr(first, key).clone() for key in data.ARRAYS}
    del first  # its memory is mapped from the files that are now harmed
    (folder,) = cache.iterdir()
    harm(folder)
    with pytest.warns(UserWarning, match=f"{folder.name} is damaged") as seen:
        second = data.load(SMALL)
    assert len(seen) == 1 and "\n" not in str(seen[0].message)
    assert all(torch.equal(kept[key], getattr(second, key)) for key in data.ARRAYS)
    assert list(cache.iterdir()) == [folder]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(second, data.load(SMALL))


def test_two_that_make_at_once_both_succeed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2, timeout=10)
    found: list[data.ImageSet] = []

    def make(options: glyphs.Options) -> Pictures:
        made = glyphs_make(options)
        meet.wait()  # neither has stored anything before both have made everything
        return made

    glyphs_make = glyphs.make
    monkeypatch.setattr(glyphs, "make", make)
    workers = [threading.Thread(target=lambda: found.append(data.load(SMALL))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 2 and same(*found)
    assert len(list(cache.iterdir())) == 1


# ------------------------------------------------------------------ a user's own source


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A source `own` in a folder of a user."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n\nPACKAGES = ()\n\n"
        "@dataclass(frozen=True)\nclass Options:\n    many: int = 3\n"
    )
    monkeypatch.setattr(data, "__path__", [*data.__path__, str(tmp_path)])
    monkeypatch.setattr("stamp_core.fingerprint.PACKAGE", tmp_path)
    yield importlib.import_module("stamp_core.data.own")
    del sys.modules["stamp_core.data.own"]


def some(count: int = 6) -> Pictures:
    """Pictures that fit together."""
    x = np.arange(count * 8, dtype=np.uint8).reshape(count, 2, 2, 2)
    x[:, 1] = 7
    return Pictures(x, np.arange(count) % 2, x[:2], np.arange(2), ("a", "b"))


def test_a_file_is_a_source(own: ModuleType) -> None:
    own.make = lambda options: some(options.many)  # type: ignore[attr-defined]
    found = data.load({"source": "own", "many": 4})
    assert found.name == "own" and len(found.x_train) == 4
    assert found.std[1] == 1 and found.mean[1] == torch.tensor(7 / 255)  # a constant channel


@pytest.fixture
def read(own: ModuleType, tmp_path: Path) -> Path:
    """A folder from whose `number.txt` the source `own` takes how many pictures there are."""
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "number.txt").write_text("3")
    own.inputs = lambda options: [folder / "number.txt"]  # type: ignore[attr-defined]
    own.make = lambda options: some(  # type: ignore[attr-defined]
        int((folder / "number.txt").read_text())
    )
    return folder


def sets(cache: Path) -> int:
    """How many sets there are after one more loading."""
    data.load({"source": "own"})
    return len(list(cache.iterdir()))


def test_other_content_of_a_file_is_another_set(read: Path, cache: Path) -> None:
    assert sets(cache) == 1
    before = (read / "number.txt").stat()
    (read / "number.txt").write_text("4")
    os.utime(read / "number.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sets(cache) == 2 and len(data.load({"source": "own"}).x_train) == 4
    (read / "number.txt").write_text("3")
    assert sets(cache) == 2  # it was met before, whenever it was written


def test_of_a_large_file_size_and_time_count(
    read: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stamp_core.cache.WHOLE", 0)
    assert sets(cache) == 1
    os.utime(read / "number.txt", ns=(1, 1))
    assert sets(cache) == 2
    (read / "number.txt").write_text(" 3")
    os.utime(read / "number.txt", ns=(1, 1))
    assert sets(cache) == 3
    (read / "number.txt").write_text(" 4")
    os.utime(read / "number.txt", ns=(1, 1))
    assert sets(cache) == 3  # its content is not read


def test_of_a_folder_names_sizes_and_times_of_its_files_count(
    own: ModuleType, read: Path, cache: Path
) -> None:
    own.inputs = lambda options: [read]  # type: ignore[attr-defined]
    assert sets(cache) == 1
    (read / "inner").mkdir()
    assert sets(cache) == 1
    (read / "inner" / "more.txt").write_text("a")
    assert sets(cache) == 2
    os.utime(read / "inner" / "more.txt", ns=(1, 1))
    assert sets(cache) == 3
    (read / "inner" / "more.txt").write_text("ab")
    os.utime(read / "inner" / "more.txt", ns=(1, 1))
    assert sets(cache) == 4
    (read / "inner" / "more.txt").rename(read / "inner" / "less.txt")
    assert sets(cache) == 5


def test_an_input_that_is_not_there_is_named(read: Path, cache: Path) -> None:
    (read / "number.txt").unlink()
    with pytest.raises(FileNotFoundError) as error:
        data.load({"source": "own"})
    assert str(error.value) == f"[Errno 2] No such file or directory: '{read}/number.txt'"
    assert not cache.exists()


def test_a_large_set_is_read_only(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    own.make = lambda options: some()  # type: ignore[attr-defined]
    modes: list[str] = []
    load = np.load

    def noted(path: Path, mmap_mode: str) -> Any:
        modes.append(mmap_mode)
        return load(path, mmap_mode=mmap_mode)

    monkeypatch.setattr(np, "load", noted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = data.load({"source": "own"})
        assert set(modes) == {"c"}
        monkeypatch.setattr("stamp_core.cache.WHOLE", 0)
        modes.clear()
        assert same(data.load({"source": "own"}), first)
    assert set(modes) == {"r"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x_train": np.zeros((6, 2, 2), np.uint8)},
            "x_train is uint8 [6, 2, 2]; it must be uint8",
        ),
        ({"x_test": np.zeros((2, 2, 2, 2))}, "x_test is float64"),
        ({"x_test": np.zeros((0, 2, 2, 2), np.uint8)}, "x_test is uint8 [0, 2, 2, 2]"),
        ({"x_test": np.zeros((2, 1, 2, 2), np.uint8)}, "it must be like x_train (6, 2, 2, 2)"),
        ({"y_train": np.zeros(5, np.int64)}, "y_train is int64 [5]; it must be int64 [6]"),
        ({"y_train": np.zeros(6)}, "y_train is float64 [6]"),
        ({"y_train": np.full(6, 2)}, "y_train must be in 0..1"),
        ({"y_test": np.full(2, -1)}, "y_test must be in 0..1"),
        ({"domain_test": np.ones(2, np.int64)}, "domain_test must be in 0..0"),
        ({"domain_train": np.zeros(1, np.int64)}, "domain_train is int64 [1]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    own: ModuleType, cache: Path, change: dict[str, Any], message: str
) -> None:
    own.make = lambda options: replace(some(), **change)  # type: ignore[attr-defined]
    with pytest.raises(ValueError) as error:
        data.load({"source": "own"})
    assert str(error.value).startswith("own: ") and message in str(error.value)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "glyph"}, "source 'glyph' is unknown; did you mean 'glyphs'?"),
        ({"source": ["glyphs"]}, "source ['glyphs'] is unknown"),
        ({"clases": 3}, "'clases' is unknown; did you mean 'classes'?"),
        ({"classes": 101}, "here.classes is 101; it must be between 2 and 100"),
        ({"classes": 1}, "classes is 1"),
        ({"classes": "5"}, "here.classes is '5'; it must be a whole number"),
        ({"train_per_class": 0}, "train_per_class is 0; it must be at least 1"),
        ({"test_per_class": 0}, "test_per_class is 0"),
        ({"size": 7}, "size is 7; it must be between 8 and 64"),
        ({"size": 65}, "size is 65"),
        ({"style": -0.1}, "style is -0.1; it must be between 0 and 2"),
        ({"style": float("nan")}, "style is nan"),
        ({"seed": -1}, "seed is -1"),
        (
            {"face_domains": True, "train_per_class": 99},
            "test_per_class is 4; it must be at least 16",
        ),
        ({"face_domains": 1}, "face_domains is 1; it must be true or false"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        data.options(SMALL | change, "here")
    assert message in str(error.value)


def test_a_source_must_be_named() -> None:
    with pytest.raises(ParameterError, match=r"params.yaml: data.source is missing"):
        data.options({"classes": 2})


def test_options_come_back_checked() -> None:
    assert data.options(SMALL) == OPTIONS
    assert data.options({"source": "digits"}) == digits.Options()


# ------------------------------------------------------------------ digits


def test_digits_are_these_bytes() -> None:
    pinned = "4ef76bfc618f56bf8ca4aa41438143ae5c333aedd5b1efe30931e9ce4fd08230"
    assert data.load({"source": "digits"}).digest == pinned


def test_digits_are_split_in_each_class_alike() -> None:
    found = digits.make(digits.Options())
    train, test = np.bincount(found.y_train), np.bincount(found.y_test)
    assert len(found.x_train) + len(found.x_test) == 1797
    assert np.abs(test / (train + test) - 0.25).max() < 0.005
    assert found.x_train.min() == 0 and found.x_train.max() == 255
    assert found.x_train.shape[1:] == (1, 8, 8)


@pytest.mark.parametrize("share", [1e-9, 0.3, 1 - 1e-9])
def test_digits_leave_no_side_empty(share: float) -> None:
    found = digits.make(digits.Options(share))
    assert set(found.y_train) == set(found.y_test) == set(range(10))


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_digits_refuse_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ParameterError, match=f"digits.test_share is {share}"):
        data.options({"source": "digits", "test_share": share}, "digits")


# ------------------------------------------------------------------ glyphs


def test_glyphs_are_these_bytes() -> None:
    """Other versions of FreeType draw other edges: the pinned matplotlib has this one."""
    assert ft2font.__freetype_version__ == "2.14.3", "not the pinned matplotlib"
    pinned = "5b1f14cd5ce72459033e1d83494d81d70512393580c59dc6bfbb972ce29dec8f"
    assert data.load(SMALL).digest == pinned


def test_pictures_of_given_outlines_are_these_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def outlines(characters: str, box: int) -> np.ndarray:
        row, column = np.mgrid[: 2 * box + 4, : 2 * box + 4]
        shape = (row * column) % 251 * (abs(row - column) < box)
        return np.broadcast_to(shape, (len(characters), FACES, *shape.shape)).astype(np.uint8)

    monkeypatch.setattr(glyphs, "outlines", outlines)
    pinned = "159d2398bc8c677b17fcfcaeaf6e7f0148bba4e7d539f154d0e51c4fd094c7ac"
    assert data.load(SMALL).digest == pinned


def test_the_characters_and_faces_are_a_hundred_and_sixteen() -> None:
    assert len(set(glyphs.CHARACTERS)) == len(glyphs.CHARACTERS) == 100
    assert len(set(glyphs.FACES)) == 16


def test_every_face_has_every_character(drawn: data.Bytes) -> None:
    folder = Path(get_data_path(), "fonts", "ttf")
    for face in glyphs.FACES:
        font = ft2font.FT2Font(str(folder / f"{face}.ttf"))
        assert all(font.get_char_index(ord(character)) for character in glyphs.CHARACTERS)
    assert (drawn.max((2, 3)) > 200).all()
    assert not drawn[:, :, [0, -1]].any() and not drawn[:, :, :, [0, -1]].any()


def test_a_character_that_a_face_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="DejaVuSansMono-Oblique has no '★'"):
        glyphs.outlines("A★", 15)
    with pytest.raises(ValueError, match="draws nothing for ' '"):
        glyphs.outlines("A ", 15)


@pytest.mark.parametrize("face", range(FACES))
def test_no_two_characters_are_the_same_up_to_size(drawn: data.Bytes, face: int) -> None:
    flat = drawn[:, face].reshape(100, -1).astype(float)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    alike = flat @ flat.T - np.eye(100)  # of two pictures: 1 if they are the same
    assert alike.max() < 0.95


def test_more_classes_change_no_earlier_one(wide: Pictures) -> None:
    few = glyphs.make(replace(WIDE, classes=3))
    assert np.array_equal(few.x_train, wide.x_train[:60])
    assert np.array_equal(few.x_test, wide.x_test[:6])
    assert few.classes == wide.classes[:3]


@pytest.mark.parametrize("face_domains", [False, True])
def test_more_pictures_of_a_class_change_no_earlier_one(face_domains: bool) -> None:
    counts = {"train_per_class": 16, "test_per_class": 17}
    options = replace(OPTIONS, **counts, face_domains=face_domains)
    few = glyphs.make(options)
    more = glyphs.make(replace(options, train_per_class=130, test_per_class=20))
    assert np.array_equal(few.x_train, of_class(more.x_train, 5)[:, :16].reshape(few.x_train.shape))
    assert np.array_equal(few.x_test, of_class(more.x_test, 5)[:, :17].reshape(few.x_test.shape))


def of_class(x: np.ndarray, classes: int) -> np.ndarray:
    """The pictures by class: [classes, pictures of a class, C, H, W]."""
    return x.reshape(classes, -1, *x.shape[1:])


def test_drawing_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = glyphs.make(OPTIONS)
    monkeypatch.setattr(glyphs, "PIECE", 4)
    assert np.array_equal(glyphs.make(OPTIONS).x_train, whole.x_train)


def test_parts_classes_and_seeds_are_drawn_independently(wide: Pictures) -> None:
    everything = np.concatenate([wide.x_train, wide.x_test]).reshape(2200, -1)
    assert len(np.unique(everything, axis=0)) == 2200
    noise = glyphs._draws(OPTIONS, 0, glyphs.TRAIN, 6)
    for other in ((OPTIONS, 0, glyphs.TEST), (OPTIONS, 1, glyphs.TRAIN)):
        assert (glyphs._draws(*other, 6) == noise).mean() < 0.01
    assert (glyphs._draws(replace(OPTIONS, seed=1), 0, glyphs.TRAIN, 6) == noise).mean() < 0.01


@pytest.mark.parametrize(("size", "style"), [(8, 0.0), (8, 2.0), (20, 1.0)])
def test_no_picture_is_empty(size: int, style: float) -> None:
    x = glyphs.make(replace(WIDE, train_per_class=8, size=size, style=style)).x_train.astype(int)
    assert x.std((1, 2, 3)).min() > 2


def test_an_empty_picture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glyphs, "FAINT", glyphs.ONE)
    with pytest.raises(ValueError, match=r"a picture is empty at size 20, style 1.0"):
        glyphs.make(OPTIONS)


def test_the_character_is_lighter_than_the_ground(wide: Pictures) -> None:
    middle = wide.x_train[..., 5:15, 5:15].reshape(2000, -1)
    rim = np.concatenate([wide.x_train[..., 0, :], wide.x_train[..., -1, :]], -1).reshape(2000, -1)
    assert (np.percentile(middle, 95, axis=1) > np.median(rim, axis=1) + 15).mean() > 0.99


def test_at_style_0_a_class_looks_the_same_in_a_face() -> None:
    options = glyphs.Options(4, 3 * FACES, FACES, style=0, face_domains=True)
    x = of_class(glyphs.make(options).x_train, 4).reshape(4, 3, FACES, -1)
    assert (x == x[:, :1]).all()
    assert (x[0, 0, 0] != x[0, 0, 1]).any() and (x[0, 0, 0] != x[1, 0, 0]).any()


def test_more_style_is_more_variety() -> None:
    def variety(style: float) -> float:
        made = glyphs.make(glyphs.Options(2, 64, 1, style=style))
        return float(of_class(made.x_train, 2).std(1).mean())

    assert variety(0) < variety(0.3) < variety(0.6) < variety(1)


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
    made = glyphs.make(glyphs.Options(10, 60, 30, style=0.5))
    train, test = (x.mean(1).reshape(len(x), -1) / 255 for x in (made.x_train, made.x_test))
    model = NearestCentroid().fit(train, made.y_train)
    assert model.score(test, made.y_test) > 0.85
