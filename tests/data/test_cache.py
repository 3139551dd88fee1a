"""The cache: written once, checked when opened, shared by processes, rebuilt after damage."""

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import cached, edit, flip, load_error

from stamp_core.data import sources
from stamp_core.data.cache import ARRAYS
from stamp_core.data.images import ImageArrays
from stamp_core.data.loading import load_dataset
from workbench.sources import glyphs

SMALL = {"source": "glyphs", "classes": 5, "train_per_class": 6, "test_per_class": 4}
OWN = {"source": "own"}


def test_the_first_load_writes_and_later_ones_map_the_same_bytes(monkeypatch):
    first = load_dataset(SMALL)
    monkeypatch.setattr(glyphs, "make", None)
    second = load_dataset(SMALL)
    assert second.digest == first.digest
    (folder,) = cached()
    assert folder.name.startswith("glyphs-") and len(folder.name) == len("glyphs-") + 12
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert maps.read_text().count(f"{folder}/x_train.npy") == 2


def test_writing_into_a_loaded_dataset_stays_private():
    first = load_dataset(SMALL)
    first.x_train[:] = 0
    assert load_dataset(SMALL).x_train.any()


def test_options_and_code_decide_the_folder(monkeypatch):
    load_dataset(SMALL)
    load_dataset(SMALL | {"size": 20})  # its default: the same options
    assert len(cached()) == 1
    assert load_dataset(SMALL | {"size": 8}).digest != load_dataset(SMALL).digest
    assert len(cached()) == 2
    fingerprint = "stamp_core.core.fingerprint.combined_fingerprint"
    monkeypatch.setattr(fingerprint, lambda *paths: "changed code")
    load_dataset(SMALL)
    assert len(cached()) == 3


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("x_train.npy", lambda path: os.truncate(path, 500)),
        ("y_test.npy", lambda path: path.write_bytes(b"")),
        ("std.npy", Path.unlink),
        ("x_test.npy", flip),
        ("meta.json", edit('"A"', '"B"')),
        ("meta.json", lambda path: path.write_text('{"classes": [')),
        ("meta.json", lambda path: path.write_text("[]")),
    ],
)
def test_a_damaged_dataset_is_made_again_with_a_warning(file, harm):
    first = load_dataset(SMALL)
    digest = first.digest
    before = {key: getattr(first, key).clone() for key in ARRAYS}
    del first  # its memory is mapped from the files that are damaged now
    (folder,) = cached()
    harm(folder / file)
    with pytest.warns(UserWarning, match=f"{folder.name} is damaged") as seen:
        second = load_dataset(SMALL)
    assert len(seen) == 1 and "\n" not in str(seen[0].message)
    assert second.digest == digest
    assert all(torch.equal(before[key], getattr(second, key)) for key in ARRAYS)
    assert cached() == [folder]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_dataset(SMALL).digest == digest


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A source `own`, in a folder of a user."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n\nPACKAGES = ()\n\n"
        "@dataclass(frozen=True)\nclass Options:\n    many: int = 3\n"
    )
    monkeypatch.setattr(sources, "__path__", [*sources.__path__, str(tmp_path)])
    monkeypatch.setattr("stamp_core.core.fingerprint.PACKAGES", {"stamp_core": tmp_path})
    yield importlib.import_module("stamp_core.data.sources.own")
    del sys.modules["stamp_core.data.sources.own"]


def some(count: int = 6) -> ImageArrays:
    x = np.arange(count * 8, dtype=np.uint8).reshape(count, 2, 2, 2)
    x[:, 1] = 7
    return ImageArrays(x, np.arange(count) % 2, x[:2], np.arange(2), ("a", "b"))


def test_a_file_is_a_source(own):
    own.make = lambda options: some(options.many)  # type: ignore[attr-defined]
    found = load_dataset({**OWN, "many": 4})
    assert found.name == "own" and len(found.x_train) == 4
    assert found.std[1] == 1 and found.mean[1] == torch.tensor(7 / 255)  # a constant channel


@pytest.fixture
def number(own, raw):
    """A file from which the source `own` reads how many images there are."""
    raw.mkdir()
    path = raw / "number.txt"
    path.write_text("3")
    own.inputs = lambda options: [path]
    own.make = lambda options: some(int(path.read_text()))
    return path


def count_datasets() -> int:
    load_dataset(OWN)
    return len(cached())


def test_other_content_of_a_file_is_another_dataset(number):
    assert count_datasets() == 1
    before = number.stat()
    number.write_text("4")
    os.utime(number, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert count_datasets() == 2 and len(load_dataset(OWN).x_train) == 4
    number.write_text("3")
    assert count_datasets() == 2  # the first content again, whenever it was written


def test_a_large_file_is_identified_by_size_and_time(number, monkeypatch):
    monkeypatch.setattr("stamp_core.data.cache.LARGE", 0)
    assert count_datasets() == 1
    for content, expected in (("3", 2), (" 3", 3), (" 4", 3)):  # its content is not read
        number.write_text(content)
        os.utime(number, ns=(1, 1))
        assert count_datasets() == expected


def test_a_folder_is_identified_by_names_sizes_and_times_of_its_files(own, number):
    own.inputs = lambda options: [number.parent]
    more = number.parent / "inner" / "more.txt"
    steps: list[Callable[[], object]] = [
        lambda: more.write_text("a"),
        lambda: os.utime(more, ns=(1, 1)),
        lambda: (more.write_text("ab"), os.utime(more, ns=(1, 1))),
        lambda: more.rename(more.with_name("less.txt")),
    ]
    assert count_datasets() == 1
    more.parent.mkdir()
    assert count_datasets() == 1
    for expected, step in enumerate(steps, 2):
        step()
        assert count_datasets() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x_train": np.zeros((6, 2, 2), np.uint8)},
            "x_train is uint8 [6, 2, 2]; it must be uint8",
        ),
        ({"x_test": np.zeros((2, 1, 2, 2), np.uint8)}, "x_test is uint8 [2, 1, 2, 2]; it must be"),
        ({"y_train": np.zeros(5, np.int64)}, "y_train is int64 [5]; it must be int64 [6]"),
        ({"y_train": np.full(6, 2)}, "y_train must be in 0..1, as for its names"),
        ({"domain_test": np.ones(2, np.int64)}, "domain_test must be in 0..0"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(own, change, message):
    own.make = lambda options: replace(some(), **change)
    assert load_error(OWN, ValueError).startswith(f"own: {message}")
    assert not cached()
