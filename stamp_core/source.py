"""The first stage: checks params.yaml, then writes what the other stages depend on.

Saving a notebook changes its outputs, a comment changes a file: neither changes a number. So the
stages depend on copies of the notebooks without outputs and on fingerprints of the code.
"""

import json
from pathlib import Path

from stamp_core import config, notebooks, paths
from stamp_core.experiments import PACKAGE, check, experiment
from stamp_core.fingerprint import fingerprint
from stamp_core.sweeps import SECTIONS, blocks, cells


def write() -> None:
    """Clean notebooks and fingerprints of the code in data/source."""
    params = config.read()
    swept = [cells(name, params, of) for of in SECTIONS for name in blocks(params, of)]
    print(f"params.yaml is right: {check(params)} cells, {sum(map(len, swept))} values in sweeps")
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
