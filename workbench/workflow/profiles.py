"""Profiles: files that say what runs. They share the settings and the presets of methods.

params.yaml says what runs by default; quick.yaml, paper.yaml, cifar100.yaml, pretrained.yaml,
protocols.yaml, privacy.yaml and studies.yaml in params/ are other profiles of the same form.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stamp_core.config.decode import ParameterError, invalid, unknown_name
from stamp_core.config.params import (
    CHOSEN,
    FILES,
    Params,
    parameter_file,
    parse_seeds,
    read_params,
    read_yaml,
    require_name,
    with_values,
)
from stamp_core.core.paths import PARAMS

REQUIRED = ("grid", "ablation", "sweeps")  # blocks of a profile
OWN_PAGES = ("tour",)  # blocks that a page of their own shows
BLOCKS = {*REQUIRED, *OWN_PAGES, CHOSEN}
MORE = "more_"  # begins the name of a further grid
AXES = ("setting", "method", "seeds")  # of a grid
DEFAULT, QUICK, PAPER = "default", "quick", "paper"
# with a pipeline each, and values of their own
CIFAR100, PRETRAINED = "cifar100", "pretrained"
PROTOCOLS, PRIVACY, STUDIES = "protocols", "privacy", "studies"
OWN = CIFAR100, PRETRAINED, PROTOCOLS, PRIVACY, STUDIES
PROFILES = {DEFAULT: "params.yaml"} | {name: f"params/{name}.yaml" for name in (QUICK, PAPER, *OWN)}
PAGES = ("grid", "comparison", "ablation", *OWN_PAGES)  # parts of a profile's grid


def read_profile(profile: str = DEFAULT, root: Path = PARAMS.parent) -> dict[str, Any]:
    """The blocks of a profile with all settings and methods, as plain values.

    The key "file" names the profile's file, for messages. Values of presets that the profile has
    chosen for all settings are in "methods", those for one setting alone in "chosen".
    """
    if profile not in PROFILES:
        raise unknown_name("profile", profile, PROFILES)
    file = PROFILES[profile]
    params = {**_read_blocks(file, root), **read_params(root), "file": file}
    chosen = params.pop(CHOSEN, {})
    for name in [name for name in chosen if name not in params["settings"]]:
        params = with_values(params, "methods", name, chosen.pop(name))
    return {**params, CHOSEN: chosen} if chosen else params


def _read_blocks(file: str, root: Path) -> dict[str, Any]:
    """The blocks of a profile's file, each of which is known and a block of keys."""
    blocks = read_yaml(parameter_file(root, file))
    for key in blocks:
        if key in FILES:
            raise ParameterError(f"{file}: {key} belongs into {FILES[key]}")
        if not (key in BLOCKS or is_trained(key)):
            raise unknown_name(f"{file}:", key, {*BLOCKS, f"{MORE}..."})
    for key in (*REQUIRED, *blocks):
        if not isinstance(blocks.get(key), dict):
            raise invalid(f"{file}: {key}", blocks.get(key), "a block of keys")
    for name in blocks["sweeps"]:  # names of folders, and words of DVC's commands
        require_name(f"{file}: sweeps.", name)
    return blocks


def is_trained(block: str) -> bool:
    """Whether a block is the grid, or comes to it, as `more_seeds`."""
    return block == "grid" or block.startswith(MORE)


def check_names(params: Params) -> None:
    """Validate that names and seeds of grids are single words of a command."""
    for grid in (name for name in params if name in OWN_PAGES or is_trained(name)):
        for axis, words in _check_axes(params, grid, AXES).items():
            for word in words:
                _check_word(f"{params['file']}: {grid}.", axis, word)


def _check_word(where: str, axis: str, word: Any) -> None:
    if axis != "seeds":
        return require_name(f"{where}{axis}", word)
    try:
        parse_seeds(word)
    except ParameterError as error:
        raise ParameterError(f"{where}{error}") from None


def expand_grid(page: str, params: Params) -> Iterator[tuple[str, str, str]]:
    """Setting, method and range of seeds of every experiment of a page.

    "grid" is all that is trained, "comparison" that without the variants of the ablation,
    "ablation" its baselines and variants, "tour" the block of this name.
    "comparison.digits" is one setting of a page.
    """
    page, _, only = page.partition(".")
    if page not in PAGES:
        raise unknown_name("page", page, PAGES)
    blocks = [page] if page in OWN_PAGES else list(filter(is_trained, params))
    grids = [_check_axes(params, name, AXES) for name in blocks]
    settings = dict.fromkeys(setting for grid in grids for setting in grid["setting"])
    if only and only not in settings:
        raise unknown_name(f"{params['file']}: {page}.setting", only, settings)
    ablation = _check_axes(params, "ablation", ("baselines", "method"))
    variants = {*ablation["method"]}
    varied = {each for grid in grids if variants & {*grid["method"]} for each in grid["setting"]}
    for grid in grids:
        for run in itertools.product(grid["setting"], grid["method"], map(str, grid["seeds"])):
            if run[0] == (only or run[0]) and _is_shown(page, run, varied, ablation):
                yield run


def _is_shown(
    page: str, run: tuple[str, str, str], varied: set[str], ablation: Mapping[str, list[str]]
) -> bool:
    """Whether a page has a run; baselines alone, without a variant, show no part of STAMP."""
    setting, method, _ = run
    variant = method in ablation["method"]
    if page == "comparison":
        return not variant
    if page == "ablation":
        return variant or (setting in varied and method in ablation["baselines"])
    return True


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
