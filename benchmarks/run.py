"""Speed and memory of the engine, written to benchmarks/results.md: `make bench`."""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import (
    Row,
    bare,
    clients,
    coresets,
    matching,
    networks,
    seconds,
    section,
    spread,
    steps,
)
from stamp_core.client.runtime import RoundId
from stamp_core.core.paths import ROOT
from stamp_core.data.split import make_plan
from stamp_core.engine.executor import Executor, start_executor
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import Run
from stamp_core.engine.worker import peak_memory

REPEATS = 7


def small(batch_size: int = 16, tasks: int = 2) -> Experiment:
    """FedAvg on glyphs."""
    experiment = load_experiment("glyphs", "fedavg")
    setting = experiment.setting
    setting = replace(
        setting,
        split=replace(setting.split, clients=10, tasks=tasks),
        training=replace(setting.training, batch_size=batch_size, rounds=100),
    )
    return replace(experiment, setting=setting)


def started_runs(
    experiment: Experiment, workers: int = 1, seeds: int = 1
) -> tuple[list[Run], Executor]:
    """Runs after their first round, which is slower than the others."""
    dataset, split = experiment.dataset(), experiment.setting.split
    plans = {seed: make_plan(split, dataset, seed) for seed in range(seeds)}
    worker, executor = start_executor(experiment, plans, workers, "cpu")
    runs = [Run(experiment, plan, worker, executor, None) for plan in plans.values()]
    for run in runs:
        run.train_round(0, 0)
    return runs, executor


def middle_round(run: Run) -> None:
    """One round that is not the last of its experience."""
    run.train_round(0, 1)


def relative_to_bare(batch_size: int) -> Row:
    """The time of the engine's rounds by that of the bare loop's, in alternation."""
    (run,), _ = started_runs(small(batch_size))
    runtime = run.worker.runtime
    round_ids = [RoundId(0, client, 0, 1) for client in range(10)]
    data = [run.plan.train_indices(runtime.dataset, client, 0) for client in range(10)]
    arguments = runtime, runtime.network(0), round_ids, data
    bare.fedavg_round(*arguments)  # warm-up
    ratios, times = [], []
    for _ in range(REPEATS):
        reference = seconds(bare.fedavg_round, *arguments)
        times.append(seconds(middle_round, run))
        ratios.append(times[-1] / reference)
    images = sum(map(len, data)) * run.training.epochs / statistics.median(times)
    return f"engine / bare loop, batch {batch_size}", f"{spread(ratios)}  ({images:,.0f} images/s)"


def two_workers(seeds: int) -> Row:
    """The time of rounds with one worker by that with two, in alternation."""
    one, _ = started_runs(small(), 1, seeds)
    two, pool = started_runs(small(), 2, seeds)
    threads = ThreadPoolExecutor(seeds)
    ratios = []
    for _ in range(REPEATS):
        alone = seconds(lambda: [middle_round(run) for run in one])
        ratios.append(alone / seconds(lambda: list(threads.map(middle_round, two))))
    pool.close()
    return f"one worker / two workers, {seeds} seed{'s' * (seeds > 1)}", spread(ratios)


def growth() -> Iterator[Row]:
    """Time and memory of a round as the setting grows; each in a process of its own."""
    for name, experiment in {"2 tasks": "small()", "10 tasks": "small(tasks=10)"}.items():
        code = f"from benchmarks.run import *; print_cost({experiment})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
        )
        yield name, done.stdout.strip() or done.stderr[-300:]


def print_cost(experiment: Experiment) -> None:
    """Print the cost of a round in this fresh process."""
    (run,), _ = started_runs(experiment)
    times = [seconds(middle_round, run) for _ in range(3)]
    each = 1000 * statistics.median(times) / len(run.plan.clients)
    parameters, memory = len(run.worker.runtime.model.parameters), peak_memory() / 1e6
    print(f"{each:.1f} ms a client and round, {parameters:,} parameters, peak {memory:.0f} MB")


def no_op() -> Row:
    """The time of a `dvc repro` that has nothing to do, which is not known where it has."""
    dry = subprocess.run(["dvc", "repro", "--dry"], cwd=ROOT, capture_output=True, text=True)
    if "Running stage" in dry.stdout:
        return "dvc repro again", "not measured: results are out of date"
    start = time.perf_counter()
    subprocess.run(["dvc", "repro"], cwd=ROOT, capture_output=True, check=True)
    return "dvc repro again", f"{time.perf_counter() - start:.1f} s (nothing to do)"


def transfers(*methods: str) -> list[str]:
    """The section of benchmarks/transfers.py on all or some methods, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.transfers", *methods]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    table = done.stdout.partition("\n## ")[2]
    return ["", *f"## {table}".splitlines()] if table else done.stderr[-300:].splitlines()


def measurements() -> Iterator[Row]:
    """All rows of the first table."""
    yield from (relative_to_bare(16), relative_to_bare(64), two_workers(1), two_workers(3))
    yield from growth()
    yield no_op()


def main() -> None:
    """Measure everything and write the page."""
    from benchmarks import methods  # reads records, with all that makes pages

    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread"
    note = f"Measured on {machine} a process. A ratio is the median over paired repeats in one run."
    lines = section("# Speed and memory", note, measurements())[1:]
    for module in (coresets, matching, steps, networks, clients):
        lines += module.table()
    lines += transfers()
    methods.write_seconds()
    Path(ROOT / "benchmarks" / "results.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
