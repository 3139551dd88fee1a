"""Figures of sweeps: coresets, data heterogeneity, related work, and sensitivity to parameters."""

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from stamp_core.results.records import Record
from workbench.report import frames
from workbench.report.figures import runs, style

_Captions = Mapping[str, tuple[str, str]]  # of each sweep its label and the preset's value

_MEASURES = {  # column -> label, colour and marker
    "inside": ("update inside, %", style.COLOURS[0], "o"),
    "accuracy": ("accuracy, %", style.COLOURS[0], "o"),
    "forgetting": ("forgetting, points", style.COLOURS[1], "s"),
}
_FAR = 5  # points
_ROUNDS = {
    "accuracy": "accuracy, %",
    "forgetting": "forgetting, points",
    "gain": "accuracy from replay, points",
}
_NEAR = f"right: methods within {_FAR} points of replay, differences on the same seed"
_SWEPT = ("accuracy", "forgetting")  # the measures of `sensitivity`
_TITLE = 26  # characters in a line of its titles
_SENSITIVITY = """\
points and thin lines: seeds, thick line: mean, grey: value of the preset; panels of one measure
span the same number of points; spread: highest minus lowest accuracy, in points, of the means of
values and of the seeds at one value"""


def coresets(records: Sequence[Record]) -> Figure:
    """Final accuracy by exemplars per class: a row per rule, a panel per setting."""
    rows = _percent(frames.coreset_frame(records))
    limited = frames.limited_memory(rows)
    most = limited[limited.exemplars == limited.exemplars.max()]
    centred = most.accuracy - most.groupby("setting").accuracy.transform("mean")
    rules = [*(-centred).groupby(most.selection).mean().sort_values(kind="stable").index]
    rules += [rule for rule in limited.selection.unique() if rule not in rules]
    numbers = sorted(limited.exemplars.unique(), reverse=True)
    height = max(0.36, 0.12 * len(numbers)) * len(rules) + 1.2
    figure, panels = style.setting_panels(rows, height, "", "accuracy, %", sharey=True)
    for axis, title, part in panels:
        for name, own in frames.reference_memories(part).items():
            title += f"\n{name}: {own.accuracy.mean():.1f} %" if len(own) else ""
        axis.set_title(title, fontsize=10)
        _draw_rules(axis, frames.limited_memory(part), rules, numbers)
    caption = f"{style.seed_caption(rows, 'exemplars')}; small marks: seeds, large: means"
    title = "Final accuracy by selection rule and exemplars per class"
    style.add_caption(figure, title, f"{caption}; no mark: not run", True)
    return figure


def _draw_rules(
    axis: Axes, rows: pd.DataFrame, rules: Sequence[str], numbers: Sequence[int]
) -> None:
    step = 0.6 / max(2, len(numbers) - 1)  # so that a row's lines stay apart from the next row's
    for line, number in enumerate(numbers):
        shift = step * (line - (len(numbers) - 1) / 2)
        colour, marker = style.COLOURS[line % 8], "oDs^"[line % 4]
        own = rows[rows.exemplars == number]
        places = own.selection.map(rules.index) + shift
        axis.scatter(own.accuracy, places, s=12, color=colour, alpha=0.4, linewidths=0)
        means = own.accuracy.groupby(own.selection).mean()
        heights = [rules.index(rule) + shift for rule in means.index]
        axis.plot(means, heights, marker, color=colour, label=f"{number} exemplars per class")
    axis.grid(alpha=0.3)
    style.set_rows(axis, rules)


def heterogeneity(records: Sequence[Record]) -> Figure:
    """Final accuracy by α on a logarithmic axis: a line per method, a panel per setting."""
    rows = _percent(frames.run_frame(records))
    xlabel = "α (small: different clients, large: similar)"
    figure, panels = style.setting_panels(rows, 3.4, xlabel=xlabel)
    for axis, _, part in panels:
        style.add_labels(axis, _draw_by_number(axis, part, "alpha", "accuracy"))
    caption = f"{style.seed_caption(rows, 'alpha')}; {style.POINTS}"
    style.add_caption(figure, "Accuracy by data heterogeneity", caption)
    return figure


def overlap(records: Sequence[Record]) -> Figure:
    """Final accuracy by the share of classes that clients have in common: a panel per task size."""
    rows = _percent(frames.overlap_frame(records))
    sizes = list(rows.groupby("size"))
    figure, axes = style.panels(len(sizes), height=3.4)
    axes[0].set_ylabel("accuracy, %")
    for axis, (size, part) in zip(axes, sizes, strict=False):
        style.add_labels(axis, _draw_by_number(axis, part, "overlap", "accuracy"))
        axis.set_title(f"{size} classes per task")
        axis.set_xlabel("classes in common, %")
    caption = f"{style.seed_caption(rows)}; {style.POINTS}; each method at its own step"
    style.add_caption(figure, "Accuracy by the classes that clients have in common", caption)
    return figure


def _percent(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `run_frame` with accuracy, forgetting and the share `inside` in %."""
    columns = {"accuracy": "main_accuracy", "forgetting": "main_forgetting", "inside": "inside"}
    return rows.assign(**{name: 100 * rows[column] for name, column in columns.items()})


def rounds(records: Sequence[Record]) -> Figure:
    """Accuracy, forgetting and the difference from replay by rounds a task: a row per setting."""
    rows = _percent(frames.sorted_frame(records, "rounds"))
    settings = list(rows.groupby("setting", sort=False))
    figure, axes = style.panels(3 * len(settings), 3, 3.0, 1.0)
    for place, (setting, part) in enumerate(settings):
        panels = axes[3 * place : 3 * place + 3]
        for axis, (measure, label) in zip(panels, _ROUNDS.items(), strict=True):
            _draw_by_number(axis, _near(part) if measure == "gain" else part, "rounds", measure)
            axis.set_ylabel(label)
            axis.set_xlabel("rounds a task")
        panels[-1].axhline(0, color="0.6", linewidth=0.8)
        panels[0].set_title(setting)
    caption = f"{style.seed_caption(rows, 'rounds')}; {style.POINTS}\n{_NEAR}"
    style.add_caption(figure, "Longer training of each task", caption, legend=True)
    return figure


def _near(rows: pd.DataFrame) -> pd.DataFrame:
    """The methods whose accuracy is near replay's, with their `gain` over it on the same seed."""
    keys = ["rounds", "seed"]
    replay = rows[rows.method == "replay"].set_index(keys).accuracy
    gains = rows.assign(gain=rows.accuracy - rows.set_index(keys).index.map(replay))
    means = gains.groupby(["method", "rounds"]).gain.mean().abs().groupby("method").max()
    near = means.index[means < _FAR].difference(["replay"])
    return gains[gains.method.isin(near)]


def _draw_by_number(axis: Axes, rows: pd.DataFrame, x: str, y: str) -> list[style.Label]:
    labels = style.draw_lines(axis, rows, x, y)
    numbers = sorted(rows[x].unique())
    axis.set_xscale("log")
    axis.set_xticks(numbers, [f"{number:g}" for number in numbers])
    axis.xaxis.set_minor_locator(NullLocator())
    return labels


def returning(records: Sequence[Record]) -> Figure:
    """Accuracy over the tasks learnt so far, of each setting's runs with the most cycles."""
    rows = frames.run_frame(records)
    tasks = pd.Series([record.tests.shape[1] for record in records])
    most = rows.assign(tasks=tasks).groupby("setting", sort=False)[["cycles", "tasks"]].max()
    longest = rows.cycles == rows.setting.map(most.cycles)
    figure = runs.accuracy([r for r, shown in zip(records, longest, strict=True) if shown])
    for axis, setting in zip(figure.axes, most.itertuples(), strict=False):
        for end in range(1, setting.cycles):
            axis.axvline(end * setting.tasks + 0.5, color="0.6", linewidth=0.8)
    figure.suptitle("Accuracy where tasks return (grey lines: all tasks start again)", fontsize=13)
    return figure


def protection(records: Sequence[Record], captions: _Captions) -> Figure:
    """The share of the global update in protected subspaces, and accuracy: a column per sweep."""
    rows = _percent(frames.run_frame(records))
    columns = list(rows.groupby(["sweep", "setting"], sort=False))
    figure, axes = style.panels(2 * len(columns), len(columns), 1.8)
    for place, ((sweep, setting), part) in enumerate(columns):
        upper, lower = axes[place :: len(columns)]
        _draw_by_value(upper, part, "inside")
        _draw_by_value(lower, part, "accuracy")
        upper.set_title(f"by {captions[sweep][0]}\n{setting}, {part.method.iloc[0]}", fontsize=9)
        upper.set_ylim(0, 1.1 * rows.inside.max())
        lower.set_xlabel(captions[sweep][0])
    caption = f"{style.seed_caption(rows, 'sweep', 'value')}; small points: seeds, large: means"
    title = "Share of the global update inside protected subspaces, and accuracy"
    style.add_caption(figure, title, caption)
    return figure


def sensitivity(records: Sequence[Record], captions: _Captions) -> Figure:
    """Final accuracy and forgetting by the value of a swept parameter: a column per sweep.

    `captions` has for each sweep its label and the preset's value, which is marked where it is
    among the values. All panels of a measure span as many points: a parameter without effect looks
    like one.
    """
    rows = _percent(frames.run_frame(records))
    columns = list(rows.groupby(["sweep", "setting", "method"], sort=False))
    count = len(columns)
    wide = min(count, min((5, 4, 3), key=lambda width: -count % width))
    figure, axes = style.panels(2 * math.ceil(count / wide) * wide, wide, 1.6, 1.0)
    for place, ((sweep, *about), part) in enumerate(columns):
        top = 2 * (place // wide) * wide + place % wide
        label, preset = captions[sweep]
        heading = [*textwrap.wrap(label, _TITLE), f"{about[0]},", about[1]]
        axes[top].set_title("\n".join(heading), fontsize=8)
        for axis, measure in zip((axes[top], axes[top + wide]), _SWEPT, strict=True):
            _draw_sweep(axis, part, measure, preset)
    for place, axis in enumerate(axes):
        if not axis.has_data():
            axis.remove()
        elif place % wide:
            axis.set_ylabel("")
    for line in (0, 1):  # accuracy above forgetting
        own = [axis for k, axis in enumerate(axes) if k // wide % 2 == line]
        _set_spans([axis for axis in own if axis.has_data()])
    seeds = style.seed_caption(rows, "sweep", "value")
    title = "One parameter changed, all else equal"
    style.add_caption(figure, title, f"{seeds}; {_SENSITIVITY}")
    return figure


def _set_spans(axes: Sequence[Axes]) -> None:
    limits = [axis.get_ylim() for axis in axes]
    half = max(high - low for low, high in limits) / 2
    for axis, (low, high) in zip(axes, limits, strict=True):
        middle = (low + high) / 2
        axis.set_ylim(middle - half, middle + half)


def _draw_sweep(axis: Axes, rows: pd.DataFrame, measure: str, preset: str) -> None:
    values = rows.value.unique().tolist()
    for _, own in rows.groupby("seed"):
        colour = _MEASURES[measure][1]
        axis.plot(own.value.map(values.index), own[measure], color=colour, linewidth=0.6, alpha=0.4)
    _draw_by_value(axis, rows, measure)
    axis.yaxis.label.set_fontsize(8)
    axis.tick_params(labelsize=7)
    if preset in values:
        axis.axvline(values.index(preset), color="0.88", linewidth=9, zorder=0, label="preset")
    groups = rows.groupby("value")
    if measure == "accuracy" and min(rows.seed.nunique(), len(values)) > 1:
        between, within = np.ptp(groups.accuracy.mean()), groups.accuracy.agg(np.ptp).mean()
        text = f"spread: values {between:.1f}, seeds {within:.1f}"
        axis.set_xlabel(text, fontsize=6, color="0.3")


def _draw_by_value(axis: Axes, rows: pd.DataFrame, measure: str) -> None:
    label, colour, marker = _MEASURES[measure]
    values = rows.value.unique().tolist()
    rows = rows.assign(place=rows.value.map(values.index))
    line = "-" if all(map(_is_number, values)) else ""
    style.draw_seeds(axis, rows, "place", measure, color=colour, marker=marker, linestyle=line)
    axis.set_xticks(range(len(values)), values)
    axis.set_xlim(-0.5, len(values) - 0.5)
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)


def _is_number(value: str) -> bool:
    """Whether a value is one of an ordered range: between names a line would mean nothing."""
    return value.replace(".", "", 1).isdigit()
