"""Absolute paths of the project, the same in papermill, pytest, JupyterLab and queued runs."""

import os
from pathlib import Path


def find_root() -> Path:
    """The project's root: the nearest folder with its parameter files, from the working directory
    upwards; then the checkout of this package; else the working directory.

    $DVC_ROOT is not used: in a queued experiment, which runs in a copy, it names the original.
    """
    for folder in (Path.cwd(), *Path.cwd().parents, *PACKAGE.parents):
        if any((folder / name).exists() for name in OWN):
            return folder
    return Path.cwd()


PACKAGE = Path(__file__).resolve().parents[1]
OWN = ("params/settings.yaml", "params/methods.yaml")  # which a folder of one's own may have
ROOT = find_root()
# parameter files where a folder has none: in an installed package (setup.py), or in its checkout
PACKAGED = PACKAGE / "defaults" if (PACKAGE / "defaults").exists() else PACKAGE.parent
PARAMS = ROOT / "params.yaml"
NOTEBOOKS = ROOT / "notebooks"
DATA = ROOT / "data"
RAW = Path(os.environ.get("STAMP_DATA", DATA / "raw"))  # downloads; shared by queued runs
SOURCE = DATA / "source"  # clean notebooks and fingerprints of the code
RESUME = DATA / "resume"  # checkpoints: outside DVC's outputs, which it deletes before a run
CACHE = DATA / "cache"  # decoded images, memory-mapped by every process
