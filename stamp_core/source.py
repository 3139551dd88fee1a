"""The first stage: checks params.yaml, then writes what the other stages depend on.

Saving a notebook changes its outputs, a comment changes a file: neither changes a number. So the
stages depend on copies of the notebooks without outputs and on fingerprints of the code.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stamp_core import config, notebooks, paths
from stamp_core.experiments import PACKAGE, check, experiment, fits
from stamp_core.fingerprint import fingerprint
from stamp_core.sweeps import SECTIONS, blocks, cells


def write() -> None:
    """Clean notebooks and fingerprints of the code in data/source."""
    params = config.read()
    swept = [cells(name, params, of) for of in SECTIONS for name in blocks(params, of)]
    known = check(params)
    check_swept(params)
    print(f"params.yaml is right: {known} cells, {sum(map(len, swept))} values in sweeps")
    paths.SOURCE.mkdir(parents=True, exist_ok=True)
    for path in notebooks.all_notebooks():
        notebooks.write(notebooks.clean(notebooks.read(path)), paths.SOURCE / path.name)
    sources = sorted((PACKAGE / "data").glob("*.py"))
    note("split", PACKAGE / "split.py", *sources)
    shown = PACKAGE / "figures" / "__init__.py"
    note("compare", PACKAGE / "sweeps.py", shown, PACKAGE / "tables" / "__init__.py")
    setting = next(iter(params["settings"]))
    in_grids = (method for grid in config.GRIDS for _, method, _ in config.cells(grid, params))
    for method in {**params["methods"], **dict.fromkeys(in_grids)}:
        found = experiment(setting, method, params)
        note(f"train-{method}", *found.files(), parameters=found.resolved()["method"])


def check_swept(params: Mapping[str, Any]) -> None:
    """Refuse a setting that only sweeps use if its plan or network cannot be made.

    Not the paper's: their pictures are on few machines.
    """
    checked = {setting for each in config.GRIDS for setting, _, _ in config.cells(each, params)}
    here = [of for of in SECTIONS if not of.startswith(config.PAPER)]
    for block in (block for of in here for block in blocks(params, of).values()):
        if block["setting"] not in checked:
            fits(block["setting"], config.seeds(block["seeds"])[0], dict(params))
        checked.add(block["setting"])


def note(name: str, *files: Path, parameters: object = None) -> None:
    """Write the fingerprint of all code that a stage uses, and parameters from elsewhere.

    The row of a method says with `like` that it takes numbers from another row.
    """
    path = paths.SOURCE / "code" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    found = {"code": fingerprint(*files), "parameters": parameters}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write()
