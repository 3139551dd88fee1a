"""Figures of run records: accuracy, forgetting, matrices, cost, and how one training went."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from stamp_core import metrics, tables
from stamp_core.figures.look import LEGEND_COLUMNS, WIDTH, bare, entitle, panels, style
from stamp_core.records import Record

Array = NDArray[np.float64]

BANDS = 5  # methods; bands of more cover each other
MANY = 10  # methods; of more, each group has a panel
BESIDE = ("fedavg", "stamp", "joint")  # faint in the panels of other groups
TAGS = [(6, 4), (6, -4), (-6, 4), (-6, -4), (6, 14), (6, -14), (-6, 14), (-6, -14)]  # in points


def accuracy(records: Sequence[Record]) -> Figure:
    """Accuracy after each step over the tasks met so far: mean over seeds with its interval.

    Personalised methods are shown by the clients' own models, which is what they are made for.
    """
    own = [record for record in records if record.group == "personalised"]
    others = [record for record in records if record.group != "personalised"]
    rows = [tables.curves(some, some is own) for some in (others, own) if some]
    figure = _by_step(pd.concat(rows), "accuracy", "Accuracy over the tasks met so far")
    for axis in figure.axes:
        possible(axis)
    return figure


def gap(records: Sequence[Record]) -> Figure:
    """Local minus global accuracy on the task just learnt, by step: mean with its interval."""
    rows = tables.curves(records)
    figure = _by_step(rows, "gap", "Local minus global accuracy on the task just learnt")
    for axis in figure.axes:
        axis.axhline(0, color="0.3", linewidth=0.8, zorder=1)
        axis.set_ylabel(axis.get_ylabel().replace("accuracy, %", "percentage points"))
    return figure


def _by_step(rows: pd.DataFrame, column: str, title: str) -> Figure:
    """A column of tables.curves in %: a line a method, with its interval."""
    rows = rows.assign(**{column: 100 * rows[column]}).reset_index(drop=True)
    cells = rows.groupby(tables.CELL, sort=False)
    defined = cells.filter(lambda cell: cell[column].notna().any())
    parts = _parts(rows)
    wide = len(parts) // rows.setting.nunique()
    crowded = max(part.method.nunique() for _, part, _ in parts) > BANDS
    height = 4.2 if crowded and wide == 1 else 3.0
    layout: dict[str, Any] = {"columns": wide, "sharey": "row"} if wide > 1 else {}
    figure, axes = panels(len(parts), height=height, extra=room(rows), **layout)
    for axis, (name, part, beside) in zip(axes, parts, strict=True):
        lines(axis, part[part.index.isin(defined.index)], column, crowded)
        _faint(axis, beside, column)
        axis.set(xlabel="tasks learnt")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes[::wide]:
        axis.set_ylabel("accuracy, %")
    faint = f"; faint: {', '.join(BESIDE)} of other groups" if wide > 1 else ""
    entitle(figure, title, seeds(defined, "bars" if crowded else "band") + faint, axes)
    return figure


def _parts(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """What each panel is called, shows, and shows beside it: a setting, or a group of it."""
    settings = list(groups(rows, "setting"))
    if rows.method.nunique() <= MANY:
        return [(setting, part, part[:0]) for setting, part in settings]
    names = [name for name in tables.GROUPS if name in set(rows.group)]
    return [
        (f"{setting}\n{name}", part[own], part[~own & part.method.isin(BESIDE)])
        for setting, part in settings
        for name in names
        for own in [part.group == name]
    ]


def _faint(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    """The means of methods that other panels show with their intervals."""
    for method, group in groups(rows, "method"):
        means = group.groupby("step")[column].mean()
        look = {"color": style(method)["color"], "linestyle": style(method)["linestyle"]}
        axis.plot(means.index, means, linewidth=1, alpha=0.5, zorder=1.5, **look)


def lines(axis: Axes, rows: pd.DataFrame, column: str, crowded: bool) -> None:
    """Each method's mean over seeds by step; the interval as a band, or as bars where crowded."""
    methods = list(groups(rows, "method"))
    for shift, (method, group) in zip(_shifts(len(methods), crowded), methods, strict=True):
        look = style(method)
        steps = group.step.unique() + shift
        found = [metrics.interval(each[column].tolist()) for _, each in groups(group, "step")]
        middle, half = np.transpose(found)
        axis.plot(steps, middle, label=label(group), linewidth=1.6, markersize=5.5, **look)
        if crowded:
            axis.errorbar(steps, middle, yerr=half, fmt="none", ecolor=look["color"], elinewidth=1)
        elif not np.isnan(half).all():
            band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            axis.fill_between(steps, middle - half, middle + half, **band)


def _shifts(count: int, crowded: bool) -> Array:
    """How far each method is moved sideways, so that bars stand beside each other."""
    return np.linspace(-0.2, 0.2, count) if crowded else np.zeros(count)


def forgetting(records: Sequence[Record]) -> Figure:
    """Forgetting as the paper defines it: a dot a seed, the mean with its interval a method."""
    rows = tables.frame(records)
    defined = rows.dropna(subset="judged_forgetting")
    names = {method: label(group) for method, group in groups(rows, "method")}
    height = 0.36 * len(names) + 0.8
    figure, axes = panels(rows.setting.nunique(), height=height, sharey=True)
    for axis, setting in zip(axes, rows.setting.unique(), strict=True):
        for method, group in groups(defined[defined.setting == setting], "method"):
            values = 100 * group.judged_forgetting.to_numpy()
            dots(axis, list(names).index(method), values, style(method))
        axis.axvline(0, color="0.3", linewidth=0.8, zorder=1)
        axis.set(title=setting, xlabel="percentage points")
    axes[0].set_yticks(range(len(names)), list(names.values()))
    axes[0].set_ylim(len(names) - 0.5, -0.5)  # the first method on top
    entitle(figure, "Forgetting (lower is better)", f"{seeds(defined, 'bar')}; faint: each seed")
    return figure


def dots(axis: Axes, place: int, values: Array, look: dict[str, Any]) -> None:
    """Values of several seeds along x, and their mean with its interval."""
    only = {key: look[key] for key in ("color", "marker")}
    axis.scatter(values, np.full(len(values), place + 0.3), s=16, alpha=0.5, linewidths=0, **only)
    middle, half = metrics.interval(values.tolist())
    axis.errorbar(middle, place, xerr=half, capsize=3, markersize=7, **only)


def matrices(records: Sequence[Record]) -> Figure:
    """Accuracy on each task after each of the last cycle, mean over seeds: a matrix a method."""
    rows = _rows(records)
    columns = max(len(methods) for _, methods in rows)
    height = 0.85 * WIDTH / columns + 0.3
    figure, axes = panels(len(rows) * columns, columns, height, extra=1.2)
    figure.set_layout_engine("compressed")
    for place, (setting, methods) in enumerate(rows):
        row = axes[place * columns :][:columns]
        row[0].set_ylabel(setting, labelpad=8)
        for axis in row[len(methods) :]:
            axis.remove()
        for axis, (name, m) in zip(row, methods, strict=False):
            _matrix(axis, name, m)
    look: dict[str, Any] = {"location": "bottom", "aspect": 50, "shrink": 0.6}
    figure.colorbar(axes[0].images[0], ax=figure.axes, label="accuracy, %", **look)
    title = "Accuracy on each task (column) after each task (row)"
    entitle(figure, title, f"mean, {seeds(tables.frame(records))}")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # "compressed" moves a little further with every drawing
    return figure


def _rows(records: Sequence[Record]) -> list[tuple[str, list[tuple[str, Array]]]]:
    """A setting and some of its methods, each with its accuracy matrix, for every row."""
    rows = tables.frame(records)
    rows["m"] = [_last_matrix(record) for record in records]
    found, methods = [], rows.method.nunique()
    wide = math.ceil(methods / math.ceil(methods / 6))  # rows as equal as can be
    for setting, part in groups(rows, "setting"):
        cells = [(label(cell), np.mean([*cell.m], axis=0)) for _, cell in groups(part, "method")]
        found += [(setting, cells[first : first + wide]) for first in range(0, len(cells), wide)]
    return found


def _last_matrix(record: Record) -> Array:
    """The accuracy matrix of a run's last cycle.  # [T, T]"""
    a = metrics.last_cycle(record.accuracy(tables.judged(record)), record.tests.shape[1])
    return metrics.pooled(a, record.tests)


def _matrix(axis: Axes, name: str, m: Array) -> None:
    """One accuracy matrix in %."""
    tasks = len(m)
    axis.imshow(
        100 * m, cmap="viridis", vmin=0, vmax=100, extent=(0.5, tasks + 0.5, tasks + 0.5, 0.5)
    )
    for (row, column), value in np.ndenumerate(m if tasks <= 6 else m[:0]):
        ink = "white" if value <= 0.6 else "black"
        text = tables.DASH if np.isnan(value) else f"{100 * value:.0f}"
        axis.text(column + 1, row + 1, text, ha="center", va="center", color=ink, fontsize=7)
    axis.set_title(name, fontsize=9)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axis.tick_params(length=0, labelsize=8)
    axis.set_facecolor("0.7")  # undefined
    bare(axis)


def cost(records: Sequence[Record]) -> Figure:
    """Final accuracy against the clients' seconds and against the MB sent in a round."""
    rows = tables.frame(records).dropna(subset="judged_accuracy")
    rows["megabytes"] = (rows.bytes_up + rows.bytes_down) / tables.MB
    labels = {
        "client_seconds": "seconds of all clients in a round",
        "megabytes": "MB sent in a round, both ways",
    }
    figure, axes = panels(2 * rows.setting.nunique(), 2, 3.2, room(rows))
    places = [(part, column) for _, part in groups(rows, "setting") for column in labels]
    for axis, (part, column) in zip(axes, places, strict=True):
        for _, group in groups(part, "method"):
            _point(axis, group, column)
        _spread(axis, part[column])
        axis.grid(alpha=0.3)
        axis.set(xlabel=labels[column], ylabel="accuracy, %", title=part.setting.iloc[0])
        axis.margins(0.12)
        possible(axis)
    entitle(figure, "Accuracy and its price", seeds(rows, "bars"), axes)
    figure.draw_without_rendering()  # the names are placed where the layout leaves room
    for axis, (part, column) in zip(axes, places, strict=True):
        _tag(axis, part, column)
    return figure


def _point(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    """Mean accuracy against mean cost, with both intervals."""
    x, dx = metrics.interval(rows[column].tolist())
    y, dy = _interval(rows.judged_accuracy)
    look = {**style(rows.method.iloc[0]), "linestyle": "", "label": label(rows)}
    axis.errorbar(x, y, yerr=dy, xerr=dx, capsize=2, elinewidth=1, markersize=7, **look)


def _spread(axis: Axes, values: pd.Series) -> None:
    """A logarithmic x where positive values span more than a decade; zero keeps a place."""
    positive = values[values > 0]
    if not len(positive) or positive.max() <= 10 * positive.min():
        axis.xaxis.set_major_locator(MaxNLocator(5))
        return
    if len(positive) == len(values):
        axis.set_xscale("log")
    else:
        decade = 10 ** np.floor(np.log10(positive.min()))
        axis.set_xscale("symlog", linthresh=decade, linscale=0.5)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())


def _tag(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    """Write methods' names beside their points where there is room; the legend has them all."""
    means = rows.groupby("method", sort=False)[[column, "judged_accuracy"]].mean() * [1, 100]
    pixels = axis.transData.transform(means.to_numpy())  # [methods, 2]
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in pixels]
    for method, group in groups(rows, "method"):
        x, y = means.loc[method]
        for dx, dy in TAGS:
            text = axis.annotate(label(group), (x, y), (dx, dy), textcoords="offset points")
            text.set(ha="left" if dx > 0 else "right", va="bottom" if dy > 0 else "top", fontsize=8)
            text.set_in_layout(False)
            text.set_path_effects([withStroke(linewidth=2, foreground="white")])
            box = text.get_window_extent()
            inside = axis.bbox.contains(*box.min) and axis.bbox.contains(*box.max)
            if inside and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


def training(records: Sequence[Record]) -> Figure:
    """Of one cell: loss by round and accuracy after each step, a thin line a seed."""
    rows = tables.curves(records)
    if len({record.cell[:2] for record in records}) > 1:
        raise ValueError("training shows one setting with one method")
    setting, method, _ = records[0].cell
    look = {"color": style(method)["color"], "linewidth": 1, "alpha": 0.8}
    figure, (left, right) = panels(2, 2, 3.2)
    _losses(left, records, look)
    for _, group in groups(rows, "seed"):
        right.plot(group.step, 100 * group.accuracy, marker=".", **look)
    right.set(title="Accuracy over the tasks met so far")
    right.set(xlabel="tasks learnt", ylabel="accuracy, %")
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    entitle(figure, f"{setting}, {label(rows)}", f"{seeds(rows)}, a line each")
    return figure


def _losses(axis: Axes, records: Sequence[Record], look: dict[str, Any]) -> None:
    """The loss of each seed by round, with a line wherever a task begins."""
    for record in records:
        loss = [np.nan if row["loss"] is None else row["loss"] for row in record.history]
        axis.plot(range(1, len(loss) + 1), loss, **look)
    for place, row in enumerate(records[0].history):
        if place and row["round"] == 0:
            axis.axvline(place + 0.5, color="0.8", linewidth=0.8, zorder=1)
    axis.set(title="Training loss", xlabel="round (grey line: next task)", ylabel="loss")


def groups(rows: pd.DataFrame, by: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """The rows by value of a column, in order of first appearance."""
    return iter(rows.groupby(by, sort=False))


def _interval(fractions: pd.Series) -> tuple[float, float]:
    """Mean and half-width of the interval, in %."""
    return metrics.interval((100 * fractions).tolist())


def label(rows: pd.DataFrame) -> str:
    """The name of a method, and which model it is judged by where that is not the global one."""
    model = rows["model" if "model" in rows else "score_model"].iloc[0]
    name = str(rows.method.iloc[0])
    return name if model == "global" else f"{name} ({model})"


def seeds(rows: pd.DataFrame, mark: str = "") -> str:
    """How many seeds are behind each method, what `mark` shows of them, and whose models."""
    counts = sorted(set(rows.groupby(tables.CELL).seed.nunique()))
    if not counts:
        return "undefined for all methods here"
    some = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    text = f"n = {some} seed{'' if counts == [1] else 's'}"
    if mark and counts[-1] > 1:
        text += f", {mark}: 95 % interval of the mean"
    own = any("(" in label(group) for _, group in rows.groupby(tables.CELL))
    return f"{text}; (personal): the clients' own models" if own else text


def room(rows: pd.DataFrame) -> float:
    """The height that a legend of all methods takes, in inches."""
    methods = int(rows.method.nunique())
    return 0.6 + 0.2 * math.ceil(methods / LEGEND_COLUMNS)


def possible(axis: Axes) -> None:
    """Cut y at 0 and 100 %, which an interval may leave."""
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, -3), min(high, 103))
