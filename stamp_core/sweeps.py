"""Sweeps: one number at several values, all else equal; values that have records are not rerun.

A crossed section has a sweep of the same number for each of its settings and methods.
"""

import copy
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stamp_core import config, grid
from stamp_core.config import ParameterError, Setting, build, section, unknown, wrong
from stamp_core.experiments import Experiment, experiment
from stamp_core.paths import ROOT
from stamp_core.records import Record

CROSSED = ("budgets", "tiny_budgets", "alphas", "tiny_alphas", "paper_alphas")
SECTIONS = ("sweeps", "tiny_sweeps", *CROSSED)  # of params.yaml
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
class Crossed:
    """A section of params.yaml: one number at the same values for every method of a setting."""

    label: str  # what the axis of its figure says
    key: str  # of the number; {setting} and {method} in it stand for those of each sweep
    setting: tuple[str, ...]
    method: tuple[str, ...]
    beside: tuple[str, ...]  # methods without that number, in the settings of `grid`
    seeds: str
    values: Mapping[str, Any]  # of each setting, or of its methods by name and of all `others`

    def __post_init__(self) -> None:
        """Refuse a key of neither setting nor method, and a setting or method without values."""
        places = ("settings.{setting}.", "methods.{method}.")
        if not self.key.startswith(places):
            raise wrong("key", self.key, f"a key under {' or '.join(places)}")
        known = {*self.method, "others"}
        for setting in self.setting:
            found = self.values.get(setting)
            if isinstance(found, Mapping) and (strange := sorted(set(found) - known)):
                raise unknown(f"values.{setting}", strange[0], sorted(known))
            if not all(isinstance(self.of(setting, method), list) for method in self.method):
                right = "a list of numbers, or one for methods by name and one for all others"
                raise wrong(f"values.{setting}", found, right)

    def of(self, setting: str, method: str) -> Any:
        """The values of a method in a setting."""
        found = self.values.get(setting)
        return found.get(method, found.get("others")) if isinstance(found, Mapping) else found

    def blocks(self) -> dict[str, dict[str, Any]]:
        """A block of a sweep for each setting and method, as `sweeps` has them."""
        return {
            f"{setting}-{method}": {
                **{"label": self.label, "setting": setting, "method": method, "seeds": self.seeds},
                "keys": [self.key.replace("{setting}", setting).replace("{method}", method)],
                "values": self.of(setting, method),
            }
            for setting, method in itertools.product(self.setting, self.method)
        }


def crossed(params: Mapping[str, Any], of: str) -> Crossed:
    """A crossed section, checked."""
    found = build(Crossed, params[of], f"params.yaml: {of}")
    others = {method for each in ("grid", "ablation", "tiny") for method in params[each]["method"]}
    if missing := sorted(set(found.beside) - others):
        raise wrong(f"params.yaml: {of}.beside", missing, "in grid.method or ablation.method")
    return found


def blocks(params: Mapping[str, Any], of: str) -> dict[str, Any]:
    """The block of each sweep of a section."""
    return crossed(params, of).blocks() if of in CROSSED else dict(params[of])


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
        setting, method = unobserved(cell.setting), f"{sweep.method}-{name}-{value}"
        found[str(value)] = replace(cell, setting=setting, method=method)
    return found


def unobserved(setting: Setting) -> Setting:
    """A setting without what costs time and no figure of sweeps shows."""
    observe = replace(setting.observe, angles=False, displacements=False, features=0)
    return replace(setting, observe=observe)


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
    return f"{folder}/{kind(of)}/{name}"


def kind(of: str) -> str:
    """What a section holds: `alphas` for tiny_alphas and paper_alphas as well."""
    return of.rpartition("_")[2]


def gather(folder: str, of: str = "sweeps") -> dict[str, Shown]:
    """The records of every sweep of a section, by name and value; tiny ones are run if need be.

    Of the paper's those that are there: each of its settings takes days.
    """
    params = config.read()
    names = list(blocks(params, of))
    if folder == grid.TINY:
        return {name: run(name, folder, of) for name in names}
    found = {name: load(name, folder, of) for name in names}
    whole = {name: values for name, values in found.items() if all(values.values())}
    lacking = [name for name in names if name not in whole]
    if lacking and not (whole and of.startswith(config.PAPER)):
        missing = [value for value, of_value in found[lacking[0]].items() if not of_value]
        text = f"no records of sweep {lacking[0]} at {', '.join(missing)}"
        raise ParameterError(f"{text}; make them with `{recipe(lacking[0], params, of)}`")
    return whole


def load(name: str, folder: str, of: str) -> Shown:
    """The records of every value of a sweep; a value without any has none."""
    params = config.read()
    sweep, _ = read(name, params, of)
    place = kept(name, folder, of)
    swept = cells(name, params, of)
    return {value: grid.load(cell, sweep.seeds, place) for value, cell in swept.items()}


def recipe(name: str, params: Mapping[str, Any], of: str) -> str:
    """The command that trains a sweep."""
    if of.startswith(config.PAPER):
        return f"make paper SETTING={read(name, params, of)[0].setting}"
    return f"dvc repro {kind(of).removesuffix('s')}@{name}"


def records(found: Mapping[str, Shown]) -> list[Record]:
    """All records of some sweeps."""
    return [
        record for values in found.values() for of_value in values.values() for record in of_value
    ]


def beside(folder: str, of: str) -> list[Record]:
    """The records of the methods that stand beside a crossed section, where a grid trains them."""
    params = config.read()
    found = crossed(params, of)
    trained = {setting for each in config.GRIDS for setting, _, _ in config.cells(each, params)}
    settings = [setting for setting in found.setting if setting in trained]
    cells = itertools.product(settings, found.beside, [found.seeds])
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
            if (cell.setting, cell.params) == (unobserved(preset.setting), preset.params)
        }
        found[name] = sweep.label, next(iter(same), "")
    return found
