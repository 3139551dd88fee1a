"""The first stage: checks the parameters, then writes what the other stages depend on.

Saving a notebook changes its outputs and a comment changes a file, but neither changes a number. So
the stages depend on copies of the notebooks without outputs and on fingerprints of the code.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

from stamp_core.config.params import CHOSEN, DEFAULT, OWN, PAPER, Params, expand_grid, read_params
from stamp_core.core.atomic import atomic_write
from stamp_core.core.fingerprint import PACKAGE, fingerprint_files
from stamp_core.core.paths import SOURCE
from stamp_core.core.plugins import SOURCES, find_modules
from stamp_core.engine.experiment import check_params, check_setting, load_experiment
from workbench.workflow.notebooks import all_notebooks, strip_outputs
from workbench.workflow.sweeps import read_sweep, sweep_experiments


def write_source() -> None:
    """Write data/source: notebooks without outputs, and the fingerprint of every stage's code."""
    params, paper = read_params(DEFAULT), read_params(PAPER)
    miniatures = {profile: read_params(profile) for profile in OWN}
    count = check_params(params)
    for other in (paper, *miniatures.values()):
        check_params(other)
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
    write_parameters(params)
    write_fingerprints(params, paper, miniatures)


def used_settings(params: Params) -> list[str]:
    """The settings of the grids and of the sweeps."""
    swept = [setting for name in params["sweeps"] for setting in read_sweep(name, params).setting]
    return list(
        dict.fromkeys([*(setting for setting, _, _ in expand_grid("grid", params)), *swept])
    )


def write_parameters(params: Params) -> None:
    """Write each setting, and of it what plans are drawn from, and the blocks that pages show."""
    method = next(iter(params["methods"]))
    for name in params["settings"]:
        setting = load_experiment(name, method, params).resolved()["setting"]
        write_json(f"settings/{name}", setting)
        write_json(f"splits/{name}", {key: setting[key] for key in ("data", "split")})
    for name in params.keys() - {"file", "settings", "methods", CHOSEN}:
        write_json(f"parameters/{name}", params[name])


def write_fingerprints(params: Params, paper: Params, others: Mapping[str, Params]) -> None:
    """Write the fingerprint of each stage's code, with the parameters of methods and sweeps.

    `others` are profiles with values of their own, by name.
    """
    workbench = Path(__file__).parents[1]
    report = workbench / "report"
    modules = [import_module(name) for name in find_modules(SOURCES).values()]
    sources = [Path(str(module.__file__)) for module in modules]
    write_fingerprint("split", PACKAGE / "data" / "split.py", *sources)
    pages = [report / name / "__init__.py" for name in ("figures", "tables")]
    texts = [*sorted((report / "tables").glob("*.csv")), report / "tables" / "definitions.md"]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in texts}
    sweeps_file = workbench / "workflow" / "sweeps.py"
    write_fingerprint("report", sweeps_file, *pages, parameters=digests)
    write_trainings(params, "", params["methods"])  # the paper's are among them
    write_sweeps(params, "")
    write_sweeps(paper, "")
    for name, profile in others.items():
        write_trainings(profile, f"{name}-")
        write_sweeps(profile, f"{name}-")
    attacks = workbench / "studies" / "attacks"
    write_fingerprint(
        "attack", *(attacks / f"{name}.py" for name in ("study", "returning", "files"))
    )
    write_fingerprint("attack_summaries", attacks / "summaries.py")


def write_trainings(params: Params, prefix: str, others: Iterable[str] = ()) -> None:
    """Write the fingerprints of trainings, with parameters: of a grid's methods and others."""
    setting = next(iter(params["settings"]))
    trained = (m for _, m, _ in expand_grid("grid", params))
    for method in dict.fromkeys([*trained, *others]):
        experiment = load_experiment(setting, method, params)
        resolved = experiment.resolved()["method"]
        for name in sorted(params.get(CHOSEN, {})):  # values that hold in one setting
            resolved[name] = load_experiment(name, method, params).resolved()["method"]
        write_fingerprint(f"{prefix}train-{method}", *experiment.files(), parameters=resolved)


def write_sweeps(params: Params, prefix: str) -> None:
    """Write the fingerprint of every sweep of a profile."""
    for name in params["sweeps"]:
        experiments = sweep_experiments(name, dict(params))
        files = {file for experiment in experiments for file in experiment.files()}
        resolved = {experiment.name: experiment.resolved() for experiment in experiments}
        used = {"seeds": read_sweep(name, params).seeds, "experiments": resolved}
        write_fingerprint(f"{prefix}sweep-{name}", *sorted(files), parameters=used)


def write_fingerprint(name: str, *files: Path, parameters: object = None) -> None:
    """Write the fingerprint of all code that a stage uses, and resolved parameters."""
    write_json(f"code/{name}", {"code": fingerprint_files(*files), "parameters": parameters})


def write_json(name: str, content: object) -> None:
    """Write a file of data/source."""
    path = SOURCE / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    write_source()
