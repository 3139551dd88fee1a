"""Processes that end with their parent."""

import multiprocessing
import os
import threading


def follow_parent() -> None:
    """End this process when its parent ends: a killed parent cannot stop its children."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    """Wait until the parent has ended, then end this process at once."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
