"""Figures of what a setting's `diagnostics` record: angles between gradients, and features."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import color_sequences
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stamp_core.results.metrics import mean
from stamp_core.results.records import Record
from workbench.report import frames
from workbench.report.figures import style
from workbench.report.text import DASH

_SPATIAL = {
    "spatial update": "spatial: update and clients",
    "spatial clients": "spatial: pairs of clients",
}
_TEMPORAL = {
    "temporal gradients": "temporal: gradients of tasks",
    "temporal displacements": "temporal: updates of tasks",
}
_COSINES = """\
cosine: 1 same direction, 0 orthogonal, below 0 conflicting
wide grey line: value for orthogonal updates (update and clients) or smallest possible mean"""

_DESCRIBED = ("fedavg", "replay", "stamp")  # methods in `features`
_CLASSES = color_sequences["tab10"]  # as many as can be distinguished
_PERPLEXITY = 30.0  # of t-SNE
_TSNE_SEED = 42
_FEATURES = """\
Each dot is a test image. Nearest mean: the share of images that are nearer to the mean of their
class's other images than to that of any other class shown, before t-SNE"""


# --- angles


def angles(records: Sequence[Record], shown: Sequence[str] = ()) -> Figure:
    """Cosines between clients' updates and between tasks, by experience: a row per setting."""
    records = [r for r in frames.unique_runs(records) if not shown or r.run[1] in shown]
    rows = pd.DataFrame([row for record in records for row in _cosines(record)])
    settings, every = rows.groupby("setting", sort=False), {**_SPATIAL, **_TEMPORAL}
    names = {name: every[name] for name in every if name in _SPATIAL or rows[name].notna().any()}
    figure, axes = style.panels(len(settings) * len(names), len(names), 2.6, 1.2)
    for axis, ((setting, part), name) in zip(axes, product(settings, names), strict=True):
        if part[name].isna().all():
            axis.remove()
            continue
        _draw_cosines(axis, part, name)
        axis.set_ylabel("cosine", fontsize=9)
        axis.set_title(f"{setting}\n{names[name]}", fontsize=9)
        axis.set_xlabel("tasks learnt")
    defined = rows.dropna(subset=[*names], how="all")
    caption = f"{_COSINES}\n{style.seed_caption(defined)}; {style.POINTS}"
    style.add_caption(figure, "Spatial and temporal angles between gradients", caption, True)
    return figure


def _cosines(record: Record) -> Iterator[dict[str, Any]]:
    """One row per experience: in space means over its rounds, in time its last round."""
    (setting, method, seed), history = record.run, record.history
    for experience in range(1 + history[-1]["experience"]):
        rounds = [entry for entry in history if entry["experience"] == experience]
        noted = [entry.get("angles", {}) for entry in rounds]
        several = [cosines for cosines in noted if "spatial clients" in cosines]  # clients
        yield {
            **{"setting": setting, "method": method, "seed": seed, "experience": experience + 1},
            **{"model": record.main_model, "tasks": record.tests.shape[1]},
            "clients": max(entry.get("completed", 0) for entry in rounds),
            **{name: mean([cosines[name] for cosines in several]) for name in _SPATIAL},
            **{name: noted[-1].get(name, np.nan) for name in _TEMPORAL},
        }


def _draw_cosines(axis: Axes, rows: pd.DataFrame, name: str) -> None:
    """One kind of angle in one setting, for the methods that have it, with its bound.

    The mean of U orthogonal vectors of one length has the cosine 1 / sqrt(U) with each of them. The
    mean cosine of the pairs of k vectors is at least -1 / (k - 1), where they add up to zero.
    """
    defined = rows[rows.groupby("method")[name].transform("count") > 0]
    style.draw_lines(axis, defined, "experience", name)
    axis.axhline(0, color="0.3", linewidth=0.8, zorder=1)
    places = np.sort(rows.experience.unique())
    tasks, clients = np.minimum(places, rows.tasks.max()), np.full_like(places, rows.clients.max())
    count = (tasks if name in _TEMPORAL else clients).astype(float)
    count[count < 2] = np.nan  # a single vector has no pairs
    bound = count**-0.5 if name == "spatial update" else -1 / (count - 1)
    axis.plot(places, bound, color="0.85", linewidth=4, scaley=False, zorder=0, label="_bound")


# --- features


def features(records: Sequence[Record], setting: str, classes: Sequence[str]) -> Figure:
    """t-SNE of the same test images after the first, a middle and the last task, by method."""
    described = {record.run: record for record in frames.unique_runs(records) if record.features}
    seed = min((run[2] for run in described if run[0] == setting), default=0)
    shown = [described[run] for name in _DESCRIBED if (run := (setting, name, seed)) in described]
    if not shown:
        names = " or ".join(_DESCRIBED)
        raise ValueError(f"no features of {names} on {setting}: see `diagnostics`")
    labels = shown[0].features["labels"]
    every = np.unique(labels)
    some = np.isin(labels, every[: len(_CLASSES)])
    last = len(shown[0].features["features"]) - 1
    experiences = sorted({0, last // 2, last})
    figure, axes = style.panels(len(shown) * len(experiences), len(experiences), 2.3, 1.3)
    for axis, (record, experience) in zip(axes, product(shown, experiences), strict=True):
        vectors = record.features["features"][experience]
        _draw_features(axis, vectors[some], labels[some], classes)
        if record is shown[0]:
            axis.set_title(f"after task {experience + 1}", fontsize=11)
        if experience == 0:
            axis.set_ylabel(record.run[1], fontsize=11)
    title = f"Features of {some.sum()} test images by t-SNE: {setting}, seed {seed}"
    if len(every) > len(_CLASSES):
        title += f", {len(_CLASSES)} of {len(every)} classes"
    style.add_caption(figure, title, _FEATURES, True)
    return figure


def _draw_features(
    axis: Axes, vectors: NDArray[Any], labels: NDArray[np.int64], classes: Sequence[str]
) -> None:
    places = _embed(vectors)
    for color, label in zip(_CLASSES, np.unique(labels).tolist(), strict=False):
        name = style.plain_text(classes[label])
        x, y = places[labels == label].T
        axis.scatter(x, y, s=16, color=color, linewidths=0, label=name)
    right, n = _count_nearest_mean(vectors, labels)
    axis.set_xlabel(f"nearest mean: {100 * right / n:.0f} %" if n else DASH, fontsize=9)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set(visible=True, color="0.8")


def _embed(vectors: NDArray[np.float32]) -> style.Values:
    from sklearn.manifold import TSNE  # only here: importing it takes a second
    from sklearn.utils.parallel import ThreadpoolController

    if not np.ptp(vectors, axis=0).any():  # a dead network: t-SNE fails on equal points
        return np.zeros((len(vectors), 2))
    perplexity = min(_PERPLEXITY, (len(vectors) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=_TSNE_SEED)
    with ThreadpoolController().limit(limits=1):  # the order of sums is that of threads
        return np.asarray(tsne.fit_transform(vectors.astype(np.float64)))


def _count_nearest_mean(vectors: style.Values, labels: NDArray[np.int64]) -> tuple[int, int]:
    """How many images are nearest to the mean of their class's others; of how many."""
    vectors = vectors.astype(np.float64)
    members = labels[None] == np.unique(labels)[:, None]  # [classes, n]
    sizes = members.sum(axis=1)
    means = members @ vectors / sizes[:, None]
    distances = np.linalg.norm(vectors[:, None] - means, axis=2)  # [n, classes]
    own = members.argmax(axis=0)
    others = sizes[own] > 1  # a class of one image has no mean without it
    rows = np.arange(len(vectors))
    distances[rows, own] *= sizes[own] / np.maximum(sizes[own] - 1, 1)  # without the image
    right = distances.argmin(axis=1) == own
    return int(right[others].sum()), int(others.sum())
