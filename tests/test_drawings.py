"""Drawings: what they say is there and legible, and arrows end where the mathematics says."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib import ft2font
from matplotlib.patches import Circle
from PIL import Image

from stamp_core import figures, tables
from stamp_core.figures import drawings, look, matches, widgets
from stamp_core.matching import Matching, match, solve
from stamp_core.paths import ROOT

TWO = [[1.55, 0.4], [-1.0, 0.7]]
THREE = [[1.8, 0.2], [-0.9, 0.8], [0.3, 1.2]]
OPPOSED = [[3.0, 0.0], [-1.0, 0.3]]


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def matched(rows, **choices):
    """The direction that matching finds."""
    return match(torch.tensor(rows, dtype=torch.float64), Matching(**choices))[0].numpy()


def arrows(axis):
    """Where each named arrow begins and ends."""
    found = [text for text in axis.texts if text.get_gid()]
    return {text.get_gid(): (np.array(text.xyann), np.array(text.xy)) for text in found}


def tips(axis):
    return {name: tip for name, (_, tip) in arrows(axis).items()}


def lines(axis):
    return {line.get_label(): line for line in axis.lines}


def caption(figure):
    return figure.legends[0].get_title().get_text()


# --- the architecture


@pytest.fixture
def drawn():
    figure = figures.architecture()
    figure.set_dpi(look.DPI)
    figure.draw_without_rendering()
    return figure


def said(figure):
    """Every text with its box in pixels."""
    texts = [text for text in figure.axes[0].texts if text.get_text()]
    return [(text.get_text(), text.get_window_extent()) for text in texts]


def test_the_architecture_names_its_parts(drawn):
    texts = {text.replace("\n", " ") for text, _ in said(drawn)}
    parts = {"Client u", "Server", "PCS", "Local training", "TAM", "SAM", "global model θ"}
    tasks = {"task 1", "task 2", "task t", "task t+1", "time"}
    ways = {"upload", "parameters only", "to every client", "when a task ends", "every round"}
    assert parts | tasks | ways <= texts
    assert "K pictures a class that match it in feature space" in texts


def test_no_two_texts_of_the_architecture_overlap(drawn):
    texts = said(drawn)
    for place, (text, box) in enumerate(texts):
        assert [other for other, taken in texts[place + 1 :] if box.overlaps(taken)] == [], text


def test_no_text_of_the_architecture_leaves_its_card(drawn):
    axis = drawn.axes[0]
    cards = [each.get_window_extent() for each in axis.patches[2:]]  # two lie behind the third
    for text, box in said(drawn):
        assert drawn.bbox.contains(*box.min) and drawn.bbox.contains(*box.max), text
        for card in cards:
            inside = [card.contains(*corner) for corner in box.corners()]
            assert all(inside) or not any(inside), text


def test_matched_directions_of_the_architecture_are_matched(drawn):
    found = [text for text in drawn.axes[0].texts if text.get_gid() == "matched"]
    known = (np.vstack([drawings.PASTS, drawings.NOW]), drawings.UPDATES)
    for arrow, rows in zip(found, known, strict=True):
        way = np.array(arrow.xy) - arrow.xyann
        assert way == pytest.approx(matched(rows.tolist(), normalise="mean"))


def test_the_stored_architecture_is_what_the_code_draws(tmp_path):
    assert ft2font.__freetype_version__ == "2.14.3", "not the pinned matplotlib"
    figures.save(figures.architecture(), tmp_path / "a.png")
    figures.save(figures.architecture(), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    stored = ROOT / "figures" / "architecture.png"
    assert pixels(stored).shape[1] == look.WIDTH * look.DPI
    assert np.array_equal(pixels(stored), pixels(tmp_path / "a.png")), (
        "run python -m stamp_core.figures"
    )


def pixels(path: Path) -> np.ndarray:
    """The picture at `path`; its bytes depend on how zlib was built."""
    with Image.open(path) as picture:
        return np.asarray(picture)


# --- the plane


@pytest.mark.parametrize("rows", [TWO, THREE])
@pytest.mark.parametrize(
    "choices", [{}, {"kappa": 1.5}, {"reference": "half"}, {"length": "reference"}]
)
def test_arrows_end_where_the_mathematics_says(rows, choices):
    found = tips(figures.plane(rows, Matching(**choices)).axes[0])
    for place, row in enumerate(rows, start=1):
        assert found[f"$g_{place}$"] == pytest.approx(row)
    assert found["$d$"] == pytest.approx(matched(rows, **choices))
    half = (np.mean(rows[:-1], axis=0) + rows[-1]) / 2
    reference = half if "reference" in choices else np.mean(rows, axis=0)
    assert found["$g_0$"] == pytest.approx(reference)


@pytest.mark.parametrize(("normalise", "length"), [("mean", None), ("current", np.hypot(0.3, 1.2))])
def test_normalised_rows_are_drawn_as_they_are_matched(normalise, length):
    found = tips(figures.plane(THREE, Matching(normalise=normalise)).axes[0])
    norms = np.linalg.norm(THREE, axis=1)
    for place, row in enumerate(THREE, start=1):
        expected = np.array(row) / norms[place - 1] * (length or norms.mean())
        assert found[f"$g_{place}$"] == pytest.approx(expected)
    assert found["$d$"] == pytest.approx(matched(THREE, normalise=normalise))


@pytest.mark.parametrize("kappa", [0.5, 1.2])
def test_the_ball_is_around_the_reference_and_the_free_direction_on_it(kappa):
    axis = figures.plane(TWO, Matching(kappa)).axes[0]
    (ball,) = [each for each in axis.patches if isinstance(each, Circle)]
    reference = np.mean(TWO, axis=0)
    assert ball.center == pytest.approx(reference)
    assert ball.radius == pytest.approx(kappa * np.linalg.norm(reference))
    (dots,) = [each for each in axis.collections if each.get_label() == "d, length free"]
    free = np.asarray(dots.get_offsets())[0]
    assert np.linalg.norm(free - reference) == pytest.approx(ball.radius)
    assert free == pytest.approx((1 + kappa) * tips(axis)["$d$"])


def test_the_hull_joins_the_gradients_and_half_planes_end_across_them():
    axis = figures.plane(THREE, Matching()).axes[0]
    (hull,) = [each for each in axis.patches if each.get_label() == "hull of the $g_i$"]
    assert hull.get_xy()[:3] == pytest.approx(np.array(THREE))
    borders = [line for line in axis.lines if line.get_linestyle() == ":"]
    for line, row in zip(borders, THREE, strict=True):
        assert line.get_xy1() == (0, 0)
        assert np.dot(line.get_xy2(), row) == pytest.approx(0)


def test_the_caption_has_the_numbers():
    figure = figures.plane(OPPOSED, Matching())
    d = matched(OPPOSED)
    least = min(np.dot(row, d) for row in OPPOSED)
    assert f"= {least:.3g}," in caption(figure)
    assert f"{np.linalg.norm(d):.3g}" in caption(figure)
    assert "gap < 1e-08" in caption(figure) and "status: exact" in caption(figure)


# --- the dual


def test_bounds_meet_where_the_exact_solver_ends_and_nowhere_else():
    axis = figures.plane(TWO, Matching()).axes[1]
    found = lines(axis)
    upper, lower = (found[name].get_ydata() for name in ("F(w)", "min ⟨$g_i$, d(w)⟩"))
    assert (lower <= upper + 1e-12).all()
    ((x, y),) = found["exact"].get_xydata()
    _, exact = match(torch.tensor(TWO), Matching())
    assert x == pytest.approx(float(exact.weights[0, 0]))
    assert y == pytest.approx(upper.min(), abs=1e-4) and y <= upper.min()
    touching = np.flatnonzero(upper - lower < 0.005)
    assert abs(found["F(w)"].get_xdata()[touching] - x).max() < 0.02


def test_softmax_ends_are_those_of_the_public_code():
    found = lines(figures.plane(TWO, Matching()).axes[1])
    for name, changes in matches.SOLVERS.items():
        _, ended = match(torch.tensor(TWO, dtype=torch.float64), Matching(**changes))
        assert found[name].get_xdata()[0] == pytest.approx(float(ended.weights[0, 0]))


def test_three_weights_are_a_place_in_the_triangle():
    axis = figures.plane(THREE, Matching(1.0)).axes[1]
    _, exact = match(torch.tensor(THREE, dtype=torch.float64), Matching(1.0))
    expected = exact.weights[0].numpy() @ matches.CORNERS
    assert lines(axis)["exact"].get_xydata()[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    "rows",
    [[[1, 0], [-1, 0]], [[1, 0], [1, 0]], [[0, 0], [1, 0]], [[0, 0], [0, 0]], [[1, 0]] * 3],
)
@pytest.mark.filterwarnings("error")
def test_what_has_no_answer_is_drawn_too(rows):
    figures.plane(rows, Matching(1.0, normalise="mean")).draw_without_rendering()


# --- in numbers


def test_only_a_wide_ball_serves_everybody():
    table = figures.products(OPPOSED, {str(kappa): Matching(kappa) for kappa in (0.5, 1.0, 1.5)})
    least = table[["⟨g1, d⟩", "⟨g2, d⟩"]].astype(float).min(axis=1)
    assert least["0.5"] < 0 <= min(least["1.0"], least["1.5"])
    assert set(table["gap / |g0|²"]) == {"< 1e-08"}


def test_a_short_row_has_the_weight_until_rows_are_scaled():
    rows, choices = [[2.0, 0.2], [1.5, -0.9], [-0.1, 0.3]], ("none", "mean")
    table = figures.products(rows, {each: Matching(normalise=each) for each in choices})
    assert table["w"]["none"] == "0.00, 0.00, 1.00" != table["w"]["mean"]
    assert float(table["cos(d, g0)"]["none"]) < float(table["cos(d, g0)"]["mean"])


def test_two_equal_lengths_leave_the_direction_of_the_mean():
    rows = [[1.0, 0.0], [-0.6, 0.8]]
    table = figures.products(rows, {str(kappa): Matching(kappa) for kappa in (0.2, 0.9, 1.5)})
    assert set(table["cos(d, g0)"]) == {"1.000"} and set(table["w"]) == {"0.50, 0.50"}


def test_a_step_of_length_zero_has_no_direction():
    stuck = [[2.0, 0.0], [-0.5, 0.8], [-0.5, -0.8]]
    row = figures.products(stuck, {"wide": Matching(1.0)}).loc["wide"]
    assert row["cos(d, g0)"] == tables.DASH and row["|d| / |g0|"] == "0.000"
    assert [row[f"⟨g{place}, d⟩"] for place in (1, 2, 3)] == ["0.000"] * 3


def test_a_gap_that_is_left_is_said():
    rows = [[1.6, 0.4], [-1.1, 0.6]]
    table = figures.products(rows, {"public code": Matching(solver="authors")})
    assert table["gap / |g0|²"].iloc[0].startswith("= ")


def test_identical_rows_change_nothing_but_the_length():
    lengths = {"free": 1.5, "1+kappa": 1, "1+kappa^2": 1.2, "reference": 1, "current": 1}
    choices = {length: Matching(length=length) for length in lengths}
    table = figures.products([[1.0, 0.5]] * 2, choices)
    assert set(table["cos(d, g0)"]) == {"1.000"}
    assert table["|d| / |g0|"].astype(float).tolist() == pytest.approx([*lengths.values()])


# --- the solvers


def test_solvers_show_the_median_gap_and_the_range():
    figure = figures.solvers(counts=(2, 4), spreads=(0.0, 1.0), instances=3)
    left, right = figure.axes
    problems = matches._problems(4, 0.0, 3)
    for name, changes in matches.SOLVERS.items():
        gaps = [max(solve(each, Matching(**changes)).gap, matches.FLOOR) for each in problems]
        assert lines(left)[name].get_ydata()[1] == pytest.approx(np.median(gaps))
    assert lines(right)["exact"].get_xdata().tolist() == [0.0, 1.0]
    assert left.get_yscale() == right.get_yscale() == "log"
    assert "n = 3 draws" in caption(figure)


def test_random_rows_are_the_same_draws_every_time_with_lengths_that_spread():
    same, again = (matches._problems(10, 1.0, 2) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(same, again, strict=True))
    assert not torch.equal(*same)
    lengths = [g.diagonal(dim1=1, dim2=2).sqrt().log().std() for g in matches._problems(50, 1.0, 4)]
    assert 0.8 < float(torch.stack(lengths).mean()) < 1.2


# --- controls


def controls(widget):
    """Every control by its description, and the picture."""
    panel, picture = widget.children
    found = [control for column in panel.children for control in column.children]
    return {control.description: control for control in found}, picture


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gradients", 3),
        ("kappa", 1.2),
        ("angle 1", 40),
        ("norm 2", 0.5),
        ("reference", "current"),
        ("normalise", "current"),
        ("length", "free"),
    ],
)
def test_a_control_draws_anew(name, value):
    found, picture = controls(figures.explore())
    before = picture.value
    found[name].value = value
    assert picture.value not in (before, b"")
    chosen = {each: control.value for each, control in found.items()}
    assert chosen[name] == value
    assert picture.value == widgets.drawn(chosen)
    assert not plt.get_fignums()


def test_the_picture_shows_what_the_controls_say(monkeypatch):
    seen = []
    plane = widgets.plane
    monkeypatch.setattr(widgets, "plane", lambda *given: seen.append(given) or plane(*given))
    found, _ = controls(figures.explore())
    found["angle 1"].value, found["norm 1"].value = 90, 2.0
    rows, matching = seen[-1]
    assert len(rows) == 2 and rows[0] == pytest.approx([0.0, 2.0])
    assert matching == Matching()


def test_every_choice_of_a_menu_can_be_drawn():
    found, _ = controls(figures.explore())
    for name in widgets.MENUS:
        for option in found[name].options:
            found[name].value = option
    assert "weighted" not in found["reference"].options
