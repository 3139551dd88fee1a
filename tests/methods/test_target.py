"""TARGET: one round by hand, the meta-generator, bytes and refused parameters."""

from typing import Any

import numpy as np
import pytest
import small
import test_bytes
import torch
from by_hand import CLOSE, FULL_BATCH, Array, inputs, task_data, use_softmax_regression
from small import plan, tiny, whole
from stamp_core.client.workspace import RoundId
from test_inversion import received, server_of, synthesis
from torch import Tensor

from stamp_core.core.seeding import generator
from stamp_core.data import split
from stamp_core.methods.base import registry
from stamp_core.methods.base.method import ClientRound, Log
from stamp_core.methods.target import MetaSynthesis
from stamp_core.results.records import tree_bytes

KNOWN = [0, 3, 4]  # the classes of `server_of`


def softmax(z: Array) -> Array:
    """The softmax of rows."""
    e = np.exp(z)
    return e / e.sum(1, keepdims=True)


def logits(theta: Tensor, x: Array) -> Array:
    """W x + b of softmax regression.  # [n, 10]"""
    values = theta.detach().double().numpy()
    return x @ values[:640].reshape(10, 64).T + values[640:]


def flat(g: Array, x: Array) -> Array:
    """The gradient of W and b from that of the logits.  # [650]"""
    return np.concatenate([(g.T @ x).ravel(), g.sum(0)])


# --- one round by hand, on a linear teacher


def linear(monkeypatch: pytest.MonkeyPatch, **params: Any) -> tuple[MetaSynthesis, Tensor]:
    """A synthesis whose teacher and student are softmax regressions, and 12 images in [0, 1].

    The teacher's weights are those of the student and some noise: both often agree.
    """
    use_softmax_regression(monkeypatch)
    experiment = tiny("target", **{**small.SYNTHESIS, **params})
    worker, server = server_of(experiment)
    start = torch.randn(650, generator=generator("teacher")) / 4
    method = worker.method
    assert isinstance(method, registry.get_method("target"))
    each = method.synthesis(method, {**server, "parameters": start}, Log())
    assert isinstance(each, MetaSynthesis) and each.student is not None
    each.student.load(start + torch.randn(650, generator=generator("student")) / 8)
    return each, torch.rand(12, 1, 8, 8, generator=generator("images"))


def test_the_generators_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """On inputs x = (image - mean) / std, with logits t = W x + b and s = V x + c of the three
    known classes, p = softmax(t), q = softmax(s), and a = 1 where both predict the same class:

        L = mean_i( -oh log p_y - adv a KL(p || q) ),
        dL/dt = (oh (p - onehot) - adv a p (log p - log q - KL)) / n,  dL/ds = -adv a (q - p) / n,

    and the gradient of an image is (dL/dt W + dL/ds V) / std.
    """
    each, images = linear(monkeypatch, label_weight=0.7, adversarial_weight=1.3)
    assert each.student is not None
    each.student_ready = True
    targets = torch.arange(12) % 3
    images.requires_grad_()
    loss = each.generator_loss(images, targets)
    loss.backward()

    teacher, student = each.method.teacher_vector({"parameters": flat_of(each)}), each.student
    x = inputs_of(each, images)
    p, q = (softmax(logits(theta, x)[:, KNOWN]) for theta in (teacher, student.parameters))
    ratio = np.log(p / q)
    kl = (p * ratio).sum(1, keepdims=True)
    agree = (p.argmax(1) == q.argmax(1))[:, None]
    assert 0 < agree.sum() < 12
    onehot = np.eye(3)[targets.numpy()]
    expected = (-0.7 * np.log((p * onehot).sum(1)) - 1.3 * (agree * kl)[:, 0]).mean()
    np.testing.assert_allclose(loss.item(), expected, **CLOSE)

    dt = (0.7 * (p - onehot) - 1.3 * agree * p * (ratio - kl)) / 12
    ds = -1.3 * agree * (q - p) / 12
    w, v = (weights(theta)[KNOWN] for theta in (teacher, student.parameters))
    gradient = (dt @ w + ds @ v) / float(each.work.dataset.std)
    assert images.grad is not None
    np.testing.assert_allclose(images.grad.view(12, 64), gradient, **CLOSE)


def flat_of(each: MetaSynthesis) -> Tensor:
    """The teacher's parameters as one vector."""
    return torch.cat([p.flatten() for p in each.teacher.parameters()])


def inputs_of(each: MetaSynthesis, images: Tensor) -> Array:
    """Images in [0, 1] as a network gets them.  # [n, 64]"""
    dataset = each.work.dataset
    x = images.detach().double().numpy().reshape(-1, 64)
    return (x - float(dataset.mean)) / float(dataset.std)


def weights(theta: Tensor) -> Array:
    """W of softmax regression.  # [10, 64]"""
    return theta.detach().double().numpy()[:640].reshape(10, 64)


def test_the_students_steps_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps on all images, with T = 20: L = T^2 mean KL(p || q) with p = softmax(t / T), so
    dL/ds = T (q - p) / n; then v = g + decay theta, v' = 0.9 v + g' + decay theta'.
    """
    params = {"student_steps": 2, "student_lr": 0.05, "student_weight_decay": 0.01}
    each, images = linear(monkeypatch, **params)
    assert each.student is not None
    pool = images.mul(255).round().to(torch.uint8)
    x, teacher = inputs_of(each, pool / 255), flat_of(each)
    theta, velocity = each.student.parameters.double().numpy().copy(), np.zeros(650)
    p = softmax(logits(teacher, x)[:, KNOWN] / 20)
    for _ in range(2):
        q = softmax(logits(torch.from_numpy(theta), x)[:, KNOWN] / 20)
        g = np.zeros((12, 10))
        g[:, KNOWN] = 20 * (q - p) / 12
        velocity = 0.9 * velocity + flat(g, x) + 0.01 * theta
        theta = theta - 0.05 * velocity
    before = each.student.parameters.clone()
    each.train_student(each.student, pool)
    np.testing.assert_allclose(each.student.parameters, theta, **CLOSE)
    assert (each.student.parameters - before).abs().max() > 1e-3 and each.student_ready


def test_a_clients_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One full batch of n new images and m synthetic ones: theta' = theta - lr (g + kd h).

    g is the gradient of cross-entropy among the classes outside K, those of synthetic images;
    h that of -mean sum softmax(t / T) log softmax(s / T) over K: dL/ds = (q - p) / (m T).
    """
    use_softmax_regression(monkeypatch)
    params = {**small.SYNTHESIS, "kd": 2.0, "temperature": 3.0}
    experiment = tiny("target", training=FULL_BATCH, **params)
    own = plan(experiment).clients[0][1].classes
    past = sorted({(own[0] + step) % 10 for step in (0, 3, 4, 5)})
    worker, client_round = received(experiment, past)
    start = torch.randn(650, generator=generator("start")) / 4
    teacher = torch.randn(650, generator=generator("teacher")) / 4
    message = client_round.message | {"parameters": start, "announced teacher": teacher}
    client_round = ClientRound(client_round.round_id, client_round.plan, {}, message)
    reply = worker.method.train_client(client_round)

    distilled = [label for label in past if label not in own]
    assert 0 < len(distilled) < len(past)
    x, labels = task_data(client_round, worker)
    rest = [label for label in range(10) if label not in distilled]
    g = np.zeros((len(x), 10))
    onehot = np.eye(10)[labels.numpy()][:, rest]
    g[:, rest] = (softmax(logits(start, x)[:, rest]) - onehot) / len(x)
    kept = [place for place, label in enumerate(past) if label in distilled]
    z = inputs(worker, message["announced images"][kept])
    p, q = (softmax(logits(theta, z)[:, distilled] / 3) for theta in (teacher, start))
    h = np.zeros((len(z), 10))
    h[:, distilled] = (q - p) / (3 * len(z))
    expected = start.double().numpy() - 0.1 * (flat(g, x) + 2 * flat(h, z))
    np.testing.assert_allclose(reply.message["parameters"], expected, **CLOSE)


# --- the meta-generator


def test_a_round_is_one_step_of_the_meta_generator() -> None:
    """Adam's first step: -lr g / (|g| + eps), with g the sum of the copy's gradients and lr the
    copy's times its steps."""
    each, _ = synthesis(whole("target", generator_steps=3, generator_lr=0.002))
    assert isinstance(each, MetaSynthesis)
    before, gradients = each.meta.clone(), list[Tensor]()
    actual = each.after_backward

    def after_backward() -> None:
        gradients.append(each.generator.gradients.clone())
        actual()

    each.after_backward = after_backward  # type: ignore[method-assign]
    each.train_generator(each.draw_targets(16))
    g = torch.stack(gradients).sum(0)
    assert len(gradients) == 3 and not torch.equal(gradients[0], gradients[1])
    expected = before - 0.006 * g / (g.abs() + 1e-8)
    torch.testing.assert_close(each.meta, expected, rtol=0, atol=1e-6)


def test_every_round_starts_from_the_meta_generator_with_new_noise() -> None:
    each, _ = synthesis(whole("target"))
    assert isinstance(each, MetaSynthesis)
    each.train_generator(each.draw_targets(16))
    assert not torch.equal(each.generator.parameters, each.meta)
    one, _ = each.start_round(each.draw_targets(16))
    assert torch.equal(each.generator.parameters, each.meta) and not each.meta.grad.any()
    other, _ = each.start_round(each.draw_targets(16))
    assert one.shape == (16, 8) and one.requires_grad and not torch.equal(one, other)


# --- clients


def test_without_distillation_old_classes_are_only_masked() -> None:
    """No set is made or sent; cross-entropy omits past classes, so their rows stay."""
    experiment = tiny("target", kd=0.0, training={"rounds": 1})
    worker, client_round = received(experiment, list(range(10)))
    del client_round.message["announced images"]
    start = client_round.message["parameters"]
    after = worker.method.train_client(client_round).message["parameters"]
    own = list(plan(experiment).clients[0][1].classes)
    moved = (after - start)[-330:-10].view(10, 32).abs().sum(1)
    assert moved[own].all() and not moved[[c for c in range(10) if c not in own]].any()


def test_a_first_experience_is_fedavg_bit_for_bit() -> None:
    options: dict[str, Any] = {"split": {"tasks": 1}, "training": {"momentum": 0.9}}
    small.assert_same_weights(small.run(tiny("target", **options)), small.run(tiny(**options)))


# --- bytes


def test_the_set_of_the_paper_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """8000 images of 32 x 32 x 3 with a byte for each label, the teacher, the classes as bits."""
    work = test_bytes.workspace("local")
    params = tiny("target").params
    assert params.images == 8000
    method = registry.get_method("target")(params, work)
    server = method.initial_states(split.make_plan(work.setting.split, work.dataset, 0)).server
    past = torch.ones(100, dtype=torch.bool)
    made = torch.zeros(8000, 3, 32, 32, dtype=torch.uint8), torch.arange(8000) % 100
    monkeypatch.setattr(MetaSynthesis, "run", lambda self: made)
    first = tree_bytes(method.broadcast(server, 0))
    server = method.end_experience({**server, "classes": past, "round": 2}, Log())
    second = tree_bytes(method.broadcast(server, 0))
    assert second - first == 24_576_000 + 8000 + 4 * test_bytes.P
    plan_ = split.make_plan(work.setting.split, work.dataset, 0)
    message = method.broadcast(server, 0)
    del message["announced images"]  # a client round on them would take minutes
    reply = method.train_client(ClientRound(RoundId(0, 0, 1, 0), plan_, {}, message))
    assert tree_bytes(reply.message) == 4 * test_bytes.P + 13
