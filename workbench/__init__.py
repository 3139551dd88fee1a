"""The workbench around stamp_core: rival methods, figures, studies, and the pipeline of DVC."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import stamp_core  # noqa: F401  # pins the arithmetic, before numpy

if TYPE_CHECKING:
    from workbench.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """A name of `workbench.api`, which is imported, and torch with it, when one is first used."""
    if name.startswith("__"):  # asked for by Python itself
        raise AttributeError(name)
    return getattr(import_module("workbench.api"), name)


def __dir__() -> list[str]:
    """The names that an editor completes."""
    return [*globals(), *import_module("workbench.api").__all__]
