"""Imports without garbage collection, which is as it was after them."""

import gc

import pytest

from stamp_core.core.processes import without_garbage_collection


@pytest.fixture(autouse=True)
def unfreeze():
    yield
    gc.unfreeze()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_restored_also_after_an_error(enabled):
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ImportError), without_garbage_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() is enabled
    gc.enable()
