"""Imports without garbage collection: only while they last, and only of what they bring."""

import gc
import subprocess
import sys
import weakref

import pytest

from stamp_core.loading import uncollected


class Thing:
    """Something that can be garbage."""


def dropped_cycle() -> weakref.ref[Thing]:
    """Garbage that only the collector finds."""
    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]
    return weakref.ref(thing)


@pytest.fixture(autouse=True)
def _thaw() -> None:
    """Objects of other tests are not kept for ever."""
    yield
    gc.unfreeze()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled: bool, fails: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with uncollected():
            assert not gc.isenabled()
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert gc.isenabled() is enabled
    gc.enable()


def test_what_is_made_inside_is_never_searched_and_what_is_made_later_is() -> None:
    with uncollected():
        inside = dropped_cycle()
    later = dropped_cycle()
    gc.collect()
    assert inside() is not None
    assert later() is None


@pytest.mark.parametrize("name", ["stamp_core", "stamp_core.figures"])
def test_the_package_leaves_nothing_of_its_imports_to_the_collector(name: str) -> None:
    code = f"import gc, {name}; print(gc.isenabled(), len(gc.get_objects()), gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    enabled, searched, kept = done.stdout.split()
    assert enabled == "True"
    assert int(searched) < int(kept) / 100
