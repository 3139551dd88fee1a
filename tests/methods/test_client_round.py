"""What a client round passes on: the model that is scored, and the number of images."""

import numpy as np
import pytest
import small
import torch
from small import P, kept, plan, run, tiny

from stamp_core.methods.base.method import LocalModel, Method

FEW = {"images_per_class": 12}


def test_the_local_model_of_the_reply_is_scored_and_not_the_live_one(monkeypatch):
    """Here one that takes every image for one of class 1."""
    experiment = tiny(split=FEW)
    fedavg = run(experiment)
    parameters = torch.zeros(P)
    parameters[P - 10 + 1] = 1
    other = LocalModel(parameters, torch.zeros(0))
    monkeypatch.setattr(Method, "local_model", lambda self, context: other)
    record = run(experiment)
    small.assert_same_weights(record, fedavg)
    np.testing.assert_array_equal(record.scores["global"], fedavg.scores["global"])
    plan_, dataset = plan(experiment), experiment.dataset()
    for client, task in small.everywhere(plan_):
        labels = dataset.y_test[plan_.test_indices(dataset, client, task)]
        share = float((labels == 1).double().mean())
        assert record.accuracy("local")[task, client, task] == pytest.approx(share)


# 24 images a client and task are batches of 16 and 8; a task leaves 8 exemplars, of earlier tasks
# in experience e there are 8 e.
@pytest.mark.parametrize(
    ("kind", "params", "counts"),
    [
        ("fedavg", {}, [24, 24, 24]),
        ("fedavg_tuned", {}, [24, 24, 24]),  # evaluation is not training
        ("replay", {"ratio": 0.5}, [24, 24 + 8 + 4, 24 + 8 + 4]),
        ("replay", {"ratio": 0.0, "memory": kept(4, selection="herding")}, [24] * 3),  # features
        ("replay", {"ratio": 4.0}, [24, 24 + 8 + 8, 24 + 16 + 16]),
        ("gem", {}, [24, 24 + 2 * 8, 24 + 2 * 16]),
        ("agem", {"reference": 5}, [24, 24 + 2 * 5, 24 + 2 * 5]),
        ("gradma", {}, [3 * 24] * 3),  # at two other points
        ("gradma", {"worker": False}, [24] * 3),
        ("stamp", {"temporal": {}}, [24, 24 + 8, 24 + 16]),  # an epoch on each past task
        ("stamp", {"temporal": {"past": "gradient", "images": 3}}, [24, 24 + 3, 24 + 6]),
        ("stamp", {"prototype": 0.1}, [24] * 3),
        ("stamp", {"prototype": 0.1, "alternate": True}, [2 * 24] * 3),  # two steps a batch
    ],
    ids=str,
)
def test_the_history_counts_the_images_that_are_encoded_for_a_gradient(kind, params, counts):
    if "memory" in {*vars(tiny(kind).params)}:
        params = {"memory": kept(4), **params}
    record = run(tiny(kind, split=FEW, **params))
    expected = [4 * counts[entry["experience"]] for entry in record.history]
    assert [entry["images"] for entry in record.history] == expected
