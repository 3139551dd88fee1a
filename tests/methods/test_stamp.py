"""STAMP: its parts alone and together, matching on the server, and what is remembered when."""

import math
from typing import Any

import numpy as np
import pytest
import small
import torch
from by_hand import two_number_reply
from small import BATCH_NORM, BN_B, BN_P, P, network, normalised, plan, run, tiny
from stamp_core.client.workspace import RoundId
from torch import Tensor

from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.matching.match import match
from stamp_core.methods.base.method import DivergedError, Log, Reply, State
from stamp_core.methods.base.server_matching import SpatialParams
from stamp_core.methods.fedomg import FedOMG
from stamp_core.methods.stamp import Stamp
from stamp_core.results.records import Record

FREE = {"length": "free"}
UNMATCHED = {"kappa": 0.0, "normalise": "none"}  # the reference is the result
FACES = {"source": "glyphs", "classes": 4, "train_per_class": 32, "test_per_class": 16}
FACES |= {"size": 16, "face_domains": True}
DOMAINS = {"kind": "domains", "classes_per_task": None}
REPEATED = "memory: a class was met again"
NOTHING = "temporal matching: nothing is remembered"


def assert_close(one: Record, other: Record, atol: float = 1e-6) -> None:
    """Refuse two records whose final models differ by more than rounding."""
    for name, value in one.weights.items():
        np.testing.assert_allclose(value, other.weights[name], rtol=0, atol=atol, err_msg=name)


# ------------------------------------------------------------------ the parts one by one


def test_with_all_parts_off_stamp_still_fills_its_memory() -> None:
    """So the test of neutral parameters covers a memory that is kept and not used."""
    assert Stamp.neutral == {} and FedOMG.neutral == {"spatial": None}
    record = run(tiny("stamp"))
    sizes = [2 * 20 * (64 + 16) * tasks + 80 for tasks in (1, 2, 3)]
    assert [entry["disk"] for entry in record.history[1::2]] == sizes
    small.assert_same_weights(record, run(tiny()))
    assert all(entry["notes"] == entry["events"] == {} for entry in record.history)


@pytest.mark.parametrize("server_lr", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["fedomg", "stamp"])
def test_a_server_with_radius_0_is_fedavg(kind: str, server_lr: float) -> None:
    """With kappa 0, d is g0, worker sum_u n_u Delta_u / sum_u n_u."""
    experiment = tiny(kind, server_lr=server_lr, spatial=UNMATCHED)
    few = plan(experiment).train_indices(experiment.dataset(), 0, 0)[:9].tolist()
    uneven = small.with_train(plan(experiment), {(0, 0): tuple(few)})
    assert_close(run(experiment, uneven), run(tiny(server_lr=server_lr), uneven))
    even = run(tiny(kind, spatial={**UNMATCHED, "reference": "mean"}), uneven)
    with pytest.raises(AssertionError):
        assert_close(even, run(tiny(), uneven), atol=1e-4)  # another mean


@pytest.mark.parametrize("kind", ["fedomg", "stamp"])
def test_a_single_client_is_not_changed_by_matching(kind: str) -> None:
    """d = (1 + kappa) g, divided by 1 + kappa."""
    experiment = tiny(kind, split={"clients": 1}, spatial={"kappa": 0.5, "length": "1+kappa"})
    assert_close(run(experiment), run(tiny(split={"clients": 1})))
    longer = run(tiny(kind, split={"clients": 1}, spatial={"kappa": 0.5, **FREE}))
    with pytest.raises(AssertionError):
        assert_close(longer, run(experiment), atol=1e-2)


def test_with_a_single_task_temporal_matching_is_fedavg_bit_for_bit() -> None:
    split = {"tasks": 1}
    record = run(tiny("stamp", split=split, temporal={"kappa": 0.5}))
    small.assert_same_weights(record, run(tiny(split=split)))
    assert all(entry["events"] == entry["notes"] == {} for entry in record.history)


def test_temporal_matching_with_an_empty_memory_is_fedavg_and_logged() -> None:
    """From the second task on, by each of the four clients."""
    record = run(tiny("stamp", memory={"exemplars_per_class": 0}, temporal={"kappa": 0.5}))
    small.assert_same_weights(record, run(tiny()))
    assert [entry["events"] for entry in record.history] == [{}, {}, *4 * [{NOTHING: 4}]]
    assert all(
        entry["disk"] == 80 for entry in record.history
    )  # numbers of images seen, and no image


def test_every_part_changes_the_model() -> None:
    """Each part alone, and all of them together, give another model."""
    parts: list[dict[str, Any]] = [
        {},
        {"spatial": {"kappa": 0.5}},
        {"temporal": {"kappa": 0.5}},
        {"prototype": 0.1},
        {"prototype": 0.1, "alternate": True},
        {"ratio": 0.5},
        {"spatial": {"kappa": 0.5}, "temporal": {"kappa": 0.5}, "prototype": 0.1, "ratio": 0.5},
    ]
    memory = {"exemplars_per_class": 5}
    heads = [run(tiny("stamp", memory=memory, **each)).weights["head.weight"] for each in parts]
    for k, one in enumerate(heads):
        assert all(np.abs(one - other).max() > 1e-4 for other in heads[:k]), parts[k]


def test_spatial_and_temporal_notes_and_seconds_are_in_the_history() -> None:
    """A match of four clients each round; from the second task on of two and of three gradients."""
    record = run(small.whole("stamp"))
    for entry in record.history:
        notes, experience = entry["notes"], entry["experience"]
        assert notes["spatial gradient count"] == 4
        past = experience + 1 if experience else None
        assert notes.get("temporal gradient count") == past
        worst, bound = notes["spatial worst_product"], notes["spatial worst_product_reference"]
        assert worst >= bound - 1e-9
        assert entry["seconds"]["spatial"] > 0
        assert ("coreset" in entry["seconds"]) == (entry["round"] == 1)
        assert entry["seconds"]["temporal"] > 0
        assert entry["events"] == {}


@pytest.mark.parametrize("past", ["trajectory", "gradient"])
@pytest.mark.parametrize("source", ["memory", "all data"])
def test_divergence_is_an_error_and_not_matched_away(past: str, source: str) -> None:
    """Weights that are not finite on a later task are an error as in FedAvg, not a gradient to be
    dropped."""
    temporal = {"past": past, "source": source, "kappa": 0.5}
    memory = {"exemplars_per_class": 5}
    diverging = tiny("stamp", training={"lr": 1e38}, memory=memory, temporal=temporal)
    whole = plan(diverging)
    worker, calm = (small.worker(each, whole) for each in (diverging, tiny("stamp", memory=memory)))
    client_round = small.arrived(calm, whole, 1)
    with pytest.raises(DivergedError, match=r"client 0, experience 1, round 0: .*training\.lr"):
        worker.method.train_client(client_round)


# ------------------------------------------------------------------ the server


SERVER: State = {"parameters": torch.tensor([1.0, 2.0]), "buffers": torch.tensor([5.0, 5.0])}


def served(server_lr: float, replies: list[Reply], **spatial: Any) -> tuple[State, Log]:
    """The next state of a server at (1, 2), and its log."""
    experiment = tiny("fedomg", network=BATCH_NORM, server_lr=server_lr, spatial=spatial)
    method, log = small.worker(experiment).method, Log()
    return method.aggregate(SERVER, replies, log), log


@pytest.mark.parametrize("weighted", [True, False])
def test_the_servers_direction_is_the_best_in_the_ball(weighted: bool) -> None:
    """Updates (3, 0) and (1, 1), with 1 and 3 samples: of all d with |d - g0| = |g0| / 2 it takes
    the one whose smaller product with (-3, 0) and (-1, -1) is largest; buffers are averaged."""
    replies = [
        two_number_reply(0, 1, 4.0, 2.0),
        two_number_reply(1, 3, 2.0, 3.0),
        two_number_reply(2, 0, math.nan, 0.0),
    ]
    reference = "weighted" if weighted else "mean"
    after, log = served(2.0, replies, reference=reference, normalise="none", kappa=0.5, **FREE)
    rows = np.array([[-3.0, 0.0], [-1.0, -1.0]])
    g0 = np.array([0.25, 0.75] if weighted else [0.5, 0.5]) @ rows
    angle = np.linspace(0, 2 * np.pi, 100_001)
    circle = g0 + np.linalg.norm(g0) / 2 * np.stack([np.cos(angle), np.sin(angle)], 1)
    best = circle[(circle @ rows.T).min(1).argmax()]
    np.testing.assert_allclose(after["parameters"], [1, 2] - 2 * best, atol=1e-3)
    assert after["buffers"].tolist() == [5.0, 5.5]
    assert log.numbers["spatial gradient count"] == 2 and log.events == []
    assert log.numbers["spatial worst_product"] * (g0 @ g0) == pytest.approx(
        (rows @ best).min(), rel=1e-4
    )


def test_updates_are_normalised_to_their_mean_length() -> None:
    """(4, 0) and (0, 2) become (3, 0) and (0, 3); equal and orthogonal, so d = (1 + kappa) g0."""
    replies = [two_number_reply(0, 1, 5.0, 2.0), two_number_reply(1, 1, 1.0, 4.0)]
    after, _ = served(1.0, replies, normalise="mean", kappa=0.5, length="1+kappa")
    np.testing.assert_allclose(after["parameters"], [2.5, 3.5], atol=1e-6)
    longer, _ = served(1.0, replies, normalise="mean", kappa=0.5, length="1+kappa^2")
    np.testing.assert_allclose(longer["parameters"], [1 + 1.5 * 1.2, 2 + 1.5 * 1.2], atol=1e-6)


def test_without_replies_the_matching_server_stays() -> None:
    for replies in ([], [two_number_reply(0, 0, 9.0, 9.0)]):
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
    matched = {}
    for blocks in ("model", "layers"):
        spatial = {"blocks": blocks, "normalise": "none", **FREE}
        method = small.worker(tiny("stamp", network=wide, spatial=spatial)).method
        matched[blocks] = start - method.aggregate(server, replies, Log())["parameters"]
    rows, weights = [start - end for end in ends], torch.tensor([1.0, 2.0, 3.0])
    one = SpatialParams(normalise="none", length="free")
    parts = zip(*(row.split(sizes) for row in rows), strict=True)
    expected = torch.cat([match(list(part), one, weights)[0] for part in parts])
    torch.testing.assert_close(matched["layers"], expected, rtol=0, atol=1e-5)
    assert not torch.allclose(matched["model"], matched["layers"], atol=1e-3)


def test_a_run_completes_layer_by_layer() -> None:
    options = {"kappa": 0.5, "blocks": "layers"}
    network_ = {"kind": "mlp", "features": 128}
    record = run(tiny("stamp", network=network_, spatial=options, temporal=options))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert record.accuracy()[-1].mean() > 0.2


# ------------------------------------------------------------------ what is remembered when


def train_client(worker: Worker, round_id: RoundId, state: State) -> Reply:
    """A client round that starts from the untrained model."""
    server = worker.method.init_server(round_id.seed)
    return worker.train_client(round_id, state, worker.method.broadcast(server, 0)).reply


def rows(images: Tensor) -> list[bytes]:
    """Each image as something that can be compared."""
    return [image.numpy().tobytes() for image in images]


def herded(experiment: Any, plan_: Plan, label: int, parameters: Tensor, count: int) -> list[bytes]:
    """The greedy choice among a class's images of client 0's first task, in float64.

    Each next image brings the mean of the chosen features nearest to that of all of them.
    """
    dataset, own = experiment.dataset(), plan_.train_indices(experiment.dataset(), 0, 0)
    own = own[dataset.y_train[own] == label]
    with torch.no_grad():
        z = (
            network(experiment, parameters)
            .encoder(normalised(experiment, dataset.x_train[own]))
            .double()
        )
    picks: list[int] = []
    for k in range(count):
        left = [i for i in range(len(own)) if i not in picks]
        away = [
            float((z.mean(0) - (z[picks].sum(0) + z[i]) / (k + 1)).square().sum()) for i in left
        ]
        picks.append(left[away.index(min(away))])
    return rows(dataset.x_train[own[picks]])


def test_if_clients_may_miss_rounds_a_memory_is_selected_in_the_first_and_in_the_last() -> None:
    """So that a client that misses the others has one; in the last round herding selects others, by
    the trained encoder."""
    experiment = tiny("stamp", training={"dropout": 0.1}, memory={"exemplars_per_class": 5})
    plan_ = plan(experiment)
    worker, state, picked = (
        small.worker(experiment, plan_),
        small.worker(experiment, plan_).initial_states(0)[1][0],
        [],
    )
    for round_, last in ((0, False), (1, False), (2, True)):
        reply = train_client(worker, RoundId(0, 0, 0, round_, last), state)
        state, trained = reply.state, reply.message["parameters"]
        memory, selected, expected = state["memory"], {}, {}
        for label in plan_.clients[0][0].classes:
            mine = memory["labels"] == label
            selected[label] = rows(memory["images"][mine])
            expected[label] = herded(experiment, plan_, label, trained, 5)
            assert len(selected[label]) == 5 and memory["tasks"][mine].tolist() == [0] * 5
        assert (selected == expected) == (round_ != 1), round_
        picked.append(selected)
    assert picked[0] == picked[1] != picked[2]
    own = plan_.train_indices(experiment.dataset(), 0, 0)
    assert int(state["memory"]["seen"].sum()) == len(
        own
    )  # counted once, in whatever number of rounds


def met_again(experiment: Any, step: int) -> list[Reply]:
    """Three rounds of client 0 in an experience that repeats its classes."""
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    client_round = small.arrived(worker, plan_, step)
    replies = [train_client(worker, RoundId(0, 0, step, 0), client_round.state)]
    for round_, last in ((1, False), (2, True)):
        round_id = RoundId(0, 0, step, round_, last)
        replies.append(train_client(worker, round_id, replies[-1].state))
    return [Reply(0, client_round.state, {}, 0, 0, 0.0), *replies]


@pytest.mark.parametrize(
    ("options", "step", "classes"),
    [({"split": {"cycles": 2}}, 3, 2), ({"source": FACES, "split": DOMAINS}, 2, 4)],
    ids=["cycles", "domains"],
)
def test_a_repeated_class_is_merged_once_in_its_experience(
    options: dict[str, Any], step: int, classes: int
) -> None:
    """In the last round, with the encoder that was trained on it."""
    experiment = tiny("stamp", memory={"exemplars_per_class": 4, "mixstyle_alpha": 2.0}, **options)
    before, *replies = met_again(experiment, step)
    said = [[event for event in reply.log.events if event == REPEATED] for reply in replies]
    assert said == [[], [], [REPEATED] * classes]
    merged = replies[-1].state["memory"]
    assert len(merged["labels"]) == len(before.state["memory"]["labels"])
    assert set(rows(merged["images"])) != set(rows(before.state["memory"]["images"]))
    for reply in replies[:-1]:
        small.assert_equal_trees(reply.state["memory"], before.state["memory"])
    own = plan(experiment).train_indices(experiment.dataset(), 0, step % plan(experiment).tasks)
    assert int((merged["seen"] - before.state["memory"]["seen"]).sum()) == len(own)


def test_repeated_classes_are_counted_in_the_history() -> None:
    """Two classes at four clients, in the last round of every experience of the second cycle."""
    record = run(tiny("stamp", split={"cycles": 2}, memory={"exemplars_per_class": 2}))
    expected = [
        {REPEATED: 8} if entry["experience"] >= 3 and entry["round"] else {}
        for entry in record.history
    ]
    assert [entry["events"] for entry in record.history] == expected


def test_clients_with_few_images_remember_what_they_have() -> None:
    """Client 0 has one image of a task, client 1 one class, client 2 nothing at all."""
    experiment = tiny("stamp", memory={"exemplars_per_class": 5}, temporal={"kappa": 0.5})
    plan_ = small.awkward(experiment)
    worker = small.worker(experiment, plan_)
    for client, (images, labels) in enumerate([(1, 1), (5, 1), (0, 0)]):
        client_round = small.arrived(worker, plan_, 2, client)
        memory = client_round.state["memory"]
        reply = worker.method.train_client(client_round)
        for task in (0, 1):
            mine = memory["tasks"] == task
            assert int(mine.sum()) == images and len(memory["labels"][mine].unique()) == labels
        assert (
            (reply.sgd_steps > 0)
            == ("temporal gradient count" in reply.log.numbers)
            == (client != 2)
        )
        assert torch.isfinite(reply.message["parameters"]).all()
        assert reply.state["experiences"][-1] == 2


@pytest.mark.parametrize("source", ["memory", "all data"])
def test_past_tasks_are_the_other_tasks_met_that_have_images(source: str) -> None:
    """Two cycles of three tasks, of which the second has no images in the second plan."""
    temporal = {"source": source, "past": "gradient"}
    experiment = tiny(
        "stamp", split={"cycles": 2}, memory={"exemplars_per_class": 2}, temporal=temporal
    )
    whole = plan(experiment)
    cases = [
        (whole, [[], [0], [0, 1], [1, 2], [0, 2], [0, 1]]),
        (small.with_train(whole, {(0, 1): ()}), [[], [0], [0], [2], [0, 2], [0]]),
    ]
    for plan_, expected in cases:
        method = small.worker(experiment, plan_).method
        assert isinstance(method, Stamp)
        worker = small.worker(experiment, plan_)
        rounds = [small.arrived(worker, plan_, experience) for experience in range(6)]
        assert [method.past_tasks(client_round) for client_round in rounds] == expected


@pytest.mark.parametrize(
    ("net", "expected"),
    [(small.NETWORK, {"parameters": P}), (BATCH_NORM, {"parameters": BN_P, "buffers": BN_B})],
    ids=["mlp", "cnn"],
)
def test_only_the_model_is_sent(net: dict[str, Any], expected: dict[str, int]) -> None:
    """No image, no prototype, no count of classes, in either direction."""
    experiment = small.whole("stamp", network=net)
    worker = small.worker(experiment, plan(experiment))
    client_round = small.arrived(worker, plan(experiment), 2)
    for message in (client_round.message, worker.method.train_client(client_round).message):
        assert {name: value.numel() for name, value in message.items()} == expected
