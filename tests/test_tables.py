import json
import math

import numpy as np
import pandas as pd
import pytest

from stamp_core import tables
from stamp_core.records import Record

T_975 = {1: 12.706204736, 2: 4.302652730}  # Student's t by degrees of freedom
TESTS = np.array([[10, 20], [30, 20]])  # [U, T]


def run(
    method="fedavg",
    seed=0,
    setting="toy",
    final=(0.4, 0.6),
    first=(0.8, 0.1),
    own=False,
    local=(0.9, 0.9),
    cycles=1,
    group="federated",
):
    """Two tasks, two clients of equal accuracy: so `first` and `final` are rows of the matrix."""
    rows = np.array([first, final] * cycles)  # [S, T]
    a = np.repeat(rows[:, None], 2, axis=1)  # [S, U, T]
    undefined = np.full_like(a, np.nan)
    after = (
        undefined if local is None else np.broadcast_to(np.array(local)[:, None, None], (2, 2, 2))
    )
    after = np.concatenate([after[:2]] * cycles)
    scorings = np.stack([a, a + 0.1, a + 0.2])  # all, seen, task
    scores = {
        "global": np.full_like(scorings, np.nan) if own else scorings,
        "personal": scorings if own else np.full_like(scorings, np.nan),
        "local": np.stack([after] * 3),
        "initial": np.zeros((3, 2, 2)),
    }
    history = [
        {
            "step": place,
            "round": 0,
            "loss": 1.0 - 0.1 * place,
            "seconds": {"clients": 1.0 + place, "server": 0.5},
            "bytes": {"up": 1000 * (place + 1), "down": 4000},
            "memory": {"process": 10_000_000 * (place + 1), "gpu": 7},
            "disk": 500 - place,
            "angles": {"spatial clients": 0.5},
            "notes": {},
            "events": {},
        }
        for place in range(2 * cycles)
    ]
    about = {
        **{"setting": {"name": setting}, "method": {"name": method}, "seed": seed},
        **{"group": group, "setup": {"down": 300, "up": 200, "seconds": 2.0}},
    }
    return Record(about, history, scores, TESTS, {})


def seeds(method, finals, **rest):
    return [run(method, seed, final=final, **rest) for seed, final in enumerate(finals)]


THREE = [(0.4, 0.6), (0.5, 0.7), (0.3, 0.8)]  # accuracies 0.5, 0.6, 0.55; forgetting 0.4, 0.3, 0.5


def test_frame_has_one_row_a_run_with_hand_computed_numbers():
    rows = tables.frame([run(), run("replay", 4)])
    assert rows[["setting", "method", "seed"]].to_numpy().tolist() == [
        ["toy", "fedavg", 0],
        ["toy", "replay", 4],
    ]
    row = rows.iloc[0]
    expected = {
        "accuracy": 0.5,
        "average_incremental_accuracy": (0.8 + 0.5) / 2,
        "learning_accuracy": (0.8 + 0.6) / 2,
        "forgetting": 0.8 - 0.4,
        "forgetting_diagonal": 0.8 - 0.4,
        "forward_transfer": 0.1,
        "gap": ((0.9 - 0.8) + (0.9 - 0.6)) / 2,
        "worst_client": 0.5,
        "judged_accuracy": 0.5,
        "seen_accuracy": 0.6,
        "task_accuracy": 0.7,
        "client_seconds": 1.5,
        "server_seconds": 0.5,
        "bytes_up": 1500,
        "bytes_down": 4000,
        "memory": 20_000_000,
        "gpu": 7,
        "disk": 500,
        "bytes_setup": 500,
        "setup_seconds": 2.0,
    }
    assert row[list(expected)].to_dict() == pytest.approx(expected)
    assert row.score_model == "global"
    assert rows.filter(like="personal_").isna().all(axis=None)


def test_accuracy_of_unequal_clients_is_pooled_over_pictures():
    record = run()
    record.scores["global"][0, -1] = [[1.0, 0.5], [0.2, 0.5]]  # last step: [U, T]
    first_task = (10 * 1.0 + 30 * 0.2) / 40
    assert tables.frame([record]).accuracy[0] == pytest.approx((first_task + 0.5) / 2)
    assert tables.frame([record]).worst_client[0] == pytest.approx(0.35)


def test_a_method_without_global_model_is_judged_by_the_clients_own():
    row = tables.frame([run("local", own=True)]).iloc[0]
    assert row.score_model == "personal"
    assert math.isnan(row.accuracy) and math.isnan(row.seen_accuracy)
    assert row.personal_accuracy == row.judged_accuracy == pytest.approx(0.5)
    assert row.judged_forgetting == pytest.approx(0.4)


def test_nothing_and_a_run_twice_are_refused():
    with pytest.raises(ValueError, match="no records"):
        tables.frame([])
    with pytest.raises(ValueError, match="toy fedavg seed 0 is there twice"):
        tables.frame([run(), run()])
    with pytest.raises(ValueError, match="twice"):
        tables.curves([run(), run()])


def test_curves_go_over_the_tasks_met_so_far():
    rows = tables.curves([run(seed=3)])
    assert rows.step.tolist() == [1, 2]
    assert rows.seed.tolist() == [3, 3]
    assert rows.accuracy.tolist() == pytest.approx([0.8, 0.5])
    assert rows.gap.tolist() == pytest.approx([0.1, 0.3])
    assert math.isnan(rows.forgetting[0]) and rows.forgetting[1] == pytest.approx(0.4)


def test_curves_of_later_cycles_go_over_all_tasks():
    rows = tables.curves([run(cycles=2)])
    assert rows.step.tolist() == [1, 2, 3, 4]
    assert rows.accuracy.tolist() == pytest.approx([0.8, 0.5, (0.8 + 0.1) / 2, 0.5])
    assert rows.gap.tolist() == pytest.approx([0.1, 0.3, 0.1, 0.3])
    assert rows.forgetting.iloc[-1] == pytest.approx(tables.frame([run(cycles=2)]).forgetting[0])


def test_curves_name_the_judged_model():
    rows = tables.curves([run("local", own=True, local=None), run("joint", local=None)])
    assert rows.model.tolist() == ["personal", "personal", "global", "global"]
    assert rows.accuracy.notna().all() and rows.gap.isna().all()


def test_results_are_text_in_order_of_first_appearance():
    rows = tables.results([*seeds("replay", THREE), *seeds("fedavg", THREE), *seeds("a", THREE)])
    assert rows.method.tolist() == ["replay", "fedavg", "a"]
    row = rows.iloc[0]
    assert row.n == "3"
    assert row.accuracy == "55.0 ± 5.0"
    assert row.forgetting == "40.0 ± 10.0"
    assert row["personal accuracy"] == tables.DASH == "\u2013"
    assert row["paper (CIFAR-100)"] == "\u2013"
    assert rows.iloc[1]["paper (CIFAR-100)"] == "31.7 ± 1.7, AF 25.2 ± 1.3"
    row = tables.costs(seeds("replay", THREE)).iloc[0]
    assert row["s / round"] == "1.5"
    assert row["MB up / round"] == "0.0015"
    assert (row["MB setup"], row["s setup"]) == ("0.0005", "2")
    assert row["disk MB"] == "0.0005"
    assert row["memory MB"] == "20"


def test_groups_stand_together_inside_a_setting():
    others = {"local": "control", "stamp": "continual", "fedala": "personalised", "x": "federated"}
    records = [
        each
        for setting in "ab"
        for name, group in others.items()
        for each in seeds(name, THREE[:1], setting=setting, group=group)
    ]
    for rows in (tables.results(records), tables.costs(records)):
        assert rows.setting.tolist() == [*"aaaabbbb"]
        assert rows.method.tolist() == ["x", "fedala", "stamp", "local"] * 2
        assert rows.group.tolist() == [*tables.GROUPS] * 2


def test_what_the_paper_prints_is_given_with_its_place():
    table = tables.printed("tab:baselines-task20", "ImageNet-1K")
    assert len(table) == 13 and table.loc["lander", "disk_mb"] == 1310
    text = tables.accuracy_and_forgetting("fedweit", "tab:baselines-task2", "ImageNet-1K")
    assert text == "39.7 ± 3.1, AF 21.5"  # printed without a deviation
    assert tables.accuracy_and_forgetting("gem", "tab:baselines-task2", "CIFAR-100") == tables.DASH


def test_curves_of_the_clients_own_models():
    record = run("fedala", group="personalised")
    record.scores["personal"] = record.scores["global"] / 2
    assert tables.curves([record]).accuracy.tolist() == pytest.approx([0.8, 0.5])
    own = tables.curves([record], own=True)
    assert own.accuracy.tolist() == pytest.approx([0.4, 0.25])
    assert set(own.model) == {"personal"} and set(own.group) == {"personalised"}
    assert own.gap.tolist() == pytest.approx([0.1, 0.3])


def test_results_keep_global_and_personal_accuracy_apart():
    row = tables.results(seeds("local", THREE, own=True, local=None)).iloc[0]
    assert row.model == "personal"
    assert (row.accuracy, row["personal accuracy"], row.gap) == ("\u2013", "55.0 ± 5.0", "\u2013")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5], "50.0"),
        ([0.5, 0.6], "55.0 ± 7.1"),
        ([0.5, math.nan, 0.6], "55.0 ± 7.1 (n = 2)"),
        ([math.nan], "\u2013"),
        ([-0.0001, 0.0], "0.0 ± 0.0"),
    ],
)
def test_percent(values, text):
    assert tables.percent(values) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.012345, "0.0123"), (1.5, "1.5"), (123456.0, "123000"), (99.96, "100")],
)
def test_amount_has_three_figures_and_no_exponent(value, text):
    assert tables.amount(value) == text


def test_differences_are_paired_by_seed_in_points():
    better = [(0.5, 0.7), (0.7, 0.7), (0.4, 0.9)]  # accuracy +10, +10, +10 points, forgetting
    rows = tables.differences([*seeds("fedavg", THREE), *seeds("stamp", better)])
    accuracy, forgetting = rows.to_dict("records")
    assert accuracy["difference"] == pytest.approx(10)
    assert accuracy["n"] == 3
    assert accuracy["verdict"] == "higher"
    lost = np.array([-10.0, -20.0, -10.0])  # 0.3 - 0.4, 0.1 - 0.3, 0.4 - 0.5
    half = T_975[2] * lost.std(ddof=1) / math.sqrt(3)
    assert forgetting["difference"] == pytest.approx(lost.mean())
    assert forgetting["low"] == pytest.approx(lost.mean() - half)
    assert forgetting["high"] == pytest.approx(lost.mean() + half)
    assert forgetting["verdict"] == "not distinguishable"


def test_differences_use_common_seeds_and_the_judged_model():
    local = [run("local", seed, own=True, local=None) for seed in (1, 2, 9)]
    rows = tables.differences([*seeds("fedavg", THREE), *local])
    assert set(rows.model) == {"personal"}
    assert set(rows.n) == {2}
    half = T_975[1] * np.std([-10, -5], ddof=1) / math.sqrt(2)
    assert rows.difference[0] == pytest.approx(-7.5)
    assert rows.high[0] == pytest.approx(-7.5 + half)


def test_differences_without_the_other_method_are_none():
    rows = tables.differences(seeds("stamp", THREE))
    assert rows.empty and "verdict" in rows
    assert len(tables.differences(seeds("stamp", THREE) + seeds("x", THREE), against="x")) == 2


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.1, 2, "higher"),
        (-2, -0.1, "lower"),
        (-1, 1, "not distinguishable"),
        (0, 0, "not distinguishable"),
        (math.nan, math.nan, "no interval"),
    ],
)
def test_verdict(low, high, word):
    assert tables.verdict(low, high) == word


def test_summary_is_json_without_nan():
    found = tables.summary([*seeds("fedavg", THREE), run("local", own=True, local=None)])
    assert list(found["toy"]) == ["fedavg", "local"]
    fedavg, local = found["toy"].values()
    assert fedavg["accuracy"] == {"mean": 0.55, "std": 0.05, "n": 3}
    assert fedavg["personal_accuracy"] == {"mean": None, "std": None, "n": 0}
    assert local["accuracy"]["mean"] is None
    assert local["forgetting"] == {"mean": 0.4, "std": None, "n": 1}  # of the judged model
    assert list(fedavg) == list(local) == list(tables.SUMMARY)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_write_leaves_three_files_that_do_not_change(tmp_path):
    records = [
        *seeds("fedavg", THREE),
        *seeds("local", THREE, own=True, local=None),
        *seeds("joint", THREE, setting="other", local=None),
    ]
    paths = tables.write(records, tmp_path / "a")
    assert [path.name for path in paths] == ["results.md", "accuracy.csv", "summary.json"]
    tables.write(records, tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["accuracy.csv", "results.md", "summary.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    page = (tmp_path / "a" / "results.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.startswith("#")] == [
        "# Results",
        "## toy",
        "## other",
    ]
    assert page.count("Difference from") == page.count("Difference from fedavg") == 1
    assert "| local | personal | 3 | +0.0 (+0.0 to +0.0) | not distinguishable |" in page
    rows = pd.read_csv(tmp_path / "a" / "accuracy.csv")
    assert rows.columns.tolist()[:4] == ["setting", "method", "seed", "step"]
    assert rows.accuracy.tolist()[:2] == [0.8, 0.5]
    assert "NaN" not in (tmp_path / "a" / "summary.json").read_text()


def test_the_page_compares_with_fedavg_and_with_stamp():
    page = tables.page([*seeds("fedavg", THREE), *seeds("stamp", THREE), *seeds("gem", THREE)])
    first, second = page.split("Difference from stamp:")
    assert "Difference from fedavg:" in first and "What it costs:" in second
    pairs = [page.count(f"\n| {name} | global | 3 |") for name in ("fedavg", "stamp", "gem")]
    assert pairs == [1, 1, 2]  # gem is compared with both, they with each other


def test_markdown_cells_are_not_padded():
    text = tables.markdown(pd.DataFrame({"method": ["a", "longer"], "n": ["3", "3"]}))
    assert text.splitlines() == ["| method | n |", "| --- | --- |", "| a | 3 |", "| longer | 3 |"]


# --- the ablation

MATCHED = {"kind": "stamp", "spatial": {"kappa": 0.5}, "temporal": {"kappa": 0.5, "past": "x"}}


def cell(method, finals, length=1.0, setting="toy", **about):
    """Three seeds of a variant whose parameters are `about`, with steps of one length."""
    records = seeds(method, finals, setting=setting)
    for record in records:
        record.about["method"] |= about
        for row in record.history:
            row["angles"] = {"update length": length * (1 + record.cell[2])}
    return records


def shifted(by):
    """Final rows of three seeds that are all `by` better than THREE, and forget as much less."""
    return [(first + by, last + by) for first, last in THREE]


NOISY = [(0.3, 0.8), (0.6, 0.8), (0.2, 0.7)]


@pytest.fixture
def ablated():
    """Stamp beside a control that is better, one that is worse, and one that nobody can tell."""
    return [
        *cell("stamp", THREE, **MATCHED),
        *cell("replay", shifted(0.1), 2.0, memory={"rule": "uniform", "per_class": 5}, ratio=1.0),
        *cell("fedavg", shifted(-0.2), 0.5),
        *cell("fedavg_step", NOISY, step=1.5),
        *cell("sam_tam_pcs", NOISY, **MATCHED),
        *cell("stamp_other", shifted(-0.1), **MATCHED),
    ]


def test_the_sentences_follow_the_intervals(ablated):
    stamp = tables.sentences(ablated, "toy", "stamp")
    holds, open_ = stamp.split(". It cannot be told ")
    assert holds == (
        "Beyond the noise stamp is more accurate than the control fedavg (by 20.0 to 20.0), "
        "stamp_other; is less accurate than the control replay (by 10.0 to 10.0); forgets less "
        "than the control fedavg (by 20.0 to 20.0), stamp_other; forgets more than the control "
        "replay (by 10.0 to 10.0)"
    )
    assert open_ == (
        "in accuracy from the control fedavg_step, sam_tam_pcs; "
        "in forgetting from the control fedavg_step, sam_tam_pcs."
    )


def test_the_sentences_of_a_control_name_what_ends_above_it(ablated):
    text = tables.sentences(ablated, "toy", "fedavg")
    assert "fedavg is less accurate than the control replay (by 30.0 to 30.0), stamp, " in text
    assert "more accurate" not in text and "forgets less" not in text


@pytest.mark.parametrize(
    ("gains", "word"),
    [
        ([0.10, 0.12, 0.11], "is more accurate than a"),
        ([-0.10, -0.12, -0.11], "is less accurate than a"),
        ([0.10, -0.12, 0.01], "It cannot be told in accuracy from a"),
        ([0.10], "It cannot be told in accuracy from a (no interval)"),
    ],
)
def test_one_sided_and_two_sided_intervals_are_worded_apart(gains, word):
    finals = [(0.5 + gain, 0.5 + gain) for gain in gains]
    records = [*cell("stamp", finals, **MATCHED)]
    records += cell("a", [(0.5, 0.5)] * len(gains), **MATCHED)
    text = tables.sentences(records, "toy", "stamp")
    assert word in text
    assert ("differs from none" in text) == word.startswith("It")


def test_only_the_settings_own_runs_are_put_into_words(ablated):
    other = cell("stamp", THREE, setting="o", **MATCHED) + cell("fedavg", THREE, setting="o")
    text = tables.sentences([*ablated, *other], "o", "stamp")
    assert "replay" not in text and "in accuracy from the control fedavg" in text


def test_a_variant_is_described_by_its_parameters(ablated):
    kept = {"memory": {"rule": "herding", "per_class": 20}, "ratio": 0.0}
    off = {"spatial": None, "temporal": None}
    ablated += cell("half", THREE, kind="stamp", prototype=0.01, **off, **kept)
    ablated += cell("mean", THREE, kind="stamp", temporal={"kappa": 0.0, "past": "y"}, spatial=None)
    rows = tables.ablation(ablated).set_index("variant")
    columns = ["part", "SAM", "TAM", "coreset", "prototypical loss", "rehearsal", "otherwise"]
    control, paper, choice = tables.PARTS.values()
    told = {name: rows.loc[name, columns].tolist() for name in rows.index}
    none = tables.DASH
    assert told == {
        "replay": [control, none, none, "uniform, 5", none, "1", none],
        "fedavg": [control, *[none] * 6],
        "fedavg_step (step 1.5)": [control, *[none] * 6],
        "half": [control, none, none, "herding, 20 (not read)", "0.01", none, none],
        "mean": [control, none, "κ = 0", none, none, none, "temporal.past y"],
        "sam_tam_pcs": [paper, "κ = 0.5", "κ = 0.5", *[none] * 4],
        "stamp": [choice, "κ = 0.5", "κ = 0.5", *[none] * 4],
        "stamp_other": [choice, "κ = 0.5", "κ = 0.5", *[none] * 4],
    }


def test_steps_are_relative_to_fedavg_by_seed(ablated):
    rows = tables.ablation(ablated).set_index("variant")
    assert rows.step[["fedavg", "stamp", "replay"]].tolist() == ["1", "2", "4"]
    assert tables.ablation(cell("stamp", THREE, **MATCHED)).step.tolist() == [tables.DASH]
    no_angles = [run("fedavg"), run("a")]
    assert tables.ablation(no_angles).step.tolist() == [tables.DASH] * 2


def test_only_rows_of_the_paper_have_its_numbers(ablated):
    column = tables.ablation(ablated).set_index("variant")["paper (CIFAR-100)"]
    assert column["fedavg"] == "31.7 ± 1.7, AF 22.1 ± 1.3"
    assert column["sam_tam_pcs"] == "52.8 ± 0.9, AF 24.3 ± 0.8"
    assert set(column.drop(["fedavg", "sam_tam_pcs"])) == {tables.DASH}


def test_the_page_has_both_differences_with_their_sentences(ablated, tmp_path):
    ablated += cell("fedavg", THREE, setting="other")
    path = tables.write_ablation(ablated, tmp_path / "new")
    page = path.read_text(encoding="utf-8")
    assert path.name == "ablation.md"
    assert [line for line in page.splitlines() if line[:3] == "## "] == ["## toy", "## other"]
    for against in ("stamp", "replay"):
        assert page.count(f"Difference from {against}:") == 1  # the other setting has neither
        assert tables.sentences(ablated, "toy", against) in page
    assert page == tables.ablation_page(ablated) and "nan" not in page


# --- matching


def test_matching_is_told_by_place_with_means_and_the_worst_gap():
    record = run("stamp")
    numbers = {"rows": 4.0, "least_reference": 0.5, "least": 1.0, "length": 1.0, "cosine": 0.9}
    for row, gap in zip(record.history, (1e-9, 0.02), strict=True):
        row["notes"] = {f"spatial {k}": v for k, v in {**numbers, "support": 3, "gap": gap}.items()}
        row["events"] = {"spatial matching: a row was dropped": 2, "memory: something": 5}
    record.history[1]["notes"]["spatial least"] = 2.0
    (row,) = tables.matching([run("fedavg"), record]).to_dict("records")
    assert (row["method"], row["where"], row["rounds"], row["n"]) == ("stamp", "spatial", "2", "1")
    assert (row["worst row, mean"], row["worst row, matched"]) == ("0.50", "1.50")
    assert (row["gap"], row["rows used"]) == ("2e-02", "3.00")
    assert row["events"] == "a row was dropped: 4"
    assert tables.matching([run("fedavg")]).empty
