"""Figures of run records: accuracy, forgetting, matrices, gap, cost, ablation, and one training."""

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
from stamp_core.report.tables.ablation import BASES, PARTS, ablation_frame
from stamp_core.report.text import MB
from stamp_core.results import metrics
from stamp_core.results import ranks as significance
from stamp_core.results.records import SCORINGS, Record

_SHAPES = "osD^vPX"  # of settings in one panel
_NAMED = 8  # methods in a figure whose lines have names


# --- by experience


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
    present = list(defined.method.unique())
    ordered = dict.fromkeys(name for name in (*style.HIGHLIGHTED, *present) if name in present)
    shown = defined.method.isin(list(ordered)[:_NAMED])
    figure, panels = style.setting_panels(rows, 3.4, unit)
    for axis, setting, _ in panels:
        here = defined.setting == setting
        if unit == "percentage points":
            axis.axhline(0, color="0.3", linewidth=0.8, zorder=1)
        _draw_context(axis, defined[here & ~shown])
        labels = style.draw_lines(axis, defined[here & shown], "experience", "percent")
        style.add_labels(axis, labels)
        axis.set_xlabel("tasks learnt")
    others = "" if shown.all() else "; grey: other methods"
    caption = f"{style.seed_caption(defined[shown])}; {style.POINTS}{others}"
    style.add_caption(figure, title, caption)
    return figure


def _draw_context(axis: Axes, rows: pd.DataFrame) -> None:
    """The mean of each method as a grey line."""
    for _, group in rows.groupby("method"):
        means = group.groupby("experience").percent.mean()
        axis.plot(means, color="0.85", linewidth=0.8, zorder=1, label="_context")


def accuracy_all(records: Sequence[Record]) -> Figure:
    """Accuracy over the tasks learnt so far: a panel per method, the other methods in grey."""
    rows = _accuracies(frames.shared_seeds(records))
    figure, panels = _method_panels(rows, 7, 1.35, sharex=True, sharey=True)
    for axis, own in panels:
        others = rows[(rows.setting == own.setting.iloc[0]) & (rows.method != own.method.iloc[0])]
        _draw_context(axis, others)
        style.draw_lines(axis, own, "experience", "percent")
        axis.set_title(style.method_label(own), fontsize=8)
    caption = f"by tasks learnt; {style.seed_caption(rows)}; {style.POINTS}; grey: other methods"
    style.add_caption(figure, "Accuracy over the tasks learnt so far, %", caption)
    return figure


def matrices(records: Sequence[Record]) -> Figure:
    """Accuracy on each task after each task of the last cycle, mean over seeds, per method."""
    records = frames.shared_seeds(records)
    rows = frames.run_frame(records).assign(matrix=[_last_matrix(record) for record in records])
    figure, panels = _method_panels(rows, 6, 1.5)
    for axis, own in panels:
        mean = 100 * np.mean([*own.matrix], axis=0)
        numbers = range(1, len(mean) + 1)
        options: dict[str, Any] = {"annot": len(mean) <= 6, "fmt": ".0f", "vmin": 0, "vmax": 100}
        style.draw_table(axis, pd.DataFrame(mean, numbers, numbers), cmap="viridis", **options)
        axis.set_facecolor("0.7")
        axis.set_title(style.method_label(own), fontsize=9)
    caption = f"accuracy in %, mean, grey: undefined; {style.seed_caption(rows)}"
    style.add_caption(figure, "Accuracy on each task (column) after each task (row)", caption)
    return figure


def _last_matrix(record: Record) -> style.Values:
    """The accuracy matrix of a run's last cycle.  # [T, T]"""
    a = metrics.last_cycle(record.accuracy(frames.main_model(record)), record.tests.shape[1])
    return metrics.micro_average(a, record.tests)


def _method_panels(
    rows: pd.DataFrame, most: int, height: float, **grid: Any
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """A panel per setting and method with its rows, at most `most` in a line of panels.

    Each setting starts a line.
    """
    settings = [
        (name, [own for _, own in part.groupby("method", sort=False)])
        for name, part in rows.groupby("setting", sort=False)
    ]
    widest = max(len(methods) for _, methods in settings)
    columns = math.ceil(widest / math.ceil(widest / most))
    counts = [math.ceil(len(methods) / columns) * columns for _, methods in settings]
    figure, axes = style.panels(sum(counts), columns, height, **grid)
    panels = []
    for (setting, methods), count in zip(settings, counts, strict=True):
        line, axes = axes[:count], axes[count:]
        line[0].set_ylabel(setting)
        panels += list(zip(line, methods, strict=False))
        for axis in line[len(methods) :]:
            axis.remove()
    return figure, panels


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


# --- a row per method


def forgetting(records: Sequence[Record]) -> Figure:
    """The paper's forgetting: a row per method, by its personal models where there are any."""
    rows = frames.model_frame(frames.run_frame(frames.shared_seeds(records)))
    rows = rows[rows.personal_accuracy.isna() | (rows.model == "personal")]
    names = _row_names(rows)
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


def ranks(records: Sequence[Record]) -> Figure:
    """Mean ranks over settings and seeds, and the methods that are as good as the best one.

    Joint training, the bound, has none.
    """
    rows = frames.run_frame(records)
    rows = rows[rows.method != "joint"]
    blocks = frames.block_frame(rows)
    means = significance.block_ranks(blocks).mean().sort_values()
    critical = significance.critical_difference(*blocks.shape[::-1])
    names = _row_names(rows)
    figure, [axis] = style.panels(1, height=0.24 * len(means) + 0.6)
    axis.axvspan(means.iloc[0], means.iloc[0] + critical, color="0.9", zorder=0)
    for place, (method, rank) in enumerate(means.items()):
        axis.plot(rank, place, **style.method_style(str(method)))
    style.set_rows(axis, [names[str(method)] for method in means.index])
    axis.set(xlabel="mean rank by final accuracy (1 is the best)")
    ranked = rows.set_index(["setting", "seed"]).loc[blocks.index].reset_index()
    caption = f"over {len(blocks)} settings with a seed: {', '.join(blocks.index.unique(0))}; "
    caption += style.seed_caption(ranked)
    caption += f"\ngrey: not distinguishable from the best (Nemenyi, {critical:.1f} ranks)"
    caption += f"; Friedman's test: p = {significance.friedman(blocks):.1g}"
    style.add_caption(figure, "Ranks", caption)
    return figure


def _row_names(rows: pd.DataFrame) -> dict[str, str]:
    """The label of each method's row."""
    groups = rows.groupby("method", sort=False)
    return {str(method): style.method_label(own) for method, own in groups}


def ablation(records: Sequence[Record]) -> Figure:
    """Final accuracy and forgetting, a row per variant: its seeds, mean and interval."""
    rows = ablation_frame(records)
    names: list[str] = []
    for part in PARTS.values():
        variants = rows[rows.part == part].variant.unique()
        names += [part, *variants] if len(variants) else []
    units = {"accuracy": "%", "forgetting": "points"}
    shown = [(setting, measure) for measure in units for setting in rows.setting.unique()]
    figure, axes = style.panels(len(shown), len(shown), 0.24 * len(names) + 0.6, sharey=True)
    for axis, (setting, measure) in zip(axes, shown, strict=True):
        own = rows[rows.setting == setting].dropna(subset=f"main_{measure}")
        for (method, variant), group in own.groupby(["method", "variant"], sort=False):
            values = 100 * group[f"main_{measure}"]
            style.draw_interval(axis, names.index(variant), values, method)
            if method in BASES:
                colour = style.method_style(method)["color"]
                axis.axvline(values.mean(), color=colour, linewidth=0.8, zorder=1)
        if measure == "accuracy":  # an interval may leave 0 to 100 %
            axis.set_xlim(max(axis.get_xlim()[0], -3), min(axis.get_xlim()[1], 103))
        axis.set(xlabel=units[measure])
        axis.set_title(f"{setting}\n{measure}", fontsize=10)
        axis.grid(alpha=0.3, axis="x")
        axis.tick_params(length=0, axis="y")
    style.set_rows(axes[0], names)
    for text in axes[0].get_yticklabels():
        text.set_fontweight("bold" if text.get_text() in PARTS.values() else "normal")
    lines = " and ".join(method for method in BASES if method in set(rows.method))
    caption = f"{style.seed_caption(rows)}; {style.INTERVALS}"
    caption += f"; lines: means of {lines}" if lines else ""
    style.add_caption(figure, "Effect of each part of STAMP, compared with controls", caption)
    return figure


def nearest_mean(records: Sequence[Record]) -> Figure:
    """Final accuracy by the head and by the nearest class mean: a row per method."""
    rows = frames.run_frame(records).dropna(subset=["accuracy", "nearest_mean"])
    names = _row_names(rows)
    figure, panels = style.setting_panels(rows, 0.22 * len(names) + 0.8, "")
    for axis, _, part in panels:
        for method, group in part.groupby("method", sort=False):
            place, color = [*names].index(method), style.method_style(method)["color"]
            head, features = 100 * group.accuracy.mean(), 100 * group.nearest_mean.mean()
            axis.plot([head, features], [place, place], color=color, linewidth=1)
            axis.plot(head, place, "o", color=color)
            axis.plot(features, place, "o", color=color, markerfacecolor="white")
        axis.set_xlabel("final accuracy, %")
        style.set_rows(axis, [*names.values()] if axis is panels[0][0] else [""] * len(names))
        axis.grid(alpha=0.3)
    caption = "filled: the network with its head; open: the nearest class mean of its features"
    caption += f"\nmeans; {style.seed_caption(rows)}"
    style.add_caption(figure, "Final accuracy of the head and of the features", caption)
    return figure


def cost(records: Sequence[Record]) -> Figure:
    """Final accuracy beside what it costs: a row per method, a mark per setting."""
    rows = frames.run_frame(frames.shared_seeds(records)).dropna(subset="main_accuracy")
    names = _row_names(rows)
    columns = {
        "accuracy, %": 100 * rows.main_accuracy,
        "1000 images": rows.images / 1000,
        "MB in a round": (rows.bytes_up + rows.bytes_down) / MB,
    }
    settings = zip(itertools.cycle(_SHAPES), rows.setting.unique(), strict=False)
    shapes = {setting: shape for shape, setting in settings}
    figure, axes = style.panels(len(columns), height=0.22 * len(names) + 0.8, sharey=True)
    for axis, (label, values) in zip(axes, columns.items(), strict=True):
        for setting, shape in shapes.items():
            means = values[rows.setting == setting].groupby(rows.method).mean()
            places = [[*names].index(name) for name in means.index]
            colours = [style.method_style(name)["color"] for name in means.index]
            axis.scatter(means, places, s=26, marker=shape, c=colours, zorder=3)
            axis.plot([], [], shape, color="0.3", label=setting)  # for the legend
        if label != "accuracy, %":
            style.set_log_scale(axis)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    style.set_rows(axes[0], [*names.values()])
    caption = "images: differentiated in a run; MB: sent in both directions, no mark: nothing"
    caption += f"\nmeans; {style.seed_caption(rows)}"
    style.add_caption(figure, "Final accuracy and its cost", caption, axes)
    return figure
