"""Figures of run records: accuracy, forgetting, matrices, gap, cost, and one training."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stamp_core.report import frames
from stamp_core.report.figures import style
from stamp_core.report.text import MB
from stamp_core.results import metrics
from stamp_core.results.records import SCORINGS, Record

_POINTS = "points: seeds, lines: means"
_SHAPES = "osD^vPX"  # of settings in one panel


def accuracy(records: Sequence[Record]) -> Figure:
    """Accuracy over the tasks learnt so far: a panel per setting, up to eight methods by name.

    Mean intersection over union where images have masks.
    """
    score = "mean IoU" if len(records[0].scores["initial"]) > len(SCORINGS) else "accuracy"
    title = f"{score[0].upper()}{score[1:]} over the tasks learnt so far"
    return _highlights(_accuracies(records), title, f"{score}, %")


def gap(records: Sequence[Record]) -> Figure:
    """Local minus global accuracy on the task just learnt, for up to eight methods by name."""
    rows = frames.experience_frame(records)
    title = "Local minus global accuracy on the task just learnt"
    return _highlights(rows.assign(percent=100 * rows.gap), title, "percentage points")


def _accuracies(records: Sequence[Record]) -> pd.DataFrame:
    """`experience_frame` with accuracy in %, by the personal models where there are any."""
    own = [record for record in records if not np.isnan(record.accuracy("personal")).all()]
    others = [record for record in records if record not in own]
    parts = [frames.experience_frame(some, some is own) for some in (others, own) if some]
    return pd.concat(parts).assign(percent=lambda rows: 100 * rows.accuracy)


def _highlights(rows: pd.DataFrame, title: str, unit: str) -> Figure:
    """Column `percent` by experience: eight methods by name, the others as grey lines."""
    defined = rows[rows.groupby(["setting", "method"]).percent.transform("count") > 0]
    methods = sorted(defined.method.unique(), key=lambda name: name not in style.HIGHLIGHTED)
    shown = methods[: len(style.HIGHLIGHTED)]
    figure, found = style.setting_panels(rows, 3.4, unit)
    for axis, setting, _ in found:
        part = defined[defined.setting == setting]
        if unit == "percentage points":
            axis.axhline(0, color="0.3", linewidth=0.8, zorder=1)
        _draw_context(axis, part[~part.method.isin(shown)])
        own = part[part.method.isin(shown)]
        style.add_labels(axis, style.draw_lines(axis, own, "experience", "percent"))
        axis.set_xlabel("tasks learnt")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    others = "; grey: other methods" if len(methods) > len(shown) else ""
    seeds = style.seed_caption(defined[defined.method.isin(shown)])
    style.add_caption(figure, title, f"{seeds}; {_POINTS}{others}")
    return figure


def _draw_context(axis: Axes, rows: pd.DataFrame) -> None:
    """The mean of each method as a grey line."""
    for _, group in rows.groupby("method"):
        means = group.groupby("experience").percent.mean()
        axis.plot(means, color="0.85", linewidth=0.8, zorder=1, label="_context")


def accuracy_all(records: Sequence[Record]) -> Figure:
    """Accuracy over the tasks learnt so far: a panel per method, the other methods in grey."""
    rows = _accuracies(records)
    figure, grid = _method_grid(rows, 7, 1.35, sharex=True, sharey=True)
    for (setting, method), axis in grid.items():
        part = rows[rows.setting == setting]
        _draw_context(axis, part[part.method != method])
        own = part[part.method == method]
        style.draw_lines(axis, own, "experience", "percent")
        axis.set_title(style.method_label(own), fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = f"by tasks learnt; {style.seed_caption(rows)}; {_POINTS}; grey: other methods"
    style.add_caption(figure, "Accuracy over the tasks learnt so far, %", caption)
    return figure


def _method_grid(
    rows: pd.DataFrame, most: int, height: float, **grid: Any
) -> tuple[Figure, dict[tuple[str, str], Axes]]:
    """A panel per setting and method, at most `most` in a row; each setting starts a row."""
    methods = {name: part.method.unique() for name, part in rows.groupby("setting", sort=False)}
    widest = max(map(len, methods.values()))
    columns = math.ceil(widest / math.ceil(widest / most))
    places = [math.ceil(len(names) / columns) * columns for names in methods.values()]
    figure, axes = style.panels(sum(places), columns, height, **grid)
    found: dict[tuple[str, str], Axes] = {}
    for (setting, names), end, count in zip(
        methods.items(), itertools.accumulate(places), places, strict=True
    ):
        own = axes[end - count : end]
        own[0].set_ylabel(setting)
        found |= {(setting, name): axis for name, axis in zip(names, own, strict=False)}
        for axis in own[len(names) :]:
            axis.remove()
    return figure, found


def forgetting(records: Sequence[Record]) -> Figure:
    """The paper's forgetting: a row per method, by its personal models where there are any."""
    rows = frames.model_frame(frames.run_frame(records))
    rows = rows[rows.personal_accuracy.isna() | (rows.model == "personal")]
    groups = rows.groupby("method", sort=False)
    names = {method: style.method_label(group) for method, group in groups}
    defined = rows.dropna(subset="main_forgetting")
    figure, axes = style.panels(rows.setting.nunique(), height=0.3 * len(names) + 0.6, sharey=True)
    for axis, setting in zip(axes, rows.setting.unique(), strict=True):
        for method, group in defined[defined.setting == setting].groupby("method", sort=False):
            style.draw_interval(axis, [*names].index(method), 100 * group.main_forgetting, method)
        axis.axvline(0, color="0.3", linewidth=0.8, zorder=1)
        axis.set(title=setting, xlabel="percentage points")
    style.set_rows(axes[0], [*names.values()])
    caption = f"{style.seed_caption(defined)}; {style.INTERVALS}"
    style.add_caption(figure, "Forgetting (lower is better)", caption)
    return figure


def nearest_mean(records: Sequence[Record]) -> Figure:
    """Final accuracy by the head and by the nearest class mean: a row per method."""
    rows = frames.run_frame(records).dropna(subset=["accuracy", "nearest_mean"])
    names = {name: style.method_label(part) for name, part in rows.groupby("method", sort=False)}
    figure, found = style.setting_panels(rows, 0.22 * len(names) + 0.8, "")
    for axis, _, part in found:
        for method, group in part.groupby("method", sort=False):
            place, color = [*names].index(method), style.method_style(method)["color"]
            head, features = 100 * group.accuracy.mean(), 100 * group.nearest_mean.mean()
            axis.plot([head, features], [place, place], color=color, linewidth=1)
            axis.plot(head, place, "o", color=color)
            axis.plot(features, place, "o", color=color, markerfacecolor="white")
        axis.set_xlabel("final accuracy, %")
        style.set_rows(axis, [*names.values()] if axis is found[0][0] else [""] * len(names))
        axis.grid(alpha=0.3)
    caption = "filled: the network with its head; open: the nearest class mean of its features"
    caption += f"\nmeans; {style.seed_caption(rows)}"
    style.add_caption(figure, "Final accuracy of the head and of the features", caption)
    return figure


def matrices(records: Sequence[Record]) -> Figure:
    """Accuracy on each task after each task of the last cycle, mean over seeds, per method."""
    rows = frames.run_frame(records).assign(matrix=[_last_matrix(record) for record in records])
    figure, grid = _method_grid(rows, 6, 1.5)
    for (setting, method), axis in grid.items():
        cell = rows[(rows.setting == setting) & (rows.method == method)]
        mean = 100 * np.mean([*cell.matrix], axis=0)
        numbers = range(1, len(mean) + 1)
        options: dict[str, Any] = {"annot": len(mean) <= 6, "fmt": ".0f", "vmin": 0, "vmax": 100}
        style.draw_table(axis, pd.DataFrame(mean, numbers, numbers), cmap="viridis", **options)
        axis.set_facecolor("0.7")
        axis.set_title(style.method_label(cell), fontsize=9)
    caption = f"accuracy in %, mean, grey: undefined; {style.seed_caption(rows)}"
    style.add_caption(figure, "Accuracy on each task (column) after each task (row)", caption)
    return figure


def _last_matrix(record: Record) -> style.Values:
    """The accuracy matrix of a run's last cycle.  # [T, T]"""
    a = metrics.last_cycle(record.accuracy(frames.main_model(record)), record.tests.shape[1])
    return metrics.micro_average(a, record.tests)


def cost(records: Sequence[Record]) -> Figure:
    """Final accuracy beside what it costs: a row per method, a mark per setting."""
    rows = frames.run_frame(records).dropna(subset="main_accuracy")
    rows["percent"], rows["thousands"] = 100 * rows.main_accuracy, rows.images / 1000
    rows["sent"] = (rows.bytes_up + rows.bytes_down) / MB
    names = {name: style.method_label(part) for name, part in rows.groupby("method", sort=False)}
    columns = {"percent": "accuracy, %", "thousands": "1000 images", "sent": "MB in a round"}
    figure, axes = style.panels(len(columns), height=0.22 * len(names) + 0.8, sharey=True)
    for axis, (column, label) in zip(axes, columns.items(), strict=True):
        for shape, (setting, part) in zip(
            itertools.cycle(_SHAPES), rows.groupby("setting", sort=False), strict=False
        ):
            means = part.groupby("method")[column].mean()
            places = [[*names].index(name) for name in means.index]
            colours = [style.method_style(name)["color"] for name in means.index]
            axis.scatter(means, places, s=26, marker=shape, c=colours, zorder=3)
            axis.plot([], [], shape, color="0.3", label=setting)  # for the legend
        if column != "percent":
            style.set_log_scale(axis)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    style.set_rows(axes[0], [*names.values()])
    caption = "images: differentiated in a run; MB: sent in both directions, no mark: nothing"
    caption += f"\nmeans; {style.seed_caption(rows)}"
    style.add_caption(figure, "Final accuracy and its cost", caption, axes)
    return figure


def training(records: Sequence[Record]) -> Figure:
    """Of one experiment: loss by round and accuracy by experience, a line per seed."""
    rows = frames.experience_frame(records)
    if len({record.run[:2] for record in records}) > 1:
        raise ValueError("training shows one setting with one method")
    setting, method, _ = records[0].run
    marks = {"color": style.method_style(method)["color"], "linewidth": 1, "alpha": 0.8}
    figure, (left, right) = style.panels(2, 2, 3.2)
    for record in records:
        loss = [np.nan if entry["loss"] is None else entry["loss"] for entry in record.history]
        left.plot(range(1, len(loss) + 1), loss, **marks)
    for place, entry in enumerate(records[0].history):
        if place and entry["round"] == 0:
            left.axvline(place + 0.5, color="0.8", linewidth=0.8, zorder=1)
    for _, group in rows.groupby("seed"):
        right.plot(group.experience, 100 * group.accuracy, marker=".", **marks)
    left.set(title="Training loss", xlabel="round (grey line: next task)", ylabel="loss")
    right.set(title="Accuracy so far", xlabel="tasks learnt", ylabel="accuracy, %")
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"{setting}, {style.method_label(rows)}"
    style.add_caption(figure, title, f"{style.seed_caption(rows)}: one line each")
    return figure
