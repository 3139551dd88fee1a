"""The ablation: what each part of STAMP is worth, beside controls that match nothing."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stamp_core import metrics
from stamp_core.records import Record
from stamp_core.tables.paper import COMPONENTS, DASH, accuracy_and_forgetting, printed
from stamp_core.tables.runs import (
    CELL,
    amount,
    differences,
    frame,
    markdown,
    percent,
    wide,
)

ABLATION = f"""\
What each part of STAMP is worth, beside controls that match nothing. Numbers are % (accuracy:
class-incremental; learning accuracy: each task right after it was learnt), mean ± standard
deviation over n seeds; {DASH} is off or undefined. *SAM* and *TAM* are matching on the server and
on the client with their radius, κ = 0 the mean instead; *coreset* is the rule and the pictures kept
of a class; *rehearsal* are the remembered pictures mixed into a batch, as a multiple of its new
ones; *otherwise* is what else differs from `stamp`. *Step* is how long the server's steps are
relative to those of `fedavg`, paired by seed: a longer step is a larger learning rate, which is why
`fedavg_step` is there. Seconds are those of all clients in a round. *Paper* is accuracy and
forgetting (AF) as it prints them for CIFAR-100 with 10 clients and 2 classes a task: another
setting, there to compare the order of the rows and not the numbers.

Differences are paired by seed, in percentage points with their 95 % Student t interval over n
seeds; each interval stands for itself: of twenty that hold nothing but noise, about one leaves zero
out.
"""
PARTS = {"control": "nothing matched", "paper": "parts of the paper", "choice": "choices"}
COVERED = {"name", "kind", "memory", "ratio", "prototype"}  # columns of their own
VERBS = {  # what another method's difference says of the one it is compared with
    ("accuracy", "lower"): "is more accurate than",
    ("accuracy", "higher"): "is less accurate than",
    ("forgetting", "higher"): "forgets less than",
    ("forgetting", "lower"): "forgets more than",
}


def part(record: Record) -> str:
    """The part of the ablation that a run belongs to, a key of PARTS: a control matches nothing."""
    about = record.about["method"]
    if not any((about.get(place) or {}).get("kappa") for place in ("spatial", "temporal")):
        return "control"
    return "paper" if record.cell[1] in printed(*COMPONENTS).index else "choice"


def by_part(records: Sequence[Record]) -> list[Record]:
    """The records, those of one part together."""
    return sorted(records, key=lambda record: [*PARTS].index(part(record)))


def variant(record: Record) -> str:
    """The method's name, with its server's step where that is not 1."""
    about = record.about["method"]
    step = about.get("step", 1.0)
    return str(about["name"]) + ("" if step == 1 else f" (step {step:g})")


def ablation(records: Sequence[Record]) -> pd.DataFrame:
    """One row a variant and setting for people, as text: what is on, and what it comes to."""
    records = by_part(records)
    rows = frame(records).assign(record=records)
    whole: dict[str, Any] = next((r.about["method"] for r in records if r.cell[1] == "stamp"), {})
    found = []
    for (setting, _), cell in rows.groupby(CELL, sort=False):
        base = rows[(rows.setting == setting) & (rows.method == "fedavg")]
        found.append(
            {"setting": setting, **_made_of(cell.record.iloc[0], whole), **_worth(cell, base)}
        )
    return pd.DataFrame(found)


def _made_of(record: Record, whole: dict[str, Any]) -> dict[str, str]:
    """What a variant consists of, from the parameters of its run; `whole` are those of stamp."""
    about = record.about["method"]
    rate, ratio = about.get("prototype"), about.get("ratio")
    return {
        "variant": variant(record),
        "part": PARTS[part(record)],
        "SAM": _radius(about.get("spatial")),
        "TAM": _radius(about.get("temporal")),
        "coreset": _coreset(about),
        "prototypical loss": f"{rate:g}" if rate else DASH,
        "rehearsal": f"{ratio:g}" if ratio else DASH,
        "otherwise": ", ".join(_otherwise(about, whole)) or DASH,
    }


def _radius(matching: dict[str, Any] | None) -> str:
    """The radius of a matching, or that there is none."""
    return f"κ = {matching['kappa']:g}" if matching else DASH


def _coreset(about: dict[str, Any]) -> str:
    """The rule and size of a memory, and whether anything reads it."""
    memory, temporal = about.get("memory") or {}, about.get("temporal") or {}
    if not memory.get("per_class"):
        return DASH
    read = about.get("ratio") or temporal.get("source") in ("memory", "prototypes", "mean pictures")
    return f"{memory['rule']}, {memory['per_class']}" + ("" if read else " (not read)")


def _otherwise(about: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    """What a method of stamp's kind does otherwise than stamp, beside what has a column."""
    if about.get("kind") != whole.get("kind"):
        return
    for name in sorted(about.keys() - COVERED):
        mine, theirs = about[name], whole[name]
        if not isinstance(mine, dict) and mine is not None and mine != theirs:
            yield f"{name} {mine}"
        if isinstance(mine, dict) and isinstance(theirs, dict):
            keys = [key for key in mine if key != "kappa" and mine[key] != theirs[key]]
            yield from (f"{name}.{key} {mine[key]}" for key in keys)


def _worth(rows: pd.DataFrame, base: pd.DataFrame) -> dict[str, str]:
    """What the runs of a cell come to; `base` are those of fedavg in the same setting."""
    mine, theirs = (dict(zip(r.seed, r.step_length, strict=True)) for r in (rows, base))
    ratio = metrics.describe(mine[seed] / theirs[seed] for seed in mine.keys() & theirs.keys())
    return {
        "n": str(len(rows)),
        "accuracy": percent(rows.judged_accuracy),
        "forgetting": percent(rows.judged_forgetting),
        "learning accuracy": percent(rows.judged_learning_accuracy),
        "step": amount(ratio["mean"]) if ratio["n"] else DASH,
        "s / round": amount(rows.client_seconds.mean(), 2),
        "paper (CIFAR-100)": accuracy_and_forgetting(rows.method.iloc[0], *COMPONENTS),
    }


def sentences(records: Sequence[Record], setting: str, against: str) -> str:
    """Two sentences made from the intervals: what `against` is beyond the noise, and what not."""
    controls = {record.cell[1] for record in records if part(record) == "control"}
    rows = differences(by_part(records), against)
    rows = rows[rows.setting == setting]
    beyond, within = [], []
    for (measure, word), verb in VERBS.items():
        found = rows[(rows.measure == measure) & (rows.verdict == word)]
        beyond += [f"{verb} {_listed(found, controls)}"] if len(found) else []
    for measure, found in rows[~rows.verdict.isin(["higher", "lower"])].groupby("measure"):
        within.append(f"in {measure} from {_listed(found, controls)}")
    holds = f"Beyond the noise {against} {'; '.join(beyond) or 'differs from none of these'}."
    if not within:
        return f"{holds} It can be told from all of these in both."
    return f"{holds} It cannot be told {'; '.join(within)}."


def _listed(rows: pd.DataFrame, controls: set[str]) -> str:
    """The methods of some differences, those from controls with their intervals."""
    named = []
    for row in rows.itertuples():
        if np.isnan(row.low):
            named.append(f"{row.method} (no interval)")
        elif row.method in controls:
            low, high = sorted(abs(end) for end in (row.low, row.high))
            size = f" (by {low:.1f} to {high:.1f})" if row.low * row.high > 0 else ""
            named.append(f"the control {row.method}{size}")
        else:
            named.append(row.method)
    return ", ".join(named)


def ablation_page(records: Sequence[Record]) -> str:
    """ablation.md: of each setting what every variant is and comes to, and two tables of pairs."""
    records, parts = by_part(records), ["# Ablation", ABLATION.strip()]
    for setting, rows in ablation(records).groupby("setting", sort=False):
        parts += [f"## {setting}", markdown(rows.drop(columns="setting"))]
        for against in ("stamp", "replay"):
            compared = differences(records, against)
            compared = compared[compared.setting == setting]
            if len(compared):
                found = sentences(records, setting, against)
                parts += [f"Difference from {against}:", markdown(wide(compared)), found]
    return "\n\n".join(parts) + "\n"


def write_ablation(records: Sequence[Record], folder: Path) -> Path:
    """The file written: ablation.md."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ablation.md"
    path.write_text(ablation_page(records), encoding="utf-8", newline="\n")
    return path
