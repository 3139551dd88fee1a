"""Figures as text: lines, points and labels, from records made by hand.

`python tests/report/test_figures.py` writes them. Positions after layout are left out.
"""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_records
import matplotlib.pyplot as plt
import numpy as np
import pytest
from made_records import three_seeds
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from PIL import Image

from workbench.report import figures, tables
from workbench.report.figures import analyses, style
from workbench.report.tables.page import write_parts

DRAWN = Path(__file__).parent / "drawn"


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


CAPTIONS = {"kappa": ("radius κ", "2"), "other": ("other", ""), "server_lr": ("η_g", "1.0")}
DRAW: dict[str, Callable[[], Figure]] = {  # those that are stored
    "accuracy": lambda: figures.accuracy(made_records.compared()),
    "gap": lambda: figures.gap(made_records.compared()),
    "sensitivity": lambda: figures.sensitivity(made_records.sensitive(), CAPTIONS),
}


def numbers(values: Any) -> str:
    """Numbers with four figures; a dash for what is masked or undefined."""
    flat = np.ma.filled(np.ma.asarray(values, dtype=float).ravel(), np.nan)
    return " ".join("-" if np.isnan(value) else f"{value + 0:.4g}" for value in flat)


def as_text(figure: Figure) -> str:
    return "\n".join(line.rstrip() for part in describe(figure) for line in part.split("\n"))


def describe(figure: Figure) -> Iterator[str]:
    yield figure.get_suptitle()
    for legend in figure.legends:
        yield legend.get_title().get_text()
        yield "legend: " + ", ".join(text.get_text() for text in legend.get_texts())
    for axis in figure.axes:
        yield from describe_panel(axis)


def describe_panel(axis: Axes) -> Iterator[str]:
    yield f"panel {axis.get_title()!r}"
    for name, each in {"x": axis.xaxis, "y": axis.yaxis}.items():
        scale = f"{each.get_scale()} {numbers(each.get_view_interval())}"
        fixed = isinstance(each.get_major_locator(), FixedLocator)
        ticks = [label.get_text() for label in each.get_ticklabels()] if fixed else ""
        yield f"  {name}: {each.get_label_text()!r} {scale} {ticks}"
    for line in axis.lines:
        look = f"{to_hex(line.get_color())} {line.get_marker()} {line.get_linestyle()}"
        yield f"  line {line.get_label()!r} {look}: {numbers(line.get_xydata())}"
    for each in axis.collections:
        if isinstance(each, LineCollection):
            yield f"  interval: {numbers(each.get_segments())}"
        else:
            colours = sorted({to_hex(colour) for colour in each.get_facecolor()})
            yield f"  points {' '.join(colours)}: {numbers(each.get_offsets())}"
    if axis.texts:
        yield f"  texts: {[text.get_text() for text in axis.texts]}"


def write_drawn(folder: Path) -> None:
    for name, draw in DRAW.items():
        write_parts(folder / f"{name}.txt", [as_text(draw())])
        plt.close("all")


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_is_as_stored(name):
    assert as_text(DRAW[name]()) + "\n" == (DRAWN / f"{name}.txt").read_text("utf-8")


def test_a_row_is_the_difference_of_the_tables_and_far_ones_are_numbers():
    records = [r for r in made_records.compared() if r.run[0] == "toy"]
    figure = figures.differences(records)
    pairs = tables.differences(records, "replay")
    pairs = pairs[pairs.measure == "final accuracy"].set_index(["method", "model"])
    pairs = pairs.sort_values("difference")
    axis, names = figure.axes[0], [label.get_text() for label in figure.axes[0].get_yticklabels()]
    bars = sorted(axis.containers, key=lambda bar: bar.lines[0].get_xdata()[0])
    dots = [bar.lines[0].get_xydata()[0] for bar in bars]
    drawn = {names[int(place)]: value for value, place in dots}
    is_near = pairs.difference.abs() <= 20
    near, far = pairs[is_near], pairs[~is_near].difference
    assert [*drawn.values()] == pytest.approx(near.difference.tolist())
    ends = np.array([bar.lines[2][0].get_segments()[0][:, 0] for bar in bars])
    assert ends == pytest.approx(near[["low", "high"]].to_numpy())
    assert axis.get_xlim() == (-20.5, 20.5)  # one interval goes on to both sides
    assert [text.get_text() for text in axis.texts] == [f"◂ {value:.1f}" for value in far]
    assert drawn["fedala (personal)"] == near.difference["fedala", "personal"] == dots[-1][0]
    assert names[:2] == ["methods", "fedala (personal)"]


def test_gains_over_replay_are_of_methods_near_it_and_paired_by_seed():
    accuracy, forgetting, gain = figures.rounds(made_records.longer()).axes
    drawn = {line.get_label(): line.get_xydata() for line in accuracy.lines}
    assert drawn["joint"] == pytest.approx(np.array([[2, 51], [10, 90]]))
    assert len(drawn) == len(forgetting.lines) == 3
    (near,) = [line for line in gain.lines if not line.get_label().startswith("_")]
    assert near.get_label() == "stamp"
    assert near.get_xydata() == pytest.approx(np.array([[2, 0], [10, 3]]))


@pytest.mark.parametrize(
    ("methods", "base"), [("fedavg replay joint", "replay"), ("a fedavg", "fedavg")]
)
def test_differences_are_from_replay_or_else_from_fedavg(methods, base):
    records = [record for name in methods.split() for record in three_seeds(name)]
    figure = figures.differences(records)
    assert figure.get_suptitle() == f"Accuracy compared with {base}"
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == (["reference", "joint"] if "joint" in methods else []) + [
        "methods",
        "fedavg" if base == "replay" else "a",
    ]


BYTES: dict[str, Callable[[], Figure]] = {
    "accuracy": DRAW["accuracy"],
    "differences": lambda: figures.differences(made_records.compared()),
    "ablation": lambda: figures.ablation(made_records.ablated()),
    "features": lambda: figures.features([made_records.with_features(spread=0.7)], "toy", "A$~"),
}


@pytest.mark.parametrize("name", BYTES)
def test_equal_data_give_equal_bytes(name, tmp_path):
    figure = BYTES[name]()
    figures.save(figure, tmp_path / "new" / "a.png")
    figures.save(figure, tmp_path / "b.png")  # the same figure again
    figures.save(BYTES[name](), tmp_path / "c.png")
    first = (tmp_path / "new" / "a.png").read_bytes()
    assert (tmp_path / "b.png").read_bytes() == (tmp_path / "c.png").read_bytes() == first
    with Image.open(tmp_path / "b.png") as image:
        assert not {"Software", "Creation Time", "date"} & set(image.info)
        assert image.width == style.WIDTH * style.DPI


def test_a_full_disk_leaves_the_old_figure_and_the_old_page(tmp_path, monkeypatch):

    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    png, page = tmp_path / "a.png", tmp_path / "a.md"
    figures.save(DRAW["accuracy"](), png)
    write_parts(page, ["old"])
    before = png.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"a\.png"):
        figures.save(DRAW["gap"](), png)
    with pytest.raises(OSError, match=r"a\.md"):
        write_parts(page, ["new"])
    assert (png.read_bytes(), page.read_text()) == (before, "old\n")
    assert sorted(tmp_path.iterdir()) == [page, png]


def test_an_experience_undefined_for_one_seed_has_no_mean():
    records = three_seeds(local=0.9)
    records[1].scores["local"][:, 0] = np.nan
    (line, *_) = figures.gap(records).axes[0].lines[1:]
    assert np.isnan(line.get_ydata()).tolist() == [True, False]


@pytest.mark.parametrize("draw", [figures.gap, figures.forgetting, figures.ablation])
def test_what_is_undefined_for_all_is_not_drawn(draw):
    records = three_seeds("stamp", params=made_records.MATCHED)
    for record in records:
        record.scores["global"][:, 0] = np.nan  # no accuracy after the first task
    figure = draw(records)
    assert not figure.axes[-1].collections and not figure.axes[-1].containers
    title = figure.legends[0].get_title().get_text()
    assert draw is figures.ablation or title.startswith("undefined for all methods")


def test_features_are_of_ten_classes_after_the_first_a_middle_and_the_last_task():
    record = made_records.with_features(classes=12, experiences=6)
    figure = figures.features([record], "toy", "abcdefghijkl")
    assert [axis.get_title() for axis in figure.axes] == [f"after task {k}" for k in (1, 3, 6)]
    dots = [sum(len(part.get_offsets()) for part in axis.collections) for axis in figure.axes]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert dots == [40, 40, 40] and names == [*"abcdefghij"]


def test_the_nearest_mean_leaves_out_the_image():
    labels = np.array([0, 0, 0, 1, 1, 2])
    vectors = np.array([[0.0], [0.2], [3.0], [4.0], [4.4], [9.0]])
    right = 0
    for place in range(5):  # class 2 has one image: no mean without it
        others = [[k for k in range(6) if labels[k] == c and k != place] for c in (0, 1)]
        means = [*(vectors[own].mean() for own in others), 9.0]
        right += int(np.argmin([abs(vectors[place, 0] - mean) for mean in means])) == labels[place]
    assert analyses._count_nearest_mean(vectors, labels) == (right, 5)
    assert right == 4  # the third is nearer to class 1


if __name__ == "__main__":
    write_drawn(DRAWN)
