"""Experiments on a Ray cluster of two nodes on this machine, and through submitit.

SLURM's own commands are four shell scripts.
"""

import os
import shutil
import threading
from pathlib import Path

import psutil
import pytest
import ray
import small
from processes import gone, wait_until
from small import plans, whole

from stamp_core.core.paths import ROOT
from stamp_core.engine import train as engine
from workbench.workflow import clusters, grid, training
from workbench.workflow.clusters import ClusterError, RayCluster, sbatch_options
from workbench.workflow.training import Failure, Job, train_missing

# What submitit asks of SLURM, on this machine; a job's number is that of its process group.
SLURM = {
    "sbatch": """
cp "$1" "$PRETENDED/script"
setsid sh -c 'SLURM_JOB_ID=$$ exec sh "$PRETENDED/script"' > /dev/null 2>&1 &
while kill -0 $! && ! kill -0 "-$!"; do sleep 0.01; done  # until it leads its group
echo Submitted batch job $!
""",
    "srun": """
while [ "${1#--}" != "$1" ]; do
    case $1 in
        --error) errors=$(echo "$2" | sed "s/%j/$SLURM_JOB_ID/; s/%t/0/"); shift ;;
        --output) shift ;;
    esac
    shift
done
exec "$@" 2> "$errors"
""",
    "sacct": """
echo "JobID|State|NodeList"
for argument; do
    case $argument in
        [0-9]*) kill -0 "-$argument" && state=RUNNING || state=CANCELLED
            echo "$argument|$state|here" ;;
    esac
done
""",
    "scancel": 'for argument; do case $argument in [0-9]*) kill -KILL "-$argument" ;; esac; done',
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    root = tmp_path / "project"
    shutil.copytree(ROOT / "params", root / "params")
    for module in (clusters, grid, training):
        monkeypatch.setattr(module, "ROOT", root)
    for module in (grid, training):
        monkeypatch.setattr(module, "RESUME", root / "data/resume")
    return root


@pytest.fixture(params=["ray", "local", "slurm"])
def some_cluster(request, tmp_path_factory, monkeypatch, project):
    if request.param == "ray":
        monkeypatch.setenv("RAY", request.getfixturevalue("cluster").address)
        yield
        ray.shutdown()
    elif request.param == "local":
        monkeypatch.setenv("SLURM", "local")
        yield
    else:
        folder = tmp_path_factory.mktemp("slurm")
        for name, script in SLURM.items():
            (folder / name).write_text(f"#!/bin/sh{os.linesep}{script}")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PRETENDED", str(folder))
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("SLURM", "--partition=gpu --gpus-per-node=1 --time=2-00:00:00")
        yield
        script = (folder / "script").read_text()
        for option in ("partition=gpu", "gpus-per-node=1", "time=2-00:00:00", "cpus-per-task=1"):
            assert script.count(f"#SBATCH --{option}\n") == 1


def jobs(*kinds: str) -> list[Job]:
    return [Job(whole(kind), "0to1", "quick") for kind in kinds]


@pytest.mark.usefixtures("some_cluster")
def test_results_are_those_of_this_process_and_a_failure_is_named():
    """The one whose weights overflow; the records of the others are kept."""
    broken = Job(small.tiny("fedavg", training={"lr": 1e38}), "0to1", "quick")
    found, failures = train_missing([broken, *jobs("replay", "stamp")])
    (failure,) = failures.values()
    assert list(failures) == ["tiny-fedavg-0to1"] and failure.kind == "SeedsDiverged"
    assert "the weights are no longer finite" in failure.message
    for job in jobs("replay", "stamp"):
        here = engine.train(job.experiment, plans(job.experiment, 0, 1), 1, "cpu")
        for sent in found[job.name]:
            small.assert_same(sent, here[sent.about["seed"]])


@pytest.mark.usefixtures("some_cluster")
def test_a_folder_that_a_node_does_not_see_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "ROOT", tmp_path)
    _, failures = train_missing(jobs("fedavg"))
    (failure,) = failures.values()
    assert failure.kind == "ClusterError"
    assert f"does not see {tmp_path}: the project's folder must be shared" in failure.message


def training_in(root: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(root)]


@pytest.mark.usefixtures("some_cluster")
def test_what_is_cancelled_ends_with_its_process(project):
    job, ended = Job(small.long(), "0", "quick"), list[Failure | None]()
    chosen = clusters.chosen_cluster()
    assert chosen
    with chosen:
        waiting = threading.Thread(
            target=lambda: ended.append(training.run_on_cluster(chosen, job))
        )
        waiting.start()
        checkpoint = project / "data/resume/tiny-replay-0/run.safetensors"
        wait_until(lambda: checkpoint.exists() or ended, "a round")
        running = training_in(project)
        assert running and not ended
    wait_until(lambda: all(map(gone, running)), "the end of what trains")
    waiting.join(60)
    assert [each.kind for each in ended if each] == ["ClusterError"]
    assert not job.records() and checkpoint.exists()


def test_options_of_sbatch_stand_with_their_values():
    found = sbatch_options("--partition=gpu --exclusive")
    assert found == {"partition": "gpu", "exclusive": True}
    assert sbatch_options("gpu") == {"partition": "gpu"}
    with pytest.raises(ClusterError, match="SLURM has 'gpu' after a space; it must be --option=va"):
        sbatch_options("--partition gpu")


def test_as_many_jobs_as_fit_the_nodes_are_submitted(cluster, monkeypatch):
    """Two nodes with a core each; then one more with a core and a GPU, which every job needs."""
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
