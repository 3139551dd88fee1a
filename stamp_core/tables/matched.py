"""How well gradients were matched, and what it was good for."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from stamp_core import metrics
from stamp_core.records import Record
from stamp_core.tables.paper import DASH
from stamp_core.tables.runs import CELL, frame

MATCHED = {  # columns and the number behind each; lengths are relative to the reference's
    "rows": "rows",
    "worst row, mean": "least_reference",
    "worst row, matched": "least",
    "length": "length",
    "cosine": "cosine",
    "rows used": "support",
}


def matching(records: Sequence[Record]) -> pd.DataFrame:
    """One row a cell and place of matching: means over rounds and seeds, as text; none if none."""
    found = []
    for (setting, method), rows in frame(records).groupby(CELL, sort=False):
        cell = [record for record in records if record.cell[:2] == (setting, method)]
        history = [row for record in cell for row in record.history]
        for place in ("spatial", "temporal"):
            notes = [row["notes"] for row in history if f"{place} rows" in row.get("notes", {})]
            if notes:
                begun = {"setting": setting, "method": method, "where": place, "n": str(len(rows))}
                found.append({**begun, **_matched(notes, place), "events": _events(history, place)})
    return pd.DataFrame(found)


def _matched(notes: Sequence[dict[str, float]], place: str) -> dict[str, str]:
    """The numbers of `matching` for one place, and the farthest from the optimum of all rounds."""
    means = {k: metrics.mean([row[f"{place} {v}"] for row in notes]) for k, v in MATCHED.items()}
    gap = max(row[f"{place} gap"] for row in notes)
    return {
        "rounds": str(len(notes)),
        **{k: f"{v:.2f}" for k, v in means.items()},
        "gap": f"{gap:.0e}",
    }


def _events(history: Sequence[dict[str, Any]], place: str) -> str:
    """What was out of the ordinary, and how often."""
    counts: Counter[str] = Counter()
    for row in history:
        counts.update({k: v for k, v in row.get("events", {}).items() if k.startswith(place)})
    said = [f"{name.partition(': ')[2]}: {count}" for name, count in counts.items()]
    return ", ".join(said) or DASH
