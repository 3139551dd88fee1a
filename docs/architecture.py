"""The drawing of the method at a glance, for the README; it depends on no record.

`python docs/architecture.py` draws figures/architecture.png.
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from stamp_core.core.paths import ROOT
from stamp_core.matching.match import MatchingParams, match
from workbench.report.figures.style import COLOURS, WIDTH, Values, draw_arrow, save

_Box = tuple[float, float, float, float]  # left, bottom, width, height in inches

_HEIGHT = 5.3
_PAST, _CURRENT, _CLIENT = COLOURS[:3]
_INK, _SOFT, _LINE, _PANEL = "0.1", "0.35", "0.75", "0.96"
_TITLE = "STAMP: each client matches its gradients over time, the server over clients"

_CARDS = (  # left edge, width, name, meaning, caption
    (0.4, 1.75, "PCS", "prototypical coreset", "images of a class that\nmatch it in feature space"),
    (2.4, 1.6, "Local training", "E epochs each", "on task t and on\neach past coreset"),
    (4.25, 1.75, "TAM", "temporal matching", "one direction that serves\npast tasks and this one"),
    (7.27, 1.41, "SAM", "spatial matching", "one update that\nserves all clients"),
)
_TASKS = (  # name, left edge, images, colour
    ("task 1", 0.4, "AF", _PAST),
    ("task 2", 1.12, "KB", _PAST),
    ("task t", 2.89, "RE", _CURRENT),
    ("task t+1", 4.25, "??", "0.7"),
)
_TEXTS: tuple[tuple[float, float, str, dict[str, Any]], ...] = (
    (WIDTH / 2, _HEIGHT - 0.3, _TITLE, {"fontsize": 13, "color": "black"}),
    (0.4, 4.45, "Client u", {"fontsize": 12, "weight": "bold", "color": _INK, "ha": "left"}),
    (0.4, 4.08, "one of U, each with its own\ntasks in its own order", {"ha": "left"}),
    (7.27, 4.45, "Server", {"fontsize": 12, "weight": "bold", "color": _INK, "ha": "left"}),
    (7.97, 4.13, "global model θ", {"color": _INK}),
    (7.97, 0.85, "never sees images,\nprototypes or coresets", {}),
    (1.27, 2.36, "★ prototype   ● exemplar", {}),
    (2.72, 3.02, "coresets", {"color": _PAST}),
    (3.75, 2.5, "task t", {"color": _CURRENT}),
    (3.2, 2.28, "θ", {"color": _INK}),
    (4.62, 3.02, "past", {"color": _PAST}),
    (5.7, 2.5, "task t", {"color": _CURRENT}),
    (5.42, 3.02, "matched", {"color": _INK, "weight": "bold"}),
    (8.0, 3.1, "clients", {"color": _CLIENT}),
    (5.85, 0.8, "time", {}),
    *((x, 0.8, "· · ·", {"backgroundcolor": _PANEL}) for x in (2.32, 3.88, 5.2)),
    (1.06, 0.36, "images gone", {}),
    (3.2, 0.36, "images at hand", {}),
    (4.56, 0.36, "not yet known", {}),
    (1.2, 1.46, "when a task ends", {"ha": "left"}),
    (3.3, 1.46, "every round", {"ha": "left"}),
    (5.1, 4.25, "to every client", {}),
    (6.74, 2.92, "upload", {}),
    (6.74, 2.5, "parameters\nonly", {}),
)
_ARROWS = (  # from, to
    *(((x, 1.2), (x, 1.75)) for x in (1.1, 3.2)),
    *(((start, 2.75), (end, 2.75)) for start, end in ((2.15, 2.4), (4.0, 4.25), (6.0, 7.27))),
    ((7.97, 3.75), (7.97, 3.95)),
)
_DASHED: dict[str, Any] = {"color": _PAST, "linewidth": 1.8, "linestyle": (0, (3, 1))}
_SOLID: dict[str, Any] = {"color": _CURRENT, "linewidth": 1.8}

PASTS = np.array([[-0.5, 0.4], [-0.1, 0.72]])
NOW = np.array([[0.6, 0.3]])
UPDATES = np.array([[-0.46, 0.26], [-0.2, 0.55], [0.26, 0.52], [0.5, 0.12]])


def architecture() -> Figure:
    """STAMP at a glance: tasks over time, coresets, both matchings, and what is sent."""
    figure = plt.figure(figsize=(WIDTH, _HEIGHT))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, WIDTH), ylim=(0, _HEIGHT))
    axis.axis("off")
    for shift in (0.12, 0.06, 0.0):  # the other clients behind this one
        _draw_box(axis, (0.2 + shift, 0.2 + shift, 6.0, 4.5), _PANEL)
    _draw_box(axis, (7.15, 0.2, 1.65, 4.5), _PANEL)
    _draw_box(axis, (7.27, 3.95, 1.41, 0.36), "white")
    for left, width, name, meaning, caption in _CARDS:
        _draw_box(axis, (left, 1.75, width, 2.0), "white")
        middle = left + width / 2
        _write(axis, middle, 3.58, name, fontsize=10, weight="bold", color=_INK)
        _write(axis, middle, 3.38, meaning)
        _write(axis, middle, 1.99, caption, color=_INK)
    _draw_tasks(axis)
    _draw_coreset(axis)
    _draw_training(axis)
    _draw_matching(axis, (5.1, 2.42), np.vstack([PASTS, NOW]), [_DASHED, _DASHED, _SOLID])
    _draw_matching(axis, (7.97, 2.42), UPDATES, [{"color": _CLIENT, "linewidth": 1.8}] * 4)
    for x, y, text, options in _TEXTS:
        _write(axis, x, y, text, **options)
    strong: dict[str, Any] = {"color": _INK, "linewidth": 1.5}
    for tail, tip in _ARROWS:
        draw_arrow(axis, tail, tip, **strong)
    elbow = "angle,angleA=180,angleB=90,rad=6"
    draw_arrow(axis, (7.27, 4.13), (3.2, 3.75), connectionstyle=elbow, **strong)
    return figure


def _draw_tasks(axis: Axes) -> None:
    """The tasks on a line of time with their images."""
    axis.plot([0.3, 5.5], [0.8, 0.8], color=_LINE, linewidth=1.5, zorder=1)  # behind boxes
    draw_arrow(axis, (5.4, 0.8), (5.6, 0.8), color=_LINE, linewidth=1.5)
    for name, left, letters, colour in _TASKS:
        _draw_box(axis, (left, 0.5, 0.62, 0.6), "white")
        _write(axis, left + 0.31, 0.97, name, color=_INK)
        for x, letter in zip((left + 0.19, left + 0.43), letters, strict=True):
            _draw_box(axis, (x - 0.09, 0.61, 0.18, 0.18), colour, edge=colour)
            _write(axis, x, 0.69, letter, color="white", weight="bold")


def _draw_coreset(axis: Axes) -> None:
    """Of two classes all images, the prototype, and the exemplars nearest to it."""
    places = np.arange(2, 16)
    for centre, turn in ((0.87, 0.0), (1.68, 2.0)):
        angles, radius = 2.4 * places + turn, np.sqrt(places / 16)  # as the seeds of a sunflower
        points = np.column_stack([np.cos(angles), np.sin(angles)]) * radius[:, None]
        points = points * (0.33, 0.27) + (centre, 2.86)
        prototype = points.mean(axis=0)
        exemplars = points[np.linalg.norm(points - prototype, axis=1).argsort()[:3]]
        _draw_dots(axis, points, s=14, color="white", edgecolors=_LINE, linewidths=0.8)
        _draw_dots(axis, exemplars, s=18, color=_PAST)
        _draw_dots(axis, prototype[None], s=90, marker="*", color=_INK, linewidths=0)


def _draw_training(axis: Axes) -> None:
    """Trajectories from the received model on the current task and on each coreset."""
    origin = np.array([3.2, 2.4])
    along = np.linspace(0, 1, 60)[:, None]
    sway = 0.05 * np.sin(6 * np.pi * along) * (1 - along)
    for update, style in zip([*PASTS, *NOW], (_DASHED, _DASHED, _SOLID), strict=True):
        trajectory = origin + along * update + sway * update[::-1] * (-1, 1)
        axis.plot(*trajectory.T, **style)
        _draw_dots(axis, trajectory[-1:], s=16, color=style["color"])
    _draw_dots(axis, origin[None], s=20, color=_INK, zorder=3)


def _draw_matching(
    axis: Axes, origin: tuple[float, float], gradients: Values, styles: list[dict[str, Any]]
) -> None:
    """Gradients from a point, and their matched direction."""
    start = np.array(origin)
    for gradient, style in zip(gradients, styles, strict=True):
        draw_arrow(axis, start, start + gradient, **style)
    direction, _ = match(torch.from_numpy(gradients), MatchingParams(normalise="mean"))
    draw_arrow(axis, start, start + direction.numpy(), "matched", color=_INK, linewidth=3)


def _draw_dots(axis: Axes, points: Values, **options: Any) -> None:
    """A mark at each point [n, 2]."""
    axis.scatter(points[:, 0], points[:, 1], **options)


def _draw_box(axis: Axes, box: _Box, colour: str, edge: str = _LINE) -> None:
    """A box with slightly round corners."""
    left, bottom, width, height = box
    corners = "round,pad=0,rounding_size=0.05"
    patch = FancyBboxPatch((left, bottom), width, height, corners, facecolor=colour, edgecolor=edge)
    axis.add_patch(patch)


def _write(axis: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Text around a point."""
    options = {"fontsize": 8.5, "color": _SOFT, "ha": "center", "va": "center", **options}
    axis.text(x, y, text, **options)


if __name__ == "__main__":
    save(architecture(), ROOT / "figures" / "architecture.png")
