"""The map of matching: accuracy by how many classes clients have in common, and classes per task.

Every method at the server learning rate that is best for it on choosing seeds, in each setting.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from stamp_core.results.records import Record
from workbench.report.frames import overlap_frame
from workbench.report.tables import page
from workbench.report.text import count_range, mean_std

BASE = "replay"  # that others are compared with


def overlap_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a setting of `overlap_frame`, as text: accuracy and chosen value of each method."""
    table = []
    for (size, overlap), part in rows.groupby(["size", "overlap"]):
        cells = {"classes per task": f"{size}", "classes in common, %": f"{overlap:g}"}
        for method, own in part.groupby("method", sort=False):
            cells[str(method)] = f"{mean_std(own.main_accuracy)} at {own.value.iloc[0]}"
        table.append({**cells, "n": count_range([part.seed.nunique()])})
    return pd.DataFrame(table)


def overlap_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Each method's difference from replay, by setting."""
    return page.paired_differences(rows, "method", [BASE], ["size", "overlap", "setting"])


def overlap_findings(rows: pd.DataFrame) -> str:
    """List items: which methods are above and below replay, by setting."""
    heading = "{size} classes per task, {overlap:g} % in common, accuracy compared with {base}"
    pairs = overlap_differences(rows)
    return page.difference_findings(pairs, "method", ["size", "overlap"], heading)


def write_overlap(records: Sequence[Record], folder: Path) -> Path:
    """The file written: overlap.md."""
    rows = overlap_frame(records)
    pairs = overlap_differences(rows)
    pairs = pairs.assign(place=[f"{p.size}, {p.overlap:g} %" for p in pairs.itertuples()])
    parts = [
        "# Overlap",
        page.definitions("Overlap"),
        overlap_findings(rows),
        page.markdown(overlap_table(rows)),
        *page.difference_sections(pairs, ["method"], "place"),
        page.definitions("Intervals"),
    ]
    return page.write_parts(folder / "overlap.md", parts)
