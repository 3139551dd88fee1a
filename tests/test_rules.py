"""What holds of every coreset rule, in the hands of clients: replay's, and STAMP's."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import small
import torch
from small import plan, run, tiny
from torch import Tensor

from stamp_core import coresets, engine
from stamp_core.executor import Worker
from stamp_core.methods import State
from stamp_core.split import Plan
from stamp_core.workspace import Visit

RULES = coresets.rules()
QUICK: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "csrel": {"reference_epochs": 1, "steps_of_selection": 2, "train_steps": 2},
        "sre2l": {"squeeze_epochs": 1, "iterations": 3},
    }
)
MAKES = {"sre2l"}
FEWER = "memory: a class has fewer pictures than may be kept"
AGAIN = "memory: a class was met again"


def keep(rule: str, per_class: int = 3, **changes: Any) -> dict[str, Any]:
    """A memory by a rule that takes little time."""
    return {"rule": rule, "per_class": per_class, "options": dict(QUICK.get(rule, {})), **changes}


def replaying(rule: str, per_class: int = 3, **options: Any) -> Any:
    """Replay by a rule, as coresets are compared."""
    memory = keep(rule, per_class, space="off")
    return tiny("replay", memory=memory, balanced=True, weight=1.0, **options)


def memories(here: Worker, plan_: Plan, client: int = 0) -> list[State]:
    """What a client remembers after each step."""
    server, states, *_ = here.begin(plan_.seed)
    state, sent, found = states[client], here.method.broadcast(server, client), []
    for step in range(plan_.steps):
        state = here.attend(Visit(plan_.seed, client, step, 0, last=True), state, sent).reply.state
        found.append(state["memory"])
    return found


def as_set(pictures: Tensor) -> list[bytes]:
    return sorted(each.contiguous().numpy().tobytes() for each in pictures)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("network", [small.NETWORK, small.BATCH_NORM], ids=["mlp", "batch norm"])
def test_so_many_of_each_class_are_kept_and_they_are_of_that_class(rule: str, network: Any) -> None:
    cell = replaying(rule, network=network)
    here, images = small.worker(cell, plan(cell)), cell.images()
    for step, kept in enumerate(memories(here, plan(cell))):
        met = {c for task in plan(cell).clients[0][: step + 1] for c in task.classes}
        assert {k: (kept["labels"] == k).sum().item() for k in met} == dict.fromkeys(met, 3)
        assert set(kept["labels"].tolist()) == met
        for label in met if rule not in MAKES else ():
            known = set(as_set(images.x_train[images.y_train == label]))
            mine = as_set(kept["pictures"][kept["labels"] == label])
            assert set(mine) <= known and len(set(mine)) == 3


@pytest.mark.parametrize("rule", RULES)
def test_of_a_class_with_fewer_pictures_than_its_budget_all_are_kept(rule: str) -> None:
    """What is made can be more than there is."""
    cell = replaying(rule, per_class=9, split={"images_per_class": 4})
    here, images = small.worker(cell, plan(cell)), cell.images()
    (kept, *_) = memories(here, plan(cell))
    if rule in MAKES:
        assert len(kept["labels"]) == 18
        return
    told = [row["events"].get(FEWER) for row in run(cell).history]
    assert told == 3 * [None, 8]  # 2 classes at 4 clients
    own = plan(cell).train_indices(images, 0, 0)
    assert as_set(kept["pictures"]) == as_set(images.x_train[own]) and len(own) == 8


@pytest.mark.parametrize("rule", RULES)
def test_awkward_clients_remember_what_they_have_and_stay_finite(rule: str) -> None:
    """One picture of a task, one class, nothing at all."""
    cell = replaying(rule)
    plan_ = small.awkward(cell)
    here = small.worker(cell, plan_)
    for client, expected in enumerate([3 if rule in MAKES else 1, 3, 0]):
        turn = small.arrived(here, plan_, 2, client)
        reply = here.method.local(turn)
        for task in range(3):
            assert int((reply.state["memory"]["tasks"] == task).sum()) == expected
        assert torch.isfinite(reply.message["parameters"]).all()


@pytest.mark.parametrize("rule", [rule for rule in RULES if coresets.proposes(rule)])
def test_the_order_of_a_tasks_pictures_does_not_matter(rule: str) -> None:
    """Nor does it to rules that look at features: tests/test_coresets.py."""
    cell = replaying(rule, split={"images_per_class": 12})
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 1)
    here.method.receive(turn)
    turn.indices = here.method.examples(turn)
    labels = here.work.images.y_train[turn.indices]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    found = []
    for places in (torch.arange(len(labels)), order):
        turn.indices = turn.indices[places]
        found.append(here.method.proposal(turn, labels[places]))  # type: ignore[attr-defined]
    small.assert_equal_trees(vars(found[0]), vars(found[1]))


@pytest.mark.parametrize("rule", RULES)
def test_choosing_changes_nothing_but_the_memory(rule: str) -> None:
    """The first task, in which nothing is replayed, is that of FedAvg bit for bit."""
    split = {"tasks": 1}
    small.assert_same_weights(run(replaying(rule, split=split)), run(tiny(split=split)))


@pytest.mark.parametrize("rule", RULES)
def test_stamp_can_keep_by_any_rule(rule: str) -> None:
    cell = small.whole("stamp", memory=keep(rule), ratio=0.0)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 2)
    assert len(turn.state["memory"]["labels"]) == 12
    reply = here.method.local(turn)
    assert reply.log.numbers["temporal rows"] == 3
    assert torch.isfinite(reply.message["parameters"]).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_class_met_again_is_merged_and_said(rule: str) -> None:
    cell = replaying(rule, split={"cycles": 2, "images_per_class": 6})
    record = run(cell)
    told = [row["events"].get(AGAIN) for row in record.history]
    assert told == 7 * [None] + [8, None, 8, None, 8]
    here = small.worker(cell, plan(cell))
    *_, before, _, _, after = memories(here, plan(cell))
    assert after["labels"].sort().values.tolist() == before["labels"].sort().values.tolist()


@pytest.mark.parametrize("rule", RULES)
def test_a_run_can_be_resumed_bit_for_bit(rule: str, tmp_path: Path) -> None:
    """From its checkpoint after the last round but one."""
    cell = replaying(rule, split={"clients": 3, "images_per_class": 8}, training={"rounds": 1})
    whole = run(cell)
    stopped = run_until(cell, rounds=2, folder=tmp_path)
    assert stopped
    again = run(cell, resume=tmp_path)
    small.assert_same_weights(again, whole)
    for name, values in whole.scores.items():
        np.testing.assert_array_equal(again.scores[name], values)


def run_until(cell: Any, rounds: int, folder: Path) -> bool:
    """Train some rounds and stop, leaving a checkpoint."""
    here = small.worker(cell, plan(cell))
    stopped = engine.Run(cell, plan(cell), here, engine.Here(here), folder)
    for step in range(rounds):
        stopped.advance(step, 0)
    return any(folder.iterdir())
