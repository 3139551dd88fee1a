"""The API reference: a page for each part of both packages, made from docstrings by `ast`.

Nothing is imported: the site is built without torch.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

Documented = ast.ClassDef | ast.FunctionDef


def reference_pages(*packages: Path) -> dict[str, str]:
    """The Markdown of every page, by its name."""
    folders = [
        path.parent for package in packages for path in sorted(package.glob("*/__init__.py"))
    ]
    return {f"api/{each.parent.name}.{each.name}.md": _package_page(each) for each in folders}


def _package_page(folder: Path) -> str:
    """One package: its docstring, then its modules with their public names."""
    parts = [f"# `{folder.parent.name}.{folder.name}`", _docstring(folder / "__init__.py")]
    for path in sorted(folder.rglob("*.py")):
        members = list(_public(path))
        if members:
            module = ".".join(path.relative_to(folder).with_suffix("").parts)
            parts += [f"## `{module.removesuffix('.__init__')}`", _docstring(path), *members]
    return "\n\n".join(part for part in parts if part) + "\n"


def _docstring(path: Path) -> str:
    """The docstring of a module."""
    return _text(ast.parse(path.read_text("utf-8")))


def _text(node: ast.Module | Documented) -> str:
    """A docstring as Markdown: a line that begins with a shape is no heading."""
    return re.sub("^#", r"\\#", ast.get_docstring(node) or "", flags=re.M)


def _public(path: Path) -> Iterator[str]:
    """The public classes and functions of a module, with the methods of its classes."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield f"### `{_heading(node)}`"
            yield _text(node)
            if isinstance(node, ast.ClassDef):
                yield "\n".join(_members(node))


def _members(node: ast.ClassDef) -> Iterator[str]:
    """A list of the fields and public methods of a class."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield f"- `{ast.unparse(each)}`"
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            first = _text(each).partition("\n")[0]
            yield f"- `{_heading(each)}`: {first}" if first else f"- `{_heading(each)}`"


def _heading(node: Documented) -> str:
    """The signature of a function, or the name of a class with its bases."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returned}"
