"""README.md and docs/results.md are what docs/findings.yaml and the tables of figures/ make."""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy import stats

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import read_params
from stamp_core.core.paths import ROOT
from workbench.report import findings
from workbench.report.tables import printed

PAGES = ("README.md", "docs/results.md")
BOOK = findings.Book()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name in (*PAGES, "docs/findings.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_pages_are_what_the_findings_make(copy):
    findings.Book(copy).write(copy)
    for name in PAGES:
        assert (copy / name).read_text("utf-8") == (ROOT / name).read_text("utf-8"), name


# --- a second computation, from the files alone


def endpoints(files: tuple[str, ...], setting: str, method: str) -> list[dict[int, float]]:
    """Final accuracy, and the mean of accuracies over experiences, by seed."""
    rows = [row for file in files for row in pd.read_csv(ROOT / file).to_dict("records")]
    own = {
        (row["seed"], row["experience"]): 100 * row["accuracy"]
        for row in rows
        if (row["setting"], row["method"]) == (setting, method)
    }
    seeds = {seed for seed, _ in own}
    stages = {s: [own[each] for each in sorted(own) if each[0] == s] for s in seeds}
    return [
        {seed: values[-1] for seed, values in stages.items()},
        {seed: sum(values) / len(values) for seed, values in stages.items()},
    ]


def naive_results(claim: findings.Claim) -> list[tuple[float, float, float]]:
    """p, low and high of each endpoint; those of a page are what it prints."""
    table = BOOK.tables[claim.setting]
    if table.page:
        return [(p, f["low"], f["high"]) for p, f in zip(claim.p_values, claim.found, strict=True)]
    ours, base = (endpoints(table.files, claim.setting, m) for m in (claim.method, claim.base))
    tests = [
        stats.ttest_1samp([one[seed] - other[seed] for seed in one.keys() & other.keys()], 0)
        for one, other in zip(ours, base, strict=True)
    ][: len(claim.expected)]  # cycles: of final accuracy alone
    return [(t.pvalue, *t.confidence_interval(0.95)) for t in tests]


@pytest.mark.parametrize("shown", [True, False], ids=["README, with Holm", "others"])
def test_every_verdict_is_that_of_a_t_test(shown: bool) -> None:
    names = [name for name, each in BOOK.findings.items() if each.readme == shown]
    claims = [claim for name in names for claim in BOOK.claims[name]]
    results = [each for claim in claims for each in naive_results(claim)]
    words = [word for claim in claims for word in claim.expected]
    order = sorted(range(len(results)), key=lambda k: results[k][0])
    rejected = itertools.takewhile(
        lambda place: results[order[place]][0] * (len(order) - place) < 0.05, range(len(order))
    )
    holds = {order[place] for place in rejected} if shown else {*range(len(order))}
    for k, ((_, low, high), word) in enumerate(zip(results, words, strict=True)):
        # The files have four decimals: accuracies, and so bounds, are known to 0.01 points.
        wanted = {naive_verdict(low + d, high + d, k in holds) for d in (-0.01, 0, 0.01)}
        assert word in wanted, (k, results[k], word)


def naive_verdict(low: float, high: float, holds: bool) -> str:
    if holds and low * high > 0:
        return "above" if low > 0 else "below"
    return "equal" if low >= -0.5 and high <= 0.5 else "open"


def test_forgetting_is_looked_up_at_the_end_of_a_run() -> None:
    setting = "cifar100_c2_pretrained"
    rows = pd.read_csv(ROOT / BOOK.tables[setting].files[0])
    last = rows[rows.experience == 5].pivot(index="seed", columns="method", values="forgetting")
    mean = 100 * (last.stamp - last.replay).mean()
    assert mean < 0  # so it is given by how much it is below
    text = BOOK.sentences("encoder", f"{{stamp - replay, {setting}, forgetting}}")
    assert text.startswith(f"{-mean:.1f} points (")


def test_the_papers_numbers_stand_beside_the_whole_method() -> None:
    rows = {line.split("|")[1].strip(): line for line in BOOK.readme_table().splitlines()}
    whole = [
        printed.rows(table, "CIFAR-100").accuracy["stamp"]
        for table in filter(None, BOOK.table.settings.values())
    ]
    assert all(f"| {number} |" in rows["STAMP"] for number in whole) and whole == [52.8, 41.3]
    parts = printed.rows(*printed.COMPONENTS).accuracy
    assert parts["stamp"] == 52.8 and parts["stamp_without_coreset"] == 44.7


# --- what is refused

PAIR = "stamp - replay"
AT = "cifar100_c2_small"


def changed(copy: Path, name: str, **values: Any) -> findings.Book:
    """The findings with other values of one."""
    file = copy / "docs" / "findings.yaml"
    content = YAML().load(file)
    content["findings"][name].update(values)
    YAML().dump(content, file)
    return findings.Book(copy)


@pytest.mark.parametrize(
    ("name", "pair", "setting", "words", "message"),
    [
        ("whole", "stamp - magic", AT, "open, open", f"no file of {AT} has magic"),
        ("whole", PAIR, "c3", "open, open", "is 'c3'; it must be one of tables"),
        ("whole", PAIR, AT, "better, open", "'better' is unknown"),
        ("whole", PAIR, AT, "below, open", "is 'below, open'; it must be above, open"),
        ("whole", PAIR, AT, "above", "is 'above'; it must be 2 verdicts"),
        ("rules", "magic - random", "twenty", "open", "has no difference of magic"),
    ],
    ids=["method", "setting", "word", "verdict", "endpoints", "page"],
)
def test_a_claim_that_the_tables_do_not_bear_is_named(copy, name, pair, setting, words, message):
    with pytest.raises(ParameterError) as refused:
        changed(copy, name, claims={pair: {setting: words}})
    assert str(refused.value).startswith(f"findings.{name}.claims.{pair}.{setting}")
    assert message in str(refused.value)


def test_a_key_a_number_and_a_marker_that_do_not_exist_are_named(copy):
    with pytest.raises(ParameterError, match=r"findings\.whole: 'colour' is unknown"):
        changed(copy, "whole", colour="red")
    shutil.copy(ROOT / "docs" / "findings.yaml", copy / "docs")
    book = changed(copy, "whole", text=f"It has {{magic, {AT}}}.")
    with pytest.raises(ParameterError, match=rf"findings\.whole: {{magic, {AT}}}: no file of {AT}"):
        book.write(copy)
    for setting, message in (("c3", "one of tables"), ("encoder_alpha100", "no file of")):
        with pytest.raises(ParameterError, match=message):
            BOOK.sentences("whole", f"{{{PAIR}, {setting}, forgetting}}")
    (copy / "README.md").write_text("# No markers\n")
    with pytest.raises(ParameterError, match=r"README\.md has no <!-- findings -->"):
        BOOK.write(copy)


# --- prose


@pytest.mark.parametrize(("page", "most"), [("README.md", 110), ("docs/results.md", 250)])
def test_a_page_is_short_in_lines_and_in_sentences(page: str, most: int) -> None:
    lines = (ROOT / page).read_text("utf-8").splitlines()
    assert len(lines) <= most
    text = re.sub(r"```.*?```", "", "\n".join(lines), flags=re.S)
    prose = [line for line in text.splitlines() if line and not re.match(r"[|#<!(]", line)]
    blocks = re.split(r"\n\s*\n|\n(?=- |\d+\. )", "\n".join(prose))
    plain = [re.sub(r"\]\([^)]*\)|[*\[`]", "", " ".join(block.split())) for block in blocks]
    names = set(read_params()["methods"])
    for sentence in (each for block in plain for each in re.split(r"(?<=[.:;?!]) ", block)):
        words = re.findall(r"[^\W\d_][\w'-]*", re.sub(r"\([^)]*\)", "", sentence))
        assert len(words) <= 25, (page, len(words), sentence)
        assert not words or words[0] not in names or "_" not in words[0], sentence


# --- what every table should show


@pytest.mark.parametrize("setting", ["digits", "glyphs", "glyphs_domains"])
def test_joint_training_is_above_every_method_with_a_global_model(setting: str) -> None:
    means = BOOK.tables[setting].runs.loc[setting].accuracy.groupby("method").mean()
    assert means.idxmax() == "joint" and np.isfinite(means).all()
