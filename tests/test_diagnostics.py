"""Angles and features are what they are called, and looking at them changes nothing."""

import math
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, network, normalised, plan, plans, run, slope, tiny, with_train
from torch import Tensor

from stamp_core import diagnostics, engine, models, workspace
from stamp_core.diagnostics import pairs, spatial
from stamp_core.executor import Worker
from stamp_core.methods import Log
from stamp_core.rows import gram
from stamp_core.seeding import generator
from stamp_core.split import Plan
from stamp_core.workspace import Visit

ANGLES = {"angles": True, "displacements": True}
ALL = {**ANGLES, "features": 3}
IN_TIME = {"temporal gradients", "temporal displacements"}


def rows(*values: tuple[float, ...]) -> Tensor:
    """Vectors by hand."""
    return torch.tensor(values)


# ------------------------------------------------------------------ vectors by hand


@pytest.mark.parametrize(
    ("other", "cosine"),
    [((3.0, 0.0), 1.0), ((0.0, 7.0), 0.0), ((-0.5, 0.0), -1.0), ((1.0, 1.0), math.sqrt(0.5))],
)
def test_two_rows_have_the_cosine_of_their_angle(other: tuple[float, ...], cosine: float) -> None:
    """Identical 1, orthogonal 0, opposite -1, whatever their lengths."""
    assert pairs(gram(rows((2.0, 0.0), other))[0]) == pytest.approx(cosine, abs=1e-7)


def test_no_row_is_paired_with_itself_and_no_pair_counts_twice() -> None:
    """x, x, -x and y: of six pairs one has 1, two have -1 and three 0; with every row against
    itself the mean would be (4 - 2) / 10, as in the public code before July 2025."""
    four = rows((1.0, 0.0), (2.0, 0.0), (-1.0, 0.0), (0.0, 5.0))
    assert pairs(gram(four)[0]) == pytest.approx(-1 / 6)


@pytest.mark.parametrize("count", [0, 1])
def test_without_a_pair_there_is_no_angle(count: int) -> None:
    assert math.isnan(pairs(torch.ones(count, count, dtype=torch.float64)))


def test_a_row_of_zeros_has_no_angle() -> None:
    assert math.isnan(pairs(gram(rows((1.0, 0.0), (0.0, 0.0)))[0]))


def test_the_angles_of_a_round_by_hand() -> None:
    """From (1, 1) clients went by (1, 0) and (0, 2), the server by (3, 0): cosines 1 and 0 with
    its step, 0 between them; it went 3, they 1 and 2."""
    before, after = torch.tensor([1.0, 1.0]), torch.tensor([4.0, 1.0])
    found = spatial(before, after, [torch.tensor([2.0, 1.0]), torch.tensor([1.0, 3.0])])
    assert found == {
        "spatial update": pytest.approx(0.5),
        "spatial clients": pytest.approx(0.0, abs=1e-7),
        "update length": pytest.approx(3.0),
        "client length": pytest.approx(1.5),
    }


@pytest.mark.parametrize(("sign", "cosine"), [(1, 1.0), (-1, -1.0)])
def test_a_server_along_or_against_its_clients(sign: int, cosine: float) -> None:
    """Three clients that went the same way; steps start from where the server was."""
    before, way = torch.tensor([5.0, -2.0]), torch.tensor([0.5, 1.0])
    found = spatial(before, before + sign * way, [before + k * way for k in (1, 2, 4)])
    assert found["spatial update"] == pytest.approx(cosine, abs=1e-6)
    assert found["spatial clients"] == pytest.approx(1.0, abs=1e-6)


# ------------------------------------------------------------------ tasks of a client


def visited(cell: Any, plan_: Plan, step: int) -> tuple[Worker, Visit]:
    """A worker whose live model is what a client's visit has left."""
    here = small.worker(cell, plan_)
    turn = small.arrived(here, plan_, step)
    here.method.local(turn)
    return here, turn.visit


def mean_cosine(vectors: list[Tensor]) -> float:
    """Over pairs i < j, in float64."""
    table = torch.stack(vectors).double()
    unit = table / table.norm(dim=1, keepdim=True)
    found = [float(unit[i] @ unit[j]) for j in range(len(unit)) for i in range(j)]
    return sum(found) / len(found)


def test_temporal_angles_are_those_of_gradients_and_of_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Written out in plain torch; the gradient is the same in pieces of 100 pictures."""
    monkeypatch.setattr(workspace, "CHUNK", 100)
    cell = tiny(training={"momentum": 0.5, "epochs": 2, "batch": 32})
    plan_, images = plan(cell), cell.images()
    here, visit = visited(cell, plan_, 2)
    start = here.work.model.parameters.clone()
    slopes, ways = [], []
    for task in range(3):
        own = plan_.train_indices(images, 0, task)
        x, y = normalised(cell, images.x_train[own]), images.y_train[own]
        net = network(cell, start)
        slopes.append(slope(net, F.cross_entropy(net(x), y)))
        descent = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
        draw = generator(0, 0, 2, 0, "order")
        for _ in range(2):
            for batch in torch.randperm(len(own), generator=draw).split(32):
                descent.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                descent.step()
        ways.append(start - torch.nn.utils.parameters_to_vector(net.parameters()).detach())
    found = diagnostics.temporal(here.work, plan_, visit, displacements=True)
    assert found["temporal gradients"] == pytest.approx(mean_cosine(slopes), abs=1e-4)
    assert found["temporal displacements"] == pytest.approx(mean_cosine(ways), abs=1e-4)
    assert torch.equal(here.work.model.parameters, start)
    assert diagnostics.temporal(here.work, plan_, visit, displacements=False).keys() == {
        "temporal gradients"
    }


def test_equal_tasks_have_no_angle_between_them() -> None:
    """A client that meets the same pictures twice: cosine 1 of gradients and of ways."""
    cell = tiny(split={"tasks": 2})
    whole = plan(cell)
    own = tuple(whole.train_indices(cell.images(), 0, 0).tolist())
    same = with_train(whole, {(0, 0): own, (0, 1): own})
    here, visit = visited(cell, same, 1)
    found = diagnostics.temporal(here.work, same, visit, displacements=True)
    assert found == {name: pytest.approx(1.0, abs=1e-6) for name in IN_TIME}


def test_after_the_angles_the_model_is_where_it_was() -> None:
    """Parameters and the buffers of batch normalisation, bit for bit."""
    cell = tiny(network=BATCH_NORM)
    here, visit = visited(cell, plan(cell), 2)
    model = here.work.model
    before = model.parameters.clone(), model.buffers.clone()
    diagnostics.temporal(here.work, plan(cell), visit, displacements=True)
    assert torch.equal(model.parameters, before[0]) and torch.equal(model.buffers, before[1])


def test_gradients_are_taken_in_evaluation_mode() -> None:
    """With the statistics that batch normalisation has gathered, which looking does not change."""
    cell = tiny(network=BATCH_NORM)
    here, _ = visited(cell, plan(cell), 1)
    net, buffers = network(cell, here.work.model.parameters).eval(), here.work.model.buffers
    net.encoder[1].running_mean.copy_(buffers[:4])
    net.encoder[1].running_var.copy_(buffers[4:])
    images, own = cell.images(), plan(cell).train_indices(cell.images(), 0, 0)
    x, y = normalised(cell, images.x_train[own]), images.y_train[own]
    expected = slope(net, F.cross_entropy(net(x), y))
    here.work.model.module.train()
    found = diagnostics.gradient(here.work, own)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_tasks_without_pictures_and_tasks_to_come_are_left_out() -> None:
    """Of three tasks the second is empty; after the first step there is no pair yet."""
    cell = tiny()
    empty = with_train(plan(cell), {(0, 1): ()})
    here, visit = visited(cell, empty, 2)
    seen: list[int] = []
    found = diagnostics.gradient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            diagnostics, "gradient", lambda work, own: (seen.append(len(own)), found(work, own))[1]
        )
        diagnostics.temporal(here.work, empty, visit, displacements=False)
        assert len(seen) == 2 and min(seen) > 0
        alone = diagnostics.temporal(here.work, empty, Visit(0, 0, 0, 0), displacements=True)
    assert all(math.isnan(value) for value in alone.values()) and alone.keys() == IN_TIME


# ------------------------------------------------------------------ in the history


def test_angles_are_in_the_history_where_they_are_defined() -> None:
    """Between clients in every round; between tasks after each step from the second on."""
    record = run(tiny(observe=ANGLES))
    for row in record.history:
        in_time = IN_TIME if row["step"] and row["round"] else set()
        assert {name for name in row["angles"] if name.startswith("temporal")} == in_time
        assert -1 <= row["angles"]["spatial clients"] <= 1
        assert 0 < row["angles"]["spatial update"] <= 1
        assert row["angles"]["update length"] <= row["angles"]["client length"]


def test_ways_of_whole_epochs_are_gone_only_where_asked_for() -> None:
    """They cost as much as the visit, once for every task."""
    record = run(tiny(observe={"angles": True}))
    assert "temporal gradients" in record.history[-1]["angles"]
    assert not any("temporal displacements" in row["angles"] for row in record.history)


def test_one_task_or_one_client_has_no_angle() -> None:
    one_task = run(tiny(split={"tasks": 1}, observe=ANGLES))
    assert not any(IN_TIME & row["angles"].keys() for row in one_task.history)
    one_client = run(tiny(split={"clients": 1}, observe=ANGLES))
    assert not any("spatial clients" in row["angles"] for row in one_client.history)
    assert one_client.history[-1]["angles"]["spatial update"] == pytest.approx(1.0, abs=1e-6)
    assert one_client.history[-1]["angles"].keys() >= IN_TIME


def test_angles_are_means_over_clients() -> None:
    """The history's number is the mean of what each client's own visit says."""
    cell = tiny(training={"rounds": 1}, split={"tasks": 2}, observe=ANGLES)
    plan_ = plan(cell)
    here = small.worker(cell, plan_)
    server, *_ = here.begin(0)
    for step in (0, 1):
        sent = here.method.broadcast(server, 0)
        answers = [here.attend(Visit(0, u, step, 0, last=True), {}, sent) for u in range(4)]
        server = here.method.aggregate(server, [each.reply for each in answers], Log())
    row = run(cell, plan_).history[-1]["angles"]
    for name in IN_TIME:
        each = [answer.angles[name] for answer in answers]
        assert len(set(each)) == 4 and row[name] == pytest.approx(sum(each) / 4, rel=1e-12)


def test_unless_asked_nobody_looks() -> None:
    record = run(tiny())
    assert record.features == {}
    assert not any(IN_TIME & row["angles"].keys() for row in record.history)


@pytest.mark.parametrize("kind", ["local", "joint"])
def test_what_a_method_does_not_have_is_not_looked_at(kind: str) -> None:
    """Without a global model no step of it and no features; one learner has nobody's tasks."""
    record = run(tiny(kind, observe=ALL))
    spatial_ = {name for row in record.history for name in row["angles"] if "spatial" in name}
    in_time = {name for row in record.history for name in row["angles"] if "temporal" in name}
    assert bool(spatial_) == bool(record.features) == (kind == "joint")
    assert in_time == (IN_TIME if kind == "local" else set())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["fedavg", "stamp"])
def test_looking_changes_no_bit(kind: str, workers: int) -> None:
    """Weights, accuracies and all of the history but the angles, also with other processes."""
    options: dict[str, Any] = {
        "network": BATCH_NORM,
        "split": {"images_per_class": 20},
        "training": {"participation": 0.75, "momentum": 0.5, "shift": 1},
    }
    seen = small.whole(kind, observe=ALL, **options)
    made = plans(seen, 0, 1)
    looked = engine.train(seen, made, workers, "cpu")
    plain = engine.train(small.whole(kind, **options), made, 1, "cpu")
    for seed, record in looked.items():
        for row in (*record.history, *plain[seed].history):
            row["angles"] = {}
        small.assert_same(record, plain[seed])
        assert record.features


# ------------------------------------------------------------------ features


@pytest.mark.parametrize("net", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_features_are_those_of_the_first_test_pictures_after_each_step(net: dict[str, Any]) -> None:
    """[S, n, D] in half precision: what the final model makes of them stands at the last step."""
    cell = tiny(network=net, split={"cycles": 2}, observe={"features": 3})
    record, images = run(cell), cell.images()
    width = net["features"]
    assert record.features["features"].shape == (6, 30, width)
    assert record.features["features"].dtype == np.float16
    shown = sorted(
        i for label in range(10) for i in (images.y_test == label).nonzero().flatten()[:3].tolist()
    )
    np.testing.assert_array_equal(record.features["labels"], images.y_test[shown])
    model = models.build(cell.setting.network, (1, 8, 8), 10, seed=0)
    state = {name: torch.from_numpy(value) for name, value in record.weights.items()}
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        expected = model.eval().encoder(normalised(cell, images.x_test[shown]))
    np.testing.assert_allclose(
        record.features["features"][-1].astype(float), expected, rtol=2e-3, atol=1e-4
    )
    assert not np.array_equal(record.features["features"][0], record.features["features"][-1])


def test_features_are_those_of_the_model_that_is_sent() -> None:
    """Whatever the live model of the process was before."""
    cell = tiny()
    here = small.worker(cell, plan(cell))
    message = engine.model_of(here.begin(0)[0])
    here.work.model.parameters.fill_(7)
    net, shown = network(cell, message["parameters"]), torch.tensor([3, 1, 4])
    with torch.no_grad():
        expected = net.encoder(normalised(cell, cell.images().x_test[shown]))
    torch.testing.assert_close(here.describe(message, shown), expected.half(), rtol=2e-3, atol=1e-4)


def test_features_come_back_from_a_checkpoint(tmp_path: Any) -> None:
    cell = tiny(observe={"features": 2})
    record = run(cell)
    again = run(cell, resume=tmp_path)
    np.testing.assert_array_equal(record.features["features"], again.features["features"])
    resumed = run(cell, resume=tmp_path)  # from the state after the last round
    np.testing.assert_array_equal(record.features["features"], resumed.features["features"])


def test_of_a_class_with_fewer_pictures_all_are_shown() -> None:
    labels = torch.tensor([2, 0, 2, 2, 1, 0])
    assert workspace.first_of_each(labels, 2).tolist() == [0, 1, 2, 4, 5]
    assert workspace.first_of_each(labels, 0).tolist() == []
    assert workspace.first_of_each(labels[:0], 2).tolist() == []
