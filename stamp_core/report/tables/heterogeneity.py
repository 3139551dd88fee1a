"""The page of data heterogeneity: accuracy by Dirichlet α, differences and trends."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from stamp_core.report.tables import comparisons
from stamp_core.report.tables.frames import run_frame
from stamp_core.report.tables.text import markdown, write_page
from stamp_core.results.records import Record

_BASES = ("fedavg", "replay")  # that the page compares with, where they were run
_HEADING = "α = {:g}"


def alpha_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run: that of `run_frame` with `alpha`; `accuracy` is that of the main model."""
    rows = run_frame(records)
    alphas = [float(record.about["setting"]["split"]["alpha"]) for record in records]
    return rows.assign(alpha=alphas, accuracy=rows.main_accuracy)


def alpha_accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a method of one setting, as text: accuracy by α."""
    return comparisons.accuracy_table(rows, ["method", "model"], "alpha", _HEADING)


def alpha_differences(rows: pd.DataFrame, base: str = _BASES[0]) -> pd.DataFrame:
    """One row a setting, method and α: its paired difference from `base`."""
    rows = rows.sort_values("alpha", kind="stable")
    return comparisons.paired_differences(rows, "method", base, ["setting", "alpha"])


def alpha_findings(rows: pd.DataFrame) -> str:
    """List items: whose accuracy changes from the least to the largest α; who is above whom."""
    items = []
    for setting, own in rows.groupby("setting", sort=False):
        least, most = own.alpha.min(), own.alpha.max()
        ends = own[own.alpha.isin([least, most])]
        trend = comparisons.paired_differences(ends, "alpha", least, ["setting", "method"])
        heading = f"{setting}, accuracy at {_HEADING} compared with {_HEADING}".format(most, least)
        items.append(comparisons.interval_sentences(trend, "method", ["setting"], heading))
        for base in _BASES:
            heading = f"{{setting}}, accuracy compared with {base} at α = {{alpha:g}}"
            pairs, by = alpha_differences(own, base), ["setting", "alpha"]
            items.append(comparisons.interval_sentences(pairs, "method", by, heading))
    return "\n".join(filter(None, items))


def write_heterogeneity(records: Sequence[Record], folder: Path) -> Path:
    """The file written: heterogeneity.md."""
    return write_page(folder / "heterogeneity.md", "Data heterogeneity", records, _section)


def _section(records: Sequence[Record]) -> list[str]:
    """Findings, accuracies and differences of one setting."""
    rows = alpha_frame(records)
    pairs = {base: alpha_differences(rows, base) for base in _BASES}
    sections = comparisons.difference_sections(pairs, ["method"], "alpha", _HEADING)
    return [alpha_findings(rows), markdown(alpha_accuracies(rows)), *sections]
