"""Modules found by name, one file each; without the workbench its names do not exist."""

import importlib
import pkgutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

METHODS = ("stamp_core.methods", "workbench.methods")
SELECTION = ("stamp_core.coresets.selection", "workbench.selection")
SOURCES = ("stamp_core.data.sources", "workbench.sources")


def find_modules(packages: tuple[str, ...]) -> dict[str, str]:
    """The dotted name of each module or package in some packages, by its own name."""
    found: dict[str, str] = {}
    for package in packages:
        for name in _names(package):
            if name in found:
                raise ImportError(f"{found[name]} and {package}.{name}: rename one of them")
            if name != "base":  # what the modules of a folder share
                found[name] = f"{package}.{name}"
    return found


def load_module(packages: tuple[str, ...], name: str) -> ModuleType:
    """The module `name` of some packages."""
    return importlib.import_module(find_modules(packages)[name])


def more_elsewhere() -> str:
    """What an error for an unknown name says where the workbench, which has more, is missing."""
    missing = "; more are in the workbench, which is not installed: pip install ./workbench"
    return "" if find_spec("workbench") else missing


def _names(package: str) -> list[str]:
    """The names of a package's modules; none if it is not installed."""
    if find_spec(package.partition(".")[0]) is None:
        return []
    folders = importlib.import_module(package).__path__
    return [name for each in folders for name in _in_folder(each, Path(each).stat().st_mtime_ns)]


@cache
def _in_folder(folder: str, changed: int) -> list[str]:
    """The names of the modules in a folder, read again when it has changed."""
    return [each.name for each in pkgutil.iter_modules([folder])]
