"""The first stage: checks the parameters, then writes what the other stages depend on.

Saving a notebook changes its outputs and a comment changes a file, but neither changes a number. So
the stages depend on copies of the notebooks without outputs and on fingerprints of the code.
"""

import hashlib
import json
import sys
import threading
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import psutil

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import CHOSEN, Params
from stamp_core.core.atomic import atomic_write
from stamp_core.core.fingerprint import combined_fingerprint
from stamp_core.core.paths import PACKAGE, SOURCE
from stamp_core.core.plugins import SOURCES, find_modules
from stamp_core.engine.experiment import Experiment, load_experiment
from workbench.workflow.callers import end_with_caller
from workbench.workflow.checks import check_params, check_setting
from workbench.workflow.notebooks import all_notebooks, strip_outputs
from workbench.workflow.profiles import DEFAULT, OWN, PAPER, expand_grid, read_profile
from workbench.workflow.same_bits import RUNS, SEED
from workbench.workflow.sweeps import read_sweep, sweep_experiments

WORKBENCH = Path(__file__).parents[1]
SHELLS = ("sh", "dash", "bash")  # through one of which DVC calls a stage
Codes = dict[tuple[Path, ...], str]  # fingerprints by the files that they begin with


def write_source() -> None:
    """Write data/source: notebooks without outputs, and the fingerprint of every stage's code."""
    params = read_profile(DEFAULT)
    count = check_params(params)
    swept = sum(len(sweep_experiments(name, params)) for name in params["sweeps"])
    for setting in used_settings(params):  # the paper's images are on few machines
        check_setting(setting, params)
    print(f"the parameters are valid: {count} experiments, {swept} in sweeps")
    SOURCE.mkdir(parents=True, exist_ok=True)
    for path in all_notebooks():  # nbformat takes longer to import than torch
        notebook = strip_outputs(json.loads(path.read_text(encoding="utf-8")))
        text = json.dumps(notebook, indent=1, ensure_ascii=False)  # as JupyterLab writes it
        with atomic_write(SOURCE / path.name) as scratch:
            scratch.write_text(text + "\n", encoding="utf-8")
    for name in params.keys() - {"file", "settings", "methods", CHOSEN}:
        write_json(f"parameters/{name}", params[name])
    write_code()
    codes: Codes = {}
    write_experiments(params, "", codes)
    for profile in (PAPER, *OWN):
        other = read_profile(profile)
        check_params(other)
        write_experiments(other, f"{profile}-", codes)


def used_settings(params: Params) -> list[str]:
    """The settings of the grids and of the sweeps."""
    trained = [setting for setting, _, _ in expand_grid("grid", params)]
    swept = [setting for name in params["sweeps"] for setting in read_sweep(name, params).setting]
    return list(dict.fromkeys([*trained, *swept]))


def write_code() -> None:
    """Write the fingerprints of the code that draws plans, makes pages and attacks uploads."""
    sources = [import_module(name).__file__ for name in find_modules(SOURCES).values()]
    write_json("code/split", combined_fingerprint(PACKAGE / "data/split.py", *map(str, sources)))
    report = WORKBENCH / "report"
    files = [WORKBENCH / "workflow/sweeps.py"]
    files += [report / name / "__init__.py" for name in ("figures", "tables")]
    texts = [*sorted((report / "tables").glob("*.csv")), report / "tables" / "definitions.md"]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in texts}
    write_json("code/report", {"code": combined_fingerprint(*files), "texts": digests})
    write_json("code/bits", describe([load_experiment(*run) for run in RUNS], SEED, {}))
    attacks = WORKBENCH / "studies/attacks"
    write_json("code/attack", combined_fingerprint(attacks / "study.py"))
    write_json("code/attack_summaries", combined_fingerprint(attacks / "summaries.py"))


def write_experiments(params: Params, prefix: str, codes: Codes) -> None:
    """What a profile's settings, tour and sweeps depend on, and what plans are drawn from.

    `codes` has the fingerprints that are known, which are added to.
    """
    experiments = {run: load_experiment(*run[:2], params) for run in expand_grid("grid", params)}
    for setting in dict.fromkeys(setting for setting, _, _ in experiments):
        own = {run: each for run, each in experiments.items() if run[0] == setting}
        seeds = sorted({seeds for _, _, seeds in own})
        resolved = next(iter(own.values())).resolved()["setting"]
        drawn = {"data": resolved["data"], "split": resolved["split"], "seeds": seeds}
        write_json(f"{prefix}splits/{setting}", drawn)
        write_json(f"{prefix}trainings/{setting}", describe(own.values(), seeds, codes))
    if "tour" in params:
        tour = [experiments[run] for run in expand_grid("tour", params)]
        write_json(f"{prefix}trainings/tour", describe(tour, params["tour"]["seeds"], codes))
    for name in params["sweeps"]:
        swept = sweep_experiments(name, dict(params))
        write_json(f"{prefix}sweeps/{name}", describe(swept, read_sweep(name, params).seeds, codes))


def describe(experiments: Iterable[Experiment], seeds: object, codes: Codes) -> dict[str, object]:
    """The code and the parameters of experiments by name, with their seeds."""
    described = dict[str, object]()
    for each in experiments:
        files = tuple(each.files())
        if files not in codes:
            codes[files] = each.code()
        described[each.name] = {"code": codes[files], **each.resolved()}
    return {"seeds": seeds, "experiments": described}


def write_json(name: str, content: object) -> None:
    """Write a file of data/source."""
    path = SOURCE / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def end_with_dvc() -> None:
    """End this process once DVC has been killed: the next call removes what this one writes."""
    called = psutil.Process()  # by DVC: this process, or the shell around it
    while (above := called.parent()) and above.name() in SHELLS:
        called = above
    end_with_caller(called)


if __name__ == "__main__":
    threading.Thread(target=end_with_dvc, daemon=True).start()
    try:
        write_source()
    except (ParameterError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
