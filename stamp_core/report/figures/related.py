"""Figures of related work: updates inside protected subspaces, and scenes with their masks."""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from stamp_core.data.dataset import ImageDataset
from stamp_core.report.figures import runs, style
from stamp_core.report.frames import protection_frame
from stamp_core.results.records import Record


def protection(records: Sequence[Record], captions: Mapping[str, tuple[str, str]]) -> Figure:
    """The share of the global update inside protected subspaces, and accuracy: a column per sweep.

    `captions` has for each sweep its label and the preset's value.
    """
    rows = protection_frame(records)
    rows = rows.assign(percent=100 * rows.inside, accuracy=100 * rows.main_accuracy)
    columns = list(rows.groupby(["sweep", "setting"], sort=False))
    figure, axes = style.panels(2 * len(columns), len(columns), 1.8)
    for place, ((sweep, setting), part) in enumerate(columns):
        values = part.value.unique().tolist()
        part = part.assign(place=part.value.map(values.index))
        upper, lower = axes[place], axes[place + len(columns)]
        _draw_values(upper, part, "percent", "update inside, %")
        _draw_values(lower, part, "accuracy", "accuracy, %")
        upper.set_title(f"{setting}, {part.method.iloc[0]}", fontsize=9)
        for axis in (upper, lower):
            axis.set_xticks(range(len(values)), values)
            axis.set_xlim(-0.5, len(values) - 0.5)
        upper.set_ylim(0, 1.1 * rows.percent.max())
        lower.set_xlabel(captions[sweep][0])
    caption = f"{style.seed_caption(rows, 'sweep', 'value')}; points: seeds, lines: means"
    style.add_caption(figure, "Share of the global update inside protected subspaces", caption)
    return figure


def _draw_values(axis: Axes, rows: pd.DataFrame, column: str, label: str) -> None:
    """A column by the place of its value: seeds and their mean."""
    style.draw_seeds(axis, rows, "place", column, color=style.COLOURS[0], marker="o")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)


def returning(records: Sequence[Record]) -> Figure:
    """Accuracy over the tasks learnt so far, of the runs with the most cycles; where each ends."""
    cycles = [record.about["setting"]["split"]["cycles"] for record in records]
    pairs = zip(records, cycles, strict=True)
    shown = [record for record, number in pairs if number == max(cycles)]
    figure = runs.accuracy(shown)
    for end in range(1, max(cycles)):
        figure.axes[0].axvline(end * shown[0].tests.shape[1] + 0.5, color="0.6", linewidth=0.8)
    return figure


def scenes(dataset: ImageDataset) -> Figure:
    """An image of each class above its mask, for training and for testing: a colour per class."""
    colours = [to_rgb(colour) for colour in (*style.COLOURS[: len(dataset.classes)], "0.9")]
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
    figure, (axis,) = style.panels(1, height=0.85 * len(rows))
    style.draw_images(axis, rows, len(dataset.classes), names)
    classes = ", ".join(map(style.plain_text, dataset.classes))
    figure.suptitle(f"{dataset.name}: scenes of the classes {classes}, one colour each")
    return figure
