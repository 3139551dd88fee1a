"""Coreset rules beside each other: accuracy by pictures kept, differences, what choosing costs."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stamp_core.records import Record, total
from stamp_core.tables.crossed import differences_at, sentences_at, wide_at
from stamp_core.tables.paper import DASH
from stamp_core.tables.runs import MB, amount, distinct, frame, markdown, percent

RULES = {
    "uniform": "random",
    "herding": "herding (PCS)",
    "k_centre": "k-centre",
    "least_squares": "PCS as printed",
    "nonnegative": "PCS as printed, a ≥ 0",
    "ocs": "OCS",
    "bcsr": "BCSR",
    "csrel": "CSReL",
    "sre2l": "SRe²L",
}
BASE = "random"  # what every rule has to beat
NUMBER = "{} a class"
EVERY = 10**6  # so many pictures of a class are all of them
CORESETS = f"""\
Which pictures should a client keep? Every rule in one harness: FedAvg, whose clients keep so many
pictures of each class at the end of a task, chosen (by SRe²L: made) with the model that they have
just trained, and put as many remembered pictures as new ones beside each batch, of each class as
many, with half of the loss: (CE(new) + CE(remembered)) / 2. *No memory* is FedAvg, *all pictures*
keeps everything: what a memory can hold at most, which is no bound on accuracy. Numbers are final
class-incremental accuracy of the global model in %, mean ± standard deviation over n seeds.

Differences from a {BASE} choice of as many pictures are paired by seed, in percentage points with
their 95 % Student t interval; each interval stands for itself: of twenty that hold nothing but
noise, about one leaves zero out.

*Choosing* is what one client needs to choose for one task, *training* its own training of that
task in all rounds, *share* the one over the other. MB are what the client that keeps most has on
its disk at the end, soft labels included. *Events* are how often a rule said that something was
out of the ordinary, over all clients, tasks and seeds.

SRe²L makes pictures that look to a network's batch normalisation like those that it was trained
on. To a network without any, little but the teacher's answers is left of it: *events* say so.
"""


def coresets(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run: its rule and pictures a class, accuracy, what choosing cost, and events."""
    costs = pd.DataFrame([_choosing(record) for record in distinct(records)])
    return pd.concat([frame(records), costs], axis=1)


def _choosing(record: Record) -> dict[str, Any]:
    """Rule, number, and milliseconds of one client for one task, choosing and training."""
    keep: dict[str, Any] = record.about["method"].get("memory") or {}
    chosen = [row for row in record.history if "coreset" in row["seconds"]]
    visits = sum(row["answered"] for row in chosen)
    seconds = total(chosen, "seconds", "coreset")
    trained = total(record.history, "seconds", "clients") - seconds
    events = Counter[str]()
    for row in record.history:
        events.update(row["events"])
    return {
        "rule": RULES.get(keep["rule"], keep["rule"]) if keep else "no memory",
        "pictures": keep.get("per_class", 0),
        "choosing": 1000 * seconds / visits if visits else np.nan,
        "training": 1000 * trained / visits if visits else np.nan,
        "told": dict(events),
    }


def ends(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Of the rows of `coresets` those without a memory, and those with all pictures."""
    return rows[rows.pictures == 0], rows[rows.pictures >= EVERY]


def between(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `coresets` that keep some pictures."""
    return rows[(rows.pictures > 0) & (rows.pictures < EVERY)]


def coreset_accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a rule of one setting, as text: accuracy by pictures kept, none and all."""
    none, every = ends(rows)
    found = []
    for name, group in [
        ("no memory", none),
        *between(rows).groupby("rule", sort=False),
        ("all pictures", every),
    ]:
        by_number = {
            NUMBER.format(number): percent(group[group.pictures == number].accuracy)
            for number in _numbers(rows)
        }
        if name in ("no memory", "all pictures"):
            by_number = dict.fromkeys(by_number, percent(group.accuracy))
        found.append({"rule": name, "n": str(group.seed.nunique()), **by_number})
    return pd.DataFrame(found)


def _numbers(rows: pd.DataFrame) -> list[int]:
    """The numbers of pictures that are compared, rising."""
    return sorted(between(rows).pictures.unique())


def coreset_differences(rows: pd.DataFrame, base: str = BASE) -> pd.DataFrame:
    """A row a rule and number of one setting: its paired difference from `base`, in points."""
    return differences_at(between(rows), "rule", "pictures", base)


def coreset_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a rule of one setting, as text: what choosing costs at the largest number."""
    most = max(_numbers(rows))
    return pd.DataFrame(
        [
            {
                "rule": rule,
                "pictures": str(most),
                "choosing, ms": amount(group.choosing.mean(), 2),
                "training, ms": amount(group.training.mean(), 2),
                "share": amount(group.choosing.mean() / group.training.mean(), 2),
                "MB": amount(group.disk.max() / MB, 2),
                "events": _told(between(rows[rows.rule == rule])),
            }
            for rule, group in rows[rows.pictures == most].groupby("rule", sort=False)
        ]
    )


def _told(rows: pd.DataFrame) -> str:
    """What was out of the ordinary, and how often, over all numbers of pictures."""
    events = Counter[str]()
    for told in rows.told:
        events.update(told)
    return "; ".join(f"{event} ({count})" for event, count in events.items()) or DASH


def coreset_sentences(rows: pd.DataFrame, base: str = BASE) -> str:
    """For every number of pictures a sentence: which rules differ from `base` beyond the noise."""
    return sentences_at(coreset_differences(rows, base), base, f"With {NUMBER}")


def coreset_page(records: Sequence[Record]) -> str:
    """coresets.md: accuracies, differences in numbers and in words, and costs of each setting."""
    parts = ["# Coresets", CORESETS.strip()]
    for setting, rows in coresets(records).groupby("setting", sort=False):
        parts += [f"## {setting}", markdown(coreset_accuracies(rows))]
        parts += [f"Difference from {BASE}:", markdown(wide_at(coreset_differences(rows), NUMBER))]
        parts += [coreset_sentences(rows), coreset_sentences(rows, RULES["herding"])]
        parts += ["What it costs:", markdown(coreset_costs(rows))]
    return "\n\n".join(parts) + "\n"


def write_coresets(records: Sequence[Record], folder: Path) -> Path:
    """The file written: coresets.md."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "coresets.md"
    path.write_text(coreset_page(records), encoding="utf-8", newline="\n")
    return path
