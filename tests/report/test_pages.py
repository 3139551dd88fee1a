"""Pages from records made by hand."""

from pathlib import Path

import made_records
import pytest

from workbench.report import frames, tables
from workbench.report.tables import page, results
from workbench.report.tables.tuning import write_tuning
from workbench.report.text import DASH


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of every page; definitions are left out, so that their words may change."""
    folder = tmp_path_factory.mktemp("new") / "pages"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "definitions", lambda title: f"(definitions: {title})")
        tables.write_results(made_records.compared(), folder)
        tables.write_ablation(made_records.ablated(), folder)
        captions = {name: (name, "2") for name in ("kappa", "other", "server_lr")}
        tables.write_sensitivity(made_records.sensitive(), captions, folder)
        tables.write_coresets(made_records.selections(), folder)
        tables.HETEROGENEITY.write(made_records.heterogeneous(), folder)
        tables.ROUNDS.write(made_records.longer(), folder)
        tables.write_overlap(made_records.overlapping(), folder)
        tables.write_related(made_records.related(), folder)
        tables.write_paper(made_records.printed_runs(), folder)
        records = made_records.candidates(["gem", "gpm"])
        tried = [(kind, r.run[1], value, r.run[0]) for r in records for kind, value in [r.sweep]]
        write_tuning(records, [*dict.fromkeys(tried)], [0, 1], folder, known=())
        privacy = made_records.noisy(), *made_records.projected(), made_records.SPENT
        tables.write_privacy(*privacy, made_records.inverted(), folder)
    return folder


def held(*differences: str) -> str:
    """Cells of differences that are the same for every seed, so that they hold."""
    return " | ".join(f"**{each} ({each} to {each})** ‡" for each in differences)


def test_every_definition_stands_on_a_page_and_no_number_is_undefined(written):
    pages = "".join(path.read_text("utf-8") for path in written.glob("*.md"))
    lines = Path(page.__file__).with_name("definitions.md").read_text("utf-8").splitlines()
    for title in (line[2:] for line in lines if line.startswith("# ")):
        text = page.definitions(title)
        assert f"(definitions: {title})" in pages and text and "\n# " not in text
    assert " nan" not in pages
    assert "Difference from fedavg in average incremental accuracy:" in pages


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("ablation.md", f"fedavg | global | 3 | {held('-20.0', '-10.0', '+20.0', '-10.0')}"),
        ("ablation.md", f"fedavg | global | 3 | {held('-30.0', '-15.0', '+30.0', '-15.0')}"),
        (
            "results.md",
            "personalised | fedala | by hand | global | 3 | 60.0 ± 5.0 | 70.0 ± 2.5 | 90.0 ± 5.0 | "
            "80.0 ± 5.0 | 90.0 ± 2.5 | 90.0 ± 0.0 | 100.0 ± 5.0 | 77.5 ± 5.0 | 35.0 ± 10.0 | "
            "35.0 ± 10.0 | 97.5 ± 5.0 | 35.0 ± 10.0 | 60.0 ± 5.0 | 12.5 ± 5.0 | "
            "36.5 ± 2.4, AF 27.3 ± 0.5",
        ),
        (
            "results.md",
            "srfdil † | global | 2 | -2.5 (-34.3 to +29.3) | -1.2 (-17.1 to +14.6) | "
            "+10.0 (-117.1 to +137.1) | +2.5 (-29.3 to +34.3)",
        ),
        ("results.md", "federated | stamp | 2 | 1.5 | 0.001 | 0.004 | 0.0005 | 0.0005"),
        ("results.md", f"images, fedavg = 1 | 1 | replay | 3 | 65.0 ± 5.0 | {DASH}"),
        ("sensitivity.md", "stamp | 3 | 40.0 ± 10.0 | 41.0 ± 10.0"),
        ("coresets.md", "OCS | 3 | 70.0 ± 10.0 | 60.0 ± 15.0"),
        ("coresets.md", f"OCS | 3 | {held('+10.0')} | +0.0 (-12.4 to +12.4)"),
        ("coresets.md", "OCS | 5 | 0.005 | odd (9)"),
        ("coresets.md", "mine | 1 | +0.0"),
        ("measured.md", f"toy | stamp |  | 3 | 1.5 | {DASH} | {DASH} | {DASH} | 20 | 0.000007"),
        ("heterogeneity.md", "method | model | n | α = 0.1 | α = 1 | α = 100"),
        ("heterogeneity.md", f"feddbe | global | 3 | 40.0 ± 10.0 | {DASH} | 30.0 ± 10.0"),
        ("heterogeneity.md", "local | 2 | +5.0 (-58.5 to +68.5)"),  # from replay
        ("rounds.md", "stamp | global | 3 | 50.0 ± 10.0 | 73.0 ± 10.0"),
        ("rounds.md", f"stamp | 3 | +0.0 (+0.0 to +0.0) ≈ | {held('+3.0')}"),  # from replay
        ("rounds.md", f"stamp | 3 | {held('+23.0')}"),  # from two rounds
        ("overlap.md", f"stamp | 3 | {held('+5.0')} | +0.0 (+0.0 to +0.0) ≈"),
        (
            "related.md",
            "toy | projection | update | 2 | 0.0 (n = 1) | 55.0 ± 7.1 | 67.5 ± 3.5 | 30.0 ± 0.0",
        ),
        ("related.md", "toy | pfeddil † (personal) | 3 | 50.0 ± 10.0 | 70.0 ± 10.0 | 90.0 ± 10.0"),
        (
            "related.md",
            "fbl | 3 | 50.0 ± 10.0 | 65.0 ± 5.0 | 65.0 ± 5.0 | 30.0 ± 10.0 | 90.0 ± 10.0 | 0.001",
        ),
        ("related.md", f"fbl | 3 | {held('+30.0', '+15.0', '-30.0')}"),
        ("paper.md", f"fedavg | 3 | 3.3 | 44.6 | 15 | 44.6 | 60 | 1.92 | {DASH} | 21"),
        ("tuning.md", "gem | a 2 | 45.0 | 45.0 | 45.0 | yes"),
        ("tuning.md", "gem | b 3 | diverges | diverges | diverges | "),
        ("tuning.md", "gpm | a 2 | 45.0 | 45.0 | 45.0"),
        ("privacy.md", "local | 0.1 | 120,000 | 3 | 40.0 ± 10.0 | 40.0 ± 20.0"),
        ("privacy.md", "toy | stamp | 2 | 45.0 ± 7.1 | 60.0 ± 14.1 | 70.0 ± 14.1"),
        (
            "privacy.md",
            "b | a | new | 1.00 (0.50 to 1.50) | 1.00 (0.50 to 1.50) | 1.00 (0.50 to 1.50)",
        ),
        ("privacy.md", "replay | new | 2.00 (1.00 to 3.00) | 2.00 (1.00 to 3.00)"),
    ],
)
def test_a_page_has_the_numbers_worked_out_by_hand(name, row, written):
    assert f"| {row} |" in (written / name).read_text("utf-8").splitlines()


def test_programs_read_the_same_numbers(written):
    first, *rows = (written / "accuracy.csv").read_text("utf-8").splitlines()
    assert first.startswith("setting,method,seed,experience,") and len(rows) == 2 * 21
    assert first.endswith(",gap,average_incremental_accuracy")
    assert rows[:2] == [
        "toy,replay,0,1,control,global,0.8,,,0.8",
        "toy,replay,0,2,control,global,0.6,0.3,,0.7",
    ]


def test_a_page_names_two_records_of_other_arithmetic():
    mine = made_records.fake_record(identity={"arithmetic": "pinned"})
    assert page.describe_runs([mine]).endswith("Arithmetic: pinned.")
    other = made_records.fake_record("gem", 3, identity={"arithmetic": "machine"})
    both = "toy-fedavg, seed 0 with pinned; toy-gem, seed 3 with machine"
    with pytest.raises(ValueError, match=both):
        page.describe_runs([mine, other])


def test_matching_is_averaged_over_rounds_and_seeds():
    (row,) = tables.matching_table(made_records.compared()).to_dict("records")
    shown = [row[name] for name in ("rounds", "worst product, matched", "duality gap", "events")]
    assert shown == ["6", "1.50", "2e-02", "a gradient was dropped: 12"]


def test_a_variant_has_its_part_and_its_parameters():
    rows = tables.ablation_table(made_records.ablated())
    toy = rows[rows.setting == "toy"].set_index("variant")
    controls = ["replay", "fedavg", "fedavg_step (server lr 1.5)", "half", "mean"]
    assert toy.index.tolist() == [*controls, "stamp", "stamp_without_coreset", "stamp_other"]
    named = ("controls without matching", "components in the paper", "design choices")
    assert toy.part.tolist() == [*named[:1] * 5, *named[1:2] * 2, *named[2:]]
    assert toy.coreset["replay"] == "uniform, 5" and toy.coreset["fedavg"] == DASH
    assert toy.coreset["half"] == "herding, 20 (not read)"
    assert toy.rehearsal["replay"] == "1" and toy["prototypical loss"]["half"] == "0.01"
    assert (toy.SAM["mean"], toy.TAM["mean"], toy.SAM["stamp"]) == (DASH, "κ = 0", "κ = 0.5")
    assert toy["other parameters"]["mean"] == "temporal.past y"
    assert toy["other parameters"].drop("mean").eq(DASH).all()
    assert toy["update length"].tolist() == ["4", "1", *["2"] * 6]  # of fedavg's
    assert toy["paper (CIFAR-100)"]["fedavg"] == "31.7 ± 1.7, AF 22.1 ± 1.3"
    other = rows[rows.setting == "other"]
    assert other.variant.tolist() == ["stamp", "temporal_only"]
    assert other["update length"].tolist() == [DASH, DASH]  # without fedavg


def test_a_row_says_of_how_many_seeds_its_numbers_are():
    few, more = (0.5,), (0.5, 0.6, 0.7)
    rules = [*made_records.selected("uniform", 5, more), *made_records.selected("uniform", 2, few)]
    rows = frames.coreset_frame([*made_records.selected(None, 0, more), *rules])
    table = tables.CORESETS.table(rows).set_index("selection")
    assert table.n.to_dict() == {"no memory": "3", "random": "1 to 3"}


def test_the_share_of_synthesised_images_that_are_recognised_is_by_task():
    """The mean over seeds; a method without such images has no row."""
    noted = [
        [{"experience": 0, "notes": {"synthesis accuracy": share}}, {}] for share in (0.5, 0.9)
    ]
    made = [made_records.fake_record("target", s, rounds=each) for s, each in enumerate(noted)]
    _, table = results.synthesis_section([*made, made_records.fake_record()])
    assert table.splitlines()[2:] == ["| target | 70 |"]
    assert results.synthesis_section([made_records.fake_record()]) == []
