"""Notebooks as files: copies without outputs that DVC can hash, and execution to store outputs."""

import sys
from pathlib import Path
from typing import Any

from stamp_core.core.paths import NOTEBOOKS

Notebook = dict[str, Any]
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
TIMEOUT = 300  # seconds for one cell at its defaults
WIDGET = "application/vnd.jupyter.widget-view+json"  # shows nothing without its kernel


def all_notebooks() -> list[Path]:
    """Every notebook of the project."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def strip_outputs(notebook: Notebook) -> Notebook:
    """The notebook without outputs, counts and metadata; tags stay, as papermill needs them."""
    for cell in _strip_metadata(notebook):
        cell["outputs"], cell["execution_count"] = [], None
    return notebook


def normalise_outputs(notebook: Notebook) -> Notebook:
    """An executed notebook for git: outputs stay, counts from 1, no times and no widgets."""
    for count, cell in enumerate(_strip_metadata(notebook), start=1):
        cell["execution_count"] = count
        cell["outputs"] = [o for o in cell["outputs"] if WIDGET not in o.get("data", {})]
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = count
    return notebook


def execute_notebook(path: Path) -> None:
    """Execute the notebook at its defaults, as JupyterLab would, and store its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.from_dict(strip_outputs(nbformat.read(path, as_version=4)))
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=TIMEOUT, resources=resources).execute()
    nbformat.write(normalise_outputs(notebook), path)


def _strip_metadata(notebook: Notebook) -> list[dict[str, Any]]:
    """Drop all metadata but tags and the kernel's name; returns the code cells."""
    notebook["metadata"] = {"kernelspec": KERNEL}
    for cell in notebook["cells"]:
        cell["metadata"] = {k: v for k, v in cell["metadata"].items() if k == "tags"}
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or all_notebooks():
        print(f"running {path.name}")
        execute_notebook(path)
