"""Processes that are killed: a small training, and its workers."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.faults import Kind, Outcome
from benchmarks.faults.project import Place


def kill_training(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """SIGKILL to a training, or to its worker: at any moment, or before an operation on a file."""
    method, shared, agent = draw.choice(["stamp", "replay"]), place.shared, place.agent
    agent.forget()
    workers = 2 if number % 10 == 9 else 1
    if number % 10 < 5 or workers == 2:
        moment = draw.uniform(0, shared.seconds[method])
        what = f"{'worker' if workers == 2 else 'training'}: {method}, after {moment:.2f} s"

        def strike(process: int) -> None:
            if workers == 2:
                _kill_worker(process, moment)
            else:
                time.sleep(moment)
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(process, signal.SIGKILL)

        broken = agent.call("train_small", during=strike, method=method, workers=workers)
    else:
        last = draw.randint(1, shared.operations[method])
        what = f"file operation: {method}, before number {last}"
        broken = agent.call("train_small", die_at=last, method=method)
    if workers == 2 and broken.error:  # the training has said that its worker ended
        said = broken.judged(f"{what}, message", None, "worker")
        if said.verdict != "refused":
            return [said]
    again = agent.call("train_small", method=method)
    files = [str(path) for path in Path(agent.root, "data").rglob("*")]
    return [again.judged(what, shared.small[method], *files)]


def _kill_worker(training: int, moment: float) -> None:
    """Kill a worker process of a training so many seconds after it was started."""
    end = time.monotonic() + 20
    with suppress(psutil.NoSuchProcess, IndexError):
        process = psutil.Process(training)
        workers: list[psutil.Process] = []
        while not workers and time.monotonic() < end:
            family = process.children(recursive=True)
            workers = [each for each in family if each.ppid() != training]  # of its fork server
            time.sleep(0.01)
        time.sleep(moment)
        workers[-1].kill()


KINDS = {
    "kill a training": Kind(
        "SIGKILL to a small training (half at a random moment, four in ten before a random "
        "operation on a file) or to its worker process (one in ten)",
        kill_training,
        80,
    )
}
