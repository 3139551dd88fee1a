"""The page of selection rules: accuracy by exemplars per class, differences, selection time."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stamp_core.report.tables import comparisons
from stamp_core.report.tables.frames import run_frame
from stamp_core.report.tables.text import DASH, MB, markdown, mean_std, significant, write_page
from stamp_core.results.records import Record, history_total

RULES = {  # names that people read
    "uniform": "random",
    "herding": "herding (PCS)",
    "k_centre": "k-centre",
    "least_squares": "PCS as printed",
    "nonnegative": "PCS as printed, a ≥ 0",
    "ocs": "OCS",
    "bcsr": "BCSR",
    "csrel": "CSReL",
    "sre2l": "SRe²L",
}
RANDOM = RULES["uniform"]  # the control
ALL_IMAGES = 10**6  # exemplars per class with which every image is kept
_HEADING = "{} per class"


def coreset_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run: that of `run_frame`, selection rule, exemplars per class, times and events."""
    return pd.concat([run_frame(records), pd.DataFrame(map(_selection, records))], axis=1)


def _selection(record: Record) -> dict[str, Any]:
    """Rule, exemplars per class, and milliseconds of one client for one task."""
    memory: dict[str, Any] = record.about["method"].get("memory") or {}
    rounds = [row for row in record.history if "coreset" in row["seconds"]]
    selections = sum(row["completed"] for row in rounds) or np.nan
    seconds = history_total(rounds, "seconds", "coreset")
    training = history_total(record.history, "seconds", "clients") - seconds
    rule = memory.get("selection", "no memory")
    return {
        "selection": RULES.get(rule, rule),
        "exemplars": memory.get("exemplars_per_class", 0),
        "selection_ms": 1000 * seconds / selections,
        "training_ms": 1000 * training / selections,
        "events": sum((Counter(row["events"]) for row in record.history), Counter[str]()),
    }


def reference_memories(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Of the rows of `coreset_frame` those without a memory, and those that keep all images."""
    return rows[rows.exemplars == 0], rows[rows.exemplars >= ALL_IMAGES]


def limited_memory(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `coreset_frame` that keep some exemplars, but not all images."""
    return rows[(rows.exemplars > 0) & (rows.exemplars < ALL_IMAGES)]


def coreset_accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a rule of one setting, as text: accuracy by exemplars per class, none and all."""
    table = comparisons.accuracy_table(limited_memory(rows), ["selection"], "exemplars", _HEADING)
    none, complete = reference_memories(rows)
    for place, name, runs in ((-1, "no memory", none), (len(table), "all images", complete)):
        if len(runs):
            accuracies = [mean_std(runs.accuracy)] * (len(table.columns) - 2)
            table.loc[place] = [name, str(runs.seed.nunique()), *accuracies]
    return table.sort_index(ignore_index=True)


def coreset_differences(rows: pd.DataFrame, base: str = RANDOM) -> pd.DataFrame:
    """One row a setting, rule and number of exemplars: its paired difference from `base`."""
    rows = limited_memory(rows).sort_values("exemplars", kind="stable")
    return comparisons.paired_differences(rows, "selection", base, ["setting", "exemplars"])


def coreset_findings(rows: pd.DataFrame) -> str:
    """List items: which rules are above and below random selection and herding, by exemplars."""
    items = []
    for base in (RANDOM, RULES["herding"]):
        heading = f"{{setting}}, accuracy compared with {base} at {{exemplars}} per class"
        pairs, by = coreset_differences(rows, base), ["setting", "exemplars"]
        items.append(comparisons.interval_sentences(pairs, "selection", by, heading))
    return "\n".join(filter(None, items))


def coreset_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a rule of one setting, as text: its costs at the largest limited memory."""
    limited = limited_memory(rows)
    most = limited[limited.exemplars == limited.exemplars.max()]
    table = []
    for rule, runs in most.groupby("selection", sort=False):
        events = sum(limited[limited.selection == rule].events, Counter[str]())
        table.append(
            {
                "selection": rule,
                "exemplars": str(runs.exemplars.iloc[0]),
                "selection, ms": significant(runs.selection_ms.mean(), 2),
                "training, ms": significant(runs.training_ms.mean(), 2),
                "share": significant(runs.selection_ms.mean() / runs.training_ms.mean(), 2),
                "MB": significant(runs.disk.max() / MB, 2),
                "events": "; ".join(f"{event} ({n})" for event, n in events.items()) or DASH,
            }
        )
    return pd.DataFrame(table)


def write_coresets(records: Sequence[Record], folder: Path) -> Path:
    """The file written: coresets.md."""
    return write_page(folder / "coresets.md", "Coresets", records, _section)


def _section(records: Sequence[Record]) -> list[str]:
    """Findings, accuracies, differences from random selection and costs of one setting."""
    rows = coreset_frame(records)
    pairs = {RANDOM: coreset_differences(rows)}
    sections = comparisons.difference_sections(pairs, ["selection"], "exemplars", _HEADING)
    tables = [markdown(coreset_accuracies(rows)), *sections]
    return [coreset_findings(rows), *tables, "Costs:", markdown(coreset_costs(rows))]
