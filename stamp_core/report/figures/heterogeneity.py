"""The figure of data heterogeneity: accuracy by how evenly clients share the images of a task."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from stamp_core.report.figures import style
from stamp_core.report.frames import alpha_frame
from stamp_core.results.records import Record


def heterogeneity(records: Sequence[Record]) -> Figure:
    """Final accuracy by α on a logarithmic axis: a line per method, a panel per setting."""
    rows = alpha_frame(records)
    figure, found = style.setting_panels(rows.assign(percent=100 * rows.main_accuracy), 3.4)
    for axis, _, part in found:
        labels = style.draw_lines(axis, part, "alpha", "percent")
        alphas = sorted(part.alpha.unique())
        axis.set(xscale="log", xlabel="α (small: different clients, large: similar)")
        axis.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
        axis.xaxis.set_minor_locator(NullLocator())
        style.add_labels(axis, labels)
    caption = f"{style.seed_caption(rows, 'alpha')}; points: seeds, lines: means"
    style.add_caption(figure, "Accuracy by data heterogeneity", caption)
    return figure
