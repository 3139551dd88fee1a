"""The pages of sweeps: sensitivity, coresets, values of settings, overlap, related work."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from stamp_core.results.records import Record
from workbench.report.frames import (
    RULES,
    coreset_frame,
    limited_memory,
    mask_frame,
    model_frame,
    overlap_frame,
    reference_memories,
    run_frame,
    sorted_frame,
)
from workbench.report.tables import page
from workbench.report.tables.page import Comparison, Page
from workbench.report.text import DASH, MB, count_range, marked, mean_std

_BASES = ("fedavg", "replay")  # that pages compare methods with, where they were run
_CONTROLS = (*_BASES, "stamp_mean", "stamp_without_coreset_mean")
_IOU = dict(zip(("mean IoU", "average incremental IoU"), page.ENDPOINTS.values(), strict=True))


# --- sensitivity


def write_sensitivity(
    records: Sequence[Record], captions: Mapping[str, tuple[str, str]], folder: Path
) -> Path:
    """The file written: sensitivity.md. `captions` are those of its figure."""

    def section(own: Sequence[Record]) -> list[str]:
        """For each sweep accuracy by value, and differences from the preset's value."""
        parts = []
        for name, rows in run_frame(own).groupby("sweep", sort=False):
            label, preset = captions[str(name)]
            pairs = page.paired_differences(rows, "value", [preset], ["setting", "method"])
            table = page.markdown(page.accuracy_table(rows, ["method"], "{value}"))
            sections = page.difference_sections(pairs, ["method"], "{value}")
            parts += [f"### {label[0].upper()}{label[1:]}", table, *sections]
        return parts

    return page.write_page(folder / "sensitivity.md", "Sensitivity", records, section)


# --- coresets


def _coreset_accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a rule of one setting, as text: accuracy by exemplars per class, none and all."""
    limited = limited_memory(rows)
    numbers = limited.exemplars.unique()
    none, complete = (  # at every number the same runs
        [runs.assign(selection=name, exemplars=number) for number in numbers]
        for name, runs in reference_memories(rows).items()
    )
    shown = pd.concat([*none, limited, *complete])
    return page.accuracy_table(shown, ["selection"], "{exemplars} per class")


def coreset_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a rule of one setting, as text: its costs at the largest limited memory."""
    limited = limited_memory(rows)
    events = limited.groupby("selection").events.agg(lambda each: sum(each, Counter[str]()))

    def event_counts(runs: pd.DataFrame) -> str:
        counts = events[runs.selection.iloc[0]]
        return "; ".join(f"{event} ({n})" for event, n in counts.items()) or DASH

    cells: dict[str, page.Cell] = {"MB": page.peak("disk", 2), "events": event_counts}
    most = limited[limited.exemplars == limited.exemplars.max()]
    return page.group_table(most, ["selection", "exemplars"], cells).drop(columns="n")


_BY_RULE = Comparison(
    "selection",
    [RULES["uniform"], RULES["herding"]],
    ["setting", "exemplars"],
    "{exemplars} per class",
    ["selection"],
    select=lambda rows: limited_memory(rows).sort_values("exemplars", kind="stable"),
)
CORESETS = Page("coresets", "Coresets", coreset_frame, _coreset_accuracies, [_BY_RULE])


def write_coresets(records: Sequence[Record], folder: Path) -> Path:
    """The file written: coresets.md."""

    def section(own: Sequence[Record]) -> list[str]:
        rows = coreset_frame(own)
        return [*CORESETS.section(rows), "Costs:", page.markdown(coreset_costs(rows))]

    return page.write_page(folder / "coresets.md", "Coresets", records, section)


# --- methods at several values of the setting


def _setting_page(name: str, title: str, by: str, heading: str) -> Page:
    """Each method at the values of column `by`: from its own first one, and from the controls."""
    return Page(
        name,
        title,
        partial(sorted_frame, by=by),
        partial(page.accuracy_table, keys=["method", "model"], heading=heading),
        [
            Comparison(by, [], ["setting", "method"], heading),
            Comparison("method", _CONTROLS, ["setting", by], heading),
        ],
    )


HETEROGENEITY = _setting_page("heterogeneity", "Data heterogeneity", "alpha", "α = {alpha:g}")
ROUNDS = _setting_page("rounds", "Rounds", "rounds", "{rounds} rounds")


# --- overlap of classes: each method at the server learning rate that is best on choosing seeds


def overlap_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a setting of `overlap_frame`, as text: accuracy and chosen value of each method."""
    table = []
    for (size, overlap), part in rows.groupby(["size", "overlap"]):
        cells = {"classes per task": f"{size}", "classes in common, %": f"{overlap:g}"}
        for method, own in part.groupby("method", sort=False):
            cells[str(method)] = f"{mean_std(own.main_accuracy)} at {own.value.iloc[0]}"
        table.append({**cells, "n": count_range([part.seed.nunique()])})
    return pd.DataFrame(table)


_FROM_REPLAY = Comparison(
    "method", ["replay"], ["size", "overlap", "setting"], "{size}, {overlap:g} %"
)
OVERLAP = Page("overlap", "Overlap", overlap_frame, overlap_table, [_FROM_REPLAY])


def write_overlap(records: Sequence[Record], folder: Path) -> Path:
    """The file written: overlap.md, all settings together."""
    page.common_arithmetic(records)
    about, intervals = page.definitions("Overlap"), page.definitions("Intervals")
    parts = ["# Overlap", about, *OVERLAP.section(overlap_frame(records)), intervals]
    return page.write_parts(folder / "overlap.md", parts)


# --- related work


def protection_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a sweep and value, as text."""
    cells = {
        "update inside, %": page.percent("inside"),
        **{name: page.percent(column) for name, column in page.ENDPOINTS.items()},
        "forgetting": page.percent("main_forgetting"),
    }
    return page.group_table(rows, ["setting", "sweep", "value"], cells)


def returning_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a setting and model: accuracy by number of cycles, and where the task is given."""
    named = rows.assign(method=[f"{marked(r.method)} ({r.model})" for r in rows.itertuples()])
    keys = ["setting", "method"]
    last = named[named.cycles == named.groupby("setting").cycles.transform("max")]
    given = last.groupby(keys, sort=False).task_accuracy.agg(mean_std)
    table = page.accuracy_table(named, keys, "accuracy, cycles = {cycles}")
    return table.merge(given.rename("task-incremental, last").reset_index())


def masks_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a method as text: intersection over union, and the accuracy of pixels."""
    cells = {
        **{name: page.percent(column) for name, column in _IOU.items()},
        "learning IoU": page.percent("main_learning_accuracy"),
        "forgetting": page.percent("main_forgetting"),
        "pixel accuracy": page.percent("pixels"),
        "MB up / round": page.average("bytes_up", MB),
    }
    return page.group_table(rows, ["method"], cells)


PROTECTION = Page("protection", "Protected subspaces", run_frame, protection_table)
RETURNING = Page(
    "returning",
    "Returning tasks",
    lambda records: model_frame(run_frame(records)),
    returning_table,
    [
        Comparison(
            "cycles",
            [],
            ["setting", "method", "model"],
            "cycles = {cycles}",
            ["setting", "method", "model"],
            select=lambda rows: rows.sort_values(["model", "cycles"]),  # global models first
        ),
        Comparison(
            "method",
            _BASES,
            ["setting", "cycles"],
            "cycles = {cycles}",
            ["setting", "method", "model"],
        ),
    ],
)
_MASKS_SHOWN = {**_IOU, "forgetting": "main_forgetting"}
_FROM_FEDAVG = Comparison("method", _BASES[:1], ["setting"], "{measure}", measures=_MASKS_SHOWN)
MASKS = Page("masks", "Masks", mask_frame, masks_table, [_FROM_FEDAVG])


def write_related(records: Mapping[str, Sequence[Record]], folder: Path) -> Path:
    """The file written, related.md; records are those of "protection", "returning", "masks"."""
    parts = ["# Related work"]
    for each in (PROTECTION, RETURNING, MASKS):
        own = records[each.name]
        about = page.definitions(f"Related work: {each.title}")
        tables = each.section(each.frame(own))
        parts += [f"## {each.title}", page.describe_runs(own), about, *tables]
    parts += ["## Definitions", page.definitions("Intervals")]
    return page.write_parts(folder / "related.md", parts)
