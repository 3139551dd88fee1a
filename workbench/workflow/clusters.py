"""Clusters that stages are sent to: Ray, or SLURM through submitit; both run `run_stage` on a node.

A job's folder, which all nodes share, has what it is to do; the job writes its output and status.
"""

import json
import multiprocessing
import os
import shlex
import sys
from pathlib import Path
from typing import Any, Protocol

import psutil

from stamp_core.core.atomic import atomic_write
from stamp_core.core.processes import follow_parent

MOST = 32  # stages at a time: each has two processes that wait for it on this machine
MISSING = "needs {}: run `pip install -e workbench[cluster]` here and on every node"
DAY = 24 * 60  # minutes of a SLURM job without --time


class ClusterError(RuntimeError):
    """An obstacle to a stage on a cluster."""


class Cluster(Protocol):
    """Runs jobs, each known by its folder and an id; they survive the process that submits them."""

    def room(self) -> int:
        """The number of stages to submit at a time."""
        ...

    def submit(self, folder: Path) -> str:
        """The id of a new job."""
        ...

    def alive(self, folder: Path, job: str) -> bool:
        """Return whether a job waits or runs."""
        ...

    def cancel(self, folder: Path, job: str) -> None:
        """End a job."""
        ...

    def reason(self, folder: Path, job: str) -> str:
        """The reason why a job has ended without a status, as far as the cluster knows."""
        ...


def sends_stages() -> bool:
    """Return whether $RAY or $SLURM names a cluster."""
    return bool(os.environ.get("RAY") or os.environ.get("SLURM"))


def chosen_cluster() -> Cluster:
    """The cluster of $RAY or $SLURM."""
    address = os.environ.get("RAY")
    return RayCluster(address) if address else SlurmCluster(os.environ["SLURM"])


def stage_workers() -> int:
    """The cores that a stage asks for: $STAMP_WORKERS, else one."""
    return int(os.environ.get("STAMP_WORKERS") or 1)


def require_shared(folder: Path) -> None:
    """Validate that this node sees a job's folder."""
    if not (folder / "job.json").exists():
        node = os.uname().nodename
        raise ClusterError(
            f"node {node} does not see {folder}: the project's folder must be shared"
        )


def run_stage(folder: Path) -> None:
    """Run a job on this node."""
    require_shared(folder)
    process = multiprocessing.get_context("spawn").Process(target=_run_papermill, args=(folder,))
    process.start()
    process.join()
    with atomic_write(folder / "status") as scratch:
        scratch.write_text(str(process.exitcode))


def _run_papermill(folder: Path) -> None:
    """Be papermill in the job's view of the project, and end with the job."""
    from papermill.cli import papermill

    follow_parent()
    job = json.loads((folder / "job.json").read_text())
    os.environ.update(job["environment"])
    paths = [str(folder / "view"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # this project's code first
    os.chdir(folder / "view")
    output = (folder / "output").open("w", buffering=1)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    papermill(job["command"])  # ends this process with its status


class RayCluster:
    """A job is an actor of its own name, whom nobody has to hold."""

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise ClusterError(f"RAY={address} {MISSING.format('Ray')}") from error
        try:
            ray.init(address, namespace="stamp", log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise ClusterError(f"RAY={address}: no cluster answers there; {error}") from error
        self.ray = ray
        self.actors: dict[str, Any] = {}
        self.gpus = int(ray.cluster_resources().get("GPU", 0) > 0)

    def room(self) -> int:
        """As many as fit the cluster's cores, and its GPUs where there are some."""
        workers = stage_workers()
        room = 0
        for node in self.ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            fit = int(has.get("CPU", 0)) // workers
            room += min(fit, int(has.get("GPU", 0))) if self.gpus else fit
        if not room:
            raise ClusterError(f"STAMP_WORKERS is {workers}; no node of the Ray cluster has room")
        return min(room, MOST)

    def submit(self, folder: Path) -> str:
        """The name of a new actor."""
        share = {"num_cpus": stage_workers(), "num_gpus": self.gpus}
        options = self.ray.remote(_Actor).options(name=str(folder), lifetime="detached", **share)
        self.actors[str(folder)] = options.remote(folder)
        return str(folder)

    def alive(self, folder: Path, job: str) -> bool:
        """Return whether the actor waits or runs."""
        try:
            self.ray.get_actor(job)
        except ValueError:
            return False
        return True

    def cancel(self, folder: Path, job: str) -> None:
        """End the actor, and papermill with it."""
        if self.alive(folder, job):
            self.ray.kill(self.ray.get_actor(job))

    def reason(self, folder: Path, job: str) -> str:
        """The error that ended the actor, where it was started by this process."""
        try:
            self.ray.get(self.actors[job].__ray_ready__.remote())
        except (KeyError, self.ray.exceptions.RayError) as error:
            return str(error)
        return ""


class _Actor:
    """A process on a node that runs one job and ends."""

    def __init__(self, folder: Path) -> None:
        import ray

        require_shared(folder)  # here, as the error of a constructor reaches who asks for it
        # By itself, as whoever submits the job may be stopped before the actor is there.
        ray.get_runtime_context().current_actor.run.remote(folder)

    def run(self, folder: Path) -> None:
        """Run the job; an actor that nobody holds has to end itself."""
        import ray

        try:
            run_stage(folder)
        finally:
            ray.actor.exit_actor()


class SlurmCluster:
    """Jobs of SLURM, or with SLURM=local processes on this machine."""

    def __init__(self, options: str) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ClusterError(f"SLURM={options} {MISSING.format('submitit')}") from error
        self.executor = submitit.AutoExecutor
        self.local = options == "local"
        self.kind = submitit.LocalJob if self.local else submitit.SlurmJob
        self.options = sbatch_options(options)
        self.jobs: dict[str, Any] = {}

    def room(self) -> int:
        """SLURM holds back what does not fit; here one for each core."""
        return max(1, (os.cpu_count() or 1) // stage_workers()) if self.local else MOST

    def submit(self, folder: Path) -> str:
        """The number of a new job."""
        executor = self.executor(folder / "slurm", cluster="local" if self.local else "slurm")
        executor.update_parameters(
            name=f"stamp-{folder.parent.name}",
            cpus_per_task=stage_workers(),
            timeout_min=DAY,
            slurm_additional_parameters=self.options,
        )
        job = executor.submit(run_stage, folder)
        self.jobs[job.job_id] = job
        return str(job.job_id)

    def alive(self, folder: Path, job: str) -> bool:
        """Return whether the job waits or runs; SLURM is not asked every time."""
        if not self.local:
            return not self._job(folder, job).done()
        try:
            return bool(psutil.Process(int(job)).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def cancel(self, folder: Path, job: str) -> None:
        """End the job and what it has started."""
        if not self.local:
            self._job(folder, job).cancel(check=False)
        elif self.alive(folder, job):
            process = psutil.Process(int(job))
            for descendant in [process, *process.children(recursive=True)]:
                descendant.kill()

    def reason(self, folder: Path, job: str) -> str:
        """The job's state, and its own errors."""
        ended = self._job(folder, job)
        return f"{ended.state}\n{ended.stderr() or ''}"

    def _job(self, folder: Path, job: str) -> Any:
        """submitit's view of a job; each new one asks SLURM at once."""
        if job not in self.jobs:
            self.jobs[job] = self.kind(folder / "slurm", job)
        return self.jobs[job]


def sbatch_options(options: str) -> dict[str, str | bool]:
    """The options of sbatch in a text such as "--partition=gpu --exclusive", or a partition."""
    if not options.startswith("-"):
        return {"partition": options}
    pairs = [option.lstrip("-").partition("=") for option in shlex.split(options)]
    return {key.replace("-", "_"): value or True for key, _, value in pairs}
