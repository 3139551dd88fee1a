"""Angles and features by hand and in the history; recording them changes no result."""

import math
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, network, normalised, plan, plans, run, slope, tiny, with_train
from torch import Tensor

from stamp_core.client import diagnostics
from stamp_core.client import runtime as runtimes
from stamp_core.client.diagnostics import mean_pair_cosine, spatial_angles
from stamp_core.client.runtime import RoundId
from stamp_core.core.seeding import generator
from stamp_core.data.plan import Plan
from stamp_core.engine import train as engine
from stamp_core.engine.worker import Worker
from stamp_core.matching.gram import gram
from stamp_core.models import networks as models

ANGLES = {"angles": True, "displacements": True}
ALL = {**ANGLES, "features": 3}
TEMPORAL = {"temporal gradients", "temporal displacements"}


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        ([(2.0, 0.0), (3.0, 0.0)], 1.0),
        ([(2.0, 0.0), (1.0, 1.0)], math.sqrt(0.5)),
        # Of six pairs one has 1, two have -1 and three 0. With each vector paired with itself the
        # mean would be (4 - 2) / 10, as in the public code before July 2025.
        ([(1.0, 0.0), (2.0, 0.0), (-1.0, 0.0), (0.0, 5.0)], -1 / 6),
        ([(1.0, 0.0), (0.0, 0.0)], math.nan),  # zeros have no direction
        ([(1.0, 0.0)], math.nan),  # no pair
        ([], math.nan),
    ],
)
def test_the_mean_cosine_of_pairs_by_hand(vectors, expected):
    products = gram(torch.tensor(vectors))[0] if vectors else torch.ones(0, 0).double()
    assert mean_pair_cosine(products) == pytest.approx(expected, abs=1e-7, nan_ok=True)


def test_the_angles_of_a_round_by_hand():
    """Updates (1, 0) and (0, 2) of the clients, (3, 0) of the server: cosines 1 and 0 with the
    server's, 0 between clients; lengths 3, and 1 and 2."""
    before, after = torch.tensor([1.0, 1.0]), torch.tensor([4.0, 1.0])
    angles = spatial_angles(before, after, [torch.tensor([2.0, 1.0]), torch.tensor([1.0, 3.0])])
    assert angles == {
        "spatial update": pytest.approx(0.5),
        "spatial clients": pytest.approx(0.0, abs=1e-7),
        "update length": pytest.approx(3.0),
        "client length": pytest.approx(1.5),
    }


def trained(experiment: Any, plan_: Plan, experience: int) -> tuple[Worker, RoundId]:
    worker = small.worker(experiment, plan_)
    client_round = small.arrived(worker, plan_, experience)
    worker.method.train_client(client_round)
    return worker, client_round


def mean_cosine(vectors: list[Tensor]) -> float:
    """Over pairs i < j, in float64."""
    table = torch.stack(vectors).double()
    unit = table / table.norm(dim=1, keepdim=True)
    cosines = [float(unit[i] @ unit[j]) for j in range(len(unit)) for i in range(j)]
    return sum(cosines) / len(cosines)


@pytest.mark.parametrize("empty", [{}, {(0, 1): ()}], ids=["three tasks", "one without images"])
def test_temporal_angles_are_those_of_gradients_and_of_updates(empty, monkeypatch):
    """Written out in plain torch, for the tasks so far that have images; evaluation passes have 100
    of them."""
    monkeypatch.setattr(runtimes, "EVALUATION_BATCH", 100)
    experiment = tiny(training={"momentum": 0.5, "epochs": 2, "batch_size": 32})
    plan_, dataset = with_train(plan(experiment), empty), experiment.dataset()
    worker, round_id = trained(experiment, plan_, 2)
    start = worker.runtime.model.parameters.clone()
    gradients, updates = [], []
    for task in {0, 1, 2} - {task for _, task in empty}:
        own = plan_.train_indices(dataset, 0, task)
        x, y = normalised(experiment, dataset.x_train[own]), dataset.y_train[own]
        net = network(experiment, start)
        gradients.append(slope(net, F.cross_entropy(net(x), y)))
        sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
        order = generator(0, 0, 2, 0, "order")
        for _ in range(2):
            for batch in torch.randperm(len(own), generator=order).split(32):
                sgd.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                sgd.step()
        updates.append(start - torch.nn.utils.parameters_to_vector(net.parameters()).detach())
    angles = diagnostics.temporal_angles(worker.runtime, plan_, round_id, displacements=True)
    assert angles["temporal gradients"] == pytest.approx(mean_cosine(gradients), abs=1e-4)
    assert angles["temporal displacements"] == pytest.approx(mean_cosine(updates), abs=1e-4)
    assert torch.equal(worker.runtime.model.parameters, start)
    cheap = diagnostics.temporal_angles(worker.runtime, plan_, round_id, displacements=False)
    assert cheap.keys() == {"temporal gradients"}
    first = RoundId(0, 0, 0, 0)  # no pair of tasks yet
    alone = diagnostics.temporal_angles(worker.runtime, plan_, first, displacements=True)
    assert all(math.isnan(value) for value in alone.values()) and alone.keys() == TEMPORAL


def test_gradients_are_taken_in_evaluation_mode():
    """With the running statistics of batch normalisation, which do not change."""
    experiment = tiny(network=BATCH_NORM)
    worker, _ = trained(experiment, plan(experiment), 1)
    buffers = worker.runtime.model.buffers
    net = network(experiment, worker.runtime.model.parameters).eval()
    net.encoder[1].running_mean.copy_(buffers[:4])
    net.encoder[1].running_var.copy_(buffers[4:])
    dataset, own = experiment.dataset(), plan(experiment).train_indices(experiment.dataset(), 0, 0)
    x, y = normalised(experiment, dataset.x_train[own]), dataset.y_train[own]
    expected = slope(net, F.cross_entropy(net(x), y))
    before = buffers.clone()
    worker.runtime.model.module.train()
    result = diagnostics.gradient(worker.runtime, own)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    assert torch.equal(buffers, before)


@pytest.mark.parametrize("kind", ["local", "joint"])
def test_what_a_method_does_not_have_is_not_recorded(kind):
    """Without a global model no spatial angles and no features; joint training has no clients."""
    record = run(tiny(kind, diagnostics=ALL))
    spatial_ = {name for entry in record.history for name in entry["angles"] if "spatial" in name}
    in_time = {name for entry in record.history for name in entry["angles"] if "temporal" in name}
    assert bool(spatial_) == bool(record.features) == (kind == "joint")
    assert in_time == (TEMPORAL if kind == "local" else set())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["fedavg", "stamp"])
def test_diagnostics_change_no_bit(kind, workers):
    """Of weights, accuracies and the history but the angles, in this process and in others; without
    them nothing is recorded."""
    options: dict[str, Any] = {
        "network": BATCH_NORM,
        "split": {"images_per_class": 20},
        "training": {"participation": 0.75, "momentum": 0.5, "shift": 1},
    }
    diagnosed = small.whole(kind, diagnostics=ALL, **options)
    both = plans(diagnosed, 0, 1)
    plain = engine.train(small.whole(kind, **options), both, 1, "cpu")
    for seed, record in engine.train(diagnosed, both, workers, "cpu").items():
        assert record.features and not plain[seed].features
        assert not any(TEMPORAL & entry["angles"].keys() for entry in plain[seed].history)
        for entry in (*record.history, *plain[seed].history):
            entry["angles"] = {}
        small.assert_same(record, plain[seed])


@pytest.mark.parametrize("net", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_features_are_those_of_the_first_test_images_after_each_experience(net, tmp_path):
    """[S, n, D] in half precision: those of the final model are the last. They are kept in the
    checkpoint of a finished run."""
    experiment = tiny(network=net, split={"cycles": 2}, diagnostics={"features": 3})
    record, dataset = run(experiment, resume=tmp_path), experiment.dataset()
    found = record.features["features"]
    assert (found.shape, found.dtype) == ((6, 30, net["features"]), np.float16)
    shown = sorted(
        i for label in range(10) for i in (dataset.y_test == label).nonzero().flatten()[:3].tolist()
    )
    np.testing.assert_array_equal(record.features["labels"], dataset.y_test[shown])
    model = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    state = {name: torch.from_numpy(value) for name, value in record.weights.items()}
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        expected = model.eval().encoder(normalised(experiment, dataset.x_test[shown]))
    np.testing.assert_allclose(found[-1].astype(float), expected, rtol=2e-3, atol=1e-4)
    assert not np.array_equal(found[0], found[-1])
    np.testing.assert_array_equal(run(experiment, resume=tmp_path).features["features"], found)
