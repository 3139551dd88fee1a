"""VR-MCL: the meta-gradient and the recursion by hand, and what the masks hide."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from by_hand import CLOSE, FULL_BATCH, Array, inputs, softmax_gradient, use_softmax_regression
from small import BATCH_NORM, P, kept, plan, run, tiny
from stamp_core.client.workspace import RoundId
from torch import Tensor

from stamp_core.core.seeding import generator
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound
from stamp_core.methods.vrmcl import LONG, VrMcl

FEW: dict[str, Any] = {"split": {"clients": 2, "tasks": 2, "images_per_class": 20}}
NO_MEMORY: dict[str, Any] = {"memory": kept(0)}
PLAIN: dict[str, Any] = {"inner_steps": 0, "r": 0.0, "weight": None}


def arrived(experience: int, **options: Any) -> tuple[Worker, ClientRound]:
    """A client round in the only round of an experience, after one in every experience before."""
    experiment = tiny("vrmcl", **{"training": {"rounds": 1}, **options})
    worker = small.worker(experiment, plan(experiment))
    return worker, small.arrived(worker, plan(experiment), experience)


def prepared(experience: int = 1, **options: Any) -> tuple[VrMcl, ClientRound]:
    """A method with the received model and a first batch in the scratch."""
    worker, client_round = arrived(experience, **options)
    method: Any = worker.method
    method.receive(client_round)
    client_round.indices = method.train_indices(client_round)
    client_round.scratch |= {"cosines": [], "ratios": [], "masks": method.class_masks(client_round)}
    client_round.scratch["batch"] = next(iter(method.batches(client_round)))
    return method, client_round


# ------------------------------------------------------------------ the meta-gradient


@pytest.mark.parametrize(
    ("second_order", "expected"), [(True, [0.6925, -4.8595]), (False, [0.53, -5.37])]
)
def test_the_meta_gradient_of_a_quadratic_by_hand(
    second_order: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inner loss x'Ax / 2 and meta-loss x'Cx / 2 at x = (1, -2), α = 0.1: A x = (1, -1.5), so
    x1 = (0.9, -1.85), C x1 = (0.53, -5.37), and (I - 0.1 A) C x1 = (0.8 0.53 + 0.05 5.37,
    -0.05 0.53 - 0.9 5.37)."""
    a, c = torch.tensor([[2, 0.5], [0.5, 1]]), torch.tensor([[1, 0.2], [0.2, 3]])
    method, client_round = prepared(inner_steps=1, second_order=second_order, inner_lr=0.1)
    monkeypatch.setattr(method, "look_ahead", lambda tensors, *rest: tensors[0])
    monkeypatch.setattr(method, "tensors", lambda theta: [theta])
    monkeypatch.setattr(method, "weighted_loss", lambda client_round, x, labels: x @ c @ x / 2)
    name = "stamp_core.methods.vrmcl.masked_cross_entropy"
    monkeypatch.setattr(name, lambda x, labels, mask: x @ a @ x / 2)
    h = method.meta_gradient(client_round, torch.tensor([1.0, -2.0]))[1]
    torch.testing.assert_close(h, torch.tensor(expected), **CLOSE)


@pytest.mark.parametrize("inner_steps", [1, 3])
def test_the_meta_gradient_is_the_slope_of_the_meta_loss(
    inner_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax regression in float64: mean_j J(θ_j), θ_j = θ_{j-1} - α g_j(θ_{j-1}), with weight
    1 / 1.5 for new images and 0.5 / 1.5 for exemplars, and central differences of it."""
    use_softmax_regression(monkeypatch)
    method, client_round = prepared(inner_steps=inner_steps, inner_lr=0.5)
    images, labels = client_round.scratch["batch"]
    new = len(labels) - len(client_round.scratch["soft"])
    assert 0 < new < len(labels)
    x = images.flatten(1).double().numpy()
    parts = np.array_split(np.arange(new), inner_steps)
    if inner_steps == 3:  # torch's chunks: 6, 6, 4 of 16
        parts = [np.arange(0, 6), np.arange(6, 12), np.arange(12, 16)]

    def loss(theta: Array, rows: Array) -> float:
        z = x[rows] @ theta[:640].reshape(10, 64).T + theta[640:]
        own = z[np.arange(len(rows)), labels[rows].numpy()]
        return float((np.log(np.exp(z).sum(1)) - own).mean())

    def meta(theta: Array) -> float:
        losses = []
        for rows in parts:
            theta = theta - 0.5 * softmax_gradient(theta, x[rows], labels[rows])
            past = loss(theta, np.arange(new, len(labels)))
            losses.append((loss(theta, np.arange(new)) + 0.5 * past) / 1.5)
        return float(np.mean(losses))

    parameters = method.work.model.parameters
    value, h = method.meta_gradient(client_round, parameters)
    theta, found = parameters.double().numpy(), h.double().numpy()
    for seed in range(5):
        v = np.random.default_rng(seed).normal(size=650)
        slope = (meta(theta + 1e-5 * v) - meta(theta - 1e-5 * v)) / 2e-5
        assert found @ v == pytest.approx(slope, abs=1e-4)
    assert value.item() == pytest.approx(meta(theta), abs=1e-5)


def test_inner_steps_of_length_0_change_nothing() -> None:
    records = [
        run(tiny("vrmcl", inner_steps=k, inner_lr=0.0, r=0.0, **FEW)).weights for k in (0, 1, 4)
    ]
    for name, value in records[0].items():
        for other in records[1:]:
            np.testing.assert_allclose(other[name], value, rtol=0, atol=2e-5, err_msg=name)


def test_without_look_ahead_and_recursion_it_is_replay_bit_for_bit() -> None:
    small.assert_same_weights(run(tiny("vrmcl", **PLAIN)), run(tiny("replay")))


def test_the_clip_bounds_the_meta_gradient_and_the_numbers_of_inner_steps() -> None:
    method, client_round = prepared(clip=0.01)
    parameters = method.work.model.parameters
    _, slope = method.inner_slope(client_round, parameters, *client_round.scratch["batch"])
    assert float(slope.detach().abs().max()) == pytest.approx(0.01)
    h = method.meta_gradient(client_round, parameters)[1]
    assert float(h.norm()) == pytest.approx(0.01, rel=1e-5)


# ------------------------------------------------------------------ the recursion


@pytest.mark.parametrize("r", [0.0, 0.15, 0.8])
def test_three_steps_by_hand(r: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """d_b = g_b(θ_b) + r (d_{b-1} - g_b(θ_{b-1})) on batches of 16, d_0 = g_0(θ_0)."""
    use_softmax_regression(monkeypatch)
    worker, client_round = arrived(0, inner_steps=0, r=r, **NO_MEMORY)
    dataset = worker.work.dataset
    indices = client_round.plan.train_indices(dataset, 0, 0)[:48]
    monkeypatch.setattr(worker.method, "train_indices", lambda client_round: indices)
    theta = client_round.message["parameters"].double().numpy()
    order = indices[torch.randperm(48, generator=generator(0, 0, 0, 0, "order"))]
    d = before = None
    for batch in order.split(16):
        x, labels = inputs(worker, dataset.x_train[batch]), dataset.y_train[batch]
        h = softmax_gradient(theta, x, labels)
        d = h if d is None else h + r * (d - softmax_gradient(before, x, labels))
        before, theta = theta, theta - 0.1 * d
    reply = worker.method.train_client(client_round)
    np.testing.assert_allclose(reply.message["parameters"], theta, **CLOSE)
    assert reply.sgd_steps == 3 and ("cosine" in reply.log.numbers) == (r > 0)


def test_at_learning_rate_zero_directions_are_a_running_mean() -> None:
    """θ_b = θ_{b-1}: d_b = (1 - r) h_b + r d_{b-1}."""
    worker, client_round = arrived(1, training={"rounds": 1, "lr": 0.0}, r=0.6)
    method: Any = worker.method
    direction, seen = method.direction, list[tuple[Tensor, Tensor]]()

    def noted(client_round: ClientRound, h: Tensor) -> Tensor:
        d: Tensor = direction(client_round, h)
        seen.append((h, d))
        return d

    method.direction = noted
    method.train_client(client_round)
    assert len(seen) > 3 and torch.equal(*seen[0])
    for (_, before), (h, d) in pairwise(seen):
        torch.testing.assert_close(d, 0.4 * h + 0.6 * before, rtol=0, atol=1e-6)


def test_of_the_same_batch_again_the_direction_is_the_meta_gradient_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """d_{b-1} - h(θ_{b-1}) is 0 for every r, over rounds too if both are carried: a second pass
    with other draws, order or mode would not cancel."""

    def same(round_id: RoundId, purpose: str) -> torch.Generator:
        return generator(round_id.seed, round_id.client, round_id.experience, purpose)

    monkeypatch.setattr(RoundId, "generator", same)
    training = {"rounds": 5, "batch_size": 1000}
    options: dict[str, Any] = {
        "training": training,
        "split": {**FEW["split"], "tasks": 1},
        "network": BATCH_NORM,
    }
    plain = run(tiny("vrmcl", r=0.0, **options))
    small.assert_same_weights(run(tiny("vrmcl", r=0.8, carry="both", **options)), plain)
    other = run(tiny("vrmcl", r=0.8, carry="momentum", **options)).weights
    assert np.abs(other["head.weight"] - plain.weights["head.weight"]).max() > 1e-3


def test_both_passes_of_a_step_see_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, client_round = arrived(1, inner_steps=2, training={"rounds": 1, "shift": 1})
    method: Any = worker.method
    look_ahead, seen = method.look_ahead, list[Tensor]()

    def noted(tensors: Any, images: Tensor, *rest: Any) -> Tensor:
        seen.append(images)
        logits: Tensor = look_ahead(tensors, images, *rest)
        return logits

    monkeypatch.setattr(method, "look_ahead", noted)
    steps = method.train_client(client_round).sgd_steps
    assert len(seen) == 4 + (steps - 1) * 8  # the first step has one pass of each
    for start in range(4, len(seen), 8):
        for one, other in zip(seen[start : start + 4], seen[start + 4 : start + 8], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("r", "ratio"), [(0.15, 0.739), (0.25, 0.6), (0.8, 0.111)])
def test_noise_that_both_passes_share_is_averaged_out(r: float, ratio: float) -> None:
    """With h_b(θ) = n_b everywhere Var d = (1 - r) / (1 + r) Var n, in 2410 numbers at a time."""
    method, client_round = prepared(r=r)
    noise, squares = generator("noise"), []
    for step in range(100):
        h = torch.randn(P, generator=noise)
        setattr(method, "meta_gradient", lambda client_round, theta, h=h: (None, h))  # noqa: B010
        d = method.direction(client_round, h)
        if step > 30:
            squares.append(float(d.square().mean()))
    assert np.mean(squares) == pytest.approx(ratio, abs=0.01)


def test_without_recursion_nothing_is_carried() -> None:
    records = [
        run(tiny("vrmcl", r=0.0, carry=carry, **FEW)) for carry in ("none", "momentum", "both")
    ]
    for other in records[1:]:
        small.assert_same(records[0], other)


@pytest.mark.parametrize(("carry", "vectors"), [("none", 0), ("momentum", 1), ("both", 2)])
def test_a_client_keeps_its_memory_and_what_it_carries(
    carry: str, vectors: int, tmp_path: Any
) -> None:
    """States on disk come back bit-identical, and the model alone is sent."""
    options: dict[str, Any] = {"carry": carry, "r": 0.5, "memory": kept(2), **FEW}
    record = run(tiny("vrmcl", **options))
    small.assert_same(run(tiny("vrmcl", **options), resume=tmp_path), record)
    memory = run(tiny("replay", memory=kept(2), **FEW)).history
    for row, other in zip(record.history, memory, strict=True):
        assert row["disk"] - other["disk"] == 4 * P * vectors and row["bytes"] == other["bytes"]


def test_the_first_step_of_a_round_follows_what_was_carried() -> None:
    """With d alone it is (1 - r) h + r d, as if d were of the received model; with both it is
    h + r (d - h(θ)). One step in each round."""
    training = {**FULL_BATCH}
    steps = {}
    for carry in ("none", "momentum", "both"):
        options: dict[str, Any] = {"training": training, "r": 0.5, "inner_steps": 1}
        worker, client_round = arrived(1, carry=carry, **options)
        start = client_round.message["parameters"]
        end = worker.method.train_client(client_round).message["parameters"]
        steps[carry] = (start - end) / 0.1, client_round
    h, state = steps["none"][0], steps["both"][1].state
    d = steps["momentum"][1].state["d"]
    assert torch.equal(d, state["d"]) and "d" not in steps["none"][1].state
    torch.testing.assert_close(steps["momentum"][0], 0.5 * h + 0.5 * d, rtol=0, atol=1e-5)
    # the received model is the one at which d was made: only the batch is another
    assert torch.equal(state["theta"], steps["both"][1].message["parameters"])
    torch.testing.assert_close(steps["both"][0], 0.5 * h + 0.5 * d, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ masks, normalisation


@pytest.mark.parametrize("mask", ["own", "published"])
def test_masked_classes_have_no_gradient_and_no_label(mask: str) -> None:
    """Rows of the head: inner steps move those in the softmax alone."""
    method, client_round = prepared(2, mask=mask, network={"kind": "mlp", "features": 8})
    own = client_round.plan.clients[0]
    seen = {label for task in own[:3] for label in task.classes}
    current, others = set(own[2].classes), set(range(10)) - seen
    images, labels = client_round.scratch["batch"]
    new = len(labels) - len(client_round.scratch["soft"])
    parameters = method.work.model.parameters
    _, slope = method.inner_slope(client_round, parameters, images[:new], labels[:new])
    moved = method.tensors(slope)[2].abs().amax(1).nonzero().flatten().tolist()
    assert set(moved) == (current if mask == "published" else seen)
    loss, slope = method.slope(client_round, parameters, False)
    rows = method.tensors(slope)[2].abs().amax(1)
    hidden = set((rows == 0).nonzero().flatten().tolist())
    assert hidden == (set() if mask == "published" else others) and loss.isfinite()
    client_round.scratch |= {"batch": (images[:new], labels[:new]), "soft": labels[:0]}
    rows = method.tensors(method.slope(client_round, parameters, False)[1])[2].abs().amax(1)
    hidden = set((rows == 0).nonzero().flatten().tolist())
    assert hidden == (seen - current if mask == "published" else others)


def test_masks_are_the_softmax_over_fewer_classes() -> None:
    method, client_round = prepared(1, mask="published")
    images, labels = client_round.scratch["batch"]
    new = len(labels) - len(client_round.scratch["soft"])
    own = client_round.plan.clients[0]
    seen = torch.tensor(sorted({*own[0].classes, *own[1].classes}))
    future = torch.tensor(sorted(set(range(10)) - set(own[0].classes)))
    logits = method.work.classifier(images)
    means = []
    for rows, allowed in ((slice(0, new), future), (slice(new, None), seen)):
        places = torch.stack([(allowed == label).nonzero()[0, 0] for label in labels[rows]])
        means.append(F.cross_entropy(logits[rows][:, allowed], places))
    found = method.slope(client_round, method.work.model.parameters, False)[0]
    torch.testing.assert_close(found, (means[0] + 0.5 * means[1]) / 1.5)


@pytest.mark.parametrize("mask", ["own", "published"])
def test_a_class_that_is_met_again_is_never_masked(mask: str) -> None:
    """Every task has the same classes: all labels stay possible, losses stay finite."""
    split = {**FEW["split"], "cycles": 2}
    record = run(tiny("vrmcl", mask=mask, r=0.0, split=split))
    assert all(np.isfinite(row["loss"]) for row in record.history)


def test_only_the_first_pass_at_the_weights_updates_running_statistics() -> None:
    """At learning rates of 0 it sees what replay sees: buffers are bit-identical."""
    options: dict[str, Any] = {"network": BATCH_NORM, "training": {"lr": 0.0}, **FEW}
    found = run(tiny("vrmcl", inner_lr=0.0, inner_steps=3, r=0.5, **options))
    small.assert_same_weights(found, run(tiny("replay", **options)))


# ------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"second_order": False, "inner_lr": 0.1}, [LONG]),
        ({"second_order": False, "inner_lr": 0.02}, []),
        ({"inner_lr": 0.1}, []),
    ],
    ids=str,
)
def test_long_first_order_steps_are_named(options: dict[str, Any], expected: list[str]) -> None:
    worker, client_round = arrived(0, **options)
    assert worker.method.train_client(client_round).log.events == expected
