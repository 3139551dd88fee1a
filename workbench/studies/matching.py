"""Figures of gradient matching: its geometry in the plane, and how well it is solved."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Polygon
from torch import Tensor

from stamp_core.core.seeding import generator
from stamp_core.matching.gram import gram
from stamp_core.matching.match import MatchingParams, MatchResult, match, match_gram
from stamp_core.matching.simplex import SOLVED, SoftmaxParams
from workbench.report.figures.style import COLOURS, Values, add_caption, draw_arrow, panels
from workbench.report.text import DASH

_Gradients = Tensor | Sequence[Sequence[float]]

_INKS = [COLOURS[place] for place in (0, 1, 4)]  # of the gradients
_GOOD = COLOURS[2]  # where no gradient is conflicting
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]])  # of the simplex of three weights
_PARAMETERS = 200  # of random gradients; more than gradients, so that they are independent
FLOOR = 1e-17  # below the rounding of float64; a logarithmic axis has no zero

SOLVERS: dict[str, dict[str, Any]] = {  # the public code's: of its server, and of its clients
    "exact": {"solver": "exact"},
    "softmax, 100 rounds": {"solver": "softmax_sgd", "softmax": SoftmaxParams()},
    "softmax, 25 rounds": {
        "solver": "softmax_sgd",
        "softmax": SoftmaxParams(rounds=25, momentum=0.1),
    },
}
_HOLLOW = {"markerfacecolor": "none", "markeredgewidth": 1.8}  # equal ends stay visible
_MARKS: dict[str, dict[str, Any]] = {
    "exact": {"color": "black", "marker": "*", "markersize": 9},
    "softmax, 100 rounds": {"color": COLOURS[1], "marker": "s", "markersize": 9, **_HOLLOW},
    "softmax, 25 rounds": {"color": COLOURS[0], "marker": "D", "markersize": 12, **_HOLLOW},
}

MENUS = ("normalise", "reference", "length")  # of `explore`: fields of MatchingParams
_SLIDERS = (  # of `explore`: name, start, range and step; angles in degrees
    ("kappa", 0.5, 0, 2, 0.05),
    *((f"angle {k}", start, -180, 180, 5) for k, start in enumerate((15, 150, 70), start=1)),
    *((f"norm {k}", start, 0, 3, 0.1) for k, start in enumerate((1.6, 1.2, 1.0), start=1)),
)


# --- the plane


def plane(gradients: _Gradients, matching: MatchingParams) -> Figure:
    """Two or three gradients in the plane with their matched direction, and the dual problem."""
    given = torch.as_tensor(gradients, dtype=torch.float64)
    direction, result = match(given, matching)
    reference, _ = match(given, replace(matching, kappa=0.0, length="free"))
    lengths = given.norm(dim=1)
    wanted = {"none": lengths, "mean": lengths.mean(), "current": lengths[-1]}[matching.normalise]
    scaled = (given * (wanted / lengths.clamp_min(1e-300))[:, None]).numpy()
    free, _ = match(given, replace(matching, length="free"))
    figure, (left, right) = panels(2, 2, 3.9, 0.9)
    radius = matching.kappa * float(reference.norm())
    _draw_gradients(left, scaled, reference.numpy(), radius, direction.numpy(), free.numpy())
    _draw_dual(right, scaled, reference.numpy(), radius)
    for name, changes in SOLVERS.items():
        w = match(given, replace(matching, **changes))[1].weights[:1].numpy()
        value, _ = _dual(w, scaled, reference.numpy(), radius)
        place = w @ CORNERS if len(given) == 3 else [[w[0, 0], value[0]]]
        right.plot(*np.transpose(place), linestyle="", label=name, clip_on=False, **_MARKS[name])
    least = float((given @ direction).min())
    numbers = f"min ⟨$g_i$, d⟩ = {least:.3g},  |d| = {float(direction.norm()):.3g}"
    certificate = f"gap {_gap(result)} |$g_0$|²,  status: {result.status}"
    title = f"Matching {len(given)} gradients, κ = {matching.kappa:g}"
    add_caption(figure, title, f"{numbers},  {certificate}", True)
    return figure


def _draw_gradients(
    axis: Axes, gradients: Values, reference: Values, radius: float, matched: Values, free: Values
) -> None:
    ends = [reference - radius, reference + radius, np.zeros(2), reference, free, matched]
    points = np.vstack([gradients, *ends])
    half = 0.6 * max(np.ptp(points, axis=0).max(), 2e-9) * np.array([-1, 1])
    (x, y), size = (points.min(axis=0) + points.max(axis=0))[:, None] / 2 + half, 300
    axis.set(xlim=x, ylim=y, aspect="equal", title="the gradients")
    grid = np.stack(np.meshgrid(np.linspace(x[0], x[1], size), np.linspace(y[0], y[1], size)))
    least = np.tensordot(gradients, grid, 1).min(axis=0)
    axis.contourf(*grid, least, levels=[0, np.inf], colors=[_GOOD], alpha=0.15)
    axis.fill([], [], color=_GOOD, alpha=0.15, label="no $g_i$ conflicting")
    axis.add_patch(Polygon(gradients, fill=False, edgecolor="0.6", label="hull of the $g_i$"))
    ball: dict[str, Any] = {"fill": False, "edgecolor": "0.35", "linestyle": "--"}
    axis.add_patch(Circle((reference[0], reference[1]), radius, label="ball: κ |$g_0$|", **ball))
    across = np.array([-reference[1], reference[0]])  # names of g0 and d on either side
    across = across if across @ matched <= 0 else -across
    named = [(reference, "$g_0$", across, "0.5", 2.0), (matched, "$d$", -across, "black", 3.5)]
    for place, (row, ink) in enumerate(zip(gradients, _INKS, strict=False), start=1):
        named.append((row, f"$g_{place}$", row, ink, 2.0))
        if row.any():
            axis.axline((0, 0), (-row[1], row[0]), color=ink, linewidth=1, linestyle=":")
    for tip, name, away, ink, width in named:
        draw_arrow(axis, (0, 0), tip, name, color=ink, linewidth=width, mutation_scale=15)
        _draw_name(axis, tip, name, away, ink)
    axis.scatter(*free, color="white", edgecolors="black", zorder=3, label="d, length free")


def _draw_name(axis: Axes, point: Values, name: str, away: Values, ink: str) -> None:
    (x, y), (dx, dy) = point, 11 * away / max(float(np.linalg.norm(away)), 1e-9)
    text = axis.annotate(name, (x, y), (dx, dy), textcoords="offset points")
    text.set(color=ink, fontsize=12, ha="center", va="center")


def _dual(w: Values, gradients: Values, reference: Values, radius: float) -> tuple[Values, Values]:
    """F(w) = <g_w, g0> + radius |g_w|, and min_i <g_i, d(w)> on the ball.  # [n, K] -> [n], [n]"""
    mixed = w @ gradients
    norms = np.linalg.norm(mixed, axis=1)
    with np.errstate(invalid="ignore"):  # no direction at g_w = 0: a gap in the curve
        direction = reference + radius * mixed / norms[:, None]
    return mixed @ reference + radius * norms, (direction @ gradients.T).min(axis=1)


def _draw_dual(axis: Axes, gradients: Values, reference: Values, radius: float) -> None:
    axis.set_title("the dual: F over the weights")
    if len(gradients) == 2:
        x = np.linspace(0, 1, 401)
        value, bound = _dual(np.column_stack([x, 1 - x]), gradients, reference, radius)
        axis.plot(x, value, color="0.3", label="F(w)")
        axis.plot(x, bound, color="0.3", linestyle="--", label="min ⟨$g_i$, d(w)⟩")
        axis.fill_between(x, bound, value, color="0.92", linewidth=0, label="gap")
        axis.set(xlabel="$w_1 = 1 - w_2$", ylabel="F")
        axis.margins(y=0.12)
        return
    parts = range(61)
    w = np.array([(i, j, 60 - i - j) for i in parts for j in parts if i + j <= 60]) / 60
    value, _ = _dual(w, gradients, reference, radius)
    x, y = (w @ CORNERS).T
    filled = axis.tricontourf(x, y, value, levels=12, cmap="Greys_r", alpha=0.6)
    axis.figure.colorbar(filled, ax=axis, label="F(w)", shrink=0.8)
    for place, (corner, ink) in enumerate(zip(CORNERS, _INKS, strict=True), start=1):
        _draw_name(axis, corner, f"$g_{place}$", corner - CORNERS.mean(axis=0), ink)
    axis.set(aspect="equal", ylim=(-0.1, 1.0))
    axis.axis("off")


def products(gradients: _Gradients, matchings: Mapping[str, MatchingParams]) -> pd.DataFrame:
    """A row per matching: each <g_i, d>, the weights, and d against g0."""
    given = torch.as_tensor(gradients, dtype=torch.float64)
    return pd.DataFrame({name: _products(given, each) for name, each in matchings.items()}).T


def _products(given: Tensor, matching: MatchingParams) -> dict[str, str]:
    """A row of `products`, rounded so that it reads the same on every machine."""
    direction, result = match(given, matching)
    reference, _ = match(given, replace(matching, kappa=0.0, length="free"))
    length = float(direction.norm() / reference.norm())
    cosine = float(reference @ direction / reference.norm() / direction.norm())
    inner = enumerate((given @ direction).tolist(), start=1)
    return {
        **{f"⟨g{place}, d⟩": f"{value:z.3f}" for place, value in inner},
        "w": ", ".join(f"{share:.2f}" for share in result.weights[0].tolist()),
        "cos(d, g0)": f"{cosine:z.3f}" if length > 1e-3 else DASH,
        "|d| / |g0|": f"{length:.3f}",
        "gap / |g0|²": _gap(result),
        "status": result.status,
    }


def _gap(result: MatchResult) -> str:
    """The gap in units of |g0|²; that of a solved problem is rounding."""
    return f"< {SOLVED:.0e}" if result.gap <= SOLVED else f"= {result.gap:.0e}"


# --- the solvers


def solvers() -> Figure:
    """The gap each solver leaves on random gradients, by their number and their lengths' spread."""
    counts, spreads, instances = (2, 5, 10, 20, 50), (0.0, 0.5, 1.0, 1.5, 2.0), 10
    figure, (left, right) = panels(2, 2, 3.2, sharey=True)
    _draw_gaps(left, counts, [_problems(count, 0.0, instances) for count in counts])
    _draw_gaps(right, spreads, [_problems(10, spread, instances) for spread in spreads])
    left.set(title="gradients of similar length", xlabel="gradients K", xscale="log")
    left.set(ylabel="gap / |$g_0$|²", yscale="log")
    left.set_xticks(counts, map(str, counts))
    left.minorticks_off()
    right.set(title="K = 10, lengths spread by exp(σ N(0, 1))", xlabel="σ", xticks=spreads)
    caption = f"n = {instances} draws each: median and range; {_PARAMETERS} parameters, κ = 0.5"
    add_caption(figure, "How far from the optimum each solver stops", caption, True)
    return figure


def _problems(count: int, spread: float, instances: int) -> list[Tensor]:
    problems = []
    for instance in range(instances):
        draw = generator("solvers", count, str(spread), instance)
        lengths = torch.exp(spread * torch.randn(count, 1, generator=draw))
        problems.append(gram(lengths * torch.randn(count, _PARAMETERS, generator=draw)))
    return problems


def _draw_gaps(axis: Axes, places: Sequence[float], problems: list[list[Tensor]]) -> None:
    for name, changes in SOLVERS.items():
        matching = MatchingParams(**changes)
        gaps = [[max(match_gram(each, matching).gap, FLOOR) for each in some] for some in problems]
        marks = {**_MARKS[name], "markersize": 7, "markerfacecolor": "white"}
        axis.plot(places, np.median(gaps, axis=1), label=name, **marks)
        ends = (np.min(gaps, axis=1), np.max(gaps, axis=1))
        axis.fill_between(places, *ends, color=marks["color"], alpha=0.15, linewidth=0)


# --- controls


def explore() -> Any:
    """A widget: controls for two or three gradients and their matching, above their `plane`."""
    controls, image = _controls(), widgets.Image(format="png")

    def redraw(change: Any = None) -> None:
        values = {name: control.value for name, control in controls.items()}
        places = range(1, values["gradients"] + 1)
        angles = np.radians([values[f"angle {place}"] for place in places])
        norms = np.array([[values[f"norm {place}"]] for place in places])
        gradients = norms * np.column_stack([np.cos(angles), np.sin(angles)])
        matching = MatchingParams(kappa=values["kappa"], **{name: values[name] for name in MENUS})
        figure, file = plane(gradients.tolist(), matching), io.BytesIO()
        figure.savefig(file, dpi=100)
        plt.close(figure)
        image.value = file.getvalue()

    for name, control in controls.items():
        control.description = name
        control.observe(redraw, "value")
    redraw()
    shown = list(controls.values())
    columns = [widgets.VBox(part) for part in (shown[:5], shown[5:8], shown[8:])]
    return widgets.VBox([widgets.HBox(columns), image])


def _controls() -> dict[str, Any]:
    menus, late = get_type_hints(MatchingParams), {"continuous_update": False}
    controls = {"gradients": widgets.ToggleButtons(options=[2, 3])}
    for name in MENUS:
        options = [option for option in get_args(menus[name]) if option != "weighted"]
        controls[name] = widgets.Dropdown(options=options, value=getattr(MatchingParams(), name))
    for name, value, low, high, step in _SLIDERS:
        controls[name] = widgets.FloatSlider(value, min=low, max=high, step=step, **late)
    return controls
