"""README.md and pages of docs/ against the accuracies of figures/: a claim that fails is red.

Every difference is written "`a` - `b`" with a cell per setting, every verdict "`a` is above `b` on
digits and glyphs" (or below, or not distinguishable from), every accuracy as mean ± deviation in a
table whose header names the settings. Columns of the paper have what it prints.
"""

import json
import re
from collections.abc import Iterator

import pandas as pd
import pytest

from stamp_core.core.paths import ROOT
from workbench.report import metrics, ranks
from workbench.report.tables import printed
from workbench.report.text import DASH
from workbench.workflow.profiles import read_profile

PAGES = ("README.md", "docs/results.md", "docs/protocols.md")
SMALL = ("digits", "glyphs", "glyphs_domains")
PHOTOGRAPHS = ("cifar100_c2_small", "cifar100_c20_small")
PROTOCOLS = tuple(read_profile("protocols")["grid"]["setting"])
SETTINGS = (*SMALL, *PHOTOGRAPHS, *PROTOCOLS)
PAPER = {"paper, C = 2": "tab:baselines-task2", "paper, C = 20": "tab:baselines-task20"}
WHOLE = ("sam_tam_pcs", "replay")  # with all parts of the paper, and its control
MINUS = "\N{MINUS SIGN}"
NUMBER = rf"([+{MINUS}-]?\d+\.\d+)"
INTERVAL = re.compile(rf"{NUMBER} \({NUMBER} to {NUMBER}\)")
VERDICT = re.compile(
    r"`(\w+)` is (above|below|not distinguishable from) `(\w+)` on ((?:\w+, )*\w+(?: and \w+)?)"
)


def final_accuracies() -> dict[tuple[str, str], dict[int, float]]:
    """Final accuracy in % by setting and method, and by seed."""
    names = ["drawn/accuracy", "drawn/ablation"]
    names += [*(f"cifar100/{setting}/accuracy" for setting in PHOTOGRAPHS)]
    names += ["cifar100/ablation/ablation"]
    names += [f"protocols/{setting}/accuracy" for setting in PROTOCOLS]
    rows = pd.concat([pd.read_csv(ROOT / "figures" / f"{name}.csv") for name in names])
    rows = rows.drop_duplicates(["setting", "method", "seed", "experience"])
    last = rows[rows.experience == rows.groupby("setting").experience.transform("max")]
    return {
        (str(setting), str(method)): dict(zip(part.seed, 100 * part.accuracy, strict=True))
        for (setting, method), part in last.groupby(["setting", "method"])
    }


FINAL = final_accuracies()


def difference(one: str, other: str, setting: str) -> dict[str, float]:
    """The paired difference of two methods, as the tables have it."""
    return metrics.paired_difference(FINAL[setting, one], FINAL[setting, other])


def number(text: str) -> float:
    """A number with a typographic minus."""
    return float(text.replace(MINUS, "-"))


def tables(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """The header and the cells of every row of a table that names a setting in its header."""
    header: list[str] = []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = [cell.strip("`") for cell in cells]
        elif not set(line) <= set("|-: ") and set(header) & set(SETTINGS):
            yield header, cells


@pytest.mark.parametrize("page", PAGES)
def test_every_accuracy_and_difference_in_a_table_is_that_of_the_records(page: str) -> None:
    checked = 0
    for header, cells in tables(page):
        names = re.findall(r"`(\w+)`", cells[0])
        for setting, cell in zip(header, cells, strict=True):
            if setting not in SETTINGS or not re.search(r"\d", cell):
                continue
            if MINUS in cells[0]:
                found = difference(names[0], names[1], setting)
                shown, wanted = INTERVAL.match(cell), ("mean", "low", "high")
                assert shown, (page, cells)
            else:
                found = metrics.summarise(FINAL[setting, names[0]].values())
                shown, wanted = re.match(r"(\d+\.\d) ± (\d+\.\d)", cell), ("mean", "std")
                assert shown, (page, cells)
            for text, key in zip(shown.groups(), wanted, strict=True):
                assert number(text) == pytest.approx(found[key], abs=0.0601), (page, cells, key)
            checked += 1
    assert checked > 5


@pytest.mark.parametrize("page", PAGES)
def test_every_verdict_holds_for_its_interval(page: str) -> None:
    text = re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
    verdicts = VERDICT.findall(text)
    assert len(verdicts) > 2
    for one, word, other, places in verdicts:
        for setting in re.findall(r"\w+", places.replace(" and ", " ")):
            found = difference(one, other, setting)
            holds = {
                "above": found["low"] > 0,
                "below": found["high"] < 0,
                "not distinguishable from": found["low"] <= 0 <= found["high"],
            }
            assert holds[word], (page, one, word, other, setting, found)


def test_the_share_of_the_gain_that_is_memorys_is_that_of_the_means() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))
    shares = re.findall(r"(\d+) of (\d+) on (\w+)", text)
    assert [setting for *_, setting in shares] == [*PHOTOGRAPHS, "digits", "glyphs"]
    for gained, room, setting in shares:
        for rival, points in (("replay", gained), ("joint", room)):
            found = metrics.mean([*FINAL[setting, rival].values()])
            base = metrics.mean([*FINAL[setting, "fedavg"].values()])
            assert found - base == pytest.approx(int(points), abs=0.51), (rival, setting)


@pytest.mark.parametrize("setting", SMALL)
def test_joint_training_is_the_upper_bound_of_every_global_model(setting: str) -> None:
    """In the mean over seeds, as it should be for methods that are sound."""
    means = {m: metrics.mean([*each.values()]) for (s, m), each in FINAL.items() if s == setting}
    assert max(means, key=lambda method: means[method]) == "joint"


@pytest.mark.parametrize("setting", SMALL[:2])
def test_methods_that_remember_the_past_are_above_fedavg(setting: str) -> None:
    for rival in ("refed", "affcl", "target", "glfc", "lga", "fedcil", "gem", "stamp"):
        assert difference(rival, "fedavg", setting)["mean"] > 0, rival


@pytest.mark.parametrize("page", PAGES)
def test_every_difference_has_as_many_seeds_as_the_page_says(page: str) -> None:
    """For methods with more seeds 12 on photographs, 20 on digits and glyphs; else 6, but 10 on
    glyphs_domains and 3 on protocols.
    """
    more = {name: read_profile(name)["more_seeds"]["method"] for name in ("studies", "cifar100")}
    least = dict.fromkeys(SETTINGS, 6) | dict.fromkeys(PROTOCOLS, 3) | {"glyphs_domains": 10}
    many = {(setting, name): 20 for setting in ("digits", "glyphs") for name in more["studies"]}
    many |= {(setting, name): 12 for setting in PHOTOGRAPHS for name in more["cifar100"]}
    for header, cells in tables(page):
        for setting in set(header) & set(SETTINGS):
            for name in re.findall(r"`(\w+)`", cells[0])[: 2 if MINUS in cells[0] else 1]:
                if re.search(r"\d", cells[header.index(setting)]):
                    right = many.get((setting, name), least[setting])
                    assert len(FINAL[setting, name]) >= right, (page, cells)


@pytest.mark.parametrize("page", PAGES)
def test_a_column_of_the_paper_has_its_numbers(page: str) -> None:
    for header, cells in tables(page):
        for column, cell in zip(header, cells, strict=True):
            if column in PAPER:
                table = printed.rows(PAPER[column], "CIFAR-100").accuracy.astype(str)
                assert cell == table.get(re.findall(r"`(\w+)`", cells[0])[0], DASH), (page, cells)


@pytest.mark.parametrize("page", PAGES[:2])
def test_the_seeds_that_tested_the_parts_of_stamp_are_those_after_the_first_six(page: str) -> None:
    text = re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
    (shown,) = re.findall(
        rf"first six (?:seeds )?had shown.{{,50}}have {INTERVAL.pattern} alone", text
    )
    later = [{s: a for s, a in FINAL[PHOTOGRAPHS[0], name].items() if s > 205} for name in WHOLE]
    found = metrics.paired_difference(*later)
    assert found["n"] == 6
    assert [*map(number, shown)] == [round(found[key], 1) for key in ("mean", "low", "high")]


def test_differences_of_gaps_are_those_of_the_records() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs/results.md").read_text(encoding="utf-8"))
    pattern = r"gap of `(\w+)` is (\d.{,40}) than that of `(\w+)` on (\w+)"
    claims = re.findall(pattern, text)
    assert len(claims) == 2
    for one, shown, other, setting in claims:
        rows = pd.read_csv(ROOT / "figures/cifar100" / setting / "accuracy.csv")
        last = rows[(rows.experience == rows.experience.max()) & (rows.model == "global")]
        gaps = {name: 100 * part.set_index("seed").gap for name, part in last.groupby("method")}
        found = metrics.paired_difference(gaps[one].to_dict(), gaps[other].to_dict())
        word = "larger" if found["mean"] > 0 else "smaller"
        low, high = sorted(abs(found[key]) for key in ("low", "high"))
        assert found["low"] * found["high"] > 0, (one, other)
        assert shown == f"{abs(found['mean']):.1f} points ({low:.1f} to {high:.1f}) {word}"


@pytest.mark.parametrize(("setting", "column"), [*zip(PHOTOGRAPHS, PAPER, strict=True)])
@pytest.mark.parametrize("page", PAGES[:2])
def test_the_papers_order_is_compared_as_the_pages_say(
    page: str, setting: str, column: str
) -> None:
    """By the global models, by personal ones where a method has them, and without FedAS.

    FedL2P has personal models alone.
    """
    summary = ROOT / "figures/cifar100" / setting / "summary.json"
    rows = json.loads(summary.read_text(encoding="utf-8"))[setting]
    paper = printed.rows(PAPER[column], "CIFAR-100").accuracy
    both = [name for name in paper.index if name in rows]
    text = re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
    others = [name for name in both if name != "fedas"]
    assert "thirteen methods" in text.lower() and len(both) == 13
    kinds = ("accuracy", "personal_accuracy")
    final = {name: [rows[name][kind]["mean"] for kind in kinds] for name in both}
    for names, order in ((both, 1), (both, -1), (others, 1)):
        means = [next(filter(None, final[name][::order])) for name in names]
        found = ranks.rank_correlation(means, paper[names].astype(float))
        # Plus 0.0, as a sum that rounds to 0 may be negative.
        numbers = [f"{round(found[key], 2) + 0.0:.2f}" for key in ("rho", "low", "high")]
        pattern = r"{}\D{{1,30}}{} to {}".format(
            *(re.escape(n.replace("-", MINUS)) for n in numbers)
        )
        assert re.search(pattern, text.replace("95 % interval ", "")), (page, numbers)


def test_differences_by_alpha_are_those_of_their_page() -> None:
    """Cells "+2.0 (1.5 to 2.5)" of results.md, "+2.0 (+1.5 to +2.5)" there, by method and base."""
    shown = (ROOT / "figures/cifar100/heterogeneity/heterogeneity.md").read_text(encoding="utf-8")
    found: dict[tuple[str, str], list[str]] = {}
    for base, rows in re.findall(r"Difference from (\w+):\n\n((?:\|.*\n)+)", shown):
        for method, *cells in re.findall(r"^\| (\w+) \| \d+ \|(.*)\|$", rows, re.M):
            found[method, base] = re.findall(r"[-+]?\d+\.\d+", cells[0])
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    table = text.split("| difference | α = 0.1 |")[1].split("\n\n")[0]
    rows = re.findall(rf"^\| `(\w+)` {MINUS} `(\w+)` \|(.*)\|$", table, re.M)
    assert len(rows) == 2
    for method, base, cells in rows:
        numbers = [number(text) for text in re.findall(rf"[+{MINUS}]?\d+\.\d+", cells)]
        assert numbers == [float(text) for text in found[method, base]], (method, base)


def test_accuracies_by_parameter_are_those_of_their_page() -> None:
    """Cells "20.3 ± 1.0 (1.5), ..." of results.md, a table with a column for each value there."""
    shown = (ROOT / "figures/cifar100/analyses/sensitivity.md").read_text(encoding="utf-8")
    found = dict[str, dict[str, str]]()
    for label, values, cells in re.findall(r"### (.+)\n\n(.+)\n.+\n\| stamp (.+)\n", shown):
        names, texts = ([cell.strip() for cell in row.split("|")] for row in (values, cells))
        found[label.lower()] = dict(zip(names[3:-1], texts[2:-1], strict=True))
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    table = text.split("| parameter of `stamp` |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (\d.+) \|$", table, re.M)
    assert len(rows) == len(found) > 3
    for label, cells in rows:
        pairs = re.findall(r"(\d+\.\d ± \d+\.\d) \((.+?)\)", cells)
        assert {value: text for text, value in pairs} == found[label.lower()], label


def rows_after(text: str, title: str) -> dict[str, list[float]]:
    """Of the first table after `title` all numbers with a decimal, by the name of their row."""
    lines = text.split(title, 1)[1].split("\n\n")[1 if title.endswith(":") else 0].split("\n")
    cells = [line.strip("| ").split(" | ", 1) for line in lines if line.startswith("| ")]
    return {name: [number(each) for each in re.findall(NUMBER, rest)] for name, rest in cells}


def test_accuracies_by_normalisation_are_those_of_their_page() -> None:
    shown = (ROOT / "figures/cifar100/normalisation/normalisation.md").read_text(encoding="utf-8")
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8").split("### Normalisation")[1]
    accuracies = rows_after(shown, "| method | model |")
    changes = rows_after(shown, "Difference from none:")
    rows = rows_after(text, "| method | batch normalisation | none |")
    assert len(rows) == 4
    assert rows == {name: accuracies[name] + changes[name] for name in rows}
    beside = rows_after(shown, "Difference from replay:")["stamp"]
    sentence = text.split("With either network")[1].split("TARGET")[0]
    assert [number(each) for each in re.findall(NUMBER, sentence)] == beside


def test_selection_rules_on_photographs_are_those_of_their_page() -> None:
    page = (ROOT / "figures/cifar100/coresets/coresets.md").read_text(encoding="utf-8")
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8").split("(exemplars)=")[1]
    heads = {
        "| selection |": "| selection |",
        "| difference from random |": "Difference from random:",
    }
    for shown, title in heads.items():
        found, right = rows_after(text, shown), rows_after(page, title)
        right = {name: numbers for name, numbers in right.items() if numbers}
        assert found == right and len(found) > 5, shown
