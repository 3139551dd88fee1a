"""Methods, found by their file names, and the presets of their parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from stamp_core.config.decode import build, unknown_name
from stamp_core.config.params import FILES, Params, lineage, read_block, with_values
from stamp_core.config.schema import Setting
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


def resolve_preset(name: str, params: Params) -> tuple[type[Method], Any]:
    """The method and its checked parameters for the preset `name`."""
    preset = read_preset(name, params)
    method = get_method(str(preset.pop("kind")))
    return method, build(method.Params, preset, f"{FILES['methods']}: {name}")


def read_preset(name: str, params: Params) -> dict[str, Any]:
    """The values of the preset `name` and of those that it extends, with its kind."""
    presets = with_all_methods(params)["methods"]
    first, *_ = lineage({"methods": presets}, "methods", name)  # whose kind is its name by default
    return {"kind": first, **read_block({"methods": presets}, "methods", name)}


def override(
    params: Params, method: str, values: Mapping[str, Any], setting: str = ""
) -> dict[str, Any]:
    """A copy of `params` with other values of a preset, and of the setting: `is_of_setting`."""
    of_setting = {key: value for key, value in values.items() if is_of_setting(key)}
    of_preset = {key: value for key, value in values.items() if key not in of_setting}
    _check_keys(params, method, of_preset)
    changed = with_values(with_all_methods(params), "methods", method, of_preset)
    if not setting:
        return changed
    short = {key.removeprefix("setting."): value for key, value in of_setting.items()}
    return with_values(changed, "settings", setting, short)


def _check_keys(params: Params, method: str, keys: Iterable[str]) -> None:
    """Validate that keys begin with a parameter of the method; where not, settings' count too."""
    own = {
        each.name for each in fields(get_method(str(read_preset(method, params)["kind"])).Params)
    }
    for first in (key.partition(".")[0] for key in keys):
        if first not in {"kind", *own}:
            known = {*own, *(each.name for each in fields(Setting))} - {"name"}
            raise unknown_name(f"{FILES['methods']}: {method}:", first, known)


def is_of_setting(key: str) -> bool:
    """Whether a key such as `training.lr` or `setting.training.lr` is one of settings."""
    return key.partition(".")[0] in {"setting", *(each.name for each in fields(Setting))}


def with_all_methods(params: Params) -> dict[str, Any]:
    """The parameters; a method whose defaults are wanted needs no preset, its name is enough."""
    return {**params, "methods": dict.fromkeys(method_names()) | (params.get("methods") or {})}
