"""A killed run and the paper's pipeline, for real, in a copy of the project.

The tests continue the run that the first one has killed.
"""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
from processes import gone, wait_until
from project import Project

from stamp_core.engine.trees import read_tree
from stamp_core.results.records import load_record
from workbench.workflow.lockfile import is_sound

PIPELINE = "pipelines/paper/dvc.yaml"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """With runs that are long enough to be killed in the middle."""
    project = Project(tmp_path_factory.mktemp("clone") / "project")
    project.change("params/settings.yaml", "tiny.training.rounds", 20)
    return project


def finished_rounds(project: Project) -> list[dict[str, Any]]:
    """The history in the only checkpoint; none where there is no checkpoint yet."""
    file = next((project.root / "data/resume").glob("*/run.safetensors"), None)
    if file is None:
        return []
    size, _, _ = read_tree(file)[0]["journal"]
    lines = (file.parent / "journal.jsonl").read_bytes()[:size].splitlines()
    return [entry for line in lines for entry in json.loads(line)["history"]]


def test_a_killed_pipeline_leaves_no_process_and_a_checkpoint(project: Project) -> None:
    """kill -9 of DVC and of the processes in its group, which are not all that it started."""
    process = subprocess.Popen(
        ["dvc", "repro", "--quiet", f"{PIPELINE}:train@tiny-fedavg-0"],
        cwd=project.root,
        env=project.environment,
        start_new_session=True,
    )
    wait_until(lambda: finished_rounds(project) or process.poll() is not None, "a round")
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: all(map(gone, started)), "the end of the kernel and its workers")
    assert 0 < len(finished_rounds(project)) < 60


def test_an_interrupt_ends_the_driver_where_it_can_go_on(project: Project) -> None:
    """Ctrl-C reaches the driver alone; DVC's lock file stays whole, and the checkpoint stays."""
    command = [sys.executable, "-m", "workbench.workflow.repro", "paper", "tiny"]
    driver = subprocess.Popen(
        command, cwd=project.root, env=project.environment, stdout=subprocess.PIPE, text=True
    )
    before = len(finished_rounds(project))
    wait_until(lambda: len(finished_rounds(project)) > before or driver.poll(), "a round")
    started = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate()
    assert driver.returncode == 130 and "the next call goes on" in output
    wait_until(lambda: all(map(gone, started)), "the end of all that it started")
    assert before < len(finished_rounds(project)) < 60
    assert is_sound((project.root / "pipelines/paper/dvc.lock").read_bytes())


def test_the_papers_pipeline_continues_a_killed_run_shows_it_and_keeps_it(project: Project) -> None:
    """Its first rounds are those of the checkpoint, seconds and all: nothing is computed twice."""
    before = finished_rounds(project)
    assert "FedAvg takes" in project.run(
        "python", "-m", "workbench.workflow.repro", "paper", "tiny"
    )
    history = load_record(project.root / "data/paper/runs/tiny-fedavg-0/0").history
    places = [(entry["experience"], entry["round"]) for entry in history]
    assert places == [(experience, round_) for experience in range(3) for round_ in range(20)]
    assert history[: len(before)] == before
    assert not list((project.root / "data/resume").iterdir())
    for name in ("tiny/accuracy.png", "tiny/results.md", "tables/paper.md"):
        assert (project.root / "figures/paper" / name).exists()
    assert json.loads(project.run("dvc", "status", "--json", PIPELINE)) == {}
