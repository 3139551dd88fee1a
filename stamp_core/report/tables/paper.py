"""The paper's tables compared with our runs of the same settings: paper.md."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from stamp_core.config.params import PAPER, read_params
from stamp_core.report.tables import paper_details, printed, text
from stamp_core.report.tables.frames import run_frame
from stamp_core.report.tables.results import results_table
from stamp_core.results import metrics
from stamp_core.results.records import Record, history_total

TABLES = {  # labels of the paper's tables, and our headings
    "tab:baselines-task2": "2 classes per task",
    "tab:baselines-task20": "20 classes per task",
    "tab:component-effectiveness": "Components of STAMP",
}
PUBLISHED = "_published"  # ends the names of presets with published sizes, in the methods' rows
_COSTS = {  # our headings and the columns of paper.csv
    "s / round": "seconds",
    "MB up": "mb_up",
    "MB down": "mb_down",
    "GPU GB": "gpu_gb",
    "disk MB": "disk_mb",
}


def compare_with_paper(label: str, records: Sequence[Record]) -> pd.DataFrame:
    """One row a method of one of the paper's tables, as text: accuracy and forgetting."""
    return _comparison(label, records, _score_columns)


def compare_costs_with_paper(label: str, records: Sequence[Record]) -> pd.DataFrame:
    """One row a method of one of the paper's tables, as text: time, traffic, memory and disk."""
    return _comparison(label, records, _cost_columns)


def _comparison(
    label: str,
    records: Sequence[Record],
    columns: Callable[[pd.Series, list[Record]], dict[str, str]],
) -> pd.DataFrame:
    """Data, method and n, then `columns` of the paper's row and our runs.

    Methods are the paper's, then ours; of the components the paper's alone.
    """
    table = []
    for data, setting in printed.table_settings(label).items():
        rows = printed.printed_table(label, data)
        own = [record for record in records if record.run[0] == setting]
        methods = dict.fromkeys(rows.index)
        if label != printed.COMPONENTS[0]:
            ours = [*read_params(PAPER)["grid"]["method"], *(record.run[1] for record in own)]
            methods |= dict.fromkeys(name.removesuffix(PUBLISHED) for name in ours)
        for method in methods:
            names = (method, method + PUBLISHED)
            runs = [record for record in own if record.run[1] in names]
            about = {"data": data, "method": method, "n": f"{len(runs) or text.DASH}"}
            table.append(about | columns(rows.reindex([method]).iloc[0], runs))
    return pd.DataFrame(table)


def _score_columns(paper: pd.Series, records: list[Record]) -> dict[str, str]:
    runs = run_frame(records).to_dict("list") if records else {}
    row = {"model": runs["model"][0] if records else text.DASH}
    for name, column in {"accuracy": "accuracy", "AF": "forgetting"}.items():
        values = runs.get(f"main_{column}", [])
        difference = 100 * metrics.summarise(values)["mean"] - paper[column]
        row[f"{name}, paper"] = printed.printed_number(paper[column], paper[f"{column}_std"])
        row[f"{name}, ours"] = text.mean_std(values)
        row[f"{name}, difference"] = text.DASH if np.isnan(difference) else f"{difference:+z.1f}"
    return row | {"personal accuracy, ours": text.mean_std(runs.get("personal_accuracy", []))}


def _cost_columns(paper: pd.Series, records: list[Record]) -> dict[str, str]:
    costs = _costs(records) if records else dict.fromkeys(_COSTS.values(), np.nan)
    row = {}
    for name, column in _COSTS.items():
        row[f"{name}, paper"] = text.significant(paper[column], 6)  # all digits that are printed
        row[f"{name}, ours"] = text.significant(costs[column])
    return row


def _costs(records: list[Record]) -> dict[str, float]:
    """The costs of a method in the paper's units; bytes are of one client in a mean round."""
    runs = run_frame(records)
    sent = {
        direction: [
            history_total(record.history, "bytes", direction)
            / (history_total(record.history, clients) or np.nan)
            for record in records
        ]
        for direction, clients in {"up": "completed", "down": "participants"}.items()
    }
    return {
        "seconds": runs.client_seconds.mean(),
        "mb_up": float(np.mean(sent["up"])) / text.MB,
        "mb_down": float(np.mean(sent["down"])) / text.MB,
        "gpu_gb": runs.gpu.max() / 1e9 or np.nan,  # 0: there was none
        "disk_mb": runs.disk.max() / text.MB,
    }


def write_paper(records: Sequence[Record], folder: Path) -> Path:
    """The file written: paper.md, with every table of the paper compared with our runs."""
    runs = text.describe_runs(records) if records else "0 runs: the paper's numbers alone."
    parts = ["# The paper's tables compared with our runs", runs]
    settings = set[str]()
    for label, title in TABLES.items():
        parts += [f"## {title} ({label})", *_section(label, records)]
        settings.update(printed.table_settings(label).values())
    if others := [record for record in records if record.run[0] not in settings]:
        parts += ["## Settings without a printed table", text.markdown(results_table(others))]
    for title, rows in {
        "Settings (tab:training-details)": paper_details.training_details(),
        "Networks of methods (tab:modified-arch)": paper_details.modified_networks(),
        "Networks": paper_details.architectures(),
    }.items():
        parts += [f"## {title}", text.markdown(rows), text.definitions(title)]
    return text.write_parts(
        folder / "paper.md", [*parts, "## Definitions", text.definitions("Paper")]
    )


def _section(label: str, records: Sequence[Record]) -> list[str]:
    """Scores and costs of one of the paper's tables under a heading for each data set."""
    tables = [compare_with_paper(label, records), compare_costs_with_paper(label, records)]
    parts = []
    for data, setting in printed.table_settings(label).items():
        own, costs = (
            text.markdown(rows[rows.data == data].drop(columns="data")) for rows in tables
        )
        parts += [f"### {data}, setting `{setting}`", own]
        if label != printed.COMPONENTS[0]:  # the paper prints no costs of components
            parts += ["Costs:", costs]
    return parts
