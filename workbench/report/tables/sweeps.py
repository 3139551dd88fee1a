"""The pages of sweeps: sensitivity, coresets, data heterogeneity, related work, and tuning."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pandas as pd

from stamp_core.results.records import Record
from workbench.report.frames import (
    RULES,
    coreset_frame,
    final_score,
    limited_memory,
    model_frame,
    reference_memories,
    run_frame,
)
from workbench.report.tables import page
from workbench.report.text import DASH, MB, marked, mean_std, significant

_BASES = ("fedavg", "replay")  # that pages compare methods with, where they were run
_CONTROLS = (*_BASES, "stamp_mean")
_ALPHA, _NORM = "α = {:g}", "normalisation {}"  # headings of columns
_RANDOM = RULES["uniform"]


# --- sensitivity


def write_sensitivity(
    records: Sequence[Record], captions: Mapping[str, tuple[str, str]], folder: Path
) -> Path:
    """The file written: sensitivity.md. `captions` are those of its figure."""

    def section(own: Sequence[Record]) -> list[str]:
        sweeps = run_frame(own).groupby("sweep", sort=False)
        parts = (_sensitivity_section(rows, *captions[str(name)]) for name, rows in sweeps)
        return [*itertools.chain.from_iterable(parts)]

    return page.write_page(folder / "sensitivity.md", "Sensitivity", records, section)


def _sensitivity_section(rows: pd.DataFrame, label: str, preset: str) -> list[str]:
    """Accuracy by the value of one parameter, and differences from the preset's value."""
    pairs = page.paired_differences(rows, "value", [preset], ["setting", "method"])
    table = page.accuracy_table(rows, ["method"], "value", "{}")
    differences = page.difference_sections(pairs, ["method"], "value")
    return [f"### {label[0].upper()}{label[1:]}", page.markdown(table), *differences]


# --- coresets


def coreset_accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a rule of one setting, as text: accuracy by exemplars per class, none and all."""
    limited = limited_memory(rows)
    numbers = limited.exemplars.unique()
    none, complete = (  # at every number the same runs
        [runs.assign(selection=name, exemplars=number) for number in numbers]
        for name, runs in reference_memories(rows).items()
    )
    shown = pd.concat([*none, limited, *complete])
    return page.accuracy_table(shown, ["selection"], "exemplars", "{} per class")


def coreset_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a setting, rule and number of exemplars: its paired difference from `random`."""
    return _coreset_differences(rows, [_RANDOM]).drop(columns="base")


def _coreset_differences(rows: pd.DataFrame, bases: Sequence[str]) -> pd.DataFrame:
    rows = limited_memory(rows).sort_values("exemplars", kind="stable")
    return page.paired_differences(rows, "selection", bases, ["setting", "exemplars"])


def coreset_findings(rows: pd.DataFrame) -> str:
    """List items: which rules are above and below random selection and herding, by exemplars."""
    pairs = _coreset_differences(rows, [_RANDOM, RULES["herding"]])
    heading = "{setting}, accuracy compared with {base} at {exemplars} per class"
    return page.difference_findings(pairs, "selection", ["setting", "exemplars"], heading)


def coreset_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a rule of one setting, as text: its costs at the largest limited memory."""
    limited = limited_memory(rows)
    events = limited.groupby("selection").events.agg(lambda each: sum(each, Counter[str]()))

    def event_counts(runs: pd.DataFrame) -> str:
        counts = events[runs.selection.iloc[0]]
        return "; ".join(f"{event} ({n})" for event, n in counts.items()) or DASH

    cells: dict[str, page.Cell] = {
        "selection, ms": page.average("selection_ms", figures=2),
        "training, ms": page.average("training_ms", figures=2),
        "share": lambda runs: significant(runs.selection_ms.mean() / runs.training_ms.mean(), 2),
        "MB": page.peak("disk", 2),
        "events": event_counts,
    }
    most = limited[limited.exemplars == limited.exemplars.max()]
    return page.group_table(most, ["selection", "exemplars"], cells).drop(columns="n")


def write_coresets(records: Sequence[Record], folder: Path) -> Path:
    """The file written: coresets.md."""

    def section(own: Sequence[Record]) -> list[str]:
        rows = coreset_frame(own)
        pairs = _coreset_differences(rows, [_RANDOM])
        sections = page.difference_sections(pairs, ["selection"], "exemplars", "{} per class")
        table = page.markdown(coreset_accuracies(rows))
        costs = page.markdown(coreset_costs(rows))
        return [coreset_findings(rows), table, *sections, "Costs:", costs]

    return page.write_page(folder / "coresets.md", "Coresets", records, section)


# --- data heterogeneity, normalisation of the network


def alpha_accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a method of one setting, as text: accuracy by α."""
    return page.accuracy_table(rows, ["method", "model"], "alpha", _ALPHA)


def alpha_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a setting, method and α: its paired difference from fedavg."""
    return _method_differences(rows, "alpha", _BASES[:1]).drop(columns="base")


def _method_differences(
    rows: pd.DataFrame, by: str, bases: Sequence[str] = _CONTROLS
) -> pd.DataFrame:
    """One row a base, setting, method and value of `by`."""
    rows = rows.sort_values(by, kind="stable")
    return page.paired_differences(rows, "method", bases, ["setting", by])


def alpha_findings(rows: pd.DataFrame) -> str:
    """List items of one setting: whose accuracy changes between the extremes of α; who is above."""
    least = rows.alpha.min()
    ends = rows[rows.alpha.isin([least, rows.alpha.max()])]
    trend = page.paired_differences(ends, "alpha", [least], ["setting", "method"])
    return _findings_by(trend, _method_differences(rows, "alpha"), "alpha", _ALPHA)


def _findings_by(changes: pd.DataFrame, pairs: pd.DataFrame, by: str, heading: str) -> str:
    """List items: whose accuracy changes with `by`; who is above the controls at each value."""
    value, base = (heading.replace("{", f"{{{name}") for name in (by, "base"))
    comparisons = (
        (changes, f"{{setting}}, accuracy at {value} compared with {base}"),
        (pairs, f"{{setting}}, accuracy compared with {{base}} at {value}"),
    )
    items = (
        page.difference_findings(each, "method", ["setting", by], text)
        for each, text in comparisons
    )
    return "\n".join(filter(None, items))


def write_heterogeneity(records: Sequence[Record], folder: Path) -> Path:
    """The file written: heterogeneity.md."""

    def section(own: Sequence[Record]) -> list[str]:
        rows = run_frame(own)
        pairs = _method_differences(rows, "alpha")
        sections = page.difference_sections(pairs, ["method"], "alpha", _ALPHA)
        return [alpha_findings(rows), page.markdown(alpha_accuracies(rows)), *sections]

    return page.write_page(folder / "heterogeneity.md", "Data heterogeneity", records, section)


def _normalisation_differences(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Of each method from itself at the sweep's first value, and from the controls at each."""
    changes = page.paired_differences(rows, "value", rows.value[:1], ["setting", "method"])
    return changes, _method_differences(rows, "value")


def normalisation_findings(records: Sequence[Record]) -> str:
    """List items: whose accuracy normalisation changes; who is above the controls with each."""
    return _findings_by(*_normalisation_differences(run_frame(records)), "value", _NORM)


def write_normalisation(records: Sequence[Record], folder: Path) -> Path:
    """The file written: normalisation.md; the first value of the sweep is the setting's."""

    def section(own: Sequence[Record]) -> list[str]:
        rows = run_frame(own)
        table = page.accuracy_table(rows, ["method", "model"], "value", _NORM)
        parts = [normalisation_findings(own), page.markdown(table)]
        for pairs in _normalisation_differences(rows):
            parts += page.difference_sections(pairs, ["method"], "value", _NORM)
        return parts

    return page.write_page(folder / "normalisation.md", "Normalisation", records, section)


# --- related work


def protection_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a sweep and value, as text."""
    cells = {
        "update inside, %": page.percent("inside"),
        "accuracy": page.percent("main_accuracy"),
        "forgetting": page.percent("main_forgetting"),
    }
    return page.group_table(run_frame(records), ["setting", "sweep", "value"], cells)


def returning_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a setting and model: accuracy by number of cycles, and where the task is given."""
    rows = model_frame(run_frame(records))
    named = rows.assign(method=[f"{marked(r.method)} ({r.model})" for r in rows.itertuples()])
    parts = [_returning_rows(part) for _, part in named.groupby("setting", sort=False)]
    table = pd.concat(parts, ignore_index=True).fillna(DASH)
    return table[["setting", *table.columns.drop("setting")]]


def _returning_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `returning_table` for one setting."""
    keys = ["method", "setting"]
    table = page.accuracy_table(rows, keys, "cycles", "accuracy, cycles = {}")
    last = rows[rows.cycles == rows.cycles.max()].groupby("method")
    given = last.task_accuracy.agg(mean_std)
    return table.assign(**{"task-incremental, last": given[table.method].tolist()})


def masks_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a method as text: intersection over union, and the accuracy of pixels."""
    pixels = [final_score(record, "global", "pixels") for record in records]
    cells = {
        "mean IoU": page.percent("main_accuracy"),
        "learning IoU": page.percent("main_learning_accuracy"),
        "forgetting": page.percent("main_forgetting"),
        "pixel accuracy": page.percent("pixels"),
        "s / round": page.average("client_seconds", figures=2),
        "MB up / round": page.average("bytes_up", MB),
    }
    return page.group_table(run_frame(records).assign(pixels=pixels), ["method"], cells)


def _masks_differences(records: Sequence[Record]) -> pd.DataFrame:
    """The differences of each method's mean IoU and forgetting from those of fedavg."""
    measures = {"mean IoU": "main_accuracy", "forgetting": "main_forgetting"}
    rows = run_frame(records)
    return page.paired_differences(rows, "method", _BASES[:1], ["setting"], measures)


def related_findings(records: Mapping[str, Sequence[Record]]) -> str:
    """List items on tasks that return and on masks: whose intervals exclude 0."""
    rows = model_frame(run_frame(records["returning"]))
    by = ["setting", "cycles"]
    models = rows.sort_values("model", kind="stable")  # global models first
    fewest = [rows.cycles.min()]
    more = page.paired_differences(models, "cycles", fewest, ["setting", "method", "model"])
    heading = "{setting}, accuracy with {cycles} cycles compared with one"
    items = [page.difference_findings(more, "method", by, heading)]
    heading = "{setting}, accuracy with cycles = {cycles} compared with {base}"
    pairs = page.paired_differences(rows, "method", _BASES, by)
    items.append(page.difference_findings(pairs, "method", by, heading))
    masks = _masks_differences(records["masks"])
    heading = "{setting}, {measure} compared with {base}"
    items.append(page.difference_findings(masks, "method", ["setting", "measure"], heading))
    return "\n".join(filter(None, items))


def write_related(records: Mapping[str, Sequence[Record]], folder: Path) -> Path:
    """The file written, related.md; records are those of "protection", "returning", "masks"."""
    rows = model_frame(run_frame(records["returning"]))
    returning = page.paired_differences(rows, "method", _BASES, ["setting", "cycles"])
    masks = _masks_differences(records["masks"])
    sections = {
        "Protected subspaces": [page.markdown(protection_table(records["protection"]))],
        "Returning tasks": [
            page.markdown(returning_table(records["returning"])),
            *page.difference_sections(
                returning, ["setting", "method", "model"], "cycles", "cycles = {}"
            ),
        ],
        "Masks": [
            page.markdown(masks_table(records["masks"])),
            *page.difference_sections(masks, ["method"], "measure"),
        ],
    }
    parts = ["# Related work", related_findings(records)]
    for (title, section), runs in zip(sections.items(), records.values(), strict=True):
        about = page.definitions(f"Related work: {title}")
        parts += [f"## {title}", page.describe_runs(runs), about, *section]
    parts += ["## Definitions", page.definitions("Intervals")]
    return page.write_parts(folder / "related.md", parts)


# --- tuning

KINDS = ("tuning", "explored")
ALL = "all"  # settings together
Tried = tuple[str, str, str, str]  # kind, method, candidate, setting


def tuning_frame(
    records: Sequence[Record], tried: Sequence[Tried], setting: str = ALL
) -> pd.DataFrame:
    """One row a method and candidate: mean accuracy by setting, over settings, and if it is best.

    `setting` is what the candidates were tuned for: one, or all together. The accuracy is that of
    the personal models where there are any, and undefined without records.
    """
    keys = ["kind", "method", "candidate", "setting"]
    rows = pd.DataFrame(columns=[*keys, "score"])  # if every candidate diverges
    if records:
        rows = run_frame(records).rename(columns={"sweep": "kind", "value": "candidate"})
        rows["score"] = rows.personal_accuracy.fillna(rows.main_accuracy)
    means = rows.groupby(keys, sort=False).score.agg(lambda values: values.mean(skipna=False))
    table = means.reindex(pd.MultiIndex.from_tuples(tried, names=keys)).unstack(sort=False)
    table["mean"] = table.mean(axis=1, skipna=False)  # a setting on which it diverges counts
    best = table["mean"].groupby(["kind", "method"]).transform("max")
    table = table.assign(chosen=table["mean"] == best).reset_index()
    table.insert(2, "setting", setting)
    return table.assign(chosen=table.chosen & (table.kind == "tuning"))


def write_tuning(
    records: Sequence[Record],
    tried: Sequence[Tried],
    seeds: Sequence[int],
    folder: Path,
    known: Collection[tuple[str, str]],
    elsewhere: Collection[tuple[str, str]] = (),
    setting: str = ALL,
) -> list[Path]:
    """The files written: tuning.md to read, tuning.csv for the test of the presets.

    A candidate that was `tried` and has no records diverged. Rows of `known` kinds and methods of
    which none was tried stay as they are in an earlier tuning.csv, and so do those of a method that
    were tuned for another `setting`. `elsewhere` are methods with their candidates that are chosen
    on drawn images.
    """
    frame = tuning_frame(records, tried, setting).round(4)  # as the file keeps them
    if (folder / "tuning.csv").exists():
        earlier = pd.read_csv(folder / "tuning.csv")
        stay = _staying_rows(earlier, frame, known, setting)
        frame = pd.concat([stay, frame], ignore_index=True)
    shown = _as_text(frame)
    tuned, explored = (shown[shown.kind == kind].drop(columns="kind") for kind in KINDS)
    if elsewhere:
        pairs = zip(tuned.method, tuned.candidate, strict=True)
        tuned["on drawn images"] = ["yes" if pair in elsewhere else "" for pair in pairs]
    parts = [
        "# Tuning",
        page.definitions("Tuning"),
        f"Seeds: {', '.join(map(str, seeds))}.",
        page.markdown(tuned),
    ]
    if len(explored):
        parts += ["## Explored", page.definitions("Explored")]
        parts += [page.markdown(explored.drop(columns="chosen"))]
    return [
        page.write_parts(folder / "tuning.md", parts),
        page.write_parts(folder / "tuning.csv", [frame.to_csv(index=False)]),
    ]


def _staying_rows(
    earlier: pd.DataFrame, new: pd.DataFrame, known: Collection[tuple[str, str]], setting: str
) -> pd.DataFrame:
    """The rows of `known` kinds and methods that were not tuned again, or for another setting."""
    keys, again = (pd.MultiIndex.from_frame(frame[["kind", "method"]]) for frame in (earlier, new))
    replaced = keys.isin(again)
    if setting != ALL:
        replaced &= earlier.setting.isin([setting, ALL])
    return earlier[keys.isin(list(known)) & ~replaced]


def _as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """A tuning frame as a page shows it, one row a candidate.

    A dash where a method was not tuned on a setting, and for the mean where it was tuned for each.
    """
    alone = frame.setting != ALL
    shown = frame.assign(chosen=frame.setting.where(alone, "yes").where(frame.chosen, ""))
    for name in frame.columns[4:-1]:
        shown[name] = [mean_std([value]) for value in frame[name]]
        tuned = frame.setting.isin([ALL, name]) | (name == "mean")
        shown.loc[frame["mean"].isna() & frame[name].isna() & tuned, name] = "diverges"
    shown.loc[alone, "mean"] = DASH
    texts = shown.drop(columns="setting").groupby(["kind", "method", "candidate"], sort=False)
    return texts.agg(_joined).reset_index()


def _joined(cells: pd.Series) -> str:
    """The cells of a candidate that was tuned for several settings, one at a time."""
    return ", ".join(cell for cell in cells if cell not in ("", DASH)) or cells.iloc[0]
