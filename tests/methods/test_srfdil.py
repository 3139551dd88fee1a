"""SR-FDIL: ranks, chances and steps of its networks by hand; at correlation 0 it is Re-Fed."""

import math
from typing import Any

import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, BN_B, P, plan, run, tiny
from stamp_core.client.workspace import RoundId
from torch import Tensor

from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.exemplar_lists import ExemplarLists
from stamp_core.methods.base.method import ClientRound, Log, Reply
from stamp_core.methods.srfdil import (
    BATCH,
    NETWORKS,
    NOISE,
    SRFDIL,
    build_discriminator,
    client_shares,
    ranks_in_class,
)
from stamp_core.models.acgan import generator_inputs

FEW = {"images_per_class": 20}  # 40 images in a task
SMALL: dict[str, Any] = {"cache": 10, "steps": 2, "gan_steps": 2}
GENERATOR, DISCRIMINATOR = 4_832, 2_817  # parameters for 32 features and 10 classes


def srfdil_worker(**options: Any) -> tuple[Worker, Plan, SRFDIL]:
    """A worker for SR-FDIL on 40 images per task, its plan and its method."""
    experiment = tiny("srfdil", **{"split": FEW, **SMALL, **options})
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    assert isinstance(worker.method, SRFDIL)
    return worker, plan_, worker.method


def some_samples(worker: Worker, plan_: Plan, clients: int = 2) -> ExemplarLists:
    """Images of all tasks of some clients."""
    dataset = worker.work.dataset
    parts = [plan_.train_indices(dataset, u, t) for u in range(clients) for t in range(3)]
    indices = torch.cat(parts).unique()
    tasks = torch.zeros_like(indices)
    return {"images": dataset.x_train[indices], "labels": dataset.y_train[indices], "tasks": tasks}


# --- ranks and scores


def test_ranks_and_their_weighted_mean_by_hand() -> None:
    """I = (4, 1, 3, 2) exceeds 3, 0, 2 and 1 of 3 others; C = (.1, .9, .8, .2) 0, 3, 2 and 1.

    At equal weights the third sample has the largest score, 2/3; another class is ranked by itself.
    """
    importance = torch.tensor([4.0, 1.0, 3.0, 2.0])
    correlation = torch.tensor([0.1, 0.9, 0.8, 0.2])
    one = torch.zeros(4, dtype=torch.int64)
    local, of_all = ranks_in_class(importance, one), ranks_in_class(correlation, one)
    torch.testing.assert_close(local, torch.tensor([1, 0, 2 / 3, 1 / 3]))
    torch.testing.assert_close(of_all, torch.tensor([0, 1, 2 / 3, 1 / 3]))
    mean = torch.lerp(local, of_all, 0.5)
    torch.testing.assert_close(mean, torch.tensor([0.5, 0.5, 2 / 3, 1 / 3]))
    classes = torch.tensor([7, 2, 7, 2])
    assert ranks_in_class(importance, classes).tolist() == [1, 0, 0, 1]
    assert ranks_in_class(torch.tensor([3.0, 3.0, 5.0]), one[:3]).tolist() == [0, 0, 1]  # ties
    assert ranks_in_class(torch.tensor([3.0]), one[:1]).tolist() == [0]


def scored(monkeypatch: pytest.MonkeyPatch, scale: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Scores of some samples, and of them in reverse, where importance and logits are scaled."""
    worker, plan_, method = srfdil_worker()
    client_round = small.arrived(worker, plan_, 1)
    samples = some_samples(worker, plan_)
    for name, network in method.live.items():
        network.load(client_round.message[name])
    last = list(method.live["discriminator"].module.parameters())[-2]
    last.data.copy_(torch.randn(last.shape, generator=generator("last layer")))
    plain = SRFDIL.importance, SRFDIL.discriminate
    monkeypatch.setattr(SRFDIL, "importance", lambda *args: scale[0] * plain[0](*args))
    monkeypatch.setattr(SRFDIL, "discriminate", lambda *args: scale[1] * plain[1](*args))
    backwards = {name: values.flip(0) for name, values in samples.items()}
    results = []
    for each in (samples, backwards):
        worker.work.model.load(client_round.message["parameters"])
        results.append(method.scores(client_round, each))
    monkeypatch.undo()
    return results[0], results[1]


def test_scores_follow_their_samples_and_no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two scale without rounding; a sum over other neighbours rounds to other ranks."""
    scores, backwards = scored(monkeypatch, (1.0, 1.0))
    assert len(scores.unique()) > 10
    scaled, _ = scored(monkeypatch, (4.0, 0.5))
    assert torch.equal(scaled, scores)
    moved = (backwards.flip(0) - scores).abs() > 1e-6
    assert moved.float().mean() < 0.1


def test_an_untrained_discriminator_leaves_the_order_to_importance() -> None:
    """Its last layer is 0, so all logits are 0, and all ranks by them."""
    worker, plan_, method = srfdil_worker()
    client_round = small.arrived(worker, plan_, 1)
    samples = some_samples(worker, plan_)
    for name, network in method.live.items():
        network.load(client_round.message[name])
    assert not method.correlations(samples).any()
    worker.work.model.load(client_round.message["parameters"])
    scores = method.scores(client_round, samples)
    expected = ranks_in_class(method.importance(client_round, samples), samples["labels"])
    torch.testing.assert_close(scores, expected / 2)


@pytest.mark.parametrize("balance", ["none", "class"])
def test_without_correlation_it_is_refed_bit_for_bit(balance: str) -> None:
    options: dict[str, Any] = {"split": FEW, "cache": 10, "steps": 2, "balance": balance}
    record = run(tiny("srfdil", correlation=0.0, **options))
    refed = run(tiny("refed", **options))
    small.assert_same(record, refed)
    other = run(tiny("srfdil", correlation=1.0, **options))
    assert other.weights["head.bias"].tobytes() != refed.weights["head.bias"].tobytes()


# --- the networks of features


def test_the_networks_have_their_sizes() -> None:
    worker, _, _ = srfdil_worker()
    server, *_ = worker.initial_states(0)
    sizes = [len(server[name]) for name in NETWORKS]
    assert sizes == [GENERATOR, DISCRIMINATOR] and 4 * sum(sizes) == 30_596
    logits = build_discriminator(32, 10)(torch.randn(5, 42, generator=generator("inputs")))
    assert not logits.any()


def with_a_cache(worker: Worker, plan_: Plan, method: SRFDIL) -> tuple[ClientRound, ExemplarLists]:
    """A client round of the second task that has arrived, with its cache and live networks."""
    client_round = small.arrived(worker, plan_, 1)
    method.receive(client_round)
    client_round.indices = method.train_indices(client_round)
    for name, network in method.live.items():
        network.load(client_round.message[name])
    samples = some_samples(worker, plan_)
    return client_round, {name: values[:12] for name, values in samples.items()}


def test_one_step_of_both_networks_is_one_of_adam() -> None:
    """Written out with torch's Adam: real features against generated ones, then the generator's.

    Features are standardised in the cache. One step from D = 0 leaves G where it is, as D's last
    layer passes no gradient on before it has been trained.
    """
    worker, plan_, method = srfdil_worker(gan_steps=2, gan_lr=0.01)
    client_round, cache = with_a_cache(worker, plan_, method)
    work, labels = worker.work, cache["labels"]
    h = work.outputs(cache["images"], work.classifier.encode)
    h = (h - h.mean(0)) / (h.std(0, correction=0) + 1e-6)
    y = F.one_hot(labels, 10).float()
    nets = {name: method.network(name, 0) for name in NETWORKS}
    adams = {
        name: torch.optim.Adam(net.parameters(), 0.01, (0.5, 0.999)) for name, net in nets.items()
    }
    draw = client_round.round_id.generator("features")
    for _ in range(2):
        places = torch.randint(len(labels), (BATCH,), generator=draw)
        noise = torch.randn(BATCH, NOISE, generator=draw)
        fake = nets["generator"](generator_inputs(labels[places], noise, 10))
        judge = nets["discriminator"]
        real = judge(torch.cat([h[places], y[places]], 1))
        made = judge(torch.cat([fake.detach(), y[places]], 1))
        adams["discriminator"].zero_grad()
        (-real.sigmoid().log().mean() - (1 - made.sigmoid()).log().mean()).backward()
        adams["discriminator"].step()
        adams["generator"].zero_grad()
        (-judge(torch.cat([fake, y[places]], 1)).sigmoid().log().mean()).backward()
        adams["generator"].step()

    before = [vector.clone() for vector in (work.model.parameters, work.model.buffers)]
    method.fit_networks(client_round, cache)
    for name, net in nets.items():
        expected = torch.cat([p.detach().flatten() for p in net.parameters()])
        torch.testing.assert_close(method.live[name].parameters, expected, rtol=0, atol=1e-4)
        assert not torch.equal(method.live[name].parameters, client_round.message[name])
    small.assert_equal_trees([work.model.parameters, work.model.buffers], before)


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_the_networks_leave_statistics_and_local_training_alone(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first two tasks the cache does not depend on them: none is trained before."""
    options: dict[str, Any] = {
        **{"network": BATCH_NORM, "training": {"buffers": policy}},
        **{"split": {**FEW, "tasks": 2}, **SMALL},
    }
    record = run(tiny("srfdil", **options))
    with monkeypatch.context() as patch:
        patch.setattr(SRFDIL, "fit_networks", lambda *_: None)
        small.assert_same_weights(record, run(tiny("srfdil", **options)))
    worker, plan_, method = srfdil_worker(**{**options, "split": FEW})
    client_round, cache = with_a_cache(worker, plan_, method)
    buffers = worker.work.model.buffers.clone()
    method.fit_networks(client_round, cache)
    assert len(buffers) == BN_B and torch.equal(worker.work.model.buffers, buffers)


def test_without_a_cache_nothing_is_trained_and_networks_are_averaged_by_samples() -> None:
    worker, plan_, method = srfdil_worker()
    server, states, *_ = worker.initial_states(0)
    message = method.broadcast(server, 0)
    reply = method.train_client(ClientRound(RoundId(0, 0, 0, 0), plan_, states[0], message))
    for name in NETWORKS:
        assert torch.equal(reply.message[name], server[name])
    replies = []
    for client, (samples, value) in enumerate([(1, 8.0), (3, 4.0), (0, math.nan)]):
        vectors = {n: torch.full_like(v, value) for n, v in reply.message.items()}
        replies.append(Reply(client, {}, vectors, samples, 1, 0.0))
    after = method.aggregate(server, replies, Log())
    for name in ("parameters", *NETWORKS):
        assert after[name].unique().tolist() == [5]


# --- the choice of clients


def test_chances_by_hand() -> None:
    """S_old = (6, 2, 2) and S_new = (1, 1, 2): shares (.6, .2, .2) and (.25, .25, .5)."""
    both = torch.tensor([[6.0, 1.0], [2.0, 1.0], [2.0, 2.0]])
    for old, expected in (
        (1.0, [0.6, 0.2, 0.2]),
        (0.0, [0.25, 0.25, 0.5]),
        (0.5, [0.425, 0.225, 0.35]),
    ):
        assert client_shares(both, old).tolist() == pytest.approx(expected)
    first = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 2.0]])  # no cache yet
    for old in (0.0, 0.5):
        assert client_shares(first, old).tolist() == pytest.approx([0.25, 0.25, 0.5])
    for nothing in (torch.zeros(4, 2), torch.full((4, 2), math.nan)):
        assert client_shares(nothing, 0.5).tolist() == pytest.approx([0.25] * 4)
    unknown = torch.tensor([[6.0, 1.0], [math.nan, math.nan], [2.0, 1.0]])  # as the mean, (4, 1)
    assert client_shares(unknown, 0.5).tolist() == pytest.approx([5 / 12, 1 / 3, 1 / 4])


def test_the_server_draws_clients_by_their_chances() -> None:
    """Client 2 has half of all importance: it is drawn more often than others."""
    _, _, method = srfdil_worker(selected=0.25)
    importance = torch.tensor([[1.0, 1.0], [1.0, 1.0], [6.0, 6.0], [1.0, 1.0]])
    count = torch.zeros(4)
    for round_ in range(300):
        server = {"importance": importance, "seed": 0, "round": round_}
        drawn = method.draw_clients(server)
        assert drawn == method.draw_clients(server) and len(drawn) == 1
        count[drawn] += 1
    assert 0.58 < count[2] / 300 < 0.75  # 2/3; six deviations on either side are 0.16
    _, _, method = srfdil_worker(selected=0.75)
    drawn = method.draw_clients({"importance": importance, "seed": 0, "round": 0})
    assert len(set(drawn)) == 3 and drawn == sorted(drawn)


def test_only_drawn_clients_train_and_report_their_importance() -> None:
    """Half of four; two floats each, and what the server has drawn limits who was chosen."""
    record = run(tiny("srfdil", split=FEW, **SMALL, selected=0.5))
    up = 4 * (P + GENERATOR + DISCRIMINATOR) + 8
    for row in record.history:
        assert (row["participants"], row["completed"]) == (2, 2)
        assert row["bytes"] == {"down": 2 * (up - 8), "up": 2 * up}
    _, _, method = srfdil_worker(selected=0.5)
    assert method.participants([0, 1, 3], {"drawn": [1, 2]}) == [1]


def test_the_reported_importance_is_that_of_cached_and_of_new_samples() -> None:
    """At the model received first in an experience; it stays throughout the experience."""
    worker, plan_, method = srfdil_worker(selected=0.5)
    server, states, *_ = worker.initial_states(0)
    message, state = method.broadcast(server, 0), states[0]
    reported = []
    for experience, round_ in ((0, 0), (1, 0), (1, 1)):
        client_round = ClientRound(RoundId(0, 0, experience, round_), plan_, state, message)
        reply = method.train_client(client_round)
        state = reply.state
        reported.append(reply.message["importance"])
    assert reported[0][0] == 0 and (reported[1] > 0).all()
    assert torch.equal(reported[2], reported[1])
    work, indices = worker.work, plan_.train_indices(worker.work.dataset, 0, 1)
    work.model.load(message["parameters"])
    samples = method.local_set(indices, 1, state["cache"])
    importance = method.importance(client_round, samples)
    means = torch.stack([importance[40:].mean(), importance[:40].mean()])
    torch.testing.assert_close(reported[1], means)


# --- refused parameters
