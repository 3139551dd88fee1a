"""What all figures share: width, colours, markers, panels, titles, and files of the same bytes."""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stamp_core import config

Pair = Sequence[float] | NDArray[np.float64]  # x and y

WIDTH = 9.0  # inches: at 100 dots an inch the 900 pixels of a README
DPI = 160

# seaborn's colourblind palette without its grey, which a control has, and its yellow, too faint on
# paper. The numbers of colours, markers and dashes share no factor: 264 methods look different.
COLOURS = ["#0173b2", "#d55e00", "#029e73", "#cc78bc", "#de8f05", "#56b4e9", "#ca9161", "#fbafe4"]
MARKERS = "osD^vPX<>ph"
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)))
CONTROLS: dict[str, dict[str, Any]] = {
    "local": {"color": "0.5", "marker": "d", "linestyle": DASHES[1]},
    "joint": {"color": "black", "marker": "*", "linestyle": "-"},
    "keep_uniform": {"color": "0.35", "marker": "o", "linestyle": DASHES[1]},
}

LEGEND_COLUMNS = 5


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


def panels(
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
        bare(axis, "top", "right")
    return figure, flat[:count]


def bare(axis: Axes, *sides: str) -> None:
    """Take the lines at some sides of an axis away; at all, unless told."""
    axis.spines[list(sides) or slice(None)].set_visible(False)


def entitle(figure: Figure, title: str, caption: str, axes: Sequence[Axes] = ()) -> None:
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


def arrow(axis: Axes, tail: Pair, tip: Pair, name: str = "", **look: Any) -> None:
    """An arrow that ends exactly where it is told to."""
    look = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0, **look}
    (from_x, from_y), (to_x, to_y) = tail, tip
    axis.annotate("", (to_x, to_y), (from_x, from_y), arrowprops=look).set_gid(name)
