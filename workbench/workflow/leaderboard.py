"""The leaderboard: runs whose records verify with this code, with their costs; others are named."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from stamp_core.results.records import Record, load_record
from workbench.report.frames import machine, run_frame
from workbench.report.tables.page import markdown, write_parts
from workbench.report.text import MB
from workbench.workflow.verify import check_record

DIGITS = 12  # of a digest, which name it


def find_records(folders: Iterable[Path]) -> list[Path]:
    """The folders of all records in or below some folders; refused where there is none."""
    found = {folder: sorted(path.parent for path in folder.rglob("run.json")) for folder in folders}
    for folder, records in found.items():
        if not records:
            text = f"{folder} holds no record: name a folder with run.json in or below it"
            raise ValueError(text)
    return [*dict.fromkeys(record for records in found.values() for record in records)]


def verify_all(folders: Iterable[Path]) -> tuple[dict[Path, Record], dict[Path, str]]:
    """The records that verify, by folder, and why the others do not."""
    sound, refused = dict[Path, Record](), dict[Path, str]()
    for folder in folders:
        try:
            record = load_record(folder)
            checks = check_record(record)
        except ValueError as error:
            refused[folder] = str(error)
            continue
        failed = [f"{check.name} {check.found}" for check in checks if not check.holds]
        if failed:
            refused[folder] = "; ".join(failed)
        else:
            sound[folder] = record
    return sound, refused


def leaderboard(records: Mapping[Path, Record]) -> pd.DataFrame:
    """One row a run, the most accurate of each setting first: scores, costs, digests, origin."""
    rows = run_frame(list(records.values()))
    scores = {
        **{name: rows[name] for name in ("setting", "method", "model", "seed")},
        "accuracy": (100 * rows.main_accuracy).round(2),
        "forgetting": (100 * rows.main_forgetting).round(2),
    }
    costs = {
        "images": rows.images.astype(int),
        "seconds": rows.client_seconds.round(2),
        "MB up": (rows.bytes_up / MB).round(3),
        "MB down": (rows.bytes_down / MB).round(3),
        "MB memory": (rows.memory / MB).round(),
        "MB disk": (rows.disk / MB).round(3),
    }
    origins = pd.DataFrame([_origin(folder, record) for folder, record in records.items()])
    table = pd.DataFrame({**scores, **costs}).join(origins)
    return table.sort_values(["setting", "accuracy"], ascending=[True, False], kind="stable")


def _origin(folder: Path, record: Record) -> dict[str, str]:
    identity = record.about["identity"]
    written = datetime.fromtimestamp((folder / "run.json").stat().st_mtime, UTC)
    return {
        **{name: identity[name][:DIGITS] for name in ("code", "data", "plan", "parameters")},
        "machine": machine(record),
        "date": written.date().isoformat(),
    }


def write_leaderboard(records: Mapping[Path, Record], path: Path) -> Path:
    """Write the leaderboard as a page of Markdown."""
    what = (
        f"{len(records)} runs. `stamp leaderboard` has computed digest, parameters, data, plan and "
        "final accuracies of each again; a record that does not verify is not here. Accuracy and "
        "forgetting in %. Costs: images encoded for a gradient in the run; seconds and MB up and "
        "down of all clients in a mean round; peaks of memory and disk."
    )
    return write_parts(path, ["# Leaderboard", what, markdown(leaderboard(records).astype(str))])
