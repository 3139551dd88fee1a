"""The parameter files: what runs (a profile), settings and presets of methods.

params.yaml says what runs by default; quick.yaml, paper.yaml, cifar100.yaml, protocols.yaml,
privacy.yaml and studies.yaml in params/ are other profiles of the same form. All of them use
params/settings.yaml and params/methods.yaml.
"""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stamp_core.config.decode import ParameterError, build, invalid, unknown_name
from stamp_core.config.schema import Setting
from stamp_core.core.paths import PACKAGED, PARAMS

Params = Mapping[str, Any]
FILES = {"settings": "params/settings.yaml", "methods": "params/methods.yaml"}
GRIDS = ("grid", "more_seeds")  # blocks that are trained
REQUIRED = ("grid", "ablation", "sweeps")  # blocks of a profile
OWN_PAGES = ("tour",)  # blocks that a page of their own shows
CHOSEN = "chosen"  # the block of a profile's own values of presets, chosen on its settings
BLOCKS = {*REQUIRED, *GRIDS, *OWN_PAGES, CHOSEN}
AXES = ("setting", "method", "seeds")  # of a grid
DEFAULT, QUICK, PAPER = "default", "quick", "paper"
# with a pipeline each, and values of their own
OWN = CIFAR100, PROTOCOLS, PRIVACY, STUDIES = "cifar100", "protocols", "privacy", "studies"
PROFILES = {DEFAULT: "params.yaml"} | {name: f"params/{name}.yaml" for name in (QUICK, PAPER, *OWN)}
PAGES = ("grid", "comparison", "ablation", *OWN_PAGES)  # parts of a profile's grid


def read_params(profile: str = DEFAULT, root: Path = PARAMS.parent) -> dict[str, Any]:
    """The blocks of a profile with all settings and methods, as plain values.

    The key "file" names the profile's file, for messages.
    """
    if profile not in PROFILES:
        raise unknown_name("profile", profile, PROFILES)
    file = PROFILES[profile]
    blocks = read_yaml(parameter_file(root, file))
    for key in blocks:
        if key in FILES:
            raise ParameterError(f"{file}: {key} belongs into {FILES[key]}")
        if key not in BLOCKS:
            raise unknown_name(f"{file}:", key, BLOCKS)
    for key in (*REQUIRED, *blocks):
        if not isinstance(blocks.get(key), dict):
            raise invalid(f"{file}: {key}", blocks.get(key), "a block of keys")
    shared = {section: read_yaml(parameter_file(root, name)) for section, name in FILES.items()}
    for section in (*shared, "sweeps"):  # names of folders, and words of DVC's commands
        for name in {**blocks, **shared}[section]:
            require_name(file_of({"file": file}, section), name)
    chosen = blocks.pop(CHOSEN, {})
    everywhere = {name: chosen[name] for name in chosen.keys() - shared["settings"].keys()}
    if at_settings := {name: chosen[name] for name in chosen.keys() - everywhere.keys()}:
        blocks[CHOSEN] = at_settings
    return _with_values({**blocks, **shared, "file": file}, everywhere)


def at_setting(params: Params, setting: str) -> dict[str, Any]:
    """The parameters with the values of presets that the profile has chosen for a setting alone."""
    others = {key: block for key, block in params.items() if key != CHOSEN}
    return _with_values(others, params.get(CHOSEN, {}).get(setting, {}))


def _with_values(params: Params, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The parameters with other values of presets, by key."""
    methods = dict(params["methods"])
    for name, values in chosen.items():
        preset = methods[name] = copy.deepcopy(read_block(params, "methods", name))
        for key, value in values.items():
            set_value(preset, key.split("."), value)
    return {**params, "methods": methods}


def parameter_file(root: Path, name: str) -> Path:
    """A parameter file of a project; where it has none, that of the installed package if any."""
    own, packaged = root / name, PACKAGED / name
    return packaged if packaged.exists() and not own.exists() else own


def check_names(params: Params) -> None:
    """Validate that names and seeds of grids are single words of a command.

    `read_params` has validated the names of settings, methods and sweeps.
    """
    for grid in (*OWN_PAGES, *GRIDS):
        axes = _check_axes(params, grid, AXES) if grid in params else {}
        for axis, words in axes.items():
            for word in words:
                if axis == "seeds":
                    parse_seeds(word)
                else:
                    require_name(f"{params['file']}: {grid}.{axis}", word)


def require_name(where: str, name: object) -> None:
    """Validate that a name has letters, digits and underscores only."""
    if not (isinstance(name, str) and re.fullmatch("[A-Za-z0-9_]+", name)):
        raise ParameterError(f"{where} {name!r} must be of letters, digits and underscores")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as plain values, read by the parser that DVC uses (YAML 1.2)."""
    try:
        values = copy.deepcopy(_parse(path.read_bytes()))
    except FileNotFoundError:
        raise ParameterError(f"{path} does not exist; every parameter file is needed") from None
    except OSError as error:
        raise ParameterError(f"{path} must be a readable file: {error}") from None
    except YAMLError as error:
        raise ParameterError(f"{path} must be YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ParameterError(f"{path} must hold a block of keys, not {values!r}")
    return values


@lru_cache(maxsize=8)  # a figure looks up every method that it shows
def _parse(content: bytes) -> Any:
    return YAML(typ="safe").load(content)


def read_block(params: Params, section: str, name: str) -> dict[str, Any]:
    """A named block of settings, methods or sweeps."""
    known, where = params.get(section) or {}, file_of(params, section)
    if not isinstance(name, str) or name not in known:
        raise unknown_name(where, name, known)
    if not isinstance(known[name], Mapping | None):
        raise invalid(f"{where} {name}", known[name], "a block of keys")
    return dict(known[name] or {})


def set_value(block: dict[str, Any], key: list[str], value: object) -> None:
    """Put a value into a tree of blocks, making those that are missing."""
    for part in key[:-1]:
        if not isinstance(block.get(part), dict):
            block[part] = {}
        block = block[part]
    block[key[-1]] = value


def file_of(params: Params, section: str) -> str:
    """How messages name a section: its file, and the section where a file has several."""
    return f"{FILES[section]}:" if section in FILES else f"{params.get('file')}: {section}."


def read_setting(name: str, params: Params | None = None) -> Setting:
    """The setting `name`, with all values checked."""
    block = read_block(params or read_params(), "settings", name)
    where = f"{FILES['settings']}: {name}"
    if "name" in block:
        raise invalid(f"{where}.name", block["name"], "absent: a setting's key is its name")
    return build(Setting, {"name": name, **block}, where)


def parse_seeds(text: str) -> list[int]:
    """The seeds of a range: '3' is [3], '0to2' is [0, 1, 2]."""
    bounds = re.fullmatch("([0-9]+)(?:to([0-9]+))?", str(text))
    if not bounds or int(bounds[2] or bounds[1]) < int(bounds[1]):
        raise invalid("seeds", text, "a number such as '3' or a rising range such as '0to2'")
    return list(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))


def expand_grid(page: str, params: Params) -> Iterator[tuple[str, str, str]]:
    """Setting, method and range of seeds of every experiment of a page.

    "grid" is all that is trained, "comparison" that without the variants of the ablation,
    "ablation" its baselines and variants, "tour" the block of this name.
    "comparison.digits" is one setting of a page.
    """
    page, _, only = page.partition(".")
    if page not in PAGES:
        raise unknown_name("page", page, PAGES)
    blocks = [page] if page in OWN_PAGES else [name for name in GRIDS if name in params]
    grids = [_check_axes(params, name, AXES) for name in blocks]
    settings = dict.fromkeys(setting for grid in grids for setting in grid["setting"])
    if only and only not in settings:
        raise unknown_name(f"{params['file']}: {page}.setting", only, settings)
    ablation = _check_axes(params, "ablation", ("baselines", "method"))
    for grid in grids:
        methods = _methods_shown(page, grid["method"], ablation)
        for run in itertools.product(grid["setting"], methods, map(str, grid["seeds"])):
            if run[0] == (only or run[0]):
                yield run


def _methods_shown(page: str, methods: list[str], ablation: Mapping[str, list[str]]) -> list[str]:
    """Those of a grid's methods that a page shows."""
    variants = [method for method in methods if method in ablation["method"]]
    if page == "comparison":
        return [method for method in methods if method not in variants]
    if page == "ablation":  # baselines alone show no part of STAMP
        shown = {*ablation["baselines"], *variants} if variants else ()
        return [method for method in methods if method in shown]
    return methods


def _check_axes(params: Params, name: str, axes: tuple[str, ...]) -> dict[str, list[str]]:
    """The block `name`, checked: a list of names for each axis."""
    where, block = f"{params['file']}: {name}", params.get(name) or {}
    for key in block:
        if key not in axes:
            raise unknown_name(f"{where}:", key, axes)
    for axis in axes:
        values = block.get(axis)
        if not isinstance(values, list) or not all(isinstance(v, str | int) for v in values):
            raise invalid(f"{where}.{axis}", values, "a list of names")
    return dict(block)
