"""Anchors: the mean logits of each class when it was learnt, which exemplars stay close to."""

import pytest
import small
import torch
import torch.nn.functional as F
from by_hand import task_data, use_softmax_regression
from small import plan, run, tiny
from stamp_core.client.workspace import RoundId
from test_methods import client_rounds

from stamp_core.methods.base.method import ClientRound

ANCHORED = {"weight": 1.0, "anchor": 0.5}


def test_anchors_are_the_mean_logits_of_the_last_model_of_each_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand for softmax regression: mean of W x + b over the images of the class."""
    use_softmax_regression(monkeypatch)
    experiment = tiny("replay", **ANCHORED)
    plan_ = plan(experiment)
    worker, checked = small.worker(experiment, plan_), 0
    for each in client_rounds(worker, plan_):
        if each.client_round.client or not each.client_round.last:
            continue
        before = each.client_round.state["anchors"]
        after = each.result.reply.state["anchors"]
        theta = each.result.reply.message["parameters"].double()
        x, labels = task_data(each.client_round, worker)
        expected = before.clone().double()
        for label in labels.unique().tolist():
            mean = torch.from_numpy(x[(labels == label).numpy()]).mean(0)
            expected[label] = theta[:640].view(10, 64) @ mean + theta[640:]
        torch.testing.assert_close(after.double(), expected, rtol=0, atol=1e-5)
        checked += 1
    assert checked == plan_.experiences


def test_the_loss_adds_the_squared_distance_of_exemplars_from_their_anchors() -> None:
    """(CE(new) + CE(exemplars) + anchor MSE(exemplars, anchors)) / 2."""
    experiment = tiny("replay", **ANCHORED)
    worker = small.worker(experiment, plan(experiment))
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    labels, anchors = torch.tensor([3, 4, 3, 0, 1]), torch.arange(100.0).view(10, 10) / 50
    client_round = ClientRound(RoundId(0, 0, 1, 0), plan(experiment), {}, {})
    client_round.scratch |= {"soft": torch.empty(2, 0), "anchors": anchors}
    found = worker.method.weighted_loss(client_round, logits, labels)  # type: ignore[attr-defined]
    new, past = (F.cross_entropy(logits[part], labels[part]) for part in (slice(3), slice(3, 5)))
    distance = (logits[3] - anchors[0]).square().sum() + (logits[4] - anchors[1]).square().sum()
    assert found == pytest.approx(float((new + past + 0.5 * distance / 20) / 2), rel=1e-6)


def test_without_anchors_nothing_is_kept_or_changed() -> None:
    """And with them accuracy changes only after the first task."""
    plain, anchored = (run(tiny("replay", weight=1.0, anchor=value)) for value in (0.0, 0.5))
    assert (plain.accuracy()[0] == anchored.accuracy()[0]).all()
    assert (plain.accuracy()[1:] != anchored.accuracy()[1:]).any()
    worker = small.worker(tiny("replay", weight=1.0), plan(tiny("replay", weight=1.0)))
    assert "anchors" not in worker.initial_states(0)[1][0]


def test_anchors_count_as_memory_on_disk() -> None:
    """Ten classes with ten logits each, in float32."""
    plain, anchored = (run(tiny("replay", weight=1.0, anchor=value)) for value in (0.0, 0.5))
    assert anchored.history[-1]["disk"] == plain.history[-1]["disk"] + 400
