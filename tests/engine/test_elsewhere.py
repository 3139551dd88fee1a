"""Runs whose clients' states are kept elsewhere, and where not every client round is finished."""

from pathlib import Path
from typing import Any

import small
from small import plans, whole

from stamp_core.engine import train as engine
from stamp_core.engine.executor import Executor, start_executor
from stamp_core.engine.trees import Store
from stamp_core.engine.worker import Worker


def elsewhere(folder: Path) -> engine.Start:

    def start(*options: Any) -> tuple[Worker, Executor]:
        worker, executor = start_executor(*options)
        worker.stores = {seed: Store(folder) for seed in worker.plans}
        return worker, executor

    return start


def test_a_client_round_that_is_not_finished_is_as_one_that_dropped_out(tmp_path, monkeypatch):
    experiment = whole("local")
    small.lose(monkeypatch, 1, [(2, 0), (2, 1)])
    found = engine.train(
        experiment, plans(experiment, 0), 1, "cpu", tmp_path / "run", elsewhere(tmp_path / "node")
    )
    small.assert_same(found[0], small.run(experiment))
    assert [row["completed"] for row in found[0].history] == [4, 4, 4, 4, 3, 3]


def test_a_checkpoint_names_states_that_it_does_not_hold(tmp_path, monkeypatch):
    """Killed in the third round and resumed; the states' own store is asked for all of them."""
    experiment, folder = whole("local"), tmp_path / "run"
    start = elsewhere(tmp_path / "node")
    expected = engine.train(experiment, plans(experiment, 0), 1, "cpu", None, start)[0]
    with small.stopped_after(3):
        engine.train(experiment, plans(experiment, 0), 1, "cpu", folder, start)
    held = list((folder / "tiny-local-0" / "states").iterdir())
    verify, asked = Store.verify, list[Path]()

    def verified(store: Store, digest: str) -> None:
        verify(store, digest)
        asked.append(store.path(digest))

    monkeypatch.setattr(Store, "verify", verified)
    found = engine.train(experiment, plans(experiment, 0), 1, "cpu", folder, start)[0]
    assert len(held) == 1  # the results
    assert len(asked) == 4 and {path.parent for path in asked} == {tmp_path / "node"}
    small.assert_same(found, expected)
