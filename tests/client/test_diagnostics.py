"""Angles and features by hand and in the history; recording them changes no result."""

import math
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, network, normalised, plan, plans, run, slope, tiny, with_train
from stamp_core.client.workspace import RoundId, Workspace
from torch import Tensor

from stamp_core.client import diagnostics, workspace
from stamp_core.client.diagnostics import mean_pair_cosine, spatial_angles
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine import train as engine
from stamp_core.engine.executor import Worker
from stamp_core.matching.gram import gram
from stamp_core.methods.base.method import Log
from stamp_core.models import networks as models

ANGLES = {"angles": True, "displacements": True}
ALL = {**ANGLES, "features": 3}
TEMPORAL = {"temporal gradients", "temporal displacements"}


# ------------------------------------------------------------------ vectors by hand


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        ([(2.0, 0.0), (3.0, 0.0)], 1.0),
        ([(2.0, 0.0), (0.0, 7.0)], 0.0),
        ([(2.0, 0.0), (-0.5, 0.0)], -1.0),
        ([(2.0, 0.0), (1.0, 1.0)], math.sqrt(0.5)),
        # Of six pairs one has 1, two have -1 and three 0. With each vector paired with itself the
        # mean would be (4 - 2) / 10, as in the public code before July 2025.
        ([(1.0, 0.0), (2.0, 0.0), (-1.0, 0.0), (0.0, 5.0)], -1 / 6),
        ([(1.0, 0.0), (0.0, 0.0)], math.nan),  # zeros have no direction
        ([(1.0, 0.0)], math.nan),  # no pair
    ],
)
def test_the_mean_cosine_of_pairs_by_hand(
    vectors: list[tuple[float, ...]], expected: float
) -> None:
    products = gram(torch.tensor(vectors))[0]
    assert mean_pair_cosine(products) == pytest.approx(expected, abs=1e-7, nan_ok=True)


def test_without_a_task_there_is_no_angle() -> None:
    assert math.isnan(mean_pair_cosine(torch.ones(0, 0, dtype=torch.float64)))


def test_the_angles_of_a_round_by_hand() -> None:
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


@pytest.mark.parametrize(("sign", "cosine"), [(1, 1.0), (-1, -1.0)])
def test_a_global_update_along_or_against_those_of_the_clients(sign: int, cosine: float) -> None:
    """Three clients with updates of one direction."""
    before, update = torch.tensor([5.0, -2.0]), torch.tensor([0.5, 1.0])
    angles = spatial_angles(
        before, before + sign * update, [before + k * update for k in (1, 2, 4)]
    )
    assert angles["spatial update"] == pytest.approx(cosine, abs=1e-6)
    assert angles["spatial clients"] == pytest.approx(1.0, abs=1e-6)


# ------------------------------------------------------------------ tasks of a client


def trained(experiment: Any, plan_: Plan, experience: int) -> tuple[Worker, RoundId]:
    """A worker whose live model is that after a client round."""
    worker = small.worker(experiment, plan_)
    client_round = small.arrived(worker, plan_, experience)
    worker.method.train_client(client_round)
    return worker, client_round.round_id


def mean_cosine(vectors: list[Tensor]) -> float:
    """Over pairs i < j, in float64."""
    table = torch.stack(vectors).double()
    unit = table / table.norm(dim=1, keepdim=True)
    cosines = [float(unit[i] @ unit[j]) for j in range(len(unit)) for i in range(j)]
    return sum(cosines) / len(cosines)


def test_temporal_angles_are_those_of_gradients_and_of_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Written out in plain torch; evaluation passes have 100 images."""
    monkeypatch.setattr(workspace, "EVALUATION_BATCH", 100)
    experiment = tiny(training={"momentum": 0.5, "epochs": 2, "batch_size": 32})
    plan_, dataset = plan(experiment), experiment.dataset()
    worker, round_id = trained(experiment, plan_, 2)
    start = worker.work.model.parameters.clone()
    gradients, updates = [], []
    for task in range(3):
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
    angles = diagnostics.temporal_angles(worker.work, plan_, round_id, displacements=True)
    assert angles["temporal gradients"] == pytest.approx(mean_cosine(gradients), abs=1e-4)
    assert angles["temporal displacements"] == pytest.approx(mean_cosine(updates), abs=1e-4)
    assert torch.equal(worker.work.model.parameters, start)
    assert diagnostics.temporal_angles(
        worker.work, plan_, round_id, displacements=False
    ).keys() == {"temporal gradients"}


def test_equal_tasks_have_no_angle_between_them() -> None:
    """Two tasks with the same images: cosine 1 of gradients and of updates."""
    experiment = tiny(split={"tasks": 2})
    whole = plan(experiment)
    own = tuple(whole.train_indices(experiment.dataset(), 0, 0).tolist())
    same = with_train(whole, {(0, 0): own, (0, 1): own})
    worker, round_id = trained(experiment, same, 1)
    angles = diagnostics.temporal_angles(worker.work, same, round_id, displacements=True)
    assert angles == {name: pytest.approx(1.0, abs=1e-6) for name in TEMPORAL}


def test_angles_do_not_change_the_live_model() -> None:
    """Parameters and the buffers of batch normalisation, bit for bit."""
    experiment = tiny(network=BATCH_NORM)
    worker, round_id = trained(experiment, plan(experiment), 2)
    model = worker.work.model
    before = model.parameters.clone(), model.buffers.clone()
    diagnostics.temporal_angles(worker.work, plan(experiment), round_id, displacements=True)
    assert torch.equal(model.parameters, before[0]) and torch.equal(model.buffers, before[1])


def test_gradients_are_taken_in_evaluation_mode() -> None:
    """With the running statistics of batch normalisation, which do not change."""
    experiment = tiny(network=BATCH_NORM)
    worker, _ = trained(experiment, plan(experiment), 1)
    net, buffers = (
        network(experiment, worker.work.model.parameters).eval(),
        worker.work.model.buffers,
    )
    net.encoder[1].running_mean.copy_(buffers[:4])
    net.encoder[1].running_var.copy_(buffers[4:])
    dataset, own = experiment.dataset(), plan(experiment).train_indices(experiment.dataset(), 0, 0)
    x, y = normalised(experiment, dataset.x_train[own]), dataset.y_train[own]
    expected = slope(net, F.cross_entropy(net(x), y))
    worker.work.model.module.train()
    result = diagnostics.gradient(worker.work, own)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


def test_tasks_without_images_and_future_tasks_are_excluded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three tasks the second is empty; after the first experience there is no pair yet."""
    experiment = tiny()
    empty = with_train(plan(experiment), {(0, 1): ()})
    worker, round_id = trained(experiment, empty, 2)
    counts: list[int] = []
    gradient = diagnostics.gradient

    def counted(work: Workspace, indices: Tensor) -> Tensor:
        counts.append(len(indices))
        return gradient(work, indices)

    monkeypatch.setattr(diagnostics, "gradient", counted)
    diagnostics.temporal_angles(worker.work, empty, round_id, displacements=False)
    assert len(counts) == 2 and min(counts) > 0
    first = RoundId(0, 0, 0, 0)
    alone = diagnostics.temporal_angles(worker.work, empty, first, displacements=True)
    assert all(math.isnan(value) for value in alone.values()) and alone.keys() == TEMPORAL


# ------------------------------------------------------------------ in the history


def test_angles_are_in_the_history_where_they_are_defined() -> None:
    """Between clients in every round; between tasks after each experience from the second on."""
    record = run(tiny(diagnostics=ANGLES))
    for entry in record.history:
        in_time = TEMPORAL if entry["experience"] and entry["round"] else set()
        assert {name for name in entry["angles"] if name.startswith("temporal")} == in_time
        assert -1 <= entry["angles"]["spatial clients"] <= 1
        assert 0 < entry["angles"]["spatial update"] <= 1
        assert entry["angles"]["update length"] <= entry["angles"]["client length"]


def test_displacements_are_computed_only_on_request() -> None:
    """They cost as much as the client round, once for every task."""
    record = run(tiny(diagnostics={"angles": True}))
    assert "temporal gradients" in record.history[-1]["angles"]
    assert not any("temporal displacements" in entry["angles"] for entry in record.history)


def test_one_task_or_one_client_has_no_angle() -> None:
    one_task = run(tiny(split={"tasks": 1}, diagnostics=ANGLES))
    assert not any(TEMPORAL & entry["angles"].keys() for entry in one_task.history)
    one_client = run(tiny(split={"clients": 1}, diagnostics=ANGLES))
    assert not any("spatial clients" in entry["angles"] for entry in one_client.history)
    assert one_client.history[-1]["angles"]["spatial update"] == pytest.approx(1.0, abs=1e-6)
    assert one_client.history[-1]["angles"].keys() >= TEMPORAL


def test_angles_are_means_over_clients() -> None:
    """The history has the mean of the clients' own angles."""
    experiment = tiny(training={"rounds": 1}, split={"tasks": 2}, diagnostics=ANGLES)
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    server, *_ = worker.initial_states(0)
    for experience in (0, 1):
        sent = worker.method.broadcast(server, 0)
        results = [
            worker.train_client(RoundId(0, u, experience, 0, last=True), {}, sent) for u in range(4)
        ]
        server = worker.method.aggregate(server, [each.reply for each in results], Log())
    angles = run(experiment, plan_).history[-1]["angles"]
    for name in TEMPORAL:
        each = [result.angles[name] for result in results]
        assert len(set(each)) == 4 and angles[name] == pytest.approx(sum(each) / 4, rel=1e-12)


def test_by_default_nothing_is_recorded() -> None:
    record = run(tiny())
    assert record.features == {}
    assert not any(TEMPORAL & entry["angles"].keys() for entry in record.history)


@pytest.mark.parametrize("kind", ["local", "joint"])
def test_what_a_method_does_not_have_is_not_recorded(kind: str) -> None:
    """Without a global model no spatial angles and no features; joint training has no clients."""
    record = run(tiny(kind, diagnostics=ALL))
    spatial_ = {name for entry in record.history for name in entry["angles"] if "spatial" in name}
    in_time = {name for entry in record.history for name in entry["angles"] if "temporal" in name}
    assert bool(spatial_) == bool(record.features) == (kind == "joint")
    assert in_time == (TEMPORAL if kind == "local" else set())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["fedavg", "stamp"])
def test_diagnostics_change_no_bit(kind: str, workers: int) -> None:
    """Of weights, accuracies and the history but the angles, in this process and in others."""
    options: dict[str, Any] = {
        "network": BATCH_NORM,
        "split": {"images_per_class": 20},
        "training": {"participation": 0.75, "momentum": 0.5, "shift": 1},
    }
    diagnosed = small.whole(kind, diagnostics=ALL, **options)
    both = plans(diagnosed, 0, 1)
    plain = engine.train(small.whole(kind, **options), both, 1, "cpu")
    for seed, record in engine.train(diagnosed, both, workers, "cpu").items():
        for entry in (*record.history, *plain[seed].history):
            entry["angles"] = {}
        small.assert_same(record, plain[seed])
        assert record.features


# ------------------------------------------------------------------ features


@pytest.mark.parametrize("net", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_features_are_those_of_the_first_test_images_after_each_experience(
    net: dict[str, Any],
) -> None:
    """[S, n, D] in half precision: those of the final model are the last."""
    experiment = tiny(network=net, split={"cycles": 2}, diagnostics={"features": 3})
    record, dataset = run(experiment), experiment.dataset()
    width = net["features"]
    assert record.features["features"].shape == (6, 30, width)
    assert record.features["features"].dtype == np.float16
    shown = sorted(
        i for label in range(10) for i in (dataset.y_test == label).nonzero().flatten()[:3].tolist()
    )
    np.testing.assert_array_equal(record.features["labels"], dataset.y_test[shown])
    model = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    state = {name: torch.from_numpy(value) for name, value in record.weights.items()}
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        expected = model.eval().encoder(normalised(experiment, dataset.x_test[shown]))
    np.testing.assert_allclose(
        record.features["features"][-1].astype(float), expected, rtol=2e-3, atol=1e-4
    )
    assert not np.array_equal(record.features["features"][0], record.features["features"][-1])


def test_features_are_those_of_the_model_in_the_message() -> None:
    """Not of the live model of before."""
    experiment = tiny()
    worker = small.worker(experiment, plan(experiment))
    message = engine.global_model(worker.initial_states(0)[0])
    worker.work.model.parameters.fill_(7)
    net, shown = network(experiment, message["parameters"]), torch.tensor([3, 1, 4])
    with torch.no_grad():
        expected = net.encoder(normalised(experiment, experiment.dataset().x_test[shown]))
    torch.testing.assert_close(
        worker.extract_features(message, shown), expected.half(), rtol=2e-3, atol=1e-4
    )


def test_features_come_back_from_a_checkpoint(tmp_path: Any) -> None:
    experiment = tiny(diagnostics={"features": 2})
    record = run(experiment)
    again = run(experiment, resume=tmp_path)
    np.testing.assert_array_equal(record.features["features"], again.features["features"])
    resumed = run(experiment, resume=tmp_path)  # from the state after the last round
    np.testing.assert_array_equal(record.features["features"], resumed.features["features"])
