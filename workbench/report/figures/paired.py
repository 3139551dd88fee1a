"""Figures of differences paired by seed: of all methods from replay, and of STAMP's variants."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stamp_core.results.records import Record
from workbench.report import frames
from workbench.report.figures import style
from workbench.report.tables.ablation import PARTS, ablation_frame
from workbench.report.tables.page import ENDPOINTS, EQUAL, paired_differences

_BASES = ("replay", "fedavg")  # the first that a setting has
_ROW = 0.18  # inches
_HEADINGS = ("reference", "methods")
_CAPTION = """\
Differences by seed: dots are means, bars their 95 % Student t intervals; band: ±{band:g} points
numbers: means more than {far:g} points away; colour: headline methods; no mark: undefined"""


def differences(records: Sequence[Record]) -> Figure:
    """Paired differences from replay, or FedAvg without it: a row per method and kind of model.

    Of final accuracy, which orders the rows, and of average incremental accuracy.
    """
    rows = frames.model_frame(frames.run_frame(records))
    names = {key: style.method_label(own) for key, own in rows.groupby(["method", "model"])}
    labels = [names[key] for key in zip(rows.method, rows.model, strict=True)]
    rows = rows.assign(label=labels, part=np.where(rows.method == "joint", *_HEADINGS))
    return _draw(rows, _HEADINGS, 20, "Accuracy compared with {}")


def ablation(records: Sequence[Record]) -> Figure:
    """The same differences of STAMP's variants and their controls, by part of the ablation."""
    rows = ablation_frame(records).assign(label=lambda rows: rows.variant)
    return _draw(rows, [*PARTS.values()], 10, "Parts of STAMP and controls, compared with {}")


def _draw(rows: pd.DataFrame, parts: Sequence[str], far: float, title: str) -> Figure:
    """For each setting two panels with a row per `label`, below the heading of its part.

    No axis goes beyond `far`: differences near 0 could not be distinguished.
    """
    runs = [_with_base(own) for _, own in rows.groupby("setting", sort=False)]
    pairs = [_pairs(own) for own in runs]
    names = [_row_names(own, parts) for own in pairs]
    ratios = [max(1, len(own)) for own in names]
    options = {"sharex": "row", "sharey": "row", "height_ratios": ratios}
    height = _ROW * float(np.mean(ratios)) + 0.75
    figure, axes = style.panels(2 * len(runs), 2, height, 1, **options)
    for line, (about, own, places) in enumerate(zip(runs, pairs, names, strict=True)):
        left, right = axes[2 * line : 2 * line + 2]
        left.set_xlim(_limits(own, far))
        for axis, measure in zip((left, right), ENDPOINTS, strict=True):
            _draw_pairs(axis, own[own.measure == measure], places)
            axis.set_title(measure, fontsize=10)
            axis.set_xlabel(f"percentage points from {about.base.iloc[0]}", fontsize=9)
        left.set_title(f"{about.setting.iloc[0]}: {left.get_title()}", fontsize=10)
        style.set_rows(left, places)
        for text in left.get_yticklabels():
            text.set_fontweight("bold" if text.get_text() in parts else "normal")
    every = pd.concat(runs)
    compared = every[every.paired & (every.method != every.base)]
    caption = f"{_CAPTION.format(band=EQUAL, far=far)}\n{style.seed_caption(compared)}"
    style.add_caption(figure, title.format(" or ".join(every.base.unique())), caption)
    return figure


def _with_base(rows: pd.DataFrame) -> pd.DataFrame:
    """The runs of one setting with the name of its base, and whether that has their seed."""
    base = next(name for name in (*_BASES, rows.method.iloc[0]) if name in set(rows.method))
    return rows.assign(base=base, paired=rows.seed.isin(rows.seed[rows.method == base]))


def _pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """The differences of one setting's runs from its base."""
    pairs = paired_differences(rows, "method", rows.base[:1], ["setting"], ENDPOINTS)
    return pairs.merge(rows[["method", "model", "label", "part"]].drop_duplicates())


def _row_names(pairs: pd.DataFrame, parts: Sequence[str]) -> list[str]:
    """The labels below their parts, by the difference in the first measure."""
    rows = pairs[pairs.measure == next(iter(ENDPOINTS))]
    rows = rows.sort_values("difference", ascending=False, kind="stable")
    groups = {part: rows.label[rows.part == part] for part in parts}
    return [name for part, own in groups.items() if len(own) for name in (part, *own)]


def _limits(pairs: pd.DataFrame, far: float) -> tuple[float, float]:
    """The range of an axis: of the intervals of means up to `far`, but not beyond it."""
    near = pairs[pairs.difference.abs() <= far]
    ends = near[["low", "difference", "high"]].clip(-far, far).stack()
    return min(-1, ends.min()) - 0.5, max(1, ends.max()) + 0.5


def _draw_pairs(axis: Axes, pairs: pd.DataFrame, names: Sequence[str]) -> None:
    """In each row the mean with its interval, or a number for a mean beyond the axis."""
    axis.axvspan(-EQUAL, EQUAL, color="0.9", zorder=0)
    axis.axvline(0, color="0.3", linewidth=0.8, zorder=1)
    low, high = axis.get_xlim()
    for pair in pairs.dropna(subset="difference").itertuples():
        place, marks = names.index(pair.label), style.row_style(pair.method)
        if not low < pair.difference < high:
            _add_number(axis, place, pair.difference, marks["color"])
            continue
        face = "white" if pair.model == "personal" else marks["color"]
        options = {"capsize": 2, "markersize": 5, "markerfacecolor": face, **marks}
        axis.errorbar(pair.difference, place, xerr=pair.high - pair.difference, **options)
    axis.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)
    axis.tick_params(axis="y", length=0)


def _add_number(axis: Axes, place: int, value: float, color: str) -> None:
    """A mean beyond the axis as a number, with an arrow, at the side it lies on."""
    left, right = (f"◂ {value:.1f}", 0.01, "left"), (f"{value:+.1f} ▸", 0.99, "right")
    text, x, side = left if value < 0 else right
    options: dict[str, Any] = {"va": "center", "transform": axis.get_yaxis_transform()}
    axis.text(x, place, text, ha=side, fontsize=7.5, color=color, **options)
