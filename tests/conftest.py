"""The order of all tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the pipeline first, then the notebooks: no long file should be the last one to run."""
    items.sort(key=lambda item: item.path.parent.name not in ("pipeline", "notebooks"))
