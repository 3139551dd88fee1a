"""Notebooks as files: copies without outputs that DVC can hash, and stored outputs kept fresh."""

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from stamp_core.paths import NOTEBOOKS

Notebook = Any  # nbformat.NotebookNode, which is a dictionary with attributes
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
SECONDS = 300  # for one cell at its defaults


def read(path: Path) -> Notebook:
    """The notebook at `path`."""
    return nbformat.read(path, as_version=4)


def clean(notebook: Notebook) -> Notebook:
    """The notebook without what a run leaves in it; tags stay, papermill needs them."""
    for cell in notebook.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    return notebook


def settle(notebook: Notebook) -> Notebook:
    """An executed notebook fit for git: outputs kept, counts from 1, no times and no widgets."""
    count = 0
    for cell in notebook.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = count
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    return notebook


def refresh(path: Path) -> None:
    """Execute the notebook at its defaults, as JupyterLab would, and store its outputs."""
    notebook = clean(read(path))
    NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": path.parent}}
    ).execute()
    nbformat.write(settle(notebook), path)


def all_notebooks() -> list[Path]:
    """Every notebook of the project."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or all_notebooks():
        print(f"running {path.name}")
        refresh(path)
