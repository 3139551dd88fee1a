"""`stamp run`: experiments on the same seeds, whose records are kept, and what they show."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from stamp_core.core.paths import RESUME
from stamp_core.data.plan import Plan
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.progress import Logger
from stamp_core.engine.train import SeedsDiverged, save_records, train
from stamp_core.results.records import Record, RecordFormError
from workbench.report.frames import run_frame
from workbench.report.metrics import paired_difference
from workbench.report.text import mean_std
from workbench.workflow.grid import changed_parts, load_sound_record

SHOWN = {  # columns of a table of results, and of `run_frame`
    "final accuracy (%)": "main_accuracy",
    "average incremental accuracy (%)": "main_average_incremental_accuracy",
    "forgetting (points)": "main_forgetting",
}


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


def difference(found: Mapping[str, Sequence[Record]]) -> str:
    """The paired difference of the first from the second with its 95 % interval."""
    frames = map(run_frame, found.values())
    by_seed = [dict(zip(f.seed, 100 * f.main_accuracy, strict=True)) for f in frames]
    pair = paired_difference(*by_seed)
    return f"{pair['mean']:+z.1f} ({pair['low']:+z.1f} to {pair['high']:+z.1f})"


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


def _markdown(table: pd.DataFrame) -> str:
    rows = table.reset_index()
    lines = [list(rows.columns), ["---"] * len(rows.columns), *rows.to_numpy().tolist()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _latex(table: pd.DataFrame) -> str:
    """A `tabular` with the rules of booktabs."""
    rows = table.reset_index()
    lines = [list(rows.columns), *rows.to_numpy().tolist()]
    head, *body = (" & ".join(map(_escaped, line)) + r" \\" for line in lines)
    rules = [r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    begin = rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}"
    return "\n".join([begin, *rules, r"\end{tabular}", ""])


def _escaped(text: str) -> str:
    for sign in r"%_&#$":
        text = text.replace(sign, rf"\{sign}")
    return text.replace("±", r"$\pm$")


FORMS = {".csv": pd.DataFrame.to_csv, ".md": _markdown, ".tex": _latex}
