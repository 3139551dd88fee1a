"""Cells of a grid: their plans, their records, found on disk or made on the spot."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stamp_core import config, engine, records, split
from stamp_core.config import ParameterError, Setting
from stamp_core.data import ImageSet
from stamp_core.executor import resolve_device
from stamp_core.experiments import Experiment, experiment
from stamp_core.paths import RESUME, ROOT
from stamp_core.records import Record
from stamp_core.split import Plan

TINY = "data/tiny"  # where notebooks put what they compute at their defaults


def plans(setting: Setting, images: ImageSet, seeds: str, folder: str) -> dict[int, Plan]:
    """The plans of some seeds: those in `folder` that still fit the setting, others made anew."""
    found = {}
    for seed in config.seeds(seeds):
        path = plan_file(setting.name, seeds, seed, folder)
        plan = Plan.load(path) if path.exists() else None
        fits = plan and (plan.split, plan.data_digest) == (setting.split, images.digest)
        found[seed] = plan if plan and fits else split.make(setting.split, images, seed)
    return found


def save_plans(made: dict[int, Plan], setting: Setting, seeds: str, folder: str) -> None:
    """Write the plans of some seeds, one file each."""
    for seed, plan in made.items():
        plan.save(plan_file(setting.name, seeds, seed, folder))


def plan_file(setting: str, seeds: str, seed: int, folder: str) -> Path:
    """Where the plan of one seed is kept."""
    return ROOT / folder / "splits" / f"{setting}-{seeds}" / f"{seed}.json"


def run_folder(setting: str, method: str, seeds: str, folder: str) -> Path:
    """Where the records of one cell are kept."""
    return ROOT / folder / "runs" / f"{setting}-{method}-{seeds}"


def run(cell: Experiment, seeds: str, folder: str, workers: int, device: str) -> list[Record]:
    """Train a cell and keep its records."""
    made = plans(cell.setting, cell.images(), seeds, folder)
    done = engine.train(cell, made, workers, device, RESUME)
    engine.keep(done, run_folder(cell.setting.name, cell.method, seeds, folder), RESUME)
    return list(done.values())


def gather(grid: str = "tiny", folder: str = TINY) -> list[Record]:
    """The records of every cell of a grid of params.yaml; the tiny grid is computed if need be."""
    params = config.read()
    return of_cells(config.cells(grid, params), params, folder, missing=grid == "tiny")


def found(grid: str, folder: str) -> list[Record]:
    """The records of those cells of a grid that have some."""
    params = config.read()
    cells = [(experiment(s, m, params), seeds) for s, m, seeds in config.cells(grid, params)]
    there = [(cell, seeds) for cell, seeds in cells if has(cell, seeds, folder)]
    return [record for cell, seeds in there for record in load(cell, seeds, folder)]


def of_cells(
    cells: Iterable[tuple[str, str, str]], params: dict[str, Any], folder: str, missing: bool
) -> list[Record]:
    """The records of some settings with methods and seeds; computed if they may be `missing`."""
    found: list[Record] = []
    for setting, method, seeds in cells:
        cell = experiment(setting, method, params)
        of_cell = load(cell, seeds, folder, outdated=folder != TINY)
        if not of_cell and not missing:
            raise ParameterError(f"no records of {recipe(setting, method, seeds, params)}")
        found += of_cell or run(cell, seeds, folder, 1, "cpu")
    return found


def load(cell: Experiment, seeds: str, folder: str, outdated: bool = True) -> list[Record]:
    """The records of a cell; none if one is missing.

    Those of other code or numbers are named, or count as missing if `outdated` is not allowed.
    """
    if not has(cell, seeds, folder):
        return []
    place = run_folder(cell.setting.name, cell.method, seeds, folder)
    folders = [place / str(seed) for seed in config.seeds(seeds)]
    found = [records.load(each) for each in folders]
    made = plans(cell.setting, cell.images(), seeds, folder)
    now = [cell.identity(plan, resolve_device("auto")) for plan in made.values()]
    stale = [key for r, i in zip(found, now, strict=True) for key in i if changed(r, i, key)]
    if stale and not outdated:
        return []
    if stale:
        parts = ", ".join(sorted(set(stale)))
        warnings.warn(f"{place.name} was made with other {parts}: run `dvc repro`", stacklevel=2)
    return found


def has(cell: Experiment, seeds: str, folder: str) -> bool:
    """Whether every seed of a cell has a record."""
    place = run_folder(cell.setting.name, cell.method, seeds, folder)
    return all((place / str(seed) / "run.json").exists() for seed in config.seeds(seeds))


def recipe(setting: str, method: str, seeds: str, params: dict[str, Any]) -> str:
    """Which records are missing, and the command that makes them."""
    name = f"{setting}-{method}-{seeds}"
    if setting in params[config.PAPER]["setting"]:
        return f"{name}; make them with `make paper SETTING={setting}`"
    kind = "train" if method in params["grid"]["method"] else "ablate"
    return f"{kind}@{name}; make them with `dvc repro {kind}@{name}`"


def changed(record: Record, now: dict[str, str], key: str) -> bool:
    """Whether a part of a record's identity is another today; the machine may well be."""
    then: dict[str, Any] = record.about["identity"]
    return key not in ("device", "torch") and then[key] != now[key]
