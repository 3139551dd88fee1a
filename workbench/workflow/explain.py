"""What a parameter means: its type, its default, and the comment beside it in the source."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from stamp_core.config.decode import unknown_name
from stamp_core.config.schema import Setting
from stamp_core.methods.base.registry import get_method, method_names


def explanations(key: str, params: Mapping[str, Any]) -> list[str]:
    """Lines on a parameter of settings or methods, whose key is like `spatial.kappa`."""
    places = {"settings": Setting} | {name: get_method(name).Params for name in method_names()}
    found: dict[str, list[str]] = {}
    known: list[str] = []
    for place, kind in places.items():
        for path, owner, each in parameters(kind):
            known.append(path)
            if path == key:
                found.setdefault(describe(owner, each), []).append(place)
    if not found:
        raise unknown_name("parameters:", key, dict.fromkeys(known))
    lines = [f"{key}: {text}\n  of {', '.join(where)}" for text, where in found.items()]
    used = [f"{name} {value!r}" for name, value in presets(key.split("."), params)]
    return [*lines, f"  set by {', '.join(used)}"] if used else lines


def parameters(kind: type, before: str = "") -> Iterator[tuple[str, type, Field[Any]]]:
    """The key, the class and the field of each parameter, those of inner blocks as well."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        path = before + each.name
        yield path, kind, each
        for inner in (hints[each.name], *get_args(hints[each.name])):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from parameters(inner, f"{path}.")


def describe(owner: type, each: Field[Any]) -> str:
    """The type, the default, and the comment beside a field or what its class is for."""
    source = owner if each.name in vars(owner).get("__annotations__", {}) else owner.__mro__[1]
    beside = re.search(
        rf"^    {each.name}:[^#\n]*# *(.*)$", inspect.getsource(source), re.MULTILINE
    )
    note = beside[1] if beside else (owner.__doc__ or "").splitlines()[0]
    default = "" if each.default is MISSING else f", default {each.default!r}"
    return f"{getattr(each.type, '__name__', each.type)}{default}; {note}"


def presets(path: list[str], params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Presets and settings that set a parameter, and their values."""
    for section in ("methods", "settings"):
        for name, block in params[section].items():
            value: Any = block
            for part in path:
                value = value.get(part, MISSING) if isinstance(value, Mapping) else MISSING
            if value is not MISSING:
                yield name, value
