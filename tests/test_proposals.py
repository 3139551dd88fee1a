"""Rules that look at whole tasks: what they are told, what becomes of what they propose."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import plan, run, tiny
from torch import Tensor

from stamp_core import checkpoint, config, coresets
from stamp_core.coresets import Proposal, Task, memory
from stamp_core.coresets.memory import Keep
from stamp_core.methods.replay import Rehearsal, Replay
from stamp_core.seeding import generator
from stamp_core.workspace import Visit, Workspace

CLASSES = 10


@dataclass(frozen=True)
class Teaching:
    """Options of the rule `lesson`."""

    soft: bool = True
    height: int = 7


def lesson(task: Task) -> Proposal:
    """Pictures of its own, as bright as their place; logits that count."""
    labels = task.labels.unique().repeat_interleave(task.per_class + 1)
    pictures = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None]
    pictures = pictures.expand(-1, *task.pictures.shape[1:]).contiguous()
    width = CLASSES if task.options.soft else 0
    soft = torch.arange(float(len(labels) * width)).view(len(labels), width)
    task.events.append("lesson: given")
    return Proposal(pictures, labels, soft)


def backwards(task: Task) -> Proposal:
    """The task's pictures, the last first."""
    return task.best(torch.arange(len(task.labels)).flip(0))


ASKED: list[Task] = []


def noted(task: Task) -> Proposal:
    """The task's pictures as they are."""
    ASKED.append(task)
    return task.best(torch.arange(len(task.labels)))


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three more rules in the folder."""
    ASKED.clear()
    known = coresets.file
    more = {
        "lesson": SimpleNamespace(propose=lesson, Options=Teaching),
        "backwards": SimpleNamespace(propose=backwards),
        "noted": SimpleNamespace(propose=noted),
    }
    monkeypatch.setattr(coresets, "file", lambda rule: more.get(rule) or known(rule))
    monkeypatch.setattr(small.Quick, "files", lambda self: [])  # the rules have none
    yield


def replaying(rule: str, per_class: int = 3, **params: Any) -> Any:
    """Replay with one of the rules."""
    keep = {"rule": rule, "per_class": per_class, "space": "off"}
    return tiny("replay", **{"memory": keep, "weight": 1.0, **params})


# ------------------------------------------------------------------ the contract


def test_options_are_those_of_the_file_and_checked() -> None:
    assert coresets.options("lesson", {"height": 3}) == Teaching(height=3)
    assert coresets.options("herding", {}) == coresets.NoOptions()
    with pytest.raises(config.ParameterError, match=r"here.options: 'tau' is unknown; known: "):
        config.build(Keep, {"rule": "herding", "options": {"tau": 1}}, "here")
    with pytest.raises(config.ParameterError, match=r"here.options.height is 'x'; it must be a wh"):
        config.build(Keep, {"rule": "lesson", "options": {"height": "x"}}, "here")


def test_all_options_are_part_of_a_runs_parameters() -> None:
    keep = config.build(Keep, {"rule": "lesson", "options": {"height": 3}}, "here")
    assert config.plain(keep)["options"] == {"soft": True, "height": 3}
    assert replace(keep, per_class=1).options == keep.options
    assert config.plain(Keep())["options"] == {}


def test_a_rule_that_proposes_cannot_choose_again_among_old_pictures() -> None:
    right = "'mixstyle' or 'replace': noted looks at whole tasks"
    with pytest.raises(config.ParameterError, match=f"merge is 'reselect'; it must be {right}"):
        Keep(rule="noted", merge="reselect")


def test_soft_labels_need_a_weight_of_their_own() -> None:
    soft = Keep(rule="lesson")
    with pytest.raises(config.ParameterError, match="weight is None; it must be a number: lesson"):
        Rehearsal(memory=soft)
    Rehearsal(memory=soft, weight=0.5)
    Rehearsal(memory=soft, ratio=0.0)  # as with STAMP: nothing of it is mixed in
    Rehearsal(memory=Keep(rule="lesson", options={"soft": False}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": -1.0}, "weight is -1.0; it must be at least 0"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
    ],
)
def test_impossible_numbers_are_refused(values: Any, message: str) -> None:
    with pytest.raises(config.ParameterError, match=message):
        Rehearsal(**values)


def test_what_a_rule_sees_does_not_depend_on_the_order_of_the_pictures() -> None:
    """By class, then as numbers are sorted; equal pictures are equal wherever they stand."""
    draw = generator(1)
    pictures = torch.randint(3, (40, 1, 2, 2), generator=draw).to(torch.uint8) * 100
    labels = torch.randint(3, (40,), generator=draw) * 2
    found = []
    for seed in range(3):
        order = torch.randperm(40, generator=generator(seed))
        task: Any = SimpleNamespace(pictures=pictures[order], labels=labels[order])
        place = coresets.canonical(task.pictures, task.labels)
        rows = list(zip(labels[order][place].tolist(), task.pictures[place].tolist(), strict=True))
        assert rows == sorted(rows)
        found.append(rows)
    assert found[0] == found[1] == found[2]
    assert coresets.canonical(pictures[:0], labels[:0]).tolist() == []


# ------------------------------------------------------------------ what a client remembers


def test_what_a_rule_is_told() -> None:
    """The second task: its pictures in order, the model after training, the first task's memory."""
    cell = replaying("noted", per_class=4)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 1)
    reply = here.attend(turn.visit, turn.state, turn.message).reply
    first, task = ASKED
    images = cell.images()
    own = plan(cell).train_indices(images, 0, 1)
    order = coresets.canonical(images.x_train[own], images.y_train[own])
    assert torch.equal(task.pictures, images.x_train[own[order]])
    assert torch.equal(task.labels, images.y_train[own[order]])
    assert not len(first.past[1]) and len(task.past[1]) == 8
    assert torch.equal(task.past[0], turn.state["memory"]["pictures"])
    assert torch.equal(task.past[1], turn.state["memory"]["labels"])
    assert task.per_class == 4 and task.options == coresets.NoOptions()
    assert torch.equal(task.learner.model.parameters, reply.message["parameters"])
    task.learner.restart()
    assert torch.equal(task.learner.model.parameters, turn.message["parameters"])  # untrained
    inputs, labels = task.inputs()
    torch.testing.assert_close(inputs, small.normalised(cell, task.pictures))
    assert torch.equal(labels, task.labels)
    past, _ = task.past_inputs()
    torch.testing.assert_close(past, small.normalised(cell, task.past[0]))


def test_draws_are_the_same_in_every_round_of_a_task_and_others_elsewhere() -> None:
    cell = replaying("noted", training={"dropout": 0.1})
    here = small.worker(cell, plan(cell))
    server, states, *_ = here.begin(0)
    drawn = []
    for visit in (Visit(0, 0, 0, 0), Visit(0, 0, 0, 1, True), Visit(0, 0, 1, 1, True)):
        here.attend(visit, states[0], here.method.broadcast(server, 0))
        drawn.append(int(torch.randint(2**40, (), generator=ASKED[-1].draw)))
    assert drawn[0] == drawn[1] != drawn[2]


def test_whatever_a_rule_does_with_its_network_the_clients_model_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ruin(task: Task) -> Proposal:
        task.learner.model.parameters.fill_(torch.nan)
        task.learner.restart()
        task.learner.descend(*task.inputs(), [torch.arange(4)], rate=9.0)
        return noted(task)

    gentle = run(replaying("noted"))
    monkeypatch.setattr(coresets.file("noted"), "propose", ruin)
    small.assert_same_weights(run(replaying("noted")), gentle)


def test_of_each_class_the_first_pictures_of_the_proposal_are_kept() -> None:
    cell = replaying("backwards", per_class=3)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 1)
    kept, images = turn.state["memory"], cell.images()
    own = plan(cell).train_indices(images, 0, 0)
    order = coresets.canonical(images.x_train[own], images.y_train[own])
    for label in plan(cell).clients[0][0].classes:
        mine = own[order][images.y_train[own[order]] == label].flip(0)[:3]
        assert torch.equal(kept["pictures"][kept["labels"] == label], images.x_train[mine])


def test_made_pictures_are_kept_with_their_soft_labels() -> None:
    """4 of each class are made and 3 kept; `seen` counts the real ones."""
    cell = replaying("lesson", per_class=3)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 1)
    kept = turn.state["memory"]
    bright = kept["pictures"][:, 0, 0, 0].tolist()
    assert bright == [0, 1, 2, 4, 5, 6]
    wanted = [[10.0 * place + k for k in range(10)] for place in bright]
    assert kept["soft"].tolist() == wanted
    assert int(kept["seen"].sum()) == len(plan(cell).train_indices(cell.images(), 0, 0))
    assert memory.size(kept) == 6 * (64 + 40)


def test_soft_labels_survive_a_checkpoint(tmp_path: Path) -> None:
    cell = replaying("lesson")
    here = small.worker(cell, plan(cell))
    kept = small.arrived(here, plan(cell), 2).state["memory"]
    assert kept["soft"].shape == (12, 10)
    checkpoint.save(tmp_path / "a.safetensors", {"memory": kept}, {})
    loaded = checkpoint.load(tmp_path / "a.safetensors", {})
    assert loaded is not None
    small.assert_equal_trees(loaded["memory"], kept)
    whole = run(cell, resume=tmp_path)
    small.assert_same_weights(whole, run(cell, resume=tmp_path))


def test_events_of_a_rule_are_in_the_history() -> None:
    history = run(replaying("lesson")).history
    assert [row["events"] for row in history] == 3 * [{}, {"lesson: given": 4}]


def test_a_rule_that_looks_at_tasks_needs_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = Workspace.outputs

    def answers_only(self: Workspace, pictures: Tensor, layer: object = None) -> Tensor:
        assert layer is None
        return outputs(self, pictures)

    cell = replaying("noted")
    here = small.worker(cell, plan(cell))
    monkeypatch.setattr(Workspace, "outputs", answers_only)
    assert len(small.arrived(here, plan(cell), 1).state["memory"]["labels"]) == 6


def test_a_class_met_again_fills_up_what_is_free() -> None:
    """Or the new pictures replace the old ones; either way soft labels stay with their pictures."""
    made = {3: torch.full((3, 1, 2, 2), 3, dtype=torch.uint8)}
    made[5] = torch.full((2, 1, 2, 2), 5, dtype=torch.uint8)
    for merge, expected in {"mixstyle": [3, 3, 3, 5], "replace": [5, 5, 3, 3]}.items():
        keep: Any = Keep(rule="lesson", per_class=4, merge=merge, space="off")
        kept = memory.empty(made[3], CLASSES, soft=True)
        for task, (value, pictures) in enumerate(made.items()):
            labels = torch.zeros(len(pictures), dtype=torch.int64)
            soft = torch.full((len(pictures), CLASSES), float(value))
            new = memory.of_class(
                Proposal(pictures, labels, soft), 0, task, torch.zeros(len(labels), 0)
            )
            old = torch.zeros(len(kept["labels"]), 0)
            kept = memory.update(kept, 0, new, 9, old, keep, generator(0))
        assert kept["pictures"][:, 0, 0, 0].tolist() == expected
        assert kept["soft"][:, 4].tolist() == expected and int(kept["seen"][0]) == 18


# ------------------------------------------------------------------ how it is trained on


def test_remembered_pictures_have_a_mean_and_a_weight_of_their_own() -> None:
    """(CE(new) + weight CE(old)) / (1 + weight); without a weight it is one mean over both."""
    answers = torch.randn(10, CLASSES, generator=generator(1))
    labels = torch.arange(10)
    new, old = (F.cross_entropy(answers[part], labels[part]) for part in (slice(6), slice(6, 10)))
    wanted = {0.0: new, 0.5: (new + old / 2) / 1.5, None: 0.6 * new + 0.4 * old}
    for weight, expected in wanted.items():
        cell = replaying("herding", weight=weight)
        here = small.worker(cell, plan(cell))
        turn = small.arrived(here, plan(cell), 1)
        turn.notes["remembered"] = torch.arange(4)
        assert isinstance(here.method, Replay)
        torch.testing.assert_close(here.method.error(turn, answers, labels), expected)
        turn.notes["remembered"] = torch.arange(0)
        alone = here.method.error(turn, answers, labels)
        torch.testing.assert_close(alone, F.cross_entropy(answers, labels))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_soft_labels_are_compared_at_their_temperature(temperature: float) -> None:
    """T^2 / n sum_i sum_c q_ic (log q_ic - log p_ic), q and p the softmax of logits / T."""
    cell = replaying("lesson", temperature=temperature)
    method = small.worker(cell, plan(cell)).method
    assert isinstance(method, Replay)
    given, soft = (torch.randn(5, CLASSES, generator=generator(k)).double() for k in (1, 2))

    def shares(logits: Tensor) -> np.ndarray:
        powers = np.exp(logits.numpy() / temperature)
        return np.asarray(powers / powers.sum(1, keepdims=True))

    q, p = shares(soft), shares(given)
    expected = temperature**2 * (q * np.log(q / p)).sum() / 5
    labels = torch.zeros(5, dtype=torch.int64)
    assert float(method.past_error(given, labels, soft)) == pytest.approx(expected)
    assert float(method.past_error(soft, labels, soft)) == pytest.approx(0)
    hard = method.past_error(given, labels, soft[:, :0])
    torch.testing.assert_close(hard, F.cross_entropy(given, labels))


def test_remembered_pictures_of_a_batch_are_as_many_of_each_class() -> None:
    """Of 8 old classes with 3 pictures each, 16 are drawn: 2 of each class, in every batch."""
    split = {"clients": 1, "tasks": 5}
    cell = replaying("uniform", split=split, balanced=True)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 4)
    turn.indices = here.method.examples(turn)
    drawn = []
    for pictures, labels in here.method.batches(turn):
        old = labels[len(labels) // 2 :]
        if len(labels) == 32:
            assert sorted(old.unique(return_counts=True)[1].tolist()) == 8 * [2]
            assert torch.equal(old, turn.state["memory"]["labels"][turn.notes["remembered"]])
            drawn.append(pictures[16:].sum().item())
    assert len(set(drawn)) > 5


def test_the_first_pictures_that_a_client_remembers_can_be_looked_at() -> None:
    cell = replaying("uniform", per_class=5, observe={"memory": 2})
    record = run(cell)
    labels = record.kept["labels"]
    assert record.kept["pictures"].shape == (12, 1, 8, 8)
    assert sorted(np.unique(labels, return_counts=True)[1].tolist()) == 6 * [2]
    images = cell.images()
    known = {
        picture.numpy().tobytes(): int(y)
        for picture, y in zip(images.x_train, images.y_train, strict=True)
    }
    for picture, label in zip(record.kept["pictures"], labels, strict=True):
        assert known[picture.tobytes()] == label
    assert run(tiny("replay")).kept == {} and run(tiny(observe={"memory": 2})).kept == {}
