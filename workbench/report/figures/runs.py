"""Figures of run records: accuracy, forgetting, matrices, gap, cost, ablation, and one training."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from stamp_core.results.metrics import last_cycle, micro_average
from stamp_core.results.records import SCORINGS, Record
from workbench.report import frames
from workbench.report.figures import style

_SHAPES = "osD^vPX"  # of settings in one panel
_NAMED = 8  # methods in a figure whose lines have names
_MATRICES = 9  # in a line of panels
_HEIGHT = 1.12  # inches of a line of matrices
_ROW = 0.19  # inches of a row in a heat map
_ANNOTATED = 6  # tasks in a heat map whose numbers can be read
_HEAT: dict[str, Any] = {"cmap": "viridis", "fmt": ".0f", "vmin": 0}


# --- by experience


def accuracy(records: Sequence[Record]) -> Figure:
    """Accuracy over the tasks learnt so far: a panel per setting, up to eight methods by name."""
    score = "mean IoU" if len(records[0].scores["initial"]) > len(SCORINGS) else "accuracy"
    title = f"{score[0].upper()}{score[1:]} over the tasks learnt so far"
    return _highlights(_accuracies(frames.without_diverged(records)), title, f"{score}, %")


def gap(records: Sequence[Record]) -> Figure:
    """Local minus global accuracy on the task just learnt, for up to eight methods by name."""
    rows = frames.experience_frame(frames.without_diverged(records))
    title = "Local minus global accuracy on the task just learnt"
    return _highlights(rows.assign(percent=100 * rows.gap), title, "percentage points")


def _accuracies(records: Sequence[Record]) -> pd.DataFrame:
    own = [record for record in records if not np.isnan(record.accuracy("personal")).all()]
    others = [record for record in records if record not in own]
    parts = [frames.experience_frame(some, some is own) for some in (others, own) if some]
    return pd.concat(parts).assign(percent=lambda rows: 100 * rows.accuracy)


def _highlights(rows: pd.DataFrame, title: str, unit: str) -> Figure:
    """Column `percent` by experience: eight methods by name, the range of the others in grey.

    Those of a setting have the same seeds, the most there are: a headline method with fewer is one
    of the others. Settings share the y axis: the same distance is the same number of points. Its
    range is that of the methods by name: personal models can be far above all global ones.
    """
    defined = rows[rows.groupby(["setting", "method"]).percent.transform("count") > 0]
    seeds = defined.groupby(["setting", "method"]).seed.transform("nunique")
    most = seeds == seeds.groupby(defined.setting).transform("max")
    present = list(defined.method.unique())
    ordered = dict.fromkeys(name for name in (*style.HIGHLIGHTED, *present) if name in present)
    shown = most & defined.method.isin(list(ordered)[:_NAMED])
    figure, panels = style.setting_panels(rows, 3.4, unit, "tasks learnt", sharey=True)
    labels = dict[Axes, list[style.Label]]()
    for axis, setting, _ in panels:
        here = defined.setting == setting
        if unit == "percentage points":
            axis.axhline(0, color="0.3", linewidth=0.8, zorder=1)
        labels[axis] = style.draw_lines(axis, defined[here & shown], "experience", "percent")
    for axis, setting, _ in panels:  # now that the range of the shared axis is known
        axis.set_ylim(axis.get_ylim())
        _draw_context(axis, defined[(defined.setting == setting) & ~shown])
        style.add_labels(axis, labels[axis])
    rest = "; grey: range of the other methods' means, which may exceed the axis"
    others = "" if shown.all() else rest
    counts = defined[shown].groupby("setting", sort=False).seed.nunique()
    where = ", ".join(f"{count} on {setting}" for setting, count in counts.items())
    caption = style.seed_caption(defined[shown]) if counts.nunique() < 2 else f"seeds: {where}"
    style.add_caption(figure, title, f"{caption}; {style.POINTS}{others}")
    return figure


def _draw_context(axis: Axes, rows: pd.DataFrame) -> None:
    """The range of the methods' means as a grey band: forty lines could not be distinguished."""
    means = rows.groupby(["method", "experience"]).percent.mean().groupby("experience")
    low, high = means.min().dropna(), means.max().dropna()
    if len(low):
        axis.fill_between(low.index, low, high, color="0.9", linewidth=0, zorder=0)


def accuracy_all(records: Sequence[Record]) -> Figure:
    """Accuracy over the tasks learnt so far: a row per method, a column per task, by setting."""
    rows = _accuracies(frames.shared_seeds(records))
    means = rows.groupby(["method", "setting", "experience"]).percent.mean().unstack([1, 2])
    finals = rows[rows.experience == rows.groupby("setting").experience.transform("max")]
    names = {str(m): _ordered_names(own, "percent") for m, own in finals.groupby("model")}
    heights = [_ROW * max(3, len(own)) for own in names.values()]  # 3 hold a colour bar's label
    settings, height = rows.setting.unique(), sum(heights) / len(heights) + 0.5
    grid: dict[str, Any] = {"sharey": "row", "height_ratios": heights}
    figure, axes = style.panels(len(names) * len(settings), len(settings), height, 0.9, **grid)
    for inches, (model, own) in zip(heights, names.items(), strict=True):
        line, axes = axes[: len(settings)], axes[len(settings) :]
        table = means.loc[[*own]].set_axis([*own.values()])
        for axis, setting in zip(line, settings, strict=True):
            options = {"annot": table[setting].shape[1] <= _ANNOTATED, "vmax": _scale_end(table)}
            style.draw_table(axis, table[setting], **options, **_HEAT)
            title = setting if model == next(iter(names)) else "personal models"
            axis.set(xlabel="tasks learnt", facecolor="0.93", title=title)
        _add_colour_bar(figure, line, _scale_end(table), model, inches)
    caption = f"means, grey: not run; {style.seed_caption(rows)}"
    style.add_caption(figure, "Accuracy over the tasks learnt so far, %", caption)
    return figure


def _scale_end(percent: pd.DataFrame | style.Values) -> float:
    """The first multiple of ten that no value exceeds."""
    highest: float = np.fmax.reduce(np.ravel(percent), initial=1)
    return 10 * math.ceil(highest / 10)


def _add_colour_bar(
    figure: Figure | SubFigure, axes: Sequence[Axes], top: float, model: str, inches: float
) -> None:
    scale = ScalarMappable(Normalize(_HEAT["vmin"], top), _HEAT["cmap"])
    options: dict[str, Any] = {"shrink": 0.8, "aspect": 8 * inches, "pad": 0.01}
    bar = figure.colorbar(scale, ax=axes, ticks=[0, top / 2, top], **options)
    bar.set_label("accuracy, %" if model == "global" else "personal\nmodels, %", fontsize=9)


def matrices(records: Sequence[Record]) -> Figure:
    """Accuracy on each task after each task of the last cycle, mean over seeds, per method."""
    records = frames.shared_seeds(records)
    rows = frames.run_frame(records).assign(matrix=[_last_matrix(record) for record in records])
    names, tops = _ordered_names(rows, "main_accuracy"), dict[str, float]()
    maps = dict[tuple[str, str], dict[str, style.Values]]()
    for setting, part in rows.groupby("setting", sort=False):
        for model, own in part.groupby("model"):
            maps[str(setting), model] = means = _mean_matrices(own, names)
            tops[model] = max(tops.get(model, 0), _scale_end(np.stack([*means.values()])))
    widest = max(map(len, maps.values()))
    columns = math.ceil(widest / math.ceil(widest / _MATRICES))
    lines = [math.ceil(len(own) / columns) for own in maps.values()]
    figure = plt.figure(figsize=(style.WIDTH, sum(lines) * _HEIGHT + 1), layout="constrained")
    heights = [count + 0.25 for count in lines]  # with the name of the setting
    blocks: Any = figure.subfigures(len(lines), squeeze=False, height_ratios=heights)
    for block, count, (key, own) in zip(blocks.ravel(), lines, maps.items(), strict=True):
        setting, model = key
        axes = np.ravel(block.subplots(count, columns, squeeze=False)).tolist()
        title = setting if model == "global" else f"{setting}, personal models"
        block.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        _draw_matrices(axes, own, tops[model])
        _add_colour_bar(block, axes, tops[model], model, _HEIGHT * count)
    caption = f"means, grey: undefined; {style.seed_caption(rows)}"
    style.add_caption(figure, "Accuracy on each task (column) after each task (row), %", caption)
    return figure


def _mean_matrices(rows: pd.DataFrame, names: Iterable[str]) -> dict[str, style.Values]:
    methods = [rows[rows.method == name] for name in names if name in set(rows.method)]
    return {style.method_label(own): 100 * np.mean([*own.matrix], axis=0) for own in methods}


def _draw_matrices(axes: Sequence[Axes], means: dict[str, style.Values], top: float) -> None:
    for axis, (label, mean) in zip(axes, means.items(), strict=False):
        numbers = range(1, len(mean) + 1)
        few = len(mean) <= _ANNOTATED
        ticks = True if few else "auto"  # seaborn thins them by their size before it is lowered
        options = {**_HEAT, "vmax": top, "annot": few, "annot_kws": {"fontsize": 6}}
        options |= {"xticklabels": ticks, "yticklabels": ticks}
        style.draw_table(axis, pd.DataFrame(mean, numbers, numbers), **options)
        axis.tick_params(labelsize=6, pad=1)
        axis.set_facecolor("0.7")
        title = textwrap.fill(label.replace("_", "_ "), 15, break_long_words=False)
        axis.set_title(title.replace("_ ", "_"), fontsize=7, pad=2)
    for axis in axes[len(means) :]:
        axis.set_axis_off()


def _last_matrix(record: Record) -> style.Values:
    a = last_cycle(record.accuracy(record.main_model), record.tests.shape[1])
    return micro_average(a, record.tests)


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
    defined = rows.dropna(subset="main_forgetting")
    names = _ordered_names(defined, "main_forgetting", best=1)
    figure, axes = style.panels(rows.setting.nunique(), height=0.22 * len(names) + 1.0, sharey=True)
    for axis, setting in zip(axes, rows.setting.unique(), strict=True):
        own = defined[defined.setting == setting]
        for place, method in enumerate(names):
            values = 100 * own[own.method == method].main_forgetting
            if len(values):
                marks = style.row_style(method)
                places = [place + 0.3] * len(values)
                axis.scatter(values, places, s=14, alpha=0.5, linewidths=0, **marks)
                style.draw_interval(axis, place, values, markersize=6, **marks)
        axis.axvline(0, color="0.3", linewidth=0.8, zorder=1)
        axis.set(title=setting, xlabel="percentage points")
        _draw_rows(axis, names)
    caption = f"{style.seed_caption(defined)}; {style.INTERVALS}{_row_caption(names)}"
    style.add_caption(figure, "Forgetting (lower is better)", caption)
    return figure


def _ordered_names(rows: pd.DataFrame, score: str, best: int = -1) -> dict[str, str]:
    """Methods and labels: headline ones, then by score over settings (`best` -1: high is good)."""
    means = rows.groupby(["setting", "method"], sort=False)[score].mean().unstack("setting")
    scores = (best * (means - means.mean())).mean(axis=1)
    labels = rows.groupby("method", sort=False)
    return {
        name: style.method_label(labels.get_group(name)) for name in style.headline_order(scores)
    }


def _draw_rows(axis: Axes, names: Mapping[str, str]) -> None:
    style.set_rows(axis, [*names.values()])
    highlighted = sum(name in style.HIGHLIGHTED for name in names)
    if 0 < highlighted < len(names):
        axis.axhline(highlighted - 0.5, color="0.6", linewidth=0.8, zorder=1)
    axis.grid(alpha=0.3)


def _row_caption(names: Iterable[str]) -> str:
    """What colour and absence mean where some rows are of other methods than the highlighted."""
    if set(names) <= set(style.HIGHLIGHTED):
        return ""
    return "\ncolour: headline methods, above the line; no mark: not run or undefined"


def nearest_mean(records: Sequence[Record]) -> Figure:
    """Final accuracy by the classifier and by the nearest class mean: a row per method."""
    rows = frames.run_frame(frames.shared_seeds(records))
    rows = rows.dropna(subset=["accuracy", "nearest_mean"])
    names = _ordered_names(rows, "accuracy")
    height, xlabel = 0.22 * len(names) + 1, "final accuracy, %"
    figure, panels = style.setting_panels(rows, height, "", xlabel, sharey=True)
    for axis, _, part in panels:
        for method, group in part.groupby("method", sort=False):
            place, marks = [*names].index(str(method)), style.row_style(str(method))
            for column, offset in {"accuracy": -0.17, "nearest_mean": 0.17}.items():
                face = {"marker": "o", "markerfacecolor": "white" if offset > 0 else None}
                style.draw_interval(axis, place + offset, 100 * group[column], **marks | face)
        axis.set_xlim(max(axis.get_xlim()[0], -3), min(axis.get_xlim()[1], 103))
        _draw_rows(axis, names)
    caption = "filled: the network's classifier; white: the nearest class mean of its features"
    caption += f"\nbars: 95 % interval of the mean; {style.seed_caption(rows)}{_row_caption(names)}"
    style.add_caption(figure, "Final accuracy of the classifier and of the features", caption)
    return figure


def cost(records: Sequence[Record]) -> Figure:
    """Final accuracy beside what it costs: a row per method, a mark per setting."""
    rows = frames.run_frame(frames.shared_seeds(records)).dropna(subset="main_accuracy")
    names = _ordered_names(rows, "main_accuracy")
    images, sent = (cost.replace(0, np.nan) for cost in frames.relative_costs(rows).values())
    columns = {"accuracy, %": 100 * rows.main_accuracy, "images": images, "bytes in a round": sent}
    shapes = dict(zip(rows.setting.unique(), itertools.cycle(_SHAPES), strict=False))
    figure, axes = style.panels(len(columns), height=0.22 * len(names) + 1.0, sharey=True)
    for axis, (label, values) in zip(axes, columns.items(), strict=True):
        for setting, shape in shapes.items():
            means = values[rows.setting == setting].groupby(rows.method).mean()
            places = [[*names].index(name) for name in means.index]
            colours = [style.row_style(name)["color"] for name in means.index]
            axis.scatter(means, places, s=26, marker=shape, c=colours, zorder=3)
            axis.plot([], [], shape, color="0.3", label=setting)  # for the legend
        if label != "accuracy, %":
            style.set_log_scale(axis)
            label += f", {frames.UNIT} = 1"
        axis.set_xlabel(label)
        _draw_rows(axis, names)
    caption = "images: differentiated in a run; bytes: sent in both directions, if any"
    caption += f"\nmeans; {style.seed_caption(rows)}{_row_caption(names)}"
    style.add_caption(figure, "Final accuracy and its cost", caption, True)
    return figure
