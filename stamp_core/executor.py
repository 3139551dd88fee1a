"""Where clients run: in this process or in worker processes of one thread each; same results."""

import concurrent.futures
import io
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stamp_core import diagnostics
from stamp_core.config import Setting, wrong
from stamp_core.experiments import Experiment
from stamp_core.methods import Beginning, Message, Method, Reply, State, Turn
from stamp_core.split import Plan
from stamp_core.workspace import Visit, Workspace

LACKING = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")  # in errors of torch


@dataclass(frozen=True)
class Answer:
    """A client's reply with what its visit cost and, after a last round, how its model does."""

    reply: Reply
    scores: Tensor | None  # [scorings, 1, T] of the model as local training left it
    angles: dict[str, float]  # between the gradients of the client's tasks, if looked at
    seconds: float
    memory: int  # bytes, the most this process held so far
    gpu: int  # bytes, the most the visit held on the GPU


class Worker:
    """One process's workspace with the method and the plans of every seed; keeps nothing else."""

    def __init__(self, experiment: Experiment, plans: Mapping[int, Plan], device: str) -> None:
        self.work = Workspace(experiment.setting, experiment.images(), device)
        self.method = experiment.kind(experiment.params, self.work)
        self.plans = plans
        self.lock = threading.Lock()

    def begin(self, seed: int) -> Beginning:
        """The first states of the server and of every client."""
        return self.method.begin(self.plans[seed])

    def attend(self, visit: Visit, state: State, message: Message) -> Answer:
        """A client's visit, and the score of its local model after a last round."""
        if self.work.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.work.device)
        start = time.perf_counter()
        reply = self.method.local(Turn(visit, self.plans[visit.seed], state, message))
        seconds = time.perf_counter() - start
        gpu = torch.cuda.max_memory_allocated() if self.work.device.type == "cuda" else 0
        scores, angles = self.look(visit) if visit.last else (None, {})
        return Answer(reply, scores, angles, seconds, peak_memory(), gpu)

    def look(self, visit: Visit) -> tuple[Tensor | None, dict[str, float]]:
        """Scores and angles of the model as a visit has left it, where the method has such."""
        plan, models = self.plans[visit.seed], self.method.models
        observe = self.work.setting.observe
        scores = self.work.score(plan, [visit.client], visit.step) if "local" in models else None
        if not observe.angles or models == ("global",):  # one learner for all: nobody's tasks
            return scores, {}
        return scores, diagnostics.temporal(self.work, plan, visit, observe.displacements)

    def judge(self, seed: int, step: int, message: Message) -> Tensor:
        """Scores of the model in `message` for all clients.  # [scorings, U, T]"""
        self.work.model.load(message["parameters"], message["buffers"])
        return self.work.score(self.plans[seed], list(range(len(self.plans[seed].clients))), step)

    def describe(self, message: Message, pictures: Tensor) -> Tensor:
        """Features of some test pictures under the model in `message`.  # float16 [n, D]"""
        self.work.model.load(message["parameters"], message["buffers"])
        encode = self.work.classifier.encode
        return self.work.outputs(self.work.images.x_test[pictures], encode).half()

    def judge_client(self, visit: Visit, state: State, message: Message, personal: bool) -> Tensor:
        """Scores of a client's personal model, or of the global one with the client's buffers."""
        turn = Turn(visit, self.plans[visit.seed], state, message)
        if personal:
            self.method.receive_personal(turn)
        else:
            Method.receive(self.method, turn)
        return self.work.score(turn.plan, [visit.client], visit.step)  # [scorings, 1, T]

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """What the method `name` gives; an error for lack of memory says what to lower."""
        with enough_memory(self.work.setting):
            return getattr(self, name)(*arguments)


@contextmanager
def enough_memory(setting: Setting) -> Iterator[None]:
    """While it lasts, an error for lack of memory says what to lower."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise MemoryError(lower(setting)) from error


def lacks_memory(error: RuntimeError) -> bool:
    """Whether an error is torch's for lack of memory; on the CPU it has no class of its own."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(word in text for word in LACKING)


def lower(setting: Setting) -> str:
    """What to lower where memory is not enough."""
    network, batch = setting.network, setting.training.batch
    key, least = f"settings.{setting.name}.network.at_once", 2 if network.norm == "batch" else 1
    found = f"{key} is {network.at_once}; there is not enough memory for a batch of {batch}"
    now = min(network.at_once or batch, batch)
    advice = f"lower it, to {max(least, now // 2)}, and fewer pictures pass the network at a time"
    if now <= least:
        advice = "take a smaller network or smaller pictures, or fewer workers (STAMP_WORKERS=1)"
    return f"{found}: {advice}; finished rounds are kept"


class Here:
    """Runs every call in this process, one after the other."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def call(self, name: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """What the worker's method `name` gives for each tuple of arguments, in order."""
        return [self.worker.call(name, each) for each in arguments]

    def close(self) -> None:
        """Nothing to end."""


class Processes:
    """Shares the calls out among worker processes; several threads may call at once."""

    def __init__(
        self, experiment: Experiment, plans: Mapping[int, Plan], device: str, workers: int
    ) -> None:
        # A fork server has imported torch once and no threads of its own: its children start at
        # once and cannot inherit a lock that somebody holds, as children of a notebook kernel may.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["stamp_core.executor"])
        self.pool = concurrent.futures.ProcessPoolExecutor(
            workers, context, initializer=_start, initargs=(_dumps((experiment, plans, device)),)
        )

    def call(self, name: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """What a worker's method `name` gives for each tuple of arguments, in order."""
        try:
            waiting = [self.pool.submit(_call, _dumps((name, each))) for each in arguments]
            return [pickle.loads(answer.result()) for answer in waiting]
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process ended. Most often memory was lacking: run with fewer workers "
                "(STAMP_WORKERS=1) or a smaller network.at_once; finished rounds are kept. In a "
                "script, call train under `if __name__ == '__main__':`, as workers import it"
            ) from None

    def close(self) -> None:
        """End the worker processes."""
        self.pool.shutdown(wait=True, cancel_futures=True)


Executor = Here | Processes


def start(
    experiment: Experiment, plans: Mapping[int, Plan], workers: int, device: str
) -> tuple[Worker, Executor]:
    """This process's own worker and where the clients run: beside it if `workers` is above 1."""
    torch.set_num_threads(1)  # sums are split by threads: their number would change last digits
    here = Worker(experiment, plans, device)
    if workers == 1:
        return here, Here(here)
    return here, Processes(experiment, plans, device, workers)


def resolve_workers(workers: int, device: str) -> int:
    """The number of worker processes: 0 stands for $STAMP_WORKERS or one per core (GPU: one)."""
    workers = workers or int(os.environ.get("STAMP_WORKERS", 0))
    if workers < 0:
        raise wrong("workers", workers, "at least 0")
    if workers or device == "cuda":
        return workers or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def resolve_device(device: str) -> str:
    """The device by name; "auto" is the GPU if there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def peak_memory() -> int:
    """Bytes of memory that this process has held at most.

    On Linux not by getrusage: a process that was started by a larger one inherits its peak there.
    """
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


class _Pickler(pickle.Pickler):
    """Tensors travel as plain arrays: torch's own way opens a file descriptor for each."""

    def reducer_override(self, item: Any) -> Any:
        """How a tensor is put into bytes; everything else as usual."""
        if isinstance(item, Tensor):
            return torch.from_numpy, (item.numpy(),)
        return NotImplemented


def _dumps(item: object) -> bytes:
    """`item` as bytes for another process."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(item)
    return buffer.getvalue()


_worker: Worker | None = None  # of this process, if it is a worker process


def _start(packed: bytes) -> None:
    """Make this process a worker that dies with its parent and leaves Ctrl-C to it."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    _worker = Worker(*pickle.loads(packed))


def _follow_parent() -> None:
    """End this process when the parent is gone; killed outright, it cannot say so itself."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _call(packed: bytes) -> bytes:
    """One call in a worker process."""
    assert _worker is not None
    name, arguments = pickle.loads(packed)
    return _dumps(_worker.call(name, arguments))
