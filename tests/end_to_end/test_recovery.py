"""A killed run and the paper's pipeline, for real, in a copy of the project.

The tests continue the run that the first one has killed.
"""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import gone, wait_until
from project import Project

from stamp_core.engine.trees import read_tree
from stamp_core.results.records import load_record
from workbench.workflow import stage

PIPELINE = "pipelines/paper/dvc.yaml"
COMPARE = ("dvc", "repro", f"{PIPELINE}:compare@tiny")  # what `make paper SETTING=tiny` runs


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("clone") / "project", STAMP_WORKERS="2")
    project.change("params/settings.yaml", "tiny.training.rounds", 20)
    project.change("params/paper.yaml", "grid.method", ["fedavg", "replay"])
    return project


def finished_rounds(project: Project) -> list[dict[str, Any]]:
    """The history in FedAvg's checkpoint; none where there is no checkpoint yet."""
    file = project.root / "data/resume/tiny-fedavg-0/run.safetensors"
    if not file.exists():
        return []
    history: list[dict[str, Any]] = json.loads(read_tree(file)[0]["history"])
    return history


def stop_in_training(project: Project, with_signal: int) -> tuple[int, str]:
    """Stop DVC, and what is in its group, in the middle of a training; its status and output.

    All that it has started must end as well.
    """
    before = len(finished_rounds(project))
    log = project.root.parent / f"{with_signal}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            COMPARE,
            **{"cwd": project.root, "env": project.environment, "start_new_session": True},
            **{"stdout": output, "stderr": subprocess.STDOUT},
        )
    wait_until(lambda: len(finished_rounds(project)) > before or process.poll(), "a round")
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, with_signal)
    status = process.wait()
    wait_until(lambda: all(map(gone, started)), "the end of all that it started")
    assert before < len(finished_rounds(project)) < 60
    return status, log.read_text("utf-8")


def test_a_killed_pipeline_leaves_no_process_and_a_checkpoint(project):
    """kill -9 of DVC and of the processes in its group, which are not all that it started."""
    assert stop_in_training(project, signal.SIGKILL)[0] == -signal.SIGKILL


def test_an_interrupt_ends_the_pipeline_where_it_can_go_on_and_says_so_in_one_line(project):
    status, output = stop_in_training(project, signal.SIGINT)
    assert status > 0 and output.count(stage.LINE) == 1 and "Traceback" not in output


def test_of_two_calls_at_a_time_one_ends_well_and_the_other_is_refused(project):
    """Or finds all done, if it is late."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options = {"cwd": project.root, "env": project.environment, **pipes}
    calls = [subprocess.Popen(COMPARE, **options) for _ in range(2)]
    outputs = {call.communicate()[0]: call.returncode for call in calls}
    assert 0 in outputs.values()
    refused = [output for output, status in outputs.items() if status]
    assert all("is busy" in each or "Unable to acquire lock" in each for each in refused)


def test_the_papers_pipeline_continues_a_killed_run_shows_it_and_keeps_it(project):
    """Each round is there once; the tables show what there is, without another training."""
    history = load_record(project.root / "data/paper/runs/tiny/fedavg-0/0").history
    indices = [(entry["experience"], entry["round"]) for entry in history]
    assert indices == [(experience, round_) for experience in range(3) for round_ in range(20)]
    assert not [path for path in Path(project.root / "data/resume").iterdir() if path.is_dir()]
    project.run("dvc", "repro", "-s", f"{PIPELINE}:tables")
    for name in ("tiny/accuracy.png", "tiny/results.md", "tables/paper.md"):
        assert (project.root / "figures/paper" / name).exists()
    assert json.loads(project.run("dvc", "status", "--json", PIPELINE)) == {}
