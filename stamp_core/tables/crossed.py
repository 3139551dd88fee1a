"""Methods at several values of one number: paired differences, in numbers and in words."""

from collections.abc import Iterator

import pandas as pd

from stamp_core import metrics
from stamp_core.tables.runs import points, verdict


def differences_at(rows: pd.DataFrame, who: str, at: str, base: object) -> pd.DataFrame:
    """A row for each of `who` and value of `at`: its paired difference from `base`, in points."""
    found = []
    for (name, value), group in rows.groupby([who, at], sort=False):
        other = rows[(rows[who] == base) & (rows[at] == value)]
        mine, theirs = (dict(zip(r.seed, 100 * r.accuracy, strict=True)) for r in (group, other))
        pair = metrics.paired(mine, theirs)
        if name != base:
            found.append(
                {
                    **{who: name, at: value, "difference": pair["mean"]},
                    **{"low": pair["low"], "high": pair["high"], "n": int(pair["n"])},
                    "verdict": verdict(pair["low"], pair["high"]),
                }
            )
    columns = [who, at, "difference", "low", "high", "n", "verdict"]
    return pd.DataFrame(found, columns=columns)


def sentences_at(pairs: pd.DataFrame, base: str, heading: str) -> str:
    """For every value a sentence on the rows of `differences_at`: which leave the noise."""
    who, at = pairs.columns[:2]
    words = (f"more accurate than {base}:", f"less accurate than {base}:")
    found = []
    for value, group in pairs.groupby(at):
        said = outcomes(group, who, *words, f"not to be told from {base}:")
        found.append(f"{heading.format(value)} ({seeds(group)}), {said}.")
    return " ".join(found)


def outcomes(pairs: pd.DataFrame, who: str, higher: str, lower: str, neither: str) -> str:
    """Who is higher and lower, with the intervals, and who is neither, each after its words."""
    told = {"higher": higher, "lower": lower}
    said = [
        f"{words} {', '.join(_named(pairs[pairs.verdict == verdict_], who))}"
        for verdict_, words in told.items()
        if (pairs.verdict == verdict_).any()
    ]
    rest = pairs[~pairs.verdict.isin(list(told))][who]
    return "; ".join([*said, *([f"{neither} {', '.join(rest)}"] if len(rest) else [])])


def seeds(pairs: pd.DataFrame) -> str:
    """How many seeds are behind some differences."""
    return f"n = {', '.join(map(str, sorted(set(pairs.n))))}"


def _named(pairs: pd.DataFrame, who: str) -> Iterator[str]:
    """Names with the interval of their difference."""
    for _, row in pairs.iterrows():
        low, high = sorted(abs(end) for end in (row.low, row.high))
        yield f"{row[who]} (by {low:.1f} to {high:.1f})"


def wide_at(pairs: pd.DataFrame, heading: str) -> pd.DataFrame:
    """The rows of `differences_at` as text, one for each name, by rising value."""
    who, at = pairs.columns[:2]
    found: dict[str, dict[str, str]] = {}
    for _, row in pairs.sort_values(at, kind="stable").iterrows():
        line = found.setdefault(row[who], {who: row[who], "n": str(row.n)})
        line[heading.format(row[at])] = points(row)
    return pd.DataFrame(found.values())
