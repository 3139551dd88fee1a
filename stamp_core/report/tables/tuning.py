"""The candidates of every method on choosing seeds, and which one is best."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd

from stamp_core.report.tables import text
from stamp_core.report.tables.frames import run_frame
from stamp_core.results.records import Record

KINDS = ("tuning", "masks", "explored")
Key = tuple[str, str]  # a kind and a method


def tuning_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a method and candidate: mean accuracy by setting, over settings, and if it is best.

    The accuracy is that of the personal models where there are any. A setting is NaN for kinds that
    are not trained on it, and where the method diverges: then the mean is NaN, too.
    """
    kinds, candidates = zip(*(record.sweep for record in records), strict=True)
    rows = run_frame(records).assign(kind=kinds, candidate=candidates)
    rows["score"] = rows.personal_accuracy.fillna(rows.main_accuracy)
    scores = rows.groupby(["kind", "method", "candidate", "setting"], sort=False).score
    table = scores.agg(lambda values: values.mean(skipna=False)).unstack(sort=False)
    kind = table.index.get_level_values("kind")
    for each in kind.unique():
        own = table[kind == each].dropna(axis=1, how="all")
        table.loc[kind == each, "mean"] = own.mean(axis=1, skipna=False)
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
    labels = ["kind", "method", "candidate"]
    settings = [name for name in frame if name not in (*labels, "mean", "chosen")]
    frame = frame[[*labels, *settings, "mean", "chosen"]]
    seeds = ", ".join(map(str, sorted({record.run[2] for record in records})))
    parts = ["# Tuning", text.definitions("Tuning"), f"Seeds: {seeds}."]
    for kind, title in zip(KINDS, ("", "Masks", "Explored"), strict=True):
        if (own := frame[frame.kind == kind]).empty:
            continue
        parts += [f"## {title}", text.definitions(f"Tuning: {title}")] if title else []
        parts.append(text.markdown(_shown(own)))
    return [
        text.write_parts(folder / "tuning.md", parts),
        text.write_parts(folder / "tuning.csv", [frame.round(4).to_csv(index=False)]),
    ]


def _shown(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one kind as text, with the settings on which they were trained."""
    rows = rows.drop(columns="kind").dropna(axis=1, how="all")
    scores = rows.columns[2:-1]
    rows[scores] = rows[scores].map(lambda score: text.mean_std([score]))
    if not rows.chosen.any():
        return rows.drop(columns="chosen")
    return rows.assign(chosen=["yes" if chosen else "" for chosen in rows.chosen])
