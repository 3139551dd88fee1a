"""Which code a number depends on: the files that a file imports, and a hash of what they do."""

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def imports(path: Path | str) -> set[Path]:
    """The files of stamp_core that the file at `path` imports, wherever in it the import stands."""
    path = Path(path).resolve()
    return _imports(path, path.read_bytes())


def closure(*paths: Path | str) -> list[Path]:
    """The files at `paths` and all they import, directly or through others, sorted."""
    waiting = [Path(path).resolve() for path in paths]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += imports(path)
    return sorted(found)


def digest(path: Path | str) -> str:
    """The sha256 of the code at `path`; layout, comments and docstrings cannot change a number."""
    return _digest(Path(path).read_bytes())


def fingerprint(*paths: Path | str) -> dict[str, str]:
    """The digest of every file in the closure of `paths`, by its path from the project's root."""
    root = PACKAGE.parent
    return {file.relative_to(root).as_posix(): digest(file) for file in closure(*paths)}


def combined(*paths: Path | str) -> str:
    """One sha256 for the whole fingerprint of `paths`."""
    return hashlib.sha256(json.dumps(fingerprint(*paths)).encode()).hexdigest()


@cache
def _digest(code: bytes) -> str:
    """The sha256 of the syntax tree of `code` without docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


@cache
def _imports(path: Path, code: bytes) -> set[Path]:
    """The files of stamp_core that `code`, which stands at `path`, imports."""
    names = {name for node in _statements(code) for name in _names(node, path)}
    return {file for name in names for file in _files(name)} - {path}


@cache
def _statements(code: bytes) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All imports in `code`, wherever they stand."""
    nodes = ast.walk(ast.parse(code))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def _names(node: ast.AST, path: Path) -> Iterator[str]:
    """The dotted names inside the package that an import in the file at `path` may mean."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            # A bare `import stamp_core` may use any of its names, so it stands for all of them.
            yield f"{alias.name}.*" if alias.name == PACKAGE.name else alias.name
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            within = path.parent.relative_to(PACKAGE.parent).parts
            module = resolve_name("." * node.level + module, ".".join(within))
        yield from (f"{module}.{alias.name}" for alias in node.names)


def _files(name: str) -> set[Path]:
    """The files that the dotted `name` stands for.

    The top __init__.py never counts, as it hands on names of every module: a name found only
    there stands for the module that it comes from.
    """
    return _modules(name) or {file for source in _handed_on(name) for file in _modules(source)}


def _modules(name: str) -> set[Path]:
    """The files of the modules and sub-packages on the way to the dotted `name`."""
    package, *parts = name.split(".")
    if package != PACKAGE.name:
        return set()
    steps = [PACKAGE.joinpath(*parts[: end + 1]) for end in range(len(parts))]
    files = [file for step in steps for file in (step.with_suffix(".py"), step / "__init__.py")]
    return {file for file in files if file.is_file()}


def _handed_on(name: str) -> set[str]:
    """The dotted names behind one (`stamp_core.*`: all) that the top __init__.py hands on."""
    top = PACKAGE / "__init__.py"
    package, _, wanted = name.partition(".")
    if package != PACKAGE.name or not top.is_file():
        return set()
    return {
        source
        for node in _statements(top.read_bytes())
        if isinstance(node, ast.ImportFrom)
        for alias, source in zip(node.names, _names(node, top), strict=True)
        if wanted in ("*", alias.asname or alias.name)
    }
