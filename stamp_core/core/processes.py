"""Processes: whether somebody watches this one, and an end together with its parent."""

import multiprocessing
import os
import sys
import threading


def is_interactive() -> bool:
    """Whether this is JupyterLab or a terminal, and no DVC stage; STAMP_PROGRESS overrides it."""
    if "STAMP_PROGRESS" in os.environ:
        return os.environ["STAMP_PROGRESS"] == "bar"
    return "DVC_STAGE" not in os.environ and ("ipykernel" in sys.modules or sys.stdout.isatty())


def follow_parent() -> None:
    """End this process when its parent ends: a killed parent cannot stop its children."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    """Wait until the parent has ended, then end this process at once."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
