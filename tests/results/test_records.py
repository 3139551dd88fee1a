"""What a record says of itself."""

import os
import time

import numpy as np
import small

from stamp_core import load_record, save_records
from stamp_core.engine import worker
from stamp_core.results.records import MEASURED, Record, history_total
from workbench.report import metrics


def made(personal: bool = False, **about: object) -> Record:
    """Two clients, one of which has twice as many test images, and two tasks."""
    a = np.array([[[0.9, 0.0], [0.6, 0.3]], [[0.3, 0.6], [0.6, 0.9]]])  # [E, U, T]
    tests = np.array([[20, 20], [10, 10]])
    nothing = np.full((4, 2, 2, 2), np.nan)
    scores = np.stack([a] * 4)
    scores = {"global": nothing if personal else scores, "personal": scores}
    whole = {"setting": {"name": "digits"}, "method": {"name": "stamp"}, "seed": 3, **about}
    return Record(whole, [{"loss": 0.5}] * 1000, scores, tests, {"w": np.zeros(10**5)})


def test_accuracy_and_forgetting_of_each_task():
    """Clients count by their test images; the last task cannot be forgotten yet."""
    record = made()
    np.testing.assert_allclose(record.task_accuracies(), [[0.8, 0.1], [0.4, 0.7]])
    np.testing.assert_allclose(record.forgetting(), [0.4])
    assert np.isnan(made(personal=True).forgetting()).all()
    np.testing.assert_allclose(made(personal=True).forgetting("personal"), [0.4])


def test_the_mean_over_tasks_is_the_forgetting_of_the_tables(tmp_path):
    experiment = small.tiny(split={"cycles": 2})
    record = small.run(experiment)
    save_records({0: record}, tmp_path)
    back = load_record(tmp_path / "0")
    whole = metrics.run_metrics(record.accuracy(), record.tests)
    assert back.forgetting().mean() == whole["forgetting"]
    assert back.forgetting().shape == (2,) and back.task_accuracies().shape == (6, 3)


def test_a_record_is_the_same_bytes_on_machines_of_other_speed_and_size(tmp_path, monkeypatch):
    """Only measured.json differs; a copy without it has the numbers, and no seconds."""
    experiment = small.tiny("stamp")
    save_records({0: small.run(experiment)}, tmp_path / "one")
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: 7 * clock())
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(worker, "peak_memory", lambda: 10**12)
    save_records({0: small.run(experiment)}, tmp_path / "other")
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "0").iterdir()}
        for name in ("one", "other")
    )
    assert [name for name in one if one[name] != other[name]] == [MEASURED]
    measured = load_record(tmp_path / "other" / "0")
    assert measured.environment["cores"] == 64
    (tmp_path / "one" / "0" / MEASURED).unlink()
    copied = load_record(tmp_path / "one" / "0")
    assert not copied.environment and np.isnan(history_total(copied.history, "seconds", "clients"))
    small.assert_same(copied, measured)
