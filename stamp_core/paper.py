"""One of the paper's settings, trained by the notebooks that the desk settings go through.

What it takes is measured and checked first. Cells that have records are kept and a killed training
goes on where it was: the same command finishes what it began.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

import torch

from stamp_core import config, estimate, grid, sweeps
from stamp_core.config import PAPER, ParameterError
from stamp_core.estimate import GB, Needs
from stamp_core.executor import resolve_device, resolve_workers
from stamp_core.experiments import experiment
from stamp_core.paths import DATA, ROOT
from stamp_core.split import make
from stamp_core.workspace import Workspace

FOLDER = "data/paper"
ALPHAS = "paper_alphas"
Cell = tuple[str, str, str]  # setting, method, seeds


def main(name: str, train_it: bool = True) -> int:
    """Estimate and check a setting of the paper, then train what is missing; the exit status."""
    cells = list(config.cells(f"{PAPER}.{name}"))
    found = estimated(name, cells)
    estimate.refuse_lack(found, name)
    if not train_it:
        return 0
    failed = [path for cell in cells if not done(cell) and (path := trained(cell))]
    failed += [path for block in alphas(name) if (path := swept(block))]
    if failed:
        print(f"failed: the tracebacks are in {', '.join(failed)}; the same command tries again")
        return 1
    return shown(name)


def estimated(name: str, cells: Sequence[Cell]) -> Needs:
    """What the setting takes, printed as well."""
    device = resolve_device("auto")
    workers = resolve_workers(0, device)
    torch.set_num_threads(1)  # as each worker process has
    methods = {method: experiment(name, method) for _, method, _ in cells}
    first = next(iter(methods.values()))
    setting, images = first.setting, first.images()
    plan, work = make(setting.split, images, seed=0), Workspace(setting, images, device)
    found = estimate.needs(list(methods.values()), plan, work, workers)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{workers} cores, no GPU"
    print(f"{name}: {images}")
    print(f"on {where}: {found.memory / GB:.1f} GB of memory, {found.disk / GB:.1f} GB of disk")
    print(f"FedAvg takes {found.steps:,} steps a seed, about {found.hours:,.1f} hours")
    seeds = len(cells) // len(methods)
    print(f"{len(methods)} methods, {seeds} seeds: about {seeds * found.all_hours:,.0f} hours")
    if more := sum(map(trainings, alphas(name))):
        print(f"and {more} trainings at several values of α")
    return found


def done(cell: Cell) -> bool:
    """Whether there are records of a cell, made by today's code and numbers."""
    setting, method, seeds = cell
    return bool(grid.load(experiment(setting, method), seeds, FOLDER, outdated=False))


def trained(cell: Cell) -> str:
    """Nothing, or the notebook in which drawing the plan or training a cell failed."""
    setting, method, seeds = cell
    common = {"setting": setting, "seeds": seeds, "folder": FOLDER}
    return execute("1_split", f"paper-split-{setting}-{seeds}", **common) or execute(
        "2_train", f"paper-train-{setting}-{method}-{seeds}", method=method, workers="0", **common
    )


def alphas(name: str) -> list[str]:
    """The sweeps over alpha of a setting."""
    params = config.read()
    found = sweeps.blocks(params, ALPHAS)
    return [block for block, row in found.items() if row["setting"] == name]


def trainings(block: str) -> int:
    """How many trainings a sweep over alpha has."""
    sweep, values = sweeps.read(block, config.read(), ALPHAS)
    return len(values) * len(config.seeds(sweep.seeds))


def swept(block: str) -> str:
    """Nothing, or the notebook in which a sweep over alpha failed."""
    where = {"section": ALPHAS, "folder": FOLDER, "workers": "0"}
    return execute("5_sweep", f"paper-sweep-{block}", name=block, **where)


def shown(name: str) -> int:
    """Figures and tables of a setting, and the paper's tables with it; the exit status."""
    where = {"folder": FOLDER, "figures_to": f"figures/paper/{name}"}
    failed = [execute("3_compare", f"paper-compare-{name}", grid=f"{PAPER}.{name}", **where)]
    failed += [execute("9_paper", "paper-tables", folder=FOLDER, figures_to="figures/paper")]
    if alphas(name):
        failed += [execute("8_heterogeneity", f"paper-alphas-{name}", section=ALPHAS, **where)]
    return int(any(failed))


def execute(notebook: str, name: str, /, **parameters: str) -> str:
    """Nothing, or the path of the executed notebook if it failed."""
    path = f"data/executed/{name}.ipynb"
    (DATA / "executed").mkdir(parents=True, exist_ok=True)
    given = [text for key, value in parameters.items() for text in ("-p", key, value)]
    print(f"running {name}", flush=True)
    quiet = ["-k", "python3", "--no-progress-bar", "--stdout-file", "-", "--stderr-file", "-"]
    command = ["papermill", *quiet, f"notebooks/{notebook}.ipynb", path, *given]
    return path if subprocess.run(command, cwd=ROOT).returncode else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train one of the paper's settings.")
    known = ", ".join(config.read()[PAPER]["setting"])
    parser.add_argument("setting", help=f"SETTING=... of `make paper`, one of {known}")
    parser.add_argument("--estimate", action="store_true", help="only say what it takes")
    given = parser.parse_args()
    try:
        sys.exit(main(given.setting, train_it=not given.estimate))
    except (ParameterError, OSError, MemoryError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
