"""The shape of the project: what may stand in a notebook, which environment is pinned."""

import ast
import re
import tomllib
from pathlib import Path

import nbformat
import pytest
from ruamel.yaml import YAML

from stamp_core.config.params import parse_seeds, read_params
from stamp_core.core.fingerprint import find_imports, import_closure
from stamp_core.core.paths import ROOT
from stamp_core.methods.base.registry import method_names, read_preset
from stamp_core.results.records import ARRAYS
from workbench.workflow import notebooks
from workbench.workflow.profiles import DEFAULT, OWN, PAPER, expand_grid, read_profile

PACKAGES = [ROOT / "stamp_core", ROOT / "workbench"]
MODULES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


def test_no_modules_import_each_other():
    tops = [package / "__init__.py" for package in PACKAGES]
    modules = [path for path in MODULES if path not in tops]
    bare = {p for p in modules if p.name == "__init__.py" and not _defines(p)}
    # a part of a package imports its siblings, and with them the package's own file
    graph = {p: find_imports(p) - {p, p.parent / "__init__.py", *tops} - bare for p in modules}
    done: set[Path] = set()
    while len(done) < len(graph):
        free = {path for path in graph if path not in done and graph[path] <= done}
        assert free, f"these import each other: {sorted(set(graph) - done)}"
        done |= free


def _defines(path: Path) -> bool:
    """Whether a file defines something of its own and does not only hand on names of others."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in nodes)


def test_whoever_imports_the_figures_depends_on_all_their_files():
    figures = ROOT / "workbench/report/figures"
    assert {*figures.glob("[!_]*.py")} <= {*import_closure(figures / "__init__.py")}


@pytest.mark.parametrize(
    ("name", "places"),
    [("torchvision", ["vision.py"]), ("(stamp_core|workbench)", ["__init__.py"])],  # the pins
)
def test_where_a_package_is_imported(name, places):
    importing = re.compile(rf"^\s*(import|from) {name}( |$)", re.M)
    assert [path.name for path in MODULES if importing.search(path.read_text())] == places


@pytest.mark.parametrize("path", notebooks.all_notebooks(), ids=lambda p: p.name)
def test_notebooks_call_and_do_not_define(path):
    for cell in [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]:
        nodes = [*ast.walk(ast.parse(cell.source))]
        defining = ast.FunctionDef | ast.ClassDef | ast.For | ast.While
        assert not any(isinstance(node, defining) for node in nodes)
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        modules += [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
        assert {name.split(".")[0] for name in modules} <= {"stamp_core", "workbench"}
        assert len(cell.source.splitlines()) <= 16


TABLES_ONLY = {"9_paper.ipynb"}  # of runs that few machines have: where there are none, dashes


@pytest.mark.parametrize("path", notebooks.all_notebooks(), ids=lambda p: p.name)
def test_notebooks_are_stored_as_run_top_to_bottom(path):
    """With the quick profile. nbval compares nothing in a cell without a count."""
    code = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c.outputs]
    assert not any(
        o.output_type == "error" or notebooks.WIDGET in o.get("data", {}) for o in outputs
    )
    drawn = any("image/png" in o.get("data", {}) for o in outputs)
    assert drawn or path.name in TABLES_ONLY
    tags = [cell.metadata.get("tags", []) for cell in code]
    assert ["parameters" in each for each in tags] == [True] + [False] * (len(code) - 1)
    compared = [t for c, t in zip(code, tags, strict=True) if c.outputs and not t]
    assert compared, "nbval would compare nothing"
    if any(re.search(r"\bprofile\b", cell.source) for cell in code):
        assert 'profile: str = "quick"' in code[0].source


@pytest.mark.parametrize("profile", [DEFAULT, PAPER, *OWN])
def test_names_are_checked_before_they_reach_a_shell(profile):
    """DVC runs the commands of a list one after the other, and none after one that fails."""
    folder = ROOT if profile == DEFAULT else ROOT / "pipelines" / profile
    pipeline = YAML(typ="safe").load(folder / "dvc.yaml")
    check = f"python -m workbench.workflow.names {profile}"
    assert {"check": check} in pipeline["vars"]
    with_names = set[str]()
    for name, stage in pipeline["stages"].items():
        commands = stage.get("do", stage)["cmd"]
        if "${key}" in str(commands) or ("${item" in str(commands) and name != "attack"):
            assert commands[0] == "${check}" and len(commands) == 2
            with_names.add(name)
    assert "sweep" in with_names


def test_the_lock_has_the_records_of_the_grid_alone():
    """Records that an author still has of other methods would make every other clone's differ."""
    params, stages = read_profile(), YAML(typ="safe").load(ROOT / "dvc.lock")["stages"]
    for setting in params["grid"]["setting"]:
        runs = expand_grid(f"grid.{setting}", params)
        records = sum(len(parse_seeds(seeds)) for _, _, seeds in runs)
        (out,) = (
            out for out in stages[f"train@{setting}"]["outs"] if out["path"].endswith(setting)
        )
        files = len(ARRAYS) + 2  # about and history, and the digest; what is measured is not there
        assert out["nfiles"] == files * records


def test_every_method_has_a_preset_and_every_preset_a_method():
    params = read_params()
    presets = {name: read_preset(name, params) for name in params["methods"]}
    assert {preset.get("kind", name) for name, preset in presets.items()} == set(method_names())


def test_the_environment_is_pinned_and_covers_what_the_package_needs():
    lines = (ROOT / "requirements.txt").read_text().split("\n")
    packages = [line for line in lines if line and not line.startswith("--editable")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+(  # .+)?", line) for line in packages)
    assert "torch==2.13.0" in packages and "torchvision==0.28.0" in packages
    for folder in (ROOT, ROOT / "workbench"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        needed = {re.split(r"[><=\[]", each)[0] for each in project["dependencies"]}
        assert needed - {"stamp_core"} <= {package.partition("==")[0] for package in packages}


def test_every_requirement_has_digests_in_the_lock():
    """But torch: its build is a choice of who installs it."""
    text = (ROOT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+) \\\n    --hash=sha256:", text, re.M))
    assert "torch" not in locked and not re.search(r"://|^-", text, re.M)
    wanted = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.M)
    same = {re.sub("[-_.]+", "-", name).lower(): version for name, version in locked.items()}
    for name, version in wanted:
        assert name == "torch" or same[re.sub("[-_.]+", "-", name).lower()] == version, name


def test_seconds_are_those_of_a_clock_that_never_goes_back():
    """The machine's own clock is set from time to time: a round could take negative seconds."""
    assert [path for path in MODULES if "time.time(" in path.read_text()] == []
