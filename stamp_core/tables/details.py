"""The paper's settings beside those of params.yaml, and its networks beside those built here."""

from collections.abc import Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

import pandas as pd

from stamp_core import config, data
from stamp_core.config import Setting
from stamp_core.tables.networks import NETWORKS, networks_page, size
from stamp_core.tables.paper import ARCHITECTURES, DASH, DETAILS, KINDS, settings
from stamp_core.tables.runs import markdown

PLACE = "tab:training-details"
OURS = {  # the paper's attributes and the numbers of a setting behind them
    "Task number": "split.tasks",
    "Batch Size": "training.batch",
    "Learning Rate": "training.rate",
    "Data heterogeneity": "split.alpha",
    "Client numbers": "split.clients",
    "Local training epoch": "training.epochs",
    "Client selection ratio": "training.participation",
    "Rounds per Task": "training.rounds",
}
NEVER = "N/A"  # the paper's word for no Dirichlet draw
MARK = "\N{NOT EQUAL TO}"
SETTINGS_NOTE = f"""\
One value where the paper and params.yaml say the same, *paper {MARK} ours* where they differ, in
parentheses the paper's where params.yaml has no such number. *Options of the data* are ours, as far
as they are not their source's defaults.
"""
NETWORKS_NOTE = f"""\
Ours are counted where the paper's model is a plain network, with the head over all classes, in
millions (M); {DASH} is not here or not counted: FedL2P's meta-networks are its method's own.
"""


def attributes(params: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """One row an attribute of a setting, as text: the paper's, ours, and a mark if they differ."""
    params = params or config.read()
    rows = []
    for name, setting in settings(PLACE).items():
        ours = config.setting(setting, params)
        rows += [{"data": name, "setting": setting, **row} for row in _compared(name, ours)]
    return pd.DataFrame(rows)


def _compared(name: str, setting: Setting) -> Iterator[dict[str, str]]:
    """What the paper says of one of its data sets, and ours."""
    for row in DETAILS[DETAILS.data == name].itertuples():
        ours = _ours(row.attribute, setting)
        differs = ours != DASH and not _same(row.value, ours)
        yield {
            **{"attribute": row.attribute, "paper": row.value, "ours": ours},
            "differs": MARK if differs else "",
        }
    chosen = [f"{key}: {value}" for key, value in setting.data.items() if key != "source"]
    ours = ", ".join(chosen) or DASH
    yield {"attribute": "Options of the data", "paper": DASH, "ours": ours, "differs": ""}


def _ours(attribute: str, setting: Setting) -> str:
    """What a setting says of one of the paper's attributes; a dash where it has no such number."""
    if attribute == "Image Size":
        side = getattr(data.options(setting.data), "size", None)
        return f"{side} x {side}" if side else DASH
    if attribute not in OURS:
        return DASH
    value = attrgetter(OURS[attribute])(setting)
    return NEVER if value is None else str(value)


def _same(paper: str, ours: str) -> bool:
    """Whether two texts say the same; of a picture's size ours has the sides alone."""
    return paper == ours or paper.endswith(f" x {ours}")


def training_details(params: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """The same for people: one row an attribute, one column a data set."""
    rows = attributes(params)
    found = {"setting": dict(zip(rows.data, rows.setting, strict=True))}
    for row in rows.itertuples():
        found.setdefault(row.attribute, {})[row.data] = _cell(row.paper, row.ours, row.differs)
    return pd.DataFrame([{"attribute": name, **cells} for name, cells in found.items()])


def _cell(paper: str, ours: str, differs: str) -> str:
    """Two values as one text."""
    if differs:
        return f"{paper} {differs} {ours}"
    if DASH in (paper, ours):
        return f"({paper})" if paper != DASH else ours
    return paper


def modified_networks() -> pd.DataFrame:
    """One row a method of tab:modified-arch, as text: model, and parameters there and here."""
    rows = [
        {
            **{"data": row.data, "method": row.method, "model": row.model or DASH},
            "parameters, paper": row.parameters or DASH,
            "parameters, ours": _counted(row.data, KINDS.get(row.model)),
        }
        for row in ARCHITECTURES.itertuples()
    ]
    return pd.DataFrame(rows)


@cache
def _counted(names: str, kind: str | None) -> str:
    """How many parameters a kind of network has on some data sets; a dash for no kind."""
    rows = [row for row in NETWORKS if row[0] in names.split(", ") and row[1].kind == kind]
    sizes = {f"{size(*row[1:])[0] / 1e6:.1f} M" for row in rows}
    return ", ".join(sorted(sizes)) or DASH


def details_sections() -> list[str]:
    """Both tables under their headings, and the networks of `architectures` below."""
    return [
        *("## Settings (tab:training-details)", SETTINGS_NOTE.strip()),
        markdown(training_details()),
        *("## Networks of methods (tab:modified-arch)", NETWORKS_NOTE.strip()),
        markdown(modified_networks()),
        f"#{networks_page().strip()}",  # its heading one level down
    ]
