"""A copy of the project in which tests run the real pipeline."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stamp_core.core.paths import ROOT

PAPER: dict[str, Any] = {
    "grid": {"setting": ["tiny"], "method": ["fedavg"], "seeds": [0]},
    "ablation": {"baselines": ["fedavg"], "method": []},
    "sweeps": {},
}
SHOWN = (None, "coresets", "heterogeneity")  # figures of sweeps that stay in the default profile
NEEDED = {".dvc", ".dvcignore", ".gitignore"}  # of the names that begin with a point


def ignored(folder: str, names: list[str]) -> set[str]:
    """What is not copied: the environment, the history and everything computed but bytecode."""
    if Path(folder) == ROOT / "data":
        return set(names) - {"README.md", "executed"}
    if Path(folder) == ROOT / "data" / "executed":
        return {name for name in names if name.endswith(".ipynb")}
    if Path(folder) == ROOT / ".dvc":
        return {"cache", "tmp"}
    hidden = {n for n in names if n.startswith(".") and Path(folder) == ROOT} - NEEDED
    return {n for n in names if n in hidden or n in ("_build", "_generated")}


class Project:
    """A copy of the project in a git repository: the quick profile is its default.

    Sweeps of pages of other pipelines are left out. The profile `paper` is one run of the setting
    `tiny`: the paper's images are on few machines.
    """

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        shutil.copytree(ROOT, root, ignore=ignored)
        (root / "dvc.lock").unlink(missing_ok=True)
        quick = YAML().load(root / "params/quick.yaml")
        for name in [n for n, block in quick["sweeps"].items() if block.get("figure") not in SHOWN]:
            del quick["sweeps"][name]
        YAML().dump(quick, root / "params.yaml")
        YAML().dump(PAPER, root / "params/paper.yaml")
        foreign = ("STAMP_", "DVC_", "PYTEST", "JUPYTER_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        author = {
            f"GIT_{who}_{what}": "test@example.org"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        self.environment = {**kept, **author, "PATH": path, "PYTHONPATH": str(root), **environment}
        self.run("git", "init", "--quiet")
        self.commit()

    def run(self, *command: str, ok: bool = True) -> str:
        """The output of a command; it must end well (or badly, if not `ok`)."""
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    def commit(self) -> None:
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--message", "as it is")

    def change(self, file: str, key: str, value: Any) -> None:
        values = block = YAML().load(self.root / file)
        *path, last = key.split(".")
        for part in path:
            block = block[part]
        block[last] = value
        YAML().dump(values, self.root / file)

    def outdated(self) -> set[str]:
        """The stages that `dvc repro` would run first, after `source`: without those of pages."""
        self.run("python", "-m", "workbench.workflow.source")
        return set(json.loads(self.run("dvc", "status", "--json", "dvc.yaml"))) - {"source"}

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    def restore(self) -> None:
        self.run("git", "checkout", "--quiet", ".")
