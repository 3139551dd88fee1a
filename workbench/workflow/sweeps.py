"""Sweeps: one parameter at several values, all else equal; values with records are not rerun."""

import copy
import itertools
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from stamp_core.config.decode import ParameterError, build, invalid, unknown_name
from stamp_core.config.params import at_setting, parse_seeds, set_value
from stamp_core.core.paths import ROOT
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.results.records import Record
from workbench.workflow.grid import data_folder, load_records, load_runs, run_folder
from workbench.workflow.profiles import DEFAULT, QUICK, expand_grid, read_profile
from workbench.workflow.training import Job, require_trained, train_missing

CORESET_BASELINES = ("fedavg", "keep_all")  # without a memory, and with every image in it

SweptFigure = Literal[
    "sensitivity",
    "coresets",
    "heterogeneity",
    "rounds",
    "overlap",
    "protection",
    "returning",
    "masks",
    "noise",
    "projection",
]


@dataclass(frozen=True)
class Sweep:
    """One parameter at several values, for each combination of some settings and methods."""

    label: str  # of the axis
    setting: tuple[str, ...]
    method: tuple[str, ...]
    seeds: str
    keys: tuple[str, ...]  # settings.NAME... or methods.NAME...; all get the same value
    values: tuple[Any, ...]
    figure: SweptFigure = "sensitivity"

    def __post_init__(self) -> None:
        """Validate that keys are of the settings and methods, and that no list is empty."""
        parse_seeds(self.seeds)
        for name in ("setting", "method", "keys", "values"):
            if not getattr(self, name):
                raise invalid(name, [], "a list that is not empty")
        for value in self.values:  # part of the names of folders
            if not re.fullmatch("[A-Za-z0-9_.+-]+", str(value)) or str(value).startswith("."):
                raise invalid("values", value, "a number, a word or true, false or null")
        for key, setting, method in itertools.product(self.keys, self.setting, self.method):
            places = (f"settings.{setting}.", f"methods.{method}.")
            if not expand_placeholders(key, setting, method).startswith(places):
                right = f"a list of keys under {' or '.join(places)}"
                raise invalid("keys", list(self.keys), right)


def expand_placeholders(key: str, setting: str, method: str) -> str:
    """A key with {setting} and {method} replaced by these names."""
    return key.replace("{setting}", setting).replace("{method}", method)


def read_sweep(name: str, params: Mapping[str, Any]) -> Sweep:
    """A sweep of a profile, checked."""
    sweeps, where = params["sweeps"], f"{params['file']}: sweeps."
    if name not in sweeps:
        raise unknown_name(where, name, sweeps)
    return build(Sweep, sweeps[name], f"{where}{name}")


def sweep_names(figure: str, params: Mapping[str, Any]) -> list[str]:
    """The sweeps that a figure shows."""
    return [name for name in params["sweeps"] if read_sweep(name, params).figure == figure]


def sweep_experiments(name: str, params: dict[str, Any]) -> list[Experiment]:
    """The experiments of a sweep: settings x methods x values."""
    sweep = read_sweep(name, params)
    experiments = []
    for setting, method in itertools.product(sweep.setting, sweep.method):
        load_experiment(setting, method, params)  # else a wrong name would make a new block
        for value in sweep.values:
            changed = copy.deepcopy(at_setting(params, setting))
            for key in sweep.keys:
                set_value(changed, expand_placeholders(key, setting, method).split("."), value)
            try:
                swept = light_experiment(setting, method, changed, (name, str(value)))
            except ParameterError as error:
                where = f"{params['file']}: sweeps.{name} with {value!r}"
                raise ParameterError(f"{where}: {error}") from None
            experiments.append(swept)
    return experiments


def light_experiment(
    setting: str, method: str, params: dict[str, Any], sweep: tuple[str, str] | None = None
) -> Experiment:
    """An experiment without the diagnostics that no figure of sweeps shows; exemplars stay."""
    experiment = load_experiment(setting, method, params)
    whole = experiment.setting
    recorded = replace(whole.diagnostics, angles=False, displacements=False, features=0)
    return replace(experiment, setting=replace(whole, diagnostics=recorded), sweep=sweep)


def run_sweep(name: str, profile: str, workers: int = 1, device: str = "auto") -> list[Record]:
    """The records of a sweep; experiments without current ones are trained, stale ones deleted."""
    params = read_profile(profile)
    seeds = read_sweep(name, params).seeds
    jobs = [Job(experiment, seeds, profile) for experiment in sweep_experiments(name, params)]
    found = require_trained(*train_missing(jobs, workers, device))
    folders = {run_folder(job.experiment, seeds, profile) for job in jobs}
    for folder in set((ROOT / data_folder(profile) / "sweeps" / name).iterdir()) - folders:
        shutil.rmtree(folder)
    return [record for records in found.values() for record in records]


def load_sweeps(figure: str, profile: str = QUICK) -> list[Record]:
    """The records of all sweeps of a figure, with its baselines; missing ones as in `load_grid`."""
    params = read_profile(profile)
    records: list[Record] = []
    for name in sweep_names(figure, params):
        if profile == QUICK:
            records += run_sweep(name, profile)
            continue
        sweep = read_sweep(name, params)
        for experiment in sweep_experiments(name, params):
            loaded = load_records(experiment, sweep.seeds, profile)
            if not loaded and profile == DEFAULT:
                command = f"`dvc repro sweep@{name}`"
                raise ParameterError(f"no records of {experiment.name}; make them with {command}")
            records += loaded
    if figure == "coresets":
        records += _coreset_baselines(params, profile)
    if figure == "rounds":
        records += _own_rounds(params, profile)
    return records


def _coreset_baselines(params: Mapping[str, Any], profile: str) -> list[Record]:
    sweeps = [read_sweep(name, params) for name in sweep_names("coresets", params)]
    settings = {setting for sweep in sweeps for setting in sweep.setting}
    runs = expand_grid("grid", params)
    baselines = (run for run in runs if run[0] in settings and run[1] in CORESET_BASELINES)
    return load_runs(baselines, profile)


def _own_rounds(params: Mapping[str, Any], profile: str) -> list[Record]:
    """The grid's runs of swept methods, with the setting's own rounds, on the sweep's seeds."""
    records: list[Record] = []
    for sweep in (read_sweep(name, params) for name in sweep_names("rounds", params)):
        seeds = set(parse_seeds(sweep.seeds))
        for swept in itertools.product(sweep.setting, sweep.method):
            grid = (run for run in expand_grid("grid", params) if run[:2] == swept)
            runs = [run for run in grid if seeds & set(parse_seeds(run[2]))]
            records += [each for each in load_runs(runs, profile) if each.run[2] in seeds]
    return records


def sweep_captions(profile: str = QUICK, figure: str = "sensitivity") -> dict[str, tuple[str, str]]:
    """The label of every sweep of a figure, and the preset's own value, "" if not among them."""
    params = read_profile(profile)
    captions = {}
    for name in sweep_names(figure, params):
        sweep = read_sweep(name, params)
        preset = light_experiment(sweep.setting[0], sweep.method[0], params)
        swept = sweep_experiments(name, params)
        equal = [e for e in swept if (e.setting, e.params) == (preset.setting, preset.params)]
        same = [e.sweep[1] for e in equal if e.sweep]
        captions[name] = sweep.label, next(iter(same), "")
    return captions
