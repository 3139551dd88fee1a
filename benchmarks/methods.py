"""The seconds of each method, by which `make estimate` and the order of trainings go."""

from stamp_core.core.paths import ROOT
from workbench.report.frames import run_frame
from workbench.workflow.grid import load_grid
from workbench.workflow.profiles import DEFAULT
from workbench.workflow.training import REFERENCE


def write_seconds() -> None:
    """Write the clients' seconds of a round by method, from the records of `make repro`."""
    rows = run_frame(load_grid(f"grid.{REFERENCE}", DEFAULT))
    measured = rows.groupby("method").client_seconds.mean().dropna().round(4)
    if len(measured):  # records that were made elsewhere have none
        (ROOT / "benchmarks" / "seconds.json").write_text(measured.to_json(indent=1) + "\n")
