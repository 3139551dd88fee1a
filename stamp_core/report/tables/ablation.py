"""The ablation page: what each component of STAMP contributes, compared with controls."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stamp_core.report.tables import printed
from stamp_core.report.tables.comparisons import difference_sections, interval_sentences
from stamp_core.report.tables.frames import EXPERIMENT, run_frame
from stamp_core.report.tables.results import COLUMNS, JUDGED, accuracy_csv, differences
from stamp_core.report.tables.text import (
    DASH,
    markdown,
    mean_std,
    significant,
    write_page,
    write_parts,
)
from stamp_core.results import metrics
from stamp_core.results.records import Record

_BASES = ("stamp", "replay")  # that the page compares all variants with
PARTS = {  # of the ablation, with their headings
    "control": "controls without matching",
    "paper": "components in the paper",
    "choice": "design choices",
}
_OWN_COLUMNS = {"name", "kind", "memory", "ratio", "prototype"}  # parameters shown in a column


def ablation_part(record: Record) -> str:
    """The part of the ablation that a run belongs to, a key of PARTS: a control matches nothing."""
    params = record.about["method"]
    if not any((params.get(side) or {}).get("kappa") for side in ("spatial", "temporal")):
        return "control"
    components = printed.printed_table(*printed.COMPONENTS).index
    return "paper" if record.run[1] in components else "choice"


def variant_label(record: Record) -> str:
    """The method's name, with its server learning rate where that is not 1."""
    server_lr = record.about["method"].get("server_lr", 1.0)
    return record.run[1] + ("" if server_lr == 1 else f" (server lr {server_lr:g})")


def ablation_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a variant and setting, as text: its parameters and what it reaches."""
    records = _by_part(records)
    runs = run_frame(records).assign(record=records)
    stamp: dict[str, Any] = next((r.about["method"] for r in records if r.run[1] == "stamp"), {})
    table = []
    for (setting, _), rows in runs.groupby(EXPERIMENT, sort=False):
        fedavg = runs[(runs.setting == setting) & (runs.method == "fedavg")]
        parameters = _parameter_columns(rows.record.iloc[0], stamp)
        table.append({"setting": setting, **parameters, **_score_columns(rows, fedavg)})
    return pd.DataFrame(table)


def ablation_findings(records: Sequence[Record]) -> str:
    """List items: which variants are above and below stamp and replay, by setting and part."""
    parts = {record.run[1]: PARTS[ablation_part(record)] for record in records}
    items = []
    for base in _BASES:
        pairs = differences(_by_part(records), base)
        pairs = pairs[pairs.measure.isin(JUDGED)].assign(part=pairs.method.map(parts))
        heading = f"{{setting}}, {{measure}} of {{part}} compared with {base}"
        items.append(interval_sentences(pairs, "method", ["setting", "measure", "part"], heading))
    return "\n".join(filter(None, items))


def write_ablation(records: Sequence[Record], folder: Path) -> list[Path]:
    """The files written: ablation.md to read, ablation.csv as accuracy.csv of the comparison."""
    return [
        write_page(folder / "ablation.md", "Ablation", records, _section),
        write_parts(folder / "ablation.csv", [accuracy_csv(records)]),
    ]


def _section(records: Sequence[Record]) -> list[str]:
    """Findings, variants and differences of one setting."""
    records = _by_part(records)
    table = markdown(ablation_table(records).drop(columns="setting"))
    sections = difference_sections({base: differences(records, base) for base in _BASES}, *COLUMNS)
    return [ablation_findings(records), table, *sections]


def _by_part(records: Sequence[Record]) -> list[Record]:
    """The records in the order of PARTS."""
    return sorted(records, key=lambda record: [*PARTS].index(ablation_part(record)))


def _parameter_columns(record: Record, stamp: dict[str, Any]) -> dict[str, str]:
    """The parameters of a variant; `stamp` are those of the method `stamp`."""
    params = record.about["method"]
    prototype, ratio = params.get("prototype"), params.get("ratio")
    return {
        "variant": variant_label(record),
        "part": PARTS[ablation_part(record)],
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
    """Selection rule and exemplars per class of a memory, and whether anything reads it."""
    memory, temporal = params.get("memory") or {}, params.get("temporal") or {}
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


def _score_columns(runs: pd.DataFrame, fedavg: pd.DataFrame) -> dict[str, str]:
    """What the runs of a variant reach; `fedavg` are the runs of fedavg in the same setting."""
    lengths, reference = (dict(zip(r.seed, r.update_length, strict=True)) for r in (runs, fedavg))
    common = lengths.keys() & reference.keys()
    ratio = metrics.summarise(lengths[seed] / reference[seed] for seed in common)
    return {
        "n": str(len(runs)),
        "accuracy": mean_std(runs.main_accuracy),
        "forgetting": mean_std(runs.main_forgetting),
        "learning accuracy": mean_std(runs.main_learning_accuracy),
        "update length": significant(ratio["mean"]),
        "1000 images": significant(runs.images.mean() / 1000),
        "s / round": significant(runs.client_seconds.mean(), 2),
        "paper (CIFAR-100)": printed.printed_scores(runs.method.iloc[0], *printed.COMPONENTS),
    }
