"""Stages on a Ray cluster of two nodes on this machine, and through submitit's local executor.

SLURM's own commands are four shell scripts. The tests of a project run in this order, each on what
the one before has left.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import nbformat
import psutil
import pytest
import ray
import small
from processes import gone, wait_until
from project import Project
from ray.cluster_utils import Cluster
from workbench.workflow.submit import wait_for_job

from stamp_core.results.records import load_record
from workbench.workflow.clusters import Cluster as AnyCluster
from workbench.workflow.clusters import ClusterError, RayCluster, SlurmCluster

PAPER = "pipelines/paper/dvc.yaml:"
SPLIT = f"{PAPER}split@tiny-0"
COMPARE = f"{PAPER}compare@tiny"
TABLES = f"{PAPER}tables"
NOTEBOOK = "data/executed/paper-train-tiny-broken-0.ipynb"
FEDAVG, BROKEN = f"{PAPER}train@tiny-fedavg-0", f"{PAPER}train@tiny-broken-0"
COMMAND = (
    sys.executable,
    "-m",
    "workbench.workflow.repro",
    "paper",
    "tiny",
)  # what `make paper` runs
METHOD = """
import time

from stamp_core.core.paths import ROOT
from stamp_core.methods.base.method import Method


class Broken(Method):
    def train_indices(self, plan, client, task):
        while (ROOT / "held").exists():
            time.sleep(0.1)
        if (ROOT / "broken").exists():
            raise RuntimeError("broken on purpose")
        return super().train_indices(plan, client, task)
"""


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """With a method that waits or fails while there is a file."""
    root = tmp_path_factory.mktemp("clone") / "project"
    project = Project(root, PYTHONPATH=os.pathsep.join([str(root), os.environ["PYTHONPATH"]]))
    (root / "stamp_core/methods/broken.py").write_text(METHOD)
    methods = ["fedavg", "replay", "stamp", "sam", "broken"]
    project.change("params.yaml", "grid.method", methods)  # whose code has fingerprints
    project.change("params/paper.yaml", "grid.method", ["fedavg", "broken"])
    return project


def done(output: str) -> set[str]:
    """The stages that have run, by the driver's output."""
    return {line.split()[0] for line in output.splitlines() if "done after" in line}


def test_a_failing_stage_tells_its_error_and_runs_again_alone(project: Project) -> None:
    project.environment["SLURM"] = "local"
    (project.root / "broken").touch()
    output = project.run(*COMMAND, ok=False)
    assert "RuntimeError: broken on purpose" in output
    assert f"failed: {BROKEN}; the tracebacks are in {NOTEBOOK}" in output
    assert "broken on purpose" in (project.root / NOTEBOOK).read_text()
    assert done(output) == {SPLIT, FEDAVG}
    (project.root / "broken").unlink()
    assert done(project.run(*COMMAND)) == {BROKEN, COMPARE, TABLES}
    assert not list(project.root.glob(".dvc/tmp/submitted/*"))


def test_results_are_those_of_stages_that_run_here(project: Project) -> None:
    folder = project.root / "data/paper/runs/tiny-fedavg-0/0"
    sent = load_record(folder)
    project.run("dvc", "repro", "--force", "--single-item", FEDAVG)
    small.assert_same(load_record(folder), sent)


def stop_while_training(project: Project, with_signal: int) -> list[Path]:
    """Stop the driver in the middle of a training; the folders of its jobs.

    All processes end that wait here for the cluster.
    """
    job, waiting = ".dvc/tmp/submitted/*broken*/*", list[psutil.Process]()
    with subprocess.Popen(COMMAND, cwd=project.root, env=project.environment) as driver:

        def trains() -> bool:
            if not list(project.root.glob(f"{job}/view/data/executed/*.ipynb")):
                return False
            children = {e.pid for e in psutil.Process(driver.pid).children(recursive=True)}
            running = [e for e in psutil.process_iter(["cmdline"]) if e.pid in children]
            waiting[:] = [e for e in running if "submit import main" in str(e.info["cmdline"])]
            return bool(waiting)

        wait_until(lambda: driver.poll() is not None or trains(), "a training")
        driver.send_signal(with_signal)
    assert waiting
    wait_until(lambda: all(map(gone, waiting)), "the end of what waits for the cluster")
    return list(project.root.glob(job))


def test_a_driver_that_was_stopped_finds_its_stage_again(
    project: Project, cluster: Cluster
) -> None:
    """After Ctrl-C the job still runs; after kill -9 it has ended before the next call."""
    project.environment.pop("SLURM", None)
    project.environment["RAY"] = cluster.address
    project.change("params/settings.yaml", "tiny.training.epochs", 2)
    (project.root / "held").touch()
    (job,) = stop_while_training(project, signal.SIGINT)
    assert stop_while_training(project, signal.SIGKILL) == [job]
    assert not (job / "status").exists()
    (project.root / "held").unlink()
    wait_until(lambda: (job / "status").exists(), "the end of the job")
    before = datetime.now().isoformat()
    assert done(project.run(*COMMAND)) >= {BROKEN, COMPARE, TABLES}
    metadata = nbformat.read(project.root / NOTEBOOK, 4).metadata
    assert metadata["papermill"]["start_time"] < before
    about = load_record(project.root / "data/paper/runs/tiny-broken-0/0").about
    assert about["setting"]["training"]["epochs"] == 2
    assert (project.root / "figures/paper/tables/paper.md").exists()


# What submitit asks of SLURM, for one job on this machine.
SLURM = {
    "sbatch": """
cp "$1" "$PRETENDED/script"
SLURM_JOB_ID=7 setsid sh "$PRETENDED/script" > /dev/null 2>&1 &
echo $! > "$PRETENDED/group"
echo Submitted batch job 7
""",
    "srun": """
while [ "${1#--}" != "$1" ]; do
    case $1 in
        --error) errors=$(echo "$2" | sed "s/%j/7/; s/%t/0/"); shift ;;
        --output) shift ;;
    esac
    shift
done
exec "$@" 2> "$errors"
""",
    "sacct": """
kill -0 -$(cat "$PRETENDED/group") && state=RUNNING || state=CANCELLED
printf "JobID|State|NodeList\\n7|$state|here\\n"
""",
    "scancel": 'kill -KILL -$(cat "$PRETENDED/group")',
}


@pytest.fixture(params=["ray", "local", "slurm"])
def some_cluster(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[AnyCluster]:
    """Each kind of cluster as a driver sees it."""
    if request.param == "ray":
        yield RayCluster(cluster.address)
        ray.shutdown()
    elif request.param == "local":
        yield SlurmCluster("local")
    else:
        folder = tmp_path_factory.mktemp("slurm")
        for name, script in SLURM.items():
            (folder / name).write_text(f"#!/bin/sh{os.linesep}{script}")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PRETENDED", str(folder))
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield SlurmCluster("--partition=gpu --gpus-per-node=1 --time=2-00:00:00")
        script = (folder / "script").read_text()
        for option in ("partition=gpu", "gpus-per-node=1", "time=2-00:00:00", "cpus-per-task=1"):
            assert script.count(f"#SBATCH --{option}\n") == 1


def test_a_folder_that_a_node_does_not_see_is_named(
    some_cluster: AnyCluster, tmp_path: Path
) -> None:
    """What the job is to do lies elsewhere, as in a folder of the same name that is not shared."""
    job = some_cluster.submit(tmp_path)
    (tmp_path / "id").write_text(job)
    with pytest.raises(ClusterError, match=f"does not see {tmp_path}: .* must be shared"):
        wait_for_job(tmp_path, some_cluster)


def test_a_job_that_is_cancelled_ends_with_its_kernel(
    some_cluster: AnyCluster, tmp_path: Path, project: Project
) -> None:
    code = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    view = tmp_path / "view"
    view.mkdir()
    nbformat.write(notebook, view / "in.ipynb")
    job = {"command": ["-k", "python3", "in.ipynb", "out.ipynb"], "environment": {}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    number = some_cluster.submit(tmp_path)
    wait_until(lambda: (view / "pid").exists() and (view / "pid").read_text(), "the kernel")
    process = psutil.Process(int((view / "pid").read_text()))
    some_cluster.cancel(tmp_path, number)
    wait_until(lambda: gone(process), "the end of the kernel")
    wait_until(lambda: not some_cluster.alive(tmp_path, number), "the end of the job")
    assert not (tmp_path / "status").exists()


def test_as_many_stages_as_fit_the_nodes_are_submitted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes with a core each; then one more with a core and a GPU, which every stage needs."""
    nodes = RayCluster(cluster.address)
    assert nodes.room() == 2
    monkeypatch.setenv("STAMP_WORKERS", "2")
    with pytest.raises(ClusterError, match=r"STAMP_WORKERS is 2; no node .* has room"):
        nodes.room()
    monkeypatch.delenv("STAMP_WORKERS")
    cluster.add_node(num_cpus=1, num_gpus=1)
    ray.shutdown()
    assert RayCluster(cluster.address).room() == 1
    ray.shutdown()
