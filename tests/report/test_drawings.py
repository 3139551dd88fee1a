"""Drawings of the method: arrows that end where the mathematics says."""

import numpy as np
import pytest
import torch
from matplotlib.patches import Circle

from docs.architecture import NOW, PASTS, UPDATES, architecture
from stamp_core.matching.match import MatchingParams, match
from workbench.report.text import DASH
from workbench.studies import matching

TWO = [[1.55, 0.4], [-1.0, 0.7]]
THREE = [[1.8, 0.2], [-0.9, 0.8], [0.3, 1.2]]


def direction(gradients, **choices):
    return match(torch.tensor(gradients, dtype=torch.float64), MatchingParams(**choices))[0].numpy()


def tips(axis):
    return {text.get_gid(): np.array(text.xy) for text in axis.texts if text.get_gid()}


def lines(axis):
    return {line.get_label(): line for line in axis.lines}


def test_the_matched_directions_of_the_architecture_are_matched():
    found = [text for text in architecture().axes[0].texts if text.get_gid() == "matched"]
    for arrow, gradients in zip(found, (np.vstack([PASTS, NOW]), UPDATES), strict=True):
        drawn = np.array(arrow.xy) - arrow.xyann
        assert drawn == pytest.approx(direction(gradients.tolist(), normalise="mean"))


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
