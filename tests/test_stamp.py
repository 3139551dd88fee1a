"""STAMP as a whole: its parts alone and together, on the server, and when what is remembered."""

import math
from typing import Any

import numpy as np
import pytest
import small
import torch
from small import BATCH_NORM, BN_B, BN_P, P, network, normalised, plan, run, tiny
from torch import Tensor, nn

from stamp_core import methods
from stamp_core.config import ParameterError
from stamp_core.coresets.mixstyle import mixed_styles
from stamp_core.executor import Worker
from stamp_core.matching import match
from stamp_core.methods import DivergedError, Log, Method, Reply, State
from stamp_core.methods.fedomg import Spatial
from stamp_core.methods.stamp import Stamp
from stamp_core.records import Record
from stamp_core.seeding import generator
from stamp_core.split import Plan
from stamp_core.workspace import Visit

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}
FREE = {"length": "free"}
UNTOUCHED = {"kappa": 0.0, "normalise": "none"}  # a server that takes the reference as it is
FACES = {
    "source": "glyphs",
    "classes": 4,
    "train_per_class": 32,
    "test_per_class": 16,
    "size": 16,
    "face_domains": True,
}
DOMAINS = {"kind": "domains", "classes_per_task": None}
AGAIN = "memory: a class was met again"
NOTHING = "temporal matching: nothing is remembered"


def assert_close(one: Record, other: Record, atol: float = 1e-6) -> None:
    """Refuse two records whose final models differ by more than rounding."""
    for name, value in one.weights.items():
        np.testing.assert_allclose(value, other.weights[name], rtol=0, atol=atol, err_msg=name)


# ------------------------------------------------------------------ the parts one by one


def test_with_all_parts_off_stamp_still_remembers() -> None:
    """So that the test of neutral parameters covers a memory that is kept and not used."""
    assert methods.get("stamp").neutral == {} and methods.get("fedomg").neutral == {"spatial": None}
    record = run(tiny("stamp"))
    pictures = 4 * [2 * 20 * (64 + 16) * step + 80 for step in (1, 2, 3)]
    assert [row["disk"] for row in record.history[1::2]] == pictures[:3]
    small.assert_same_weights(record, run(tiny()))
    assert all(row["notes"] == row["events"] == {} for row in record.history)


@pytest.mark.parametrize("step", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["fedomg", "stamp"])
def test_a_server_that_takes_the_weighted_mean_is_fedavg(kind: str, step: float) -> None:
    """With kappa 0 d is g0, here sum_u n_u Delta_u / sum_u n_u."""
    cell = tiny(kind, step=step, spatial=UNTOUCHED)
    few = plan(cell).train_indices(cell.images(), 0, 0)[:9].tolist()
    uneven = small.with_train(plan(cell), {(0, 0): tuple(few)})
    assert_close(run(cell, uneven), run(tiny(step=step), uneven))
    even = run(tiny(kind, spatial={**UNTOUCHED, "reference": "mean"}), uneven)
    with pytest.raises(AssertionError):
        assert_close(even, run(tiny(), uneven), atol=1e-4)  # that mean is another


@pytest.mark.parametrize("kind", ["fedomg", "stamp"])
def test_one_client_alone_is_not_matched(kind: str) -> None:
    """d = (1 + kappa) g, divided by 1 + kappa."""
    cell = tiny(kind, split={"clients": 1}, spatial={"kappa": 0.5, "length": "1+kappa"})
    assert_close(run(cell), run(tiny(split={"clients": 1})))
    longer = run(tiny(kind, split={"clients": 1}, spatial={"kappa": 0.5, **FREE}))
    with pytest.raises(AssertionError):
        assert_close(longer, run(cell), atol=1e-2)


def test_one_task_alone_is_not_matched_in_time_bit_for_bit() -> None:
    split = {"tasks": 1}
    record = run(tiny("stamp", split=split, temporal={"kappa": 0.5}))
    small.assert_same_weights(record, run(tiny(split=split)))
    assert all(row["events"] == row["notes"] == {} for row in record.history)


def test_matching_in_time_with_nothing_remembered_is_fedavg_and_says_so() -> None:
    """On the first task there is nothing to remember; later each of the four clients says it."""
    record = run(tiny("stamp", memory={"per_class": 0}, temporal={"kappa": 0.5}))
    small.assert_same_weights(record, run(tiny()))
    assert [row["events"] for row in record.history] == [{}, {}, *4 * [{NOTHING: 4}]]
    assert all(row["disk"] == 80 for row in record.history)  # how many were seen, and no picture


def test_every_part_changes_the_model() -> None:
    """None of the switches is a dummy: each alone, and all of them together, is something else."""
    parts: list[dict[str, Any]] = [
        {},
        {"spatial": {"kappa": 0.5}},
        {"temporal": {"kappa": 0.5}},
        {"prototype": 0.1},
        {"prototype": 0.1, "alternate": True},
        {"ratio": 0.5},
        {"spatial": {"kappa": 0.5}, "temporal": {"kappa": 0.5}, "prototype": 0.1, "ratio": 0.5},
    ]
    found = [run(tiny("stamp", memory={"per_class": 5}, **each)).weights for each in parts]
    for k, one in enumerate(found):
        for other in found[:k]:
            assert np.abs(one["head.weight"] - other["head.weight"]).max() > 1e-4, parts[k]


def test_spatial_and_temporal_notes_and_seconds_are_in_the_history() -> None:
    """A match of four clients each round; from the second task on one of two and of three rows."""
    record = run(small.whole("stamp"))
    for row in record.history:
        assert row["notes"]["spatial rows"] == 4
        assert row["notes"].get("temporal rows") == (row["step"] + 1 if row["step"] else None)
        assert row["notes"]["spatial least"] >= row["notes"]["spatial least_reference"] - 1e-9
        assert row["seconds"]["spatial"] > 0
        assert ("coreset" in row["seconds"]) == (row["round"] == 1)
        assert row["seconds"]["temporal"] > 0
        assert row["events"] == {}


@pytest.mark.parametrize("past", ["trajectory", "gradient"])
@pytest.mark.parametrize("source", ["memory", "all data"])
def test_divergence_is_named_and_not_matched_away(past: str, source: str) -> None:
    """A client whose training has left the finite numbers on a later task is an error as in
    FedAvg, not a row to be dropped."""
    temporal = {"past": past, "source": source, "start": "received", "kappa": 0.5}
    cell = tiny("stamp", training={"rate": 1e38}, memory={"per_class": 5}, temporal=temporal)
    whole = plan(cell)
    here = small.worker(cell, whole)
    calm = small.worker(tiny("stamp", training={"rate": 0.1}, memory={"per_class": 5}), whole)
    turn = small.arrived(calm, whole, 1)
    with pytest.raises(DivergedError, match=r"client 0, step 1, round 0: .*training\.rate"):
        here.method.local(turn)


# ------------------------------------------------------------------ the server


def reply(client: int, samples: int, values: list[float]) -> Reply:
    """A client's answer with weights and buffers of two numbers each."""
    vector = torch.tensor(values)
    return Reply(client, {}, {"parameters": vector, "buffers": vector * 2}, samples, 1, 0.0)


SERVER: State = {"parameters": torch.tensor([1.0, 2.0]), "buffers": torch.tensor([5.0, 5.0])}


def served(step: float, replies: list[Reply], **spatial: Any) -> tuple[State, Log]:
    """What a server at (1, 2) makes of the answers."""
    cell = tiny("fedomg", network=BATCH_NORM, step=step, spatial=spatial)
    method, log = small.worker(cell).method, Log()
    return method.aggregate(SERVER, replies, log), log


@pytest.mark.parametrize("weighted", [True, False])
def test_the_servers_direction_is_the_best_of_a_circle(weighted: bool) -> None:
    """Updates (3, 0) and (1, 1), with 1 and 3 samples: of all d with |d - g0| = |g0| / 2 it takes
    the one whose smaller product with (-3, 0) and (-1, -1) is largest; buffers are averaged."""
    replies = [reply(0, 1, [4.0, 2.0]), reply(1, 3, [2.0, 3.0]), reply(2, 0, [math.nan, 0.0])]
    reference = "weighted" if weighted else "mean"
    after, log = served(2.0, replies, reference=reference, normalise="none", kappa=0.5, **FREE)
    rows = np.array([[-3.0, 0.0], [-1.0, -1.0]])
    g0 = np.array([0.25, 0.75] if weighted else [0.5, 0.5]) @ rows
    angle = np.linspace(0, 2 * np.pi, 100_001)
    circle = g0 + np.linalg.norm(g0) / 2 * np.stack([np.cos(angle), np.sin(angle)], 1)
    best = circle[(circle @ rows.T).min(1).argmax()]
    np.testing.assert_allclose(after["parameters"], [1, 2] - 2 * best, atol=1e-3)
    assert after["buffers"].tolist() == [5.0, 5.5]
    assert log.numbers["spatial rows"] == 2 and log.events == []
    assert log.numbers["spatial least"] * (g0 @ g0) == pytest.approx((rows @ best).min(), rel=1e-4)


def test_updates_are_given_their_mean_length_before_they_are_matched() -> None:
    """(4, 0) and (0, 2) become (3, 0) and (0, 3); equal and orthogonal, so d = (1 + kappa) g0."""
    replies = [reply(0, 1, [5.0, 2.0]), reply(1, 1, [1.0, 4.0])]
    after, _ = served(1.0, replies, normalise="mean", kappa=0.5, length="1+kappa")
    np.testing.assert_allclose(after["parameters"], [2.5, 3.5], atol=1e-6)
    longer, _ = served(1.0, replies, normalise="mean", kappa=0.5, length="1+kappa^2")
    np.testing.assert_allclose(longer["parameters"], [1 + 1.5 * 1.2, 2 + 1.5 * 1.2], atol=1e-6)


def test_without_answers_the_matching_server_stays() -> None:
    for replies in ([], [reply(0, 0, [9.0, 9.0])]):
        after, log = served(1.0, replies)
        assert after is SERVER and log == Log()


def test_the_server_matches_layer_by_layer() -> None:
    """Two blocks of a wider network: each as if it were the whole model."""
    wide, sizes = {"kind": "mlp", "features": 128}, [64 * 128 + 128, 128 * 10 + 10]
    draw, count = generator("updates"), sum(sizes)
    start = torch.randn(count, generator=draw)
    ends = [start + torch.randn(count, generator=draw) for _ in range(3)]
    replies = [Reply(k, {}, {"parameters": end}, 1 + k, 1, 0.0) for k, end in enumerate(ends)]
    server = {"parameters": start, "buffers": torch.zeros(0)}
    found = {}
    for blocks in ("model", "layers", "coupled", "elements"):
        spatial = {"blocks": blocks, "normalise": "none", **FREE}
        method = small.worker(tiny("stamp", network=wide, spatial=spatial)).method
        found[blocks] = start - method.aggregate(server, replies, Log())["parameters"]
    rows, weights = [start - end for end in ends], torch.tensor([1.0, 2.0, 3.0])
    one = Spatial(normalise="none", length="free")
    parts = zip(*(row.split(sizes) for row in rows), strict=True)
    expected = torch.cat([match(list(part), one, weights)[0] for part in parts])
    torch.testing.assert_close(found["layers"], expected, rtol=0, atol=1e-5)
    g0 = (weights @ torch.stack(rows)) / 6
    agree = (torch.stack(rows) * g0 >= 0).all(0)
    factor = torch.where(agree, 1.5, 0.5)
    torch.testing.assert_close(found["elements"], factor * g0, rtol=0, atol=1e-5)
    pairs = [("model", "layers"), ("model", "coupled"), ("layers", "coupled")]
    assert all(not torch.allclose(found[a], found[b], atol=1e-3) for a, b in pairs)


@pytest.mark.parametrize("blocks", ["layers", "coupled", "elements"])
def test_a_run_goes_through_with_every_kind_of_block(blocks: str) -> None:
    options = {"kappa": 0.5, "blocks": blocks}
    network_ = {"kind": "mlp", "features": 128}
    record = run(tiny("stamp", network=network_, spatial=options, temporal=options))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert record.accuracy()[-1].mean() > 0.2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("reference", "current", "reference is 'current'; it must be another: no client is the "),
        ("reference", "half", "reference is 'half'; it must be another: no client is the current "),
        ("normalise", "current", "normalise is 'current'; it must be another: no client is the "),
        ("length", "current", "length is 'current'; it must be another: no client is the current"),
    ],
)
def test_on_the_server_nobody_is_the_current_one(key: str, value: str, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        Spatial(**{key: value})
    assert str(error.value).startswith(message)


def test_encoder_and_head_in_turn_need_a_prototypical_loss() -> None:
    with pytest.raises(ParameterError, match=r"prototype is 0.0; it must be above 0, as alternate"):
        tiny("stamp", alternate=True)
    with pytest.raises(ParameterError, match=r"prototype is -1.0; it must be at least 0"):
        tiny("stamp", prototype=-1)


# ------------------------------------------------------------------ when what is remembered


def attend(here: Worker, visit: Visit, state: State) -> Reply:
    """A visit of a client that is sent the untrained model."""
    method = here.method
    return here.attend(visit, state, method.broadcast(method.new_server(visit.seed), 0)).reply


def begun(here: Worker, client: int = 0) -> State:
    """What a client remembers at the beginning."""
    return here.begin(0)[1][client]


def rows(pictures: Tensor) -> list[bytes]:
    """Each picture as something that can be compared."""
    return [picture.numpy().tobytes() for picture in pictures]


def herded(cell: Any, plan_: Plan, label: int, parameters: Tensor, count: int) -> list[bytes]:
    """The greedy choice among a class's pictures of client 0's first task, in float64.

    Each next picture brings the mean of the chosen features nearest to that of all of them.
    """
    images, own = cell.images(), plan_.train_indices(cell.images(), 0, 0)
    own = own[images.y_train[own] == label]
    with torch.no_grad():
        z = network(cell, parameters).encoder(normalised(cell, images.x_train[own])).double()
    picks: list[int] = []
    for k in range(count):
        left = [i for i in range(len(own)) if i not in picks]
        away = [
            float((z.mean(0) - (z[picks].sum(0) + z[i]) / (k + 1)).square().sum()) for i in left
        ]
        picks.append(left[away.index(min(away))])
    return rows(images.x_train[own[picks]])


def test_where_clients_may_be_missed_a_memory_is_taken_up_at_once_and_chosen_anew() -> None:
    """A client that is never asked again has one; in the last round herding looks through what the
    encoder has become, and picks others."""
    cell = tiny("stamp", training={"dropout": 0.1}, memory={"per_class": 5})
    plan_ = plan(cell)
    here, state, picked = small.worker(cell, plan_), begun(small.worker(cell, plan_)), []
    for round_, last in ((0, False), (1, False), (2, True)):
        reply = attend(here, Visit(0, 0, 0, round_, last), state)
        state, trained = reply.state, reply.message["parameters"]
        memory, found, expected = state["memory"], {}, {}
        for label in plan_.clients[0][0].classes:
            mine = memory["labels"] == label
            found[label] = rows(memory["pictures"][mine])
            expected[label] = herded(cell, plan_, label, trained, 5)
            assert len(found[label]) == 5 and memory["tasks"][mine].tolist() == [0] * 5
        assert (found == expected) == (round_ != 1), round_
        picked.append(found)
    assert picked[0] == picked[1] != picked[2]
    own = plan_.train_indices(cell.images(), 0, 0)
    assert int(state["memory"]["seen"].sum()) == len(own)  # counted once, however often visited


def met_again(cell: Any, step: int) -> list[Reply]:
    """Three visits of client 0 at a step where it meets its classes again."""
    plan_ = plan(cell)
    here = small.worker(cell, plan_)
    turn = small.arrived(here, plan_, step)
    replies = [attend(here, Visit(0, 0, step, 0), turn.state)]
    for round_, last in ((1, False), (2, True)):
        visit = Visit(0, 0, step, round_, last)
        replies.append(attend(here, visit, replies[-1].state))
    return [Reply(0, turn.state, {}, 0, 0, 0.0), *replies]


@pytest.mark.parametrize(
    ("options", "step", "classes"),
    [
        ({"split": {"cycles": 2}}, 3, 2),
        ({"source": FACES, "split": DOMAINS}, 2, 4),
    ],
    ids=["cycles", "domains"],
)
def test_a_class_met_again_is_merged_once_in_its_step(
    options: dict[str, Any], step: int, classes: int
) -> None:
    """In the last round, with the encoder that has learnt it."""
    cell = tiny("stamp", memory={"per_class": 4, "alpha": 2.0}, **options)
    before, *replies = met_again(cell, step)
    said = [[event for event in reply.log.events if event == AGAIN] for reply in replies]
    assert said == [[], [], [AGAIN] * classes]
    merged = replies[-1].state["memory"]
    assert len(merged["labels"]) == len(before.state["memory"]["labels"])
    assert set(rows(merged["pictures"])) != set(rows(before.state["memory"]["pictures"]))
    for reply in replies[:-1]:
        small.assert_equal_trees(reply.state["memory"], before.state["memory"])
    own = plan(cell).train_indices(cell.images(), 0, step % plan(cell).tasks)
    assert int((merged["seen"] - before.state["memory"]["seen"]).sum()) == len(own)


def test_classes_met_again_are_counted_in_the_history() -> None:
    """Two classes at four clients, in the last round of every step of the second cycle."""
    record = run(tiny("stamp", split={"cycles": 2}, memory={"per_class": 2}))
    expected = [{AGAIN: 8} if row["step"] >= 3 and row["round"] else {} for row in record.history]
    assert [row["events"] for row in record.history] == expected


def test_awkward_clients_remember_what_they_have() -> None:
    """Client 0 has one picture of a task, client 1 one class, client 2 nothing at all."""
    cell = tiny("stamp", memory={"per_class": 5}, temporal={"kappa": 0.5})
    plan_ = small.awkward(cell)
    here = small.worker(cell, plan_)
    for client, (pictures, labels) in enumerate([(1, 1), (5, 1), (0, 0)]):
        turn = small.arrived(here, plan_, 2, client)
        memory = turn.state["memory"]
        reply = here.method.local(turn)
        for task in (0, 1):
            mine = memory["tasks"] == task
            assert int(mine.sum()) == pictures and len(memory["labels"][mine].unique()) == labels
        assert (reply.steps > 0) == ("temporal rows" in reply.log.numbers) == (client != 2)
        assert torch.isfinite(reply.message["parameters"]).all()
        assert reply.state["step"] == 2


@pytest.mark.parametrize("source", ["memory", "all data"])
def test_the_past_are_the_tasks_met_that_have_pictures_without_the_current_one(source: str) -> None:
    """Two cycles of three tasks, of which the second has no pictures in the second plan."""
    temporal = {"source": source, "past": "gradient"}
    cell = tiny("stamp", split={"cycles": 2}, memory={"per_class": 2}, temporal=temporal)
    whole = plan(cell)
    cases = [
        (whole, [[], [0], [0, 1], [1, 2], [0, 2], [0, 1]]),
        (small.with_train(whole, {(0, 1): ()}), [[], [0], [0], [2], [0, 2], [0]]),
    ]
    for plan_, expected in cases:
        method = small.worker(cell, plan_).method
        assert isinstance(method, Stamp)
        turns = [small.arrived(small.worker(cell, plan_), plan_, step) for step in range(6)]
        assert [method.past_tasks(turn) for turn in turns] == expected


@pytest.mark.parametrize(
    ("net", "expected"),
    [(small.NETWORK, {"parameters": P}), (BATCH_NORM, {"parameters": BN_P, "buffers": BN_B})],
    ids=["mlp", "cnn"],
)
def test_nothing_but_the_model_travels(net: dict[str, Any], expected: dict[str, int]) -> None:
    """No picture, no prototype, no count of classes, in either direction."""
    cell = small.whole("stamp", network=net)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), 2)
    for message in (turn.message, here.method.local(turn).message):
        assert {name: value.numel() for name, value in message.items()} == expected


# ------------------------------------------------------------------ MixStyle on features


CNN = {**BATCH_NORM, "norm": "none"}
FEATURE = {"per_class": 5, "space": "feature", "alpha": 1.0}


def test_a_network_without_maps_has_no_styles_to_mix() -> None:
    cell = tiny("stamp", memory=FEATURE)
    right = r"memory\.space is 'feature'; it must be 'image' or 'off': this network has no maps"
    with pytest.raises(ParameterError, match=right):
        small.worker(cell)
    small.worker(tiny("stamp", network=CNN, memory=FEATURE))


def hooks(method: Method) -> int:
    """Forward hooks in the live model."""
    return sum(len(module._forward_hooks) for module in method.work.classifier.modules())


def test_styles_are_mixed_in_training_on_the_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trajectories of past tasks go through it; the current task's training and all that is
    measured do not, and no hook stays behind."""
    temporal = {"past": "trajectory", "reference": "mean", "kappa": 0.0}
    uploads = {}
    for space in ("feature", "off"):
        cell = tiny("stamp", network=CNN, memory={**FEATURE, "space": space}, temporal=temporal)
        here = small.worker(cell, plan(cell))
        turn = small.arrived(here, plan(cell), 0)
        uploads[space, 0] = here.method.local(turn).message["parameters"]
        turn = small.arrived(here, plan(cell), 1)
        uploads[space, 1] = here.method.local(turn).message["parameters"]
        assert hooks(here.method) == 0
    assert torch.equal(uploads["feature", 0], uploads["off", 0])
    assert not torch.allclose(uploads["feature", 1], uploads["off", 1], atol=1e-5)


def test_mixed_styles_are_those_of_the_same_class() -> None:
    """A class whose maps are all alike keeps them; the two others stay among themselves."""
    encoder = nn.Sequential(nn.Identity(), nn.MaxPool2d(1))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    batch = torch.rand(6, 1, 4, 4, generator=generator("maps"))
    batch[labels == 1] = batch[1].clone()
    batch[labels == 2] += 100
    with mixed_styles(encoder, labels, 1.0, generator("draw")):
        mixed = encoder(batch)
    torch.testing.assert_close(mixed[labels == 1], batch[labels == 1])
    means = mixed.mean((1, 2, 3))
    assert (means[labels == 0] < 50).all() and (means[labels == 2] > 50).all()


def test_hooks_are_gone_also_after_an_exception() -> None:
    encoder = nn.Sequential(nn.MaxPool2d(1))
    labels, batch = torch.tensor([0, 0]), torch.rand(2, 1, 4, 4, generator=generator("maps"))
    with (
        pytest.raises(ZeroDivisionError),
        mixed_styles(encoder, labels, 1.0, generator("draw")),
    ):
        assert len(encoder[0]._forward_hooks) == 1
        raise ZeroDivisionError
    assert not encoder[0]._forward_hooks and torch.equal(encoder(batch), batch)
