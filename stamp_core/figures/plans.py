"""Figures of pictures and plans: what there is to learn, and who learns it when."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from stamp_core.data import ImageSet
from stamp_core.figures.look import bare, panels
from stamp_core.split import Plan


def pictures(images: ImageSet, per_class: int = 8) -> Figure:
    """Training pictures, spread evenly over the set: a row for each of the first 20 classes."""
    rows = [_strip(images, label, per_class) for label in range(min(len(images.classes), 20))]
    columns = 2 if len(rows) > 5 else 1
    size = math.ceil(len(rows) / columns)
    figure, axes = panels(columns, columns, 0.42 * size + 0.6)
    for first, axis in zip(range(0, len(rows), size), axes, strict=True):
        part = rows[first : first + size]
        axis.imshow(np.concatenate(part), cmap="gray", vmin=0, vmax=255)
        names = [_text(name) for name in images.classes[first : first + len(part)]]
        axis.set_yticks(len(part[0]) * (np.arange(len(part)) + 0.5) - 0.5, names)
        axis.set_xticks([])
        axis.tick_params(length=0)
        bare(axis)
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
    figure, (left, right) = panels(2, 2, height, width_ratios=(3, 1.2))
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
    figure, axes = panels(2, 1, 3.2)
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
    figure, (axis,) = panels(1, 1, 0.26 * len(counts) + 1.3)
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
    import seaborn as sns  # only here: a second that no training should wait for

    few = texts is None and max(table.shape) <= 30 and table.size <= 300
    look = {"cbar": False, "linewidths": 0.5 if few or texts else 0, **look}
    if texts is not None:
        look |= {"annot": np.array(texts), "fmt": "", "annot_kws": {"fontsize": 8, "color": "0.1"}}
    else:
        look |= {"annot": few, "fmt": ".0f", "annot_kws": {"fontsize": 8}}
    sns.heatmap(table, ax=axis, **look)
    axis.tick_params(length=0, labelsize=8)
    axis.tick_params(axis="y", rotation=0)


def _text(name: str) -> str:
    """A name as it is: a dollar sign would start a formula."""
    return name.replace("$", r"\$")
