"""Which code a number depends on: the files that a file imports, and a hash of what they do."""

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def find_imports(path: Path | str) -> set[Path]:
    """The files of stamp_core that the file at `path` imports, inside functions too."""
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
    """The sha256 of the code at `path`, without layout, comments and docstrings."""
    return _digest(Path(path).read_bytes())


def file_digest(path: Path) -> str:
    """The sha256 of a file's bytes, computed again only if its time or size changes."""
    return _file_digest(path, path.stat().st_mtime_ns, path.stat().st_size)


@cache
def _file_digest(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_files(*paths: Path | str) -> dict[str, str]:
    """The digest of every file in the closure of `paths`, by its path from the project's root."""
    root = PACKAGE.parent
    return {file.relative_to(root).as_posix(): code_digest(file) for file in import_closure(*paths)}


def combined_fingerprint(*paths: Path | str) -> str:
    """One sha256 over the digests of all files in the closure of `paths`."""
    return hashlib.sha256(json.dumps(fingerprint_files(*paths)).encode()).hexdigest()


@cache
def _digest(code: bytes) -> str:
    """The sha256 of the syntax tree of `code` without docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


@cache
def _imported_files(path: Path, code: bytes) -> frozenset[Path]:
    """The files of stamp_core that `code`, in the file at `path`, imports."""
    names = {name for node in _imports(code) for name in _module_names(node, path)}
    return frozenset(file for name in names for file in _resolve(name)) - {path}


@cache
def _imports(code: bytes) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All import statements in `code`."""
    nodes = ast.walk(ast.parse(code))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def _module_names(node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[str]:
    """The dotted names that an import in the file at `path` may refer to."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            # A bare `import stamp_core` may use all names of api.py.
            yield f"{alias.name}.*" if alias.name == PACKAGE.name else alias.name
        return
    module = node.module or ""
    if node.level:
        package = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        module = resolve_name("." * node.level + module, package)
    yield from (f"{module}.{alias.name}" for alias in node.names)


def _resolve(name: str) -> set[Path]:
    """The files of the modules and packages in a dotted name.

    api.py never counts, as it re-exports names of every module: a name that the package has from
    there is resolved to the module it comes from.
    """
    return _find_files(name) or {file for origin in _origins(name) for file in _find_files(origin)}


def _find_files(name: str) -> set[Path]:
    """The existing files of the modules and sub-packages along a dotted name."""
    package, *parts = name.split(".")
    if package != PACKAGE.name:
        return set()
    folders = [PACKAGE.joinpath(*parts[: end + 1]) for end in range(len(parts))]
    files = [file for path in folders for file in (path.with_suffix(".py"), path / "__init__.py")]
    return {file for file in files if file.is_file() and file != PACKAGE / "api.py"}


def _origins(name: str) -> set[str]:
    """The dotted names behind a name of api.py (`stamp_core.*`: behind all of them)."""
    top = PACKAGE / "api.py"
    package, _, exported = name.partition(".")
    if package != PACKAGE.name or not top.is_file():
        return set()
    return {
        origin
        for node in _imports(top.read_bytes())
        if isinstance(node, ast.ImportFrom)
        for alias, origin in zip(node.names, _module_names(node, top), strict=True)
        if exported in ("*", alias.asname or alias.name)
    }
