"""Imports without garbage collection: during the imports only, and of their objects only."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from stamp_core.core.processes import without_garbage_collection


class Thing:
    """An object that can become garbage."""


def dropped_cycle() -> weakref.ref[Thing]:
    """A reference to garbage that only the collector finds."""
    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]
    return weakref.ref(thing)


@pytest.fixture(autouse=True)
def unfreeze() -> Iterator[None]:
    """The objects of this test are collected after it."""
    yield
    gc.unfreeze()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_restored_also_after_an_error(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ImportError), without_garbage_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() is enabled
    gc.enable()


def test_objects_created_inside_are_never_collected_and_later_ones_are() -> None:
    with without_garbage_collection():
        inside = dropped_cycle()
    later = dropped_cycle()
    gc.collect()
    assert inside() is not None
    assert later() is None


COUNTS = """
import gc, workbench.report.figures, stamp_core.api
print(gc.isenabled(), len(gc.get_objects()), gc.get_freeze_count())
"""


def test_the_imports_of_the_package_are_not_traversed_by_the_collector() -> None:
    """Neither those of the figures nor those that the API adds to them."""
    command = [sys.executable, "-c", COUNTS]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    enabled, traversed, frozen = done.stdout.split()
    assert enabled == "True"
    assert int(traversed) < int(frozen) / 100
