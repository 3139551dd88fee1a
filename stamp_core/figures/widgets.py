"""Figures to play with: controls in a notebook, and the picture that follows them."""

import io
from typing import Any, get_args, get_type_hints

import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np

from stamp_core.figures.matches import plane
from stamp_core.matching import Matching

ANGLES = (15, 150, 70)  # degrees, of the gradients at the start
NORMS = (1.6, 1.2, 1.0)
MENUS = ("normalise", "reference", "length")  # fields of Matching; nobody weighs rows here


def explore() -> Any:
    """A widget: controls for two or three gradients and their matching over their `plane`."""
    controls = _controls()
    picture = widgets.Image(format="png")

    def redraw(change: Any = None) -> None:
        picture.value = drawn({name: control.value for name, control in controls.items()})

    for control in controls.values():
        control.observe(redraw, "value")
    redraw()
    shown = list(controls.values())
    columns = [widgets.VBox(part) for part in (shown[:5], shown[5:8], shown[8:])]
    return widgets.VBox([widgets.HBox(columns), picture])


def drawn(chosen: dict[str, Any]) -> bytes:
    """The PNG of `plane` for what the controls say."""
    places = range(1, chosen["gradients"] + 1)
    angles = np.radians([chosen[f"angle {place}"] for place in places])
    norms = np.array([[chosen[f"norm {place}"]] for place in places])
    rows = norms * np.column_stack([np.cos(angles), np.sin(angles)])
    matching = Matching(kappa=chosen["kappa"], **{name: chosen[name] for name in MENUS})
    figure = plane(rows.tolist(), matching)
    file = io.BytesIO()
    figure.savefig(file, dpi=100)
    plt.close(figure)
    return file.getvalue()


def _controls() -> dict[str, Any]:
    """Every control by the name of what it sets; a slider reports when it is let go."""
    found = {
        "gradients": widgets.ToggleButtons(options=[2, 3]),
        "kappa": widgets.FloatSlider(0.5, min=0, max=2, step=0.05, continuous_update=False),
    }
    for name in MENUS:
        options = [o for o in get_args(get_type_hints(Matching)[name]) if o != "weighted"]
        found[name] = widgets.Dropdown(options=options, value=getattr(Matching(), name))
    for place, angle in enumerate(ANGLES, start=1):
        found[f"angle {place}"] = widgets.IntSlider(angle, -180, 180, 5, continuous_update=False)
    for place, norm in enumerate(NORMS, start=1):
        found[f"norm {place}"] = widgets.FloatSlider(norm, min=0, max=3, continuous_update=False)
    for name, control in found.items():
        control.description = name
    return found
