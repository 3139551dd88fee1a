"""Tables and figures of coreset rules, from records made by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from stamp_core import figures, tables
from stamp_core.records import Record


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def run(
    rule: str | None,
    number: int = 5,
    seed: int = 0,
    final: float = 0.5,
    setting: str = "toy",
    **told: int,
) -> Record:
    """Two tasks of two rounds; ten clients choose in the last round of each, 0.02 s in all."""
    a = np.full((3, 2, 1, 2), final)
    nothing = np.full_like(a, np.nan)
    scores = {"global": a, "personal": nothing, "local": nothing}
    scores["initial"] = np.zeros((3, 1, 2))
    history = [
        {
            **{"step": place // 2, "round": place % 2, "loss": 1.0, "answered": 10},
            "seconds": {"clients": 0.5, "server": 0.0}
            | ({"coreset": 0.02} if rule and place % 2 else {}),
            "bytes": {"up": 1.0, "down": 1.0},
            "memory": {"process": 1, "gpu": 0},
            "disk": 1000 * number,
            "events": told if place == 3 else {},
        }
        for place in range(4)
    ]
    memory = {"memory": {"rule": rule, "per_class": number}} if rule else {}
    name = f"keep_{rule}-toy-keep_{rule}-{number}" if rule else "fedavg"
    whole = {
        **{"setting": {"name": setting}, "method": {"name": name, "kind": "replay", **memory}},
        **{"seed": seed, "group": "control", "setup": {"down": 0, "up": 0, "seconds": 0.0}},
    }
    labels = np.array([0, 0, 2, 2]) if rule else np.array([], int)
    pictures = np.full((len(labels), 1, 4, 4), 9 * min(number, 9), np.uint8)
    kept = {"pictures": pictures, "labels": labels} if rule else {}
    return Record(whole, history, scores, np.full((1, 2), 10), {}, kept=kept)


def compared() -> list[Record]:
    """OCS is 10 points above random at 2, within the noise at 5; herding 20 below at 5."""
    found = [run(None, seed=seed, final=0.3) for seed in range(3)]
    found += [run("uniform", tables.EVERY, seed, 0.9) for seed in range(3)]
    for seed in range(3):
        base = 0.5 + 0.1 * seed
        found += [run("uniform", number, seed, base) for number in (2, 5)]
        found += [run("ocs", 2, seed, base + 0.1), run("ocs", 5, seed, base + 0.05 * (seed - 1))]
        found += [run("herding", 2, seed, base), run("herding", 5, seed, base - 0.2)]
    return found


def rows() -> pd.DataFrame:
    return tables.coresets(compared())


def test_a_run_is_told_by_rule_number_and_what_choosing_cost() -> None:
    """0.04 s for 20 choices are 2 ms each; 4 x 0.5 s less these 0.04 s are 98 ms of training."""
    row = tables.coresets([run("ocs", 7, final=0.25, odd=3)]).iloc[0]
    assert (row.rule, row.pictures, row.accuracy) == ("OCS", 7, 0.25)
    assert row.choosing == pytest.approx(2.0) and row.training == pytest.approx(98.0)
    assert row.told == {"odd": 3} and row.disk == 7000
    floor = tables.coresets([run(None)]).iloc[0]
    assert (floor.rule, floor.pictures) == ("no memory", 0) and np.isnan(floor.choosing)
    assert tables.coresets([run("mine")]).rule.tolist() == ["mine"]


def test_floor_and_ceiling_stand_at_the_ends() -> None:
    table = tables.coreset_accuracies(rows()).set_index("rule")
    assert [*table.index] == ["no memory", "random", "OCS", "herding (PCS)", "all pictures"]
    assert [*table.columns] == ["n", "2 a class", "5 a class"]
    assert table.loc["no memory"].tolist() == ["3", "30.0 ± 0.0", "30.0 ± 0.0"]
    assert table.loc["all pictures"].tolist() == ["3", "90.0 ± 0.0", "90.0 ± 0.0"]
    assert table.loc["OCS"].tolist() == ["3", "70.0 ± 10.0", "60.0 ± 15.0"]


def test_differences_are_paired_by_seed_at_the_same_number() -> None:
    """OCS at 5: -5, 0 and +5 points; t of two degrees 4.303, so 0 ± 4.303 x 5 / sqrt 3."""
    pairs = tables.coreset_differences(rows()).set_index(["rule", "pictures"])
    assert len(pairs) == 4 and set(pairs.n) == {3}
    assert pairs.loc["OCS", 2].difference == pytest.approx(10)
    assert pairs.loc["OCS", 2].verdict == "higher"
    assert pairs.loc["OCS", 5].high == pytest.approx(4.303 * 5 / 3**0.5, abs=1e-2)
    assert pairs.loc["OCS", 5].verdict == "not distinguishable"
    assert pairs.loc["herding (PCS)", 5].verdict == "lower"
    assert pairs.loc["herding (PCS)", 2].difference == pytest.approx(0)


def test_sentences_say_what_the_intervals_say() -> None:
    assert tables.coreset_sentences(rows()) == (
        "With 2 a class (n = 3), more accurate than random: OCS (by 10.0 to 10.0); not to be told "
        "from random: herding (PCS). With 5 a class (n = 3), less accurate than random: herding "
        "(PCS) (by 20.0 to 20.0); not to be told from random: OCS."
    )
    against = tables.coreset_sentences(rows(), "herding (PCS)")
    assert "With 5 a class (n = 3), more accurate than herding (PCS): random" in against


def test_one_seed_says_nothing() -> None:
    records = [record for record in compared() if record.cell[2] == 0]
    said = tables.coreset_sentences(tables.coresets(records))
    assert "With 2 a class (n = 1), not to be told from random: OCS, herding (PCS)." in said


def test_costs_are_those_of_the_largest_number_and_events_of_all() -> None:
    found = [run("ocs", 2, odd=1), run("ocs", 5, odd=2), run("uniform", 5)]
    found.append(run("uniform", tables.EVERY, seed=1, odd=4))  # all pictures: no choice
    table = tables.coreset_costs(tables.coresets(found)).set_index("rule")
    assert table.loc["OCS"].to_dict() == {
        **{"pictures": "5", "choosing, ms": "2", "training, ms": "98", "share": "0.02"},
        **{"MB": "0.005", "events": "odd (3)"},
    }
    assert table.loc["random"].events == tables.DASH


def test_the_page_has_every_setting_with_its_differences(tmp_path: Path) -> None:
    found = [*compared(), run("uniform", 2, setting="other"), run("ocs", 2, setting="other")]
    path = tables.write_coresets(found, tmp_path / "new")
    text = path.read_text()
    assert path.name == "coresets.md" and text == tables.coreset_page(found)
    assert "## toy" in text and "## other" in text and text.count("What it costs:") == 2
    assert "| OCS | 3 | +10.0 (+10.0 to +10.0) | +0.0 (-12.4 to +12.4) |" in text


def lines(axis: Axes) -> dict[str, Any]:
    return {bars.get_label(): bars.lines[0] for bars in axis.containers}


def test_accuracy_by_number_between_floor_and_ceiling() -> None:
    figure = figures.coresets(compared())
    (axis,) = figure.axes
    found = lines(axis)
    assert [*found] == ["random", "OCS", "herding (PCS)"]
    assert found["OCS"].get_ydata() == pytest.approx([70, 60])
    assert found["OCS"].get_xdata() == pytest.approx([0, 1])  # the middle one of three
    across = {
        line.get_label(): line.get_ydata()[0] for line in axis.lines if len(line.get_ydata()) == 2
    }
    assert across["no memory"] == pytest.approx(30) and across["all pictures"] == pytest.approx(90)
    assert [text.get_text() for text in axis.get_xticklabels()] == ["2", "5"]
    assert "n = 3 seeds" in figure.legends[0].get_title().get_text()
    colours = {str(line.get_color()) for line in found.values()}
    assert len(colours) == 3


def test_a_rule_looks_the_same_in_both_figures_and_as_its_row() -> None:
    first, second = (
        lines(f(compared()).axes[0]) for f in (figures.coresets, figures.coreset_times)
    )
    for rule, method in {"OCS": "keep_ocs", "random": "keep_uniform"}.items():
        wanted = figures.style(method)
        for found in (first, second):
            assert found[rule].get_color() == wanted["color"]
            assert found[rule].get_marker() == wanted["marker"]


def test_time_is_that_of_one_choice_and_the_line_that_of_training() -> None:
    figure = figures.coreset_times(compared())
    (axis,) = figure.axes
    assert lines(axis)["OCS"].get_xdata() == pytest.approx([2.0])
    across = [line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == "--"]
    assert across == pytest.approx([98.0]) and axis.get_xscale() == "log"
    assert "3 seeds" in figure.legends[0].get_title().get_text()


def test_kept_pictures_are_those_of_the_largest_number_and_the_first_seed() -> None:
    """Of class 0 and 2 two pictures each; of 5 a class all values are 45, of 2 they are 18."""
    figure = figures.kept(compared(), "toy", ["a", "b", "c"])
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_yticklabels()] == [
        "random",
        "OCS",
        "herding (PCS)",
    ]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["a", "c"]
    shown = axis.images[0].get_array()
    assert shown is not None and set(np.unique(shown)) == {45, 255}
    assert int((shown == 45).sum()) == 3 * 4 * 16
    title = figure.get_suptitle()
    assert title == "toy: the first kept by client 0 of 5 a class, seed 0"


def test_pictures_in_colour_are_shown_in_colour() -> None:
    record = run("ocs")
    record.kept["pictures"] = np.repeat(record.kept["pictures"], 3, axis=1)
    shown = figures.kept([record], "toy", ["a", "b", "c"]).axes[0].images[0].get_array()
    assert shown is not None and shown.shape[2] == 3
