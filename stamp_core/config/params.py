"""The parameter files: settings, and presets of methods; each may extend another one."""

import copy
import re
from collections.abc import Mapping
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stamp_core.config.decode import ParameterError, build, invalid, unknown_name
from stamp_core.config.schema import Setting
from stamp_core.core.paths import PACKAGED, PARAMS

Params = Mapping[str, Any]
FILES = {"settings": "params/settings.yaml", "methods": "params/methods.yaml"}
SEEDS = 1000  # of a range, at most
CHOSEN = "chosen"  # values of presets that hold in one setting alone: setting -> preset -> key


def read_params(root: Path = PARAMS.parent) -> dict[str, Any]:
    """All settings and presets of methods, as plain values."""
    params = {section: read_yaml(parameter_file(root, name)) for section, name in FILES.items()}
    for section, blocks in params.items():  # names of folders, and words of DVC's commands
        for name in blocks:
            require_name(f"{FILES[section]}:", name)
    return params


def parameter_file(root: Path, name: str) -> Path:
    """A parameter file of a project; where it has none, that of the package."""
    own, packaged = root / name, PACKAGED / name
    return packaged if packaged.exists() and not own.exists() else own


def require_name(where: str, name: object) -> None:
    """Validate that a name has letters, digits and underscores only."""
    if not (isinstance(name, str) and re.fullmatch("[A-Za-z0-9_]+", name)):
        raise ParameterError(f"{where} {name!r} must be of letters, digits and underscores")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as plain values, read by the parser that DVC uses (YAML 1.2)."""
    if not path.is_file():  # a pipe would wait
        raise ParameterError(f"{path} is no file or does not exist; every parameter file is needed")
    try:
        values = copy.deepcopy(_parse(path.read_bytes()))
    except (OSError, YAMLError, ValueError) as error:
        raise ParameterError(f"{path} must be YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ParameterError(f"{path} must hold a block of keys, not {values!r}")
    return values


@lru_cache(maxsize=8)  # a figure looks up every method that it shows
def _parse(content: bytes) -> Any:
    return YAML(typ="safe").load(content)


def lineage(params: Params, section: str, name: str) -> dict[str, dict[str, Any]]:
    """The blocks of a setting or preset by name: what it extends, and last its own."""
    known, where = params.get(section) or {}, f"{FILES[section]}:"
    found: dict[str, dict[str, Any]] = {}
    below, base = name, name
    while base is not None:
        if not isinstance(base, str) or base not in known:
            raise unknown_name(where, base, known)
        if base in found:
            raise invalid(f"{where} {below}.extends", base, "another, which does not extend it")
        if not isinstance(known[base], Mapping | None):
            raise invalid(f"{where} {base}", known[base], "a block of keys")
        found[base] = dict(known[base] or {})
        below, base = base, found[base].pop("extends", None)
    return dict(reversed(found.items()))


def read_block(params: Params, section: str, name: str) -> dict[str, Any]:
    """A setting or preset, merged over the one that it extends."""
    return reduce(merge_blocks, lineage(params, section, name).values())


def merge_blocks(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tree `base`, updated recursively with the tree `changes`."""
    merged = {
        key: merge_blocks(base[key], value)
        for key, value in changes.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **changes, **merged}


def with_values(
    params: Params, section: str, name: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """A copy of the parameters with other values of a setting or preset, by key."""
    lineage(params, section, name)  # refuses an unknown one
    block = copy.deepcopy(dict(params[section][name] or {}))
    for key, value in values.items():
        set_value(block, key.split("."), value)
    return {**params, section: {**params[section], name: block}}


def set_value(block: dict[str, Any], key: list[str], value: object) -> None:
    """Put a value into a tree of blocks, making those that are missing."""
    for part in key[:-1]:
        if not isinstance(block.get(part), dict):
            block[part] = {}
        block = block[part]
    block[key[-1]] = value


def at_setting(params: Params, setting: str) -> dict[str, Any]:
    """The parameters with the values of presets that hold in this setting alone."""
    changed = {key: block for key, block in params.items() if key != CHOSEN}
    for name, values in params.get(CHOSEN, {}).get(setting, {}).items():
        changed = with_values(changed, "methods", name, values)
    return changed


def read_setting(name: str, params: Params | None = None) -> Setting:
    """The setting `name`, with all values checked."""
    block = read_block(params or read_params(), "settings", name)
    where = f"{FILES['settings']}: {name}"
    if "name" in block:
        raise invalid(f"{where}.name", block["name"], "absent: a setting's key is its name")
    return build(Setting, {"name": name, **block}, where)


def parse_seeds(text: str) -> list[int]:
    """The seeds of a range: '3' is [3], '0to2' is [0, 1, 2]."""
    bounds = re.fullmatch("([0-9]{1,9})(?:to([0-9]{1,9}))?", str(text))
    if not bounds or not 0 <= int(bounds[2] or bounds[1]) - int(bounds[1]) < SEEDS:
        right = f"a number such as '3' or a rising range such as '0to2', of at most {SEEDS}"
        raise invalid("seeds", text, right)
    return list(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
