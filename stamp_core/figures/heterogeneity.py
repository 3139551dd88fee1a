"""The figure of data heterogeneity: accuracy by how evenly clients share the pictures of a task."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from stamp_core.figures.coresets import beside
from stamp_core.figures.look import entitle, panels
from stamp_core.figures.runs import groups, label, possible, room, seeds
from stamp_core.records import Record
from stamp_core.tables.heterogeneity import by_alpha


def heterogeneity(records: Sequence[Record]) -> Figure:
    """Final accuracy by α, a line a method, a panel a setting."""
    rows = by_alpha(records)
    rows = rows.assign(line=[label(rows[place : place + 1]) for place in range(len(rows))])
    settings = list(groups(rows, "setting"))
    figure, axes = panels(len(settings), height=3.8, extra=room(rows))
    for axis, (setting, part) in zip(axes, settings, strict=True):
        _by_alpha(axis, part)
        axis.set(title=setting, ylabel="accuracy, %")
        axis.set_xlabel("α (left: unlike clients, right: alike)")
        axis.grid(alpha=0.3, axis="y")
        possible(axis)
    entitle(figure, "Accuracy by data heterogeneity", seeds(rows, "bars"), axes)
    return figure


def _by_alpha(axis: Axes, rows: pd.DataFrame) -> None:
    """The lines of one setting on a logarithmic axis, with room for them at both ends."""
    alphas = np.sort(rows.alpha.unique())
    near = min([1.0, *np.diff(np.log10(alphas))])  # the least gap, in decades
    axis.set_xscale("log")
    beside(axis, rows, "line", "alpha", lambda alpha, shift: alpha * 10 ** (shift * near))
    axis.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(alphas[0] / 10 ** (near / 2), alphas[-1] * 10 ** (near / 2))
