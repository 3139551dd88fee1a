"""Speed and memory of the engine, written to benchmarks/results.md: `make bench`."""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import bare, coresets, matching, networks, spread
from stamp_core import engine, split
from stamp_core.executor import Executor, peak_memory, start
from stamp_core.experiments import Experiment, experiment
from stamp_core.paths import ROOT
from stamp_core.workspace import Visit

Row = tuple[str, str]
REPEATS = 7


def small(batch: int = 16, clients: int = 10, tasks: int = 2, width: int = 1) -> Experiment:
    """FedAvg on glyphs with a small convolutional network."""
    cell = experiment("glyphs", "fedavg")
    chosen = replace(
        cell.setting,
        split=replace(cell.setting.split, clients=clients, tasks=tasks),
        training=replace(cell.setting.training, batch=batch, rounds=100),
        network=replace(cell.setting.network, channels=(16 * width, 32 * width)),
    )
    return replace(cell, setting=chosen)


def prepared(
    cell: Experiment, workers: int = 1, seeds: int = 1
) -> tuple[list[engine.Run], Executor]:
    """Runs that have done one round already, so that nothing is first."""
    images = cell.images()
    plans = {seed: split.make(cell.setting.split, images, seed) for seed in range(seeds)}
    here, executor = start(cell, plans, workers, "cpu")
    runs = [engine.Run(cell, plan, here, executor, None) for plan in plans.values()]
    for run in runs:
        run.advance(0, 0)
    return runs, executor


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def against_bare(batch: int) -> Row:
    """Rounds of the engine and of the bare loop in turn: the median ratio of their times."""
    (run,), _ = prepared(small(batch))
    work = run.here.work
    visits = [Visit(0, client, 0, 1) for client in range(10)]
    data = [run.plan.train_indices(work.images, client, 0) for client in range(10)]
    module = work.network(0)
    bare.round_(work, module, visits, data)  # its first time
    ratios, ours = [], []
    for _ in range(REPEATS):
        plain = seconds(lambda: bare.round_(work, module, visits, data))
        ours.append(seconds(lambda: advance(run)))
        ratios.append(ours[-1] / plain)
    pictures = sum(map(len, data)) * run.training.epochs
    rate = pictures / statistics.median(ours)
    return f"engine / bare loop, batch {batch}", f"{spread(ratios)}  ({rate:,.0f} pictures/s)"


def two_workers(seeds: int) -> Row:
    """The same rounds with one worker and with two, in turn: the median ratio of their times."""
    one, _ = prepared(small(), 1, seeds)
    two, pool = prepared(small(), 2, seeds)
    threads = ThreadPoolExecutor(seeds)
    ratios = []
    for _ in range(REPEATS):
        alone = seconds(lambda: [advance(run) for run in one])
        ratios.append(alone / seconds(lambda: list(threads.map(advance, two))))
    pool.close()
    return f"one worker / two workers, {seeds} seed{'s' * (seeds > 1)}", spread(ratios)


def growth() -> Iterator[Row]:
    """Seconds and memory of a round as the setting grows; each in a process of its own."""
    for name, cell in {
        "10 clients, 2 tasks": "small()",
        "40 clients": "small(clients=40)",
        "160 clients": "small(clients=160)",
        "10 tasks": "small(tasks=10)",
        "4 x the channels": "small(width=4)",
    }.items():
        code = f"from benchmarks.run import *; report({cell})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
        )
        yield name, done.stdout.strip() or done.stderr[-300:]


def advance(run: engine.Run) -> None:
    """One round, not the last of its step."""
    run.advance(0, 1)


def report(cell: Experiment) -> None:
    """Print what one round of `cell` costs in this fresh process."""
    (run,), _ = prepared(cell)
    times = [seconds(lambda: advance(run)) for _ in range(3)]
    each = 1000 * statistics.median(times) / len(run.plan.clients)
    parameters = len(run.here.work.model.parameters)
    memory = peak_memory() / 1e6
    print(f"{each:.1f} ms a client and round, {parameters:,} parameters, peak {memory:.0f} MB")


def no_op() -> Row:
    """Seconds of a `dvc repro` that has nothing to do."""
    took = seconds(lambda: subprocess.run(["dvc", "repro"], cwd=ROOT, capture_output=True))
    status = subprocess.run(["dvc", "status"], cwd=ROOT, capture_output=True, text=True).stdout
    state = "nothing to do" if "up to date" in status else "results were out of date"
    return "dvc repro again", f"{took:.1f} s ({state})"


def main() -> None:
    """Measure everything and write the table."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread"
    rows = [against_bare(16), against_bare(64), two_workers(1), two_workers(3), *growth(), no_op()]
    lines = [
        "# Speed and memory",
        "",
        f"Measured on {machine} a process. A ratio is the median over paired repeats in one run.",
        "",
        "| what | result |",
        "|---|---|",
        *(f"| {what} | {result} |" for what, result in rows),
        *coresets.table(),
        *matching.table(),
        *networks.table(),
    ]
    Path(ROOT / "benchmarks" / "results.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[6:]))


if __name__ == "__main__":
    main()
