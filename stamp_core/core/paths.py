"""Absolute paths of the project, the same in papermill, pytest, JupyterLab and queued runs."""

import os
from pathlib import Path


def find_root() -> Path:
    """The project's root: the nearest folder with dvc.yaml, from the working directory upwards.

    $DVC_ROOT is not used: in a queued experiment, which runs in a copy, it names the original.
    """
    here = Path(__file__).resolve().parent
    for folder in (Path.cwd(), *Path.cwd().parents, *here.parents):
        if (folder / "dvc.yaml").exists():
            return folder
    raise FileNotFoundError(f"no dvc.yaml in {Path.cwd()} or above: run inside the project")


ROOT = find_root()
PARAMS = ROOT / "params.yaml"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"
RAW = Path(os.environ.get("STAMP_DATA", DATA / "raw"))  # downloads; shared by queued runs
SOURCE = DATA / "source"  # clean notebooks and fingerprints of the code
RESUME = DATA / "resume"  # checkpoints: outside DVC's outputs, which it deletes before a run
CACHE = DATA / "cache"  # decoded images, memory-mapped by every process
