"""Lines, points and labels of figures, from records made by hand."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import made_records
import numpy as np
import pytest
import small
from made_records import three_seeds
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from stamp_core.config.params import read_params, read_setting
from stamp_core.config.schema import Split
from stamp_core.data.loading import load_dataset
from stamp_core.data.split import make_plan
from stamp_core.results.records import Record
from workbench.report import figures, tables
from workbench.report.figures import analyses, style
from workbench.report.tables.page import write_parts

CAPTIONS = {"kappa": ("radius κ", "2"), "other": ("other", ""), "server_lr": ("η_g", "1.0")}


def compared(draw: Callable[[Sequence[Record]], Figure]) -> Figure:
    return draw(made_records.compared())


def lines(axis: Axes) -> dict[str, list[float]]:
    """What is drawn for each method."""
    shown = [line for line in axis.lines if not line.get_label().startswith("_")]
    return {line.get_label(): line.get_ydata().round(9).tolist() for line in shown}


def test_lines_are_means_and_points_are_seeds():
    toy, other = compared(figures.accuracy).axes
    assert lines(toy) == {
        **{"replay": [80, 65], "fedavg": [80, 55], "stamp": [80, 65]},
        **{"fedala (personal)": [100, 80], "local (personal)": [80, 35]},
    }
    assert lines(other) == {"fedavg": [80, 55]} and toy.get_ylim() == other.get_ylim()
    seeds = np.asarray(toy.collections[0].get_offsets()).round(9).tolist()
    assert seeds == [[1, 80], [2, 60], [1, 80], [2, 70], [1, 80], [2, 65]]
    toy, other = compared(figures.gap).axes
    assert lines(toy) == {"fedavg": [10, 20], "fedala": [10, 15]} and not lines(other)


def test_tasks_of_an_imported_plan_are_the_domains_that_it_names():
    setting = read_setting("glyphs_domains", read_params())
    dataset = load_dataset(setting.data)
    drawn = make_plan(setting.split, dataset, 0)
    imported = replace(drawn, split=Split("file", len(drawn.clients), drawn.tasks))
    shown = [
        [text.get_text() for axis in figures.schedule(plan, dataset).axes for text in axis.texts]
        for plan in (drawn, imported)
    ]
    assert shown[0] == shown[1] and any(dataset.domains[0] in text for text in shown[0])


def test_a_parameter_without_effect_looks_like_one():
    """All panels of a measure span as many points; values are in the order of the sweep."""
    figure = figures.sensitivity(made_records.sensitive(), CAPTIONS)
    means = [axis.lines[3].get_ydata().round(9).tolist() for axis in figure.axes]
    assert means == [[30, 50], [50], [40, 41], [50, 30], [30], [40, 39]]
    spans = np.diff([axis.get_ylim() for axis in figure.axes]).round(9)
    assert np.ptp(spans[:3]) == np.ptp(spans[3:]) == 0
    assert figure.axes[0].get_xlabel() == "spread: values 20.0, seeds 20.0"
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["10", "2"]
    preset = [axis.lines[4].get_xdata()[0] for axis in figure.axes if len(axis.lines) > 4]
    assert preset == [1, 1, 1, 1]  # of κ and of the step; "other" has none


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
    png, page = tmp_path / "a.png", tmp_path / "a.md"
    figures.save(compared(figures.accuracy), png)
    write_parts(page, ["old"])
    before = png.read_bytes()
    monkeypatch.setattr(os, "fsync", small.full)
    with pytest.raises(OSError, match=r"a\.png"):
        figures.save(compared(figures.gap), png)
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
