"""Clients on a Ray cluster of two nodes on this machine: the results of one process."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import small
from processes import wait_until
from small import plans, whole

from stamp_core.engine import train as engine
from stamp_core.engine.executor import resolve_workers
from stamp_core.engine.trees import read_tree
from stamp_core.methods.base.method import DivergedError
from workbench.workflow import ray_executor

SEEDS = (0, 1)


@pytest.fixture(autouse=True)
def on_the_cluster(cluster, monkeypatch):
    monkeypatch.setenv("STAMP_EXECUTOR", "ray")


def unbroken(experiment: Any) -> dict[int, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STAMP_EXECUTOR")
        return engine.train(experiment, plans(experiment, *SEEDS), 1, "cpu")


@pytest.mark.parametrize("kind", ["fedavg", "stamp", "fedas", "fedl2p"])
def test_a_cluster_has_the_results_of_one_process_also_after_a_stop(kind, tmp_path):
    experiment = whole(kind)
    seeds = plans(experiment, *SEEDS)
    found = [engine.train(experiment, seeds, 1, "cpu")]
    with small.stopped_after(3):
        engine.train(experiment, seeds, 1, "cpu", tmp_path)
    found.append(engine.train(experiment, seeds, 1, "cpu", tmp_path))
    for seed, expected in unbroken(experiment).items():
        for records in found:
            small.assert_same(records[seed], expected)


def test_a_node_with_other_code_or_another_folder_is_refused(tmp_path, monkeypatch):
    experiment = whole("fedavg")
    with monkeypatch.context() as patch:
        patch.setattr(ray_executor, "_token", lambda resume: nullcontext(resume / "elsewhere"))
        with pytest.raises(RuntimeError, match=r"does not see .*: the folder must be shared"):
            engine.train(experiment, plans(experiment, 0), 1, "cpu", tmp_path)
    monkeypatch.setattr(type(experiment), "code", lambda self: "edited")
    with pytest.raises(RuntimeError, match="has other code of stamp_core"):
        engine.train(experiment, plans(experiment, 0), 1, "cpu")


def test_an_error_on_a_node_comes_through_as_it_is():
    experiment = small.tiny(training={"lr": 1e38})
    with pytest.raises(DivergedError, match="the weights are no longer finite"):
        engine.train(experiment, plans(experiment, 0), 1, "cpu")


def test_more_workers_than_the_cluster_has_room_for_are_refused(monkeypatch):
    monkeypatch.setenv("STAMP_WORKERS", "3")
    with pytest.raises(RuntimeError, match="STAMP_WORKERS is 3; the Ray cluster has room for 2"):
        engine.train(whole("fedavg"), plans(whole("fedavg"), 0), resolve_workers(0, "cpu"), "cpu")


def test_a_node_that_dies_costs_the_calls_that_it_ran(cluster, tmp_path):
    """After the fifth of 60 rounds; the last test, as one node is left."""
    experiment = small.long()
    file = tmp_path / "tiny-replay-0" / "run.safetensors"

    def kill() -> None:
        wait_until(lambda: file.exists() and read_tree(file)[0]["next"] >= 5, "5 rounds")
        (node,) = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    found = engine.train(experiment, plans(experiment, *SEEDS), 1, "cpu", tmp_path)
    killer.join()
    assert len(cluster.list_all_nodes()) == 1
    for seed, record in unbroken(experiment).items():
        small.assert_same(found[seed], record)
