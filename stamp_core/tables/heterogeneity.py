"""Accuracy by how evenly clients share the pictures of a task: in numbers, and what they say."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from stamp_core.records import Record
from stamp_core.tables.crossed import differences_at, outcomes, seeds, sentences_at, wide_at
from stamp_core.tables.runs import frame, markdown, percent

BASES = ("fedavg", "replay")  # what the page compares with
ALPHA = "α = {:g}"
HETEROGENEITY = """\
What do unlike clients cost? All clients meet the same tasks in the same order and part the training
pictures of each among them, class by class, by shares drawn from a Dirichlet distribution with
parameter α: at 0.1 most of a class goes to one or two clients, at 100 all get about as much. With
one seed the tasks and the untrained network are the same at every α. Numbers are final
class-incremental accuracy in %, mean ± standard deviation over n seeds, of the *model* by which a
method is judged.

Differences are paired by seed, in percentage points with their 95 % Student t interval; each
interval stands for itself: of twenty that hold nothing but noise, about one leaves zero out.
"""


def by_alpha(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run: that of `frame` with α; method is its row of params.yaml, accuracy judged."""
    rows = frame(records)
    return rows.assign(
        method=[record.cell[1].split("-")[0] for record in records],
        alpha=[float(record.about["setting"]["split"]["alpha"]) for record in records],
        accuracy=rows.judged_accuracy,
    )


def alpha_accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a method of one setting, as text: accuracy by α."""
    found = []
    for method, group in rows.groupby("method", sort=False):
        by_value = {
            ALPHA.format(alpha): percent(group[group.alpha == alpha].accuracy)
            for alpha in sorted(rows.alpha.unique())
        }
        known = {"model": group.score_model.iloc[0], "n": str(group.seed.nunique())}
        found.append({"method": method, **known, **by_value})
    return pd.DataFrame(found)


def alpha_differences(rows: pd.DataFrame, base: str = BASES[0]) -> pd.DataFrame:
    """A row a method and α of one setting: its paired difference from `base`, in points."""
    return differences_at(rows, "method", "alpha", base)


def alpha_sentences(rows: pd.DataFrame, base: str = BASES[0]) -> str:
    """For every α of one setting a sentence: which methods differ from `base` beyond the noise."""
    return sentences_at(alpha_differences(rows, base), base, f"At {ALPHA}")


def alpha_trend(rows: pd.DataFrame) -> str:
    """A sentence: whose accuracy the most even shares of one setting change beyond the noise."""
    least, most = rows.alpha.min(), rows.alpha.max()
    pairs = differences_at(rows[rows.alpha.isin([least, most])], "alpha", "method", least)
    said = outcomes(pairs, "method", "rises for", "falls for", "cannot be told to change for")
    ends = f"From {ALPHA.format(least)} to {ALPHA.format(most)}"
    return f"{ends} ({seeds(pairs)}), accuracy {said}."


def heterogeneity_page(records: Sequence[Record]) -> str:
    """heterogeneity.md: accuracies of each setting, differences in numbers and in words."""
    parts = ["# Data heterogeneity", HETEROGENEITY.strip()]
    for setting, rows in by_alpha(records).groupby("setting", sort=False):
        parts += [f"## {setting}", markdown(alpha_accuracies(rows)), alpha_trend(rows)]
        for base in BASES:
            if base in set(rows.method):
                wide = wide_at(alpha_differences(rows, base), ALPHA)
                parts += [f"Difference from {base}:", markdown(wide), alpha_sentences(rows, base)]
    return "\n\n".join(parts) + "\n"


def write_heterogeneity(records: Sequence[Record], folder: Path) -> Path:
    """The file written: heterogeneity.md."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "heterogeneity.md"
    path.write_text(heterogeneity_page(records), encoding="utf-8", newline="\n")
    return path
