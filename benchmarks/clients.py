"""A round of ten participants by the number of clients: its time, its memory, its checkpoint."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import Row, seconds, section, spread
from stamp_core.core.paths import ROOT
from stamp_core.data.split import make_plan
from stamp_core.engine.executor import start_executor
from stamp_core.engine.experiment import load_experiment
from stamp_core.engine.train import Run
from stamp_core.engine.worker import peak_memory

REFERENCE = 100  # clients
COUNTS = (10, REFERENCE, 1_000, 10_000)
PARTICIPANTS = 10
ROUNDS = 30


def started(method: str, clients: int, resume: Path) -> Run:
    """A run on digits after its first round, which is slower than the others."""
    experiment = load_experiment("digits", method)
    setting = experiment.setting
    training = replace(setting.training, participation=PARTICIPANTS / clients, rounds=2 * ROUNDS)
    setting = replace(
        setting, split=replace(setting.split, clients=clients, tasks=2), training=training
    )
    experiment = replace(experiment, setting=setting)
    plans = {0: make_plan(setting.split, experiment.dataset(), seed=0)}
    worker, executor = start_executor(experiment, plans, 1, "cpu", resume)
    run = Run(experiment, plans[0], worker, executor, resume)
    run.train_round(0, 0)
    return run


def in_alternation(method: str, folder: Path) -> dict[int, tuple[list[float], list[float], float]]:
    """For each number of clients: seconds of rounds, of saving, and MB of the checkpoint."""
    runs = {clients: started(method, clients, folder / str(clients)) for clients in COUNTS}
    rounds: dict[int, list[float]] = {clients: [] for clients in COUNTS}
    savings: dict[int, list[float]] = {clients: [] for clients in COUNTS}
    for round_ in range(1, ROUNDS + 1):
        for clients, run in runs.items():
            rounds[clients].append(seconds(run.train_round, 0, round_))
            savings[clients].append(run.saving)
    sizes = {
        clients: sum(f.stat().st_size for f in (folder / str(clients)).rglob("*") if f.is_file())
        for clients in COUNTS
    }
    return {each: (rounds[each], savings[each], sizes[each] / 1e6) for each in COUNTS}


def memory(method: str, clients: int) -> float:
    """The peak memory in MB of a process that trains five rounds."""
    command = [sys.executable, "-m", "benchmarks.clients", method, str(clients)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def print_memory(method: str, clients: int) -> None:
    """Print the peak memory of this fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        run = started(method, clients, Path(folder))
        for round_ in range(1, 5):
            run.train_round(0, round_)
    print(peak_memory() / 1e6)


def measurements() -> Iterator[Row]:
    """A row for each method and number of clients."""
    for method in ("fedavg", "replay"):
        with tempfile.TemporaryDirectory() as folder:
            measured = in_alternation(method, Path(folder))
        reference = measured[REFERENCE][0]
        for clients, (rounds, savings, size) in measured.items():
            ratios = [a / b for a, b in zip(rounds, reference, strict=True)]
            saving = 1000 * sorted(savings)[ROUNDS // 2]
            text = f"{spread(ratios)}; peak {memory(method, clients):.0f} MB; "
            text += f"checkpoint {size:.1f} MB, {saving:.1f} ms a round"
            yield f"{method}, {clients:,} clients", text


def table() -> list[str]:
    """The section of benchmarks/results.md."""
    torch.set_num_threads(1)
    note = (
        f"Rounds of {PARTICIPANTS} participants on digits, each saved: their time by that with "
        f"{REFERENCE} clients, in alternation."
    )
    return section("## Many clients", note, measurements())


if __name__ == "__main__":
    if sys.argv[1:]:
        print_memory(sys.argv[1], int(sys.argv[2]))
    else:
        print("\n".join(table()))
