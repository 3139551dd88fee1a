"""Waiting for other processes, but not for ever."""

import time
from collections.abc import Callable

import psutil

PATIENCE = 120  # seconds until something that must happen is given up


def wait_until(happened: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {patience} s"
        time.sleep(0.02)


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
