"""How well gradients were matched, from the notes of each round."""

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from stamp_core.report.tables.text import DASH
from stamp_core.results import metrics
from stamp_core.results.records import Record

MATCHED = {  # columns and the note behind each; products are relative to |reference|²
    "gradients": "gradient count",
    "worst product, mean": "worst_product_reference",
    "worst product, matched": "worst_product",
    "length": "length",
    "cosine": "cosine",
    "gradients with weight": "support",
}


def matching_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row an experiment and side (spatial, temporal) as text: means over rounds and seeds."""
    table = []
    for setting, method in dict.fromkeys(record.run[:2] for record in records):
        runs = [record for record in records if record.run[:2] == (setting, method)]
        history = [row for record in runs for row in record.history]
        for side in ("spatial", "temporal"):
            notes = [row["notes"] for row in history if f"{side} gap" in row.get("notes", {})]
            if not notes:
                continue
            means = {k: metrics.mean([n[f"{side} {v}"] for n in notes]) for k, v in MATCHED.items()}
            events = Counter[str]()
            for row in history:
                events.update({k: n for k, n in row["events"].items() if k.startswith(side)})
            labels = {"setting": setting, "method": method, "where": side, "n": str(len(runs))}
            table.append(
                {
                    **(labels | {"rounds": str(len(notes))}),
                    **{name: f"{value:.2f}" for name, value in means.items()},
                    "duality gap": f"{max(row[f'{side} gap'] for row in notes):.0e}",  # the largest
                    "events": ", ".join(f"{k.partition(': ')[2]}: {n}" for k, n in events.items()),
                }
            )
    return pd.DataFrame(table).replace({"events": {"": DASH}})
