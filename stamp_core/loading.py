"""Imports in less time: torch and matplotlib bring a million objects, and none is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A block of imports whose objects the garbage collector never looks at.

    Python would search them again and again while modules load, and several times as it ends:
    without that, a kernel with this package lives more than a second less.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
