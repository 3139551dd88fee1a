"""The ablation page: what each component of STAMP contributes, compared with controls."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stamp_core.results.records import Record
from workbench.report.frames import run_frame
from workbench.report.tables import page, printed
from workbench.report.tables.results import accuracy_csv, model_differences
from workbench.report.text import DASH

BASES = ("stamp", "replay")  # that all variants are compared with
PARTS = {  # of the ablation, with their headings
    "control": "controls without matching",
    "paper": "components in the paper",
    "choice": "design choices",
}
_PARAMETERS = (
    *("setting", "variant", "part", "SAM", "TAM", "coreset", "prototypical loss", "rehearsal"),
    "other parameters",
)
_OWN_COLUMNS = {"name", "kind", "memory", "ratio", "prototype"}  # parameters shown in a column
_CELLS: dict[str, page.Cell] = {
    **{name: page.percent(column) for name, column in page.ENDPOINTS.items()},
    "forgetting": page.percent("main_forgetting"),
    "learning accuracy": page.percent("main_learning_accuracy"),
    "update length": page.average("relative_length"),
    "1000 images": page.average("images", 1000),
    "paper (CIFAR-100)": lambda runs: printed.scores(runs.method.iloc[0], *printed.COMPONENTS),
}


def ablation_frame(records: Sequence[Record]) -> pd.DataFrame:
    """`run_frame` with parameters as text, and `relative_length` of updates to fedavg's."""
    stamp: dict[str, Any] = next((r.about["method"] for r in records if r.run[1] == "stamp"), {})
    parameters = pd.DataFrame([_parameters(record, stamp) for record in records])
    rows = pd.concat([run_frame(records), parameters], axis=1)
    fedavg = rows[rows.method == "fedavg"].set_index(["setting", "seed"]).update_length
    reference = fedavg.reindex(pd.MultiIndex.from_frame(rows[["setting", "seed"]]))
    return rows.assign(relative_length=rows.update_length / reference.to_numpy())


def _by_part(records: Sequence[Record]) -> pd.DataFrame:
    return ablation_frame(sorted(records, key=lambda record: [*PARTS].index(_part(record))))


def _part(record: Record) -> str:
    """The part of the ablation that a run belongs to, a key of PARTS: a control matches nothing."""
    params = record.about["method"]
    if not any((params.get(side) or {}).get("kappa") for side in ("spatial", "temporal")):
        return "control"
    return "paper" if record.run[1] in printed.rows(*printed.COMPONENTS).index else "choice"


def _parameters(record: Record, stamp: dict[str, Any]) -> dict[str, str]:
    params = record.about["method"]
    server_lr = params.get("server_lr", 1.0)
    prototype = params.get("prototype")
    ratio = params.get("ratio")
    return {
        "variant": record.run[1] + ("" if server_lr == 1 else f" (server lr {server_lr:g})"),
        "part": PARTS[_part(record)],
        **{
            name: f"κ = {params[side]['kappa']:g}" if params.get(side) else DASH
            for name, side in {"SAM": "spatial", "TAM": "temporal"}.items()
        },
        "coreset": _coreset(params),
        "prototypical loss": f"{prototype:g}" if prototype else DASH,
        "rehearsal": f"{ratio:g}" if ratio else DASH,
        "other parameters": ", ".join(_other_parameters(params, stamp)) or DASH,
    }


def _coreset(params: dict[str, Any]) -> str:
    memory = params.get("memory") or {}
    temporal = params.get("temporal") or {}
    if not memory.get("exemplars_per_class"):
        return DASH
    note = "" if params.get("ratio") or temporal.get("source") == "memory" else " (not read)"
    return f"{memory['selection']}, {memory['exemplars_per_class']}{note}"


def _other_parameters(params: dict[str, Any], stamp: dict[str, Any]) -> Iterator[str]:
    """Parameters without a column of their own in which a STAMP variant differs from `stamp`."""
    if params.get("kind") != stamp.get("kind"):
        return
    for name in sorted(params.keys() - _OWN_COLUMNS):
        own, reference = params[name], stamp[name]
        if isinstance(own, dict) and isinstance(reference, dict):
            keys = [key for key in own if key != "kappa" and own[key] != reference[key]]
            yield from (f"{name}.{key} {own[key]}" for key in keys)
        elif not isinstance(own, dict) and own is not None and own != reference:
            yield f"{name} {own}"


def ablation_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a variant and setting, as text: its parameters and what it reaches."""
    return page.group_table(_by_part(records), _PARAMETERS, _CELLS)


def write_ablation(records: Sequence[Record], folder: Path) -> list[Path]:
    """The files written: ablation.md to read, ablation.csv as accuracy.csv of the comparison."""
    return [
        page.write_page(folder / "ablation.md", "Ablation", records, _section),
        page.write_parts(folder / "ablation.csv", [accuracy_csv(records)]),
    ]


def _section(records: Sequence[Record]) -> list[str]:
    table = page.markdown(ablation_table(records).drop(columns="setting"))
    pairs = model_differences(_by_part(records), BASES)
    sections = page.difference_sections(pairs, ["method", "model"], "{measure}")
    return [table, *sections]
