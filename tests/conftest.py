"""With several workers (`pytest -n 2 --dist loadgroup`) a file is one worker's, and so are all
notebooks: they share a folder of results."""

import pytest


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of every test."""
    for item in items:
        name = "notebooks" if item.path.suffix == ".ipynb" else item.path.name
        item.add_marker(pytest.mark.xdist_group(name))
