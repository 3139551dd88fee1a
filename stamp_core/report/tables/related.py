"""The page of related work: protected subspaces, tasks that return, images with masks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from stamp_core.report.tables import comparisons, text
from stamp_core.report.tables.frames import final_score, model_frame, run_frame
from stamp_core.results.records import Record

_BASES = ("fedavg", "replay")  # that tables of differences start from, where they were run
_PARTS = ("Protected subspaces", "Returning tasks", "Masks")  # of the page, and of its definitions


def protection_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run: that of `run_frame` with its sweep, value, and `inside`.

    That is the share of the global update that lies in the subspaces which clients protect, a mean
    over rounds and clients.
    """
    sweeps, values = zip(*(record.sweep for record in records), strict=True)
    rows = run_frame(records).assign(sweep=sweeps, value=values)
    return rows.assign(inside=[_mean_note(record, "drift") for record in records])


def _mean_note(record: Record, name: str) -> float:
    """The mean over the rounds in which a note is defined; NaN if there are none."""
    noted = [row["notes"][name] for row in record.history if name in row["notes"]]
    return float(np.mean(noted)) if noted else np.nan


def protection_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a sweep and value, as text."""
    groups = protection_frame(records).groupby(["setting", "sweep", "value"], sort=False)
    return pd.DataFrame(
        {
            **dict(zip(("setting", "sweep", "value"), keys, strict=True)),
            "n": str(len(runs)),
            "update inside, %": text.mean_std(runs.inside),
            "accuracy": text.mean_std(runs.main_accuracy),
            "forgetting": text.mean_std(runs.main_forgetting),
        }
        for keys, runs in groups
    )


def returning_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a model, global or personal: that of `model_frame` with the number of cycles."""
    cycles = {record.sweep[1]: record.about["setting"]["split"]["cycles"] for record in records}
    parts = []
    for value, number in cycles.items():
        rows = model_frame([record for record in records if record.sweep[1] == value])
        parts.append(rows.assign(cycles=number, accuracy=rows.main_accuracy))
    return pd.concat(parts, ignore_index=True)


def returning_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a model as text: accuracy by the number of cycles, and where the task is told."""
    rows = returning_frame(records)
    named = rows.assign(method=[f"{text.marked(r.method)} ({r.model})" for r in rows.itertuples()])
    table = comparisons.accuracy_table(named, ["method"], "cycles", "accuracy, cycles = {}")
    told = named[named.cycles == named.cycles.max()].groupby("method", sort=False)
    last = {name: text.mean_std(runs.task_accuracy) for name, runs in told}
    return table.assign(**{"task-incremental, last": [last[name] for name in table.method]})


def returning_differences(records: Sequence[Record], base: str = "fedavg") -> pd.DataFrame:
    """The paired differences of each model from the main model of `base`, by number of cycles."""
    rows = returning_frame(records)
    return comparisons.paired_differences(rows, "method", base, ["setting", "cycles"])


def cycle_differences(records: Sequence[Record]) -> pd.DataFrame:
    """The paired differences of each model with more cycles from the same with the fewest."""
    rows = returning_frame(records)
    parts = []
    for model, own in rows.groupby("model", sort=False):
        by = ["setting", "method"]
        pairs = comparisons.paired_differences(own, "cycles", own.cycles.min(), by)
        parts.append(pairs.assign(model=model))
    return pd.concat(parts, ignore_index=True)


def masks_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a method as text: intersection over union, and the accuracy of pixels."""
    rows = run_frame(records)
    rows["pixels"] = [final_score(record, "global", "pixels") for record in records]
    return pd.DataFrame(
        {
            "method": method,
            "n": str(len(runs)),
            "mean IoU": text.mean_std(runs.main_accuracy),
            "learning IoU": text.mean_std(runs.main_learning_accuracy),
            "forgetting": text.mean_std(runs.main_forgetting),
            "pixel accuracy": text.mean_std(runs.pixels),
            "s / round": text.significant(runs.client_seconds.mean(), 2),
            "MB up / round": text.significant(runs.bytes_up.mean() / text.MB),
        }
        for method, runs in rows.groupby("method", sort=False)
    )


def masks_differences(records: Sequence[Record], base: str = "fedavg") -> pd.DataFrame:
    """The paired differences of each method's mean IoU and forgetting from those of `base`."""
    measures = {"mean IoU": "main_accuracy", "forgetting": "main_forgetting"}
    return comparisons.paired_differences(run_frame(records), "method", base, ["setting"], measures)


def related_findings(records: Mapping[str, Sequence[Record]]) -> str:
    """List items on tasks that return and on masks: whose intervals exclude 0."""
    cycles = cycle_differences(records["returning"])
    heading = "{setting}, accuracy with {cycles} cycles compared with one"
    items = [comparisons.interval_sentences(cycles, "method", ["setting", "cycles"], heading)]
    for base in _BASES:
        heading = f"{{setting}}, accuracy with cycles = {{cycles}} compared with {base}"
        pairs = returning_differences(records["returning"], base)
        by = ["setting", "cycles"]
        items.append(comparisons.interval_sentences(pairs, "method", by, heading))
    pairs = masks_differences(records["masks"])
    heading = "{setting}, {measure} compared with fedavg"
    items.append(comparisons.interval_sentences(pairs, "method", ["setting", "measure"], heading))
    return "\n".join(filter(None, items))


def write_related(records: Mapping[str, Sequence[Record]], folder: Path) -> Path:
    """The file written, related.md; records are those of "protection", "returning", "masks"."""
    pairs = {base: returning_differences(records["returning"], base) for base in _BASES}
    masks = {"fedavg": masks_differences(records["masks"])}
    sections = (
        [text.markdown(protection_table(records["protection"]))],
        [
            text.markdown(returning_table(records["returning"])),
            *comparisons.difference_sections(pairs, ["method", "model"], "cycles", "cycles = {}"),
        ],
        [
            text.markdown(masks_table(records["masks"])),
            *comparisons.difference_sections(masks, ["method"], "measure"),
        ],
    )
    parts = ["# Related work", related_findings(records)]
    for title, own, section in zip(_PARTS, records.values(), sections, strict=True):
        about = text.definitions(f"Related work: {title}")
        parts += [f"## {title}", text.describe_runs(own), about, *section]
    return text.write_parts(
        folder / "related.md", [*parts, "## Definitions", text.definitions("Intervals")]
    )
