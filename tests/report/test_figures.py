"""Figures of images, plans and run records: the data they draw, from records made by hand."""

import errno
import os
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image
from stamp_core.report.tables.text import write_parts
from table_records import fake_record

from stamp_core.config.schema import Split
from stamp_core.data import split
from stamp_core.report import figures
from stamp_core.report.figures import style
from stamp_core.results import metrics

LETTERS = ("a", "b", "c", "d", "e", "f")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def runs(method, shifts=(0.0, 0.1, 0.05), **changes):
    """Three seeds with accuracies 0.5, then 0.3 and 0.5, each plus the shift of its seed."""
    return [
        fake_record(method, seed, (0.3 + shift, 0.5 + shift), (0.5 + shift, 0.1 + shift), **changes)
        for seed, shift in enumerate(shifts)
    ]


@pytest.fixture
def records():
    return [
        *runs("fedavg", local=0.9),
        *runs("replay", (0.2, 0.3, 0.2), local=0.9),
        *runs("local", personal_only=True),
        *runs("fedavg", setting="other", local=0.9),
    ]


def make_dataset(classes=LETTERS, each=4, domains=("all",), channels=1):
    """Images of one grey value, the place of their class."""
    y = torch.arange(len(classes)).repeat_interleave(each * len(domains))
    d = torch.arange(len(domains)).repeat(each * len(classes))
    x = y.to(torch.uint8)[:, None, None, None].expand(-1, channels, 3, 3)
    return SimpleNamespace(
        **{"name": "flat", "x_train": x, "y_train": y, "domain_train": d, "y_test": y},
        **{"domain_test": d, "classes": tuple(classes), "domains": domains, "digest": "0"},
        shape=tuple(x.shape[1:]),
    )


def texts(labels):
    return [label.get_text() for label in labels]


def curves(axis):
    """The lines of methods by label; other lines have labels that begin with `_`."""
    return {line.get_label(): line for line in axis.lines if line.get_label()[0] != "_"}


def caption(figure):
    return figure.legends[0].get_title().get_text()


# --- style


def test_methods_differ_and_are_the_same_everywhere(monkeypatch):
    names = [*style.HIGHLIGHTED, *(f"method{place}" for place in range(56))]
    monkeypatch.setattr(style, "read_params", lambda: {"methods": dict.fromkeys(names)})
    marks = [style.method_style(name) for name in names]
    assert len({(to_hex(each["color"]), each["marker"]) for each in marks}) == len(names)
    for key in ("color", "marker"):
        assert len({each[key] for each in marks[:8]}) == 8  # the highlighted ones, in print too
    assert style.method_style("gone") == style.method_style("gone") != style.method_style("lost")
    monkeypatch.setattr(style, "read_params", lambda: {"methods": {"method0": {}}})
    assert style.method_style("method0") == marks[8]  # highlighted ones take no place


def test_a_method_has_one_colour_in_all_figures(records):
    colour = to_hex(style.method_style("replay")["color"])
    for draw in (figures.accuracy, figures.gap):
        assert to_hex(curves(draw(records).axes[0])["replay"].get_color()) == colour
    for draw in (figures.forgetting, figures.cost):
        faces = [face for c in draw(records).axes[0].collections for face in c.get_facecolor()]
        assert colour in set(map(to_hex, faces))


def test_labels_keep_the_order_of_their_points_and_a_line_of_distance():
    figure, (axis,) = style.panels(1, height=4)
    values = [0.0, 0.50, 0.501, 0.502, 0.99, 1.0, np.nan]
    axis.plot(values)
    style.add_labels(axis, [style.Label(f"m{k}", 6, y, "k") for k, y in enumerate(values)])
    assert texts(axis.texts) == [f"m{k}" for k in range(6)]  # none for NaN
    heights = [text.xyann[1] for text in axis.texts]
    inches = np.diff(heights) * axis.get_window_extent().height / figure.dpi
    assert inches.min() >= style.LINE - 1e-9 and heights[0] >= 0 and heights[-1] <= 1
    assert texts(axis.texts)[0] == "m0" and heights[0] == pytest.approx(0.045, abs=0.02)


@pytest.mark.parametrize("name", ["accuracy", "matrices"])
def test_equal_data_give_equal_bytes(name, records, tmp_path):
    draw = getattr(figures, name)
    figure = draw(records)
    figures.save(figure, tmp_path / "new" / "a.png")
    figures.save(figure, tmp_path / "b.png")  # the same figure again
    figures.save(draw(records), tmp_path / "c.png")
    first = (tmp_path / "new" / "a.png").read_bytes()
    assert (tmp_path / "b.png").read_bytes() == (tmp_path / "c.png").read_bytes() == first
    with Image.open(tmp_path / "b.png") as image:
        assert not {"Software", "Creation Time", "date"} & set(image.info)
        assert image.width == style.WIDTH * style.DPI


def test_a_full_disk_leaves_the_old_figure_and_the_old_page(records, tmp_path, monkeypatch):
    """What is written stays a scratch file until it is on the disk."""

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    png, page = tmp_path / "a.png", tmp_path / "a.md"
    figures.save(figures.accuracy(records), png)
    write_parts(page, ["old"])
    before = png.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"a\.png"):
        figures.save(figures.accuracy_all(records), png)
    with pytest.raises(OSError, match=r"a\.md"):
        write_parts(page, ["new"])
    assert (png.read_bytes(), page.read_text()) == (before, "old\n")
    assert sorted(tmp_path.iterdir()) == [page, png]


# --- images and plans


def test_images_have_a_row_per_class():
    figure = figures.images(make_dataset(), images_per_class=3)
    left, right = figure.axes
    assert texts(left.get_yticklabels()) == ["a", "b", "c"]
    assert texts(right.get_yticklabels()) == ["d", "e", "f"]
    shown = np.asarray(left.images[0].get_array())
    assert shown.shape[:2] == (3 * 5, 3 * 5)
    assert shown[2, [2, 7, 12]].ravel().tolist() == [0, 0, 0]
    assert shown[7, 7] == 1 and shown[0, 0] == 255
    assert "6 classes, n = 24" in figure.get_suptitle()


def test_images_are_shown_without_their_masks():
    dataset = make_dataset(channels=2)
    dataset.shape = (1, 3, 3)
    dataset.x_train = dataset.x_train.clone()
    dataset.x_train[:, 1] = 200
    shown, _ = (axis.images[0].get_array() for axis in figures.images(dataset, 3).axes)
    assert np.asarray(shown).ndim == 2 and 200 not in np.asarray(shown)


def test_images_are_of_20_classes_in_colour_and_white_where_there_are_fewer():
    many = make_dataset([*map(str, range(24)), "$"], each=1, channels=3)
    many.y_train = many.y_train.clone()
    many.y_train[1] = 0  # no image of class 1
    figure = figures.images(many, images_per_class=2)
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert shown.shape == (10 * 5, 2 * 5, 3)
    assert (shown[2, 2] == 0).all() and (shown[2, 7] == 1).all()
    assert (shown[5:10] == 255).all() and (shown[12, 7] == 255).all()
    assert sum(len(axis.get_yticks()) for axis in figure.axes) == 20
    assert "20 of 25 classes" in figure.get_suptitle()


def test_the_schedule_names_what_each_client_learns():
    dataset = make_dataset((*LETTERS[:5], "$"))
    plan = split.make_plan(Split("classes", 3, 2, 2), dataset, 0)
    left, right = figures.schedule(plan, dataset).axes
    tasks = [task for client in plan.clients for task in client]
    expected = [", ".join(dataset.classes[label] for label in task.classes) for task in tasks]
    assert texts(left.texts) == [text.replace("$", r"\$") for text in expected]
    held = [label for task in tasks for label in task.classes]
    counts = np.ma.filled(right.collections[0].get_array().reshape(6, 2), 0)
    assert counts.sum(axis=1).tolist() == [held.count(label) for label in range(6)]
    assert texts(right.get_yticklabels()) == [*LETTERS[:5], r"\$"]


def test_the_schedule_shades_what_some_client_met_before():
    dataset = make_dataset()
    plan = split.make_plan(Split("classes", 2, 3, 2), dataset, 0)
    shade = figures.schedule(plan, dataset).axes[0].collections[0].get_array().reshape(2, 3)
    assert shade[:, 0].tolist() == [0, 0]
    met = set(plan.clients[0][0].classes) | set(plan.clients[1][0].classes)
    for client, row in zip(plan.clients, shade, strict=True):
        assert row[1] == len(met & set(client[1].classes)) / 2


def test_the_schedule_of_many_tasks_shows_when_a_class_is_met_first():
    dataset = make_dataset([f"class {place}" for place in range(80)], each=1)
    plan = split.make_plan(Split("classes", 3, 39, 2), dataset, 0)
    figure = figures.schedule(plan, dataset)
    first, holders = (axis.collections[0].get_array() for axis in figure.axes[:2])
    first = np.ma.filled(first.reshape(3, 80), np.nan)
    for u, client in enumerate(plan.clients):
        for t, task in enumerate(client):
            assert (first[u, list(task.classes)] == t + 1).all()
    assert np.isnan(first).sum() == 3 * 2
    assert holders.reshape(39, 80).sum() == 3 * 39 * 2
    assert not figure.axes[0].texts


def test_the_schedule_of_domains_names_domains():
    dataset = make_dataset(domains=("photo", "sketch", "clip-art"))
    plan = split.make_plan(Split("domains", 4, 2, cycles=2), dataset, 0)
    figure = figures.schedule(plan, dataset)
    expected = [dataset.domains[task.domain] for client in plan.clients for task in client]
    assert [text.replace("\n", "") for text in texts(figure.axes[0].texts)] == expected
    assert figure.axes[1].get_ylabel() == "domain"
    assert "repeated 2 times" in figure.get_suptitle()


def test_shares_count_images_by_client_and_class():
    dataset = make_dataset(each=30)
    plan = split.make_plan(Split("classes", 3, 2, 2, order="common", alpha=0.5), dataset, 0)
    axis = figures.shares(plan, dataset).axes[0]
    counts = np.ma.filled(axis.collections[0].get_array().reshape(3, 6), 0)
    learnt = [label for task in plan.clients[0] for label in task.classes]
    assert counts.sum(axis=0).tolist() == [30 * (label in learnt) for label in range(6)]
    assert counts[1].sum() == sum(len(task.train) for task in plan.clients[1])
    assert texts(axis.texts) == [f"{count:.0f}" for count in counts.ravel() if count]


# --- run records


def test_accuracy_has_a_panel_per_setting_and_a_labelled_mean_per_method(records):
    figure = figures.accuracy(records)
    toy, other = figure.axes
    assert (toy.get_title(), other.get_title()) == ("toy", "other")
    assert list(curves(toy)) == ["fedavg", "replay", "local (personal)"]
    assert set(texts(toy.texts)) == set(curves(toy)) and list(curves(other)) == ["fedavg"]
    line = curves(toy)["fedavg"]
    assert line.get_xdata().tolist() == [1, 2]
    assert line.get_ydata().tolist() == pytest.approx([55, 45])
    seeds = toy.collections[0].get_offsets()
    assert sorted(seeds[seeds[:, 0] == 1, 1]) == pytest.approx([50, 55, 60])
    assert caption(figure).startswith("n = 3 seeds; (personal)")
    assert (toy.get_xlabel(), toy.get_ylabel()) == ("tasks learnt", "accuracy, %")
    assert caption(figures.accuracy(records[:8])).startswith("n = 2 to 3 seeds")
    assert caption(figures.accuracy(records[:1])).startswith("n = 1 seed;")


def crowd():
    """Twelve methods, one of them personalised, with personal models half as good."""
    names = ["fedavg", "stamp", *(f"m{place}" for place in range(9))]
    records = [fake_record(name, local=0.8) for name in names]
    mine = fake_record("mine", local=0.8, group="personalised")
    mine.scores["personal"] = mine.scores["global"] / 2
    return [mine, *records]


def test_of_many_methods_eight_have_names_and_the_highlighted_come_first():
    axis = figures.accuracy(crowd()).axes[0]
    assert len(curves(axis)) == 8 and {"fedavg", "stamp", "m5"} <= set(curves(axis))
    grey = [line for line in axis.lines if line.get_label() == "_context"]
    assert len(grey) == 4 and {line.get_color() for line in grey} == {"0.85"}


def test_accuracy_all_has_a_panel_per_method_with_the_others_in_grey():
    records = [*crowd(), fake_record("fedavg", setting="other")]
    figure = figures.accuracy_all(records)
    titles = [axis.get_title() for axis in figure.axes]
    assert len(titles) == 13 and titles[-1] == "fedavg" and "mine (personal)" in titles
    for axis in figure.axes[:12]:
        assert list(curves(axis)) == [axis.get_title()] and len(axis.lines) == 12
    assert figure.axes[0].get_ylabel() == "toy" and figure.axes[-1].get_ylabel() == "other"
    assert len(figure.axes[-1].lines) == 1


def test_personalised_methods_are_shown_by_their_personal_models():
    axis = figures.accuracy(crowd()[:3]).axes[0]
    assert curves(axis)["mine (personal)"].get_ydata() == pytest.approx([40, 25])
    assert "mine" in curves(figures.gap(crowd()[:3]).axes[0])  # by the global model


def test_gap_leaves_out_methods_without_both_models(records):
    axis = figures.gap(records).axes[0]
    assert list(curves(axis)) == ["fedavg", "replay"]
    assert curves(axis)["fedavg"].get_ydata().tolist() == pytest.approx([90 - 55, 90 - 55])
    assert [0, 0] in [list(line.get_ydata()) for line in axis.lines]
    assert axis.get_ylabel() == "percentage points"
    figure = figures.gap(runs("joint"))
    assert not curves(figure.axes[0]) and caption(figure).startswith("undefined for all methods")


def test_an_experience_undefined_for_one_seed_has_no_mean():
    records = runs("fedavg", local=0.9)
    records[1].scores["local"][:, 0] = np.nan
    values = curves(figures.gap(records).axes[0])["fedavg"].get_ydata()
    assert np.isnan(values).tolist() == [True, False]


def test_forgetting_has_a_point_per_seed_and_the_mean_with_its_interval():
    drops = [0.1, 0.2, 0.4]
    records = [fake_record("fedavg", s, (0.5 - d, 0.5), (0.5, 0)) for s, d in enumerate(drops)]
    figure = figures.forgetting([*records, *runs("local", personal_only=True)])
    (axis,) = figure.axes
    points = [c.get_offsets() for c in axis.collections if len(c.get_offsets()) == 3]
    assert [p[:, 0].tolist() for p in points] == [
        pytest.approx([10, 20, 40]),
        pytest.approx([20] * 3),
    ]
    middle, half = metrics.confidence_interval([10.0, 20.0, 40.0])
    bar = next(c for c in axis.collections if hasattr(c, "get_segments"))
    ends = bar.get_segments()[0][:, 0]
    assert ends.tolist() == pytest.approx([middle - half, middle + half])
    assert texts(axis.get_yticklabels()) == ["fedavg", "local (personal)"]
    assert "lower is better" in figure.get_suptitle() and "95 % interval" in caption(figure)


def test_undefined_forgetting_draws_nothing():
    records = [fake_record("fedavg", seed) for seed in range(2)]
    for record in records:
        record.scores["global"][:, 1] = np.nan
    figure = figures.forgetting(records)
    assert not figure.axes[0].collections and "undefined" in caption(figure)


def test_matrices_are_means_with_numbers_on_one_scale(records):
    records[-1].scores["global"][:, 0, :, 1] = np.nan  # of setting `other`
    figure = figures.matrices(records)
    names = ["fedavg", "replay", "local (personal)", "fedavg"]
    assert [axis.get_title() for axis in figure.axes] == names
    shown = [axis.collections[0] for axis in figure.axes]
    assert np.asarray(shown[0].get_array()).ravel() == pytest.approx([55, 15, 35, 55])
    assert texts(figure.axes[0].texts) == ["55", "15", "35", "55"]
    assert {mesh.get_clim() for mesh in shown} == {(0, 100)}
    assert figure.axes[0].get_ylabel() == "toy" and figure.axes[3].get_ylabel() == "other"
    assert texts(figure.axes[3].texts) == ["55", "35", "55"]  # undefined: no number


def test_nearest_mean_joins_the_accuracies_of_head_and_features():
    """30 points apart; a method without a global model has none."""
    records = [*runs("fedavg"), *runs("local", personal_only=True)]
    (axis,) = figures.nearest_mean(records).axes
    ends = [line.get_xdata().tolist() for line in axis.lines]
    assert ends == [pytest.approx([45, 75]), pytest.approx([45]), pytest.approx([75])]
    assert texts(axis.get_yticklabels()) == ["fedavg"]


def test_cost_has_a_row_per_method_with_accuracy_images_and_bytes():
    slow = {"images": 20_000, "bytes": {"up": 2e6, "down": 2e6}}
    silent = {"bytes": {"up": 0, "down": 0}}
    records = [*runs("fedavg"), *runs("replay", rounds=[slow])]
    records += runs("local", personal_only=True, rounds=[silent])
    percent, images, sent = figures.cost(records).axes
    assert texts(percent.get_yticklabels()) == ["fedavg", "replay", "local (personal)"]
    marks = [dict(axis.collections[0].get_offsets()[:, ::-1].tolist()) for axis in (images, sent)]
    assert marks[0] == pytest.approx({0: 2, 1: 20, 2: 1})  # two rounds of 1000 images
    assert marks[1] == pytest.approx({0: 0.005, 1: 4, 2: 0})
    assert images.get_xscale() == sent.get_xscale() == "log" != percent.get_xscale()


def test_training_has_a_line_per_seed(records):
    rounds = [{"experience": e, "round": r, "loss": e + r} for e in range(2) for r in range(2)]
    seeds = runs("fedavg", rounds=rounds)
    seeds[0].history[0]["loss"] = None
    left, right = figures.training(seeds).axes
    losses = [[*line.get_ydata()] for line in left.lines if len(line.get_xdata()) == 4]
    assert [loss[1:] for loss in losses] == [[1, 1, 2]] * 3 and np.isnan(losses[0][0])
    assert len(left.lines) == 4  # and where the second task begins
    assert [line.get_ydata().tolist() for line in right.lines] == [
        pytest.approx(each) for each in ([50, 40], [60, 50], [55, 45])
    ]
    with pytest.raises(ValueError, match="one setting with one method"):
        figures.training(records)
