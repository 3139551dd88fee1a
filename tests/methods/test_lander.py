"""LANDER's anchors: from a file, sent once, kept exactly. Training is in `test_data_free.py`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from small import plan, tiny, whole

from stamp_core.config.decode import ParameterError
from stamp_core.core import paths
from stamp_core.methods.base.method import Log


def test_anchors_are_sent_until_a_client_has_replied_and_kept_exactly():
    """In float16 on the way and in the state; random ones are as far apart as the published."""
    experiment = tiny("lander")
    worker = small.worker(experiment, plan(experiment))
    server, states, *_ = worker.initial_states(0)
    anchors = server["anchors"]
    assert anchors.shape == (10, 512) and anchors.dtype == torch.float16
    squares = torch.cdist(anchors.float(), anchors.float()).square() / 512
    assert abs(float(squares.sum()) / 90 - 0.081) < 0.01
    message = worker.method.broadcast(server, 0)
    reply = worker.train_client(small.RoundId(0, 0, 0, 0), states[0], message).reply
    assert torch.equal(reply.state["anchors"], anchors)
    after = worker.method.aggregate(server, [reply], Log())
    assert "anchors" not in worker.method.broadcast(after, 0)
    assert "anchors" in worker.method.broadcast(after, 1)
    later = small.RoundId(0, 0, 0, 1)
    again = worker.train_client(later, reply.state, worker.method.broadcast(after, 0)).reply
    assert torch.equal(again.state["anchors"], anchors)


def file_of(folder: Path, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RAW", folder)
    np.save(folder / "table.npy", rows)


def test_anchors_are_the_rows_of_a_file(tmp_path, monkeypatch):
    """The first ten of twelve rows for ten classes, and the map is as wide as they are."""
    rows = np.arange(60, dtype=np.float64).reshape(12, 5) / 100
    file_of(tmp_path, rows, monkeypatch)
    experiment = whole("lander", anchors="table.npy")
    server = small.worker(experiment, plan(experiment)).initial_states(0)[0]
    assert torch.equal(server["anchors"], torch.from_numpy(rows[:10]).half())
    assert server["map"].shape == (32 * 5 + 5,)
    assert all(np.isfinite(v).all() for v in small.run(experiment).weights.values())


def test_other_anchors_are_another_experiment(tmp_path, monkeypatch):
    """The same name with other numbers: records of the first do not stand for the second."""
    experiment = whole("lander", anchors="table.npy")
    found = []
    for rows in (np.zeros((10, 2)), np.ones((10, 2))):
        file_of(tmp_path, rows, monkeypatch)
        found.append(experiment.identity(plan(experiment), "cpu"))
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"anchors"}
    assert "anchors" not in whole("lander").identity(plan(experiment), "cpu")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "a .npy file of numbers: .*table.npy is not one"),
        (np.zeros((9, 5)), "a table with a row per class: .*table.npy has 9 rows for 10 classes"),
        (np.zeros(10), r"a table of numbers, a row per class: .* is float64 \[10\]"),
        (np.full((10, 2), 1e9), "a table of finite numbers in float16"),
        (np.array([{}]), "a .npy file of numbers: .*table.npy is not one"),
    ],
)
def test_files_without_anchors_are_refused(rows, message, tmp_path, monkeypatch):
    file_of(tmp_path, rows, monkeypatch)
    if rows is None:
        (tmp_path / "table.npy").write_bytes(b"")
    with pytest.raises(ParameterError, match=f"anchors is 'table.npy'; it must be {message}"):
        small.worker(tiny("lander", anchors="table.npy"))
