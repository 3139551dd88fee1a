"""What the paper prints, typed into three files with the place it stands at: to be put beside."""

from pathlib import Path

import numpy as np
import pandas as pd

DASH = "\N{EN DASH}"  # what people read where a number is undefined
FOLDER = Path(__file__).parent
AS_TEXT = {"dtype": str, "keep_default_na": False}  # N/A is what the paper prints
TYPED = pd.read_csv(FOLDER / "paper.csv")
DETAILS = pd.read_csv(FOLDER / "paper_settings.csv", **AS_TEXT)  # tab:training-details
ARCHITECTURES = pd.read_csv(FOLDER / "paper_networks.csv", **AS_TEXT)  # tab:modified-arch
KINDS = {"ResNet-18": "resnet18", "Swin-T": "swin_t"}  # its plain networks
MAIN = ("tab:baselines-task2", "CIFAR-100")  # 10 clients, 2 classes a task
COMPONENTS = ("tab:component-effectiveness", "CIFAR-100")
SETTINGS = {  # the setting of params.yaml behind a place in the paper
    MAIN: "cifar100_c2",
    ("tab:baselines-task2", "ImageNet-1K"): "imagenet1k_c2",
    ("tab:baselines-task20", "CIFAR-100"): "cifar100_c20",
    ("tab:baselines-task20", "ImageNet-1K"): "imagenet1k_c20",
    COMPONENTS: "cifar100_c2",
    ("tab:component-effectiveness", "ImageNet-1K"): "imagenet1k_c2",
    ("tab:training-details", "CIFAR-100, 20 classes"): "cifar100_c20",
    ("tab:training-details", "CIFAR-100, 2 classes"): "cifar100_c2",
    ("tab:training-details", "ImageNet-1K, 20 classes"): "imagenet1k_c20",
    ("tab:training-details", "ImageNet-1K, 2 classes"): "imagenet1k_c2",
    ("tab:training-details", "CIFAR-10, non-IID"): "cifar10_alpha",
    ("tab:training-details", "CIFAR-100, non-IID"): "cifar100_alpha",
    ("tab:training-details", "Digit-10, non-IID"): "digit10_alpha",
    ("tab:training-details", "Office-31, non-IID"): "office31_alpha",
}


def settings(place: str) -> dict[str, str]:
    """The settings of params.yaml behind one of the paper's tables, by its data sets."""
    return {data: setting for (table, data), setting in SETTINGS.items() if table == place}


def printed(place: str, data: str) -> pd.DataFrame:
    """The rows of one of the paper's tables for one of its data sets, by method."""
    rows: pd.DataFrame = TYPED[(TYPED.place == place) & (TYPED.data == data)].set_index("method")
    return rows


def accuracy_and_forgetting(method: str, place: str, data: str) -> str:
    """Both of a method in %, as the paper prints them; a dash where it has no such row."""
    rows = printed(place, data)
    if method not in rows.index:
        return DASH
    row = rows.loc[method]
    found = with_deviation(row.accuracy, row.accuracy_std)
    return f"{found}, AF {with_deviation(row.forgetting, row.forgetting_std)}"


def with_deviation(value: float, std: float) -> str:
    """A number as the paper prints it, `27.2 ± 2.2`; a dash where there is none."""
    if np.isnan(value):
        return DASH
    return f"{value}" + ("" if np.isnan(std) else f" ± {std}")
