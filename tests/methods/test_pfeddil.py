"""pFedDIL: the choice of a model and the pull towards all by hand, votes, what is kept."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import small
import torch
from by_hand import CLOSE
from small import P, plan, run, tiny
from torch import Tensor

from stamp_core.client.scoring import score
from stamp_core.client.workspace import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound, State
from stamp_core.methods.pfeddil import (
    PFedDIL,
    log_share,
    moments,
    nearest_model,
    proportions,
    weighted_sum,
)

FEW = {"images_per_class": 20}
F = 32  # features of the small network


def pfeddil_worker(**options: Any) -> tuple[Worker, Plan, PFedDIL]:
    """A worker for pFedDIL on 40 images per task, its plan and its method."""
    experiment = tiny("pfeddil", **{"split": FEW, "migration": 0.1, **options})
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    assert isinstance(worker.method, PFedDIL)
    return worker, plan_, worker.method


def trained(worker: Worker, plan_: Plan, experiences: int) -> list[tuple[ClientRound, State]]:
    """Client 0's only round in each experience, always after the initial model; its states."""
    server, states, *_ = worker.initial_states(0)
    state, message, results = states[0], worker.method.broadcast(server, 0), []
    for experience in range(experiences):
        address = RoundId(0, 0, experience, 0, last=True)
        client_round = ClientRound(address, plan_, state, message)
        state = worker.method.train_client(client_round).state
        results.append((client_round, state))
    return results


# --- by hand


def test_the_answer_of_an_auxiliary_classifier_by_hand() -> None:
    """Features of two images: (0, 0) and (2, 4), so the means are (1, 2), the variances (1, 4).

    (1, 2) has a distance of 0 and (2, 4) of (1 + 4 / 4) / 2 = 1: both are the model's own for sure.
    (4, 8) has (9 + 36 / 4) / 2 = 9: exp(-8). A second task with the means (4, 8) takes it for sure.
    """
    known = moments(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    assert known.tolist() == [[1, 2], [1, 4]]
    images = torch.tensor([[1.0, 2.0], [2.0, 4.0], [4.0, 8.0]])
    assert log_share({"0": known}, images).tolist() == [0, 0, -8]
    other = torch.tensor([[4.0, 8.0], [1.0, 4.0]])
    assert log_share({"0": known, "1": other}, images).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("near", "threshold", "limit", "expected"),
    [
        ([], 0.5, 3, 0),  # no model yet
        ([0.3, 0.6], 0.5, 3, 1),  # the nearest one
        ([0.3, 0.5], 0.5, 3, 2),  # none is near: at the threshold is not above it
        ([0.3, 0.5], 0.5, 2, 1),  # none is near, but there is no room
        ([0.3, 0.1], 0.0, 3, 0),  # threshold 0: one model for ever
        ([1.0, 0.1], 1.1, 3, 2),  # above 1: always a new one
    ],
)
def test_the_choice_of_a_model_by_hand(
    near: list[float], threshold: float, limit: int, expected: int
) -> None:
    assert nearest_model(torch.tensor(near), threshold, limit) == expected


def test_proportions_sum_to_1_and_follow_their_models() -> None:
    near = torch.tensor([0.2, 0.6, 0.4, 0.8])
    rho = proportions(near)
    torch.testing.assert_close(rho, torch.tensor([0.1, 0.3, 0.2, 0.4]))
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(proportions(near[order]), rho[order])
    for equal in (torch.full((4,), 0.7), torch.zeros(4)):
        torch.testing.assert_close(proportions(equal), torch.full((4,), 0.25))
    models = [{"parameters": torch.tensor([0.0, 0.0])}, {"parameters": torch.tensor([2.0, 0.0])}]
    target = weighted_sum(models, torch.tensor([0.25, 0.75]))
    assert target.tolist() == [1.5, 0]
    assert weighted_sum(models[::-1], torch.tensor([0.75, 0.25])).tolist() == [1.5, 0]


def test_one_step_of_half_the_weight_lands_on_the_weighted_sum() -> None:
    """w = (1, 2), w_1 = (0, 0), w_2 = (2, 0), rho = (1/4, 3/4) and c = 5.

    The gradient 2 c (w - sum_i rho_i w_i) = 10 ((1, 2) - (3/2, 0)) = (-5, 20), and a step of
    1 / (2 c) = 0.1 along it ends at (3/2, 0).
    """
    worker, plan_, method = pfeddil_worker(migration=5.0)
    client_round = small.arrived(worker, plan_, 0)
    live = worker.work.model
    models = [{"parameters": torch.zeros(P)}, {"parameters": torch.zeros(P)}]
    models[1]["parameters"][0] = 2.0
    live.parameters.zero_()
    live.parameters[:2] = torch.tensor([1.0, 2.0])
    target = weighted_sum(models, torch.tensor([0.25, 0.75]))
    client_round.scratch["own"] = {"target": target}
    live.gradients.zero_()
    method.correct_gradient(client_round)
    assert live.gradients[:3].tolist() == [-5, 20, 0]
    torch.testing.assert_close(live.parameters - 0.1 * live.gradients, target)


def test_a_single_model_is_held_where_it_was() -> None:
    """At w = w_1 there is no gradient; the reused model itself is the copy."""
    worker, plan_, method = pfeddil_worker(models=1)
    first = trained(worker, plan_, 1)[0][1]
    message = worker.method.broadcast(worker.initial_states(0)[0], 0)
    client_round = ClientRound(RoundId(0, 0, 1, 0), plan_, first, message)
    method.receive(client_round)
    live = worker.work.model
    assert torch.equal(live.parameters, first["models"][0]["parameters"])
    live.gradients.zero_()
    method.correct_gradient(client_round)
    assert not live.gradients.any()
    assert "target" in client_round.scratch["own"]


# --- whole client rounds


@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.0, [1, 1, 1]), (1.1, [1, 2, 2])], ids=["never", "always"]
)
def test_the_threshold_decides_when_a_model_is_started(
    threshold: float, expected: list[int]
) -> None:
    worker, plan_, _ = pfeddil_worker(models=2, threshold=threshold)
    states = [state for _, state in trained(worker, plan_, 3)]
    assert [len(state["models"]) for state in states] == expected
    served = sorted(task for model in states[2]["models"] for task in model["tasks"])
    assert served == ["0", "1", "2"]


@pytest.mark.parametrize("start", ["own", "received"])
def test_models_that_are_not_trained_stay_as_they_are(start: str) -> None:
    worker, plan_, _ = pfeddil_worker(models=2, threshold=1.1, start=start)
    states = [state for _, state in trained(worker, plan_, 3)]
    for before, after in pairwise(states):
        pairs = zip(before["models"], after["models"], strict=False)
        for place, (old, new) in enumerate(pairs):
            if place != after["current"]:
                small.assert_equal_trees(new, old)
            else:
                assert not torch.equal(new["parameters"], old["parameters"])


def test_what_training_starts_from() -> None:
    """A new model from the initial weights, a reused one from its own, or both from the received.

    In all later rounds from the received ones.
    """
    for start in ("own", "received"):
        worker, plan_, method = pfeddil_worker(models=2, threshold=1.1, start=start)
        state = trained(worker, plan_, 2)[1][1]
        received = {"parameters": torch.full((P,), 0.5)}
        initial = worker.initial_states(0)[0]["parameters"]
        one = {**state, "models": state["models"][:1]}  # with room for a second model
        for own in (one, state):
            client_round = ClientRound(RoundId(0, 0, 2, 0), plan_, own, received)
            method.receive(client_round)
            chosen = client_round.scratch["own"]["current"]
            assert chosen == 1 or own is state
            source = initial if own is one else state["models"][chosen]["parameters"]
            expected = source if start == "own" else received["parameters"]
            assert torch.equal(worker.work.model.parameters, expected)
        later = ClientRound(RoundId(0, 0, 1, 1), plan_, state, received)
        method.receive(later)
        assert torch.equal(worker.work.model.parameters, received["parameters"])


def test_without_migration_auxiliary_classifiers_do_not_touch_the_models() -> None:
    """Several models that start from the received one leave the server's FedAvg bit-identical."""
    several = run(tiny("pfeddil", split=FEW, models=3, migration=0.0, start="received"))
    plain = run(tiny(split=FEW))
    small.assert_same_weights(several, plain)
    np.testing.assert_array_equal(several.scores["local"], plain.scores["local"])
    held = run(tiny("pfeddil", split=FEW, models=3, migration=0.1, start="received"))
    assert not np.array_equal(held.weights["head.bias"], plain.weights["head.bias"])


def test_it_is_noted_whether_a_returning_task_goes_to_the_model_that_knows_it() -> None:
    """One model for each of two tasks, in two cycles; before a task returns nothing is noted."""
    split = {**FEW, "tasks": 2, "cycles": 2}
    worker, plan_, _ = pfeddil_worker(split=split, models=2, threshold=1.1)
    results, name = trained(worker, plan_, 4), "returning task recognised"
    noted = [client_round.log.numbers.get(name) for client_round, _ in results]
    assert noted[:2] == [None, None]
    for experience in (2, 3):
        current = results[experience][1]["current"]
        before = results[experience - 1][1]["models"][current]["tasks"]
        assert noted[experience] == float(str(experience - 2) in before)


# --- votes


def test_equal_models_vote_as_one() -> None:
    """Whatever their auxiliary classifiers say."""
    worker, plan_, method = pfeddil_worker(models=2, threshold=1.1)
    state = trained(worker, plan_, 2)[1][1]
    one, other = state["models"]
    images = worker.work.dataset.x_test[:50]
    single = method.vote([one], images)
    torch.testing.assert_close(single.sum(1), torch.ones(50))
    twins = [one, {**one, "tasks": other["tasks"]}, one]
    torch.testing.assert_close(method.vote(twins, images), single, **CLOSE)
    assert not torch.allclose(method.vote([one, other], images), single, atol=0.01)


def test_each_image_is_given_to_the_model_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of exp(0) and exp(-log 3) are weights of 3/4 and 1/4."""
    worker, plan_, method = pfeddil_worker(models=2, threshold=1.1)
    models = trained(worker, plan_, 2)[1][1]["models"]
    images = worker.work.dataset.x_test[:20]
    alone = [method.vote([model], images) for model in models]
    shares = iter([torch.zeros(20), torch.full((20,), -math.log(3))])
    monkeypatch.setattr("stamp_core.methods.pfeddil.log_share", lambda *_: next(shares))
    expected = 0.75 * alone[0] + 0.25 * alone[1]
    torch.testing.assert_close(method.vote(models, images), expected, **CLOSE)


def test_votes_are_finite_where_no_model_knows_an_image() -> None:
    """After a task of one image all variances are 0, and everything else is infinitely far."""
    worker, plan_, method = pfeddil_worker(models=2, threshold=1.1)
    models = trained(worker, plan_, 2)[1][1]["models"]
    far = [
        {**model, "tasks": {"0": torch.stack([torch.full((F,), -1e6), torch.zeros(F)])}}
        for model in models
    ]
    votes = method.vote(far, worker.work.dataset.x_test[:20])
    assert votes.isfinite().all()
    torch.testing.assert_close(votes.sum(1), torch.ones(20))


def scores_of(worker: Worker, plan_: Plan, state: State) -> Tensor:
    """The scores of client 0's personal models after the second experience."""
    message = worker.method.broadcast(worker.initial_states(0)[0], 0)
    return worker.method.personal_scores(ClientRound(RoundId(0, 0, 1, 0), plan_, state, message))


def test_personal_scores_are_those_of_the_votes() -> None:
    """And those of the received model for a client that has trained none."""
    worker, plan_, method = pfeddil_worker(models=2, threshold=1.1)
    state = trained(worker, plan_, 2)[1][1]
    dataset, scores = worker.work.dataset, scores_of(worker, plan_, state)
    for task in range(3):
        test = plan_.test_indices(dataset, 0, task)
        predicted = method.vote(state["models"], dataset.x_test[test]).argmax(1)
        share = (predicted == dataset.y_test[test]).double().mean()
        assert float(scores[0, 0, task]) == pytest.approx(float(share))
    server, states, *_ = worker.initial_states(0)
    without = scores_of(worker, plan_, states[0])
    worker.work.model.load(server["parameters"])
    torch.testing.assert_close(without, score(worker.work, plan_, [0], 1), equal_nan=True)


# --- what is kept, what is refused


def test_a_client_keeps_its_models_and_two_numbers_per_feature_and_task() -> None:
    """What holds the model in training is dropped with the last round of its task."""
    worker, plan_, _ = pfeddil_worker(models=2, threshold=1.1)
    sizes = [small_bytes(state) for _, state in trained(worker, plan_, 3)]
    assert sizes == [4 * P + 8 * F, 2 * (4 * P + 8 * F), 2 * 4 * P + 3 * 8 * F]
    record = run(tiny("pfeddil", split=FEW, models=2, threshold=1.1, migration=0.1))
    during = 2 * (4 * P + 8 * F) + 4 * P
    assert [row["disk"] for row in record.history[2:4]] == [during, 2 * (4 * P + 8 * F)]
    assert all(row["bytes"] == {"down": 16 * P, "up": 16 * P} for row in record.history)


def small_bytes(tree: Any) -> int:
    """The bytes of all tensors in a tree."""
    return sum(tensor.nbytes for _, tensor in small.tensors(tree))


def test_a_pull_that_would_diverge_is_refused() -> None:
    """A step of the learning rate 0.1 along 2 c (w - target) overshoots at c = 10."""
    pfeddil_worker(migration=9.9)
    with pytest.raises(ParameterError, match=r"migration is 10\.0; it must be below 10, so that"):
        pfeddil_worker(migration=10.0)
