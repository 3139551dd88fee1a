"""The numbers that the paper prints, by its tables, and the sizes of our networks, in CSV files."""

from pathlib import Path

import numpy as np
import pandas as pd

from workbench.report.text import DASH


def _read(name: str) -> pd.DataFrame:
    """A file of texts; N/A is what the paper prints."""
    return pd.read_csv(Path(__file__).with_name(name), dtype=str, keep_default_na=False)


PRINTED = pd.read_csv(Path(__file__).with_name("paper.csv"))
DETAILS = _read("paper_settings.csv")
ARCHITECTURES = _read("paper_networks.csv")
NETWORKS = _read("networks.csv")
KINDS = {"ResNet-18": "resnet18", "Swin-T": "swin_t"}  # the paper's plain networks
MAIN = ("tab:baselines-task2", "CIFAR-100")  # 10 clients, 2 classes per task
COMPONENTS = ("tab:component-effectiveness", "CIFAR-100")


def settings(label: str) -> dict[str, str]:
    """Our settings behind one of the paper's tables, by its data sets."""
    every = pd.concat([PRINTED, DETAILS])
    every = every[every.table == label]
    return dict(zip(every.data, every.setting, strict=True))


def table_of(setting: str) -> tuple[str, str] | None:
    """The table and data whose comparison a setting has, in full or in miniature, if any."""
    known = PRINTED[PRINTED.table.str.startswith("tab:baselines")]
    found = known[known.setting == setting.removesuffix("_small")]
    return (found.table.iloc[0], found.data.iloc[0]) if len(found) else None


def rows(label: str, data: str) -> pd.DataFrame:
    """The rows of one of the paper's tables for one data set, indexed by method."""
    table: pd.DataFrame = PRINTED[(PRINTED.table == label) & (PRINTED.data == data)]
    return table.set_index("method")


def scores(method: str, label: str, data: str) -> str:
    """Accuracy and forgetting of a method, `27.2 ± 2.2, AF 5.9 ± 0.9`; a dash without a row."""
    table = rows(label, data)
    if method not in table.index:
        return DASH
    row = table.loc[method]
    accuracy = number(row.accuracy, row.accuracy_std)
    return f"{accuracy}, AF {number(row.forgetting, row.forgetting_std)}"


def number(value: float, std: float) -> str:
    """A number with its deviation as the paper prints it, `27.2 ± 2.2`; a dash without one."""
    if np.isnan(value):
        return DASH
    return f"{value}" + ("" if np.isnan(std) else f" ± {std}")
