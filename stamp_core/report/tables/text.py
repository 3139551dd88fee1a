"""Numbers as text, data frames as Markdown, and the layout that all pages share."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from IPython.display import display

from stamp_core.core.atomic import atomic_write
from stamp_core.results import metrics
from stamp_core.results.records import Record

DASH = "\N{EN DASH}"  # an undefined number
MB = 1e6
RECONSTRUCTED = ("pfeddil", "srfdil")  # from abstracts: their papers could not be read
MARK = "\N{DAGGER}"


def show(table: pd.DataFrame) -> None:
    """Display all rows of a table in a notebook: of more than sixty pandas shows ten."""
    with pd.option_context("display.max_rows", None):
        display(table)


def mean_std(fractions: Iterable[float]) -> str:
    """Fractions of several seeds in %, `54.1 ± 1.2`; with n where some of them are undefined."""
    summary = metrics.summarise(fractions)
    if not summary["n"]:
        return DASH
    text = f"{100 * summary['mean']:z.1f}"
    text += f" ± {100 * summary['std']:.1f}" if summary["n"] > 1 else ""
    return f"{text} (n = {summary['n']})" if summary["undefined"] else text


def significant(value: float, figures: int = 3) -> str:
    """A size or time with so many significant figures and no exponent; a dash for NaN."""
    if np.isnan(value):
        return DASH
    return np.format_float_positional(value, figures, unique=False, fractional=False, trim="-")


def count_range(counts: Iterable[int]) -> str:
    """Numbers of seeds, `3`, or `2 to 3` where they differ."""
    values = sorted(set(counts))
    return " to ".join(map(str, values[:: max(1, len(values) - 1)]))


def marked(method: str) -> str:
    """The name of a method, marked where it is a reconstruction."""
    return f"{method} {MARK}" if method in RECONSTRUCTED else method


def markdown(rows: pd.DataFrame) -> str:
    """A GitHub table; columns are not padded, so that one changed cell is one changed line."""
    if "method" in rows:
        rows = rows.assign(method=rows.method.map(marked))
    lines = [list(rows.columns), ["---"] * len(rows.columns), *rows.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def definitions(title: str) -> str:
    """A section of definitions.md."""
    text = Path(__file__).with_name("definitions.md").read_text(encoding="utf-8")
    return text.split(f"# {title}\n", 1)[1].partition("\n# ")[0].strip()


def describe_runs(records: Sequence[Record]) -> str:
    """What was run: numbers of runs and methods, settings, n, and the seeds."""
    settings, methods, seeds = (list(dict.fromkeys(r.run[k] for r in records)) for k in range(3))
    n = count_range(Counter(record.name for record in records).values())
    return (
        f"{len(records)} runs: {len(methods)} method{'s' * (len(methods) > 1)}; "
        f"setting{'s' * (len(settings) > 1)} {', '.join(map(str, settings))}; "
        f"n = {n} seeds for each ({', '.join(map(str, sorted(seeds)))})."
    )


def write_page(
    path: Path, title: str, records: Sequence[Record], section: Callable[[list[Record]], list[str]]
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
