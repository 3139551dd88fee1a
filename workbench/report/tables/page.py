"""The scheme of all pages: frame -> table -> page.

A frame of report/frames.py has a row per run and numbers. A table has a row per group of runs and
text: `group_table`, `accuracy_table`, and the differences of a `Comparison`. A `Page` is Markdown:
what was run, for each setting its tables, and definitions.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import pandas as pd
from IPython.display import display

from stamp_core.core.atomic import atomic_write
from stamp_core.results.records import Record
from workbench.report import metrics, ranks
from workbench.report.text import DASH, MB, count_range, marked, mean_std, plain, score, significant

Cell = Callable[[pd.DataFrame], str]  # text for the runs of a group

FINAL = "final accuracy"
ENDPOINTS = {  # what findings compare: measures and their columns
    FINAL: "main_accuracy",
    "average incremental accuracy": "main_average_incremental_accuracy",
}
EQUAL = 0.5  # points: an interval that contains 0 and lies within ± so many shows equality
_PERCENT = pd.Series({"mean": 100, "std": 100, "count": 1})  # and the count as it is
_EXCLUDES_0 = ("above", "below")
HOLDS = "‡"  # differs from 0 after Holm's correction for the table
SAME = "≈"  # the interval shows equality


def show(table: pd.DataFrame) -> None:
    """Display all rows of a table in a notebook, a `score_table` as text."""
    table = score_text(table) if table.columns.nlevels > 1 else table
    with pd.option_context("display.max_rows", None):
        display(table)


# --- tables


def group_table(rows: pd.DataFrame, keys: Sequence[str], cells: Mapping[str, Cell]) -> pd.DataFrame:
    """One row a group of runs with the same keys, as text: the keys, n, and the cells."""
    return pd.DataFrame(
        {
            **dict(zip(keys, map(str, values), strict=True)),
            "n": str(len(runs)),
            **{name: cell(runs) for name, cell in cells.items()},
        }
        for values, runs in rows.groupby(list(keys), sort=False)
    )


def score_table(rows: pd.DataFrame, keys: Sequence[str], scores: Mapping[str, str]) -> pd.DataFrame:
    """One row a group of runs with the same keys, as numbers in %: mean, std and n of each score.

    `keys` and the number of runs are the index, columns are pairs as ("forgetting", "mean"): so
    `table["forgetting"].sort_values("mean")` sorts it, `.plot.barh()` draws it, and `.to_latex()`
    prints it for a paper.
    """
    counted = rows.assign(runs=rows.groupby(list(keys)).seed.transform("size"))
    groups = counted.groupby([*keys, "runs"], sort=False)
    parts = {
        name: groups[column].agg(["mean", "std", "count"]).mul(_PERCENT)
        for name, column in scores.items()
    }
    return pd.concat(parts, axis=1).rename(columns={"count": "n"})


def score_text(table: pd.DataFrame) -> pd.DataFrame:
    """A `score_table` as text, `54.1 ± 1.2`, without scores that no row has."""
    runs = table.index.get_level_values("runs")
    cells = {
        name: list(map(score, *(table[name][part] for part in ("mean", "std", "n")), runs))
        for name in table.columns.unique(0)
    }
    defined = {name: texts for name, texts in cells.items() if set(texts) != {DASH}}
    keys = table.index.to_frame(index=False).astype(str).rename(columns={"runs": "n"})
    return keys.assign(**defined)


def percent(column: str) -> Cell:
    """A cell with mean ± standard deviation of a fraction, in %."""
    return lambda runs: mean_std(runs[column])


def average(column: str, unit: float = 1.0, figures: int = 3) -> Cell:
    """A cell with the mean of a size or time, in a unit."""
    return lambda runs: significant(runs[column].mean() / unit, figures)


def peak(column: str, figures: int = 3) -> Cell:
    """A cell with the largest number of bytes, in MB."""
    return lambda runs: significant(runs[column].max() / MB, figures)


def accuracy_table(rows: pd.DataFrame, keys: Sequence[str], heading: str) -> pd.DataFrame:
    """Accuracy as text: a row per combination of keys, a column per value in `heading`."""
    (by,), table = columns_in(heading), []
    for values, group in rows.groupby(list(keys), sort=False):
        counts = count_range(group.groupby(by).seed.nunique())
        labels = dict(zip(keys, values, strict=True)) | {"n": counts}
        for value in sorted(rows[by].unique()):
            scores = group[group[by] == value].main_accuracy
            labels[heading.format(**{by: value})] = mean_std(scores)
        table.append(labels)
    return pd.DataFrame(table)


# --- differences


def verdict(low: float, high: float, holds: bool = True) -> str:
    """What a 95 % interval in points shows: above, below, equal, open; undefined without one.

    An interval that excludes 0 counts as above or below only if it `holds`: after a correction.
    """
    if math.isnan(low) or math.isnan(high):
        return "undefined"
    if holds and (low > 0 or high < 0):
        return "above" if low > 0 else "below"
    return "equal" if max(-low, high) <= EQUAL else "open"


def paired_differences(
    rows: pd.DataFrame,
    name: str,
    bases: Iterable[object],
    by: Sequence[str],
    measures: Mapping[str, str] = ENDPOINTS,
) -> pd.DataFrame:
    """One row for each base, `name`, model, group of `by` and measure: the difference from `base`.

    Differences are paired by seed, in percentage points, with n, the ends of their 95 % interval
    and its `verdict`. `measures` are names and columns. Of a base the first model counts.
    """
    keys = list(dict.fromkeys([*by, name, "model"]))
    table = []
    for base in bases:
        reference = rows[rows[name] == base].drop_duplicates([*by, "seed"])
        for values, group in rows[rows[name] != base].groupby(keys, sort=False):
            labels = dict(zip(keys, values, strict=True))
            others = reference[(reference[list(by)] == [labels[key] for key in by]).all(axis=1)]
            for measure, column in measures.items() if len(others) else ():
                one, other = (
                    dict(zip(r.seed, 100 * r[column], strict=True)) for r in (group, others)
                )
                pair = metrics.paired_difference(one, other)
                about = {**labels, "base": base, "measure": measure, "difference": pair["mean"]}
                table.append({**about, **pair})
    columns = ["base", *keys, "measure", "difference", "low", "high", "n"]
    pairs = pd.DataFrame(table, columns=columns)
    return pairs.assign(interval=[*map(verdict, pairs.low, pairs.high)])


def difference_sections(pairs: pd.DataFrame, keys: Sequence[str], heading: str) -> list[str]:
    """For each base its table, and how many intervals show a difference, or equality.

    Where `heading` does not name the measure, each has a table of its own.
    """
    by = ["base"] if "measure" in columns_in(heading) else ["base", "measure"]
    sections = []
    for values, own in pairs.groupby(by, sort=False):
        p = [ranks.interval_p_value(pair.low, pair.high, pair.n) for pair in own.itertuples()]
        corrected = own.assign(holds=ranks.holm(p) < ranks.LEVEL)
        table = difference_table(corrected, keys, heading)
        sections += [difference_heading(*values), markdown(table)]
        if count := int(own.low.notna().sum()):
            outside = int(own.interval.isin(_EXCLUDES_0).sum())
            chance = f"{outside} of {count} intervals exclude 0; by chance alone about"
            after = f"{int(corrected.holds.sum())} hold after Holm's correction ({HOLDS})"
            same = f"{int((own.interval == 'equal').sum())} show equality ({SAME})."
            sections.append(f"{chance} {max(1, round(0.05 * count))} would; {after}; {same}")
    return sections


def difference_heading(base: object, measure: object = FINAL) -> str:
    """The line above a table of differences."""
    return f"Difference from {base}{'' if measure == FINAL else f' in {measure}'}:"


def difference_table(pairs: pd.DataFrame, keys: Sequence[str], heading: str) -> pd.DataFrame:
    """`paired_differences` as text: a row per combination of keys, a column per `heading`."""
    table = []
    for values, group in pairs.groupby(list(keys), sort=False):
        labels = dict(zip(keys, values, strict=True)) | {"n": count_range(group.n)}
        cells = {heading.format(**row): _cell(row) for row in group.to_dict("records")}
        table.append(labels | cells)
    return pd.DataFrame(table).fillna(DASH)


def _cell(row: Mapping[str, Any]) -> str:
    """A difference, `+8.6 (+5.1 to +12.0)`: bold without 0, marked if it `holds` or is equal."""
    text = f"{row['difference']:+z.1f}" if row["n"] else DASH
    if row["interval"] == "undefined":
        return text
    low, high = (limit(row[end], row["interval"] in _EXCLUDES_0) for end in ("low", "high"))
    text += f" ({low} to {high})"
    text = f"**{text}**" if row["interval"] in _EXCLUDES_0 else text
    marks = {HOLDS: row.get("holds"), SAME: row["interval"] == "equal"}
    return " ".join([text, *(mark for mark, shown in marks.items() if shown)])


def limit(value: float, excludes_0: bool) -> str:
    """An end of an interval; with more digits where one would say that it includes 0."""
    small = excludes_0 and 0 < abs(value) < 0.05
    digits = -math.floor(math.log10(abs(value))) if small else 1
    return f"{value:+z.{digits}f}"


def columns_in(heading: str) -> list[str]:
    """The columns that stand in braces in a heading."""
    return [name for _, name, *_ in Formatter().parse(heading) if name]


class Comparison(NamedTuple):
    """Differences of each value of `name` from the `bases`, paired in groups of `by`."""

    name: str
    bases: Sequence[object]  # none: the first value, named as its column
    by: Sequence[str]
    heading: str
    keys: Sequence[str] = ("method",)
    measures: Mapping[str, str] = ENDPOINTS
    select: Callable[[pd.DataFrame], pd.DataFrame] = lambda rows: rows  # and sort

    def differences(self, rows: pd.DataFrame) -> pd.DataFrame:
        rows = self.select(rows)
        if self.bases:
            return paired_differences(rows, self.name, self.bases, self.by, self.measures)
        pairs = paired_differences(rows, self.name, rows[self.name][:1], self.by, self.measures)
        named = [self.heading.format(**{self.name: base}) for base in pairs.base]
        return pairs.assign(base=named)


# --- pages


class Page(NamedTuple):
    """A page of one shape: a frame of runs, a table, and tables of differences."""

    name: str  # of its file
    title: str
    frame: Callable[[Sequence[Record]], pd.DataFrame]
    table: Callable[[pd.DataFrame], pd.DataFrame]
    comparisons: Sequence[Comparison] = ()

    def differences(self, rows: pd.DataFrame, base: object) -> pd.DataFrame:
        """The differences from one base, as numbers."""
        pairs = pd.concat(each.differences(rows) for each in self.comparisons)
        return pairs[pairs.base == base].drop(columns="base")

    def section(self, rows: pd.DataFrame) -> list[str]:
        parts = [markdown(self.table(rows))]
        for each in self.comparisons:
            parts += difference_sections(each.differences(rows), each.keys, each.heading)
        return parts

    def write(self, records: Sequence[Record], folder: Path) -> Path:
        def section(own: Sequence[Record]) -> list[str]:
            return self.section(self.frame(own))

        return write_page(folder / f"{self.name}.md", self.title, records, section)


def markdown(rows: pd.DataFrame) -> str:
    """A GitHub table; columns are not padded, so that one changed cell is one changed line."""
    if "method" in rows:
        rows = rows.assign(method=rows.method.map(marked))
    lines = [list(rows.columns), ["---"] * len(rows.columns), *rows.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(map(plain, line)) + " |" for line in lines)


def definitions(title: str) -> str:
    """A section of definitions.md."""
    text = Path(__file__).with_name("definitions.md").read_text(encoding="utf-8")
    return text.split(f"# {title}\n", 1)[1].partition("\n# ")[0].strip()


def describe_runs(records: Sequence[Record]) -> str:
    """The numbers of runs and methods, settings, n, seeds, arithmetic, and which runs diverged."""
    settings, methods, seeds = (list(dict.fromkeys(r.run[k] for r in records)) for k in range(3))
    n = count_range(Counter(record.name for record in records).values())
    return (
        f"{len(records)} runs: {len(methods)} method{'s' * (len(methods) > 1)}; "
        f"setting{'s' * (len(settings) > 1)} {', '.join(map(str, settings))}; "
        f"n = {n} seeds for each ({', '.join(map(str, sorted(seeds)))}). "
        f"Arithmetic: {common_arithmetic(records)}."
        + "".join(f" Diverged, so without a score: {run}." for run in diverged_runs(records))
    )


def common_arithmetic(records: Iterable[Record]) -> str:
    """The arithmetic of records, "pinned" or "machine"; an error names two that differ."""
    first: dict[str, str] = {}
    for record in records:
        found = record.about.get("identity", {}).get("arithmetic", "machine")
        first.setdefault(found, f"{record.name}, seed {record.run[2]}")
    if len(first) > 1:
        each = "; ".join(f"{name} with {kind}" for kind, name in first.items())
        raise ValueError(f"no page mixes kinds of arithmetic: {each}; train one again (make repro)")
    return next(iter(first), "none")


def diverged_runs(records: Iterable[Record]) -> list[str]:
    """The experiments and seeds that have no record, as their weights stopped being finite."""
    runs = {f"{r.name}, seed {seed}" for r in records for seed in r.about.get("diverged", {})}
    return sorted(runs)


def write_page(
    path: Path, title: str, records: Sequence[Record], section: Callable[..., list[str]]
) -> Path:
    """Write a page: what was run, a section for the records of each setting, definitions."""
    parts = [f"# {title}", describe_runs(records)]
    for setting in dict.fromkeys(record.run[0] for record in records):
        parts += [f"## {setting}", *section([r for r in records if r.run[0] == setting])]
    notes = [definitions(title), definitions("Intervals")]
    return write_parts(path, [*parts, "## Definitions", *notes])


def write_parts(path: Path, parts: Iterable[str]) -> Path:
    """Write the parts of a file that are not empty, with the folders above it."""
    text = "\n\n".join(filter(None, map(str.strip, parts)))
    with atomic_write(path) as part:
        part.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    return path
