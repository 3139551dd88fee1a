"""The paper's tables, settings and networks compared with ours: paper.md."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stamp_core.config.params import read_params, read_setting
from stamp_core.config.schema import Setting
from stamp_core.data.loading import find_source
from stamp_core.results.records import Record, history_total
from workbench.report import metrics
from workbench.report.frames import run_frame
from workbench.report.tables import page, printed
from workbench.report.tables.results import results_table, results_text
from workbench.report.text import DASH, MB, mean_std, significant

TABLES = {  # labels of the paper's tables, and our headings
    "tab:baselines-task2": "2 classes per task",
    "tab:baselines-task20": "20 classes per task",
    "tab:component-effectiveness": "Components of STAMP",
}
_PUBLISHED = "_published"  # ends the names of presets with published sizes, in the methods' rows
_COSTS = {  # our headings and the columns of paper.csv
    "s / round": "seconds",
    "MB up": "mb_up",
    "MB down": "mb_down",
    "GPU GB": "gpu_gb",
    "disk MB": "disk_mb",
}

_OURS_ALONE = {  # scores that the paper does not print, and the columns of `run_frame`
    "average incremental accuracy": "main_average_incremental_accuracy",
    "personal accuracy": "personal_accuracy",
}
_MEASURED = ("s / round", "GPU GB")  # differ with every training: not on a page

OURS = {  # the paper's attributes and the fields of a setting behind them
    "Task number": "split.tasks",
    "Batch Size": "training.batch_size",
    "Learning Rate": "training.lr",
    "Data heterogeneity": "split.alpha",
    "Client numbers": "split.clients",
    "Local training epoch": "training.epochs",
    "Client selection ratio": "training.participation",
    "Rounds per Task": "training.rounds",
}

_UNITS = {"MB": MB, "MiB": 2**20}


# --- scores and costs


def compare_with_paper(label: str, records: Sequence[Record]) -> pd.DataFrame:
    """One row a method of one of the paper's tables, as text: accuracy and forgetting."""
    return _comparison(label, records, _score_cells)


def compare_costs_with_paper(label: str, records: Sequence[Record]) -> pd.DataFrame:
    """One row a method of one of the paper's tables, as text: time, traffic, memory and disk."""
    return _comparison(label, records, _cost_cells)


def _comparison(
    label: str,
    records: Sequence[Record],
    cells: Callable[[pd.Series, pd.DataFrame], dict[str, str]],
) -> pd.DataFrame:
    """Data, method and n, then the cells of the paper's row and our runs, where there are any."""
    frame = _paper_frame(records)
    table = []
    for data, setting in printed.settings(label).items():
        paper = printed.rows(label, data)
        own = frame[frame.setting == setting]
        ours = [] if label == printed.COMPONENTS[0] else own.method
        for method in dict.fromkeys([*paper.index, *(m.removesuffix(_PUBLISHED) for m in ours)]):
            runs = own[own.method.isin([method, method + _PUBLISHED])]
            about = {"data": data, "method": method, "n": f"{len(runs) or DASH}"}
            table.append(about | cells(paper.reindex([method]).iloc[0], runs))
    shown = pd.DataFrame(table)
    return shown.loc[:, (shown != DASH).any()]


def _paper_frame(records: Sequence[Record]) -> pd.DataFrame:
    """`run_frame` and its costs in the paper's units, bytes of one client in a mean round."""
    if not records:
        return pd.DataFrame({"setting": [], "method": []}, dtype=str)
    rows = run_frame(records)
    return rows.assign(
        seconds=rows.client_seconds,
        mb_up=[_client_megabytes(record, "up", "completed") for record in records],
        mb_down=[_client_megabytes(record, "down", "participants") for record in records],
        gpu_gb=(rows.gpu / 1e9).replace(0, np.nan),  # there was none
        disk_mb=rows.disk / MB,
    )


def _client_megabytes(record: Record, direction: str, clients: str) -> float:
    sent = history_total(record.history, "bytes", direction)
    return sent / (history_total(record.history, clients) or np.nan) / MB


def _score_cells(paper: pd.Series, runs: pd.DataFrame) -> dict[str, str]:
    row = {"model": runs.model.iloc[0] if len(runs) else DASH}
    for name, column in {"accuracy": "accuracy", "AF": "forgetting"}.items():
        values = runs.get(f"main_{column}", ())
        difference = 100 * metrics.summarise(values)["mean"] - paper[column]
        row[f"{name}, paper"] = printed.number(paper[column], paper[f"{column}_std"])
        row[f"{name}, ours"] = mean_std(values)
        row[f"{name}, difference"] = DASH if np.isnan(difference) else f"{difference:+z.1f}"
    ours = {name: mean_std(runs.get(column, ())) for name, column in _OURS_ALONE.items()}
    return row | {f"{name}, ours": text for name, text in ours.items()}


def _cost_cells(paper: pd.Series, runs: pd.DataFrame) -> dict[str, str]:
    row = {}
    for name, column in _COSTS.items():
        values = runs.get(column, pd.Series(dtype=float))
        ours = values.max() if column in ("gpu_gb", "disk_mb") else values.mean(skipna=False)
        row[f"{name}, paper"] = significant(paper[column], 6)  # all digits that are printed
        row[f"{name}, ours"] = significant(ours)
    return row


# --- settings


def training_details(params: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """One row an attribute, one column a data set of tab:training-details: the paper's and ours."""
    params = params or read_params()
    columns: dict[str, dict[str, str]] = {}
    for data, name in printed.settings("tab:training-details").items():
        setting = read_setting(name, params)
        options = [f"{key}: {value}" for key, value in setting.data.items() if key != "source"]
        columns[data] = {"setting": name}
        for row in printed.DETAILS[printed.DETAILS.data == data].itertuples():
            columns[data][row.attribute] = _compare(row.value, _our_value(row.attribute, setting))
        columns[data]["Options of the data"] = ", ".join(options) or DASH
    return pd.DataFrame(columns).rename_axis("attribute").reset_index()


def _compare(paper: str, ours: str) -> str:
    """The value that both have, `paper ≠ ours`, or the paper's in parentheses without ours."""
    if ours == DASH:
        return f"({paper})"
    return paper if paper == ours or paper.endswith(f" x {ours}") else f"{paper} ≠ {ours}"


def _our_value(attribute: str, setting: Setting) -> str:
    """Our value of one of the paper's attributes; a dash where settings have no such parameter."""
    if attribute == "Image Size":  # without channels
        side = getattr(find_source(setting.data)[1], "size", None)
        return f"{side} x {side}" if side else DASH
    if attribute not in OURS:
        return DASH
    value = attrgetter(OURS[attribute])(setting)
    return "N/A" if value is None else str(value)  # as the paper writes it


# --- networks


def modified_networks() -> pd.DataFrame:
    """One row a method of tab:modified-arch, as text: its model, and parameters there and here."""
    rows = [
        {
            **{"data": row.data, "method": row.method, "model": row.model or DASH},
            "parameters, paper": row.parameters or DASH,
            "parameters, ours": _millions(row.data, printed.KINDS.get(row.model)),
        }
        for row in printed.ARCHITECTURES.itertuples()
    ]
    return pd.DataFrame(rows)


def _millions(names: str, kind: str | None) -> str:
    """The parameters of a kind of network on some data sets, `11.2 M`; a dash for no kind."""
    own = printed.NETWORKS[printed.NETWORKS.data.isin(names.split(", "))]
    sizes = own[own.network == kind].parameters.astype(float)
    return ", ".join(sorted({f"{size / 1e6:.1f} M" for size in sizes})) or DASH


def architectures() -> pd.DataFrame:
    """One row a network, as text: its parts, its size, and what the paper states of FedAvg's."""
    fedavg = printed.ARCHITECTURES[printed.ARCHITECTURES.method == "FedAvg"]
    stated = {
        (data, printed.KINDS[row.model]): row.parameters
        for row in fedavg.itertuples()
        for data in row.data.split(", ")
    }
    table = []
    for row in printed.NETWORKS.to_dict("records"):
        numbers = {name: int(row[name]) for name in ("classes", "parameters", "buffers")}
        size = 4 * (numbers["parameters"] + numbers["buffers"])  # bytes
        paper = printed.rows("tab:baselines-task2", row["data"])
        known = stated.get((row["data"], row["network"]), DASH)
        row |= {name: f"{number:,}" for name, number in numbers.items()}
        row |= {f"{name} one way": significant(size / unit, 4) for name, unit in _UNITS.items()}
        shown = known != DASH and len(paper)
        row["paper: parameters"] = known
        row["paper: MB one way"] = f"{paper.mb_up['fedavg']}" if shown else DASH
        table.append(row)
    return pd.DataFrame(table)


# --- the page


def write_paper(records: Sequence[Record], folder: Path) -> Path:
    """The file written: paper.md, with every table of the paper compared with our runs."""
    runs = page.describe_runs(records) if records else "0 runs: the paper's numbers alone."
    parts = ["# The paper's tables compared with our runs", runs]
    settings = set[str]()
    for label, title in TABLES.items():
        parts.append(f"## {title} ({label})")
        tables = {"": compare_with_paper(label, records)}
        if label != printed.COMPONENTS[0]:  # the paper prints no costs of components
            costs = compare_costs_with_paper(label, records)
            measured = [f"{name}, ours" for name in _MEASURED]  # which differ with every training
            tables["Costs:"] = costs.drop(columns=measured, errors="ignore")
        for data, setting in printed.settings(label).items():
            settings.add(setting)
            parts.append(f"### {data}, setting `{setting}`")
            for heading, rows in tables.items():
                parts += [heading, page.markdown(rows[rows.data == data].drop(columns="data"))]
    if others := [record for record in records if record.run[0] not in settings]:
        text = results_text(results_table(others))
        parts += ["## Settings without a printed table", page.markdown(text)]
    for title, rows in {
        "Settings (tab:training-details)": training_details(),
        "Networks of methods (tab:modified-arch)": modified_networks(),
        "Networks": architectures(),
    }.items():
        parts += [f"## {title}", page.markdown(rows), page.definitions(title)]
    parts += ["## Definitions", page.definitions("Paper")]
    return page.write_parts(folder / "paper.md", parts)
