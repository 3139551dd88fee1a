"""The first stage: checks params.yaml, then writes what the other stages depend on.

Saving a notebook changes its outputs, a comment changes a file: neither changes a number. So the
stages depend on copies of the notebooks without outputs and on fingerprints of the code.
"""

import json
from pathlib import Path

from stamp_core import config, notebooks, paths
from stamp_core.experiments import PACKAGE, check, experiment
from stamp_core.fingerprint import fingerprint


def write() -> None:
    """Clean notebooks and fingerprints of the code in data/source."""
    params = config.read()
    print(f"params.yaml is right: {check(params)} cells")
    paths.SOURCE.mkdir(parents=True, exist_ok=True)
    for path in notebooks.all_notebooks():
        notebooks.write(notebooks.clean(notebooks.read(path)), paths.SOURCE / path.name)
    sources = sorted((PACKAGE / "data").glob("*.py"))
    note("split", PACKAGE / "split.py", *sources)
    note("compare", PACKAGE / "grid.py", PACKAGE / "figures.py", PACKAGE / "tables.py")
    setting = next(iter(params["settings"]))
    for method in params["methods"]:
        found = experiment(setting, method, params)
        note(f"train-{method}", PACKAGE / "engine.py", found.method_file())


def note(name: str, *files: Path) -> None:
    """Write the fingerprint of all code that a stage uses."""
    path = paths.SOURCE / "code" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(fingerprint(*files), indent=1) + "\n")


if __name__ == "__main__":
    write()
