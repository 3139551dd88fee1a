"""Figures of images and plans: what there is to learn, and who learns it when."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from stamp_core.data.dataset import ImageDataset
from stamp_core.data.split import Plan
from stamp_core.report.figures.style import draw_images, draw_table, panels, plain_text

_CLASSES = 20  # shown of a data set
_LINE_LENGTH = 68  # characters in a row of the schedule


def images(dataset: ImageDataset, images_per_class: int = 8) -> Figure:
    """Training images, spread evenly over the set: a row per class, of the first 20."""
    names = [plain_text(name) for name in dataset.classes[:_CLASSES]]
    shown = []
    for label in range(len(names)):
        own = np.flatnonzero(np.asarray(dataset.y_train) == label)
        places = np.unique(np.linspace(0, len(own) - 1, images_per_class).astype(int))
        chosen = dataset.x_train[own[places[: len(own)]]]
        shown.append(chosen[:, : dataset.shape[0]].numpy())
    columns = 2 if len(names) > 5 else 1
    size = math.ceil(len(names) / columns)
    figure, axes = panels(columns, columns, 0.42 * size)
    for first, axis in zip(range(0, len(names), size), axes, strict=True):
        part = slice(first, first + size)
        draw_images(axis, shown[part], images_per_class, names[part])
    some = f"{len(names)} of " if len(names) < len(dataset.classes) else ""
    count = f"n = {len(dataset.y_train):,} training images"
    figure.suptitle(f"{dataset.name}: {some}{len(dataset.classes)} classes, {count}")
    return figure


def schedule(plan: Plan, dataset: ImageDataset) -> Figure:
    """Who learns which classes (or domains) when, and how many clients hold each in each task.

    Where the names do not fit, colour says in which task a client first meets a class.
    """
    kind, names = "class", dataset.classes
    if plan.split.kind == "domains":
        kind, names = "domain", dataset.domains
    held = np.zeros((len(plan.clients), plan.tasks, len(names)), dtype=bool)  # [U, T, items]
    for u, tasks in enumerate(plan.clients):
        for t, task in enumerate(tasks):
            held[u, t, list(task.classes) if task.domain is None else task.domain] = True
    texts = _wrap_names(held, names)
    figure = _draw_names(held, names, texts, kind) if texts else _draw_first(held, names, kind)
    cycles = f", repeated {plan.split.cycles} times" if plan.split.cycles > 1 else ""
    counts = f"{len(plan.clients)} clients, {plan.tasks} tasks{cycles}"
    figure.suptitle(f"Who learns what when: {dataset.name}, {counts}, seed {plan.seed}")
    return figure


def _wrap_names(held: NDArray[np.bool_], names: Sequence[str]) -> list[list[str]]:
    """What each client learns in each task; nothing if the names do not fit."""
    width = _LINE_LENGTH // held.shape[1]
    texts = []
    for client in held:
        joined = [", ".join(np.array(names)[items]) for items in client]
        texts.append(
            [textwrap.wrap(text, max(width, 1), break_long_words=False) for text in joined]
        )
    cells = [lines for row in texts for lines in row]
    fits = width > 1 and max(map(len, cells)) <= 3
    fits = fits and max(len(line) for lines in cells for line in lines) <= 1.2 * width
    return [[plain_text("\n".join(lines)) for lines in row] for row in texts] if fits else []


def _draw_names(
    held: NDArray[np.bool_], names: Sequence[str], texts: list[list[str]], kind: str
) -> Figure:
    """The schedule by name; darker cells hold more that some client met before."""
    met = np.cumsum(held.any(axis=0), axis=0) - held.any(axis=0) > 0  # [T, items], before a task
    known = (held & met).sum(axis=2) / held.sum(axis=2)  # [U, T]
    lines = max(text.count("\n") + 1 for row in texts for text in row)
    height = max(len(texts) * (0.14 + 0.16 * lines), 0.22 * min(len(names), 30)) + 1.0
    figure, (left, right) = panels(2, 2, height, width_ratios=(3, 1.2))
    tasks, counts = range(1, held.shape[1] + 1), held.sum(axis=0).T  # [items, T]
    options = {"annot": np.array(texts), "fmt": "", "vmax": 2.5, "linewidths": 0.5}
    draw_table(left, pd.DataFrame(known, columns=tasks), cmap="Blues", vmin=0, **options)
    left.set(title="white: new to all clients; blue: learnt before by some", ylabel="client")
    table = pd.DataFrame(counts, names, tasks)
    draw_table(right, table, cmap="Greens", vmin=0, mask=counts == 0, annot=counts.size <= 300)
    right.set(title="clients that learn it", ylabel=kind)
    for axis in (left, right):
        axis.set_xlabel("task")
    return figure


def _draw_first(held: NDArray[np.bool_], names: Sequence[str], kind: str) -> Figure:
    """The schedule by colour, for plans with many tasks."""
    first = np.where(held.any(axis=1), held.argmax(axis=1) + 1.0, np.nan)  # [U, items]
    holders = pd.DataFrame(held.sum(axis=0), range(1, held.shape[1] + 1), names)
    figure, (top, bottom) = panels(2, 1, 3.2)
    ticks = MaxNLocator(6, integer=True)
    for axis, table, rows, colours, label in (
        (top, pd.DataFrame(first, columns=names), "client", "viridis", "first learnt in task"),
        (bottom, holders, "task", "Greens", "clients that learn it"),
    ):
        draw_table(axis, table, cmap=colours, cbar=True, cbar_kws={"label": label, "ticks": ticks})
        axis.set(ylabel=rows, xlabel=kind, facecolor="0.9")  # grey: never met
    return figure


def shares(plan: Plan, dataset: ImageDataset) -> Figure:
    """How many training images of each class each client learns from, over all its tasks."""
    counts = np.zeros((len(plan.clients), len(dataset.classes)))
    for u, tasks in enumerate(plan.clients):
        for t in range(len(tasks)):
            own = dataset.y_train[plan.train_indices(dataset, u, t)]
            counts[u] += np.bincount(own, minlength=len(dataset.classes))
    figure, (axis,) = panels(1, 1, 0.26 * len(counts) + 0.7)
    table, bar = pd.DataFrame(counts, columns=dataset.classes), {"label": "images"}
    few = max(table.shape) <= 30 and table.size <= 300
    options: dict[str, Any] = {"annot": few, "fmt": ".0f", "mask": counts == 0}
    draw_table(axis, table, cmap="Blues", vmin=0, cbar=True, cbar_kws=bar, **options)
    axis.set(xlabel="class", ylabel="client")
    alpha = "" if plan.split.alpha is None else f", α = {plan.split.alpha:g}"
    shown = f"{dataset.name}{alpha}, seed {plan.seed}, n = {int(counts.sum()):,} over all clients"
    figure.suptitle(f"Training images by client and class: {shown}")
    return figure
