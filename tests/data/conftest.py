"""Every test of data has folders of its own for downloads and for the cache."""

import pytest
from folders import fill_train_and_test

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
    """The images of a set with folders train and test, those for training first."""
    return fill_train_and_test(raw / "set")
