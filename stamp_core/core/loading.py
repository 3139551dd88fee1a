"""Faster imports: torch and matplotlib create a million objects, none of them garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A context for imports whose objects the garbage collector never traverses.

    It would traverse them repeatedly while modules load and when Python exits. Without that, a
    kernel that imports this package ends more than a second earlier.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
