"""Modules found by name, one file each; without the workbench its names do not exist."""

import importlib
import pkgutil
from importlib.util import find_spec
from types import ModuleType

METHODS = ("stamp_core.methods", "workbench.methods")
SELECTION = ("stamp_core.coresets.selection", "workbench.selection")
SOURCES = ("stamp_core.data.sources", "workbench.sources")
EXECUTORS = ("workbench.workflow",)  # those that end in _executor
SHARED = "base"  # what the modules of a folder share


def find_modules(packages: tuple[str, ...]) -> dict[str, str]:
    """The dotted name of each module or package in some packages, by its own name."""
    found: dict[str, str] = {}
    for package in packages:
        for each in pkgutil.iter_modules(_folders(package)):
            if each.name in found:
                raise ImportError(
                    f"{found[each.name]} and {package}.{each.name} have one name: rename the second"
                )
            if each.name != SHARED:
                found[each.name] = f"{package}.{each.name}"
    return found


def load_module(packages: tuple[str, ...], name: str) -> ModuleType:
    """The module `name` of some packages."""
    return importlib.import_module(find_modules(packages)[name])


def more_elsewhere() -> str:
    """What an error for an unknown name says where the workbench, which has more, is missing."""
    if find_spec("workbench"):
        return ""
    return "; more are in the workbench, which is not installed: pip install stamp-workbench"


def _folders(package: str) -> list[str]:
    """The folders of a package; none if it is not installed."""
    installed = find_spec(package.partition(".")[0])
    return list(importlib.import_module(package).__path__) if installed else []
