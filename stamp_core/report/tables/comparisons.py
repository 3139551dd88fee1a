"""Methods compared: accuracies by a value, paired differences, and what their intervals say."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from stamp_core.report.tables.text import DASH, count_range, markdown, marked, mean_std
from stamp_core.results import metrics

_ACCURACY = {"accuracy": "accuracy"}  # a measure and its column
_OUTCOMES = {  # of a 95 % interval, and how a sentence puts it
    "above 0": "higher for",
    "below 0": "lower for",
    "includes 0": "the 95 % interval includes 0 for",
    "undefined": "no interval (fewer than two common seeds) for",
}


_EXCLUDES_0 = ("above 0", "below 0")


def accuracy_table(rows: pd.DataFrame, keys: Sequence[str], by: str, heading: str) -> pd.DataFrame:
    """The keys, n, and accuracy at each value of `by`, as text: one row per first key."""
    table = []
    for _, group in rows.groupby(keys[0], sort=False):
        labels = {key: group[key].iloc[0] for key in keys} | {"n": str(group.seed.nunique())}
        for value in sorted(rows[by].unique()):
            labels[heading.format(value)] = mean_std(group[group[by] == value].accuracy)
        table.append(labels)
    return pd.DataFrame(table)


def paired_differences(
    rows: pd.DataFrame,
    name: str,
    base: object,
    by: Sequence[str],
    measures: Mapping[str, str] = _ACCURACY,
) -> pd.DataFrame:
    """One row for each `name`, model, group of `by` and measure: its difference from `base` there.

    Differences are paired by seed, in percentage points, with n, the ends of their 95 % interval
    and where it lies (above 0, below 0, includes 0, undefined). `measures` are names and columns.
    Of `base` the first model counts.
    """
    table = []
    bases = rows[rows[name] == base].drop_duplicates([*by, "seed"])
    for (*place, own, model), group in rows.groupby([*by, name, "model"], sort=False):
        others = bases[(bases[list(by)] == place).all(axis=1)]
        if own != base and len(others):
            labels = {**dict(zip(by, place, strict=True)), name: own, "model": model}
            for measure, column in measures.items():
                table.append({**labels, "measure": measure, **_difference(group, others, column)})
    columns = [*by, name, "model", "measure", "difference", "low", "high", "n", "interval"]
    return pd.DataFrame(table, columns=columns)


def _difference(rows: pd.DataFrame, others: pd.DataFrame, column: str) -> dict[str, Any]:
    one, other = (dict(zip(r.seed, 100 * r[column], strict=True)) for r in (rows, others))
    pair = metrics.paired_difference(one, other)
    low, high = pair["low"], pair["high"]
    outcome = "above 0" if low > 0 else "below 0" if high < 0 else "includes 0"
    return {
        **{"difference": pair["mean"], "low": low, "high": high, "n": int(pair["n"])},
        "interval": "undefined" if np.isnan(low) else outcome,
    }


def difference_table(
    pairs: pd.DataFrame, keys: Sequence[str], by: str, heading: str = "{}"
) -> pd.DataFrame:
    """`paired_differences` as text: one row per combination of keys, one column per `by`."""
    table = []
    for values, group in pairs.groupby(list(keys), sort=False):
        labels = dict(zip(keys, values, strict=True)) | {"n": count_range(group.n)}
        cells = {heading.format(row[by]): _cell(row) for row in group.to_dict("records")}
        table.append(labels | cells)
    return pd.DataFrame(table).fillna(DASH)


def difference_sections(
    pairs: Mapping[str, pd.DataFrame], keys: Sequence[str], by: str, heading: str = "{}"
) -> list[str]:
    """The tables of differences from each base that there are, each after a line with its name.

    Below it, how many of its intervals would exclude 0 if all differences were 0.
    """
    sections = []
    for base, own in pairs.items():
        count, outside = int(own.low.notna().sum()), int(own.interval.isin(_EXCLUDES_0).sum())
        if len(own):
            table = markdown(difference_table(own, keys, by, heading))
            sections += [f"Difference from {base}:", table]
        if count:
            chance = f"{outside} of {count} intervals exclude 0; by chance alone about"
            sections.append(f"{chance} {max(1, round(0.05 * count))} would.")
    return sections


def _cell(row: Mapping[str, Any]) -> str:
    """A difference with its interval, `+8.6 (+5.1 to +12.0)`, bold where that excludes 0."""
    text = f"{row['difference']:+z.1f}" if row["n"] else DASH
    if row["interval"] == "undefined":
        return text
    text += f" ({row['low']:+z.1f} to {row['high']:+z.1f})"
    return text if row["interval"] == "includes 0" else f"**{text}**"


def interval_sentences(pairs: pd.DataFrame, name: str, by: Sequence[str], heading: str) -> str:
    """A list item for each group of `by`: whose differences are above 0, below 0 or neither.

    `heading` names the comparison with columns of `pairs` in braces.
    """
    items = []
    for _, group in pairs.groupby(list(by), sort=False):
        outcomes = [
            f"{words} {', '.join(_names(group[group.interval == outcome], name))}"
            for outcome, words in _OUTCOMES.items()
            if outcome in set(group.interval)
        ]
        place = heading.format(**group.iloc[0].to_dict())
        items.append(f"- {place} (n = {count_range(group.n)}): {'; '.join(outcomes)}.")
    return "\n".join(items)


def _names(pairs: pd.DataFrame, name: str) -> Iterator[str]:
    """Names with their intervals where these exclude 0, and with the model if it is not global."""
    for row in pairs.to_dict("records"):
        notes = [f"{row['model']} models"] if row["model"] != "global" else []
        if row["interval"] in ("above 0", "below 0"):
            low, high = sorted((abs(row["low"]), abs(row["high"])))
            notes.append(f"by {low:.1f} to {high:.1f}")
        label = marked(str(row[name]))
        yield f"{label} ({', '.join(notes)})" if notes else label
