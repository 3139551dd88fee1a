"""The order of all tests."""

import gc
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

import stamp_core  # noqa: F401  # pins the arithmetic before tests import numpy

# `make test-cluster` and `make test-federation`
NEEDED = {"cluster": "ray", "federation": "flwr"}
collect_ignore = [folder for folder, package in NEEDED.items() if not find_spec(package)]


def pytest_configure(config: pytest.Config) -> None:
    """Take interrupts: a shell's `&` has them ignored, also by children, which would go on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what is there now out of garbage collections: a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the pipeline first, then the notebooks and long files: none should be the last to run."""
    items.sort(key=lambda item: _turn(item.path))


def _turn(path: Path) -> int:
    """When a file's tests run, counted from 0."""
    if path.name == "test_pipeline.py":
        return 0
    early = path.parent.name in ("pipeline", "ops", "notebooks") or path.name == "test_methods.py"
    return 1 if early else 2
