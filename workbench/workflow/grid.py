"""Experiments of a grid: their plans and records, loaded from disk or trained if missing."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import parse_seeds
from stamp_core.config.schema import Setting
from stamp_core.core.atomic import atomic_write, quarantine
from stamp_core.core.devices import resolve_device
from stamp_core.core.paths import RESUME, ROOT
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan
from stamp_core.data.split import make_plan
from stamp_core.engine.checkpoint import remove_checkpoint
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import SeedsDiverged, save_records, train
from stamp_core.results.metrics import final_accuracy, mean
from stamp_core.results.records import Record, RecordFormError, load_record
from workbench.workflow.profiles import DEFAULT, QUICK, STUDIES, expand_grid, read_profile

NOT_COMPARED = ("device", "torch")  # parts of an identity that may differ between machines


def pictured(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The block `data` of what a page of images shows: of features the images behind them."""
    return pictured(data["of"]) if data["source"] == "features" else data


def data_folder(profile: str) -> str:
    """The folder of a profile's plans and records, relative to the project."""
    return "data" if profile == DEFAULT else f"data/{profile}"


def load_plans(
    setting: Setting, dataset: ImageDataset, seeds: str | Iterable[str], profile: str = QUICK
) -> dict[int, Plan]:
    """The plans of one or several ranges of seeds: those on disk that still fit, else new ones."""
    ranges = [seeds] if isinstance(seeds, str) else seeds
    plans = {}
    for seed in dict.fromkeys(seed for each in ranges for seed in parse_seeds(each)):
        path = plan_file(setting.name, seed, profile)
        plan = Plan.load(path) if path.exists() else None
        fits = (setting.split, dataset.digest, seed)
        if not plan or (plan.split, plan.data_digest, plan.seed) != fits:
            plan = make_plan(setting.split, dataset, seed)
        plans[seed] = plan
    return plans


def save_plans(plans: dict[int, Plan], setting: Setting, profile: str = QUICK) -> None:
    """Write the plans of some seeds, one file each."""
    for seed, plan in plans.items():
        plan.save(plan_file(setting.name, seed, profile))


def plan_file(setting: str, seed: int, profile: str) -> Path:
    """The file of one seed's plan."""
    return ROOT / data_folder(profile) / "splits" / setting / f"{seed}.json"


def grid_seeds(setting: str, profile: str) -> list[str]:
    """The ranges of seeds with which a profile's grid trains on a setting."""
    runs = expand_grid(f"grid.{setting}", read_profile(profile))
    return list(dict.fromkeys(seeds for _, _, seeds in runs))


def run_folder(experiment: Experiment, seeds: str, profile: str = QUICK) -> Path:
    """The folder of an experiment's records, with one folder per seed."""
    folder = Path(data_folder(profile), "runs", experiment.setting.name)
    name = experiment.method
    if experiment.sweep:
        folder, name = Path(data_folder(profile), "sweeps", experiment.sweep[0]), experiment.name
    return ROOT / folder / f"{name}-{seeds}"


def save_metrics(
    found: Mapping[str, Sequence[Record]], setting: str, profile: str = QUICK
) -> dict[str, dict[str, float]]:
    """Write accuracy and forgetting of a setting's experiments, by name, which DVC compares."""
    values = {name: _metrics(records) for name, records in found.items()}
    with atomic_write(ROOT / data_folder(profile) / "metrics" / f"{setting}.json") as part:
        part.write_text(json.dumps(values, indent=1) + "\n")
    return values


def _metrics(records: Sequence[Record]) -> dict[str, float]:
    models = [(record, record.main_model) for record in records]
    final = [final_accuracy(record.task_accuracies(model)) for record, model in models]
    forgetting = [mean(record.forgetting(model)) for record, model in models]
    return {"accuracy": round(mean(final), 4), "forgetting": round(mean(forgetting), 4)}


def train_and_save(
    experiment: Experiment, seeds: str, profile: str, workers: int = 1, device: str = "auto"
) -> list[Record]:
    """The records of an experiment, saved; without seeds that diverge, an error if all do."""
    plans = load_plans(experiment.setting, experiment.dataset(), seeds, profile)
    try:
        records = train(experiment, plans, workers, device, RESUME)
    except SeedsDiverged as error:
        if not error.records:
            raise
        records = with_diverged(error)
        for seed in error.errors:
            remove_checkpoint(RESUME, experiment.name, seed)
    save_records(records, run_folder(experiment, seeds, profile), RESUME)
    return list(records.values())


def with_diverged(error: SeedsDiverged) -> dict[int, Record]:
    """The records of the seeds that ended; `about` names those that diverged, and where."""
    reasons = {str(seed): str(reason) for seed, reason in error.errors.items()}
    return {
        seed: replace(record, about={**record.about, "diverged": reasons})
        for seed, record in error.records.items()
    }


def load_grid(page: str = "comparison", profile: str = QUICK) -> list[Record]:
    """The records of all experiments of a page (see `expand_grid`).

    With the quick profile missing or outdated ones are trained. With the others outdated ones warn;
    missing ones are an error with the default profile, and else left out. Studies are shown with
    the default runs, to which they add seeds and settings.
    """
    profiles = (DEFAULT, STUDIES) if profile == STUDIES else (profile,)
    runs = [(expand_grid(page, read_profile(name)), name) for name in profiles]
    return [record for experiments, name in runs for record in load_runs(experiments, name)]


def load_runs(runs: Iterable[tuple[str, str, str]], profile: str) -> list[Record]:
    """The records of settings with methods and seeds; missing ones as in `load_grid`."""
    params = read_profile(profile)
    records: list[Record] = []
    for setting, method, seeds in runs:
        experiment = load_experiment(setting, method, params)
        loaded = load_records(experiment, seeds, profile, outdated=profile != QUICK)
        if not loaded and profile == DEFAULT:
            name = f"{experiment.name}-{seeds}"
            raise ParameterError(f"no records of {name}; make them with `make repro`")
        if not loaded and profile == QUICK:
            loaded = train_and_save(experiment, seeds, profile, device="cpu")
        records += loaded
    return records


def load_sound_record(folder: Path) -> Record | None:
    """The record in a folder, if there is one; a damaged one is set aside, to be made again."""
    if not folder.exists():
        return None
    inode = folder.stat().st_ino
    try:
        return load_record(folder)
    except ValueError as error:
        if not folder.exists() or folder.stat().st_ino != inode:  # another process replaced it
            return load_sound_record(folder)
        aside = quarantine(folder, RESUME / f"{folder.parent.name}-{folder.name}.aside")
        warnings.warn(f"{error}; kept as {aside.relative_to(ROOT)}", stacklevel=2)
        return None


def load_records(
    experiment: Experiment, seeds: str, profile: str, outdated: bool = True
) -> list[Record]:
    """The records of an experiment, none if one is missing; outdated ones warn or are missing."""
    plans = load_plans(experiment.setting, experiment.dataset(), seeds, profile)
    folder = run_folder(experiment, seeds, profile)
    try:
        records = complete_records(folder, plans)
    except RecordFormError:
        if outdated:
            raise
        return []  # to be made again
    changes = changed_parts(experiment, plans, records)
    if changes and not outdated:
        return []
    if changes:
        command = f"make {'repro' if profile == DEFAULT else profile}"
        made = f"{experiment.name}-{seeds} was made with other {', '.join(sorted(changes))}"
        warnings.warn(f"{made}: run `{command}`", stacklevel=2)
    return records


def complete_records(folder: Path, seeds: Iterable[int]) -> list[Record]:
    """The records of some seeds; none if one is missing or damaged that did not diverge."""
    found = {seed: load_sound_record(folder / str(seed)) for seed in seeds}
    records = [record for record in found.values() if record]
    diverged = {int(seed) for record in records for seed in record.about.get("diverged", {})}
    missing = {seed for seed, record in found.items() if record is None}
    return records if missing <= diverged else []


def changed_parts(
    experiment: Experiment, plans: Mapping[int, Plan], records: Iterable[Record]
) -> set[str]:
    """The parts of an experiment's identity that are not those of its records."""
    changes = set[str]()
    first = next(iter(plans.values()))
    same = experiment.identity(first, resolve_device("auto"))
    for record in records:
        plan = plans[record.about["seed"]]
        now = {**same, "data": plan.data_digest, "plan": plan.hash}
        then = record.about["identity"]
        changes |= {key for key in now if key not in NOT_COMPARED and then.get(key) != now[key]}
    return changes
