"""The candidates of every method on choosing seeds, and which one is best."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd

from stamp_core.report.tables import text
from stamp_core.report.tables.frames import run_frame
from stamp_core.results.records import Record

KINDS = ("tuning", "explored")
Key = tuple[str, str]  # "tuning" or "explored", and a method


def tuning_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a method and candidate: mean accuracy by setting, over settings, and if it is best.

    The accuracy is that of the personal models where there are any.
    """
    kinds, candidates = zip(*(record.sweep for record in records), strict=True)
    rows = run_frame(records).assign(kind=kinds, candidate=candidates)
    rows["score"] = rows.personal_accuracy.fillna(rows.main_accuracy)
    scores = rows.groupby(["kind", "method", "candidate", "setting"], sort=False).score
    table = scores.agg(lambda values: values.mean(skipna=False)).unstack(sort=False)
    table["mean"] = table.mean(axis=1, skipna=False)  # a setting on which it diverges counts
    best = table["mean"].groupby(["kind", "method"]).transform("max")
    table = table.assign(chosen=table["mean"] == best).reset_index()
    return table.assign(chosen=table.chosen & (table.kind == "tuning"))


def write_tuning(records: Sequence[Record], folder: Path, known: Collection[Key]) -> list[Path]:
    """The files written: tuning.md to read, tuning.csv for the test of the presets.

    Rows of `known` methods without records stay as they are in an earlier tuning.csv.
    """
    frame = tuning_frame(records)
    if (folder / "tuning.csv").exists():
        earlier = pd.read_csv(folder / "tuning.csv")
        keys = list(zip(earlier.kind, earlier.method, strict=True))
        new = set(zip(frame.kind, frame.method, strict=True))
        frame = pd.concat([earlier[[key in known and key not in new for key in keys]], frame])
    shown = frame.assign(chosen=["yes" if chosen else "" for chosen in frame.chosen])
    for name in frame.columns[3:-1]:
        shown[name] = [text.mean_std([value]) for value in frame[name]]
    seeds = ", ".join(map(str, sorted({record.run[2] for record in records})))
    parts = ["# Tuning", text.definitions("Tuning"), f"Seeds: {seeds}."]
    tuned, explored = (shown[shown.kind == kind].drop(columns="kind") for kind in KINDS)
    parts += [text.markdown(tuned)]
    if len(explored):
        parts += ["## Explored", text.definitions("Explored")]
        parts += [text.markdown(explored.drop(columns="chosen"))]
    return [
        text.write_parts(folder / "tuning.md", parts),
        text.write_parts(folder / "tuning.csv", [frame.round(4).to_csv(index=False)]),
    ]
