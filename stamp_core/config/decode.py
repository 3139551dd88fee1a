"""Checked reading: plain values become frozen dataclasses; an error names the key in one line."""

import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
RENAMED = {  # former keys and values with their new names: the first that is valid in the place
    "align_batch": ("align_batch_size",),
    "align_rate": ("align_lr",),
    "alpha": ("mixstyle_alpha", "fedssi_alpha"),
    "alphas": ("sweeps",),
    "at_once": ("micro_batch_size",),
    "authors": ("softmax_sgd",),
    "batch": ("batch_size",),
    "beside": ("baselines",),
    "budgets": ("sweeps",),
    "candidates": ("batch_size",),
    "direct": ("direct_term",),
    "ft_steps": ("ft_epochs",),
    "inner": ("inner_steps",),
    "kappa": ("feddbe_kappa",),
    "kept": ("batch_candidates",),
    "key": ("keys",),
    "like": ("extends",),
    "lr": ("lr_product",),
    "meta_rate": ("meta_lr",),
    "most": ("max_epochs",),
    "neumann_rate": ("neumann_lr",),
    "observe": ("diagnostics",),
    "outer": ("outer_steps",),
    "past": ("past_weight",),
    "per_class": ("exemplars_per_class",),
    "pictures": ("images",),
    "rate": ("lr", "lr_product"),
    "rate_proxy": ("proxy_lr",),
    "rate_weights": ("weights_lr",),
    "rates_rate": ("hyper_lr",),
    "reference_rate": ("reference_lr",),
    "rule": ("selection",),
    "spread": ("smoothing",),
    "squeeze_rate": ("squeeze_lr",),
    "statistics": ("statistics_weight",),
    "step": ("server_lr", "lr"),
    "steps_of_selection": ("selection_steps",),
    "together": ("group_size",),
    "train_rate": ("train_lr",),
}


class ParameterError(ValueError):
    """An invalid parameter: the message names key and value, and says what is valid."""


def invalid(key: str, value: object, right: str) -> ParameterError:
    """The error for an invalid value: `key` is `value`; it must be `right`."""
    return ParameterError(f"{key} is {value!r}; it must be {right}")


def require_at_least(holder: object, bound: float, *names: str) -> None:
    """Refuse fields of `holder` below `bound` (or not a number)."""
    for name in names:
        if not getattr(holder, name) >= bound:
            raise invalid(name, getattr(holder, name), f"at least {bound}")


def require_above(holder: object, bound: float, *names: str) -> None:
    """Refuse fields of `holder` not above `bound`."""
    for name in names:
        if not getattr(holder, name) > bound:
            raise invalid(name, getattr(holder, name), f"above {bound}")


def require_fraction(holder: object, *names: str) -> None:
    """Refuse fields of `holder` outside [0, 1)."""
    for name in names:
        if not 0 <= getattr(holder, name) < 1:
            raise invalid(name, getattr(holder, name), "at least 0 and below 1")


def require_inside(holder: object, *names: str) -> None:
    """Refuse relative paths in fields of `holder` that lead out of their folder by '..'."""
    for name in names:
        value = getattr(holder, name)
        for path in [value] if isinstance(value, str) else value or ():
            if ".." in Path(path).parts and not Path(path).is_absolute():
                raise invalid(name, path, "a path without '..', or an absolute one")


def unknown_name(key: str, name: object, known: Iterable[str]) -> ParameterError:
    """The error for an unknown name, with its new name or the nearest known one."""
    names = sorted(map(str, known))
    new = next((new for new in RENAMED.get(str(name), ()) if new in names), None)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"it is now {new!r}; " if new else f"did you mean {near[0]!r}? " if near else ""
    return ParameterError(f"{key} {name!r} is unknown; {hint}known: {', '.join(names)}")


def build(cls: type[_T], values: object, where: str) -> _T:
    """An instance of the dataclass `cls` from a mapping read at `where` in params.yaml."""
    if not isinstance(values, Mapping):
        raise invalid(where, values, "a block of keys")
    assert is_dataclass(cls)
    known = {each.name: each for each in fields(cls)}
    for key in values:
        if key not in known:
            raise unknown_name(f"{where}:", key, known)
    for name, each in known.items():
        if name not in values and each.default is each.default_factory is MISSING:
            raise ParameterError(f"{where}.{name} is missing")
    hints = get_type_hints(cls)
    checked = {key: convert(value, hints[key], f"{where}.{key}") for key, value in values.items()}
    try:
        return cls(**checked)
    except ParameterError as error:
        raise ParameterError(f"{where}.{error}") from None


def convert(value: object, hint: Any, where: str) -> object:
    """`value` as the type `hint`; text is never converted to a number, nor "yes" to a bool."""
    options = get_args(hint)
    if hint is Any:
        return value
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
        return tuple(convert(item, options[0], where) for item in value)
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
    try:
        number = float(value) if isinstance(value, str) and hint in (int, float) else math.nan
    except ValueError:
        return words
    if not math.isfinite(number) or (hint is int and not number.is_integer()):
        return words
    text = re.sub("^(-?[0-9]+)e", "\\1.0e", repr(hint(number)))  # to YAML 1.1, 1e-05 is text
    return f"{words}, written without quotes as {text}"


def to_plain(value: object) -> Any:
    """`value` with dataclasses and tuples turned into what JSON can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value
