"""Figures behind the results: the data they draw, from records made by hand."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex
from table_records import fake_record

from stamp_core.data.sources.glyphs import CHARACTERS
from stamp_core.report import figures
from stamp_core.report.figures import analyses
from stamp_core.report.tables.ablation import PARTS
from stamp_core.results import metrics

ANGLES = {"spatial update": 0.5, "spatial clients": 0.2, "update length": 2.0}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def run(method="fedavg", seed=0, angles=(ANGLES,) * 4, **changes):
    """A run with two rounds per task; `angles` are those of each round."""
    rounds = [
        {"experience": place // 2, "round": place % 2, "completed": 4, "angles": each}
        for place, each in enumerate(angles)
    ]
    return fake_record(method, seed, rounds=rounds, **changes)


def curves(axis):
    return {line.get_label(): line for line in axis.lines if line.get_label()[0] != "_"}


def bound(axis):
    return next(line for line in axis.lines if line.get_label() == "_bound").get_ydata()


def caption(figure):
    return figure.legends[0].get_title().get_text()


def texts(labels):
    return [label.get_text() for label in labels]


# --- angles


def test_space_is_the_mean_of_a_tasks_rounds_and_time_its_last_round():
    angles = [
        {"spatial update": 0.2, "spatial clients": 0.0},
        {"spatial update": 0.4, "spatial clients": -0.2},
        {"spatial update": 0.6, "spatial clients": 0.5, "temporal gradients": 0.9},
        {"spatial update": 0.8, "spatial clients": 0.7, "temporal gradients": -0.3},
    ]
    axes = figures.angles([run(angles=angles)]).axes  # no column for what was not recorded
    update, clients, gradients = (curves(axis)["fedavg"].get_ydata() for axis in axes)
    assert update == pytest.approx([0.3, 0.7])
    assert clients == pytest.approx([-0.1, 0.6])
    assert gradients == pytest.approx([np.nan, -0.3], nan_ok=True)


def test_angles_are_means_over_seeds_of_the_chosen_methods():
    records = [run(name, angles=[ANGLES] * 4) for name in "abc"]
    records += [run("a", 1, angles=[{**ANGLES, "spatial clients": 1.0}] * 4)]
    axis = figures.angles(records, ["c", "a", "not there"]).axes[1]
    assert list(curves(axis)) == ["a", "c"]
    assert curves(axis)["a"].get_ydata() == pytest.approx([0.6, 0.6])
    seeds = axis.collections[0].get_offsets()[:, 1]
    assert sorted(seeds) == pytest.approx([0.2, 0.2, 1, 1])


def test_one_client_alone_has_no_angle_in_space():
    alone = run("joint", angles=[{"spatial update": 1.0, "update length": 1.0}] * 4)
    figure = figures.angles([run(), alone])
    assert list(curves(figure.axes[0])) == ["fedavg"]
    assert texts(figure.legends[0].get_texts()) == ["fedavg"]


def test_the_dotted_lines_are_what_orthogonality_and_geometry_give():
    """Of 4 clients, and of 2 tasks that are repeated in a second cycle."""
    angles = [{**ANGLES, "temporal gradients": 0.1}] * 8
    update, clients, gradients = figures.angles([run(angles=angles, cycles=2)]).axes
    assert bound(update) == pytest.approx([4**-0.5] * 4)
    assert bound(clients) == pytest.approx([-1 / 3] * 4)
    assert bound(gradients) == pytest.approx([np.nan, -1, -1, -1], nan_ok=True)
    vectors = np.random.default_rng(0).normal(size=(4, 9))
    vectors -= vectors.mean(axis=0)  # they add up to zero
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert (vectors @ vectors.T)[np.triu_indices(4, 1)].mean() >= -1 / 3 - 1e-9


def test_every_setting_has_its_row_of_angles():
    recorded = [{**ANGLES, "temporal gradients": 0.1}] * 4
    figure = figures.angles([run(angles=recorded), run(setting="other")])
    titles = [axis.get_title().split("\n")[0] for axis in figure.axes]
    assert titles == ["toy"] * 3 + ["other"] * 3
    assert texts(figure.axes[5].texts) == ["not recorded"]  # no zero
    assert "n = 1 seed" in caption(figure) and "below 0 conflicting" in caption(figure)
    figure = figures.angles([run(angles=[{}] * 4)])
    assert not any(curves(axis) for axis in figure.axes)
    assert "undefined for all methods here" in caption(figure)


# --- features


def described(method="fedavg", classes=3, each=4, experiences=2, seed=0, spread=0.1):
    """A run whose features are groups around one corner per class."""
    record = run(method, seed)
    labels = np.repeat(np.arange(classes), each)
    noise = np.random.default_rng(seed).normal(size=(experiences, len(labels), classes))
    vectors = np.eye(classes)[labels] + spread * noise
    record.features.update(features=vectors.astype(np.float32), labels=labels)
    return record


def test_features_have_a_row_per_method_and_a_sign_per_image():
    records = [described("stamp"), described("fedavg"), described("fedavg", seed=1)]
    figure = figures.features(records, "toy", ["A", "$", "~"])
    assert [axis.get_ylabel() for axis in figure.axes] == ["fedavg", "", "stamp", ""]
    assert [axis.get_title() for axis in figure.axes[:2]] == ["after task 1", "after task 2"]
    assert "12 test images" in figure.get_suptitle() and "seed 0" in figure.get_suptitle()
    axis = figure.axes[0]
    assert texts(axis.texts) == ["A"] * 4 + ["$"] * 4 + ["~"] * 4
    for sign in axis.texts:  # inside its panel
        x, y = sign.get_position()
        assert axis.get_xlim()[0] < x < axis.get_xlim()[1]
        assert axis.get_ylim()[0] < y < axis.get_ylim()[1]
    figure = figures.features([described()], "toy", ["cat", "dog", "x"])
    assert len(figure.axes) == 2 and texts(figure.axes[0].texts)[::4] == ["0", "1", "2"]


def test_20_classes_differ_by_sign_and_are_shown_after_three_tasks(tmp_path):
    record = described(classes=20, each=2, experiences=5)
    figure = figures.features([record], "toy", CHARACTERS[-20:])
    assert [axis.get_title() for axis in figure.axes] == [f"after task {t}" for t in (1, 3, 5)]
    axis = figure.axes[0]
    assert texts(axis.texts)[::2] == list(CHARACTERS[-20:])
    assert len({to_hex(sign.get_color()) for sign in axis.texts}) == 8
    figures.save(figure, tmp_path / "every character can be drawn.png")


def test_features_that_are_missing_are_refused():
    for setting, records in (("other", [described()]), ("toy", [run()])):
        with pytest.raises(ValueError, match=f"no features of fedavg or stamp on {setting}"):
            figures.features(records, setting, "ABC")


def test_features_of_a_dead_network_are_one_point():
    record = described(spread=0)
    record.features["features"][:] = 1
    axis = figures.features([record], "toy", "ABC").axes[0]
    assert {sign.get_position() for sign in axis.texts} == {(0, 0)}


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


def test_the_number_below_a_panel_is_that_of_its_features():
    record = described(spread=0.7, each=9)
    figure = figures.features([record], "toy", "ABC")
    for axis, vectors in zip(figure.axes, record.features["features"], strict=True):
        right, n = analyses._count_nearest_mean(vectors, record.features["labels"])
        assert n == 27 and right > 9
        assert axis.get_xlabel() == f"nearest mean: {100 * right / 27:.0f} % of 27"


# --- sensitivity


def swept(finals, name="kappa", length=2.0, seeds=(-0.1, 0, 0.1)):
    """Three seeds for each value, 0.1 below to 0.1 above the value's accuracy."""
    angles = [{**ANGLES, "update length": length}] * 4
    return [
        run("stamp", s, angles, final=(a + d, a + d), first=(0.8, 0.1), sweep=(name, value))
        for value, a in finals.items()
        for s, d in enumerate(seeds)
    ]


def test_sensitivity_has_a_column_per_sweep_with_the_seeds_at_each_value():
    records = [*swept({"10": 0.3, "2": 0.5}), *swept({"x": 0.5}, "other")]
    captions = {"kappa": ("radius κ", "2"), "other": ("other", "")}
    figure = figures.sensitivity(records, captions)
    accuracy, other, forgetting, _ = figure.axes
    assert accuracy.get_title() == "radius κ\nstamp" and other.get_title() == "other\nstamp"
    assert texts(accuracy.get_xticklabels()) == ["10", "2"]
    assert curves(accuracy)["preset"].get_xdata()[0] == 1 and "preset" not in curves(other)
    mean, lost = (
        next(li for li in a.lines if li.get_marker() != "None") for a in (accuracy, forgetting)
    )
    assert mean.get_xdata().tolist() == [0, 1] and mean.get_ydata() == pytest.approx([30, 50])
    assert lost.get_ydata() == pytest.approx([50, 30])
    seeds = accuracy.collections[0].get_offsets()
    assert sorted(seeds[seeds[:, 0] == 0, 1]) == pytest.approx([20, 30, 40])
    assert "n = 3 seeds" in caption(figure)


def test_the_y_axis_of_sensitivity_spans_the_data():
    records = swept({"1": 0.95, "2": 0.951}, seeds=(-0.002, 0, 0.002))
    axis = figures.sensitivity(records, {"kappa": ("κ", "")}).axes[0]
    low, high = axis.get_ylim()
    assert low > 94.6 and high < 95.5


@pytest.mark.parametrize(
    ("finals", "seeds", "text"),
    [
        ({"1": 0.5, "2": 0.51}, (-0.1, 0, 0.1), "values 1.0 < seeds 20.0"),
        ({"1": 0.5, "2": 0.9}, (-0.1, 0, 0.1), "values 40.0 ≥ seeds 20.0"),
        ({"1": 0.5, "2": 0.9}, (0,), ""),
        ({"1": 0.5}, (-0.1, 0, 0.1), ""),
    ],
)
def test_sensitivity_says_whether_values_differ_more_than_seeds(finals, seeds, text):
    records = swept(finals, seeds=seeds)
    assert figures.sensitivity(records, {"kappa": ("κ", "")}).axes[0].get_xlabel() == text


def test_the_server_learning_rate_has_a_column_with_the_length_of_updates():
    records = [*swept({"0.5": 0.4}, "server_lr", 1.5), *swept({"1.0": 0.5}, "server_lr", 3.0)]
    figure = figures.sensitivity(records, {"server_lr": ("η_g", "1.0")})
    assert [axis.get_ylabel() for axis in figure.axes] == [
        *("accuracy, %", "update length", "forgetting, points")
    ]
    (mean,) = (li for li in figure.axes[1].lines if li.get_marker() == "D")
    assert mean.get_ydata() == pytest.approx([1.5, 3.0])


# --- the ablation


MATCHED = {"kind": "stamp", "spatial": {"kappa": 0.5}, "temporal": {"kappa": 0.5}}


def variants(*names, **changes):
    """Three seeds of each; all but the controls match gradients."""
    return [
        fake_record(
            name, s, (0.4 + 0.05 * s, 0.6 + 0.05 * s), params=params, group="continual", **changes
        )
        for name in names
        for params in [{} if name in ("fedavg", "replay") else MATCHED]
        for s in range(3)
    ]


def test_the_ablation_groups_variants_by_what_they_match():
    records = variants("stamp", "fedavg", "sam_tam_pcs", "replay", "stamp_gradients")
    records += [fake_record("stamp_mean", params={"temporal": {"kappa": 0.0}})]
    records += [fake_record("fedavg_step", params={"server_lr": 1.5})]
    axis = figures.ablation(records).axes[0]
    control, paper, choice = PARTS.values()
    assert texts(axis.get_yticklabels()) == [
        *(control, "fedavg", "replay", "stamp_mean", "fedavg_step (server lr 1.5)"),
        *(paper, "sam_tam_pcs"),
        *(choice, "stamp", "stamp_gradients"),
    ]
    bold = [text.get_text() for text in axis.get_yticklabels() if text.get_weight() == "bold"]
    assert bold == [control, paper, choice]


def test_the_ablation_draws_each_seed_and_the_mean_with_its_interval_at_the_variant():
    records = [*variants("fedavg", "stamp"), *variants("fedavg", setting="other")]
    figure = figures.ablation(records)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["toy\naccuracy", "other\naccuracy", "toy\nforgetting", "other\nforgetting"]
    axis = figure.axes[0]
    places = dict(zip(texts(axis.get_yticklabels()), axis.get_yticks(), strict=True))
    seeds = [c.get_offsets() for c in axis.collections if len(c.get_offsets()) == 3]
    half = metrics.confidence_interval([50.0, 55.0, 60.0])[1]
    for name, points, bars in zip(("fedavg", "stamp"), seeds, axis.containers, strict=True):
        assert sorted(points[:, 0]) == pytest.approx([50, 55, 60])
        assert places[name] < points[0, 1] < places[name] + 0.5
        assert bars.lines[0].get_xydata()[0] == pytest.approx([55, places[name]])
        (ends,) = bars.lines[2][0].get_segments()
        assert ends[:, 0] == pytest.approx([55 - half, 55 + half])
    lines = [line.get_xdata()[0] for line in axis.lines if [*line.get_ydata()] == [0, 1]]
    assert lines == [pytest.approx(55)]  # of stamp; there is no replay
    assert caption(figure).endswith("lines: means of stamp")


def test_the_ablation_leaves_out_what_is_undefined():
    records = [fake_record("stamp", params=MATCHED), fake_record("fedavg")]
    for record in records:
        record.scores["global"][:, 0] = np.nan  # no accuracy after the first task
    accuracy, forgetting = figures.ablation(records).axes
    assert len(accuracy.containers) == 2 and not forgetting.containers
    assert not forgetting.collections


@pytest.mark.parametrize("name", ["angles", "ablation", "features"])
def test_equal_data_give_equal_bytes(name, tmp_path):
    for file in ("a.png", "b.png"):
        records = [described(each=8), run("stamp", params=MATCHED)]
        options = ("toy", "ABC") if name == "features" else ()
        figures.save(getattr(figures, name)(records, *options), tmp_path / file)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
