"""Checked reading: plain values become frozen dataclasses; an error names the key in one line."""

import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
RENAMED = {  # keys, values and presets of earlier versions that exist no longer
    "authors": "softmax_sgd",
    "sam_tam_pcs": "stamp",
    "mean_pcs": "stamp_mean",
    "sam_tam": "stamp_without_coreset",
    "sam_pcs": "stamp_without_temporal",
    "tam_pcs": "stamp_without_spatial",
    "sam": "spatial_only",
    "tam": "temporal_only",
    "replay_sam": "replay_spatial",
    "stamp_segments": "temporal_every_4",
    "stamp_segments_mean": "temporal_every_4_mean",
}


LISTED = 40  # known names that an error lists; of more the nearest, or three


class ParameterError(ValueError):
    """An invalid parameter: the message names key and value, and says what is valid."""


def invalid(key: str, value: object, right: str) -> ParameterError:
    """The error for an invalid value: `key` is `value`; it must be `right`."""
    return ParameterError(f"{key} is {value!r}; it must be {right}")


def require(holder: object, name: str, valid: bool, right: str) -> None:
    """Validate a field: unless `valid`, the error says that it must be `right`."""
    if not valid:
        value = getattr(holder, name)
        raise invalid(name, list(value) if isinstance(value, tuple) else value, right)


def unknown_name(key: str, name: object, known: Iterable[str], more: str = "") -> ParameterError:
    """The error for an unknown name, with its new name or the nearest known one."""
    names = sorted(map(str, known))
    few = len(names) <= LISTED
    near = difflib.get_close_matches(str(name), names, n=1 if few else 3)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if RENAMED.get(str(name)) in names:
        hint = f"it is now {RENAMED[str(name)]!r}; "
    shown = names if few else names[:3]
    rest = "" if few else f" and {len(names) - len(shown)} more"
    listed = "" if hint and not few else f"known: {', '.join(shown) or 'none'}{rest}"
    return ParameterError(f"{key} {name!r} is unknown; {hint}{listed}".rstrip("; ") + more)


def build(cls: type[_T], values: object, where: str) -> _T:
    """An instance of the dataclass `cls` from a mapping read at `where` in params.yaml."""
    if not isinstance(values, Mapping):
        raise invalid(where, values, "a block of keys")
    assert is_dataclass(cls)
    known = {each.name: each for each in fields(cls)}
    for key in (key for key in values if key not in known):
        raise unknown_name(f"{where}:", key, known)
    for name, each in known.items():
        if name not in values and each.default is each.default_factory is MISSING:
            raise ParameterError(f"{where}.{name} is missing")
    hints = get_type_hints(cls, include_extras=True)
    checked = {key: convert(value, hints[key], f"{where}.{key}") for key, value in values.items()}
    try:
        return cls(**checked)
    except ParameterError as error:
        raise ParameterError(f"{where}.{error}") from None


def convert(value: object, hint: Any, where: str) -> object:
    """`value` as the type `hint`; text is never converted to a number, nor "yes" to a bool."""
    options = get_args(hint)
    if type(value) is int and abs(value) >= 2**63:  # Python may not even print it
        raise ParameterError(f"{where} must be a number of at most 18 digits")
    if hint is Any:
        return value
    if get_origin(hint) is Annotated:
        checked: Any = convert(value, options[0], where)
        for limit in options[1:]:
            if not limit.holds(checked):
                raise invalid(where, checked, limit.right)
        return checked
    if get_origin(hint) is Literal:
        if value not in options:
            raise unknown_name(where, value, map(str, options))
        return value
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return convert(value, next(o for o in options if o is not type(None)), where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise invalid(where, value, "a list")
        return tuple(convert(item, options[0], f"{where}[{k}]") for k, item in enumerate(value))
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, where)
    if get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise invalid(where, value, "a block of keys")
        return value
    if hint is float and type(value) is int:
        return float(value)
    if not isinstance(value, hint) or (type(value) is bool and hint is not bool):
        raise invalid(where, value, _in_words(hint, value))
    if hint is float and not math.isfinite(value):
        raise invalid(where, value, "a finite number")
    return value


def _in_words(hint: type, value: object) -> str:
    """The value that a field of type `hint` needs, with the number that a quoted text contains."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    if not isinstance(value, str) or hint not in (int, float):
        return words
    with suppress(ValueError, OverflowError):  # no number, or an infinite one
        number = float(value)
        if int(number) == number or hint is float:
            text = re.sub("^(-?[0-9]+)e", "\\1.0e", repr(hint(number)))  # 1e-05: text to YAML 1.1
            return f"{words}, written without quotes as {text}"
    return words


def to_plain(value: object) -> Any:
    """`value` with dataclasses and tuples turned into what JSON can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value
