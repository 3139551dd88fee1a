"""Where clients run: in this process or in worker processes of one thread each; same results."""

import concurrent.futures
import io
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from itertools import starmap
from pathlib import Path
from typing import Any, Protocol, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from stamp_core.config.decode import invalid
from stamp_core.core.processes import follow_parent
from stamp_core.data.plan import Plans
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.worker import Worker, explain_memory_errors

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class Executor(Protocol):
    """Where clients run."""

    workers: int  # processes that work side by side

    def map(self, work: Callable[[Worker, *_Args], _T], each: Iterable[tuple[*_Args]]) -> list[_T]:
        """`work(worker, *arguments)` for each, in order; lost client rounds may be left out."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class SerialExecutor:
    """Works in this process, one call after the other."""

    workers = 1

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def map(self, work: Callable[[Worker, *_Args], _T], each: Iterable[tuple[*_Args]]) -> list[_T]:
        with explain_memory_errors(self.worker.runtime.setting):
            return list(starmap(work, ((self.worker, *arguments) for arguments in each)))

    def close(self) -> None:
        """Do nothing: there are no worker processes."""


class ProcessExecutor:
    """Distributes the calls among worker processes; several threads may call it at once."""

    def __init__(self, workers: int, *of_worker: object) -> None:
        self.workers = workers
        # A fork server has imported torch already and has no other threads: its children start
        # fast and cannot inherit a lock held by another thread, as those of a notebook kernel may.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["stamp_core.engine.executor"])
        self.pool = concurrent.futures.ProcessPoolExecutor(
            workers, context, initializer=_start, initargs=(dumps(of_worker),)
        )

    def map(self, work: Callable[[Worker, *_Args], _T], each: Iterable[tuple[*_Args]]) -> list[_T]:
        try:
            futures = [self.pool.submit(_run, dumps((work, arguments))) for arguments in each]
            return [pickle.loads(future.result()) for future in futures]
        except (BrokenProcessPool, EOFError, ConnectionError):  # a worker, or the fork server
            raise RuntimeError(
                "a worker process ended. Most often memory was lacking: run with fewer workers "
                "(STAMP_WORKERS=1), a smaller network or smaller images; finished rounds are "
                "kept. In a script, call train under `if __name__ == '__main__':`, as workers "
                "import it"
            ) from None

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def start_executor(
    experiment: Experiment, plans: Plans, workers: int, device: str, resume: Path | None = None
) -> tuple[Worker, Executor]:
    """This process's own worker, and where clients run."""
    torch.set_num_threads(1)  # sums are split by threads: their number would change last digits
    of_worker = experiment, plans, device, resume
    worker = Worker(*of_worker)
    return worker, SerialExecutor(worker) if workers == 1 else ProcessExecutor(workers, *of_worker)


def resolve_workers(workers: int, device: str) -> int:
    """The number of worker processes; 0 means $STAMP_WORKERS, else one per core (GPU: one)."""
    workers = workers or int(os.environ.get("STAMP_WORKERS", 0))
    if workers < 0:
        raise invalid("workers", workers, "at least 0")
    if workers or device != "cpu":
        return workers or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


class _Pickler(pickle.Pickler):
    """Pickles tensors as plain arrays: torch's own pickling opens a file descriptor for each."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return torch.from_numpy, (item.numpy(),)
        return NotImplemented


def dumps(item: object) -> bytes:
    """`item` as bytes for another process."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(item)
    return buffer.getvalue()


_worker: Worker | None = None  # of this process, if it is a worker process


def _start(packed: bytes) -> None:
    """Make this process a worker that ends with its parent and leaves Ctrl-C to it."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
    torch.set_num_threads(1)
    _worker = Worker(*pickle.loads(packed))


def _run(packed: bytes) -> bytes:
    """The result of one call in a worker process, as bytes."""
    assert _worker is not None
    work, arguments = pickle.loads(packed)
    return dumps(SerialExecutor(_worker).map(work, [arguments])[0])
