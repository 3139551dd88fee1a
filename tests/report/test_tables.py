"""Frames of runs, the results page, the ablation and the table of matching."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from table_records import FINALS, fake_record, three_seeds

from stamp_core.report import frames, tables, text
from stamp_core.report.tables import page, printed, results
from stamp_core.report.tables.ablation import PARTS
from stamp_core.report.text import DASH

T_975 = {1: 12.706204736, 2: 4.302652730}  # Student's t by degrees of freedom
BETTER = [(0.5, 0.7), (0.7, 0.7), (0.4, 0.9)]  # accuracy 10 points above FINALS for every seed
NOISY = [(0.3, 0.8), (0.6, 0.8), (0.2, 0.7)]


def shifted(by):
    """FINALS with `by` more accuracy, and as much less forgetting, for every seed."""
    return [(first + by, last + by) for first, last in FINALS]


# --- frames


def test_run_frame_has_one_row_per_run_with_hand_computed_numbers():
    rounds = [
        {"seconds": {"clients": s, "server": 0.5}, "bytes": {"up": 1000 * s, "down": 4000}}
        for s in (1.0, 2.0)
    ]
    first = fake_record(local=0.9, rounds=rounds)
    rows = frames.run_frame([first, fake_record("replay", 4)])
    assert rows[["method", "seed"]].to_numpy().tolist() == [["fedavg", 0], ["replay", 4]]
    expected = {
        "accuracy": 0.5,
        "average_incremental_accuracy": (0.8 + 0.5) / 2,
        "learning_accuracy": (0.8 + 0.6) / 2,
        "forgetting": 0.8 - 0.4,
        "forgetting_diagonal": 0.8 - 0.4,
        "forward_transfer": 0.1,
        "gap": ((0.9 - 0.8) + (0.9 - 0.6)) / 2,
        "worst_client": 0.5,
        "main_accuracy": 0.5,
        "nearest_mean": 0.5 + 0.3,
        "local_accuracy": 0.9,
        "images": 2000,
        "client_seconds": 1.5,
        "bytes_up": 1500,
        "bytes_down": 4000,
        "memory": 20_000_000,
        "gpu": 7,
        "disk": 500,
        "bytes_setup": 500,
        "setup_seconds": 2.0,
    }
    assert rows.iloc[0][list(expected)].to_dict() == pytest.approx(expected)
    assert rows.model[0] == "global" and rows.filter(like="personal_").isna().all(axis=None)


def test_accuracy_of_unequal_clients_is_averaged_over_images():
    record = fake_record()
    record.scores["global"][0, -1] = [[1.0, 0.5], [0.2, 0.5]]  # after the last task: [U, T]
    row = frames.run_frame([record]).iloc[0]
    assert row.accuracy == pytest.approx(((10 * 1.0 + 30 * 0.2) / 40 + 0.5) / 2)
    assert row.worst_client == pytest.approx(0.35)


def test_a_method_without_global_model_is_compared_by_personal_models():
    row = frames.run_frame([fake_record("local", personal_only=True)]).iloc[0]
    assert row.model == "personal" and math.isnan(row.accuracy)
    assert row.personal_accuracy == row.main_accuracy == pytest.approx(0.5)
    assert row.main_forgetting == pytest.approx(0.4)


@pytest.mark.parametrize("function", [frames.run_frame, frames.experience_frame])
def test_nothing_and_a_run_twice_are_refused_but_not_two_values_of_a_sweep(function):
    with pytest.raises(ValueError, match="no records"):
        function([])
    with pytest.raises(ValueError, match="toy-fedavg seed 0 is there twice"):
        function([fake_record(), fake_record()])
    assert len(function([fake_record(sweep=["kappa", value]) for value in ("0.1", "0.5")])) >= 2


def test_experience_frame_counts_experiences_through_all_cycles():
    rows = frames.experience_frame([fake_record(seed=3, local=0.9, cycles=2)])
    assert rows.experience.tolist() == [1, 2, 3, 4] and set(rows.seed) == {3}
    assert rows.accuracy.tolist() == pytest.approx([0.8, 0.5, (0.8 + 0.1) / 2, 0.5])
    assert rows.gap.tolist() == pytest.approx([0.1, 0.3, 0.1, 0.3])
    expected = [math.nan, 0.4, math.nan, 0.4]  # within its cycle
    assert rows.forgetting.tolist() == pytest.approx(expected, nan_ok=True)


def test_experience_frame_shows_the_main_or_the_personal_models():
    own = fake_record("local", personal_only=True)
    both = fake_record("fedala", local=0.9, group="personalised")
    both.scores["personal"] = both.scores["global"] / 2
    rows = frames.experience_frame([own, both])
    assert rows.model.tolist() == ["personal", "personal", "global", "global"]
    assert rows.accuracy.tolist() == pytest.approx([0.8, 0.5, 0.8, 0.5])
    assert rows.gap[:2].isna().all()
    rows = frames.experience_frame([both], personal=True)
    assert rows.accuracy.tolist() == pytest.approx([0.4, 0.25])
    assert rows.gap.tolist() == pytest.approx([0.1, 0.3])  # always of the global model
    assert set(rows.model) == {"personal"} and set(rows.group) == {"personalised"}


# --- numbers as text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5], "50.0"),
        ([0.5, 0.6], "55.0 ± 7.1"),
        ([0.5, math.nan, 0.6], "55.0 ± 7.1 (n = 2)"),
        ([math.nan], "\u2013"),
        ([-0.0001, 0.0], "0.0 ± 0.0"),
    ],
)
def test_mean_std(values, expected):
    assert text.mean_std(values) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (0.012345, "0.0123"), (1.5, "1.5"), (123456.0, "123000"), (99.96, "100")],
)
def test_significant_has_three_figures_and_no_exponent(value, expected):
    assert text.significant(value) == expected


def test_markdown_cells_are_not_padded():
    table = page.markdown(pd.DataFrame({"method": ["a", "longer"], "n": ["3", "3"]}))
    assert table.splitlines() == ["| method | n |", "| --- | --- |", "| a | 3 |", "| longer | 3 |"]


# --- results


def test_results_are_text_with_the_papers_numbers():
    rows = tables.results_table([*three_seeds("replay"), *three_seeds(), *three_seeds("a")])
    assert rows.method.tolist() == ["replay", "fedavg", "a"]  # in order of first appearance
    row = rows.iloc[0]
    assert (row.n, row.accuracy, row.forgetting) == ("3", "55.0 ± 5.0", "40.0 ± 10.0")
    assert row["personal accuracy"] == row["paper (CIFAR-100)"] == DASH
    assert rows.iloc[1]["paper (CIFAR-100)"] == "31.7 ± 1.7, AF 25.2 ± 1.3"
    row = tables.results_table(three_seeds("local", personal_only=True)).iloc[0]
    assert row.model == "personal"
    assert (row.accuracy, row["personal accuracy"], row.gap) == (DASH, "55.0 ± 5.0", DASH)


def test_costs_are_means_of_rounds_and_peaks():
    row = tables.cost_table(three_seeds("replay")).iloc[0]
    expected = {"s / round": "0.5", "MB up / round": "0.001", "MB setup": "0.0005", "s setup": "2"}
    expected |= {"disk MB": "0.0005", "memory MB": "20", "GPU MB": "0.000007"}
    expected |= {"1000 images": "2", "update length": DASH}
    assert {name: row[name] for name in expected} == expected


def test_groups_of_methods_are_together_within_a_setting():
    groups = {"local": "control", "stamp": "continual", "fedala": "personalised", "x": "federated"}
    records = [
        fake_record(name, setting=setting, group=group)
        for setting in "ab"
        for name, group in groups.items()
    ]
    for rows in (tables.results_table(records), tables.cost_table(records)):
        assert rows.setting.tolist() == [*"aaaabbbb"]
        assert rows.method.tolist() == ["x", "fedala", "stamp", "local"] * 2
        assert rows.group.tolist() == [*frames.GROUPS] * 2


def test_differences_are_paired_by_seed_in_points():
    rows = tables.differences([*three_seeds(), *three_seeds("stamp", BETTER)])
    accuracy, forgetting, *_ = rows.to_dict("records")
    assert accuracy["difference"] == pytest.approx(10)
    assert (accuracy["n"], accuracy["interval"]) == (3, "above 0")
    lost = np.array([-10.0, -20.0, -10.0])  # 0.3 - 0.4, 0.1 - 0.3, 0.4 - 0.5
    half = T_975[2] * lost.std(ddof=1) / math.sqrt(3)
    ends = [forgetting[name] for name in ("difference", "low", "high")]
    assert ends == pytest.approx([lost.mean(), lost.mean() - half, lost.mean() + half])
    assert forgetting["interval"] == "includes 0"


def test_differences_use_common_seeds_and_the_main_model():
    local = [fake_record("local", seed, personal_only=True) for seed in (1, 2, 9)]
    rows = tables.differences([*three_seeds(), *local])
    assert set(rows.model) == {"personal"} and set(rows.n) == {2}
    half = T_975[1] * np.std([-10, -5], ddof=1) / math.sqrt(2)
    assert rows.difference[0] == pytest.approx(-7.5)
    assert rows.high[0] == pytest.approx(-7.5 + half)


def test_differences_have_rows_for_global_and_for_personal_models():
    """Personal accuracies are 20 points above the global ones, learning accuracy as well."""
    records = [*three_seeds(), *three_seeds("fedala", shifted(0.1), personal=0.2)]
    rows = tables.differences(records).set_index(["model", "measure"])
    assert rows.loc[("global", "accuracy"), "difference"] == pytest.approx(10)
    assert rows.loc[("personal", "accuracy"), "difference"] == pytest.approx(30)
    assert rows.loc[("global", "learning accuracy"), "difference"] == pytest.approx(5)
    assert rows.loc[("personal", "learning accuracy"), "difference"] == pytest.approx(25)
    assert rows.loc[("personal", "forgetting"), "difference"] == pytest.approx(-10)
    assert set(tables.differences(records, "fedala").model) == {"global"}  # its main model
    assert (
        tables.findings(records)
        .splitlines()[0]
        .endswith("higher for fedala (by 10.0 to 10.0), fedala (personal models, by 30.0 to 30.0).")
    )


def test_differences_without_the_base_are_none():
    rows = tables.differences(three_seeds("stamp"))
    assert rows.empty and "interval" in rows
    assert len(tables.differences(three_seeds("stamp") + three_seeds("x"), "x")) == 4


@pytest.mark.parametrize(
    ("gains", "outcome", "cell"),
    [
        ([0.10, 0.12, 0.11], "higher for stamp (by 8.5 to 13.5)", "**+11.0 (+8.5 to +13.5)**"),
        ([-0.10, -0.12, -0.11], "lower for stamp (by 8.5 to 13.5)", "**-11.0 (-13.5 to -8.5)**"),
        ([0.05, -0.05], "the 95 % interval includes 0 for stamp", "+0.0 (-63.5 to +63.5)"),
        ([0.0, 0.0], "the 95 % interval includes 0 for stamp", "+0.0 (+0.0 to +0.0)"),
        ([0.10], "no interval (fewer than two common seeds) for stamp", "+10.0"),
    ],
)
def test_sentences_and_cells_say_where_the_interval_lies(gains, outcome, cell):
    finals = [(0.5 + gain, 0.5 + gain) for gain in gains]
    records = three_seeds("stamp", finals) + three_seeds("fedavg", [(0.5, 0.5)] * len(gains))
    expected = f"- toy, accuracy compared with fedavg (n = {len(gains)}): {outcome}."
    assert tables.findings(records).splitlines()[0] == expected
    table = page.difference_table(tables.differences(records), ["method"], "measure")
    assert table.accuracy.tolist() == [cell]


def test_findings_name_setting_measure_base_and_model():
    records = [*three_seeds(), *three_seeds("replay", BETTER), *three_seeds(setting="other")]
    records += three_seeds("local", shifted(-0.2), personal_only=True)
    items = tables.findings(records).splitlines()
    assert items[0] == (
        "- toy, accuracy compared with fedavg (n = 3): higher for replay (by 10.0 to 10.0); "
        "lower for local (personal models, by 20.0 to 20.0)."
    )
    heads = [item.partition(" (n")[0] for item in items]
    assert heads == [
        f"- toy, {measure} compared with {base}"
        for base in ("fedavg", "replay")
        for measure in ("accuracy", "forgetting")
    ]


def test_the_summary_is_json_without_nan():
    summary = results.result_summary([*three_seeds(), fake_record("local", personal_only=True)])
    fedavg, local = summary["toy"]["fedavg"], summary["toy"]["local"]
    assert fedavg["accuracy"] == {"mean": 0.55, "std": 0.05, "n": 3}
    assert fedavg["personal_accuracy"] == {"mean": None, "std": None, "n": 0}
    assert local["accuracy"]["mean"] is None
    assert local["forgetting"] == {"mean": 0.4, "std": None, "n": 1}  # of the main model
    assert list(fedavg) == list(local) and {"learning_accuracy", "gap", "disk"} < set(fedavg)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_results_are_written_to_three_files_that_do_not_change(tmp_path):
    records = [*three_seeds(), *three_seeds("stamp"), *three_seeds("gem")]
    records += [*three_seeds("joint", setting="other"), fake_record("x", setting="other")]
    paths = tables.write_results(records, tmp_path / "a")
    assert [path.name for path in paths] == ["results.md", "accuracy.csv", "summary.json"]
    again = tables.write_results(records, tmp_path / "b")
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in again]
    page = paths[0].read_text(encoding="utf-8")
    assert "13 runs: 5 methods; settings toy, other; n = 1 to 3 seeds for each (0, 1, 2)." in page
    toy, other = page.split("\n## ")[1:3]
    assert toy.count("Difference from") == 2 and "Difference from" not in other
    assert "| gem | global | 3 | +0.0 (+0.0 to +0.0) | +0.0 (+0.0 to +0.0) |" in toy
    assert tables.findings(records) in toy and "nan" not in page.lower()
    assert "0 of 8 intervals exclude 0; by chance alone about 1 would." in toy
    rows = pd.read_csv(paths[1])
    columns = ["setting", "method", "seed", "experience", "group", "model", "accuracy"]
    assert rows.columns.tolist() == [*columns, "forgetting", "gap"]
    assert rows.accuracy.tolist()[:2] == [0.8, 0.5]
    assert json.loads(paths[2].read_text()) == results.result_summary(records)


def test_the_papers_numbers_are_found_by_table_data_and_method():
    table = printed.rows("tab:baselines-task20", "ImageNet-1K")
    assert len(table) == 13 and table.loc["lander", "disk_mb"] == 1310
    place = ("tab:baselines-task2", "ImageNet-1K")
    assert printed.scores("fedweit", *place) == "39.7 ± 3.1, AF 21.5"  # no deviation
    assert printed.scores("gem", *place) == DASH


# --- the ablation

MATCHED = {"kind": "stamp", "spatial": {"kappa": 0.5}, "temporal": {"kappa": 0.5, "past": "x"}}


def variant(method, finals=FINALS, length=1.0, setting="toy", **params):
    """Three seeds of a variant; its updates have a length that grows with the seed."""
    records = three_seeds(method, finals, setting=setting, params=params)
    for record in records:
        angles = {"update length": length * (1 + record.run[2])}
        record.history[:] = [{**row, "angles": angles} for row in record.history]
    return records


@pytest.fixture
def ablated():
    """Stamp, a better and two worse variants, and two without a clear difference."""
    memory = {"selection": "uniform", "exemplars_per_class": 5}
    return [
        *variant("stamp", **MATCHED),
        *variant("replay", shifted(0.1), 2.0, memory=memory, ratio=1.0),
        *variant("fedavg", shifted(-0.2), 0.5),
        *variant("fedavg_step", NOISY, server_lr=1.5),
        *variant("sam_tam_pcs", NOISY, **MATCHED),
        *variant("stamp_other", shifted(-0.1), **MATCHED),
    ]


def test_ablation_findings_follow_the_intervals_by_part(ablated):
    other = variant("stamp", setting="o", **MATCHED) + variant("fedavg", setting="o")
    control, paper, choice = PARTS.values()
    items = tables.ablation_findings([*ablated, *other]).splitlines()
    assert items[0] == (
        f"- toy, accuracy of {control} compared with stamp (n = 3): higher for replay (by 10.0 to "
        "10.0); lower for fedavg (by 20.0 to 20.0); the 95 % interval includes 0 for fedavg_step."
    )
    assert f"- toy, accuracy of {choice} compared with stamp (n = 3): lower for stamp_other (" in (
        "\n".join(items)
    )
    assert [item for item in items if item.startswith("- o,")] == [
        f"- o, {measure} of {control} compared with stamp (n = 3): "
        "the 95 % interval includes 0 for fedavg."
        for measure in ("accuracy", "forgetting")
    ]
    assert sum(f"{paper} compared with replay" in item for item in items) == 2


def test_a_variant_is_described_by_its_parameters(ablated):
    memory = {"selection": "herding", "exemplars_per_class": 20}
    off = {"kind": "stamp", "spatial": None, "temporal": None}
    ablated += variant("half", prototype=0.01, memory=memory, ratio=0.0, **off)
    ablated += variant("mean", **{**off, "temporal": {"kappa": 0.0, "past": "y"}})
    rows = tables.ablation_table(ablated).set_index("variant")
    columns = ["part", "SAM", "TAM", "coreset", "prototypical loss", "rehearsal"]
    control, paper, choice = PARTS.values()
    parameters = rows[[*columns, "other parameters"]].apply(list, axis=1).to_dict()
    assert parameters == {
        "replay": [control, DASH, DASH, "uniform, 5", DASH, "1", DASH],
        "fedavg": [control, *[DASH] * 6],
        "fedavg_step (server lr 1.5)": [control, *[DASH] * 6],
        "half": [control, DASH, DASH, "herding, 20 (not read)", "0.01", DASH, DASH],
        "mean": [control, DASH, "κ = 0", DASH, DASH, DASH, "temporal.past y"],
        "sam_tam_pcs": [paper, "κ = 0.5", "κ = 0.5", *[DASH] * 4],
        "stamp": [choice, "κ = 0.5", "κ = 0.5", *[DASH] * 4],
        "stamp_other": [choice, "κ = 0.5", "κ = 0.5", *[DASH] * 4],
    }
    paper = rows["paper (CIFAR-100)"]
    assert paper["fedavg"] == "31.7 ± 1.7, AF 22.1 ± 1.3"
    assert paper["sam_tam_pcs"] == "52.8 ± 0.9, AF 24.3 ± 0.8"
    assert set(paper.drop(["fedavg", "sam_tam_pcs"])) == {DASH}


def test_update_lengths_are_relative_to_fedavg_by_seed(ablated):
    rows = tables.ablation_table(ablated).set_index("variant")
    assert rows["update length"][["fedavg", "stamp", "replay"]].tolist() == ["1", "2", "4"]
    for records in (variant("stamp", **MATCHED), [fake_record(), fake_record("a")]):
        assert set(tables.ablation_table(records)["update length"]) == {DASH}


def test_the_ablation_page_has_both_differences_of_each_setting(ablated, tmp_path):
    ablated += variant("fedavg", setting="other")
    path, curves = tables.write_ablation(ablated, tmp_path / "new")
    page = path.read_text(encoding="utf-8")
    assert path.name == "ablation.md" and "nan" not in page
    assert set(pd.read_csv(curves).method) == {record.run[1] for record in ablated}
    toy, other = page.split("\n## ")[1:3]
    for base in ("stamp", "replay"):
        assert toy.count(f"Difference from {base}:") == 1 and base not in other
    assert tables.ablation_findings(ablated) in toy


# --- matching


def test_matching_has_means_of_rounds_and_the_largest_gap():
    numbers = {"worst_product_reference": 0.5, "length": 1.0, "cosine": 0.9, "support": 3}
    numbers |= {"gradient count": 4.0}
    rounds = [
        {
            "notes": {f"spatial {k}": v for k, v in {**numbers, **changes}.items()},
            "events": {"spatial matching: a gradient was dropped": 2, "memory: something": 5},
        }
        for changes in ({"worst_product": 1.0, "gap": 1e-9}, {"worst_product": 2.0, "gap": 0.02})
    ]
    rows = tables.matching_table([fake_record(), fake_record("stamp", rounds=rounds)])
    (row,) = rows.to_dict("records")
    assert (row["method"], row["where"], row["rounds"], row["n"]) == ("stamp", "spatial", "2", "1")
    assert (row["worst product, mean"], row["worst product, matched"]) == ("0.50", "1.50")
    assert (row["gradients"], row["gradients with weight"]) == ("4.00", "3.00")
    assert (row["duality gap"], row["events"]) == ("2e-02", "a gradient was dropped: 4")
    assert tables.matching_table([fake_record()]).empty


def test_a_table_is_shown_with_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(page, "display", lambda table: shown.append(repr(table)))
    rows = pd.DataFrame({"n": range(200)})
    tables.show(rows)
    assert len(shown[0].splitlines()) == 201
    assert pd.get_option("display.max_rows") == 60
