"""STAMP Workbench: federated continual learning, reproducible from params.yaml to the figures."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stamp_core.core.arithmetic import pin

if TYPE_CHECKING:
    from stamp_core.api import *  # noqa: F403


pin()  # before anything imports numpy or torch


def __getattr__(name: str) -> Any:
    """A name of `stamp_core.api`, which is imported, and torch with it, when one is first used."""
    return getattr(import_module("stamp_core.api"), name)


def __dir__() -> list[str]:
    """The names that an editor completes."""
    return [*globals(), *import_module("stamp_core.api").__all__]
