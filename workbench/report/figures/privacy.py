"""Figures of privacy: what noise costs, matching on projections, and what uploads give away."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stamp_core.results.records import Record
from workbench.report import frames
from workbench.report.figures import style
from workbench.report.text import epsilon_text

_Pixels = NDArray[np.uint8]  # [n, C, H, W]
_MOST = 16  # images of an upload
_MEASURES = {"main_accuracy": "accuracy, %", "main_forgetting": "forgetting, points"}
_KINDS = {
    "exemplar": ("exemplars", style.COLOURS[1], "s"),
    "new": ("new images", style.COLOURS[0], "o"),
}


def noise(records: Sequence[Record], spent: Mapping[tuple[str, str], float]) -> Figure:
    """Final accuracy, and below it forgetting, by noise: a column per setting."""
    rows = frames.run_frame(records)
    settings = list(rows.groupby("setting", sort=False))
    figure, axes = style.panels(2 * len(settings), len(settings), 2.4, 1.2)
    for place, (setting, part) in enumerate(settings):
        column = axes[place :: len(settings)]
        for axis, (measure, label) in zip(column, _MEASURES.items(), strict=True):
            _draw_by_value(axis, part, measure)
            axis.set_ylabel("" if place else label)
        column[0].set_title(setting, fontsize=10)
        _name_noise(column[1], setting, part.value.unique(), spent)
    caption = f"{style.seed_caption(rows, 'value')}; {style.POINTS}"
    style.add_caption(figure, "Accuracy and forgetting by the noise on updates", caption, True)
    return figure


def _name_noise(
    axis: Axes, setting: str, values: Sequence[str], spent: Mapping[tuple[str, str], float]
) -> None:
    known = [spent.get((setting, value)) for value in values]
    axis.set_xlabel("noise multiplier" + "\nε" * (None not in known), fontsize=9)
    if None not in known:
        short = [epsilon_text(each).replace(",000", "k") for each in known]
        texts = [f"{value}\n{each}" for value, each in zip(values, short, strict=True)]
        axis.set_xticks(range(len(values)), texts)


def projection(records: Sequence[Record], exact: Sequence[Record]) -> Figure:
    """Final accuracy by the numbers that clients send for matching: a panel per setting."""
    rows = frames.projection_frame(records, exact)
    xlabel = "numbers k of a client beside its model"
    figure, panels = style.setting_panels(rows, 2.6, xlabel=xlabel)
    for axis, _, part in panels:
        _draw_by_value(axis, part, "main_accuracy")
    caption = f"{style.seed_caption(rows, 'value')}; {style.POINTS}"
    style.add_caption(figure, "Matching on projections of updates", caption, True)
    return figure


def _draw_by_value(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    values = rows.value.unique().tolist()
    placed = rows.assign(place=rows.value.map(values.index), percent=100 * rows[column])
    style.draw_lines(axis, placed, "place", "percent")
    axis.set_xticks(range(len(values)), values, fontsize=7)


def rounds_together(windows: pd.DataFrame) -> Figure:
    """PSNR by the number of rounds that the server inverts together: a panel per method."""
    methods = list(windows.groupby("method", sort=False))
    figure, axes = style.panels(len(methods), height=2.6, sharey=True)
    axes[0].set_ylabel("PSNR, dB")
    for axis, (method, part) in zip(axes, methods, strict=True):
        for kind, own in part.groupby("kind"):
            name, colour, marker = _KINDS[str(kind)]
            ends = np.abs(own[["psnr_low", "psnr_high"]].to_numpy().T - own.psnr.to_numpy())
            marks: dict[str, Any] = {"color": colour, "marker": marker, "capsize": 3, "label": name}
            axis.errorbar(own.rounds, own.psnr, yerr=ends, **marks)
        axis.set(title=method, xlabel="rounds inverted together")
        axis.set_xticks(sorted(part.rounds.unique()))
        axis.grid(alpha=0.3)
    caption = f"n = {windows.n.min()} clients; bars: 95 % interval of the mean"
    title = "Images that return in every round, and images that a server sees once"
    style.add_caption(figure, title, caption, True)
    return figure


def reconstructions(pairs: Mapping[str, tuple[_Pixels, _Pixels]]) -> Figure:
    """For every named upload a row of its images above a row of their reconstructions."""
    rows, names = [], []
    for name, (true, found) in pairs.items():
        rows += [true[:_MOST], found[:_MOST]]
        names += [style.plain_text(name), "reconstructed"]
    figure, (axis,) = style.panels(1, height=0.43 * len(rows))
    style.draw_images(axis, rows, max(map(len, rows)), names)
    caption = f"at most {_MOST} images of an upload, in pairs with the least squared error"
    style.add_caption(figure, "Images of clients and what the server reconstructs", caption)
    return figure
