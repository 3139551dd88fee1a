"""`stamp run`: experiments on the same seeds, whose records are kept, and what they show."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stamp_core.config.decode import ParameterError, invalid
from stamp_core.config.params import parse_seeds
from stamp_core.core.paths import RESUME
from stamp_core.data.plan import Plan
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.progress import Logger
from stamp_core.engine.train import SeedsDiverged, save_records, train
from stamp_core.engine.worker import explain_memory_errors
from stamp_core.methods.base.registry import is_of_setting
from stamp_core.results.records import Record, RecordFormError
from workbench.exchange import import_plan
from workbench.report.frames import run_frame
from workbench.report.metrics import paired_difference
from workbench.report.tables.page import markdown
from workbench.report.text import mean_std
from workbench.workflow import loggers
from workbench.workflow.grid import changed_parts, load_plans, load_sound_record
from workbench.workflow.profiles import read_profile

SHOWN = {  # columns of a table of results, and of `run_frame`
    "final accuracy (%)": "main_accuracy",
    "average incremental accuracy (%)": "main_average_incremental_accuracy",
    "forgetting (points)": "main_forgetting",
}


def run_and_compare(arguments: argparse.Namespace) -> None:
    """Train methods on the same seeds; print their accuracies and how the first differs."""
    if arguments.table and arguments.table.suffix not in FORMS:
        raise ParameterError(f"--table {arguments.table}: it must end with {' or '.join(FORMS)}")
    chosen = parse_overrides(arguments.set)
    for key in chosen:
        if arguments.plan is not None and key.removeprefix("setting.").startswith("split."):
            raise ParameterError(f"--set {key}: --plan {arguments.plan} has a split of its own")
    found = dict[str, list[Record]]()
    tried = experiments(arguments, chosen)
    for label, experiment in tried.items():
        plans = read_plans(experiment, arguments.seeds, arguments.plan)
        followers = open_loggers(arguments.log, arguments.out, experiment.name)
        with explain_memory_errors(experiment.setting):
            found[label] = train_kept(
                experiment, plans, arguments.out, arguments.workers, arguments.device, followers
            )
    table = result_table(found)
    print(aligned(table))
    first, *others = found
    for other in others:
        print(f"{first} - {other}: {difference(found[first], found[other])}")
    if arguments.table:
        write_table(table, arguments.table)
        print(f"table in {arguments.table}")
    print(f"records in {arguments.out / arguments.setting}")


def read_plans(experiment: Experiment, seeds: str, file: str | None) -> dict[int, Plan]:
    """The plan in a file for every seed; without a file, those of the setting."""
    dataset = experiment.dataset()
    if file is None:
        return load_plans(experiment.setting, dataset, seeds)
    return {seed: import_plan(file, dataset, seed) for seed in parse_seeds(seeds)}


def open_loggers(kind: str | None, out: Path, name: str) -> list[Any]:
    """What follows a training, by the name of the program that shows it."""
    if kind is None:
        return []
    if kind == "wandb":
        return [loggers.WandbLogger(name)]
    return [loggers.TensorBoardLogger(out / "tensorboard" / name)]


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """Values by key of words like `spatial.kappa=0.9`; a value is YAML."""
    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise ParameterError(f"--set {pair}: it must be key=value, as spatial.kappa=0.9")
        if key in values:
            raise ParameterError(f"--set {key}: it must be there once")
        try:
            values[key] = YAML(typ="safe").load(text)
        except (YAMLError, ValueError) as error:  # or a number of thousands of digits
            why = " ".join(str(error).split())
            raise ParameterError(f"--set {key}: the value must be YAML: {why}") from None
    return values


def experiments(arguments: argparse.Namespace, chosen: Mapping[str, Any]) -> dict[str, Experiment]:
    """The experiment of each method by its label; `chosen` changes the setting and the first."""
    params, setting = read_profile(arguments.profile), arguments.setting
    first, *others = arguments.method
    of_setting = {key: value for key, value in chosen.items() if is_of_setting(key)}
    tried = {" ".join([first, *arguments.set]): load_experiment(setting, first, params, chosen)}
    for method in others:
        if method in tried:
            right = "named once each, unless --set changes one"
            raise invalid("methods", arguments.method, right)
        tried[method] = load_experiment(setting, method, params, of_setting)
    return tried


def train_kept(
    experiment: Experiment,
    plans: Mapping[int, Plan],
    out: Path,
    workers: int = 1,
    device: str = "auto",
    loggers: Iterable[Logger] = (),
) -> list[Record]:
    """The record of each seed below `out`, of which those without a current one are trained."""
    experiment = experiment.with_plans(plans)
    folder = out / experiment.setting.name / experiment.name
    kept = {seed: _current(experiment, plan, folder / str(seed)) for seed, plan in plans.items()}
    missing = {seed: plan for seed, plan in plans.items() if kept[seed] is None}
    if missing:
        try:
            trained = train(experiment, missing, workers, device, RESUME, loggers=loggers)
        except SeedsDiverged as error:
            save_records(error.records, folder, RESUME)
            raise
        save_records(trained, folder, RESUME)
        kept |= trained
    return [record for record in kept.values() if record is not None]


def _current(experiment: Experiment, plan: Plan, folder: Path) -> Record | None:
    """The record in a folder if it is of this experiment, plan and code."""
    try:
        record = load_sound_record(folder)
    except RecordFormError:
        return None
    if record is None or changed_parts(experiment, {plan.seed: plan}, [record]):
        return None
    return record


def result_table(found: Mapping[str, Sequence[Record]]) -> pd.DataFrame:
    """Mean and deviation over seeds as text, and their number, a row for each label."""
    rows = {}
    for label, records in found.items():
        runs = run_frame(records)
        rows[label] = {name: mean_std(runs[column]) for name, column in SHOWN.items()}
        rows[label]["n"] = str(len(runs))
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("method")


def difference(records: Sequence[Record], others: Sequence[Record]) -> str:
    """The paired difference of final accuracy, of several seeds with its 95 % interval."""
    frames = run_frame(records), run_frame(others)
    by_seed = [dict(zip(f.seed, 100 * f.main_accuracy, strict=True)) for f in frames]
    pair = paired_difference(*by_seed)
    mean, points = f"{pair['mean']:+z.1f}", "points of final accuracy"
    if pair["n"] == 1:
        return f"{mean} {points}, of one seed"
    ends = f"{pair['low']:+z.1f} to {pair['high']:+z.1f}"
    return f"{mean} ({ends}) {points}, with its 95 % interval"


def aligned(table: pd.DataFrame) -> str:
    """The table for a terminal."""
    rows = table.reset_index()
    lines = [list(rows.columns), *rows.to_numpy().tolist()]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    ends = [[f"{t:>{w}}" for t, w in zip(line[1:], others, strict=True)] for line in lines]
    return "\n".join("  ".join([f"{a[0]:{first}}", *b]) for a, b in zip(lines, ends, strict=True))


def write_table(table: pd.DataFrame, path: Path) -> None:
    """The table in a file, in the form that its name ends with: FORMS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FORMS[path.suffix](table))


def _latex(table: pd.DataFrame) -> str:
    """A `tabular` with the rules of booktabs."""
    text: str = table.reset_index().to_latex(index=False, escape=True)
    return text.replace("±", r"$\pm$")


FORMS = {
    ".csv": pd.DataFrame.to_csv,
    ".md": lambda table: f"{markdown(table.reset_index())}\n",
    ".tex": _latex,
}
