"""Figures of gradient matching: its geometry in the plane, and how well it is solved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Polygon
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from stamp_core import tables
from stamp_core.figures.look import COLOURS, arrow, entitle, panels
from stamp_core.matching import Matched, Matching, Softmax, gram, match, solve
from stamp_core.seeding import generator
from stamp_core.simplex import SOLVED

Array = NDArray[np.float64]

INKS = [COLOURS[place] for place in (0, 1, 4)]  # of the rows
GOOD = COLOURS[2]  # where no gradient is opposed
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]])  # of the simplex of three weights
PARAMETERS = 200  # of random rows; more than rows, so that none depends on the others
FLOOR = 1e-17  # below the rounding of float64; a logarithmic axis has no zero

SOLVERS: dict[str, dict[str, Any]] = {  # the public code's: of its server, and of its clients
    "exact": {"solver": "exact"},
    "softmax, 100 rounds": {"solver": "authors", "softmax": Softmax()},
    "softmax, 25 rounds": {"solver": "authors", "softmax": Softmax(rounds=25, momentum=0.1)},
}
HOLLOW = {"markerfacecolor": "none", "markeredgewidth": 1.8}  # equal ends stay visible
LOOKS: dict[str, dict[str, Any]] = {
    "exact": {"color": "black", "marker": "*", "markersize": 9},
    "softmax, 100 rounds": {"color": COLOURS[1], "marker": "s", "markersize": 9, **HOLLOW},
    "softmax, 25 rounds": {"color": COLOURS[0], "marker": "D", "markersize": 12, **HOLLOW},
}


@dataclass(frozen=True)
class Scene:
    """The matching problem as it stands in the plane."""

    rows: Array  # [K, 2], normalised
    reference: Array  # [2]
    radius: float  # of the ball around the reference

    def value(self, w: Array) -> Array:
        """F(w) = <g_w, g0> + radius |g_w|.  # w [n, K] -> [n]"""
        mixed: Array = w @ self.rows
        return np.asarray(mixed @ self.reference + self.radius * np.linalg.norm(mixed, axis=1))

    def guaranteed(self, w: Array) -> Array:
        """min_i <g_i, d(w)>, where d(w) lies on the ball in direction g_w.  # w [n, K] -> [n]"""
        mixed = w @ self.rows
        with np.errstate(invalid="ignore"):  # no direction at g_w = 0: a gap in the curve
            ahead = mixed / np.linalg.norm(mixed, axis=1, keepdims=True)
        return np.asarray(((self.reference + self.radius * ahead) @ self.rows.T).min(axis=1))


# --- the plane


def plane(rows: Tensor | Sequence[Sequence[float]], matching: Matching) -> Figure:
    """Two or three gradients in the plane, what matching makes of them, and its dual problem."""
    given = torch.as_tensor(rows, dtype=torch.float64)
    direction, found = match(given, matching)
    scene = _scene(given, matching)
    figure, (left, right) = panels(2, 2, 3.9, 0.9)
    _geometry(left, scene, given, matching)
    (_curve if len(given) == 2 else _triangle)(right, scene)
    _ends(right, scene, given, matching)
    least = float((given @ direction).min())
    numbers = f"min ⟨$g_i$, d⟩ = {least:.3g},  |d| = {float(direction.norm()):.3g}"
    certificate = f"gap {_gap(found)} |$g_0$|²,  status: {found.status}"
    title = f"Matching {len(given)} gradients, κ = {matching.kappa:g}"
    entitle(figure, title, f"{numbers},  {certificate}", [left, right])
    return figure


def _scene(given: Tensor, matching: Matching) -> Scene:
    """The problem that matching solves for these gradients."""
    lengths = given.norm(dim=1)
    wanted = {"none": lengths, "mean": lengths.mean(), "current": lengths[-1]}[matching.normalise]
    rows = given * (wanted / lengths.clamp_min(1e-300))[:, None]
    reference, _ = match(given, replace(matching, kappa=0.0, length="free"))
    radius = matching.kappa * float(reference.norm())
    return Scene(rows.numpy(), reference.numpy(), radius)


def _geometry(axis: Axes, scene: Scene, given: Tensor, matching: Matching) -> None:
    """The gradients, the ball around the reference, and the matched direction in it."""
    free, _ = match(given, replace(matching, length="free"))
    direction, _ = match(given, matching)
    _limits(axis, np.vstack([scene.rows, scene.reference, free, direction]), scene)
    _nobody_opposed(axis, scene.rows)
    axis.add_patch(Polygon(scene.rows, fill=False, edgecolor="0.6", label="hull of the $g_i$"))
    ball = {"fill": False, "edgecolor": "0.35", "linestyle": "--", "label": "ball: κ |$g_0$|"}
    axis.add_patch(Circle(tuple(scene.reference), scene.radius, **ball))
    for place, row in enumerate(scene.rows):
        _named(axis, row, f"$g_{place + 1}$", row, INKS[place])
    matched = direction.numpy()
    _named(axis, scene.reference, "$g_0$", _aside(scene.reference, matched), "0.5")
    _named(axis, matched, "$d$", -_aside(scene.reference, matched), "black", 3.5)
    look: dict[str, Any] = {"color": "white", "edgecolors": "black", "zorder": 3}
    axis.scatter(*free.tolist(), label="d, length free", **look)


def _limits(axis: Axes, points: Array, scene: Scene) -> None:
    """Limits that hold all points, the ball and 0, with one scale for both axes."""
    ends = [scene.reference - scene.radius, scene.reference + scene.radius, np.zeros(2)]
    points = np.vstack([points, *ends])
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    half = 1.2 * max(np.ptp(points, axis=0).max() / 2, 1e-9) * np.array([-1, 1])
    axis.set(xlim=middle[0] + half, ylim=middle[1] + half, aspect="equal", title="the gradients")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(5))


def _nobody_opposed(axis: Axes, rows: Array) -> None:
    """Where no gradient is opposed, and where the half-plane of each ends."""
    x, y = np.meshgrid(np.linspace(*axis.get_xlim(), 300), np.linspace(*axis.get_ylim(), 300))
    least = np.min([row[0] * x + row[1] * y for row in rows], axis=0)
    axis.contourf(x, y, least, levels=[0, np.inf], colors=[GOOD], alpha=0.15)
    axis.fill([], [], color=GOOD, alpha=0.15, label="no $g_i$ opposed")
    for row, ink in zip(rows, INKS, strict=False):
        if row.any():
            axis.axline((0, 0), (-row[1], row[0]), color=ink, linewidth=1, linestyle=":")


def _aside(one: Array, other: Array) -> Array:
    """The direction across `one` that leads away from `other`."""
    across = np.array([-one[1], one[0]])
    return across if across @ other <= 0 else -across


def _named(axis: Axes, tip: Array, name: str, away: Array, ink: Any, width: float = 2.0) -> None:
    """An arrow from 0 with its name near the tip, in the direction `away` of it."""
    arrow(axis, (0, 0), tip, name, color=ink, linewidth=width, mutation_scale=15)
    _name(axis, tip, name, away, ink)


def _name(axis: Axes, point: Array, name: str, away: Array, ink: Any) -> None:
    """A name near a point, in a direction away from it."""
    (x, y), (dx, dy) = point, 11 * away / max(float(np.linalg.norm(away)), 1e-9)
    text = axis.annotate(name, (x, y), (dx, dy), textcoords="offset points")
    text.set(color=ink, fontsize=12, ha="center", va="center")


def _curve(axis: Axes, scene: Scene) -> None:
    """F over the weights of two gradients, and below it what d(w) guarantees: the gap between."""
    x = np.linspace(0, 1, 401)
    w = np.column_stack([x, 1 - x])
    value, guaranteed = scene.value(w), scene.guaranteed(w)
    axis.plot(x, value, color="0.3", label="F(w)")
    axis.plot(x, guaranteed, color="0.3", linestyle="--", label="min ⟨$g_i$, d(w)⟩")
    axis.fill_between(x, guaranteed, value, color="0.92", linewidth=0, label="gap")
    axis.set(title="the dual: F over the weights", xlabel="$w_1 = 1 - w_2$", ylabel="F")
    axis.margins(y=0.12)


def _triangle(axis: Axes, scene: Scene) -> None:
    """F over the weights of three gradients; darker is lower."""
    steps = range(61)
    w = np.array([(i, j, 60 - i - j) for i in steps for j in steps if i + j <= 60]) / 60
    x, y = (w @ CORNERS).T
    filled = axis.tricontourf(x, y, scene.value(w), levels=12, cmap="Greys_r", alpha=0.6)
    axis.figure.colorbar(filled, ax=axis, label="F(w)", shrink=0.8)
    for place, (corner, ink) in enumerate(zip(CORNERS, INKS, strict=True)):
        _name(axis, corner, f"$g_{place + 1}$", corner - CORNERS.mean(axis=0), ink)
    axis.set(title="the dual: F over the weights", aspect="equal", ylim=(-0.1, 1.0))
    axis.axis("off")


def _ends(axis: Axes, scene: Scene, given: Tensor, matching: Matching) -> None:
    """Where each solver ends."""
    for name, changes in SOLVERS.items():
        _, found = match(given, replace(matching, **changes))
        w = np.asarray(found.weights)[:1]
        place = w @ CORNERS if len(given) == 3 else [[w[0, 0], scene.value(w)[0]]]
        axis.plot(*np.transpose(place), linestyle="", label=name, clip_on=False, **LOOKS[name])


def products(
    rows: Tensor | Sequence[Sequence[float]], matchings: Mapping[str, Matching]
) -> pd.DataFrame:
    """In numbers, a row a matching: each <g_i, d>, the weights, and what became of g0."""
    given = torch.as_tensor(rows, dtype=torch.float64)
    table = {name: _products(given, matching) for name, matching in matchings.items()}
    return pd.DataFrame(table).T


def _products(given: Tensor, matching: Matching) -> dict[str, str]:
    """A row of `products`, rounded so that it reads the same everywhere."""
    direction, found = match(given, matching)
    reference, _ = match(given, replace(matching, kappa=0.0, length="free"))
    length = float(direction.norm() / reference.norm())
    cosine = float(reference @ direction / reference.norm() / direction.norm())
    inner = enumerate((given @ direction).tolist(), start=1)
    return {
        **{f"⟨g{place}, d⟩": _decimals(value) for place, value in inner},
        "w": ", ".join(f"{share:.2f}" for share in found.weights[0].tolist()),
        "cos(d, g0)": _decimals(cosine) if length > 1e-3 else tables.DASH,
        "|d| / |g0|": _decimals(length),
        "gap / |g0|²": _gap(found),
        "status": found.status,
    }


def _gap(found: Matched) -> str:
    """The gap in units of |g0|^2; what is left of a solved problem is rounding."""
    return f"< {SOLVED:.0e}" if found.gap <= SOLVED else f"= {found.gap:.0e}"


def _decimals(value: float) -> str:
    """Three decimals, and no minus before zero."""
    return f"{round(value, 3) + 0.0:.3f}"


# --- the solvers


def solvers(
    counts: Sequence[int] = (2, 5, 10, 20, 50),
    spreads: Sequence[float] = (0.0, 0.5, 1.0, 1.5, 2.0),
    instances: int = 10,
) -> Figure:
    """The gap each solver leaves on random rows: by their number, and by how lengths spread."""
    figure, (left, right) = panels(2, 2, 3.2, 0.6, sharey=True)
    _gaps(left, counts, [_problems(count, 0.0, instances) for count in counts])
    _gaps(right, spreads, [_problems(10, spread, instances) for spread in spreads])
    left.set(title="rows of similar length", xlabel="rows K", ylabel="gap / |$g_0$|²", xscale="log")
    left.set_xticks(counts, [str(count) for count in counts], minor=False)
    left.minorticks_off()
    right.set_xticks(spreads)
    right.set(title="K = 10, lengths spread by exp(σ N(0, 1))", xlabel="σ", yscale="log")
    caption = f"n = {instances} draws each: median and range; {PARAMETERS} parameters, κ = 0.5"
    entitle(figure, "How far from the optimum each solver stops", caption, [left])
    return figure


def _problems(count: int, spread: float, instances: int) -> list[Tensor]:
    """The inner products of random rows, of several draws."""
    found = []
    for instance in range(instances):
        draw = generator("solvers", count, str(spread), instance)
        lengths = torch.exp(spread * torch.randn(count, 1, generator=draw))
        found.append(gram(lengths * torch.randn(count, PARAMETERS, generator=draw)))
    return found


def _gaps(axis: Axes, places: Sequence[float], problems: list[list[Tensor]]) -> None:
    """For each solver the median gap and its range at each place."""
    for name, changes in SOLVERS.items():
        matching = Matching(**changes)
        found = [[solve(each, matching).gap for each in some] for some in problems]
        gaps = np.maximum(found, FLOOR)
        look = {**LOOKS[name], "markersize": 7, "markerfacecolor": "white"}
        axis.plot(places, np.median(gaps, axis=1), label=name, **look)
        ends = (gaps.min(axis=1), gaps.max(axis=1))
        axis.fill_between(places, *ends, color=look["color"], alpha=0.15, linewidth=0)
