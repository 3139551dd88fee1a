"""Sweeps: one number at several values, all else equal; values that have records are not rerun.

Budgets are sweeps of how many pictures of a class are kept, one for each setting and coreset rule.
"""

import copy
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stamp_core import config, grid
from stamp_core.config import ParameterError, build, section, wrong
from stamp_core.experiments import Experiment, experiment
from stamp_core.paths import ROOT
from stamp_core.records import Record

SECTIONS = ("sweeps", "tiny_sweeps", "budgets", "tiny_budgets")  # of params.yaml
Shown = dict[str, list[Record]]  # the records behind each value, as params.yaml writes it


@dataclass(frozen=True)
class Sweep:
    """A row of params.yaml: sweeps."""

    label: str  # what the axis of its figure says
    setting: str
    method: str
    seeds: str
    keys: tuple[str, ...]  # of params.yaml, of this setting or this method; all get the same value

    def __post_init__(self) -> None:
        """Refuse keys that would change nothing."""
        config.seeds(self.seeds)
        places = (f"settings.{self.setting}.", f"methods.{self.method}.")
        for key in self.keys or ("",):
            if not key.startswith(places):
                raise wrong("keys", list(self.keys), f"a list of keys under {' or '.join(places)}")


@dataclass(frozen=True)
class Budgets:
    """A section of params.yaml: the same numbers of pictures for every rule."""

    setting: tuple[str, ...]
    method: tuple[str, ...]  # rows that differ in their rule
    beside: tuple[
        str, ...
    ]  # without a memory and with all pictures; `grid` or `ablation` trains them
    seeds: str
    per_class: Mapping[str, Any]  # of each setting, the numbers of pictures

    def __post_init__(self) -> None:
        """Refuse a setting without numbers."""
        for setting in self.setting:
            if not isinstance(self.per_class.get(setting), list):
                raise wrong(
                    f"per_class.{setting}", self.per_class.get(setting), "a list of numbers"
                )

    def blocks(self) -> dict[str, dict[str, Any]]:
        """A block of a sweep for each setting and method, as `sweeps` has them."""
        return {
            f"{setting}-{method}": {
                **{"label": "pictures kept of a class", "setting": setting, "method": method},
                **{"seeds": self.seeds, "keys": [f"methods.{method}.memory.per_class"]},
                "values": self.per_class[setting],
            }
            for setting in self.setting
            for method in self.method
        }


def budgets(params: Mapping[str, Any], of: str = "budgets") -> Budgets:
    """A section with budgets, checked."""
    found = build(Budgets, params[of], f"params.yaml: {of}")
    others = {method for each in ("grid", "ablation", "tiny") for method in params[each]["method"]}
    if missing := sorted(set(found.beside) - others):
        raise wrong(f"params.yaml: {of}.beside", missing, "in grid.method or ablation.method")
    return found


def blocks(params: Mapping[str, Any], of: str) -> dict[str, Any]:
    """The block of each sweep of a section."""
    return budgets(params, of).blocks() if of.endswith("budgets") else dict(params[of])


def read(name: str, params: Mapping[str, Any], of: str = "sweeps") -> tuple[Sweep, list[Any]]:
    """The sweep `name` of a section of params.yaml, checked, and its values."""
    where = f"params.yaml: {of}.{name}"
    block = section({of: blocks(params, of)}, of, name)
    values = block.pop("values", None)
    if not isinstance(values, list) or not values:
        raise wrong(f"{where}.values", values, "a list that is not empty")
    return build(Sweep, block, where), values


def cells(name: str, params: dict[str, Any], of: str = "sweeps") -> dict[str, Experiment]:
    """The experiment of each value of a sweep."""
    sweep, values = read(name, params, of)
    experiment(sweep.setting, sweep.method, params)  # else a slip in a name makes a new block
    found = {}
    for value in values:
        changed = copy.deepcopy(dict(params))
        for key in sweep.keys:
            put(changed, key.split("."), value)
        cell = experiment(sweep.setting, sweep.method, changed)
        found[str(value)] = replace(cell, method=f"{sweep.method}-{name}-{value}")
    return found


def put(block: dict[str, Any], key: list[str], value: object) -> None:
    """Put a value into a tree of blocks, making those that are missing."""
    for part in key[:-1]:
        if not isinstance(block.get(part), dict):
            block[part] = {}
        block = block[part]
    block[key[-1]] = value


def run(
    name: str, folder: str, of: str = "sweeps", workers: int = 1, device: str = "auto"
) -> Shown:
    """The records of every value of a sweep; those without any, or with outdated ones, are run."""
    params = config.read()
    sweep, _ = read(name, params, of)
    place, found = kept(name, folder, of), {}
    for value, cell in cells(name, params, of).items():
        of_cell = grid.load(cell, sweep.seeds, place, outdated=False)
        found[value] = of_cell or grid.run(cell, sweep.seeds, place, workers, device)
        print(f"{name} {value}: {'kept' if of_cell else 'trained'}", flush=True)
    used = {grid.run_folder(*r[0].cell[:2], sweep.seeds, place) for r in found.values()}
    for old in set((ROOT / place / "runs").iterdir()) - used:
        shutil.rmtree(old)
    return found


def kept(name: str, folder: str, of: str) -> str:
    """Where the records of a sweep are."""
    return f"{folder}/{of.removeprefix('tiny_')}/{name}"


def gather(folder: str, of: str = "sweeps") -> dict[str, Shown]:
    """The records of every sweep of a section, by name and value; tiny ones are run if need be."""
    params, found = config.read(), {}
    for name in blocks(params, of):
        if folder == grid.TINY:
            found[name] = run(name, folder, of)
            continue
        sweep, _ = read(name, params, of)
        place = kept(name, folder, of)
        swept = cells(name, params, of)
        found[name] = {value: grid.load(c, sweep.seeds, place) for value, c in swept.items()}
        if missing := [value for value, records in found[name].items() if not records]:
            text = f"no records of sweep {name} at {', '.join(missing)}"
            stage = f"{'budget' if of == 'budgets' else 'sweep'}@{name}"
            raise ParameterError(f"{text}; make them with `dvc repro {stage}`")
    return found


def records(found: Mapping[str, Shown]) -> list[Record]:
    """All records of some sweeps."""
    return [
        record for values in found.values() for of_value in values.values() for record in of_value
    ]


def beside(folder: str, of: str = "budgets") -> list[Record]:
    """The records of the methods that stand beside budgets."""
    params = config.read()
    found = budgets(params, of)
    cells = itertools.product(found.setting, found.beside, [found.seeds])
    return grid.of_cells(cells, params, folder, missing=of.startswith("tiny"))


def captions(of: str = "sweeps") -> dict[str, tuple[str, str]]:
    """Of every sweep its label and the value that leaves params.yaml as it is, "" if none does."""
    params, found = config.read(), {}
    for name in blocks(params, of):
        sweep, _ = read(name, params, of)
        preset = experiment(sweep.setting, sweep.method, params)
        same = {
            value
            for value, cell in cells(name, params, of).items()
            if (cell.setting, cell.params) == (preset.setting, preset.params)
        }
        found[name] = sweep.label, next(iter(same), "")
    return found
