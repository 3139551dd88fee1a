"""The leaderboard: runs whose records verify with this code, with their costs; others are named."""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from stamp_core.results.records import Record
from workbench.report.frames import machine, run_frame
from workbench.report.tables.page import markdown, write_parts
from workbench.report.text import DASH, MB, plain
from workbench.workflow.verify import MALFORMED, check_record, one_line, read_record

DIGITS = 12  # of a digest, which name it


def find_records(folders: Iterable[Path]) -> list[Path]:
    """The folders of all records in or below some folders; refused where there is none."""
    found = {folder: sorted(path.parent for path in folder.rglob("run.json")) for folder in folders}
    for folder, records in found.items():
        if not records:
            text = f"{folder} holds no record: name a folder with run.json in or below it"
            raise ValueError(text)
    return [*dict.fromkeys(record for records in found.values() for record in records)]


def verify_all(folders: Iterable[Path]) -> tuple[pd.DataFrame, dict[Path, str]]:
    """A row a record that verifies, the most accurate of each setting first; why others do not."""
    rows, refused = dict[Path, dict[str, Any]](), dict[Path, str]()
    for folder in folders:
        try:
            record = read_record(folder)
            *_, last = check_record(record)
            if not last.holds:
                raise ValueError(f"{last.name} {last.found}")
            rows[folder] = _row(folder, record, last.value)
        except MALFORMED as error:
            refused[folder] = one_line(error)
    refused |= repeated(rows)
    table = pd.DataFrame([row for folder, row in rows.items() if folder not in refused])
    if len(table):
        order = {"by": ["setting", "accuracy"], "ascending": [True, False], "kind": "stable"}
        table = table.sort_values(**order).drop(columns=["run", "weights"])
    return table, refused


def repeated(rows: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """Why records are refused: those with the weights of another run, and second ones of a run."""
    refused, runs, weights = dict[Path, str](), dict[str, Path](), dict[str, Path]()
    for folder, row in rows.items():
        first = runs.setdefault(row["run"], folder)
        if first != folder:
            refused[folder] = f"{row['run']} is in {first} as well"
            continue
        first = weights.setdefault(row["weights"] or row["run"], folder)
        if first != folder:
            for one, other in ((folder, first), (first, folder)):
                what = f"{rows[one]['run']} has the weights of {rows[other]['run']}"
                refused[one] = f"{what} in {other}: one training counts once"
    return refused


def _row(folder: Path, record: Record, accuracy: float) -> dict[str, Any]:
    """Score, costs, digests and origin of a run; `run` and `weights` tell it from others."""
    (run,) = run_frame([record]).itertuples()
    identity = record.about["identity"]
    written = datetime.fromtimestamp((folder / "run.json").stat().st_mtime, UTC)
    content = [(k, v.dtype.str, v.shape, v.tobytes()) for k, v in sorted(record.weights.items())]
    return {
        "run": f"{record.name} seed {run.seed}",
        "weights": hashlib.sha256(repr(content).encode()).hexdigest() if content else "",
        **{name: getattr(run, name) for name in ("setting", "method", "model", "seed")},
        "accuracy": round(100 * accuracy, 2),
        "images": int(run.images),
        "seconds": round(run.client_seconds, 2),
        "MB up": round(run.bytes_up / MB, 3),
        "MB down": round(run.bytes_down / MB, 3),
        "MB memory": round(run.memory / MB, 0),
        "MB disk": round(run.disk / MB, 3),
        **{name: identity[name][:DIGITS] for name in ("code", "data", "plan", "parameters")},
        "machine": plain(machine(record)),
        "date": written.date().isoformat(),
    }


def write_leaderboard(table: pd.DataFrame, path: Path) -> Path:
    """Write the leaderboard as a page of Markdown."""
    what = (
        f"{len(table)} runs. `stamp leaderboard` has computed digest, parameters, code, data, plan "
        "and final accuracy of each again, and shows that accuracy in % (a dash where there is no "
        "global model); a record that does not verify, or has the weights of another, is not here. "
        "Costs are what the record says: images encoded for a gradient in the run; seconds and MB "
        "up and down of all clients in a mean round; peaks of memory and disk. No recomputation "
        "from its files can prove costs, that the weights are those of this method and seed, or "
        "that training did not see test images: `stamp verify --train` trains a record again, and "
        "compares bits."
    )
    cells = table.astype(str).replace("nan", DASH)
    return write_parts(path, ["# Leaderboard", what, markdown(cells)])
