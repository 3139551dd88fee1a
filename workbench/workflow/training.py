"""Trains the experiments that have no current record: several at a time, the longest first.

Each has a process of its own, so that one that fails or is killed leaves the others alone. With
$RAY or $SLURM these processes are on the nodes of a cluster: workbench/workflow/clusters.py.
"""

import fcntl
import json
import multiprocessing
import os
import pickle
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NamedTuple

import psutil

from stamp_core.core.atomic import open_lock
from stamp_core.core.devices import resolve_device
from stamp_core.core.paths import RESUME, ROOT
from stamp_core.core.processes import follow_parent, progress_form
from stamp_core.engine.executor import resolve_workers
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.results.records import Record
from workbench.workflow.callers import end_with_caller
from workbench.workflow.clusters import Cluster, ClusterError, chosen_cluster, job_workers
from workbench.workflow.grid import load_records, train_and_save
from workbench.workflow.profiles import CIFAR100, DEFAULT, expand_grid, read_profile

# Where the seconds of each method were measured: photographs, and glyphs for those not there.
REFERENCES = {"cifar100_c2_small": CIFAR100, "cifar100_c20_small": CIFAR100, "glyphs": DEFAULT}
OUTPUT = ("lines", "none")  # what a process of its own may show of its progress


@dataclass(frozen=True)
class Job:
    """An experiment with its seeds, and the profile whose folder its records are in."""

    experiment: Experiment
    seeds: str
    profile: str

    @property
    def name(self) -> str:
        return f"{self.experiment.name}-{self.seeds}"

    def records(self) -> list[Record]:
        """The current records of all seeds; none if one is missing or outdated."""
        return load_records(self.experiment, self.seeds, self.profile, outdated=False)


class Failure(NamedTuple):
    """The error of a training."""

    kind: str  # the error's class
    message: str
    trace: str = ""


OUTDATED = Failure("Outdated", "its code or parameters changed while it trained; train it again")


class TrainingError(RuntimeError):
    """Some experiments have failed; the records of the others are saved."""


Run = Callable[[Job], Failure | None]  # trains an experiment somewhere and waits for its end


def grid_jobs(page: str, profile: str) -> list[Job]:
    """The experiments of a page: "grid.digits" are those that are trained on one setting."""
    params = read_profile(profile)
    return [
        Job(load_experiment(setting, method, params), seeds, profile)
        for setting, method, seeds in expand_grid(page, params)
    ]


def train_grid(
    page: str, profile: str, workers: int = 1, device: str = "auto"
) -> dict[str, list[Record]]:
    """The records of a page's experiments by their names, of which the missing ones are trained."""
    return require_trained(*train_missing(grid_jobs(page, profile), workers, device))


def require_trained(
    found: dict[str, list[Record]], failures: dict[str, Failure]
) -> dict[str, list[Record]]:
    """The records; an error that names the experiments that have failed, if any has."""
    if failures:
        each = [f"{name} ({why.kind}: {why.message})" for name, why in failures.items()]
        count = f"{len(each)} of {len(found) + len(each)} experiments failed"
        raise TrainingError(f"{count}, the records of the others are kept: {'; '.join(each)}")
    return found


def train_missing(
    jobs: Sequence[Job], workers: int = 1, device: str = "auto"
) -> tuple[dict[str, list[Record]], dict[str, Failure]]:
    """Records and failures of experiments by name; `workers` 1: this process, 0: all cores."""
    found = {job.name: records for job in jobs if (records := job.records())}
    missing = [job for job in jobs if job.name not in found]
    if not missing:
        return found, {}
    seconds = relative_seconds()  # an unknown method may take longest: it comes first
    missing.sort(key=lambda job: seconds.get(job.experiment.method, float("inf")), reverse=True)
    for experiment in {job.experiment.setting.name: job.experiment for job in missing}.values():
        experiment.dataset()  # once: each process would make the images otherwise
    if "DVC_STAGE" in os.environ:
        papermill = psutil.Process(os.getppid())  # which DVC that is killed leaves alone
        threading.Thread(target=end_with_caller, args=(papermill,), daemon=True).start()
    progress = TrainingProgress(len(missing), len(found))
    failures: dict[str, Failure] = {}
    with runner(len(missing), workers, device) as (run, count):
        for job, failure in _run_all(missing, run, count):
            records = [] if failure else job.records()
            if not (records or failure):
                failure = OUTDATED
            progress.ended(job, records, failure)
            if failure:
                failures[job.name] = failure
            else:
                found[job.name] = records
    return {job.name: found[job.name] for job in jobs if job.name in found}, failures


def _run_all(jobs: Sequence[Job], run: Run, count: int) -> Iterator[tuple[Job, Failure | None]]:
    """Each job with its failure as it ends, `count` of them at a time, in the given order."""
    if count == 1:
        yield from ((job, run(job)) for job in jobs)
        return
    pool = ThreadPoolExecutor(count)
    try:
        futures = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def runner(jobs: int, workers: int, device: str) -> Iterator[tuple[Run, int]]:
    """A context with what trains one job, and how many of them at a time."""
    if cluster := chosen_cluster():
        with cluster:
            yield partial(run_on_cluster, cluster), cluster.room()
        return
    cores = resolve_workers(workers, resolve_device(device))
    if cores == 1:
        yield lambda job: train_job(job, 1, device), 1
        return
    count = min(cores, jobs)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes = Processes(context, cores // count, device)
    try:
        yield processes.run, count
    finally:
        processes.kill()


def run_on_cluster(cluster: Cluster, job: Job) -> Failure | None:
    """Train a job on some node of a cluster."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("STAMP_")}
    packed = pickle.dumps((job, job_workers()))
    try:
        failure: Failure | None = pickle.loads(
            cluster.call(train_on_node, ROOT, environment, packed)
        )
    except ClusterError as error:
        failure = Failure("ClusterError", str(error))
    return failure


def train_on_node(root: Path, environment: dict[str, str], packed: bytes) -> bytes:
    """Train a job on this node, in a process that starts in the project's folder."""
    if not (root / "params").is_dir():
        node = os.uname().nodename
        text = f"node {node} does not see {root}: the project's folder must be shared"
        return pickle.dumps(Failure("ClusterError", text))
    os.chdir(root)
    os.environ.update(environment)
    job, workers = pickle.loads(packed)
    processes = Processes(multiprocessing.get_context("spawn"), workers, "auto")
    try:
        return pickle.dumps(processes.run(job))
    finally:
        processes.kill()  # if this one is cancelled


class Processes:
    """Processes of this machine, one for each job, with so many workers."""

    def __init__(self, context: BaseContext, workers: int, device: str) -> None:
        self.context, self.workers, self.device = context, workers, device
        self.running: set[multiprocessing.process.BaseProcess] = set()

    def run(self, job: Job) -> Failure | None:
        receiver, sender = self.context.Pipe(duplex=False)
        target, arguments = _train_in_process, (sender, job, self.workers, self.device)
        process = self.context.Process(target=target, args=arguments)  # type: ignore[attr-defined]
        process.start()
        self.running.add(process)
        sender.close()
        try:
            failure: Failure | None = receiver.recv()
        except EOFError:
            process.join()
            why = f"its process ended with status {process.exitcode}: most often memory was lacking"
            failure = Failure("RuntimeError", f"{why}; set STAMP_WORKERS=1")
        process.join()
        self.running.discard(process)
        return failure

    def kill(self) -> None:
        """End those that run; each round that they have finished is saved."""
        for process in [*self.running]:
            process.kill()


def _train_in_process(sender: Connection, job: Job, workers: int, device: str) -> None:
    """Be the process of a job, which ends with its parent and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
    if os.environ.get("STAMP_PROGRESS") not in OUTPUT:
        os.environ["STAMP_PROGRESS"] = "none"  # the parent shows what has ended
    sender.send(train_job(job, workers, device))


def train_job(job: Job, workers: int, device: str) -> Failure | None:
    """Train a job in this process, or wait until another does; any error is a result."""
    try:
        with _exclusive(job):
            if not job.records():
                train_and_save(job.experiment, job.seeds, job.profile, workers, device)
    except Exception as error:
        return Failure(type(error).__name__, str(error), traceback.format_exc())
    return None


@contextmanager
def _exclusive(job: Job) -> Iterator[None]:
    """A context that one process at a time enters for a job of this project."""
    RESUME.mkdir(parents=True, exist_ok=True)
    path = RESUME / f".{job.profile}-{job.name}.lock"
    with open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass
class TrainingProgress:
    """What is printed as experiments end."""

    missing: int
    kept: int
    done: int = 0
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.say(f"{self.missing} experiments to train, {self.kept} have current records")

    def ended(self, job: Job, records: Sequence[Record], failure: Failure | None) -> None:
        self.done += 1
        spent = time.perf_counter() - self.started
        left = spent / self.done * (self.missing - self.done)
        what = f"failed: {failure.kind}: {failure.message}" if failure else _accuracy(records)
        times = f"{spent:.0f} s, at most about {left:.0f} s left"
        self.say(f"{self.done}/{self.missing}  {job.name}  {what}  {times}")
        if failure and failure.trace:
            self.say(failure.trace)

    def say(self, line: str) -> None:
        if progress_form() != "none":
            print(line, flush=True)


def _accuracy(records: Sequence[Record]) -> str:
    finals = [float(each.task_accuracies(each.main_model)[-1].mean()) for each in records]
    return f"accuracy {sum(finals) / len(finals):.1%}"


def relative_seconds() -> dict[str, float]:
    """Each method's seconds relative to FedAvg's: on photographs, otherwise on glyphs."""
    file = ROOT / "benchmarks" / "seconds.json"  # which `make bench` writes
    measured = json.loads(file.read_text()) if file.exists() else {}
    *photographs, glyphs = (_ratios(measured.get(setting, {})) for setting in REFERENCES)
    known = dict.fromkeys(method for each in photographs for method in each)
    return glyphs | {
        method: statistics.mean(each[method] for each in photographs if method in each)
        for method in known
    }


def _ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    return {method: value / seconds["fedavg"] for method, value in seconds.items()}
