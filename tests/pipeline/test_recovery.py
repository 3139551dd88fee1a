"""Failing methods, killed runs and the paper's pipeline, for real, in a copy of the project."""

import os
import signal
import subprocess
import time

import nbformat
import pytest
from project import Project
from ruamel.yaml import YAML

SETTINGS, METHODS = "params/settings.yaml", "params/methods.yaml"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """With two methods and one sweep only."""
    project = Project(tmp_path_factory.mktemp("clone") / "project")
    sweeps = YAML().load(project.root / "params.yaml")["sweeps"]
    project.change("params.yaml", "sweeps", {"kappa": sweeps["kappa"]})
    project.change("params.yaml", "grid.method", ["fedavg", "stamp"])
    project.change("params.yaml", "tour.method", ["fedavg", "stamp", "stamp"])
    project.change("params.yaml", "ablation", {"baselines": ["fedavg"], "method": []})
    project.commit()
    return project


BROKEN = """
from stamp_core.methods.base.method import Method


class Broken(Method):
    def train_indices(self, client_round):
        raise RuntimeError("broken on purpose")
"""


def test_one_failing_method_does_not_stop_the_others(project: Project) -> None:
    """A method is a file, so that no other imports a broken one."""
    file = project.root / "stamp_core/methods/broken.py"
    file.write_text(BROKEN)
    project.change("params.yaml", "grid.method", ["fedavg", "stamp", "broken"])
    project.change(METHODS, "fedavg.server_lr", 1.1)
    output = project.run("python", "-m", "stamp_core.pipeline.repro", ok=False)
    assert (
        "failed: train@tiny-broken-0to1; the tracebacks are in data/executed/train-tiny" in output
    )
    cells = nbformat.read(project.root / "data/executed/train-tiny-broken-0to1.ipynb", 4).cells
    errors = [o for c in cells for o in c.get("outputs", []) if o.output_type == "error"]
    assert any("broken on purpose" in "".join(error.traceback) for error in errors)
    assert project.record("tiny-fedavg-0to1").about["method"]["server_lr"] == 1.1
    file.unlink()
    project.run("git", "checkout", "--quiet", "params.yaml", "params")


def test_a_killed_pipeline_continues_where_it_was(project: Project) -> None:
    """kill -9 of DVC and all it started once a checkpoint is there; then the same command."""
    project.change(SETTINGS, "tiny.training.rounds", 30)
    stage, resume = "train@tiny-fedavg-0to1", project.root / "data/resume"
    process = subprocess.Popen(
        ["dvc", "repro", "--quiet", stage],
        cwd=project.root,
        env=project.environment,
        start_new_session=True,
    )
    end = time.monotonic() + 120
    while not list(resume.glob("*.safetensors")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    project.run("dvc", "repro", stage)
    history = project.record("tiny-fedavg-0to1").history
    places = [(entry["experience"], entry["round"]) for entry in history]
    assert places == [(experience, round_) for experience in range(3) for round_ in range(30)]
    assert not list(resume.glob("*.safetensors"))


def test_the_papers_pipeline_trains_a_setting_shows_it_and_keeps_it(project: Project) -> None:
    """With a small setting in the place of the paper's, as its images are on few machines."""
    grid = {"setting": ["tiny"], "method": ["fedavg", "stamp"], "seeds": [0]}
    ablation = {"baselines": ["fedavg"], "method": []}
    YAML().dump(
        {"grid": grid, "ablation": ablation, "sweeps": {}}, project.root / "params/paper.yaml"
    )
    command = ("python", "-m", "stamp_core.pipeline.repro", "tiny")
    assert "FedAvg takes" in project.run(*command)
    for name in ("tiny/accuracy.png", "tiny/results.md", "tables/paper.md"):
        assert (project.root / "figures/paper" / name).exists()
    file = project.root / "data/paper/runs/tiny-stamp-0/0/run.json"
    before = file.stat().st_mtime_ns
    project.run(*command)
    assert file.stat().st_mtime_ns == before
    message = "'tin' is unknown; did you mean 'tiny'"
    assert message in project.run(*command[:-1], "tin", ok=False)
    listed = project.run("dvc", "repro", "--dry")  # the root's pipeline has none of it
    assert "pipelines/paper" not in listed
