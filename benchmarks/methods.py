"""The seconds of each method, by which `make estimate` and the order of trainings go."""

import json

from stamp_core.core.paths import ROOT
from workbench.report.frames import run_frame
from workbench.workflow.grid import data_folder, load_grid
from workbench.workflow.training import REFERENCES

FILE = ROOT / "benchmarks" / "seconds.json"


def write_seconds() -> None:
    """Write the clients' seconds of a round by setting and method, of the records that are here."""
    measured = json.loads(FILE.read_text())
    for setting, profile in REFERENCES.items():
        if not (ROOT / data_folder(profile) / "runs" / setting).exists():
            continue  # its images need not be here either
        rows = run_frame(load_grid(f"grid.{setting}", profile))
        seconds = rows.groupby("method").client_seconds.median().dropna().round(4)
        if len(seconds):  # records that were made elsewhere have none
            measured[setting] = seconds.to_dict()
    FILE.write_text(json.dumps(measured, indent=1) + "\n")
