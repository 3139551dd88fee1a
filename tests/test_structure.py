"""The shape of the project: who may import whom, what may stand in a notebook."""

import ast
import re
import tomllib
from pathlib import Path

import nbformat
import pytest

from stamp_core import config, methods, notebooks
from stamp_core.fingerprint import closure, imports
from stamp_core.paths import ROOT

PACKAGE = ROOT / "stamp_core"
# A file may import files of earlier rows and of its own row, never of a later one.
LAYERS = [
    "loading paths vectors vision seeding fingerprint progress",
    "config",
    "cache decoding downloads data split models metrics records",
    "rows simplex projection matching prototypes",
    "learner",
    "coresets",
    "workspace",
    "diagnostics temporal personal",
    "methods",
    "experiments",
    "executor checkpoint",
    "engine",
    "grid",
    "sweeps",
    "estimate",
    "figures tables",
    "notebooks paper source repro",
]
ABOVE = {"vectors": {"config"}}  # its Descent takes the training parameters


def layer(path: Path) -> int:
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return next(k for k, row in enumerate(LAYERS) if name in row.split())


def modules() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_from_below(path: Path) -> None:
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for imported in imports(path):
        other = imported.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert layer(imported) <= layer(path) or other in ABOVE.get(name, set())


def test_there_is_no_cycle() -> None:
    through = {path for path in modules() if only_hands_on(path)}  # on the way to what is behind it
    graph = {path: imports(path) - {path} - through for path in modules()}
    done: set[Path] = set()
    while len(done) < len(graph):
        free = {path for path in graph if path not in done and graph[path] <= done}
        assert free, f"these import each other: {sorted(set(graph) - done)}"
        done |= free


def only_hands_on(path: Path) -> bool:
    """Whether a file makes nothing of its own and only hands on names of others."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return not any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in nodes)


LIVE = {"drawings.py", "matches.py", "widgets.py"}  # of what no record holds: matching itself


def test_whoever_imports_the_figures_depends_on_all_their_files() -> None:
    own = {*(PACKAGE / "figures").glob("[!_]*.py")}
    assert own <= {*closure(PACKAGE / "figures" / "__init__.py")}


@pytest.mark.parametrize(
    "path",
    [p for name in ("figures", "tables") for p in sorted((PACKAGE / name).glob("*.py"))],
    ids=lambda p: p.name,
)
def test_figures_and_tables_read_records_only(path: Path) -> None:
    below = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in imports(path)}
    computed = {"matching", "seeding", "simplex"} if path.name in LIVE else set()
    computed |= {"models"} if path.name == "networks.py" else set()  # it counts what is built
    own = {"figures"} if path.parent.name == "figures" else set()
    records = {"config", "data", "loading", "metrics", "paths", "records", "split", "tables"}
    assert below <= records | own | computed


def test_torchvision_is_imported_in_one_place() -> None:
    users = [
        p.name
        for p in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(import|from) torchvision", p.read_text(), re.M)
    ]
    assert users == ["vision.py"]


@pytest.mark.parametrize("path", notebooks.all_notebooks(), ids=lambda p: p.name)
def test_notebooks_call_and_do_not_define(path: Path) -> None:
    cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    for cell in cells:
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.While)
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                )
                assert all(n.split(".")[0] == "stamp_core" for n in names)
        assert len(cell.source.splitlines()) <= 8


TABLES_ONLY = {"9_paper.ipynb"}  # of runs that few machines have: where there are none, dashes


@pytest.mark.parametrize("path", notebooks.all_notebooks(), ids=lambda p: p.name)
def test_notebooks_are_stored_as_run_top_to_bottom(path: Path) -> None:
    """nbval compares nothing in a cell without a count, and everything else as it stands here."""
    notebook = nbformat.read(path, 4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert not any(o.output_type == "error" for c in code for o in c.outputs)
    drawn = any("image/png" in o.get("data", {}) for c in code for o in c.outputs)
    assert drawn or path.name in TABLES_ONLY
    assert not any(notebooks.WIDGET in o.get("data", {}) for c in code for o in c.outputs)
    assert [c for c in code if "parameters" in c.metadata.get("tags", [])] == code[:1]
    compared = [
        c for c in code if c.outputs and "nbval-ignore-output" not in c.metadata.get("tags", [])
    ]
    assert compared, "nbval would compare nothing"


def test_defaults_of_notebooks_need_no_earlier_notebook() -> None:
    for path in notebooks.all_notebooks():
        cells = nbformat.read(path, 4).cells
        if any(re.search(r"\bfolder\b", cell.source) for cell in cells):
            assert 'folder: str = "data/tiny"' in cells[1].source


def test_every_method_of_params_has_a_file_and_every_file_a_row() -> None:
    rows = config.read()["methods"]
    whole = {name: methods.row(name, {"methods": rows}) for name in rows}
    assert {block.get("kind", name) for name, block in whole.items()} == set(methods.names())


def test_the_environment_is_pinned_exactly_and_named_in_the_readme() -> None:
    lines = (ROOT / "requirements.txt").read_text().split("\n")
    packages = [line for line in lines if line and not line.startswith("--editable")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+(  # .+)?", line) for line in packages)
    assert "torch==2.13.0" in packages and "torchvision==0.28.0" in packages
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["strict"]
    readme = (ROOT / "README.md").read_text()
    assert "make repro" in readme and "make test" in readme
    for picture in re.findall(r"\]\((figures/[^)]+)\)", readme):
        assert (ROOT / picture).exists()
