from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image

from stamp_core import config, figures, metrics, split
from stamp_core.config import Split
from stamp_core.figures import look
from stamp_core.records import Record

LETTERS = ("a", "b", "c", "d", "e", "f")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def run(
    method,
    seed,
    m,
    setting="toy",
    own=False,
    local=None,
    seconds=1.0,
    megabytes=1.0,
    group="federated",
):
    """A run of one client whose accuracy matrix is `m`; `local` is its accuracy after training."""
    m = np.asarray(m, dtype=float)
    tasks = m.shape[1]
    a = np.stack([m[:, None]] * 3)  # [scorings, S, U, T]
    nothing = np.full_like(a, np.nan)
    scores = {
        "global": nothing if own else a,
        "personal": a if own else nothing,
        "local": nothing if local is None else np.full_like(a, local),
        "initial": np.zeros((3, 1, tasks)),
    }
    history = [
        {
            "step": step,
            "round": round_,
            "loss": 1 / (1 + step + round_ + seed),
            "seconds": {"clients": seconds, "server": 0.0},
            "bytes": {"up": megabytes * 5e5, "down": megabytes * 5e5},
            "memory": {"process": 1, "gpu": 0},
            "disk": 0,
        }
        for step in range(len(m))
        for round_ in range(2)
    ]
    about = {
        **{"setting": {"name": setting}, "method": {"name": method}, "seed": seed},
        **{"group": group, "setup": {"down": 300, "up": 200, "seconds": 2.0}},
    }
    return Record(about, history, scores, np.full((1, tasks), 10), {})


def runs(method, shifts=(0.0, 0.1, 0.05), **rest):
    """Three seeds of two tasks: accuracies by step 0.5 and 0.4, each plus the seed's shift."""
    return [
        run(method, seed, np.array([[0.5, 0.1], [0.3, 0.5]]) + shift, **rest)
        for seed, shift in enumerate(shifts)
    ]


@pytest.fixture
def records():
    return [
        *runs("fedavg", local=0.9),
        *runs("replay", (0.2, 0.3, 0.2), local=0.9),
        *runs("local", own=True),
        *runs("fedavg", setting="other", local=0.9),
    ]


def images(classes=LETTERS, each=4, domains=("all",), channels=1):
    """Flat pictures, as bright as their class's place."""
    y = torch.arange(len(classes)).repeat_interleave(each * len(domains))
    d = torch.arange(len(domains)).repeat(each * len(classes))
    x = y.to(torch.uint8)[:, None, None, None].expand(-1, channels, 3, 3)
    return SimpleNamespace(
        name="flat",
        x_train=x,
        y_train=y,
        domain_train=d,
        y_test=y,
        domain_test=d,
        classes=tuple(classes),
        domains=domains,
        digest="0",
    )


def texts(axis):
    return [text.get_text() for text in axis.texts]


def named(axis):
    """Lines of methods; zero lines and tasks' borders have names that begin with `_`."""
    return {line.get_label(): line for line in axis.lines if line.get_label()[0] != "_"}


def caption(figure):
    return figure.legends[0].get_title().get_text()


def ticks(labels):
    return [label.get_text() for label in labels]


# --- style and files


def test_methods_look_different_and_alike_everywhere(monkeypatch):
    names = [f"method{place}" for place in range(60)]
    monkeypatch.setattr(config, "read", lambda: {"methods": dict.fromkeys([*names, "local"])})
    looks = [figures.style(name) for name in [*names, "local", "joint"]]
    assert len({(to_hex(look["color"]), look["marker"]) for look in looks}) == 62
    assert len({to_hex(look["color"]) for look in looks[:8]}) == 8
    assert len({(look["marker"], str(look["linestyle"])) for look in looks[:33]}) == 33  # in print
    assert figures.style("method7") == figures.style("method7")
    assert figures.style("no longer there") == figures.style("no longer there")


def test_a_control_takes_no_place(monkeypatch):
    monkeypatch.setattr(config, "read", lambda: {"methods": {"a": {}, "b": {}}})
    without = figures.style("b")
    monkeypatch.setattr(config, "read", lambda: {"methods": {"a": {}, "joint": {}, "b": {}}})
    assert figures.style("b") == without
    assert figures.style("joint")["color"] == "black"


@pytest.mark.parametrize("name", ["accuracy", "matrices", "cost"])
def test_save_gives_the_same_bytes(name, records, tmp_path):
    draw = getattr(figures, name)
    figure = draw(records)
    figures.save(figure, tmp_path / "new" / "a.png")
    figures.save(figure, tmp_path / "b.png")  # a second drawing of the same figure
    figures.save(draw(records), tmp_path / "c.png")
    first = (tmp_path / "new" / "a.png").read_bytes()
    assert (tmp_path / "b.png").read_bytes() == (tmp_path / "c.png").read_bytes() == first
    with Image.open(tmp_path / "b.png") as picture:
        assert not {"Software", "Creation Time", "date"} & set(picture.info)
        assert picture.width == look.WIDTH * look.DPI


# --- pictures and plans


def test_pictures_have_a_row_a_class():
    figure = figures.pictures(images(), per_class=3)
    left, right = figure.axes
    assert ticks(left.get_yticklabels()) == ["a", "b", "c"]
    assert ticks(right.get_yticklabels()) == ["d", "e", "f"]
    shown = np.asarray(left.images[0].get_array())
    assert shown.shape[:2] == (3 * 5, 3 * 5)
    assert shown[2, [2, 7, 12]].ravel().tolist() == [0, 0, 0]
    assert shown[7, 7] == 1 and shown[0, 0] == 255
    assert "6 classes, n = 24" in figure.get_suptitle()


def test_pictures_show_20_classes_in_colour_and_leave_gaps_white():
    many = images([*map(str, range(24)), "$"], each=1, channels=3)
    figure = figures.pictures(many, per_class=2)
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert shown.shape == (10 * 5, 2 * 5, 3)
    assert (shown[2, 2] == 0).all() and (shown[2, 7] == 255).all()
    assert sum(len(axis.get_yticks()) for axis in figure.axes) == 20
    assert "20 of 25 classes" in figure.get_suptitle()


def test_schedule_names_what_each_client_learns():
    data = images((*LETTERS[:5], "$"))
    plan = split.make(Split("classes", 3, 2, 2), data, 0)
    left, right = figures.schedule(plan, data).axes
    expected = [
        ", ".join(data.classes[label] for label in task.classes).replace("$", r"\$")
        for client in plan.clients
        for task in client
    ]
    assert texts(left) == expected
    held = [label for client in plan.clients for task in client for label in task.classes]
    counts = np.ma.filled(right.collections[0].get_array().reshape(6, 2), 0)
    assert counts.sum() == len(held)
    assert counts.sum(axis=1).tolist() == [held.count(label) for label in range(6)]
    assert ticks(right.get_yticklabels()) == [*LETTERS[:5], r"\$"]


def test_schedule_shades_what_some_client_met_before():
    data = images()
    plan = split.make(Split("classes", 2, 3, 2, order="disjoint"), data, 0)
    shade = figures.schedule(plan, data).axes[0].collections[0].get_array().reshape(2, 3)
    assert shade[:, 0].tolist() == [0, 0]
    met = set(plan.clients[0][0].classes) | set(plan.clients[1][0].classes)
    for client, row in zip(plan.clients, shade, strict=True):
        assert row[1] == len(met & set(client[1].classes)) / 2


def test_schedule_of_many_tasks_shows_when_a_class_is_met():
    data = images([f"class {place}" for place in range(80)], each=1)
    plan = split.make(Split("classes", 3, 39, 2), data, 0)
    figure = figures.schedule(plan, data)
    first, holders = (axis.collections[0].get_array() for axis in figure.axes[:2])
    first = np.ma.filled(first.reshape(3, 80), np.nan)
    for u, client in enumerate(plan.clients):
        for t, task in enumerate(client):
            assert (first[u, list(task.classes)] == t + 1).all()
    assert np.isnan(first).sum() == 3 * 2
    assert holders.reshape(39, 80).sum() == 3 * 39 * 2
    assert not figure.axes[0].texts


def test_schedule_of_domains_names_domains():
    data = images(domains=("photo", "sketch", "clip-art"))
    plan = split.make(Split("domains", 4, 2, cycles=2), data, 0)
    figure = figures.schedule(plan, data)
    expected = [data.domains[task.domain] for client in plan.clients for task in client]
    assert [text.replace("\n", "") for text in texts(figure.axes[0])] == expected
    assert figure.axes[1].get_ylabel() == "domain"
    assert "gone through 2 times" in figure.get_suptitle()


def test_shares_count_pictures_by_client_and_class():
    data = images(each=30)
    plan = split.make(Split("classes", 3, 2, 2, order="common", alpha=0.5), data, 0)
    axis = figures.shares(plan, data).axes[0]
    counts = np.ma.filled(axis.collections[0].get_array().reshape(3, 6), 0)
    learnt = [label for task in plan.clients[0] for label in task.classes]
    assert counts.sum(axis=0).tolist() == [30 * (label in learnt) for label in range(6)]
    own = sum(len(task.train) for task in plan.clients[1])
    assert counts[1].sum() == own
    assert texts(axis) == [f"{count:.0f}" for count in counts.ravel() if count]


# --- run records


def test_accuracy_draws_a_line_a_method_and_a_panel_a_setting(records):
    figure = figures.accuracy(records)
    toy, other = figure.axes
    assert (toy.get_title(), other.get_title()) == ("toy", "other")
    assert list(named(toy)) == ["fedavg", "replay", "local (personal)"]
    assert list(named(other)) == ["fedavg"]
    line = named(toy)["fedavg"]
    assert line.get_xdata().tolist() == [1, 2]
    assert line.get_ydata().tolist() == pytest.approx([55, 45])
    assert ticks(figure.legends[0].get_texts()) == ["fedavg", "replay", "local (personal)"]
    assert caption(figure).startswith("n = 3 seeds, band: 95 % interval of the mean")
    assert (toy.get_xlabel(), toy.get_ylabel()) == ("tasks learnt", "accuracy, %")


def test_the_band_is_the_interval(records):
    band = figures.accuracy(records).axes[0].collections[0]
    found = band.get_paths()[0].vertices
    middle, half = metrics.interval([50.0, 60.0, 55.0])  # after the first task
    first = found[found[:, 0] == 1, 1]
    assert first.min() == pytest.approx(middle - half)
    assert first.max() == pytest.approx(middle + half)


def test_one_seed_has_no_band():
    figure = figures.accuracy([run("fedavg", 0, [[0.5, 0.1], [0.3, 0.5]])])
    assert not figure.axes[0].collections
    assert caption(figure) == "n = 1 seed"


def test_unequal_numbers_of_seeds_are_named(records):
    assert caption(figures.accuracy(records[:8])).startswith("n = 2 to 3 seeds")


def test_accuracy_stays_in_what_is_possible():
    wide = [run("fedavg", seed, [[0.1 + 0.8 * seed]]) for seed in range(2)]
    low, high = figures.accuracy(wide).axes[0].get_ylim()
    assert low >= -3 and high <= 103


def test_a_method_has_one_colour_in_all_figures(records):
    colour = to_hex(figures.style("replay")["color"])
    curves, gaps = (figure.axes[0] for figure in (figures.accuracy(records), figures.gap(records)))
    assert to_hex(named(curves)["replay"].get_color()) == colour
    assert to_hex(named(gaps)["replay"].get_color()) == colour
    dots = [c for c in figures.forgetting(records).axes[0].collections if len(c.get_facecolor())]
    assert colour in {to_hex(each.get_facecolor()[0]) for each in dots}


def test_gap_leaves_out_methods_without_both_models(records):
    axis = figures.gap(records).axes[0]
    assert list(named(axis)) == ["fedavg", "replay"]
    local, learnt = 90, np.array([[50, 50], [60, 60], [55, 55]])
    assert named(axis)["fedavg"].get_ydata().tolist() == pytest.approx(
        (local - learnt).mean(axis=0).tolist()
    )
    assert [0, 0] in [list(line.get_ydata()) for line in axis.lines]
    assert axis.get_ylabel() == "percentage points"


def test_a_step_undefined_for_one_seed_has_no_mean():
    some = runs("fedavg", local=0.9)
    some[1].scores["local"][:, 0] = np.nan
    values = named(figures.gap(some).axes[0])["fedavg"].get_ydata()
    assert np.isnan(values).tolist() == [True, False]


def test_a_gap_that_no_method_has_is_said():
    figure = figures.gap(runs("joint"))
    assert not named(figure.axes[0])
    assert caption(figure) == "undefined for all methods here"


def test_forgetting_has_a_dot_a_seed_and_the_mean():
    figure = figures.forgetting([*runs("fedavg"), *runs("local", (0, 0.1, 0.4), own=True)])
    (axis,) = figure.axes
    dots = [c.get_offsets() for c in axis.collections if len(c.get_offsets()) == 3]
    assert [d[:, 0].tolist() for d in dots] == [pytest.approx([20] * 3)] * 2  # 0.5 - 0.3
    assert ticks(axis.get_yticklabels()) == ["fedavg", "local (personal)"]
    assert "lower is better" in figure.get_suptitle()
    assert "n = 3 seeds, bar: 95 % interval" in caption(figure)


def test_forgetting_bars_are_the_interval():
    drops = [0.1, 0.2, 0.4]
    some = [run("fedavg", s, [[0.5, 0], [0.5 - drop, 0.5]]) for s, drop in enumerate(drops)]
    (axis,) = figures.forgetting(some).axes
    middle, half = metrics.interval([10.0, 20.0, 40.0])
    (bar,) = [c for c in axis.collections if hasattr(c, "get_segments")]
    ends = bar.get_segments()[0][:, 0]
    assert ends.tolist() == pytest.approx([middle - half, middle + half])


def test_undefined_forgetting_draws_nothing():
    figure = figures.forgetting([run("fedavg", 0, [[0.5]]), run("fedavg", 1, [[0.6]])])
    assert not figure.axes[0].collections
    assert "undefined" in caption(figure)


def test_matrices_are_means_with_numbers_on_one_scale(records):
    figure = figures.matrices(records)
    toy = figure.axes[0]
    assert [axis.get_title() for axis in figure.axes[:4]] == [
        "fedavg",
        "replay",
        "local (personal)",
        "fedavg",
    ]
    expected = np.array([[55, 15], [35, 55]])
    assert np.asarray(toy.images[0].get_array()) == pytest.approx(expected)
    assert texts(toy) == ["55", "15", "35", "55"]
    assert {axis.images[0].get_clim() for axis in figure.axes[:4]} == {(0, 100)}
    assert toy.get_ylabel() == "toy" and figure.axes[3].get_ylabel() == "other"
    assert caption(figure).startswith("mean, n = 3 seeds")


def test_matrices_break_rows_and_drop_numbers_where_room_ends():
    large = [run(f"m{place}", 0, np.full((7, 7), 0.5)) for place in range(8)]
    figure = figures.matrices(large)
    shown = [axis for axis in figure.axes if axis.images]
    assert len(shown) == 8
    assert not any(map(texts, shown))


def test_undefined_accuracy_is_a_dash():
    m = [[0.5, np.nan], [0.3, 0.5]]
    assert texts(figures.matrices([run("fedavg", 0, m)]).axes[0]) == ["50", "\u2013", "30", "50"]


def test_cost_places_methods_by_both_prices():
    some = [
        *runs("fedavg", seconds=1, megabytes=2),
        *runs("replay", seconds=20, megabytes=4),
        *runs("local", own=True, seconds=1, megabytes=0),
    ]
    figure = figures.cost(some)
    left, right = figure.axes
    assert left.get_xscale() == "log" and right.get_xscale() == "linear"
    places = [c.lines[0].get_xydata()[0].tolist() for c in left.containers]
    assert places == [pytest.approx(each) for each in ([1, 45], [20, 45], [1, 45])]
    places = [c.lines[0].get_xydata()[0].tolist() for c in right.containers]
    assert places == [pytest.approx(each) for each in ([2, 45], [4, 45], [0, 45])]
    assert set(texts(right)) == {"fedavg", "replay", "local (personal)"}
    assert ticks(figure.legends[0].get_texts()) == ["fedavg", "replay", "local (personal)"]


def test_cost_keeps_a_place_for_nothing_sent():
    some = [run(str(mb), 0, [[0.5]], megabytes=mb) for mb in (0, 1, 100)]
    assert figures.cost(some).axes[1].get_xscale() == "symlog"


def test_names_of_points_do_not_overlap():
    some = [run(f"method{place}", 0, [[0.5 + place / 500]]) for place in range(12)]
    figure = figures.cost(some)
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) > 2
    assert all(box.count_overlaps(boxes) == 1 for box in boxes)  # with itself


def test_training_has_a_line_a_seed():
    some = runs("fedavg")
    some[0].history[0]["loss"] = None
    left, right = figures.training(some).axes
    losses = [line for line in left.lines if len(line.get_xdata()) == 4]
    assert [line.get_ydata()[1] for line in losses] == [1 / 2, 1 / 3, 1 / 4]
    assert np.isnan(losses[0].get_ydata()[0])
    assert len(left.lines) == 4  # and the border between the tasks
    assert [line.get_ydata().tolist() for line in right.lines] == [
        pytest.approx(each) for each in ([50, 40], [60, 50], [55, 45])
    ]


def test_training_is_about_one_cell(records):
    with pytest.raises(ValueError, match="one setting with one method"):
        figures.training(records)


# --- many methods


def crowd():
    """Eleven methods in three groups, one of them personalised with a model of each kind."""
    m = [[0.9, 0.0], [0.5, 0.7]]
    names = ["fedavg", "stamp", *"abcdefgh"]
    found = [run(name, 0, m, local=0.8, group="federated") for name in names]
    found[1].about["group"] = "continual"
    mine = run("mine", 0, m, local=0.8, group="personalised")
    mine.scores["personal"] = mine.scores["global"] / 2
    return [*found, mine]


def test_many_methods_have_a_panel_a_group_and_a_few_of_other_groups_faint():
    axes = figures.accuracy(crowd()).axes
    assert [axis.get_title() for axis in axes] == [
        "toy\nfederated",
        "toy\npersonalised",
        "toy\ncontinual",
    ]
    shown = [{line.get_label() for line in axis.lines if line.get_alpha() is None} for axis in axes]
    assert [len(names) for names in shown] == [9, 1, 1] and "mine (personal)" in shown[1]
    faint = [sum(line.get_alpha() == 0.5 for line in axis.lines) for axis in axes]
    assert faint == [1, 2, 1]  # stamp; fedavg and stamp; fedavg


def test_personalised_methods_are_shown_by_the_clients_own_models():
    axis = figures.accuracy(crowd()).axes[1]
    mine = next(line for line in axis.lines if line.get_label() == "mine (personal)")
    assert mine.get_ydata() == pytest.approx([45, 30])
    gap = figures.gap(crowd()).axes[1]
    assert "mine" in {line.get_label() for line in gap.lines}  # the global model's
