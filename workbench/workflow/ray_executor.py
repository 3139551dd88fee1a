"""Clients on the nodes of a Ray cluster (STAMP_EXECUTOR=ray): an actor for each worker.

Which cluster, Ray's own variables say (RAY_ADDRESS); without them one is started on this machine.
Every node needs this project's folder, as a shared file system gives it: states are files there,
and only their names travel. An actor that ends, as with its node, costs the calls that it ran:
others repeat them. Calls change nothing but their results, so repeating one is harmless.
"""

import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar, TypeVarTuple

import torch

from stamp_core.engine.executor import SerialExecutor, dumps
from stamp_core.engine.worker import Worker

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
except ImportError as error:
    text = "STAMP_EXECUTOR=ray needs Ray: run `pip install -e workbench[cluster]` on every node"
    raise RuntimeError(text) from error

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")
_LOST = "every Ray worker has ended; finished rounds are kept: call again when nodes are back"


class RemoteWorker:
    """A worker in a process of some node."""

    def start(self, packed: bytes, token: Path | None, code: str) -> None:
        """Make the worker; refused on a node with other code, or that does not see the states."""
        torch.set_num_threads(1)
        node = ray.util.get_node_ip_address()
        experiment, plans, device, resume = pickle.loads(packed)
        if token and not token.exists():
            text = f"node {node} does not see {token.parent}: the folder must be shared"
            raise RuntimeError(text)
        if experiment.code() != code:
            raise RuntimeError(f"node {node} has other code of stamp_core: it must be the same")
        self.executor = SerialExecutor(Worker(experiment, plans, device, resume))

    def run(self, packed: bytes) -> bytes:
        """The result of one call, as bytes: arrays from Ray's own store would be read-only."""
        work, arguments = pickle.loads(packed)
        return dumps(self.executor.map(work, [arguments])[0])


class RayExecutor:
    """Distributes the calls among the actors; several threads may call it at once."""

    def __init__(self, workers: int, *of_worker: Any) -> None:
        experiment, _, device, resume = of_worker
        share = {"num_cpus": 1, "num_gpus": 0 if device == "cpu" else 1}
        actors = [ray.remote(RemoteWorker).options(**share).remote() for _ in range(workers)]
        self.workers = workers
        self.free = queue.SimpleQueue[Any]()
        for actor in actors:
            self.free.put(actor)
        self.living = workers
        self.lock = threading.Lock()
        self.threads = ThreadPoolExecutor(workers)
        with _token(resume) as token:
            start = (dumps(of_worker), token, experiment.code())
            for begun in [actor.start.remote(*start) for actor in actors]:
                _result(begun)

    def map(self, work: Callable[[Worker, *_Args], _T], each: Iterable[tuple[*_Args]]) -> list[_T]:
        packed = [dumps((work, arguments)) for arguments in each]
        return [pickle.loads(result) for result in self.threads.map(self.call, packed)]

    def call(self, packed: bytes) -> bytes:
        """The result of one call, by the first actor that is free and lives to its end."""
        while (actor := self.free.get()) is not None:
            try:
                result: bytes = _result(actor.run.remote(packed))
            except RayActorError:
                self.mark_dead()
                continue
            except Exception:
                self.free.put(actor)
                raise
            self.free.put(actor)
            return result
        self.free.put(None)  # for the next thread that waits
        raise RuntimeError(_LOST)

    def mark_dead(self) -> None:
        """Count an actor that has ended; after the last one nobody waits any more."""
        with self.lock:
            self.living -= 1
            print(f"a Ray worker has ended; {self.living} are left", flush=True)
            if not self.living:
                self.free.put(None)

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        ray.shutdown()


def start(workers: int, *of_worker: Any) -> RayExecutor:
    """An executor with $STAMP_WORKERS actors, else one for each core or GPU of the cluster."""
    device = of_worker[2]
    ray.init(log_to_driver=False, ignore_reinit_error=True)
    total = int(ray.cluster_resources().get("CPU" if device == "cpu" else "GPU", 0))
    count = int(os.environ.get("STAMP_WORKERS", 0)) or total
    if not 1 <= count <= total:
        raise RuntimeError(f"STAMP_WORKERS is {count}; the Ray cluster has room for {total}")
    return RayExecutor(count, *of_worker)


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None


@contextmanager
def _token(resume: Path | None) -> Iterator[Path | None]:
    """A new file where states are kept, by which a node sees that the folder is shared."""
    if resume is None:
        yield None
        return
    resume.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=resume.resolve(), prefix=".shared-") as file:
        yield Path(file.name)
