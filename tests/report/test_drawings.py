"""Drawings of the method: legible texts, and arrows that end where the mathematics says."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib import ft2font
from matplotlib.patches import Circle
from PIL import Image

from docs.architecture import NOW, PASTS, UPDATES, architecture
from stamp_core.core.paths import ROOT
from stamp_core.matching.match import MatchingParams, match, match_gram
from workbench.report.figures import style
from workbench.report.text import DASH
from workbench.studies import matching

TWO = [[1.55, 0.4], [-1.0, 0.7]]
THREE = [[1.8, 0.2], [-0.9, 0.8], [0.3, 1.2]]
CONFLICTING = [[3.0, 0.0], [-1.0, 0.3]]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def direction(gradients, **choices):
    """The matched direction."""
    return match(torch.tensor(gradients, dtype=torch.float64), MatchingParams(**choices))[0].numpy()


def tips(axis):
    """Where each named arrow ends."""
    return {text.get_gid(): np.array(text.xy) for text in axis.texts if text.get_gid()}


def lines(axis):
    return {line.get_label(): line for line in axis.lines}


# --- the architecture


def test_the_texts_of_the_architecture_do_not_overlap_and_stay_in_their_boxes():
    figure = architecture()
    figure.set_dpi(style.DPI)
    figure.draw_without_rendering()
    (axis,) = figure.axes
    texts = [(text.get_text(), text.get_window_extent()) for text in axis.texts if text.get_text()]
    boxes = [each.get_window_extent() for each in axis.patches[2:]]  # two lie behind the third
    assert {"PCS", "TAM", "SAM", "Local training", "Server"} <= {text for text, _ in texts}
    for place, (text, extent) in enumerate(texts):
        assert not any(extent.overlaps(other) for _, other in texts[place + 1 :]), text
        assert figure.bbox.contains(*extent.min) and figure.bbox.contains(*extent.max), text
        for box in boxes:
            inside = [box.contains(*corner) for corner in extent.corners()]
            assert all(inside) or not any(inside), text


def test_the_matched_directions_of_the_architecture_are_matched():
    found = [text for text in architecture().axes[0].texts if text.get_gid() == "matched"]
    for arrow, gradients in zip(found, (np.vstack([PASTS, NOW]), UPDATES), strict=True):
        drawn = np.array(arrow.xy) - arrow.xyann
        assert drawn == pytest.approx(direction(gradients.tolist(), normalise="mean"))


def test_the_stored_architecture_is_what_the_code_draws(tmp_path):
    assert ft2font.__freetype_version__ == "2.14.3", "not the pinned matplotlib"
    style.save(architecture(), tmp_path / "a.png")
    paths = (ROOT / "figures" / "architecture.png", tmp_path / "a.png")
    stored, drawn = (np.asarray(Image.open(path)) for path in paths)  # bytes depend on zlib
    assert stored.shape[1] == style.WIDTH * style.DPI
    assert np.array_equal(stored, drawn), "run python docs/architecture.py"


# --- the plane


@pytest.mark.parametrize("gradients", [TWO, THREE])
@pytest.mark.parametrize(
    "choices",
    [
        *({}, {"kappa": 1.5}, {"reference": "current"}, {"length": "reference"}),
        *({"normalise": "mean"}, {"normalise": "current"}),
    ],
)
def test_arrows_end_where_the_mathematics_says(gradients, choices):
    """Normalised gradients are drawn as they are matched: with equal lengths."""
    found = tips(matching.plane(gradients, MatchingParams(**choices)).axes[0])
    norms = np.linalg.norm(gradients, axis=1)
    length = {"mean": norms.mean(), "current": norms[-1]}.get(choices.get("normalise"), norms)
    scaled = np.array(gradients) * (length / norms)[:, None]
    for place, gradient in enumerate(scaled, start=1):
        assert found[f"$g_{place}$"] == pytest.approx(gradient)
    assert found["$d$"] == pytest.approx(direction(gradients, **choices))
    reference = scaled[-1] if "reference" in choices else scaled.mean(axis=0)
    assert found["$g_0$"] == pytest.approx(reference)


@pytest.mark.parametrize("kappa", [0.5, 1.2])
def test_the_ball_is_around_the_reference_and_the_free_direction_on_it(kappa):
    axis = matching.plane(TWO, MatchingParams(kappa)).axes[0]
    (ball,) = [each for each in axis.patches if isinstance(each, Circle)]
    reference = np.mean(TWO, axis=0)
    assert ball.center == pytest.approx(reference)
    assert ball.radius == pytest.approx(kappa * np.linalg.norm(reference))
    (points,) = [each for each in axis.collections if each.get_label() == "d, length free"]
    free = np.asarray(points.get_offsets())[0]
    assert np.linalg.norm(free - reference) == pytest.approx(ball.radius)
    assert free == pytest.approx((1 + kappa) * tips(axis)["$d$"])


def test_the_hull_joins_the_gradients_and_half_planes_end_across_them():
    axis = matching.plane(THREE, MatchingParams()).axes[0]
    (hull,) = [each for each in axis.patches if each.get_label() == "hull of the $g_i$"]
    assert hull.get_xy()[:3] == pytest.approx(np.array(THREE))
    for line, gradient in zip(axis.lines, THREE, strict=True):
        assert line.get_xy1() == (0, 0)
        assert np.dot(line.get_xy2(), gradient) == pytest.approx(0)


def test_the_caption_has_the_numbers():
    figure = matching.plane(CONFLICTING, MatchingParams())
    d, text = direction(CONFLICTING), figure.legends[0].get_title().get_text()
    least = min(np.dot(gradient, d) for gradient in CONFLICTING)
    assert f"= {least:.3g}," in text and f"{np.linalg.norm(d):.3g}" in text
    assert "gap < 1e-08" in text and "status: exact" in text


def test_bounds_meet_where_the_exact_solver_ends_and_nowhere_else():
    found = lines(matching.plane(TWO, MatchingParams()).axes[1])
    upper, lower = (found[name].get_ydata() for name in ("F(w)", "min ⟨$g_i$, d(w)⟩"))
    assert (lower <= upper + 1e-12).all()
    ((x, y),) = found["exact"].get_xydata()
    assert y == pytest.approx(upper.min(), abs=1e-4) and y <= upper.min()
    touching = np.flatnonzero(upper - lower < 0.005)
    assert abs(found["F(w)"].get_xdata()[touching] - x).max() < 0.02


@pytest.mark.parametrize("name", matching.SOLVERS)
def test_each_solver_ends_at_its_weights(name):
    params = MatchingParams(**matching.SOLVERS[name])
    for gradients in (TWO, THREE):
        found = lines(matching.plane(gradients, MatchingParams()).axes[1])[name].get_xydata()[0]
        w = match(torch.tensor(gradients, dtype=torch.float64), params)[1].weights[0].numpy()
        expected = w @ matching.CORNERS if len(w) == 3 else [w[0], found[1]]
        assert found == pytest.approx(np.asarray(expected))


@pytest.mark.parametrize(
    "gradients",
    [[[1, 0], [-1, 0]], [[1, 0], [1, 0]], [[0, 0], [1, 0]], [[0, 0], [0, 0]], [[1, 0]] * 3],
)
@pytest.mark.filterwarnings("error")
def test_degenerate_gradients_are_drawn_too(gradients):
    matching.plane(gradients, MatchingParams(1.0, normalise="mean")).draw_without_rendering()


# --- in numbers


def test_products_are_the_numbers_of_each_match():
    gradients = [[1.6, 0.4], [-1.1, 0.6]]
    choices = {"exact": MatchingParams(), "public code": MatchingParams(solver="softmax_sgd")}
    table = matching.products(gradients, choices)
    for name, params in choices.items():
        d, result = match(torch.tensor(gradients, dtype=torch.float64), params)
        row, reference = table.loc[name], np.mean(gradients, axis=0)
        inner = [float(row[f"⟨g{place}, d⟩"]) for place in (1, 2)]
        assert inner == pytest.approx((gradients @ d.numpy()).tolist(), abs=5e-4)
        length = np.linalg.norm(d) / np.linalg.norm(reference)
        cosine = reference @ d.numpy() / np.linalg.norm(reference) / np.linalg.norm(d)
        assert float(row["|d| / |g0|"]) == pytest.approx(length, abs=5e-4)
        assert float(row["cos(d, g0)"]) == pytest.approx(cosine, abs=5e-4)
        assert row["w"] == ", ".join(f"{share:.2f}" for share in result.weights[0].tolist())
        assert row["gap / |g0|²"] == ("< 1e-08" if name == "exact" else f"= {result.gap:.0e}")


def test_a_direction_of_length_zero_has_no_cosine():
    row = matching.products([[2, 0], [-0.5, 0.8], [-0.5, -0.8]], {"": MatchingParams(1.0)}).iloc[0]
    assert row["cos(d, g0)"] == DASH and row["|d| / |g0|"] == "0.000"
    assert [row[f"⟨g{place}, d⟩"] for place in (1, 2, 3)] == ["0.000"] * 3


# --- the solvers


def test_solvers_have_the_median_gap_of_random_gradients():
    figure = matching.solvers(counts=(2, 4), spreads=(0.0, 1.0), instances=3)
    left, right = figure.axes
    problems = matching._problems(4, 0.0, 3)
    for name, changes in matching.SOLVERS.items():
        gaps = [match_gram(each, MatchingParams(**changes)).gap for each in problems]
        median = np.median(np.maximum(gaps, matching.FLOOR))
        assert lines(left)[name].get_ydata()[1] == pytest.approx(median)
    assert lines(right)["exact"].get_xdata().tolist() == [0.0, 1.0]
    assert left.get_yscale() == right.get_yscale() == "log"
    assert "n = 3 draws" in figure.legends[0].get_title().get_text()


def test_the_lengths_of_random_gradients_spread_as_they_should():
    spread = matching._problems(50, 1.0, 4)
    logs = [gram.diagonal(dim1=-2, dim2=-1).sqrt().log().std() for gram in spread]
    assert 0.8 < float(torch.stack(logs).mean()) < 1.2


# --- controls


def controls(widget):
    """Every control by its description, and the image."""
    panel, image = widget.children
    found = [control for column in panel.children for control in column.children]
    return {control.description: control for control in found}, image


def test_a_control_draws_its_value(monkeypatch):
    calls, plane = [], matching.plane
    monkeypatch.setattr(matching, "plane", lambda *given: calls.append(given) or plane(*given))
    found, image = controls(matching.explore())
    values = {"gradients": 3, "kappa": 1.2, "angle 1": 40, "norm 2": 0.5, "length": "free"}
    for name, value in values.items():
        before = image.value
        found[name].value = value
        assert image.value not in (before, b"") and not plt.get_fignums()
        (old, params), (new, changed) = calls[-2:]
        drawn = {
            "gradients": len(new),
            "angle 1": np.degrees(np.arctan2(*new[0][::-1])),
            "norm 2": np.hypot(*new[1]),
        }
        assert drawn.get(name, getattr(changed, name, None)) == (
            pytest.approx(value) if name in drawn else value
        )
        assert (new == old) == (name not in drawn) == (params != changed)
    assert len(calls) == 1 + len(values)
    for name in matching.MENUS:  # every choice can be drawn
        for option in found[name].options:
            found[name].value = option
    assert "weighted" not in found["reference"].options
