"""What the paper prints, typed into paper.csv with the place it stands at: to be put beside."""

from pathlib import Path

import numpy as np
import pandas as pd

DASH = "\N{EN DASH}"  # what people read where a number is undefined
TYPED = pd.read_csv(Path(__file__).with_name("paper.csv"))
MAIN = ("tab:baselines-task2", "CIFAR-100")  # 10 clients, 2 classes a task
COMPONENTS = ("tab:component-effectiveness", "CIFAR-100")


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
    both = [(row.accuracy, row.accuracy_std), (row.forgetting, row.forgetting_std)]
    found = [f"{value}" + ("" if np.isnan(std) else f" ± {std}") for value, std in both]
    return f"{found[0]}, AF {found[1]}"
