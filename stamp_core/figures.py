"""Figures from pictures, plans and run records: one function a figure, each returns a Figure.

Intervals are 95 % Student t intervals of the mean over seeds; every figure says its n. Clients
count from 0, as in the records; tasks count from 1, as in "after 3 tasks". The figures are left
open: a notebook shows those of a cell at its end, so end the cell with `;`, or it shows them twice.
"""

import math
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from stamp_core import config, metrics, tables
from stamp_core.data import ImageSet
from stamp_core.records import Record
from stamp_core.split import Plan

Array = NDArray[np.float64]

WIDTH = 9.0  # inches: at 100 dots an inch the 900 pixels of a README
DPI = 160

# seaborn's colourblind palette without its grey, which a control has, and its yellow, too faint on
# paper. The numbers of colours, markers and dashes share no factor: 264 methods look different.
COLOURS = [sns.color_palette("colorblind")[place] for place in (0, 3, 2, 4, 1, 9, 5, 6)]
MARKERS = "osD^vPX<>ph"
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)))
CONTROLS: dict[str, dict[str, Any]] = {
    "local": {"color": "0.5", "marker": "d", "linestyle": DASHES[1]},
    "joint": {"color": "black", "marker": "*", "linestyle": "-"},
}

LEGEND_COLUMNS = 5
TAGS = [(6, 4), (6, -4), (-6, 4), (-6, -4), (6, 14), (6, -14), (-6, 14), (-6, -14)]  # in points


def style(method: str) -> dict[str, Any]:
    """Colour, marker and dashes of a method, the same in every figure.

    They go by its place in params.yaml; a method no longer there has a place by its name.
    """
    if method in CONTROLS:
        return {**CONTROLS[method]}
    known = [name for name in config.read()["methods"] if name not in CONTROLS]
    place = known.index(method) if method in known else len(known) + zlib.crc32(method.encode())
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": DASHES[place % len(DASHES)],
    }


def save(figure: Figure, path: Path) -> None:
    """Write a PNG: the same bytes whenever the data are the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


# --- pictures and plans


def pictures(images: ImageSet, per_class: int = 8) -> Figure:
    """Training pictures, spread evenly over the set: a row for each of the first 20 classes."""
    rows = [_strip(images, label, per_class) for label in range(min(len(images.classes), 20))]
    columns = 2 if len(rows) > 5 else 1
    size = math.ceil(len(rows) / columns)
    figure, axes = _panels(columns, columns, 0.42 * size + 0.6)
    for first, axis in zip(range(0, len(rows), size), axes, strict=True):
        part = rows[first : first + size]
        axis.imshow(np.concatenate(part), cmap="gray", vmin=0, vmax=255)
        names = [_text(name) for name in images.classes[first : first + len(part)]]
        axis.set_yticks(len(part[0]) * (np.arange(len(part)) + 0.5) - 0.5, names)
        axis.set_xticks([])
        axis.tick_params(length=0)
        sns.despine(ax=axis, left=True, bottom=True)
    some = f"{len(rows)} of " if len(rows) < len(images.classes) else ""
    count = f"n = {len(images.y_train):,} training pictures"
    figure.suptitle(f"{images.name}: {some}{len(images.classes)} classes, {count}")
    return figure


def _strip(images: ImageSet, label: int, count: int) -> NDArray[np.uint8]:
    """Training pictures of a class side by side in white frames.  # [H + 2, count (W + 2), C]"""
    own = np.flatnonzero(np.asarray(images.y_train) == label)
    places = own[np.unique(np.linspace(0, len(own) - 1, count).astype(int))] if len(own) else own
    shown = images.x_train[places].numpy().transpose(0, 2, 3, 1)  # [n, H, W, C]
    missing = count - len(shown)
    framed = np.pad(shown, ((0, missing), (1, 1), (1, 1), (0, 0)), constant_values=255)
    return np.concatenate(list(framed), axis=1)


def schedule(plan: Plan, images: ImageSet) -> Figure:
    """Who learns which classes (or domains) when, and how many clients hold each at each step.

    Where the names do not fit into the cells, colour says when a client first meets a class.
    """
    names = images.classes if plan.split.kind == "classes" else images.domains
    cells = _cell_texts(plan, names)
    figure = _named(plan, names, cells) if cells else _coloured(plan, names)
    cycles = f", gone through {plan.split.cycles} times" if plan.split.cycles > 1 else ""
    counts = f"{len(plan.clients)} clients, {plan.tasks} tasks{cycles}"
    figure.suptitle(f"Who learns what when: {images.name}, {counts}, seed {plan.seed}")
    return figure


def _held(plan: Plan, items: int) -> NDArray[np.bool_]:
    """Which client holds which class, or domain, in which task.  # [U, T, items]"""
    held = np.zeros((len(plan.clients), plan.tasks, items), dtype=bool)
    for u, tasks in enumerate(plan.clients):
        for t, task in enumerate(tasks):
            held[u, t, list(task.classes) if task.domain is None else task.domain] = True
    return held


def _cell_texts(plan: Plan, names: Sequence[str]) -> list[list[str]]:
    """What each client learns in each task, in words; nothing if the words do not fit."""
    room = 68 // plan.tasks  # characters in a line of a cell
    texts = []
    for own in _held(plan, len(names)):
        joined = [", ".join(np.array(names)[now]) for now in own]
        lines = [textwrap.wrap(t, room, break_long_words=False) for t in joined if room > 1]
        widest = max((len(line) for each in lines for line in each), default=room * 2)
        if widest > 1.2 * room or max(map(len, lines)) > 3:
            return []
        texts.append([_text("\n".join(each)) for each in lines])
    return texts


def _named(plan: Plan, names: Sequence[str], cells: list[list[str]]) -> Figure:
    """The schedule with names in its cells; the darker, the more of it somebody met before."""
    held = _held(plan, len(names))
    met = np.cumsum(held.any(axis=0), axis=0) - held.any(axis=0) > 0  # [T, items], before a task
    known = (held & met).sum(axis=2) / held.sum(axis=2)  # [U, T]
    lines = max(text.count("\n") + 1 for row in cells for text in row)
    height = max(len(cells) * (0.14 + 0.16 * lines), 0.22 * min(len(names), 30)) + 1.3
    figure, (left, right) = _panels(2, 2, height, width_ratios=(3, 1.2))
    _heat(left, _grid(known, plan, range(len(cells))), texts=cells, cmap="Blues", vmin=0, vmax=2.5)
    left.set(title="white: new to all; blue: some client met it before", ylabel="client")
    counts = held.sum(axis=0).T  # [items, T]
    _heat(right, _grid(counts, plan, names), cmap="Greens", vmin=0, mask=counts == 0)
    right.set(title="clients that hold it", ylabel=_kind(plan))
    for axis in (left, right):
        axis.set_xlabel("task")
    return figure


def _coloured(plan: Plan, names: Sequence[str]) -> Figure:
    """The schedule by client and class, for plans with many tasks."""
    held = _held(plan, len(names))
    first = np.where(held.any(axis=1), held.argmax(axis=1) + 1.0, np.nan)  # [U, items]
    columns = [_text(name) for name in names]
    figure, axes = _panels(2, 1, 3.2)
    shown = (
        (pd.DataFrame(first, columns=columns), "client", "viridis", "task in which it is met"),
        (_grid(held.sum(axis=0).T, plan, names).T, "task", "Greens", "clients that hold it"),
    )
    for axis, (table, rows, colours, meaning) in zip(axes, shown, strict=True):
        bar = {"label": meaning, "ticks": MaxNLocator(6, integer=True)}
        _heat(axis, table, cmap=colours, cbar=True, cbar_kws=bar)
        axis.set(ylabel=rows, xlabel=_kind(plan))
        axis.set_facecolor("0.9")  # a class that a client never meets
    return figure


def _kind(plan: Plan) -> str:
    """What tells the tasks of a plan apart."""
    return "class" if plan.split.kind == "classes" else "domain"


def shares(plan: Plan, images: ImageSet) -> Figure:
    """How many training pictures of each class each client learns from, over all its tasks."""
    classes = len(images.classes)
    counts = np.zeros((len(plan.clients), classes))
    for u in range(len(plan.clients)):
        for t in range(plan.tasks):
            own = images.y_train[plan.train_indices(images, u, t)]
            counts[u] += np.bincount(own, minlength=classes)
    table = pd.DataFrame(counts, columns=[_text(name) for name in images.classes])
    figure, (axis,) = _panels(1, 1, 0.26 * len(counts) + 1.3)
    bar = {"label": "pictures"}
    _heat(axis, table, cmap="Blues", mask=counts == 0, vmin=0, cbar=True, cbar_kws=bar)
    axis.set(xlabel="class", ylabel="client")
    alpha = "" if plan.split.alpha is None else f", α = {plan.split.alpha:g}"
    shown = f"{images.name}{alpha}, seed {plan.seed}, n = {int(counts.sum()):,} over all clients"
    figure.suptitle(f"Training pictures by client and class: {shown}")
    return figure


def _grid(values: NDArray[Any], plan: Plan, rows: Sequence[object]) -> pd.DataFrame:
    """Values by row and task."""
    index = [_text(str(row)) for row in rows]
    return pd.DataFrame(values, index=index, columns=range(1, plan.tasks + 1))


def _heat(
    axis: Axes, table: pd.DataFrame, texts: list[list[str]] | None = None, **look: Any
) -> None:
    """A heat map with `texts`, or with its numbers where there is room for them."""
    few = texts is None and max(table.shape) <= 30 and table.size <= 300
    look = {"cbar": False, "linewidths": 0.5 if few or texts else 0, **look}
    if texts is not None:
        look |= {"annot": np.array(texts), "fmt": "", "annot_kws": {"fontsize": 8, "color": "0.1"}}
    else:
        look |= {"annot": few, "fmt": ".0f", "annot_kws": {"fontsize": 8}}
    sns.heatmap(table, ax=axis, **look)
    axis.tick_params(length=0, labelsize=8)
    axis.tick_params(axis="y", rotation=0)


# --- run records


def accuracy(records: Sequence[Record]) -> Figure:
    """Accuracy after each step over the tasks met so far: mean over seeds with its interval."""
    figure = _by_step(records, "accuracy", "Accuracy over the tasks met so far")
    for axis in figure.axes:
        _possible(axis)
    return figure


def gap(records: Sequence[Record]) -> Figure:
    """Local minus global accuracy on the task just learnt, by step: mean with its interval."""
    figure = _by_step(records, "gap", "Local minus global accuracy on the task just learnt")
    for axis in figure.axes:
        axis.axhline(0, color="0.3", linewidth=0.8, zorder=1)
        axis.set_ylabel("percentage points")
    return figure


def _by_step(records: Sequence[Record], column: str, title: str) -> Figure:
    """A column of tables.curves in %: a panel a setting, a line and band a method."""
    rows = tables.curves(records)
    cells = rows.groupby(tables.CELL, sort=False)
    defined = cells.filter(lambda cell: cell[column].notna().any())
    figure, axes = _panels(rows.setting.nunique(), extra=_room(rows))
    for axis, setting in zip(axes, rows.setting.unique(), strict=True):
        for _, group in _groups(defined[defined.setting == setting], "method"):
            _line(axis, group, column, min(0.15, 1 / rows.method.nunique()))
        axis.set(title=setting, xlabel="tasks learnt", ylabel="accuracy, %")
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _title(figure, title, _n(defined, "band"), axes)
    return figure


def _line(axis: Axes, rows: pd.DataFrame, column: str, alpha: float) -> None:
    """The mean over seeds by step, with the interval as a band."""
    look = style(rows.method.iloc[0])
    steps = [step for step, _ in _groups(rows, "step")]
    found = [_interval(group[column]) for _, group in _groups(rows, "step")]
    middle, half = np.transpose(found)
    axis.plot(steps, middle, label=_label(rows), linewidth=1.8, markersize=6, **look)
    if not np.isnan(half).all():
        band = {"color": look["color"], "alpha": alpha, "linewidth": 0}
        axis.fill_between(steps, middle - half, middle + half, **band)


def forgetting(records: Sequence[Record]) -> Figure:
    """Forgetting as the paper defines it: a dot a seed, the mean with its interval a method."""
    rows = tables.frame(records)
    defined = rows.dropna(subset="judged_forgetting")
    names = {method: _label(group) for method, group in _groups(rows, "method")}
    height = 0.36 * len(names) + 0.8
    figure, axes = _panels(rows.setting.nunique(), height=height, sharey=True)
    for axis, setting in zip(axes, rows.setting.unique(), strict=True):
        for method, group in _groups(defined[defined.setting == setting], "method"):
            values = 100 * group.judged_forgetting.to_numpy()
            _dots(axis, list(names).index(method), values, style(method))
        axis.axvline(0, color="0.3", linewidth=0.8, zorder=1)
        axis.set(title=setting, xlabel="percentage points")
    axes[0].set_yticks(range(len(names)), list(names.values()))
    axes[0].set_ylim(len(names) - 0.5, -0.5)  # the first method on top
    _title(figure, "Forgetting (lower is better)", f"{_n(defined, 'bar')}; faint: each seed")
    return figure


def _dots(axis: Axes, place: int, values: Array, look: dict[str, Any]) -> None:
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
    figure, axes = _panels(len(rows) * columns, columns, height, extra=1.2)
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
    _title(figure, title, f"mean, {_n(tables.frame(records))}")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # "compressed" moves a little further with every drawing
    return figure


def _rows(records: Sequence[Record]) -> list[tuple[str, list[tuple[str, Array]]]]:
    """A setting and up to six of its methods, each with its accuracy matrix, for every row."""
    rows = tables.frame(records)
    rows["m"] = [_last_matrix(record) for record in records]
    found = []
    for setting, part in _groups(rows, "setting"):
        cells = [(_label(cell), np.mean([*cell.m], axis=0)) for _, cell in _groups(part, "method")]
        found += [(setting, cells[first : first + 6]) for first in range(0, len(cells), 6)]
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
    sns.despine(ax=axis, left=True, bottom=True)


def cost(records: Sequence[Record]) -> Figure:
    """Final accuracy against the clients' seconds and against the MB sent in a round."""
    rows = tables.frame(records).dropna(subset="judged_accuracy")
    rows["megabytes"] = (rows.bytes_up + rows.bytes_down) / tables.MB
    labels = {
        "client_seconds": "seconds of all clients in a round",
        "megabytes": "MB sent in a round, both ways",
    }
    figure, axes = _panels(2 * rows.setting.nunique(), 2, 3.2, _room(rows))
    places = [(part, column) for _, part in _groups(rows, "setting") for column in labels]
    for axis, (part, column) in zip(axes, places, strict=True):
        for _, group in _groups(part, "method"):
            _point(axis, group, column)
        _spread(axis, part[column])
        axis.grid(alpha=0.3)
        axis.set(xlabel=labels[column], ylabel="accuracy, %", title=part.setting.iloc[0])
        axis.margins(0.12)
        _possible(axis)
    _title(figure, "Accuracy and its price", _n(rows, "bars"), axes)
    figure.draw_without_rendering()  # the names are placed where the layout leaves room
    for axis, (part, column) in zip(axes, places, strict=True):
        _tag(axis, part, column)
    return figure


def _point(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    """Mean accuracy against mean cost, with both intervals."""
    x, dx = metrics.interval(rows[column].tolist())
    y, dy = _interval(rows.judged_accuracy)
    look = {**style(rows.method.iloc[0]), "linestyle": "", "label": _label(rows)}
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


def _tag(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    """Write methods' names beside their points where there is room; the legend has them all."""
    means = rows.groupby("method", sort=False)[[column, "judged_accuracy"]].mean() * [1, 100]
    pixels = axis.transData.transform(means.to_numpy())  # [methods, 2]
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in pixels]
    for method, group in _groups(rows, "method"):
        x, y = means.loc[method]
        for dx, dy in TAGS:
            text = axis.annotate(_label(group), (x, y), (dx, dy), textcoords="offset points")
            text.set(ha="left" if dx > 0 else "right", va="bottom" if dy > 0 else "top", fontsize=8)
            text.set_in_layout(False)
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
    figure, (left, right) = _panels(2, 2, 3.2)
    _losses(left, records, look)
    for _, group in _groups(rows, "seed"):
        right.plot(group.step, 100 * group.accuracy, marker=".", **look)
    right.set(title="Accuracy over the tasks met so far")
    right.set(xlabel="tasks learnt", ylabel="accuracy, %")
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _title(figure, f"{setting}, {_label(rows)}", f"{_n(rows)}, a line each")
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


# --- shared by several figures


def _panels(
    count: int, columns: int | None = None, height: float = 3.0, extra: float = 0.3, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, in rows of two or three unless told; `extra` holds a legend."""
    columns = columns or {1: 1, 2: 2, 4: 2}.get(count, 3)
    rows = math.ceil(count / columns)
    size = (WIDTH, rows * height + extra)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, **grid
    )
    flat: list[Axes] = axes.ravel().tolist()
    for axis in flat[count:]:
        axis.remove()
    for axis in flat:
        sns.despine(ax=axis)
    return figure, flat[:count]


def _groups(rows: pd.DataFrame, by: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """The rows by value of a column, in order of first appearance."""
    return iter(rows.groupby(by, sort=False))


def _interval(fractions: pd.Series) -> tuple[float, float]:
    """Mean and half-width of the interval, in %."""
    return metrics.interval((100 * fractions).tolist())


def _label(rows: pd.DataFrame) -> str:
    """The name of a method, and which model it is judged by where that is not the global one."""
    model = rows["model" if "model" in rows else "score_model"].iloc[0]
    name = str(rows.method.iloc[0])
    return name if model == "global" else f"{name} ({model})"


def _n(rows: pd.DataFrame, mark: str = "") -> str:
    """How many seeds are behind each method, what `mark` shows of them, and whose models."""
    counts = sorted(set(rows.groupby(tables.CELL).seed.nunique()))
    if not counts:
        return "undefined for all methods here"
    some = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    text = f"n = {some} seed{'' if counts == [1] else 's'}"
    if mark and counts[-1] > 1:
        text += f", {mark}: 95 % interval of the mean"
    own = any("(" in _label(group) for _, group in rows.groupby(tables.CELL))
    return f"{text}; (personal): the clients' own models" if own else text


def _title(figure: Figure, title: str, caption: str, axes: Sequence[Axes] = ()) -> None:
    """What the figure shows above it; how to read it and, of `axes`, one legend below."""
    figure.suptitle(title, fontsize=13)
    named = [handle for axis in axes for handle in axis.get_legend_handles_labels()[0]]
    handles = {handle.get_label(): handle for handle in named}.values()
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=LEGEND_COLUMNS,
        frameon=False,
        title=caption,
        title_fontsize=9,
    )
    legend.get_title().set_color("0.3")


def _room(rows: pd.DataFrame) -> float:
    """The height that a legend of all methods takes, in inches."""
    methods = int(rows.method.nunique())
    return 0.6 + 0.2 * math.ceil(methods / LEGEND_COLUMNS)


def _possible(axis: Axes) -> None:
    """Cut y at 0 and 100 %, which an interval may leave."""
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, -3), min(high, 103))


def _text(name: str) -> str:
    """A name as it is: a dollar sign would start a formula."""
    return name.replace("$", r"\$")
