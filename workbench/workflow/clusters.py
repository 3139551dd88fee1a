"""Clusters that call a function on some node: Ray, or SLURM through submitit.

Every node sees the project's folder, where a job finds its data and leaves checkpoints and records.
"""

import os
import shlex
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import Any, Self

from stamp_core.core.paths import ROOT

Function = Callable[..., bytes]  # from arguments that can be pickled

MOST = 32  # jobs that wait on this machine at a time: SLURM holds back what does not fit
MISSING = "needs {}: run `pip install -e workbench[cluster]` here and on every node"
PATIENCE = 60  # seconds until jobs that are cancelled must have ended
DAY = 24 * 60  # minutes of a SLURM job without --time


class ClusterError(RuntimeError):
    """An obstacle to a job on a cluster."""


def job_workers() -> int:
    """The cores that a job asks for: $STAMP_WORKERS, else one."""
    return int(os.environ.get("STAMP_WORKERS") or 1)


class RayCluster:
    """A job is a task of Ray, which ends with this process."""

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise ClusterError(f"RAY={address} {MISSING.format('Ray')}") from error
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        except ConnectionError as error:
            raise ClusterError(f"RAY={address}: no cluster answers there; {error}") from error
        self.ray = ray
        self.gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
        self.tasks = dict[Any, Future[bytes]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for task in self.tasks:
            self.ray.cancel(task, force=True)
        wait(self.tasks.values(), PATIENCE)  # Ray's shutdown under waiting threads may crash
        self.ray.shutdown()

    def room(self) -> int:
        """As many as fit the cluster's cores, and its GPUs where there are some."""
        workers = job_workers()
        room = 0
        for node in self.ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            fit = int(has.get("CPU", 0)) // workers
            room += min(fit, int(has.get("GPU", 0))) if self.gpus else fit
        if not room:
            raise ClusterError(f"STAMP_WORKERS is {workers}; no node of the Ray cluster has room")
        return min(room, MOST)

    def call(self, function: Function, *arguments: object) -> bytes:
        """The result of a task; a node that is lost is replaced by another."""
        share = {"num_cpus": job_workers(), "num_gpus": self.gpus, "max_calls": 1}
        task = self.ray.remote(**share)(function).remote(*arguments)
        self.tasks[task] = task.future()
        try:
            return self.tasks[task].result()
        except self.ray.exceptions.RayError as error:
            raise ClusterError(" ".join(str(error).split())) from error


class SlurmCluster(ExitStack):
    """Jobs of SLURM, or with SLURM=local processes on this machine."""

    def __init__(self, options: str) -> None:
        super().__init__()
        try:
            import submitit
        except ImportError as error:
            raise ClusterError(f"SLURM={options} {MISSING.format('submitit')}") from error
        self.local = options == "local"
        kind = "local" if self.local else "slurm"
        self.executor = submitit.AutoExecutor(ROOT / "data" / "resume" / "slurm", cluster=kind)
        self.executor.update_parameters(
            name="stamp",
            cpus_per_task=job_workers(),
            timeout_min=DAY,
            slurm_additional_parameters=sbatch_options(options),
        )

    def room(self) -> int:
        """SLURM holds back what does not fit; here one for each core."""
        return max(1, (os.cpu_count() or 1) // job_workers()) if self.local else MOST

    def call(self, function: Function, *arguments: object) -> bytes:
        """The result of a job; the error of one that was lost says where its output is."""
        submitted: Any = self.executor.submit(function, *arguments)
        self.callback(submitted.cancel, check=False)  # those that have ended stay as they are
        try:
            answer: bytes = submitted.result()
        except RuntimeError as error:  # of submitit
            raise ClusterError(" ".join(str(error).split())) from error
        return answer


Cluster = RayCluster | SlurmCluster


def chosen_cluster() -> Cluster | None:
    """The cluster of $RAY or $SLURM; None without them."""
    if address := os.environ.get("RAY"):
        return RayCluster(address)
    return SlurmCluster(options) if (options := os.environ.get("SLURM")) else None


def sbatch_options(options: str) -> dict[str, str | bool]:
    """The options of sbatch in a text such as "--partition=gpu --exclusive", or a partition."""
    if not options.startswith("-"):
        return {"partition": options}
    words = shlex.split(options)
    if loose := [word for word in words if not word.startswith("-")]:
        raise ClusterError(f"SLURM has {loose[0]!r} after a space; it must be --option=value")
    pairs = [word.lstrip("-").partition("=") for word in words]
    return {key.replace("-", "_"): value or True for key, _, value in pairs}
