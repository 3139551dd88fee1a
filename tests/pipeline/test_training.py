"""Trainings of a grid: what is missing, several at a time; none takes another one with it."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import small
from processes import wait_until
from torch import Tensor

from stamp_core.data.plan import Plan
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.methods.base.method import Method
from workbench.workflow import grid, training
from workbench.workflow.training import Job, TrainingError, train_grid, train_missing


class Broken(Method):
    """It fails, or takes its process with it, or waits, while there is a file of this name."""

    def train_indices(self, plan: Plan, client: int, task: int) -> Tensor:
        folder = Path(os.environ["STAMP_BROKEN"])
        if (folder / "broken").exists():
            raise RuntimeError("broken on purpose")
        if (folder / "killed").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        while (folder / "held").exists():
            time.sleep(0.02)
        return super().train_indices(plan, client, task)


@pytest.fixture
def jobs(tmp_path, params, monkeypatch):
    """FedAvg, replay, and a method that breaks, in a project whose folders processes share."""
    monkeypatch.setenv("STAMP_BROKEN", str(tmp_path))
    monkeypatch.setenv("STAMP_PROGRESS", "lines")
    tiny = load_experiment("tiny", "fedavg", params)
    broken = Experiment(tiny.setting, "broken", Broken, tiny.params)
    experiments = (tiny, broken, load_experiment("tiny", "kept", params))
    return [Job(each, "0to1", "default") for each in experiments]


@pytest.fixture
def here(monkeypatch):
    """Processes that begin as copies of this one: with the folders of the test's project."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(training.multiprocessing, "get_context", lambda _: fork)


def test_several_processes_give_the_records_of_this_one(jobs, here, tmp_path):
    serial, none = train_missing(jobs, workers=1)
    assert not none and list(serial) == [job.name for job in jobs]
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    parallel, _ = train_missing(jobs, workers=2)
    for name, records in parallel.items():
        for mine, theirs in zip(records, serial[name], strict=True):
            small.assert_same(mine, theirs)


@pytest.mark.parametrize("workers", [1, 2])
def test_one_that_fails_is_named_and_alone_trained_again(jobs, here, tmp_path, workers, capfd):
    (tmp_path / "broken").touch()
    found, failures = train_missing(jobs, workers)
    assert list(found) == ["tiny-fedavg-0to1", "tiny-kept-0to1"]
    assert failures["tiny-broken-0to1"][:2] == ("RuntimeError", "broken on purpose")
    assert "train_indices" in capfd.readouterr().out  # where it has failed
    with pytest.raises(TrainingError) as error:
        training.require_trained(found, failures)
    assert str(error.value) == (
        "1 of 3 experiments failed, the records of the others are kept: "
        "tiny-broken-0to1 (RuntimeError: broken on purpose)"
    )
    (tmp_path / "broken").unlink()
    again, failures = train_missing(jobs, workers)
    assert len(again) == 3 and not failures
    assert "1 experiments to train, 2 have current records" in capfd.readouterr().out


def test_one_whose_code_changes_meanwhile_is_named(jobs, monkeypatch):
    """Its new records are outdated: they show what the code was when it began."""
    monkeypatch.setattr(Job, "records", lambda job: [1] if job is jobs[2] else [])
    monkeypatch.setattr(training, "_accuracy", str)
    found, failures = train_missing(jobs)
    assert list(found) == [jobs[2].name]
    assert {each.message for each in failures.values()} == {training.OUTDATED.message}


def test_one_that_is_killed_leaves_the_others(jobs, here, tmp_path):
    (tmp_path / "killed").touch()
    found, failures = train_missing(jobs, workers=2)
    assert len(found) == 2
    assert "ended with status -9" in failures["tiny-broken-0to1"].message


def test_a_second_training_waits_for_the_first_and_trains_nothing(jobs, here, tmp_path, trained):
    (tmp_path / "held").touch()
    broken = jobs[1:2]
    first = threading.Thread(target=train_missing, args=(2 * broken[:1] + jobs[:1], 2))
    first.start()
    lock = tmp_path / "resume" / ".default-tiny-broken-0to1.lock"
    wait_until(lock.exists, "the first training")
    second = threading.Thread(target=train_missing, args=(broken, 1))
    second.start()
    time.sleep(0.2)
    assert second.is_alive()
    (tmp_path / "held").unlink()
    first.join()
    second.join()
    assert trained == [] and broken[0].records()


def test_an_interrupt_ends_what_trains(jobs, here, tmp_path):
    (tmp_path / "held").touch()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        train_missing(jobs, workers=2)
    wait_until(lambda: not multiprocessing.active_children(), "the end of the processes")


def test_the_longest_first_and_unknown_ones_before_them(jobs, trained, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/seconds.json").write_text('{"glyphs": {"fedavg": 2, "kept": 5}}')
    train_missing(jobs)
    assert trained == ["tiny-broken", "tiny-kept", "tiny-fedavg"]


def test_a_page_is_trained_as_its_grid_says(params, trained):
    found = train_grid("grid.tiny", "default")
    assert list(found) == [f"tiny-{name}-0" for name in ("fedavg", "near", "sam", "keep_all")]
    assert list(train_grid("grid.tiny", "default")) == list(found) and len(trained) == 4
    params["methods"]["near"]["spatial"]["kappa"] = 0.75  # `sam` extends it
    trained.clear()
    train_grid("grid.tiny", "default")
    assert sorted(trained) == ["tiny-near", "tiny-sam"]
    assert grid.grid_seeds("tiny", "default") == ["0"]
