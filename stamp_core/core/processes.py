"""Processes: how this one shows its progress, and an end together with its parent."""

import multiprocessing
import os
import sys
import threading

PROGRESS = ("bar", "lines", "none")


def progress_mode() -> str:
    """How progress is shown: as $STAMP_PROGRESS says, or for whoever watches.

    `bar` is a bar that moves: the default in JupyterLab and in a terminal. `lines` is a line now
    and then: the default in logs and in the stages of DVC. `none` is nothing at all.
    """
    chosen = os.environ.get("STAMP_PROGRESS")
    if chosen is None:
        watched = "ipykernel" in sys.modules or sys.stdout.isatty()
        return "bar" if watched and "DVC_STAGE" not in os.environ else "lines"
    if chosen not in PROGRESS:
        raise ValueError(f"STAMP_PROGRESS is {chosen!r}; it must be one of {', '.join(PROGRESS)}")
    return chosen


def follow_parent() -> None:
    """End this process when its parent ends: a killed parent cannot stop its children."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    """Wait until the parent has ended, then end this process at once."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
