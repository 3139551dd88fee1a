"""This process: who watches it, whose end it follows, and imports without garbage collection."""

import gc
import importlib.util
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FORMS = ("bar", "lines", "none")  # of progress


def progress_form() -> str:
    """`bar`, `lines` or `none`, as STAMP_PROGRESS says; else a bar if somebody watches."""
    if (form := os.environ.get("STAMP_PROGRESS")) is not None:
        if form not in FORMS:
            raise ValueError(f"STAMP_PROGRESS is {form!r}: it must be one of {', '.join(FORMS)}")
        return form
    interactive = "ipykernel" in sys.modules or sys.stdout.isatty()
    interactive &= importlib.util.find_spec("tqdm") is not None
    return "bar" if interactive and "DVC_STAGE" not in os.environ else "lines"


@contextmanager
def progress_bar(form: str, **options: Any) -> Iterator[Any]:
    """A context with a bar of tqdm, which the other forms do not need: there it is None."""
    if form != "bar":
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(**options) as bar:
        yield bar


def follow_parent() -> None:
    """End this process when its parent ends: a killed parent cannot stop its children."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    """Wait until the parent has ended, then end this process at once."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A context for imports whose objects the garbage collector never traverses.

    Torch and matplotlib create a million objects, none of them garbage. Python would traverse them
    while modules load and when it exits: a kernel that imports this package ends a second earlier.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
