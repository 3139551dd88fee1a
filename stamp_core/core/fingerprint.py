"""Which code a number depends on: the modules that a file imports, and a hash of what they do.

Where a module is does not count, only its name and its code: one that moves to another folder or
package, with the imports of it, outdates no record. No module imports from the top of a package,
whose api.py hands on names of every module.
"""

import ast
import hashlib
import json
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path

from stamp_core.core.paths import PACKAGE

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_Import = ast.Import | ast.ImportFrom

PACKAGES = {"stamp_core": PACKAGE}  # the project's, whose code counts
if (_beside := find_spec("workbench")) and _beside.origin:  # it is not imported
    PACKAGES["workbench"] = Path(_beside.origin).resolve().parent


def find_imports(path: Path | str) -> set[Path]:
    """The project's files that the file at `path` imports, inside functions too."""
    path = Path(path).resolve()
    return set(_imported_files(path, path.read_bytes()))


def import_closure(*paths: Path | str) -> list[Path]:
    """The files at `paths` and all that they import, directly or indirectly, sorted."""
    waiting = [Path(path).resolve() for path in paths]
    closure: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in closure:
            closure.add(path)
            waiting += find_imports(path)
    return sorted(path for path in closure if not _is_bare_package(path))


def _is_bare_package(path: Path) -> bool:
    """Whether a file only makes its folder a package, with no more than a docstring."""
    if path.name != "__init__.py":
        return False
    return all(isinstance(each, ast.Expr) for each in ast.parse(path.read_bytes()).body)


def code_digest(path: Path | str) -> str:
    """The sha256 of the code at `path`, without layout, comments, docstrings and packages."""
    return _digest(Path(path).read_bytes())


def file_digest(path: Path) -> str:
    """The sha256 of a file's bytes, computed again only if its time or size changes."""
    return _file_digest(path, path.stat().st_mtime_ns, path.stat().st_size)


@cache
def _file_digest(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_files(*paths: Path | str) -> dict[str, list[str]]:
    """The digests of all modules in the closure of `paths`, by their names without packages."""
    found: dict[str, list[str]] = {}
    for file in import_closure(*paths):
        name = file.parent.name if file.name == "__init__.py" else file.stem
        found.setdefault(name, []).append(code_digest(file))
    return {name: sorted(found[name]) for name in sorted(found)}


def combined_fingerprint(*paths: Path | str) -> str:
    """One sha256 over the digests of all modules in the closure of `paths`."""
    return hashlib.sha256(json.dumps(fingerprint_files(*paths)).encode()).hexdigest()


@cache
def _digest(code: bytes) -> str:
    """The sha256 of the syntax tree of `code` without docstrings, the project's imports first."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        if isinstance(node, _Import):
            _drop_packages(node)
    imports = [node for node in tree.body if isinstance(node, _Import)]
    others = [ast.dump(node) for node in tree.body if not isinstance(node, _Import)]
    return hashlib.sha256(
        "\n".join([*sorted(map(ast.dump, imports)), *others]).encode()
    ).hexdigest()


def _drop_packages(node: _Import) -> None:
    """Leave of the project's modules in an import the last part of their names."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] in PACKAGES:
                alias.name = alias.name.rpartition(".")[2]
        return
    package, _, rest = (node.module or "").partition(".")
    if node.level:
        rest = node.module or ""
    if node.level or package in PACKAGES:
        node.module, node.level = rest.rpartition(".")[2], 0


@cache
def _imported_files(path: Path, code: bytes) -> frozenset[Path]:
    """The project's files that `code`, in the file at `path`, imports."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, _Import)]
    names = {name for node in nodes for name in _module_names(node, path)}
    return frozenset(file for name in names for file in _find_files(name)) - {path}


def _module_names(node: _Import, path: Path) -> list[str]:
    """The dotted names that an import in the file at `path` may refer to."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    if node.level:
        (root,) = (root for root in PACKAGES.values() if path.is_relative_to(root))
        package = ".".join(path.parent.relative_to(root.parent).parts)
        module = resolve_name("." * node.level + module, package)
    return [f"{module}.{alias.name}" for alias in node.names]


def _find_files(name: str) -> set[Path]:
    """The existing files of the modules and sub-packages along a dotted name."""
    package, *parts = name.split(".")
    if package not in PACKAGES:
        return set()
    folders = [PACKAGES[package].joinpath(*parts[: end + 1]) for end in range(len(parts))]
    files = [file for path in folders for file in (path.with_suffix(".py"), path / "__init__.py")]
    return {file for file in files if file.is_file()}
