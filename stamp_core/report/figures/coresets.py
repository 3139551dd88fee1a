"""Figures of selection rules: accuracy by exemplars per class, its cost, and the exemplars."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from stamp_core.report import frames as tables
from stamp_core.report.figures import style
from stamp_core.results.records import Record

_CLASSES = 10  # shown of a client's memory
_GENERATIVE = ("replay", "target", "lander", "fedcil", "glfc")  # with images that can be shown
_Memory = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images [n, C, H, W] and their labels


def coresets(records: Sequence[Record]) -> Figure:
    """Final accuracy by exemplars per class: a line per rule, a panel per setting.

    Titles say what no memory and all images reach: lines so far away would hide the differences.
    """
    rows = tables.coreset_frame(records)
    figure, found = style.setting_panels(rows.assign(percent=100 * rows.main_accuracy), 3.8)
    for axis, title, part in found:
        limited, references = tables.limited_memory(part), tables.reference_memories(part)
        labels = style.draw_lines(axis, limited, "exemplars", "percent", "selection")
        for name, runs in references.items():
            title += f"\n{name}: {runs.percent.mean():.1f} %" if len(runs) else ""
        axis.set_title(title, fontsize=10)
        numbers = sorted(limited.exemplars.unique())
        axis.set(xscale="log", xlabel="exemplars per class")
        axis.set_xticks(numbers, map(str, numbers))
        axis.xaxis.set_minor_locator(NullLocator())
        style.add_labels(axis, labels)
    caption = f"{style.seed_caption(rows, 'exemplars')}; points: seeds, lines: means"
    style.add_caption(figure, "Final accuracy by selection rule and exemplars per class", caption)
    return figure


def coreset_times(records: Sequence[Record]) -> Figure:
    """Final accuracy against the time that selection takes a client for one task."""
    rows = tables.limited_memory(tables.coreset_frame(records))
    times = rows.groupby(["setting", "selection", "exemplars"]).selection_ms.transform("mean")
    rows = rows.assign(percent=100 * rows.main_accuracy, time=times)
    figure, found = style.setting_panels(rows, 3.8)
    for axis, _, part in found:
        labels = style.draw_lines(axis, part, "time", "percent", "selection")
        axis.axvline(part.training_ms.mean(), color="0.4", linewidth=1, linestyle="--")
        style.set_log_scale(axis)
        axis.set_xlabel("selection time, ms")
        style.add_labels(axis, labels)
    caption = "points: seeds, lines: means by exemplars per class, dashed: training of the task"
    caption = f"{style.seed_caption(rows, 'exemplars')}; {caption}"
    style.add_caption(figure, "Final accuracy by selection time of a client for a task", caption)
    return figure


def exemplars(records: Sequence[Record], setting: str, classes: Sequence[str]) -> Figure:
    """The first exemplars per class of one client: a row per rule, with the smallest seed.

    Of several numbers of exemplars the largest is shown.
    """
    records = [r for r in records if r.run[0] == setting and len(r.memory.get("labels", ()))]
    rows = tables.coreset_frame(records).assign(record=records)
    rows = tables.limited_memory(rows)
    rows = rows[(rows.seed == rows.seed.min()) & (rows.exemplars == rows.exemplars.max())]
    shown = [_remembered(record, -1) for record in rows.record]
    figure = _draw_by_class(shown, list(rows.selection), classes)
    number, seed = rows.exemplars.iloc[0], rows.seed.iloc[0]
    figure.suptitle(f"{setting}: first of {number} exemplars per class, client 0, seed {seed}")
    return figure


def synthetic(records: Sequence[Record], setting: str, classes: Sequence[str]) -> Figure:
    """What methods remember of each class, after the first and the last task: two rows each.

    Those of replay are real images.
    """
    records = [r for r in records if r.run[0] == setting and r.run[1] in _GENERATIVE]
    records = [record for record in records if len(record.memory.get("labels", ()))]
    if not records:
        figure, (axis,) = style.panels(1, 1, 0.5)
        axis.set_axis_off()
        figure.suptitle(f"{setting}: no method of the grid has remembered images")
        return figure
    seed = min(record.run[2] for record in records)
    records = sorted(
        (record for record in records if record.run[2] == seed),
        key=lambda record: _GENERATIVE.index(record.run[1]),
    )
    pairs = [(record, place) for record in records for place in (0, -1)]
    names = [f"{record.run[1]}, {('first', 'last')[place]} task" for record, place in pairs]
    figure = _draw_by_class([_remembered(*pair) for pair in pairs], names, classes)
    figure.suptitle(f"{setting}: images remembered after a task (replay: real), seed {seed}")
    return figure


def _remembered(record: Record, place: int) -> _Memory:
    """The images in memory and their labels, after the first (0) or the last experience (-1)."""
    experiences = record.memory["experiences"]
    own = experiences == np.unique(experiences)[place]
    return record.memory["images"][own], record.memory["labels"][own]


def _draw_by_class(rows: Sequence[_Memory], names: list[str], classes: Sequence[str]) -> Figure:
    """A row of images for every memory, those of a class below each other."""
    labels = np.unique(np.concatenate([labels for _, labels in rows]))[:_CLASSES]
    count = max(np.bincount(labels).max() for _, labels in rows)
    shown = []
    for images, own in rows:
        blank = np.full((count, *images.shape[1:]), 255, dtype=np.uint8)
        parts = [np.concatenate([images[own == label], blank])[:count] for label in labels]
        shown.append(np.concatenate(parts))
    figure, (axis,) = style.panels(1, 1, 0.24 * len(shown))
    style.draw_images(axis, shown, count * len(labels), names)
    width = (shown[0].shape[3] + 2) * count
    axis.set_xticks(width * (np.arange(len(labels)) + 0.5) - 0.5, [classes[k] for k in labels])
    return figure
