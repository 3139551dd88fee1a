"""The numbers that the paper prints, typed into three CSV files by the labels of its tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stamp_core.report.tables.text import DASH

_AS_TEXT: dict[str, Any] = {"dtype": str, "keep_default_na": False}  # N/A is what the paper prints
PRINTED = pd.read_csv(Path(__file__).with_name("paper.csv"))
DETAILS = pd.read_csv(Path(__file__).with_name("paper_settings.csv"), **_AS_TEXT)
ARCHITECTURES = pd.read_csv(Path(__file__).with_name("paper_networks.csv"), **_AS_TEXT)
KINDS = {"ResNet-18": "resnet18", "Swin-T": "swin_t"}  # the paper's plain networks
MAIN = ("tab:baselines-task2", "CIFAR-100")  # 10 clients, 2 classes per task
COMPONENTS = ("tab:component-effectiveness", "CIFAR-100")


def table_settings(label: str) -> dict[str, str]:
    """Our settings behind one of the paper's tables, by its data sets."""
    rows = pd.concat([PRINTED, DETAILS])
    rows = rows[rows.table == label]
    return dict(zip(rows.data, rows.setting, strict=True))


def printed_table(label: str, data: str) -> pd.DataFrame:
    """The rows of one of the paper's tables for one data set, indexed by method."""
    rows: pd.DataFrame = PRINTED[(PRINTED.table == label) & (PRINTED.data == data)]
    return rows.set_index("method")


def printed_scores(method: str, label: str, data: str) -> str:
    """Accuracy and forgetting of a method, `27.2 ± 2.2, AF 5.9 ± 0.9`; a dash without a row."""
    rows = printed_table(label, data)
    if method not in rows.index:
        return DASH
    row = rows.loc[method]
    accuracy = printed_number(row.accuracy, row.accuracy_std)
    return f"{accuracy}, AF {printed_number(row.forgetting, row.forgetting_std)}"


def printed_number(value: float, std: float) -> str:
    """A number with its deviation as the paper prints it, `27.2 ± 2.2`; a dash without one."""
    if np.isnan(value):
        return DASH
    return f"{value}" + ("" if np.isnan(std) else f" ± {std}")
