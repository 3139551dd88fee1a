"""The order of all tests, and the kernels in which notebooks run."""

import os
from contextlib import ExitStack

import pytest

from stamp_core.pipeline.kernels import serve_kernels


def pytest_configure(config: pytest.Config) -> None:
    """Serve kernels to the notebooks: each would import torch and seaborn again."""
    if not hasattr(config, "workerinput"):  # the processes of xdist inherit the environment
        stack = ExitStack()
        config.add_cleanup(stack.close)
        os.environ.update(stack.enter_context(serve_kernels()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the pipeline first, then the notebooks: no long file should be the last one to run."""
    items.sort(key=lambda item: item.path.parent.name not in ("pipeline", "notebooks"))
