"""README's commands and scripts, as printed, in a fresh copy of the project and a fresh shell."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from project import ignored
from ruamel.yaml import YAML

from stamp_core.core.paths import ROOT

# They take hours, or are tested elsewhere.
HOURS = ("make repro", "make test", "make paper", "make cifar100", "dvc repro train@")
TEXT = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy with the default parameters; the environment is the one that runs this test."""
    root = tmp_path_factory.mktemp("readme") / "project"
    shutil.copytree(ROOT, root, ignore=ignored)
    (root / ".venv").symlink_to(ROOT / ".venv")
    commit = "git -c user.name=a -c user.email=a@b.c commit --quiet -m all"
    shell(root, f"git init --quiet; git add --all; {commit}")
    return root


def shell(root: Path, script: str) -> str:
    """The output of a script in a shell with nothing but a home and the system's programs."""
    environment = {"HOME": str(root.parent), "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_every_block_of_commands(clone):
    output = ""
    for block in blocks("sh"):
        lines = [line for line in block.splitlines() if not line.startswith(HOURS)]
        output += shell(clone, "\n".join(lines))
    assert f"figure: {clone / 'figures/tour/accuracy.png'}" in output  # how the tour ends
    (table,) = blocks("text")
    assert set(table.splitlines()) <= set(output.splitlines())
    assert not re.search("dvc push|without encryption|Executing notebook", output)
    assert (clone / "figures/tour/results.md").exists()
    assert (clone / "data/runs/digits/replay-200to205/200/run.json").exists()


def test_ones_own_method(clone):
    """Its file, its two lines in params.yaml, and the commands of that paragraph."""
    (method,) = (block for block in blocks("python") if "class FedAvgM" in block)
    (clone / "workbench/methods/fedavgm.py").write_text(method)
    params = clone / "params.yaml"
    values = YAML().load(params)
    for grid in ("grid", "tour"):
        values[grid]["method"].append("fedavgm")
    YAML().dump(values, params)
    section = TEXT.partition("## Add a method")[2].partition("\n## ")[0]
    commands = re.findall(r"`(make tour|\.venv/bin/pytest [^`]+)`", section)
    assert len(commands) == 2
    shell(clone, "\n".join(commands))
    assert "| fedavgm |" in (clone / "figures/tour/results.md").read_text("utf-8")
