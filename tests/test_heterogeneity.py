"""The table and the figure of data heterogeneity, from records made by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import small
from matplotlib.axes import Axes

from stamp_core import figures, metrics
from stamp_core.records import Record
from stamp_core.tables import heterogeneity as tables


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def run(
    method: str = "fedavg",
    alpha: float = 1.0,
    seed: int = 0,
    final: float = 0.5,
    setting: str = "toy",
    own: bool = False,
) -> Record:
    """Two tasks of one round as a sweep over alpha leaves them; with `own` no global model."""
    a = np.full((3, 2, 1, 2), final)
    nothing = np.full_like(a, np.nan)
    scores = {"global": nothing if own else a, "personal": a if own else nothing, "local": nothing}
    scores["initial"] = np.zeros((3, 1, 2))
    history = [
        {
            **{"step": step, "round": 0, "loss": 1.0, "answered": 1, "disk": 0},
            **{"seconds": {"clients": 0.5, "server": 0.0}, "bytes": {"up": 1.0, "down": 1.0}},
            "memory": {"process": 1, "gpu": 0},
        }
        for step in range(2)
    ]
    name = f"{method}-{setting}-{method}-{alpha}"
    whole = {
        **{"setting": {"name": setting, "split": {"alpha": alpha}}, "method": {"name": name}},
        **{"seed": seed, "group": "federated", "setup": {"down": 0, "up": 0, "seconds": 0.0}},
    }
    return Record(whole, history, scores, np.full((1, 2), 10), {})


MEANS = {  # by alpha, with what each seed has more than the one before it
    "fedavg": {100.0: (0.8, 0.1), 0.1: (0.6, 0.1)},
    "feddbe": {100.0: (0.3, 0.1), 0.1: (0.4, 0.1)},
    "stamp": {100.0: (0.8, 0.15), 0.1: (0.7, 0.1)},
}


def compared() -> list[Record]:
    """Three methods at two values of alpha, the larger one first."""
    return [
        run(method, alpha, seed, middle + more * (seed - 1))
        for method, by_alpha in MEANS.items()
        for alpha, (middle, more) in by_alpha.items()
        for seed in range(3)
    ]


def rows() -> pd.DataFrame:
    return tables.by_alpha(compared())


# ------------------------------------------------------------------ the table


def test_a_run_is_told_by_its_row_its_alpha_and_the_model_that_counts() -> None:
    found = tables.by_alpha(
        [run("stamp", 10.0, final=0.25), run("local", 1.0, final=0.75, own=True)]
    )
    assert found.method.tolist() == ["stamp", "local"]
    assert found.alpha.tolist() == [10.0, 1.0] and found.accuracy.tolist() == [0.25, 0.75]
    assert found.score_model.tolist() == ["global", "personal"]


def test_a_real_record_holds_its_alpha() -> None:
    record = small.run(small.tiny(split={"order": "common", "alpha": 0.5}))
    (row,) = tables.by_alpha([record]).itertuples()
    assert (row.setting, row.method, row.alpha) == ("tiny", "fedavg", 0.5)
    last = metrics.pooled(record.accuracy(), record.tests)[-1]
    assert row.accuracy == pytest.approx(last.mean())


def test_accuracies_stand_by_rising_alpha() -> None:
    table = tables.alpha_accuracies(rows())
    assert [*table.columns] == ["method", "model", "n", "α = 0.1", "α = 100"]
    assert table.to_numpy().tolist() == [
        ["fedavg", "global", "3", "60.0 ± 10.0", "80.0 ± 10.0"],
        ["feddbe", "global", "3", "40.0 ± 10.0", "30.0 ± 10.0"],
        ["stamp", "global", "3", "70.0 ± 10.0", "80.0 ± 15.0"],
    ]


def test_differences_are_paired_by_seed_at_the_same_alpha() -> None:
    """STAMP at 100: -5, 0 and +5 points; t of two degrees 4.303, so 0 ± 4.303 x 5 / sqrt 3."""
    pairs = tables.alpha_differences(rows()).set_index(["method", "alpha"])
    assert len(pairs) == 4 and set(pairs.n) == {3}
    assert pairs.loc[("stamp", 0.1), "difference"] == pytest.approx(10)
    assert pairs.loc[("stamp", 100.0), "high"] == pytest.approx(4.303 * 5 / 3**0.5, abs=1e-2)
    assert pairs.verdict.to_dict() == {
        **{("feddbe", 0.1): "lower", ("feddbe", 100.0): "lower"},
        **{("stamp", 0.1): "higher", ("stamp", 100.0): "not distinguishable"},
    }


def test_sentences_say_what_the_intervals_say() -> None:
    """The trend pairs a seed with itself at the other end: STAMP's is 5, 10 and 15 points."""
    assert tables.alpha_sentences(rows()) == (
        "At α = 0.1 (n = 3), more accurate than fedavg: stamp (by 10.0 to 10.0); less accurate "
        "than fedavg: feddbe (by 20.0 to 20.0). At α = 100 (n = 3), less accurate than fedavg: "
        "feddbe (by 50.0 to 50.0); not to be told from fedavg: stamp."
    )
    assert tables.alpha_trend(rows()) == (
        "From α = 0.1 to α = 100 (n = 3), accuracy rises for fedavg (by 20.0 to 20.0); falls for "
        "feddbe (by 10.0 to 10.0); cannot be told to change for stamp."
    )


def test_what_lies_between_the_ends_has_no_say_in_the_trend() -> None:
    between = [run(m, 1.0, s, 0.1 * s) for m in ("fedavg", "feddbe", "stamp") for s in range(3)]
    found = tables.by_alpha([*compared(), *between])
    assert tables.alpha_trend(found) == tables.alpha_trend(rows())


def test_one_seed_says_nothing() -> None:
    found = tables.by_alpha([record for record in compared() if record.cell[2] == 0])
    assert tables.alpha_trend(found) == (
        "From α = 0.1 to α = 100 (n = 1), accuracy cannot be told to change for "
        "fedavg, feddbe, stamp."
    )
    assert "At α = 100 (n = 1), not to be told from fedavg: feddbe, stamp." in (
        tables.alpha_sentences(found)
    )


def test_the_page_compares_with_what_is_there(tmp_path: Path) -> None:
    others = [run(m, 1.0, s, 0.1 * s, "other") for m in ("replay", "stamp") for s in range(2)]
    path = tables.write_heterogeneity([*compared(), *others], tmp_path / "new")
    text = path.read_text(encoding="utf-8")
    assert path.name == "heterogeneity.md"
    toy, other = text.split("## ")[1:]
    assert toy.startswith("toy") and "Difference from fedavg:" in toy and "replay" not in toy
    assert "| method | n | α = 0.1 | α = 100 |" in toy
    assert "| stamp | 3 | +10.0 (+10.0 to +10.0) | +0.0 (-12.4 to +12.4) |" in toy
    assert "| fedavg | global | 3 | 60.0 ± 10.0 | 80.0 ± 10.0 |" in toy
    assert tables.alpha_trend(rows()) in toy and tables.alpha_sentences(rows()) in toy
    assert other.startswith("other") and "Difference from replay:" in other
    assert "fedavg" not in other


# ------------------------------------------------------------------ the figure


def lines(axis: Axes) -> dict[str, Any]:
    """The bars of each line by its name."""
    return {str(bars.get_label()): bars for bars in axis.containers}


def test_a_line_a_method_on_a_logarithmic_axis() -> None:
    (axis,) = figures.heterogeneity(compared()).axes
    found = {name: bars.lines[0] for name, bars in lines(axis).items()}
    assert {name: pytest.approx(line.get_ydata()) for name, line in found.items()} == {
        "fedavg": [60, 80],
        "feddbe": [40, 30],
        "stamp": [70, 80],
    }
    assert axis.get_xscale() == "log" and axis.get_title() == "toy"
    assert [text.get_text() for text in axis.get_xticklabels()] == ["0.1", "100"]
    assert axis.get_xticks() == pytest.approx([0.1, 100])
    assert found["feddbe"].get_xdata() == pytest.approx([0.1, 100])  # the middle one of three
    away = np.log10(found["stamp"].get_xdata()) - [-1, 2]
    assert away == pytest.approx([0.3, 0.3])  # of a decade, however far the values are apart


def test_bars_are_intervals_and_stand_beside_each_other_around_their_alpha() -> None:
    """Of neighbours a decade apart none comes nearer to the other's alpha than to its own."""
    many = [
        run(f"m{k}", alpha, seed, 0.5 + 0.1 * seed)
        for k in range(7)
        for alpha in (0.1, 1.0, 10.0, 100.0)
        for seed in range(3)
    ]
    (axis,) = figures.heterogeneity(many).axes
    places = np.log10([bars.lines[0].get_xdata() for bars in lines(axis).values()])  # [7, 4]
    assert np.abs(places - [-1, 0, 1, 2]).max() <= 0.31
    assert np.diff(places, axis=0).min() > 0.09
    half = metrics.interval([50.0, 60.0, 70.0])[1]
    for bars in lines(axis).values():
        for x, ends in zip(bars.lines[0].get_xdata(), bars.lines[2][0].get_segments(), strict=True):
            assert ends == pytest.approx(np.array([[x, 60 - half], [x, 60 + half]]))
    low, high = axis.get_xlim()
    assert low < 10 ** places.min() and high > 10 ** places.max()


def test_values_that_are_near_each_other_move_the_lines_less() -> None:
    records = [run(name, alpha) for name in "ab" for alpha in (1.0, 2.0, 100.0)]
    (axis,) = figures.heterogeneity(records).axes
    places = np.log10([bars.lines[0].get_xdata() for bars in lines(axis).values()])
    wanted = np.log10([1, 2, 100]) + 0.3 * np.log10(2) * np.array([[-1], [1]])
    assert places == pytest.approx(wanted)


def test_a_line_alone_stands_at_its_alpha() -> None:
    (axis,) = figures.heterogeneity([run(alpha=alpha) for alpha in (0.1, 1.0)]).axes
    assert lines(axis)["fedavg"].lines[0].get_xdata() == pytest.approx([0.1, 1.0])
    (axis,) = figures.heterogeneity([run(alpha=10.0)]).axes
    assert lines(axis)["fedavg"].lines[0].get_xdata() == pytest.approx([10.0])


def test_methods_have_their_colours_and_one_legend_that_says_n() -> None:
    figure = figures.heterogeneity([*compared(), *(run("stamp", 0.1, s, 0.3, "b") for s in (0, 1))])
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("toy", "b")
    for name, bars in lines(first).items():
        assert bars.lines[0].get_color() == figures.style(name)["color"]
        assert bars.lines[0].get_marker() == figures.style(name)["marker"]
    assert lines(second)["stamp"].lines[0].get_color() == figures.style("stamp")["color"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["fedavg", "feddbe", "stamp"]
    assert legend.get_title().get_text() == "n = 2 to 3 seeds, bars: 95 % interval of the mean"


def test_a_method_without_a_global_model_says_whose_accuracy_it_shows() -> None:
    records = [run("local", alpha, s, 0.5, own=True) for alpha in (0.1, 1.0) for s in (0, 1)]
    figure = figures.heterogeneity([*records, run("fedavg", 0.1), run("fedavg", 1.0)])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["local (personal)", "fedavg"]
    assert lines(figure.axes[0])["local (personal)"].lines[0].get_color() == "0.5"


def test_four_settings_are_four_panels() -> None:
    figure = figures.heterogeneity([run(setting=name) for name in ("a", "b", "c", "d")])
    assert [axis.get_title() for axis in figure.axes] == ["a", "b", "c", "d"]


def test_what_an_interval_leaves_of_the_possible_is_cut() -> None:
    (axis,) = figures.heterogeneity([run(seed=s, final=float(s), alpha=0.1) for s in (0, 1)]).axes
    assert axis.get_ylim() == (-3, 103)
