"""The figure of the ablation: what each part of STAMP contributes."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from stamp_core.report.figures import style
from stamp_core.report.tables.ablation import PARTS, ablation_frame
from stamp_core.results.records import Record

_BASES = ("stamp", "replay")  # the variants whose means are drawn as lines
_UNITS = {"accuracy": "%", "forgetting": "points"}


def ablation(records: Sequence[Record]) -> Figure:
    """Final accuracy and forgetting, a row per variant: its seeds, mean and interval."""
    rows = ablation_frame(records)
    names: list[str] = []
    for part, own in rows.groupby("part", sort=False):
        names += [part, *own.variant.unique()]
    shown = [(setting, measure) for measure in _UNITS for setting in rows.setting.unique()]
    figure, axes = style.panels(len(shown), len(shown), 0.24 * len(names) + 0.6, sharey=True)
    for axis, (setting, measure) in zip(axes, shown, strict=True):
        own = rows[rows.setting == setting].dropna(subset=f"main_{measure}")
        for (method, variant), group in own.groupby(["method", "variant"], sort=False):
            values = 100 * group[f"main_{measure}"]
            style.draw_interval(axis, names.index(variant), values, method)
            if method in _BASES:
                colour = style.method_style(method)["color"]
                axis.axvline(values.mean(), color=colour, linewidth=0.8, zorder=1)
        if measure == "accuracy":  # an interval may leave 0 to 100 %
            axis.set_xlim(max(axis.get_xlim()[0], -3), min(axis.get_xlim()[1], 103))
        axis.set(xlabel=_UNITS[measure])
        axis.set_title(f"{setting}\n{measure}", fontsize=10)
        axis.grid(alpha=0.3, axis="x")
        axis.tick_params(length=0, axis="y")
    style.set_rows(axes[0], names)
    for text in axes[0].get_yticklabels():
        text.set_fontweight("bold" if text.get_text() in PARTS.values() else "normal")
    lines = " and ".join(method for method in _BASES if method in set(rows.method))
    caption = f"{style.seed_caption(rows)}; {style.INTERVALS}"
    caption += f"; lines: means of {lines}" if lines else ""
    style.add_caption(figure, "Effect of each part of STAMP, compared with controls", caption)
    return figure
