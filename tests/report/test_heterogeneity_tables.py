"""The page and the figure of data heterogeneity."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import small
from table_records import fake_record

from stamp_core.report import figures, tables
from stamp_core.results import metrics
from stamp_core.results.records import Record

MEANS = {  # by alpha, with what each seed has more than the one before it
    "fedavg": {100.0: (0.8, 0.1), 0.1: (0.6, 0.1)},
    "feddbe": {100.0: (0.3, 0.1), 0.1: (0.4, 0.1)},
    "stamp": {100.0: (0.8, 0.15), 0.1: (0.7, 0.1)},
}


def run(
    method: str, alpha: float, seed: int = 0, final: float = 0.5, name: str = "toy", **changes: Any
) -> Record:
    """A run of a sweep over alpha."""
    record = fake_record(method, seed, (final, final), sweep=["a", str(alpha)], **changes)
    record.about["setting"] = {"name": name, "split": {"alpha": alpha}}
    return record


def compared() -> list[Record]:
    """Three methods at two values of alpha, the larger one first."""
    return [
        run(method, alpha, seed, middle + more * (seed - 1))
        for method, by_alpha in MEANS.items()
        for alpha, (middle, more) in by_alpha.items()
        for seed in range(3)
    ]


@pytest.fixture
def rows() -> pd.DataFrame:
    return tables.alpha_frame(compared())


def test_a_run_has_its_alpha_and_the_accuracy_of_its_main_model() -> None:
    local = run("local", 1.0, personal_only=True)
    rows = tables.alpha_frame([run("stamp", 10.0, final=0.25), local])
    assert rows.method.tolist() == ["stamp", "local"] and rows.alpha.tolist() == [10.0, 1.0]
    assert rows.main_accuracy.tolist() == [0.25, 0.5]
    assert rows.model.tolist() == ["global", "personal"]


def test_a_trained_record_holds_its_alpha() -> None:
    record = small.run(small.tiny(split={"order": "common", "alpha": 0.5}))
    (row,) = tables.alpha_frame([record]).itertuples()
    assert (row.setting, row.method, row.alpha) == ("tiny", "fedavg", 0.5)
    last = metrics.micro_average(record.accuracy(), record.tests)[-1]
    assert row.accuracy == pytest.approx(last.mean())


def test_accuracies_are_ordered_by_alpha(rows: pd.DataFrame) -> None:
    table = tables.alpha_accuracies(rows)
    assert [*table.columns] == ["method", "model", "n", "α = 0.1", "α = 100"]
    assert table.to_numpy().tolist() == [
        ["fedavg", "global", "3", "60.0 ± 10.0", "80.0 ± 10.0"],
        ["feddbe", "global", "3", "40.0 ± 10.0", "30.0 ± 10.0"],
        ["stamp", "global", "3", "70.0 ± 10.0", "80.0 ± 15.0"],
    ]


def test_differences_are_paired_by_seed_at_the_same_alpha(rows: pd.DataFrame) -> None:
    """STAMP at 100: -5, 0 and +5 points; t of two degrees 4.303, so 0 ± 4.303 x 5 / sqrt 3."""
    pairs = tables.alpha_differences(rows).set_index(["method", "alpha"])
    assert len(pairs) == 4 and set(pairs.n) == {3}
    assert pairs.difference["stamp", 0.1] == pytest.approx(10)
    assert pairs.high["stamp", 100.0] == pytest.approx(4.303 * 5 / 3**0.5, abs=1e-2)
    assert pairs.interval["stamp", 100.0] == "includes 0"


FINDINGS = [  # the trend pairs a seed with itself at the other end: STAMP's is 5, 10, 15 points
    "- toy, accuracy at α = 100 compared with α = 0.1 (n = 3): higher for fedavg (by 20.0 to "
    "20.0); lower for feddbe (by 10.0 to 10.0); the 95 % interval includes 0 for stamp.",
    "- toy, accuracy compared with fedavg at α = 0.1 (n = 3): higher for stamp (by 10.0 to 10.0); "
    "lower for feddbe (by 20.0 to 20.0).",
    "- toy, accuracy compared with fedavg at α = 100 (n = 3): lower for feddbe (by 50.0 to 50.0); "
    "the 95 % interval includes 0 for stamp.",
]


def test_findings_follow_the_intervals(rows: pd.DataFrame) -> None:
    assert tables.alpha_findings(rows).splitlines() == FINDINGS
    middle = [run(m, 1.0, s, 0.1 * s) for m in ("fedavg", "feddbe", "stamp") for s in range(3)]
    items = tables.alpha_findings(tables.alpha_frame([*compared(), *middle])).splitlines()
    assert [items[0], items[1], items[3]] == FINDINGS  # the trend is between the ends
    first = tables.alpha_findings(rows[rows.seed == 0]).splitlines()
    assert all("(n = 1): no interval (fewer than two common seeds) for" in item for item in first)


def test_the_page_compares_with_the_methods_that_were_run(tmp_path: Path) -> None:
    others = [run(m, 1.0, s, 0.1 * s, "other") for m in ("replay", "stamp") for s in range(2)]
    path = tables.write_heterogeneity([*compared(), *others], tmp_path / "new")
    text = path.read_text(encoding="utf-8")
    assert path.name == "heterogeneity.md"
    toy, other = text.split("\n## ")[1:3]
    assert "Difference from fedavg:" in toy and "replay" not in toy
    assert "| stamp | 3 | **+10.0 (+10.0 to +10.0)** | +0.0 (-12.4 to +12.4) |" in toy
    assert "| fedavg | global | 3 | 60.0 ± 10.0 | 80.0 ± 10.0 |" in toy
    assert "\n".join(FINDINGS) in toy
    assert "Difference from replay:" in other and "fedavg" not in other


def test_the_figure_has_a_line_per_method_on_a_logarithmic_axis() -> None:
    other = [run("stamp", 0.1, name="b"), run("local", 0.1, name="b", personal_only=True)]
    first, second = figures.heterogeneity([*compared(), *other]).axes
    lines = {line.get_label(): line for line in first.lines}
    assert {name: pytest.approx(line.get_ydata()) for name, line in lines.items()} == {
        "fedavg": [60, 80],
        "feddbe": [40, 30],
        "stamp": [70, 80],
    }
    assert lines["stamp"].get_xdata() == pytest.approx([0.1, 100])
    assert first.get_xscale() == "log" and (first.get_title(), second.get_title()) == ("toy", "b")
    assert {line.get_label() for line in second.lines} == {"stamp", "local (personal)"}
    plt.close("all")
