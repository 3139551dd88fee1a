"""Methods, found by their file names, and the presets of their parameters."""

import copy
from collections.abc import Mapping
from typing import Any

from stamp_core.config.decode import build, invalid, unknown_name
from stamp_core.config.params import FILES, read_block, set_value
from stamp_core.core.plugins import METHODS, find_modules, load_module, more_elsewhere
from stamp_core.methods.base.method import Method


def method_names() -> list[str]:
    """The names of all methods: one per file or package of METHODS."""
    return sorted(find_modules(METHODS))


def get_method(kind: str) -> type[Method]:
    """The method of the file or package `kind`: the one subclass of Method defined there."""
    if kind not in method_names():
        raise unknown_name(f"{FILES['methods']}: kind", kind, method_names(), more_elsewhere())
    module = load_module(METHODS, kind)
    classes = [item for item in vars(module).values() if isinstance(item, type)]
    (method,) = (c for c in classes if issubclass(c, Method) and c.__module__ == module.__name__)
    return method


def resolve_preset(name: str, params: Mapping[str, Any]) -> tuple[type[Method], Any]:
    """The method and its checked parameters for the preset `name`."""
    preset = read_preset(name, params)
    method = get_method(str(preset.pop("kind", name)))
    return method, build(method.Params, preset, f"{FILES['methods']}: {name}")


def read_preset(
    name: str, params: Mapping[str, Any], derived: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The preset `name` merged over the one that it `extends`; `derived` are those that extend it.

    A method whose defaults are wanted needs no preset: its file's name is enough.
    """
    if name in derived:
        key = f"{FILES['methods']}: {derived[0]}.extends"
        raise invalid(key, name, "a preset that does not extend itself")
    if name in method_names() and name not in (params.get("methods") or {}):
        return {}
    preset = read_block(params, "methods", name)
    if "like" in preset:  # a key of earlier versions
        raise unknown_name(f"{FILES['methods']}: {name}:", "like", ["extends", "kind"])
    base = preset.pop("extends", None)
    if base is None:
        return preset
    inherited = read_preset(str(base), params, (*derived, name))
    return merge_blocks({"kind": str(base), **inherited}, preset)


def override(
    params: Mapping[str, Any], method: str, values: Mapping[str, Any], setting: str = ""
) -> dict[str, Any]:
    """A copy of `params` with other values of a preset, by key, e.g. `spatial.kappa`.

    Keys that begin with `setting.` are those of the setting.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(params))
    preset = changed["methods"][method] = read_preset(method, changed)
    whole = dict[str, Any]()
    if setting:
        whole = changed["settings"][setting] = read_block(changed, "settings", setting)
    for key, value in values.items():
        first, *path = key.split(".")
        if first == "setting" and path:
            set_value(whole, path, value)
        else:
            set_value(preset, [first, *path], value)
    return changed


def merge_blocks(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tree `base`, updated recursively with the tree `changes`."""
    merged = {
        key: merge_blocks(base[key], value)
        for key, value in changes.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **changes, **merged}
