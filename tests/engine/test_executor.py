"""The number of processes changes no bit, and whoever is killed leaves nothing hanging."""

import concurrent.futures
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from processes import PATIENCE
from small import BATCH_NORM, ROUNDS, plans, run, saved, tiny, whole

from stamp_core.client.batches import StepContext
from stamp_core.core.paths import ROOT
from stamp_core.data.plan import Plan
from stamp_core.engine import executor, worker
from stamp_core.engine import train as engine
from stamp_core.engine.executor import ProcessExecutor
from stamp_core.engine.trees import read_tree
from stamp_core.methods.base.method import ClientRound, InitialStates, Method
from stamp_core.results.records import tree_bytes

FEW = {"images_per_class": 20}
ALL = {"angles": True, "displacements": True, "features": 2}
RANDOM = {"participation": 0.75, "shift": 1, "buffers": "local"}
FALLING = {"schedule": "exponential", "lr_end": 0.01, "rounds": 3}
REPLAY = tiny("replay", training={"participation": 0.75})


@pytest.mark.parametrize(
    ("experiment", "several"),
    [
        (tiny("fedavg", network=BATCH_NORM, split=FEW, training=RANDOM), 2),
        (REPLAY, 3),
        (whole("stamp", split=FEW, diagnostics=ALL), 2),
        (tiny("fedavg_tuned", split={**FEW, "joining": 1}, training=FALLING), 2),
    ],
    ids=["fedavg", "replay", "stamp", "fine-tuning at a falling rate"],
)
def test_the_number_of_workers_changes_no_bit(experiment, several):
    """Nor does it matter whether two seeds are trained one by one, in turn, or side by side."""
    plans_ = plans(experiment, 0, 1)
    alone = {seed: run(experiment, plan) for seed, plan in plans_.items()}
    for workers in (1, several):
        together = engine.train(experiment, plans_, workers, "cpu")
        assert list(together) == [0, 1]
        for seed, record in together.items():
            small.assert_same(record, alone[seed])
            for name, values in alone[seed].features.items():
                np.testing.assert_array_equal(record.features[name], values)


def test_trees_come_through_to_another_process_unchanged():
    """Parts of a tensor travel without the rest of it; all types, also empty and without axes."""
    tree = {
        "part": torch.arange(10_000.0)[10:20],
        "crossed": torch.arange(6).reshape(2, 3).T,
        "none": torch.empty(0, 3, dtype=torch.uint8),
        "one": torch.tensor(True),
        "rest": ["text", 1, 0.5, None, torch.tensor(float("nan"), dtype=torch.float64)],
    }
    packed = executor.dumps(tree)
    assert len(packed) < 2000
    back = executor.pickle.loads(packed)
    small.assert_equal_trees(back, tree)
    back["part"] += 1  # a client may write into what it got


def test_a_killed_worker_ends_the_run_with_a_reason(tmp_path, monkeypatch):
    """As the kernel would when memory runs out; the finished rounds are kept."""
    experiment, map_, once = REPLAY, ProcessExecutor.map, threading.Lock()

    def deadly(self: ProcessExecutor, work: Any, each: Any) -> list[Any]:
        files = tmp_path.glob("*/run.safetensors")
        both_began = [read_tree(file)[0]["next"] > 0 for file in files] == [True, True]
        if both_began and once.acquire(blocking=False):
            self.pool.submit(signal.raise_signal, signal.SIGKILL)
        return map_(self, work, each)

    def train() -> None:
        try:
            engine.train(experiment, plans(experiment, 0, 1), 2, "cpu", tmp_path)
        except RuntimeError as error:
            errors.append(error)

    errors = list[RuntimeError]()
    monkeypatch.setattr(ProcessExecutor, "map", deadly)
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the training hangs"
    assert "a worker process ended" in str(errors[0]) and "STAMP_WORKERS=1" in str(errors[0])
    kept = [saved(experiment, tmp_path, seed)["next"] for seed in (0, 1)]
    assert min(kept) > 0 and kept != [ROUNDS, ROUNDS]
    again = engine.train(experiment, plans(experiment, 0, 1), 2, "cpu", tmp_path)
    for seed, record in again.items():
        small.assert_same(record, run(experiment, small.plan(experiment, seed)))


class Greedy(Method):
    def train(self, client_round: ClientRound, context: StepContext) -> list[torch.Tensor]:
        if client_round.experience:
            torch.empty(10**15)
        return super().train(client_round, context)


class GreedyAtOnce(Method):
    def initial_states(self, plan: Plan) -> InitialStates:
        torch.empty(10**15)
        return super().initial_states(plan)


class Mistaken(Method):
    def train(self, client_round: ClientRound, context: StepContext) -> list[torch.Tensor]:
        return [torch.ones(2) @ torch.ones(3)]


class Elsewhere(small.Quick):
    def files(self) -> list[Path]:
        return [Path(__file__)]


def with_method(kind: type[Method]) -> Elsewhere:
    experiment = tiny(network=BATCH_NORM, split={"clients": 2, **FEW})
    return Elsewhere(experiment.setting, "fedavg", kind, experiment.params)


ENOUGH = (
    "params/settings.yaml: tiny: there is not enough memory for a batch of 16: take a smaller "
    "network or smaller images, or fewer workers (STAMP_WORKERS=1); finished rounds are kept"
)


@pytest.mark.parametrize(
    ("kind", "workers", "rounds"), [(Greedy, 1, 2), (Greedy, 2, 2), (GreedyAtOnce, 1, None)]
)
def test_an_error_for_lack_of_memory_says_what_to_lower(kind, workers, rounds, tmp_path):
    """In this process and through one from another; what came before it is on disk."""
    experiment = with_method(kind)
    with pytest.raises(MemoryError) as error:
        engine.train(experiment, plans(experiment, 0), workers, "cpu", tmp_path)
    assert str(error.value) == ENOUGH
    assert "can't allocate memory" in str(error.value.__cause__)
    assert rounds is None or saved(experiment, tmp_path)["next"] == rounds


@pytest.mark.parametrize("workers", [1, 2])
def test_other_errors_come_through_as_they_are(workers):
    experiment = with_method(Mistaken)
    with pytest.raises(RuntimeError, match="inconsistent tensor size") as error:
        engine.train(experiment, plans(experiment, 0), workers, "cpu")
    assert type(error.value) is RuntimeError


UNGUARDED = """
from stamp_core import load_experiment, train

experiment = load_experiment("tiny", "fedavg")
train(experiment, experiment.plans("0"), workers=2)
"""


def test_a_script_whose_workers_would_run_it_again_is_told_of_its_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 1
    assert "In a script, call train under `if __name__ == '__main__':`" in done.stderr


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "reset")])
def test_a_killed_fork_server_is_named_as_a_killed_worker_is(error, monkeypatch):
    """It ends while it starts a worker: the pool passes on what the connection to it says."""

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(concurrent.futures.ProcessPoolExecutor, "submit", broken)
    with pytest.raises(RuntimeError, match="a worker process ended"):
        engine.train(REPLAY, plans(REPLAY, 0), 2, "cpu")


def test_workers_keep_states_on_disk_and_pass_on_where_they_are(tmp_path, monkeypatch):
    """The same results as in memory; a client's own model does not cross to its process."""
    experiment, dumps = whole("local"), executor.dumps
    records, carried = {}, dict[Path | None, int]()
    for resume in (None, tmp_path):
        carried[resume] = 0

        def measured(item: object, resume: Path | None = resume) -> bytes:
            packed = dumps(item)
            if isinstance(item, tuple) and item[0] is worker.Worker.train_client:
                own = len(packed) - tree_bytes(item[1][2])  # the message
                carried[resume] = max(carried[resume], own)
            return packed

        monkeypatch.setattr(executor, "dumps", measured)
        records[resume] = engine.train(experiment, plans(experiment, 0), 2, "cpu", resume)[0]
    assert carried[tmp_path] < 2000 < carried[None]
    small.assert_same(records[None], records[tmp_path])


SMALL = "from stamp_core.engine.worker import peak_memory; print(peak_memory())"


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="only Linux passes a peak on to a child"
)
def test_the_peak_of_memory_is_that_of_the_process_itself():
    """A new process is small, be it started by one that holds 800 MB."""
    held = torch.ones(200_000_000)
    command = [sys.executable, "-c", SMALL]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    assert 50e6 < int(done.stdout) < held.nbytes < worker.peak_memory()
