"""Figures of images and plans: the data, who learns it when, and what clients remember of it."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan
from stamp_core.results.records import Record
from workbench.report import frames
from workbench.report.figures.style import (
    COLOURS,
    add_caption,
    draw_images,
    draw_table,
    panels,
    plain_text,
)

_CLASSES = 20  # shown of a data set
_IMAGES = 8  # of a class
_REMEMBERED = 10  # classes shown of a client's memory
_LINE_LENGTH = 68  # characters in a row of the schedule
_GENERATIVE = ("replay", "target", "lander", "fedcil", "glfc")  # with images that can be shown
_Memory = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images [n, C, H, W] and their labels


# --- data and plans


def images(dataset: ImageDataset) -> Figure:
    """Training images, spread evenly over the set: a row per class, of the first 20."""
    names = [plain_text(name) for name in dataset.classes[:_CLASSES]]
    shown = []
    for label in range(len(names)):
        own = np.flatnonzero(np.asarray(dataset.y_train) == label)
        places = np.unique(np.linspace(0, len(own) - 1, _IMAGES).astype(int))
        chosen = dataset.x_train[own[places[: len(own)]]]
        shown.append(chosen[:, : dataset.shape[0]].numpy())
    columns = 2 if len(names) > 5 else 1
    size = math.ceil(len(names) / columns)
    figure, axes = panels(columns, columns, 0.42 * size)
    for first, axis in zip(range(0, len(names), size), axes, strict=True):
        part = slice(first, first + size)
        draw_images(axis, shown[part], _IMAGES, names[part])
    some = f"{len(names)} of " if len(names) < len(dataset.classes) else ""
    count = f"n = {len(dataset.y_train):,} training images"
    figure.suptitle(f"{dataset.name}: {some}{len(dataset.classes)} classes, {count}")
    return figure


def schedule(plan: Plan, dataset: ImageDataset) -> Figure:
    """Who learns which classes (or domains) when, and how many clients hold each in each task."""
    kind, names = "class", dataset.classes
    if any(task.domain is not None for tasks in plan.clients for task in tasks):
        kind, names = "domain", dataset.domains
    held = np.zeros((len(plan.clients), plan.tasks, len(names)), dtype=bool)  # [U, T, items]
    for u, tasks in enumerate(plan.clients):
        for t, task in enumerate(tasks):
            held[u, t, list(task.classes) if task.domain is None else task.domain] = True
    texts = _wrap_names(held, names)
    figure = _draw_names(held, names, texts, kind) if texts else _draw_first(held, names, kind)
    cycles = f", repeated {plan.split.cycles} times" if plan.split.cycles > 1 else ""
    counts = f"{len(plan.clients)} clients, {plan.tasks} tasks{cycles}"
    title = f"Who learns which {'classes' if kind == 'class' else 'domains'} when"
    figure.suptitle(f"{title}: {dataset.name}, {counts}, seed {plan.seed}")
    return figure


def _wrap_names(held: NDArray[np.bool_], names: Sequence[str]) -> list[list[str]]:
    width = _LINE_LENGTH // held.shape[1]
    texts = []
    for client in held:
        joined = [", ".join(np.array(names)[items]) for items in client]
        wrap = textwrap.TextWrapper(max(width, 1), break_long_words=False).wrap
        texts.append([wrap(text) for text in joined])
    cells = [lines for row in texts for lines in row]
    fits = width > 1 and max(map(len, cells)) <= 3
    fits = fits and max(len(line) for lines in cells for line in lines) <= 1.2 * width
    return [[plain_text("\n".join(lines)) for lines in row] for row in texts] if fits else []


def _draw_names(
    held: NDArray[np.bool_], names: Sequence[str], texts: list[list[str]], kind: str
) -> Figure:
    met = np.cumsum(held.any(axis=0), axis=0) - held.any(axis=0) > 0  # [T, items], before a task
    known = (held & met).sum(axis=2) / held.sum(axis=2)  # [U, T]
    lines = max(text.count("\n") + 1 for row in texts for text in row)
    height = max(len(texts) * (0.14 + 0.16 * lines), 0.22 * min(len(names), 30)) + 1.0
    figure, (left, right) = panels(2, 2, height, width_ratios=(3, 1.2))
    tasks, counts = range(1, held.shape[1] + 1), held.sum(axis=0).T  # [items, T]
    options = {"annot": np.array(texts), "fmt": "", "vmax": 2.5, "linewidths": 0.5}
    draw_table(left, pd.DataFrame(known, columns=tasks), cmap="Blues", vmin=0, **options)
    left.set(title="share learnt before by some client: white 0, blue all", ylabel="client")
    table = pd.DataFrame(counts, names, tasks)
    draw_table(right, table, cmap="Greens", vmin=0, mask=counts == 0, annot=counts.size <= 300)
    right.set(title="clients that learn it", ylabel=kind)
    for axis in (left, right):
        axis.set_xlabel("task")
    return figure


def _draw_first(held: NDArray[np.bool_], names: Sequence[str], kind: str) -> Figure:
    first = np.where(held.any(axis=1), held.argmax(axis=1) + 1.0, np.nan)  # [U, items]
    holders = pd.DataFrame(held.sum(axis=0), range(1, held.shape[1] + 1), names)
    figure, (top, bottom) = panels(2, 1, 3.2)
    for axis, table, rows, colours, label in (
        (top, pd.DataFrame(first, columns=names), "client", "viridis", "first learnt in task"),
        (bottom, holders, "task", "Greens", "clients that learn it"),
    ):
        bar = {"label": label, "ticks": MaxNLocator(6, integer=True)}  # one belongs to one axis
        draw_table(axis, table, cmap=colours, cbar=True, cbar_kws=bar)
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


def scenes(dataset: ImageDataset) -> Figure:
    """An image of each class above its mask, for training and for testing: a colour per class."""
    colours = [to_rgb(colour) for colour in (*COLOURS[: len(dataset.classes)], "0.9")]
    palette = (255 * torch.tensor(colours)).byte()
    rows, names = [], []
    for name, x, y in (
        ("training", dataset.x_train, dataset.y_train),
        ("test", dataset.x_test, dataset.y_test),
    ):
        first = [int((y == label).nonzero()[0]) for label in range(len(dataset.classes))]
        images, masks = x[first][:, :-1], x[first][:, -1].long()
        coloured = palette[masks].permute(0, 3, 1, 2)  # [n, 3, H, W]
        rows += [images.expand(-1, 3, -1, -1).numpy(), coloured.numpy()]
        names += [name, "mask"]
    figure, (axis,) = panels(1, height=0.85 * len(rows))
    draw_images(axis, rows, len(dataset.classes), names)
    classes = map(plain_text, dataset.classes)
    for colour, label in zip(colours, classes, strict=False):
        axis.plot([], [], "s", color=colour, markersize=8, label=label)
    title = f"{dataset.name}: images and their masks"
    add_caption(figure, title, "masks: a colour per class, grey: background", True)
    return figure


# --- memories


def exemplars(records: Sequence[Record], setting: str, classes: Sequence[str]) -> Figure:
    """The first exemplars per class of one client: a row per rule, with the smallest seed."""
    records = _with_memory(records, setting)
    if not records:
        return _empty(f"{setting}: its runs keep no exemplars with their records")
    rows = frames.coreset_frame(records).assign(record=records)
    rows = frames.limited_memory(rows)
    rows = rows[(rows.seed == rows.seed.min()) & (rows.exemplars == rows.exemplars.max())]
    shown = [_remembered(record, -1) for record in rows.record]
    figure = _draw_by_class(shown, list(rows.selection), classes)
    number, seed = rows.exemplars.iloc[0], rows.seed.iloc[0]
    known = min(len(np.unique(np.concatenate([labels for _, labels in shown]))), _REMEMBERED)
    some = f"{known} of " if known < len(classes) else ""
    count = f"{some}{len(classes)} classes, first of {number} exemplars each"
    figure.suptitle(f"{setting}: {count}, client 0, seed {seed}")
    return figure


def synthetic(records: Sequence[Record], setting: str, classes: Sequence[str]) -> Figure:
    """The images that methods remember of each class after the first and the last task."""
    methods = {r.run[1:]: r for r in _with_memory(records, setting) if r.run[1] in _GENERATIVE}
    if not methods:
        return _empty(f"{setting}: no method of the grid has remembered images")
    seed = min(seed for _, seed in methods)
    shown = [methods[name, seed] for name in _GENERATIVE if (name, seed) in methods]
    pairs = [(record, place) for record in shown for place in (0, -1)]
    names = [f"{record.run[1]}, {('first', 'last')[place]} task" for record, place in pairs]
    figure = _draw_by_class([_remembered(*pair) for pair in pairs], names, classes)
    title = f"{setting}: images remembered after a task (replay: real), seed {seed}"
    add_caption(figure, title, "blank: nothing is remembered of the class, or not as many images")
    return figure


def _with_memory(records: Sequence[Record], setting: str) -> list[Record]:
    own = [record for record in records if record.run[0] == setting]
    return [record for record in own if len(record.memory.get("labels", ()))]


def _empty(title: str) -> Figure:
    figure, (axis,) = panels(1, 1, 0.5)
    axis.set_axis_off()
    figure.suptitle(title)
    return figure


def _remembered(record: Record, place: int) -> _Memory:
    """The images in memory and their labels, after the first (0) or the last experience (-1)."""
    experiences = record.memory["experiences"]
    own = experiences == np.unique(experiences)[place]
    return record.memory["images"][own], record.memory["labels"][own]


def _draw_by_class(rows: Sequence[_Memory], names: list[str], classes: Sequence[str]) -> Figure:
    labels = np.unique(np.concatenate([labels for _, labels in rows]))[:_REMEMBERED]
    count = max(np.bincount(labels).max() for _, labels in rows)
    shown = []
    for images, own in rows:
        blank = np.full((count, *images.shape[1:]), 255, dtype=np.uint8)
        parts = [np.concatenate([images[own == label], blank])[:count] for label in labels]
        shown.append(np.concatenate(parts))
    words = [classes[k] for k in labels]
    long = max(map(len, words)) > 3 * count  # about three letters fit below an image
    slant: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    figure, (axis,) = panels(1, 1, 0.24 * len(shown) + (0.8 if long else 0))
    draw_images(axis, shown, count * len(labels), names)
    width = (shown[0].shape[3] + 2) * count
    places = width * (np.arange(len(labels)) + 0.5) - 0.5
    axis.set_xticks(places, words, **(slant if long else {}))
    return figure
