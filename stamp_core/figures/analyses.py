"""Figures behind the results: gradient angles, features, sensitivity, what each part is worth.

They draw what the records hold: angles and features are there where the setting's `observe` asks
for them. What was not noted, or is undefined, is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from stamp_core import metrics, tables
from stamp_core.figures.look import COLOURS, DASHES, bare, entitle, panels, style
from stamp_core.figures.runs import BANDS, dots, groups, lines, room, seeds
from stamp_core.records import Record

Array = NDArray[np.float64]
Values = Mapping[str, Sequence[Record]]  # the records behind each value of a sweep

SPATIAL = {
    "spatial update": "space: update with client",
    "spatial clients": "space: client with client",
}
TEMPORAL = {
    "temporal gradients": "time: gradients of tasks",
    "temporal displacements": "time: ways of whole epochs",
}
COSINE = "cosine: 1 same direction, 0 unrelated, below 0 in conflict"
REFERENCE: dict[str, Any] = {"color": "0.3", "linewidth": 1, "linestyle": (0, (1, 1.5))}
DOTTED = "dotted: clients with nothing in common (left); least possible (others)"

CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}
PERPLEXITY = 30.0
STATE = 42  # of t-SNE
READING = (
    "Each sign is a picture of that class. Nearest mean: pictures that are nearer to the mean of\n"
    "their class's other pictures than to that of any other class, before t-SNE, in all dimensions"
)
SHOWN = {5: 2.1, 3: 3.2}  # moments of a sequence at most, and how high their panels are
LEGIBLE = 10  # classes in a small panel

LENGTH = "length of the server's step"
MEASURES: dict[str, dict[str, Any]] = {
    "accuracy": {"color": COLOURS[0], "marker": "o", "linestyle": DASHES[0]},
    "forgetting": {"color": COLOURS[1], "marker": "s", "linestyle": DASHES[1]},
    LENGTH: {"color": COLOURS[2], "marker": "D", "linestyle": DASHES[2]},
}
BASES = ("stamp", "replay")  # what the ablation compares with
COMPARED = ["accuracy", "forgetting"]
STEPPED = "global_rate"  # the sweep whose numbers change the length of the server's step
PRESET: dict[str, Any] = {
    "color": "0.88",
    "linewidth": 9,
    "zorder": 0,
    "label": "as in params.yaml",
}


# --- gradient angles


def angles(records: Sequence[Record], shown: Sequence[str] = ()) -> Figure:
    """Cosines between clients' updates and between tasks, by step: a row of panels a setting.

    With `shown` only of these methods: more than a handful of lines cannot be told apart.
    """
    chosen = [r for r in tables.distinct(records) if not shown or r.cell[1] in shown]
    rows = pd.DataFrame([row for record in chosen for row in _angles(record)])
    names = {**SPATIAL, **TEMPORAL}
    settings, crowded = rows.setting.unique(), rows.method.nunique() > BANDS
    figure, axes = panels(len(settings) * len(names), len(names), 3.0, room(rows) + 0.3)
    for place, setting in enumerate(settings):
        row, part = axes[place * len(names) :][: len(names)], rows[rows.setting == setting]
        for axis, (name, title) in zip(row, names.items(), strict=True):
            _cosines(axis, part, name, crowded)
            axis.set_title(f"{setting}\n{title}", fontsize=9)
        for pair in (row[: len(SPATIAL)], row[len(SPATIAL) :]):
            _same_height(pair, -1.05, 1.05)
        for axis, name in zip(row, names, strict=True):
            if part[name].notna().any():
                _reference(axis, part, name)
            else:
                axis.set(xticks=[], yticks=[])
                axis.text(0.5, 0.5, "not looked at", transform=axis.transAxes, **CENTRED)
    defined = rows.dropna(subset=[*names], how="all")
    caption = f"{COSINE}; {DOTTED}\n{seeds(defined, 'bars' if crowded else 'band')}"
    entitle(figure, "Angles between gradients, in space and in time", caption, axes)
    return figure


def _angles(record: Record) -> Iterator[dict[str, Any]]:
    """A row a step: means over its rounds in space, its last round in time; NaN if undefined."""
    (setting, method, seed), history = record.cell, record.history
    for step in range(1 + history[-1]["step"]):
        rounds = [row for row in history if row["step"] == step]
        noted = [row.get("angles", {}) for row in rounds]
        among = [row for row in noted if "spatial clients" in row]  # alone, one is the update
        yield {
            **{"setting": setting, "method": method, "seed": seed, "step": step + 1},
            **{"model": tables.judged(record), "tasks": record.tests.shape[1]},
            "clients": max(row.get("answered", 0) for row in rounds),
            **{name: metrics.mean([row[name] for row in among]) for name in SPATIAL},
            **{name: noted[-1].get(name, np.nan) for name in TEMPORAL},
        }


def _cosines(axis: Axes, rows: pd.DataFrame, name: str, crowded: bool) -> None:
    """One kind of angle of all methods that have it in one setting."""
    cells = rows.groupby("method", sort=False)
    lines(axis, cells.filter(lambda cell: cell[name].notna().any()), name, crowded)
    axis.axhline(0, color="0.3", linewidth=0.8, zorder=1)
    axis.set(xlabel="tasks learnt", xlim=(rows.step.min() - 0.3, rows.step.max() + 0.3))
    axis.grid(alpha=0.3)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _same_height(axes: Sequence[Axes], least: float, most: float) -> None:
    """Give axes one range of y: as wide as the widest needs, inside what is possible."""
    low, high = np.transpose([axis.get_ylim() for axis in axes])
    for axis in axes:
        axis.set_ylim(max(least, min(low)), min(most, max(high)))


def _reference(axis: Axes, rows: pd.DataFrame, name: str) -> None:
    """What chance or geometry makes of the cosine.

    The mean of U unrelated rows of one length has the cosine 1 / sqrt(U) with each of them. The
    mean cosine of the pairs of k rows is never below -1 / (k - 1), where they add up to nothing.
    """
    steps, clients = np.sort(rows.step.unique()), float(rows.clients.max())
    count = (
        np.minimum(steps, rows.tasks.max()) if name in TEMPORAL else np.full(len(steps), clients)
    )
    with np.errstate(divide="ignore"):
        values = count**-0.5 if name == "spatial update" else -1 / (count - 1)
    values = np.where(count > 1, values, np.nan)
    axis.plot(steps, values, zorder=1, scaley=False, label="_reference", **REFERENCE)


# --- features


def features(
    records: Sequence[Record],
    setting: str,
    classes: Sequence[str],
    methods: Sequence[str] = ("fedavg", "stamp"),
    seed: int = 0,
) -> Figure:
    """t-SNE of the same test pictures after each step: a row a method, its class as each mark.

    Beside each picture of two dimensions stands what holds in all of them: how many pictures the
    mean of their class's other pictures is nearest to.
    """
    found = {record.cell: record for record in tables.distinct(records) if record.features}
    shown = [found[cell] for m in methods if (cell := (setting, m, seed)) in found]
    if not shown:
        names = ", ".join(methods)
        raise ValueError(f"no features of {names} on {setting} with seed {seed}: see `observe`")
    most = 5 if len(np.unique(shown[0].features["labels"])) <= LEGIBLE else 3
    steps = _spread(len(shown[0].features["features"]), most)
    figure, axes = panels(len(shown) * len(steps), len(steps), SHOWN[most], 0.5)
    places = [(record, step) for record in shown for step in steps]
    for axis, (record, step) in zip(axes, places, strict=True):
        _embedding(axis, record, step, classes)
    for axis, record in zip(axes[:: len(steps)], shown, strict=True):
        axis.set_ylabel(record.cell[1], fontsize=11)
    pictures = len(shown[0].features["labels"])
    title = f"Features of {pictures} test pictures by t-SNE: {setting}, seed {seed}"
    entitle(figure, title, READING)
    return figure


def _spread(steps: int, most: int) -> list[int]:
    """The steps that are shown: all, or some as far apart as can be, the last among them."""
    if steps == 1:
        return [0]
    return sorted({round(step) for step in np.linspace(0, steps - 1, min(steps, most))})


def _embedding(axis: Axes, record: Record, step: int, classes: Sequence[str]) -> None:
    """One panel of `features`."""
    vectors, labels = record.features["features"][step], record.features["labels"]
    signed = all(len(name) == 1 for name in classes)
    places = embedded(vectors)
    axis.update_datalim(places)
    for (x, y), label in zip(places, labels.tolist(), strict=True):
        look = {"color": COLOURS[label % len(COLOURS)], "fontsize": 7, "parse_math": False}
        sign = axis.text(x, y, classes[label] if signed else str(label), **CENTRED, **look)
        sign.set_in_layout(False)
    right, n = nearest_mean(vectors, labels)
    share = f"{100 * right / n:.0f} % of {n}" if n else tables.DASH
    axis.set_title(f"after task {step + 1}", fontsize=9)
    axis.set_xlabel(f"nearest mean: {share}", fontsize=8)
    axis.set(xticks=[], yticks=[])
    axis.autoscale_view()
    bare(axis)


def embedded(vectors: NDArray[np.float32]) -> Array:
    """Rows put into the plane by t-SNE.  # [n, 2]"""
    from sklearn.manifold import TSNE  # only here: no training should wait for these
    from sklearn.utils.parallel import ThreadpoolController

    if not np.ptp(vectors, axis=0).any():  # a dead network; t-SNE does not survive it
        return np.zeros((len(vectors), 2))
    perplexity = min(PERPLEXITY, (len(vectors) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=STATE)
    with ThreadpoolController().limit(limits=1):  # the order of sums is that of threads
        return np.asarray(tsne.fit_transform(vectors.astype(np.float64)))


def nearest_mean(vectors: Array, labels: NDArray[np.int64]) -> tuple[int, int]:
    """How many rows have their own class's mean, made without them, nearest; and of how many."""
    vectors = vectors.astype(np.float64)
    members = labels[None] == np.unique(labels)[:, None]  # [classes, n]
    sizes = members.sum(axis=1)
    means = members @ vectors / sizes[:, None]
    distances = cdist(vectors, means)  # [n, classes]
    own = members.argmax(axis=0)
    others = sizes[own] > 1  # a class of one picture has no mean without it
    rows = np.arange(len(vectors))
    distances[rows, own] *= sizes[own] / np.maximum(sizes[own] - 1, 1)  # without the picture
    right = distances.argmin(axis=1) == own
    return int(right[others].sum()), int(others.sum())


# --- sensitivity


def sensitivity(sweeps: Mapping[str, Values], captions: Mapping[str, tuple[str, str]]) -> Figure:
    """Final accuracy and forgetting by value, a panel a sweep, in the order of `sweeps`.

    `captions` has for each sweep what its axis says and the value of params.yaml, which is marked
    where it is among them. Where the server's rate is swept, the next panel is the length of its
    steps.
    """
    rows = {name: _outcomes(values) for name, values in sweeps.items()}
    shown = [(name, COMPARED) for name in sweeps]
    if STEPPED in sweeps:
        shown.insert(list(sweeps).index(STEPPED) + 1, (STEPPED, [LENGTH]))
    figure, axes = panels(len(shown), min(4, len(shown)), 2.3, 0.8)
    for axis, (name, columns) in zip(axes, shown, strict=True):
        for column in columns:
            _by_value(axis, rows[name], column)
        _values(axis, rows[name], *captions[name])
        axis.set_ylabel("" if columns == COMPARED else "length", fontsize=8)
    _same_height(
        [axis for axis, (_, of) in zip(axes, shown, strict=True) if of == COMPARED], -100, 103
    )
    every = pd.concat(rows.values())
    title = f"One number changed, all else equal: {', '.join(every.setting.unique())}"
    entitle(figure, title, f"accuracy in %, forgetting in points; {seeds(every, 'bar')}", axes)
    return figure


def _outcomes(values: Values) -> pd.DataFrame:
    """A row a run of a sweep: its value, and what the panels show."""
    parts = [tables.frame(found).assign(value=value) for value, found in values.items()]
    rows = pd.concat(parts, ignore_index=True)
    rows["accuracy"], rows["forgetting"] = 100 * rows.judged_accuracy, 100 * rows.judged_forgetting
    rows[LENGTH] = rows.step_length
    return rows


def _by_value(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    """The mean over seeds with its interval at each value."""
    found = [metrics.interval(group[column].tolist()) for _, group in groups(rows, "value")]
    middle, half = np.transpose(found)
    look: dict[str, Any] = {"label": column, "capsize": 3, "markersize": 5, "linewidth": 1.4}
    axis.errorbar(range(len(found)), middle, yerr=half, **look, **MEASURES[column])


def _values(axis: Axes, rows: pd.DataFrame, label: str, preset: str) -> None:
    """Name the axis of a sweep and its values, equally far apart, and mark that of the preset."""
    values = list(rows.value.unique())
    axis.set_xticks(range(len(values)), values)
    axis.set_xlim(-0.5, len(values) - 0.5)
    axis.set_title(label, fontsize=9)
    axis.set_xlabel(rows.method.iloc[0].split("-")[0], fontsize=8, color="0.3")
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    if preset in values:
        axis.axvline(values.index(preset), **PRESET)


# --- the ablation


def ablation(records: Sequence[Record]) -> Figure:
    """Final accuracy and forgetting by variant, settings side by side: seeds and their mean."""
    rows = tables.frame(records)
    rows["variant"] = [tables.variant(record) for record in records]
    rows["part"] = [tables.part(record) for record in records]
    places = _places(rows)
    settings = [(setting, name) for name in COMPARED for setting in rows.setting.unique()]
    height = 0.24 * len(places) + 0.8
    figure, axes = panels(len(settings), len(settings), height, 0.6, sharey=True)
    for axis, (setting, name) in zip(axes, settings, strict=True):
        _variants(axis, rows[rows.setting == setting], f"judged_{name}", places)
        axis.set_title(f"{setting}\n{name}", fontsize=10)
    axes[0].set_yticks([*places.values()], [*places])
    axes[0].set_ylim(max(places.values()) + 0.6, -0.6)
    for text in axes[0].get_yticklabels():
        text.set_fontweight("bold" if text.get_text() in tables.PARTS.values() else "normal")
    lined = " and ".join(method for method in BASES if method in set(rows.method))
    caption = f"{seeds(rows, 'bar')}; faint: each seed; line: mean of {lined or 'nobody'}"
    entitle(figure, "What each part is worth, beside the controls", caption)
    return figure


def _places(rows: pd.DataFrame) -> dict[str, int]:
    """Where on the y axis each heading and each of its variants is."""
    names = []
    for part, heading in tables.PARTS.items():
        found = rows[rows.part == part].variant.unique()
        names += [heading, *found] if len(found) else []
    return {name: place for place, name in enumerate(names)}


def _variants(axis: Axes, rows: pd.DataFrame, column: str, places: Mapping[str, int]) -> None:
    """One measure of all variants in one setting."""
    for (method, variant), group in rows.groupby(["method", "variant"], sort=False):
        values = 100 * group[column].dropna().to_numpy()
        if len(values):
            dots(axis, places[variant], values, style(method))
        if len(values) and method in BASES:
            axis.axvline(values.mean(), color=style(method)["color"], linewidth=0.8, zorder=1)
    axis.set(xlabel="%" if "accuracy" in column else "percentage points")
    if "accuracy" in column:  # an interval may leave what is possible
        axis.set_xlim(max(axis.get_xlim()[0], -3), min(axis.get_xlim()[1], 103))
    axis.grid(alpha=0.3, axis="x")
    axis.tick_params(length=0, axis="y")
