"""The paper's settings and networks compared with ours."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

import pandas as pd
import torch

from stamp_core.config.params import PAPER, read_params, read_setting
from stamp_core.config.schema import Network, Setting
from stamp_core.data.dataset import source_options
from stamp_core.models.encoders import Shape
from stamp_core.models.networks import build_network
from stamp_core.report.tables import printed
from stamp_core.report.tables.text import DASH, MB, significant

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
MIB = 2**20
_RESNET, _SWIN = Network("resnet18", norm="batch"), Network("swin_t")
NETWORKS: list[tuple[str, Network, Shape, int]] = [  # data, network, images, classes
    ("CIFAR-10", _RESNET, (3, 32, 32), 10),
    ("CIFAR-100", _RESNET, (3, 32, 32), 100),
    ("Digit-10", _RESNET, (1, 28, 28), 10),
    ("Office-31", _RESNET, (3, 300, 300), 31),
    ("ImageNet-1K", _SWIN, (3, 224, 224), 1000),
    ("ImageNet-1K", _RESNET, (3, 224, 224), 1000),
    ("CIFAR-10", replace(_RESNET, stem="small"), (3, 32, 32), 10),
    ("CIFAR-100", replace(_RESNET, stem="small"), (3, 32, 32), 100),
    ("CIFAR-100", Network("resnet18", norm="group", stem="small"), (3, 32, 32), 100),
    ("CIFAR-100", Network("cnn", features=512, channels=(32, 64)), (3, 32, 32), 100),
    ("CIFAR-100", Network("lenet"), (3, 32, 32), 100),
]
_STATED = {  # parameters of FedAvg's networks in tab:modified-arch
    (data, printed.KINDS[row.model]): row.parameters
    for row in printed.ARCHITECTURES[printed.ARCHITECTURES.method == "FedAvg"].itertuples()
    for data in row.data.split(", ")
}


def training_details(params: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """One row an attribute, one column a data set of tab:training-details: the paper's and ours."""
    params = params or read_params(PAPER)
    columns: dict[str, dict[str, str]] = {}
    for data, name in printed.table_settings("tab:training-details").items():
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
        side = getattr(source_options(setting.data), "size", None)
        return f"{side} x {side}" if side else DASH
    if attribute not in OURS:
        return DASH
    value = attrgetter(OURS[attribute])(setting)
    return "N/A" if value is None else str(value)  # as the paper writes it


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


@cache
def _millions(names: str, kind: str | None) -> str:
    """The parameters of a kind of network on some data sets, `11.2 M`; a dash for no kind."""
    rows = [row for row in NETWORKS if row[0] in names.split(", ") and row[1].kind == kind]
    return ", ".join(sorted({f"{network_size(*row[1:])[0] / 1e6:.1f} M" for row in rows})) or DASH


def network_size(network: Network, shape: Shape, classes: int) -> tuple[int, int]:
    """The numbers of parameters and of values in buffers, counted without storing any."""
    with torch.device("meta"):
        module = build_network(replace(network, pretrained=None), shape, classes, seed=0)
    buffers = (b.numel() for b in module.buffers() if b.is_floating_point())
    return sum(p.numel() for p in module.parameters()), sum(buffers)


def architectures() -> pd.DataFrame:
    """One row a network, as text: its parts, its size, and what the paper states."""
    return pd.DataFrame([_network_row(*row) for row in NETWORKS])


def _network_row(data: str, network: Network, shape: Shape, classes: int) -> dict[str, str]:
    parameters, buffers = network_size(network, shape, classes)
    size = 4 * (parameters + buffers)  # bytes
    stated = _STATED.get((data, network.kind), DASH)
    rows = printed.printed_table("tab:baselines-task2", data)
    return {
        "data": data,
        "network": network.kind,
        "stem": network.stem if network.kind == "resnet18" else DASH,
        "norm": network.norm if network.norm != "none" else DASH,
        "images": " x ".join(map(str, shape)),
        "classes": f"{classes:,}",
        "parameters": f"{parameters:,}",
        "buffers": f"{buffers:,}",
        "MB one way": significant(size / MB, 4),
        "MiB one way": significant(size / MIB, 4),
        "paper: parameters": stated,
        "paper: MB one way": DASH if stated == DASH or rows.empty else f"{rows.mb_up['fedavg']}",
    }
