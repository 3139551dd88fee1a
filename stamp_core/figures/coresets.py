"""Figures of coreset rules: accuracy by pictures kept, its price, and the pictures themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from stamp_core import metrics, tables
from stamp_core.figures.look import bare, entitle, panels, style
from stamp_core.figures.runs import groups, possible, room
from stamp_core.records import Record

ENDS = {"no memory": "0.55", "all pictures": "black"}  # lines across
SHOWN = 10  # classes of a client's memory


def coresets(records: Sequence[Record]) -> Figure:
    """Final accuracy by pictures kept of a class, a line a rule; lines across: none and all."""
    rows = tables.coresets(records)
    settings = list(groups(rows, "setting"))
    figure, axes = panels(len(settings), height=4.2, extra=room(rows))
    for axis, (setting, part) in zip(axes, settings, strict=True):
        _across(axis, part)
        _by_number(axis, tables.between(part))
        axis.set(title=setting, xlabel="pictures kept of a class", ylabel="accuracy, %")
        axis.grid(alpha=0.3, axis="y")
        possible(axis)
    caption = f"{_seeds(rows)}, bars: 95 % interval of the mean; grey bands: likewise"
    entitle(figure, "Which pictures to keep", caption, axes)
    return figure


def _across(axis: Axes, rows: pd.DataFrame) -> None:
    """No memory and all pictures as lines with their intervals."""
    for (name, colour), group in zip(ENDS.items(), tables.ends(rows), strict=True):
        if len(group):
            middle, half = metrics.interval((100 * group.accuracy).tolist())
            axis.axhline(middle, color=colour, linewidth=1.2, linestyle=":", label=name)
            axis.axhspan(middle - half, middle + half, color=colour, alpha=0.08, linewidth=0)


def _by_number(axis: Axes, rows: pd.DataFrame) -> None:
    """A line a rule; numbers are equally far apart."""
    numbers = sorted(rows.pictures.unique())
    beside(axis, rows, "rule", "pictures", lambda number, shift: numbers.index(number) + shift)
    axis.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    axis.set_xlim(-0.5, len(numbers) - 0.5)


def beside(
    axis: Axes, rows: pd.DataFrame, who: str, at: str, place: Callable[[Any, float], float]
) -> None:
    """A line for each of `who`: means with intervals by `at`, moved so that no bar covers another.

    `place` says where on x a value moved by a share of the way to the next one is.
    """
    lines = list(groups(rows, who))
    most = 0.3 if len(lines) > 1 else 0.0
    for shift, (name, group) in zip(np.linspace(-most, most, len(lines)), lines, strict=True):
        found = [
            (place(value, shift), *metrics.interval((100 * each.accuracy).tolist()))
            for value, each in group.groupby(at)
        ]
        places, middle, half = np.transpose(found)
        look: dict[str, Any] = {"label": name, "linewidth": 1.2, "markersize": 5.5, "capsize": 2}
        axis.errorbar(places, middle, yerr=half, elinewidth=1, **look, **_look(group))


def _look(rows: pd.DataFrame) -> dict[str, Any]:
    """The colour, marker and dashes of a rule: those of its row in params.yaml."""
    return style(rows.method.iloc[0].split("-")[0])


def _seeds(rows: pd.DataFrame) -> str:
    """How many seeds are behind a point."""
    counts = sorted(set(rows.groupby(["setting", "rule", "pictures"]).seed.nunique()))
    return f"n = {' to '.join(map(str, counts))} seeds"


def coreset_times(records: Sequence[Record]) -> Figure:
    """Accuracy against what choosing takes a client for one task, a point a rule and number."""
    rows = tables.coresets(records)
    settings = list(groups(rows, "setting"))
    figure, axes = panels(len(settings), height=3.8, extra=room(rows))
    for axis, (setting, part) in zip(axes, settings, strict=True):
        kept = tables.between(part)
        for rule, group in groups(kept, "rule"):
            _prices(axis, rule, group)
        _training(axis, kept.training.mean())
        axis.set(title=setting, xlabel="milliseconds to choose", ylabel="accuracy, %")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
        possible(axis)
    caption = f"{_seeds(rows)}, bars: 95 % interval; larger marks: more pictures"
    entitle(figure, "What choosing costs", caption, axes)
    return figure


def _training(axis: Axes, milliseconds: float) -> None:
    """A line at what training takes, with its name."""
    axis.axvline(milliseconds, color="0.4", linewidth=1, linestyle="--")
    look: dict[str, Any] = {"ha": "right", "fontsize": 8, "color": "0.3"}
    place = axis.get_xaxis_transform()  # y from the bottom of the panel
    axis.annotate(
        "training\nof the task",
        (milliseconds, 0),
        xycoords=place,
        xytext=(-3, 4),
        textcoords="offset points",
        **look,
    )


def _prices(axis: Axes, rule: str, rows: pd.DataFrame) -> None:
    """The points of one rule, joined in the order of their numbers of pictures."""
    look = _look(rows)
    cells = list(rows.groupby("pictures"))
    for place, (_, cell) in enumerate(cells):
        middle, half = metrics.interval((100 * cell.accuracy).tolist())
        axis.errorbar(
            cell.choosing.mean(),
            middle,
            yerr=half,
            elinewidth=0.8,
            markersize=4 + 1.5 * place,
            color=look["color"],
            marker=look["marker"],
            linestyle="none",
            label=rule,
        )
    means = rows.groupby("pictures")[["choosing", "accuracy"]].mean()
    axis.plot(means.choosing, 100 * means.accuracy, color=look["color"], linewidth=0.7, alpha=0.6)


def kept(records: Sequence[Record], setting: str, classes: Sequence[str]) -> Figure:
    """The first pictures of each class that one client keeps, a row a rule: one seed, a look.

    Of several numbers of pictures the largest is shown.
    """
    rows = [r for r in records if r.cell[0] == setting and len(r.kept.get("labels", ()))]
    rows = [r for r in rows if r.about["method"]["memory"]["per_class"] < tables.EVERY]
    seed = min(r.cell[2] for r in rows)
    found = tables.coresets([r for r in rows if r.cell[2] == seed]).assign(
        record=[r for r in rows if r.cell[2] == seed]
    )
    found = found[found.pictures == found.pictures.max()]
    labels = np.unique(np.concatenate([r.kept["labels"] for r in found.record]))[:SHOWN]
    strips = [_strip(record, labels) for record in found.record]
    figure, (axis,) = panels(1, 1, 0.24 * len(strips) + 0.6)
    axis.imshow(np.concatenate(strips).squeeze(), cmap="gray", vmin=0, vmax=255)
    height, width = len(strips[0]), strips[0].shape[1] / len(labels)
    axis.set_yticks(height * (np.arange(len(strips)) + 0.5) - 0.5, list(found.rule))
    axis.set_xticks(width * (np.arange(len(labels)) + 0.5) - 0.5, [classes[k] for k in labels])
    axis.tick_params(length=0, labelsize=8)
    bare(axis)
    number = found.pictures.iloc[0]
    figure.suptitle(f"{setting}: the first kept by client 0 of {number} a class, seed {seed}")
    return figure


def _strip(record: Record, labels: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Some pictures of each class side by side in white frames.  # [H + 2, W', C]"""
    count = max(np.unique(record.kept["labels"], return_counts=True)[1])
    parts = []
    for label in labels:
        own = record.kept["pictures"][record.kept["labels"] == label].transpose(0, 2, 3, 1)
        missing = count - len(own)
        framed = np.pad(own, ((0, missing), (1, 1), (1, 1), (0, 0)), constant_values=255)
        parts.append(
            np.pad(
                np.concatenate(list(framed), axis=1), ((0, 0), (2, 2), (0, 0)), constant_values=255
            )
        )
    return np.concatenate(parts, axis=1)
