"""Findings: what README.md and docs/results.md say, made from docs/findings.yaml and figures/.

A finding has sentences for a person, and claims: two methods, and the verdict that the tables must
give in each setting, for final accuracy and for average incremental accuracy. Numbers in sentences
are looked up. A verdict that the tables do not give, or a comparison that they do not have, fails
with the name of the finding. `make findings` writes both pages, between their markers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from stamp_core.config.decode import ParameterError, build, convert, invalid
from stamp_core.config.params import read_yaml
from stamp_core.core.atomic import atomic_write
from stamp_core.core.paths import ROOT
from workbench.report import metrics, ranks
from workbench.report.tables import page, printed
from workbench.report.text import DASH, mean_std

Verdict = Literal["above", "below", "equal", "open"]
ENDPOINTS = ("accuracy", "average_incremental_accuracy")  # final, and the mean over stages
# Of `Table.runs`, by a lookup's last word.
_COLUMNS = {"stages": ENDPOINTS[1], "first": "first", "forgetting": "forgetting"}
MINUS = "\N{MINUS SIGN}"
_WORDS = {"equal": f"equal within ±{page.EQUAL:g}"}
_LOOKUP = re.compile(r"\{(.+?)\}")
_NUMBER = r"([+-]\d+\.\d+)"


@dataclass(frozen=True)
class Table:
    """Where the numbers of a setting are: files with a row a run, or a column of a page."""

    label: str
    files: tuple[str, ...] = ()
    page: str = ""
    column: str = ""

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Accuracies and forgetting in %, by method and seed at the end of the last cycle."""
        rows = pd.concat([pd.read_csv(ROOT / file) for file in self.files])
        keys = ["setting", "method", "seed"]
        ends = rows.groupby("setting").experience
        first, last = (
            rows[rows.experience == end].drop_duplicates(keys).set_index(keys)
            for end in (ends.transform("min"), ends.transform("max"))
        )
        return 100 * last[[*ENDPOINTS, "forgetting"]].assign(first=first.accuracy).sort_index()


@dataclass(frozen=True)
class Finding:
    """What a person reads, with the comparisons behind it."""

    title: str
    text: str  # of both pages
    more: str = ""  # of docs/results.md alone
    claims: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # see `Claim`
    readme: bool = False
    figure: str = ""
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """The table of README.md: settings, the paper's table beside each or "", names of methods."""

    settings: Mapping[str, str]
    methods: Mapping[str, str]


@dataclass(frozen=True)
class Findings:
    """The blocks of docs/findings.yaml."""

    tables: Mapping[str, Any]
    table: Rows
    findings: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Claim:
    """One comparison in one setting: its differences, and the verdict each must have."""

    method: str
    base: str
    setting: str
    expected: tuple[str, ...]
    found: tuple[dict[str, float], ...]

    @property
    def p_values(self) -> list[float]:
        return [ranks.interval_p_value(f["low"], f["high"], int(f["n"])) for f in self.found]


class Book:
    """docs/findings.yaml with its numbers; every claim is checked when it is read."""

    def __init__(self, root: Path = ROOT) -> None:
        self.file = root / "docs" / "findings.yaml"
        content = build(Findings, read_yaml(self.file), self.file.name)
        self.tables = {n: build(Table, v, f"tables.{n}") for n, v in content.tables.items()}
        self.findings = {n: build(Finding, v, f"findings.{n}") for n, v in content.findings.items()}
        self.table = content.table
        self.claims = {name: [*self._claims(name)] for name in self.findings}
        self.verdicts = self._verdicts()

    def _claims(self, name: str) -> Iterator[Claim]:
        for pair, settings in self.findings[name].claims.items():
            method, base = pair.split(" - ")
            for setting, words in settings.items():
                where = f"findings.{name}.claims.{pair}.{setting}"
                expected = tuple(str(convert(w, Verdict, where)) for w in words.split(", "))
                found = self.differences(method, base, setting, where)
                if len(expected) != len(found):
                    raise invalid(where, words, f"{len(found)} verdicts, one an endpoint")
                yield Claim(method, base, setting, expected, found)

    def differences(
        self, method: str, base: str, setting: str, where: str
    ) -> tuple[dict[str, float], ...]:
        """The paired difference of each endpoint, by the tables of a setting."""
        table = self._table(setting, where)
        if table.page:
            return (*_page_differences(table, method, base, where),)
        return tuple(self.difference(method, base, setting, each, where) for each in ENDPOINTS)

    def difference(
        self, method: str, base: str, setting: str, column: str, where: str
    ) -> dict[str, float]:
        """The paired difference of one column of the runs."""
        pair = (self.scores(name, setting, column, where) for name in (method, base))
        return metrics.paired_difference(*pair)

    def _table(self, setting: str, where: str) -> Table:
        if setting not in self.tables:
            raise invalid(where, setting, f"one of tables: {', '.join(self.tables)}")
        return self.tables[setting]

    def scores(self, method: str, setting: str, endpoint: str, where: str) -> dict[int, float]:
        table = self._table(setting, where)
        if not table.files or (setting, method) not in table.runs.index.droplevel("seed"):
            raise ParameterError(f"{where}: no file of {setting} has {method}")
        return {
            int(seed): float(v) for seed, v in table.runs.loc[setting, method][endpoint].items()
        }

    def _verdicts(self) -> dict[tuple[str, Claim], list[str]]:
        """What each claim is found to be; those of README.md hold after Holm's correction."""
        shown = [(n, c) for n in self.findings if self.findings[n].readme for c in self.claims[n]]
        family = iter(ranks.holm([p for _, claim in shown for p in claim.p_values]) < ranks.LEVEL)
        verdicts = {}
        for name, claim in ((n, c) for n in self.findings for c in self.claims[n]):
            holds = [not self.findings[name].readme or next(family) for _ in claim.found]
            intervals = zip(claim.found, holds, strict=True)
            found = [page.verdict(each["low"], each["high"], held) for each, held in intervals]
            if found != list(claim.expected):
                where = f"findings.{name}.claims.{claim.method} - {claim.base}.{claim.setting}"
                raise invalid(where, ", ".join(claim.expected), ", ".join(found))
            verdicts[name, claim] = found
        return verdicts

    # --- text

    def sentences(self, name: str, text: str) -> str:
        """Text with its numbers: {A - B, setting}, {A, setting}, {share A, setting}; `, stages`
        after it asks for average incremental accuracy, `, first` for that after a task, and
        `, forgetting` for forgetting.
        """
        return " ".join(_LOOKUP.sub(lambda found: self._number(name, found[1]), text).split())

    def _number(self, name: str, lookup: str) -> str:
        where = f"findings.{name}: {{{lookup}}}"
        what, setting, *word = lookup.split(", ")
        column = _COLUMNS[word[0]] if word else ENDPOINTS[0]
        if what.startswith("share "):
            return self._share(what.removeprefix("share "), setting, column, where)
        method, _, base = what.partition(" - ")
        if base and column in ENDPOINTS:
            both = dict(zip(ENDPOINTS, self.differences(method, base, setting, where), strict=True))
            return _points(both[column])
        if base:
            return _points(self.difference(method, base, setting, column, where))
        scores = self.scores(method, setting, column, where)
        return f"{metrics.summarise(scores.values())['mean']:.1f} %"

    def _share(self, method: str, setting: str, column: str, where: str) -> str:
        """How much of the distance from FedAvg, at its best step, to joint training is closed."""
        scores = (
            self.scores(each, setting, column, where) for each in ("fedavg_step", method, "joint")
        )
        low, own, high = (metrics.summarise(each.values())["mean"] for each in scores)
        return f"{100 * (own - low) / (high - low):.0f} %"

    def readme_list(self) -> str:
        shown = [(name, each) for name, each in self.findings.items() if each.readme]
        return "\n".join(
            f"{place}. **{each.title.removesuffix('.')}**. {self.sentences(name, each.text)}"
            for place, (name, each) in enumerate(shown, 1)
        )

    def readme_table(self) -> str:
        """Both endpoints of every method, and what the paper prints."""
        heads = ["method"]
        for setting, paper in self.table.settings.items():
            label = self.tables[setting].label
            heads += [f"{label}: final", "mean over stages", *(["paper"] if paper else [])]
        rows = [[name, *self._cells(method)] for method, name in self.table.methods.items()]
        return page.markdown(pd.DataFrame(rows, columns=pd.Index(heads)))

    def _cells(self, method: str) -> Iterator[str]:
        settings = self.table.settings
        shown = [s for s in settings if (s, method) in self.tables[s].runs.index.droplevel("seed")]
        if not shown:
            raise invalid("table.methods", method, f"a method of {' or '.join(settings)}")
        for setting, paper in settings.items():
            for endpoint in ENDPOINTS:
                known = setting in shown
                found = self.scores(method, setting, endpoint, "table") if known else {}
                yield mean_std(each / 100 for each in found.values())
            if paper:
                accuracy = printed.rows(paper, "CIFAR-100").accuracy
                yield f"{accuracy[method]}" if method in accuracy else DASH

    def results(self) -> str:
        """The findings of docs/results.md, a section each."""
        parts = []
        for name, each in self.findings.items():
            title = each.title.removesuffix(".")
            parts += [f"({name})=\n## {title}", self.sentences(name, f"{each.text} {each.more}")]
            parts += [self._claims_table(name)] if self.claims[name] else []
            parts += [f"![{title}](../figures/{each.figure})"] if each.figure else []
            links = ", ".join(f"[{text}]({_from_docs(to)})" for text, to in each.links.items())
            parts += [f"Details: {links}."] if links else []
        return "\n\n".join(parts)

    def _claims_table(self, name: str) -> str:
        claims = self.claims[name]
        settings = [each for each in self.tables if each in {c.setting for c in claims}]
        lines = [["difference", *(self.tables[setting].label for setting in settings)]]
        lines.append(["---"] * len(lines[0]))
        for pair in dict.fromkeys((claim.method, claim.base) for claim in claims):
            own = {c.setting: c for c in claims if (c.method, c.base) == pair}
            cells = [self._cell(name, own[s]) if s in own else DASH for s in settings]
            lines.append([f"`{pair[0]}` {MINUS} `{pair[1]}`", *cells])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _cell(self, name: str, claim: Claim) -> str:
        found = zip(claim.found, self.verdicts[name, claim], strict=True)
        texts = [f"{_interval(each)}, {_WORDS.get(word, word)}" for each, word in found]
        return f"{'<br>'.join(texts)} (n = {claim.found[0]['n']:.0f})"

    def write(self, root: Path = ROOT) -> list[Path]:
        """Put the list, the table and the sections between their markers."""
        made = {
            root / "README.md": {"findings": self.readme_list(), "table": self.readme_table()},
            root / "docs" / "results.md": {"findings": self.results()},
        }
        for path, blocks in made.items():
            text = path.read_text(encoding="utf-8")
            for name, content in blocks.items():
                text = between_markers(text, name, content, path)
            with atomic_write(path) as part:
                part.write_text(text, encoding="utf-8")
        return [*made]


def _from_docs(path: str) -> str:
    """A path of the project as a link of a page in docs/."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"


def between_markers(text: str, name: str, content: str, path: Path) -> str:
    """The text with other content between `<!-- name -->` and `<!-- end of name -->`."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ParameterError(f"{path.name} has no {start} with {end} after it")
    return f"{before}{start}\n{content}\n{end}{after}"


def _page_differences(
    table: Table, method: str, base: str, where: str
) -> Iterator[dict[str, float]]:
    """For each endpoint a cell, `+2.0 (+1.4 to +2.5)`, of a table "Difference from base"."""
    text = (ROOT / table.page).read_text(encoding="utf-8")
    for measure in page.ENDPOINTS:
        heading = page.difference_heading(base, measure)
        if text.count(f"{heading}\n\n") > 1:
            raise ParameterError(f"{where}: {table.page} has {heading!r} for several settings")
        _, _, section = text.partition(f"{heading}\n\n")
        lines = [line.strip("| ").split(" | ") for line in section.split("\n\n")[0].splitlines()]
        rows = {cells[0]: dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]}
        cell = rows.get(method, {}).get(table.column, "")
        found = re.search(rf"{_NUMBER} \({_NUMBER} to {_NUMBER}\)", cell)
        if not found:
            name = f"{method} compared with {base}, {table.column}"
            raise ParameterError(f"{where}: {table.page} has no difference of {name}")
        mean, low, high = map(float, found.groups())
        n = rows[method]["n"].split(" to ")[-1]  # of the column with the most seeds
        yield {"mean": mean, "low": low, "high": high, "n": float(n)}


def _points(difference: Mapping[str, float]) -> str:
    """`1.9 points (1.4 to 2.3)`; of a negative difference by how much it is below."""
    mean, low, high = (difference[key] for key in ("mean", "low", "high"))
    if mean < 0:
        mean, low, high = -mean, -high, -low
    return f"{mean:.1f} points ({_ends(low, high)})"


def _interval(difference: Mapping[str, float]) -> str:
    mean, low, high = (difference[key] for key in ("mean", "low", "high"))
    return f"{mean:+z.1f} ({_ends(low, high)})".replace("-", MINUS)


def _ends(low: float, high: float) -> str:
    ends = (page.limit(end, low > 0 or high < 0).removeprefix("+") for end in (low, high))
    return " to ".join(ends).replace("-", MINUS)


if __name__ == "__main__":
    for written in Book().write():
        print(written.relative_to(ROOT))
