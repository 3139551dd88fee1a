"""The parts that all figures share: the marks of methods, panels, captions, labels, and files."""

import math
import zlib
from collections.abc import Hashable, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray
from PIL import Image
from scipy.optimize import isotonic_regression

from stamp_core.config.params import read_params
from stamp_core.core.atomic import atomic_write
from workbench.report import metrics
from workbench.report.frames import EXPERIMENT
from workbench.report.text import MARK, RECONSTRUCTED, SCENES, marked

Values = NDArray[np.float64]
_Point = Sequence[float] | Values  # x and y
_Style = dict[str, Any]

WIDTH = 9.0  # inches: 900 pixels at 100 dots an inch, the width of a README
DPI = 160
_LEGEND_COLUMNS = 5
INTERVALS = "bars: 95 % interval of the mean, small marks: seeds"
POINTS = "points: seeds, lines: means"
LINE = 0.15  # inches, the height of a line of small text
LARGE = 2**20  # bytes of a file

# seaborn's colourblind palette without its grey, which a control has, and its yellow, too faint in
# print. The highlighted methods differ in colour and marker from one another and from all others.
COLOURS = ["#0173b2", "#d55e00", "#029e73", "#cc78bc", "#de8f05", "#56b4e9", "#ca9161", "#fbafe4"]
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)))
_HEADLINE = {
    "fedavg": (COLOURS[0], "o", 0),
    "replay": (COLOURS[2], "D", 2),
    "joint": ("black", "*", 0),
    "stamp": (COLOURS[1], "v", 0),
    "stamp_without_coreset": (COLOURS[6], "8", 0),
    "stamp_round": (COLOURS[7], "p", 2),
    "gem": (COLOURS[3], "P", 1),
    "fedomg": (COLOURS[4], "^", 2),
    "fedavg_step": (COLOURS[5], "s", 1),
    "local": ("0.5", "d", 1),
}
HIGHLIGHTED = tuple(_HEADLINE)  # in figures with names, which have room for 8
# Of the others, by their places: Paul Tol's muted colours, safe for the colour-blind as well, and
# markers that no highlighted method has. 8 and 11 have no common factor: 88 presets differ.
_MUTED = ["#882255", "#117733", "#661100", "#999933", "#44aa99", "#aa4499", "#332288", "#6699cc"]
_MARKERS = ("X", "<", ">", "h", "x", "+", "1", "2", (4, 1, 0), (6, 1, 0), (3, 1, 0))
_PLAIN = "0.45"  # of methods that their row names, so that no colour stands for two of them


class Label(NamedTuple):
    """A name at the right edge of a panel, and the point in the panel that it belongs to."""

    text: str
    x: float
    y: float
    color: str


def method_style(method: str) -> _Style:
    """Colour, marker and dashes of a method, by its place in params/methods.yaml or checksum."""
    method = method.removesuffix(SCENES)
    place = _places().get(method, zlib.crc32(method.encode()))
    other = (_MUTED[place % len(_MUTED)], _MARKERS[place % len(_MARKERS)], place % len(_DASHES))
    color, marker, dashes = _HEADLINE.get(method, other)
    return {"color": color, "marker": marker, "linestyle": _DASHES[dashes]}


@cache
def _places() -> dict[str, int]:
    names = dict.fromkeys(method.removesuffix(SCENES) for method in read_params()["methods"])
    return {name: place for place, name in enumerate(names)}


def row_style(method: str) -> _Style:
    """Colour and marker of a method that has a row of its own: only highlighted ones have one."""
    marks = method_style(method) if method in HIGHLIGHTED else {"color": _PLAIN, "marker": "o"}
    return {key: marks[key] for key in ("color", "marker")}


def headline_order(scores: pd.Series) -> list[str]:
    """The methods that index `scores`: the highlighted ones, then the others by their score."""
    order = map(str, scores.sort_values(kind="stable").index)
    highlighted = [name for name in HIGHLIGHTED if name in scores.index]
    return highlighted + [name for name in order if name not in HIGHLIGHTED]


def method_label(rows: pd.DataFrame) -> str:
    """The name of a method, and the model it is scored by where that is not the global one."""
    name, model = marked(str(rows.method.iloc[0])), rows.model.iloc[0]
    return name if model == "global" else f"{name} ({model})"


def seed_caption(rows: pd.DataFrame, *by: str) -> str:
    """How many seeds are behind each mean of `setting`, `method` and `by`, and whose models."""
    if rows.empty:
        return "undefined for all methods here"
    counts = rows.groupby([*EXPERIMENT, *by]).seed.nunique()
    text = f"n = {' to '.join(map(str, sorted({counts.min(), counts.max()})))} seed"
    text += "s" if counts.max() > 1 else ""
    if rows.method.isin(RECONSTRUCTED).any():
        text += f"\n{MARK}: reconstruction"
    return text if (rows.model == "global").all() else f"{text}; (personal): personal models"


def panels(
    count: int, columns: int | None = None, height: float = 3.0, extra: float = 0.6, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels of some height; `extra` inches hold its title and legend."""
    columns = columns or {1: 1, 2: 2, 4: 2}.get(count, 3)
    rows = math.ceil(count / columns)
    figure = plt.figure(figsize=(WIDTH, rows * height + extra), layout="constrained")
    flat: list[Axes] = figure.subplots(rows, columns, squeeze=False, **grid).ravel().tolist()
    for axis in flat[count:]:
        axis.remove()
    for axis in flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, flat[:count]


def add_caption(figure: Figure, title: str, caption: str, legend: bool = False) -> None:
    """The title above a figure; below it how to read it, and one legend of all panels."""
    figure.suptitle(title, fontsize=13)
    axes = figure.axes if legend else []
    handles = [handle for axis in axes for handle in axis.get_legend_handles_labels()[0]]
    once = list({str(handle.get_label()): handle for handle in handles}.values())
    style: _Style = {"loc": "outside lower center", "ncols": _LEGEND_COLUMNS, "frameon": False}
    figure.legend(handles=once, title=caption, title_fontsize=9, **style)
    figure.legends[0].get_title().set_color("0.3")


def add_labels(axis: Axes, labels: Sequence[Label]) -> None:
    """Names right of a panel, at the heights of their points or as near as there is room."""
    labels = [label for label in labels if np.isfinite([label.x, label.y]).all()]
    if not labels:
        return
    axis.autoscale_view()
    to_fraction = axis.transData + axis.transAxes.inverted()
    labels = sorted(labels, key=lambda label: label.y)
    heights = to_fraction.transform([(label.x, label.y) for label in labels])[:, 1]
    inches = axis.get_window_extent().height / axis.figure.dpi
    offsets = LINE / inches * np.arange(len(labels))
    spread = isotonic_regression(heights - offsets).x  # the nearest heights with room for each
    spread = np.clip(spread, 0, 1 - offsets[-1]) + offsets
    style: _Style = {"textcoords": "axes fraction", "va": "center", "annotation_clip": False}
    for (text, x, y, color), height in zip(labels, spread, strict=True):
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkB": 3}
        axis.annotate(text, (x, y), (1.04, height), fontsize=8, arrowprops=line, **style)


def draw_lines(axis: Axes, rows: pd.DataFrame, x: str, y: str) -> list[Label]:
    """A line per method: means over seeds by `x`, points of seeds; the lines' labels."""
    labels = []
    for name, group in rows.groupby("method", sort=False):
        text, marks = method_label(group), method_style(str(name))
        draw_seeds(axis, group, x, y, label=text, **marks)
        end = group[group[x] == group[x].max()]
        labels.append(Label(text, end[x].iloc[0], end[y].mean(), marks["color"]))
    axis.grid(alpha=0.3)
    if x == "experience":
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return labels


def draw_seeds(axis: Axes, rows: pd.DataFrame, x: str, y: str, **marks: Any) -> None:
    """The mean over seeds as a line by `x`, each seed as a faint point."""
    means = rows.groupby(x)[y].agg(lambda values: values.mean(skipna=False))
    axis.scatter(rows[x], rows[y], s=9, color=marks["color"], alpha=0.35, linewidths=0)
    axis.plot(means.index, means, linewidth=1.5, markersize=5, **marks)


def setting_panels(
    rows: pd.DataFrame, height: float, ylabel: str = "accuracy, %", xlabel: str = "", **grid: Any
) -> tuple[Figure, list[tuple[Axes, str, pd.DataFrame]]]:
    """A figure with a panel per setting; each panel with its setting and that setting's rows."""
    settings = rows.groupby("setting", sort=False)
    figure, axes = panels(len(settings), height=height, **grid)
    axes[0].set_ylabel(ylabel)
    filled = [(axis, name, part) for axis, (name, part) in zip(axes, settings, strict=True)]
    for axis, name, _ in filled:
        axis.set_title(name)
        axis.set_xlabel(xlabel)
    return figure, filled


def draw_interval(axis: Axes, place: float, values: pd.Series, **marks: Any) -> None:
    """Along x the mean over seeds with its 95 % interval."""
    mean, half = metrics.confidence_interval(values.tolist())
    axis.errorbar(mean, place, xerr=half, **{"capsize": 3, "markersize": 4.5, **marks})


def set_rows(axis: Axes, names: Sequence[str]) -> None:
    """A row of the panel for every name, the first on top."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)


def draw_table(axis: Axes, table: pd.DataFrame, **options: Any) -> None:
    """A heat map without ticks; dollar signs in names start no formula."""
    import seaborn as sns  # only here: importing it takes a second

    table, ylabel = table.rename(index=plain_text, columns=plain_text), axis.get_ylabel()
    figure: Any = axis.get_figure(root=True)  # with the panels of all subfigures
    others = [each for each in figure.axes if each is not axis and each.get_visible()]
    plt.setp(others, visible=False)  # seaborn draws all that is visible, once for every table
    sns.heatmap(table, ax=axis, **{"cbar": False, "annot_kws": {"fontsize": 8}, **options})
    plt.setp(others, visible=True)
    axis.set_ylabel(ylabel)  # which seaborn removed
    axis.tick_params(length=0, labelsize=8)
    axis.tick_params(axis="y", rotation=0)


def draw_images(
    axis: Axes, rows: Sequence[NDArray[np.uint8]], count: int, names: Sequence[str]
) -> None:
    """Rows of at most `count` images [n, C, H, W] in white frames, each with its name."""
    strips = []
    for images in rows:
        padding = ((0, count - len(images)), (0, 0), (1, 1), (1, 1))
        framed = np.pad(images, padding, constant_values=255).transpose(2, 0, 3, 1)
        strips.append(framed.reshape(len(framed), -1, framed.shape[3]))  # [H + 2, n (W + 2), C]
    axis.imshow(np.concatenate(strips).squeeze(), cmap="gray", vmin=0, vmax=255)
    axis.set_yticks(len(strips[0]) * (np.arange(len(strips)) + 0.5) - 0.5, names)
    axis.set_xticks([])
    axis.tick_params(length=0, labelsize=8)
    axis.spines[:].set_visible(False)


def draw_arrow(axis: Axes, tail: _Point, tip: _Point, name: str = "", **options: Any) -> None:
    """An arrow that ends exactly at `tip`; `name` finds it again."""
    options = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0, **options}
    axis.annotate("", (tip[0], tip[1]), (tail[0], tail[1]), arrowprops=options).set_gid(name)


def plain_text(name: Hashable) -> str:
    """A name in which a dollar sign starts no formula."""
    return str(name).replace("$", r"\$")


def set_log_scale(axis: Axes) -> None:
    """A logarithmic x axis with plain numbers, where the range has at least two."""
    low, high = axis.dataLim.intervalx
    if high < 3 * low:
        return
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> None:
    """Write a PNG; equal data give equal bytes. A large one has 256 colours, in a third of them."""
    shown, figure.dpi = figure.dpi, DPI  # texts have other widths at another resolution
    figure.draw_without_rendering()
    figure.dpi = shown
    figure.set_layout_engine("none")  # which moves axes a little at every drawing
    content = BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    with atomic_write(path) as part:
        if content.tell() <= LARGE:
            part.write_bytes(content.getvalue())
        else:
            picture = Image.open(content).convert("RGB")
            picture.quantize(256, dither=Image.Dither.NONE).save(part, "png", optimize=True)
