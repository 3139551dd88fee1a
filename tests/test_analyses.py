import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex

from stamp_core import config, figures, metrics, sweeps, tables
from stamp_core.data.glyphs import CHARACTERS
from stamp_core.figures import analyses
from stamp_core.records import Record

ANGLES = {"spatial update": 0.5, "spatial clients": 0.2, "update length": 2.0}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def run(method="fedavg", seed=0, setting="toy", rows=(), final=0.5, lost=0.2, tasks=2, **about):
    """Two rounds a task; `rows` are the angles of each round, `lost` what is forgotten."""
    m = np.full((tasks, tasks), final)
    m[:-1, :-1] += lost
    a = np.stack([m[:, None]] * 3)  # [scorings, S, U, T]
    nothing = np.full_like(a, np.nan)
    scores = {"global": a, "personal": nothing, "local": nothing}
    scores["initial"] = np.zeros((3, 1, tasks))
    history = [
        {
            **{"step": place // 2, "round": place % 2, "loss": 1.0, "answered": 4},
            "seconds": {"clients": 1.0, "server": 0.0},
            "bytes": {"up": 1.0, "down": 1.0},
            "memory": {"process": 1, "gpu": 0},
            "disk": 0,
            "angles": rows[place] if rows else {},
        }
        for place in range(2 * tasks)
    ]
    known = {"name": method, "kind": "fedavg", **about}
    whole = {
        **{"setting": {"name": setting}, "method": known, "seed": seed, "group": "federated"},
        "setup": {"down": 0, "up": 0, "seconds": 0.0},
    }
    return Record(whole, history, scores, np.full((1, tasks), 10), {})


def named(axis):
    return {line.get_label(): line for line in axis.lines if line.get_label()[0] != "_"}


def dotted(axis):
    return next(line for line in axis.lines if line.get_label() == "_reference").get_ydata()


def caption(figure):
    return figure.legends[0].get_title().get_text()


def shows(text):
    return [label.get_text() for label in text]


# --- angles


def test_space_is_the_mean_of_a_tasks_rounds_and_time_its_last_round():
    rows = [
        {"spatial update": 0.2, "spatial clients": 0.0},
        {"spatial update": 0.4, "spatial clients": -0.2},
        {"spatial update": 0.6, "spatial clients": 0.5, "temporal gradients": 0.9},
        {"spatial update": 0.8, "spatial clients": 0.7, "temporal gradients": -0.3},
    ]
    axes = figures.angles([run(rows=rows)]).axes
    update, clients, gradients, ways = (named(axis) for axis in axes[:4])
    assert update["fedavg"].get_ydata() == pytest.approx([0.3, 0.7])
    assert clients["fedavg"].get_ydata() == pytest.approx([-0.1, 0.6])
    assert gradients["fedavg"].get_ydata() == pytest.approx([np.nan, -0.3], nan_ok=True)
    assert not ways  # not noted: left out, not zero


def test_the_mean_over_seeds_has_its_interval():
    seeds = [run(seed=s, rows=[{**ANGLES, "spatial clients": c}] * 4) for s, c in enumerate([0, 1])]
    axis = figures.angles(seeds).axes[1]
    assert named(axis)["fedavg"].get_ydata() == pytest.approx([0.5, 0.5])
    half = metrics.interval([0.0, 1.0])[1]
    ends = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (ends.min(), ends.max()) == pytest.approx((0.5 - half, 0.5 + half))
    low, high = axis.get_ylim()
    assert low >= -1.05 and high <= 1.05  # an interval may leave what is possible


def test_many_methods_get_bars_beside_each_other_instead_of_bands():
    many = [
        run(f"m{k}", s, rows=[ANGLES] * 4, final=0.5 + 0.1 * s) for k in range(7) for s in (0, 1)
    ]
    for figure in (figures.angles(many), figures.accuracy(many)):
        axis = figure.axes[0]
        places = [tuple(line.get_xdata()) for line in named(axis).values()]
        assert len(set(places)) == 7
        assert len(axis.collections) == 7  # bars
        assert "bars: 95 %" in caption(figure)


def test_only_the_methods_asked_for_are_shown():
    many = [run(name, rows=[ANGLES] * 4) for name in "abc"]
    axis = figures.angles(many, ["c", "a", "not there"]).axes[0]
    assert list(named(axis)) == ["a", "c"]


def test_one_client_alone_has_no_angle_in_space():
    alone = run("joint", rows=[{"spatial update": 1.0, "update length": 1.0}] * 4)
    figure = figures.angles([run(rows=[ANGLES] * 4), alone])
    assert list(named(figure.axes[0])) == ["fedavg"]
    assert shows(figure.legends[0].get_texts()) == ["fedavg"]


def test_the_dotted_lines_are_what_chance_and_geometry_make_of_a_cosine():
    angles = {**ANGLES, "temporal gradients": 0.1}
    update, clients, gradients, ways = figures.angles([run(rows=[angles] * 8, tasks=4)]).axes[:4]
    assert shows(ways.texts) == ["not looked at"] and not gradients.texts
    assert dotted(update) == pytest.approx([4**-0.5] * 4)  # of 4 that answered
    assert dotted(clients) == pytest.approx([-1 / 3] * 4)
    assert dotted(gradients) == pytest.approx([np.nan, -1, -1 / 2, -1 / 3], nan_ok=True)
    rows = np.random.default_rng(0).normal(size=(4, 9))
    rows -= rows.mean(axis=0)  # they add up to nothing
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert (rows @ rows.T)[np.triu_indices(4, 1)].mean() >= -1 / 3 - 1e-9


def test_every_setting_has_its_row_of_angles_and_one_seed_no_band():
    figure = figures.angles([run(rows=[ANGLES] * 4), run(setting="other", rows=[ANGLES] * 4)])
    titles = [axis.get_title().split("\n")[0] for axis in figure.axes]
    assert titles == ["toy"] * 4 + ["other"] * 4
    assert not figure.axes[0].collections
    assert "n = 1 seed" in caption(figure) and "below 0 in conflict" in caption(figure)


def test_records_without_angles_are_said_to_have_none():
    figure = figures.angles([run()])
    assert not any(named(axis) for axis in figure.axes)
    assert "undefined for all methods here" in caption(figure)


# --- features


def described(method, classes=3, each=4, steps=2, seed=0, spread=0.1):
    """A run whose features are groups around one corner a class."""
    record = run(method, seed)
    labels = np.repeat(np.arange(classes), each)
    noise = np.random.default_rng(seed).normal(size=(steps, len(labels), classes))
    vectors = np.eye(classes)[labels] + spread * noise
    record.features.update(features=vectors.astype(np.float32), labels=labels)
    return record


def signs(axis):
    return [text.get_text() for text in axis.texts]


def test_features_have_a_row_a_method_and_a_sign_a_picture():
    records = [described("stamp"), described("fedavg"), described("fedavg", seed=1)]
    figure = figures.features(records, "toy", ["A", "$", "~"])
    assert [axis.get_ylabel() for axis in figure.axes] == ["fedavg", "", "stamp", ""]
    assert [axis.get_title() for axis in figure.axes[:2]] == ["after task 1", "after task 2"]
    assert signs(figure.axes[0]) == ["A"] * 4 + ["$"] * 4 + ["~"] * 4
    assert "12 test pictures" in figure.get_suptitle() and "seed 0" in figure.get_suptitle()
    axis = figure.axes[0]
    for text in axis.texts:  # every sign is inside its panel
        x, y = text.get_position()
        assert axis.get_xlim()[0] < x < axis.get_xlim()[1]
        assert axis.get_ylim()[0] < y < axis.get_ylim()[1]


def test_long_names_of_classes_are_numbers():
    figure = figures.features([described("fedavg")], "toy", ["cat", "dog", "x"])
    assert signs(figure.axes[0])[::4] == ["0", "1", "2"]


def test_20_classes_are_told_apart_by_sign_and_shown_at_three_moments(tmp_path):
    record = described("stamp", classes=20, each=2, steps=5)
    figure = figures.features([record], "toy", CHARACTERS[-20:])
    assert [axis.get_title() for axis in figure.axes] == [f"after task {t}" for t in (1, 3, 5)]
    axis = figure.axes[0]
    assert signs(axis)[::2] == list(CHARACTERS[-20:])
    assert len({to_hex(text.get_color()) for text in axis.texts}) == 8
    figures.save(figure, tmp_path / "any character can be drawn.png")


def test_equal_features_give_equal_bytes(tmp_path):
    for name in ("a.png", "b.png"):
        figure = figures.features([described("fedavg", each=8)], "toy", "ABC")
        figures.save(figure, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_missing_method_is_left_out_and_none_is_refused():
    assert len(figures.features([described("fedavg")], "toy", "ABC").axes) == 2
    with pytest.raises(ValueError, match="no features of fedavg, stamp on toy with seed 3"):
        figures.features([described("fedavg")], "toy", "ABC", seed=3)
    with pytest.raises(ValueError, match="no features"):
        figures.features([run("fedavg")], "toy", "ABC")


def test_features_of_a_dead_network_are_one_point():
    record = described("fedavg", spread=0)
    record.features["features"][:] = 1
    assert not analyses.embedded(record.features["features"][0]).any()


def test_the_nearest_mean_is_made_without_the_picture():
    labels = np.array([0, 0, 0, 1, 1, 2])
    vectors = np.array([[0.0], [0.2], [3.0], [4.0], [4.4], [9.0]])
    right = 0
    for place in range(5):  # class 2 has one picture: no mean without it
        means = [
            vectors[[k for k in range(6) if labels[k] == c and k != place]].mean() for c in (0, 1)
        ]
        distances = [abs(vectors[place, 0] - m) for m in (*means, 9.0)]
        right += int(np.argmin(distances)) == labels[place]
    assert analyses.nearest_mean(vectors, labels) == (right, 5)
    assert right == 4  # the third is nearer to class 1


def test_the_number_below_a_panel_is_that_of_the_features():
    record = described("fedavg", spread=0.7, each=9)
    figure = figures.features([record], "toy", "ABC")
    for axis, vectors in zip(figure.axes, record.features["features"], strict=True):
        right, n = analyses.nearest_mean(vectors, record.features["labels"])
        assert n == 27 and right > 9
        assert axis.get_xlabel() == f"nearest mean: {100 * right / 27:.0f} % of 27"


# --- sensitivity


def swept(finals, name="kappa"):
    """Three seeds for each value, 0.1 below to 0.1 above the value's accuracy."""
    return {
        value: [
            run(f"stamp-{name}-{value}", s, final=final + d) for s, d in enumerate((-0.1, 0, 0.1))
        ]
        for value, final in finals.items()
    }


def bars(axis):
    return {each.get_label(): each.lines[0].get_ydata() for each in axis.containers}


def test_sensitivity_shows_means_at_equal_distances_in_the_order_of_the_values():
    values = swept({"10": 0.3, "2": 0.5})
    figure = figures.sensitivity({"kappa": values}, {"kappa": ("radius κ", "2")})
    (axis,) = figure.axes
    assert axis.get_title() == "radius κ" and axis.get_xlabel() == "stamp"
    assert shows(axis.get_xticklabels()) == ["10", "2"]
    assert axis.get_xticks().tolist() == [0, 1]
    assert bars(axis)["accuracy"] == pytest.approx([30, 50])
    assert bars(axis)["forgetting"] == pytest.approx([20, 20])
    assert named(axis)["as in params.yaml"].get_xdata()[0] == 1
    assert "n = 3 seeds" in caption(figure)


def test_the_bars_of_sensitivity_are_intervals():
    (axis,) = figures.sensitivity({"a": swept({"1": 0.5})}, {"a": ("a", "")}).axes
    half = metrics.interval([40.0, 50.0, 60.0])[1]
    (segment,) = axis.containers[0].lines[2][0].get_segments()
    assert segment[:, 1] == pytest.approx([50 - half, 50 + half])
    assert "as in params.yaml" not in named(axis)


def test_the_servers_rate_has_a_second_panel_with_the_length_of_its_steps():
    values = swept({"0.5": 0.4, "1.0": 0.5}, "global_rate")
    for value, records in values.items():
        for row in (row for record in records for row in record.history):
            row["angles"] = {"update length": 3 * float(value) + (row["round"] - 0.5)}
    both = {"kappa": swept({"1": 0.5}), "global_rate": values, "z": swept({"1": 0.5})}
    labels = {"kappa": ("κ", ""), "global_rate": ("η_g", "1.0"), "z": ("z", "")}
    figure = figures.sensitivity(both, labels)
    assert [axis.get_title() for axis in figure.axes] == ["κ", "η_g", "η_g", "z"]
    lengths = bars(figure.axes[2])
    assert list(lengths) == [analyses.LENGTH]
    assert lengths[analyses.LENGTH] == pytest.approx([1.5, 3.0])
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim() == figure.axes[3].get_ylim()


def test_undefined_forgetting_is_not_drawn_as_zero():
    values = {"1": [run("stamp-a-1", s, tasks=1) for s in range(2)]}
    (axis,) = figures.sensitivity({"a": values}, {"a": ("a", "")}).axes
    assert np.isnan(bars(axis)["forgetting"]).all()
    assert bars(axis)["accuracy"] == pytest.approx([50])


def test_captions_name_the_value_that_changes_nothing(monkeypatch):
    params = config.read()
    block = params["tiny_sweeps"]["kappa"]
    params["tiny_sweeps"]["off"] = {**block, "values": [0.1, 0.2]}
    monkeypatch.setattr(config, "read", lambda: params)
    found = sweeps.captions("tiny_sweeps")
    kappa = params["methods"]["stamp"]["spatial"]["kappa"]
    assert found["kappa"] == (block["label"], str(kappa) if kappa in block["values"] else "")
    assert found["off"] == (block["label"], "")


# --- the ablation


MATCHED = {"kind": "stamp", "spatial": {"kappa": 0.5}, "temporal": {"kappa": 0.5}}


def variants(*names, **rest):
    """Three seeds of each, those of stamp's family with both matchings on."""
    return [
        run(
            name,
            s,
            final=0.5 + 0.05 * s,
            **rest,
            **({} if name in ("fedavg", "replay") else MATCHED),
        )
        for name in names
        for s in range(3)
    ]


def test_ablation_groups_variants_by_what_they_match():
    records = variants("stamp", "fedavg", "sam_tam_pcs", "replay", "stamp_gradients")
    records += [run("stamp_mean", s, kind="stamp", temporal={"kappa": 0.0}) for s in range(3)]
    axis = figures.ablation(records).axes[0]
    control, paper, choice = tables.PARTS.values()
    assert shows(axis.get_yticklabels()) == [
        *(control, "fedavg", "replay", "stamp_mean"),
        *(paper, "sam_tam_pcs"),
        *(choice, "stamp", "stamp_gradients"),
    ]
    heavy = [text.get_text() for text in axis.get_yticklabels() if text.get_weight() == "bold"]
    assert heavy == [control, paper, choice]


def test_ablation_draws_each_seed_and_the_mean_where_the_name_is():
    records = [*variants("fedavg", "stamp"), *variants("fedavg", setting="other")]
    figure = figures.ablation(records)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["toy\naccuracy", "other\naccuracy", "toy\nforgetting", "other\nforgetting"]
    axis = figure.axes[0]
    dots = {
        round(c.get_offsets()[0, 1] - 0.3): sorted(c.get_offsets()[:, 0].tolist())
        for c in axis.collections
        if len(c.get_offsets()) == 3
    }
    rows = {
        text.get_text(): y
        for text, y in zip(axis.get_yticklabels(), axis.get_yticks(), strict=True)
    }
    assert dots == {rows[name]: pytest.approx([50, 55, 60]) for name in ("fedavg", "stamp")}
    means = [c.lines[0].get_xydata()[0].tolist() for c in axis.containers]
    assert means == [pytest.approx([55, rows[name]]) for name in ("fedavg", "stamp")]
    lines = [
        line
        for line in axis.lines
        if len(set(line.get_xdata())) == 1 and len(line.get_xdata()) == 2
    ]
    assert [line.get_xdata()[0] for line in lines] == [pytest.approx(55)]  # stamp; no replay
    assert caption(figure).endswith("line: mean of stamp")


def test_ablation_leaves_out_what_is_undefined_and_does_with_one_seed():
    records = [run("stamp", tasks=1, **MATCHED), run("fedavg", tasks=1, step=1.5)]
    accuracy, forgetting = figures.ablation(records).axes
    assert "fedavg (step 1.5)" in shows(accuracy.get_yticklabels())
    assert len(accuracy.containers) == 2 and not forgetting.containers
    assert not forgetting.collections


@pytest.mark.parametrize("name", ["angles", "ablation"])
def test_save_gives_the_same_bytes(name, tmp_path):
    for file in ("a.png", "b.png"):
        records = variants("fedavg", "stamp", rows=[ANGLES] * 4)
        figures.save(getattr(figures, name)(records), tmp_path / file)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_no_angle_is_as_no_number():
    assert math.isnan(tables.step_length(run()))
    assert tables.step_length(run(rows=[ANGLES, {}, ANGLES, ANGLES])) == 2
