"""No option that a preset sets is without effect: each is changed, and something must change."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import small

from stamp_core.config.decode import ParameterError, build, to_plain
from stamp_core.config.params import read_params
from stamp_core.methods.base.method import DivergedError
from stamp_core.methods.base.registry import read_preset, resolve_preset

PARAMS = read_params()
KINDS = {preset: resolve_preset(preset, PARAMS)[0] for preset in PARAMS["methods"]}
FIRST = list({kind: preset for preset, kind in reversed(KINDS.items())}.values())  # of each method
PRESETS = [*FIRST, *(f"stamp_{name}" for name in ("round", "code", "paper")), "temporal_every_4"]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"split": {"images_per_class": 16, "clients": 2}, "training": {"epochs": 2}},
    "returning": {
        "split": {"images_per_class": 12, "cycles": 2, "clients": 2},
        "training": {"epochs": 2},
    },
    "uneven": {},
    "norm": {
        "split": {"images_per_class": 12},
        "training": {"epochs": 2, "rounds": 3, "participation": 0.75},
        "network": small.BATCH_NORM,
    },
}
SHORTER = ("fedcil", "glfc", "lander", "srfdil", "stsa", "target")  # large networks take time
SCHEDULE = "as published, the learning rate decays after more rounds than there are"
WITHOUT_EFFECT = {
    ("fedomg", "spatial.softmax.decay"): SCHEDULE,
    ("stamp_code", "temporal.softmax.decay"): SCHEDULE,
    ("gradma", "beta2"): "acts where an update conflicts with that of a client long absent",
}


def options(block: Mapping[str, Any], params: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    hints = get_type_hints(type(params))
    for name, value in block.items():
        if isinstance(value, dict) and is_dataclass(getattr(params, name)):
            inner = options(value, getattr(params, name))
            yield from (((name, *path), hint) for path, hint in inner)
        else:
            yield (name,), hints[name]


def values(path: tuple[str, ...], value: Any, hint: Any) -> list[Any]:
    kinds = [hint, *get_args(hint)]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words += ["uniform", "herding"] if path[-1] == "selection" else []
    if words:
        return [word for word in words if word != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int) and float not in kinds:
        return [2 * value, value // 2, value + 1, 1, 0]
    if isinstance(value, int | float):
        return [2 * value, value / 2, value + 1, 0.5, 0.0]
    others = [kind() for kind in get_args(hint) if is_dataclass(kind)]
    return [*others, *(kind(1) for kind in get_args(hint) if kind in (int, float))]


def changed(params: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    inner = changed(getattr(params, name), tuple(rest), value) if rest else value
    return replace(params, **{name: inner})


@cache
def outcome(preset: str, configuration: str, path: tuple[str, ...], value: Any) -> str | None:
    """The digest of all that a run leaves; None if the value is not allowed."""
    kind, params = resolve_preset(preset, PARAMS)
    name = kind.__module__.rpartition(".")[2]
    shared = dict(CONFIGURATIONS[configuration])
    experiment = small.tiny(name, **shared)
    try:
        if name in SHORTER:
            params = replace(params, **small.PARTS[name])
        if path:  # what the limits of its type refuse is not allowed
            params = build(type(params), to_plain(changed(params, path, value)), "option")
        record = small.run(replace(experiment, params=params))
    except (ParameterError, DivergedError):
        return None
    digest = hashlib.sha256(repr(small.counted(record.history)).encode())
    for arrays in (record.weights, record.scores):
        for array in arrays.values():
            digest.update(array.tobytes())
    return digest.hexdigest()


def has_effect(preset: str, path: tuple[str, ...], hint: Any) -> bool:
    """Whether another value changes something in some configuration, or none is allowed."""
    value = resolve_preset(preset, PARAMS)[1]
    for name in path:
        value = getattr(value, name)
    allowed = False
    for configuration in CONFIGURATIONS:
        before = outcome(preset, configuration, (), None)
        for other in values(path, value, hint):
            after = outcome(preset, configuration, path, other)
            allowed |= after is not None
            if before and after and after != before:
                return True
    return not allowed


@pytest.mark.parametrize("preset", PRESETS)
def test_every_option_of_a_preset_has_an_effect(preset):
    block = read_preset(preset, PARAMS)
    block.pop("kind", None)
    paths = options(block, resolve_preset(preset, PARAMS)[1])
    inert = {".".join(path) for path, hint in paths if not has_effect(preset, path, hint)}
    assert inert == {option for name, option in WITHOUT_EFFECT if name == preset}
