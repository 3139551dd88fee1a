"""What a parameter means: its type with its limits, its default, and the comment in the source."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from stamp_core.config.decode import unknown_name
from stamp_core.config.params import Params
from stamp_core.config.schema import Setting
from stamp_core.core.plugins import SOURCES, find_modules, load_module
from stamp_core.coresets.selection.base import NoOptions, load_rule, selection_rules
from stamp_core.data.images import ImageOptions
from stamp_core.methods.base.registry import get_method, method_names

Parameter = tuple[type, Field[Any], Any]  # the class that has it, its field and its type


def explanations(key: str, params: Params) -> list[str]:
    """Lines on a parameter of settings or methods, whose key is like `spatial.kappa`."""
    found: dict[str, list[str]] = {}
    known: list[str] = []
    for place, before, kind in places():
        for path, parameter in parameters(kind, before):
            known.append(path)
            if path == key:
                found.setdefault(describe(*parameter), []).append(place)
    if not found:
        raise unknown_name("parameters:", key, dict.fromkeys(known))
    lines = [f"{key}: {text}\n  of {', '.join(where)}" for text, where in found.items()]
    used = [f"{name} {value!r}" for name, value in presets(key.split("."), params)]
    return [*lines, f"  set by {', '.join(used)}"] if used else lines


def places() -> Iterator[tuple[str, str, type]]:
    """What has parameters: its name, what their keys begin with, and the dataclass."""
    yield "settings", "", Setting
    for name in find_modules(SOURCES):
        yield name, "data.", getattr(load_module(SOURCES, name), "Options", ImageOptions)
    for name in method_names():
        yield name, "", get_method(name).Params
    for name in selection_rules():
        yield name, "memory.options.", getattr(load_rule(name), "Options", NoOptions)


def parameters(kind: type, before: str = "") -> Iterator[tuple[str, Parameter]]:
    """The key of each parameter with its class, field and type, those of inner blocks as well."""
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        hint = hints[each.name]
        yield before + each.name, (kind, each, hint)
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from parameters(inner, f"{before}{each.name}.")


def describe(kind: type, each: Field[Any], hint: Any) -> str:
    """Type, default and meaning of a parameter."""
    default = "" if each.default is MISSING else f", default {each.default!r}"
    return f"{type_text(hint)}{default}; {meaning(kind, each, hint)}"


def type_text(hint: Any) -> str:
    """A type as the parameter files have it, with its limits."""
    if get_origin(hint) is Annotated:
        base, *limits = get_args(hint)
        return " ".join([type_text(base), *(limit.right for limit in limits)])
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(type_text, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list of {type_text(get_args(hint)[0])}"
    return "null" if hint is NoneType else getattr(hint, "__name__", str(hint))


def meaning(kind: type, each: Field[Any], hint: Any) -> str:
    """The comment on a field, in the last class with one; of a block what its class is for."""
    for owner in kind.__mro__:
        if is_dataclass(owner) and (comment := comments(owner).get(each.name)):
            return comment
    blocks = [inner for inner in (hint, *get_args(hint)) if is_dataclass(inner)]
    return str(blocks[0].__doc__).splitlines()[0] if blocks else ""


@cache
def comments(owner: type) -> dict[str, str]:
    """The comment of each field of a class: on its line, or on the lines above it."""
    found, above = dict[str, str](), list[str]()
    for line in inspect.getsource(owner).splitlines():
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
            continue
        if field := re.match("    ([a-z_0-9]+): [^#]*(?:# (.*))?$", line):
            found[field[1]] = field[2] or " ".join(above)
        above = []
    return found


def presets(path: list[str], params: Params) -> Iterator[tuple[str, Any]]:
    """Presets and settings that set a parameter, and their values."""
    for section in ("methods", "settings"):
        for name, block in params[section].items():
            value: Any = block
            for part in path:
                value = value.get(part, MISSING) if isinstance(value, dict) else MISSING
            if value is not MISSING:
                yield name, value
