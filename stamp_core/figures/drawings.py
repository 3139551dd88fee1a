"""Drawings of what no record holds: the method at a glance, for the README."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from numpy.typing import NDArray

from stamp_core.figures.look import COLOURS, WIDTH, arrow
from stamp_core.matching import Matching, match

Array = NDArray[np.float64]
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, width, height in inches

HEIGHT = 5.3
CURRENT, CLIENT, PAST = COLOURS[1], COLOURS[2], COLOURS[0]
INK, SOFT, LINE, PANEL = "0.1", "0.35", "0.75", "0.96"
TITLE = "STAMP: each client matches its gradients over time, the server over clients"

CLIENTS = (0.2, 0.2, 6.0, 4.5)
SERVER = (7.15, 0.2, 1.65, 4.5)
CORESET = (0.4, 1.75, 1.75, 2.0)
TRAINING = (2.4, 1.75, 1.6, 2.0)
TEMPORAL = (4.25, 1.75, 1.75, 2.0)
SPATIAL = (7.27, 1.75, 1.41, 2.0)
GLOBAL = (7.27, 3.95, 1.41, 0.36)
TASKS = (  # name, left edge, pictures, colour
    ("task 1", 0.4, "AF", PAST),
    ("task 2", 1.12, "KB", PAST),
    ("task t", 2.89, "RE", CURRENT),
    ("task t+1", 4.25, "??", "0.7"),
)
STRONG: dict[str, Any] = {"color": INK, "linewidth": 1.5}
DASHED: dict[str, Any] = {"color": PAST, "linewidth": 1.8, "linestyle": (0, (3, 1))}
SOLID: dict[str, Any] = {"color": CURRENT, "linewidth": 1.8}

PASTS = np.array([[-0.5, 0.4], [-0.1, 0.72]])
NOW = np.array([[0.6, 0.3]])
UPDATES = np.array([[-0.46, 0.26], [-0.2, 0.55], [0.26, 0.52], [0.5, 0.12]])


def architecture() -> Figure:
    """STAMP at a glance: tasks over time, coresets, both matchings, and what travels."""
    figure = plt.figure(figsize=(WIDTH, HEIGHT))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axis.axis("off")
    _say(axis, WIDTH / 2, HEIGHT - 0.3, TITLE, fontsize=13, color="black")
    _client(axis)
    _server(axis)
    _ways(axis)
    return figure


def _client(axis: Axes) -> None:
    """A client: its tasks in a row, and above them what it makes of them."""
    x, y, width, height = CLIENTS
    for shift in (0.12, 0.06):  # the other clients
        _box(axis, (x + shift, y + shift, width, height), PANEL)
    _box(axis, CLIENTS, PANEL)
    _say(axis, 0.4, 4.45, "Client u", fontsize=12, weight="bold", color=INK, ha="left")
    _say(axis, 0.4, 4.08, "one of U, each with its own\ntasks in its own order", ha="left")
    _tasks(axis)
    _coreset(axis)
    _training(axis)
    _card(
        axis,
        TEMPORAL,
        "TAM",
        "temporal matching",
        "one direction that serves\npast tasks and this one",
    )
    _fan(axis, (5.1, 2.42), np.vstack([PASTS, NOW]), (DASHED, DASHED, SOLID))
    _say(axis, 4.62, 3.02, "past", color=PAST)
    _say(axis, 5.7, 2.5, "task t", color=CURRENT)
    _say(axis, 5.42, 3.02, "matched", color=INK, weight="bold")


def _tasks(axis: Axes) -> None:
    """The tasks on a line of time: past, now and later."""
    axis.plot([0.3, 5.5], [0.8, 0.8], color=LINE, linewidth=1.5, zorder=1)  # behind boxes
    arrow(axis, (5.4, 0.8), (5.6, 0.8), color=LINE, linewidth=1.5)
    _say(axis, 5.85, 0.8, "time")
    for name, left, letters, colour in TASKS:
        _box(axis, (left, 0.5, 0.62, 0.6), "white")
        _say(axis, left + 0.31, 0.97, name, color=INK)
        for place, letter in enumerate(letters):
            _picture(axis, left + 0.19 + 0.24 * place, 0.7, letter, colour)
    for x in (2.32, 3.88, 5.2):
        _say(axis, x, 0.8, "· · ·", backgroundcolor=PANEL)
    for x, text in ((1.06, "pictures gone"), (3.2, "pictures at hand"), (4.56, "not yet known")):
        _say(axis, x, 0.36, text)


def _coreset(axis: Axes) -> None:
    """What stays of the past: of each class the pictures whose mean feature is its prototype."""
    _card(
        axis,
        CORESET,
        "PCS",
        "prototypical coreset",
        "K pictures a class that\nmatch it in feature space",
    )
    _say(axis, 1.27, 2.36, "★ prototype   ● kept")
    places = np.arange(2, 16)
    for centre, turn in ((0.87, 0.0), (1.68, 2.0)):
        angles, radius = 2.4 * places + turn, np.sqrt(places / 16)  # as the seeds of a sunflower
        points = np.column_stack([np.cos(angles), np.sin(angles)]) * radius[:, None]
        points = points * (0.33, 0.27) + (centre, 2.86)
        kept = np.linalg.norm(points - points.mean(axis=0), axis=1).argsort()[:3]
        _dots(axis, points, s=14, color="white", edgecolors=LINE, linewidths=0.8)
        _dots(axis, points[kept], s=18, color=PAST)
        _dots(axis, points.mean(axis=0, keepdims=True), s=90, marker="*", color=INK, linewidths=0)


def _training(axis: Axes) -> None:
    """Local training: a path from the received model for the current task and for each coreset."""
    _card(axis, TRAINING, "Local training", "E epochs each", "on task t and on\neach past coreset")
    origin = np.array([3.2, 2.4])
    for row, look in zip([*PASTS, *NOW], (DASHED, DASHED, SOLID), strict=True):
        along = np.linspace(0, 1, 60)[:, None]
        sway = 0.05 * np.sin(6 * np.pi * along) * (1 - along)
        path = origin + along * row + sway * row[::-1] * (-1, 1)
        axis.plot(*path.T, **look)
        _dots(axis, path[-1:], s=16, color=look["color"])
    _dots(axis, origin[None], s=20, color=INK, zorder=3)
    _say(axis, 3.2, 2.28, "θ", color=INK)
    _say(axis, 2.72, 3.02, "coresets", color=PAST)
    _say(axis, 3.75, 2.5, "task t", color=CURRENT)


def _server(axis: Axes) -> None:
    """The server: one model from the clients' updates."""
    _box(axis, SERVER, PANEL)
    _say(axis, 7.27, 4.45, "Server", fontsize=12, weight="bold", color=INK, ha="left")
    _box(axis, GLOBAL, "white")
    _say(axis, 7.97, 4.13, "global model θ", color=INK)
    _card(axis, SPATIAL, "SAM", "spatial matching", "one update that\nserves all clients")
    _fan(axis, (7.97, 2.42), UPDATES, ({"color": CLIENT, "linewidth": 1.8},) * len(UPDATES))
    _say(axis, 8.0, 3.1, "clients", color=CLIENT)
    _say(axis, 7.97, 0.85, "never sees pictures,\nprototypes or coresets")


def _ways(axis: Axes) -> None:
    """What goes where."""
    for x, text in ((1.1, "when a task ends"), (3.2, "every round")):
        arrow(axis, (x, 1.2), (x, 1.75), **STRONG)
        _say(axis, x + 0.1, 1.46, text, ha="left")
    for start, end in ((2.15, 2.4), (4.0, 4.25), (6.0, 7.27)):
        arrow(axis, (start, 2.75), (end, 2.75), **STRONG)
    arrow(axis, (7.97, 3.75), (7.97, 3.95), **STRONG)
    elbow = "angle,angleA=180,angleB=90,rad=6"
    arrow(axis, (7.27, 4.13), (3.2, 3.75), connectionstyle=elbow, **STRONG)
    _say(axis, 5.1, 4.25, "to every client")
    _say(axis, 6.74, 2.92, "upload")
    _say(axis, 6.74, 2.5, "parameters\nonly")


def _fan(axis: Axes, origin: Point, rows: Array, looks: tuple[dict[str, Any], ...]) -> None:
    """Directions from a point, and the one that matching makes of them."""
    start = np.array(origin)
    for row, look in zip(rows, looks, strict=True):
        arrow(axis, start, start + row, **look)
    direction, _ = match(torch.from_numpy(rows), Matching(normalise="mean"))
    arrow(axis, start, start + direction.numpy(), "matched", color=INK, linewidth=3)


def _card(axis: Axes, box: Box, name: str, meaning: str, caption: str) -> None:
    """A white card with a name, what the name means, and a caption below room for a picture."""
    left, bottom, width, height = box
    _box(axis, box, "white")
    middle, top = left + width / 2, bottom + height
    _say(axis, middle, top - 0.17, name, fontsize=10, weight="bold", color=INK)
    _say(axis, middle, top - 0.37, meaning)
    _say(axis, middle, bottom + 0.24, caption, color=INK)


def _dots(axis: Axes, points: Array, **look: Any) -> None:
    """A mark at each point."""
    axis.scatter(points[:, 0], points[:, 1], **look)


def _picture(axis: Axes, x: float, y: float, letter: str, colour: Any) -> None:
    """A training picture: a letter on a coloured square."""
    _box(axis, (x - 0.09, y - 0.09, 0.18, 0.18), colour, edge=colour)
    _say(axis, x, y - 0.01, letter, color="white", weight="bold")


def _box(axis: Axes, box: Box, colour: Any, edge: Any = LINE) -> None:
    """A box with slightly round corners."""
    left, bottom, width, height = box
    look = {"boxstyle": "round,pad=0,rounding_size=0.05", "facecolor": colour, "edgecolor": edge}
    axis.add_patch(FancyBboxPatch((left, bottom), width, height, **look))


def _say(axis: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Text around a point."""
    look = {"fontsize": 8.5, "color": SOFT, "ha": "center", "va": "center", **look}
    axis.text(x, y, text, **look)
