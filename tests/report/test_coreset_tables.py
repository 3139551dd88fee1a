"""The page and the figures of selection rules."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from table_records import fake_record

from stamp_core.report import figures, tables
from stamp_core.report.frames import ALL_IMAGES
from stamp_core.report.text import DASH
from stamp_core.results.records import Record


def run(
    rule: str | None,
    exemplars: int = 5,
    seed: int = 0,
    final: float = 0.5,
    setting: str = "toy",
    **events: int,
) -> Record:
    """Two tasks of two rounds; ten clients select in the last round of each, 0.02 s in all."""
    seconds = {"clients": 0.5, "server": 0.0}
    selecting = seconds | ({"coreset": 0.02} if rule else {})
    rounds = [
        {"seconds": each, "completed": 10, "disk": 1000 * exemplars}
        for each in [seconds, selecting] * 2
    ]
    rounds[-1]["events"] = events
    params = {"memory": {"selection": rule, "exemplars_per_class": exemplars}} if rule else {}
    record = fake_record(
        f"keep_{rule}" if rule else "fedavg",
        seed,
        (final, final),
        setting=setting,
        rounds=rounds,
        params=params,
        sweep=["exemplars", str(exemplars)],
    )
    if rule:  # of class 0 and 2 two images each, as bright as there are exemplars
        images = np.full((4, 1, 4, 4), 9 * min(exemplars, 9), np.uint8)
        experiences = np.array([0, 1, 1, 1])
        record.memory.update(images=images, labels=np.array([0, 0, 2, 2]), experiences=experiences)
    return record


def compared() -> list[Record]:
    """OCS is 10 points above random with 2 exemplars, 0 ± 5 with 5; herding 20 below with 5."""
    records = [run(None, seed=seed, final=0.3) for seed in range(3)]
    records += [run("uniform", ALL_IMAGES, seed, 0.9) for seed in range(3)]
    for seed in range(3):
        base = 0.5 + 0.1 * seed
        records += [run("uniform", number, seed, base) for number in (2, 5)]
        records += [run("ocs", 2, seed, base + 0.1), run("ocs", 5, seed, base + 0.05 * (seed - 1))]
        records += [run("herding", 2, seed, base), run("herding", 5, seed, base - 0.2)]
    return records


@pytest.fixture
def rows() -> pd.DataFrame:
    return tables.coreset_frame(compared())


def test_a_run_has_its_rule_exemplars_and_times() -> None:
    """0.04 s for 20 selections are 2 ms each; 4 x 0.5 s less 0.04 s are 98 ms of training each."""
    row = tables.coreset_frame([run("ocs", 7, final=0.25, odd=3)]).iloc[0]
    assert (row.selection, row.exemplars, row.accuracy, row.method) == ("OCS", 7, 0.25, "keep_ocs")
    assert row.selection_ms == pytest.approx(2.0) and row.training_ms == pytest.approx(98.0)
    assert row.events == {"odd": 3} and row.disk == 7000
    row = tables.coreset_frame([run(None)]).iloc[0]
    assert (row.selection, row.exemplars) == ("no memory", 0) and np.isnan(row.selection_ms)
    assert tables.coreset_frame([run("mine")]).selection.tolist() == ["mine"]


def test_accuracies_are_between_no_memory_and_all_images(rows: pd.DataFrame) -> None:
    table = tables.coreset_accuracies(rows).set_index("selection")
    assert [*table.columns] == ["n", "2 per class", "5 per class"]
    assert table.T.to_dict("list") == {
        "no memory": ["3", "30.0 ± 0.0", "30.0 ± 0.0"],
        "random": ["3", "60.0 ± 10.0", "60.0 ± 10.0"],
        "OCS": ["3", "70.0 ± 10.0", "60.0 ± 15.0"],
        "herding (PCS)": ["3", "60.0 ± 10.0", "40.0 ± 10.0"],
        "all images": ["3", "90.0 ± 0.0", "90.0 ± 0.0"],
    }
    limited = rows[(rows.exemplars > 0) & (rows.exemplars < ALL_IMAGES)]
    names = tables.coreset_accuracies(limited).selection
    assert names.tolist() == ["random", "OCS", "herding (PCS)"]


def test_differences_are_paired_by_seed_at_the_same_number(rows: pd.DataFrame) -> None:
    """OCS with 5: -5, 0 and +5 points; t of two degrees 4.303, so 0 ± 4.303 x 5 / sqrt 3."""
    pairs = tables.coreset_differences(rows).set_index(["selection", "exemplars"])
    assert len(pairs) == 4 and set(pairs.n) == {3}
    assert pairs.difference["OCS", 2] == pytest.approx(10)
    assert pairs.high["OCS", 5] == pytest.approx(4.303 * 5 / 3**0.5, abs=1e-2)
    assert pairs.interval.to_dict() == {
        **{("OCS", 2): "above 0", ("herding (PCS)", 2): "includes 0"},
        **{("OCS", 5): "includes 0", ("herding (PCS)", 5): "below 0"},
    }


def test_findings_follow_the_intervals_by_number(rows: pd.DataFrame) -> None:
    items = tables.coreset_findings(rows).splitlines()
    assert items[:2] == [
        "- toy, accuracy compared with random at 2 per class (n = 3): higher for OCS (by 10.0 to "
        "10.0); the 95 % interval includes 0 for herding (PCS).",
        "- toy, accuracy compared with random at 5 per class (n = 3): lower for herding (PCS) (by "
        "20.0 to 20.0); the 95 % interval includes 0 for OCS.",
    ]
    assert items[3].startswith(
        "- toy, accuracy compared with herding (PCS) at 5 per class (n = 3): higher for random (by"
    )


def test_costs_are_of_the_largest_number_and_events_of_all() -> None:
    records = [run("ocs", 2, odd=1), run("ocs", 5, odd=2), run("uniform", 5)]
    records.append(run("uniform", ALL_IMAGES, seed=1, odd=4))  # selects nothing
    table = tables.coreset_costs(tables.coreset_frame(records)).set_index("selection")
    assert table.loc["OCS"].to_dict() == {
        **{"exemplars": "5", "selection, ms": "2", "training, ms": "98", "share": "0.02"},
        **{"MB": "0.005", "events": "odd (3)"},
    }
    assert table.events["random"] == DASH


def test_the_page_has_every_setting_with_its_differences(tmp_path: Path) -> None:
    records = [*compared(), run("uniform", 2, setting="other"), run("ocs", 2, setting="other")]
    path = tables.write_coresets(records, tmp_path / "new")
    text = path.read_text(encoding="utf-8")
    toy, other = text.split("\n## ")[1:3]
    assert path.name == "coresets.md" and toy.startswith("toy") and other.startswith("other")
    assert "| OCS | 3 | **+10.0 (+10.0 to +10.0)** | +0.0 (-12.4 to +12.4) |" in toy
    assert "| OCS | 1 | +0.0 |" in other and "no interval" in other and "Costs:" in other


def test_figures_have_a_line_per_rule_by_number_and_by_time() -> None:
    (axis,) = figures.coresets(compared()).axes
    lines = {line.get_label(): line for line in axis.lines}
    assert lines["OCS"].get_xdata() == pytest.approx([2, 5])
    assert lines["OCS"].get_ydata() == pytest.approx([70, 60])
    assert "30.0 %" in axis.get_title() and "90.0 %" in axis.get_title()
    (axis,) = figures.coreset_times(compared()).axes
    dashed = [line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == "--"]
    assert axis.get_xscale() == "log" and any(x == pytest.approx(98) for x in dashed)
    plt.close("all")


def test_exemplars_are_of_the_largest_number_and_the_first_seed() -> None:
    (axis,) = figures.exemplars(compared(), "toy", ["a", "b", "c"]).axes
    labels = [text.get_text() for text in axis.get_yticklabels()]
    assert labels == ["random", "OCS", "herding (PCS)"]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["a", "c"]
    pixels = np.asarray(axis.images[0].get_array())
    assert set(np.unique(pixels)) == {45, 255} and int((pixels == 45).sum()) == 3 * 3 * 16
    record = run("ocs")
    record.memory["images"] = np.repeat(record.memory["images"], 3, axis=1)
    pixels = np.asarray(figures.exemplars([record], "toy", [*"abc"]).axes[0].images[0].get_array())
    assert pixels.shape[2] == 3  # in colour
    plt.close("all")


def test_synthetic_images_of_the_first_and_the_last_task_stand_beside_real_ones() -> None:
    """Class 0 has an image after each task, class 2 two after the last one."""
    records = []
    for place, method in enumerate(("target", "fedavg", "replay")):
        record = run("ocs")
        record.about["method"]["name"] = method
        record.memory["images"] = record.memory["images"] * 0 + np.uint8(40 * (place + 1))
        records.append(record)
    (axis,) = figures.synthetic(records, "toy", ["a", "b", "c"]).axes
    labels = [text.get_text() for text in axis.get_yticklabels()]
    assert labels == [
        f"{name}, {when} task" for name in ("replay", "target") for when in ("first", "last")
    ]
    pixels = np.asarray(axis.images[0].get_array())
    values, counts = np.unique(pixels[pixels < 255], return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {40: 4 * 16, 120: 4 * 16}
    plt.close("all")
