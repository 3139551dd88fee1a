"""Every test of data has folders of its own for downloads and for the cache."""

import pytest
from folders import fill

from stamp_core.core import paths


@pytest.fixture(autouse=True)
def raw(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RAW", tmp_path / "raw")
    return tmp_path / "raw"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def images(raw):
    """The images of a set with folders train (4 + 3) and test (2 + 2), training first."""
    train = fill(raw / "set" / "train", {"cat": 4, "dog": 3})
    return train + fill(raw / "set" / "test", {"cat": 2, "dog": 2}, seed=100)
