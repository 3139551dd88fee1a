"""LANDER: anchors and the map to them, balanced weights and labels, a step by hand, bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import test_bytes
import torch
import torch.nn.functional as F
from by_hand import CLOSE, FULL_BATCH, inputs, task_data, use_softmax_regression
from small import P, plan, run, tiny, whole
from stamp_core.client.workspace import RoundId
from test_inversion import received, server_of, synthesis
from torch import Tensor

from stamp_core.config.decode import ParameterError
from stamp_core.core import paths
from stamp_core.core.seeding import generator
from stamp_core.data import split
from stamp_core.methods.base import registry
from stamp_core.methods.base.method import ClientRound, Log, Reply
from stamp_core.methods.lander import (
    ANCHOR_DEVIATION,
    AnchoredSynthesis,
    LanderParams,
    anchor_hinge,
    balance,
)
from stamp_core.models.generators import NoisyLabelGenerator
from stamp_core.results.records import tree_bytes

M = 32 * 6 + 6  # the map of the small network to anchors of six numbers


# --- losses


@pytest.mark.parametrize(
    ("known", "total", "current", "past"),
    [
        (20, 40, 0.347, 1.242),
        (80, 100, 0.263, 2.029),
        (2, 4, 0.461, 0.448),
        (98, 100, 0.238, 2.246),
    ],
)
def test_balanced_weights_are_those_published(
    known: int, total: int, current: float, past: float
) -> None:
    new, old = balance(known, total - known)
    assert (round(0.2 * new, 3), round(0.4 * old, 3)) == (current, past)


def test_the_hinge_is_on_the_mean_of_a_batch() -> None:
    """Squares 0, 0, 0.04 and 0 with the mean 0.01: below a radius of 0.015 nothing is lost."""
    anchors = torch.zeros(2, 2)
    mapped = torch.tensor([[0.0, 0.0], [0.2, 0.0]], requires_grad=True)
    assert anchor_hinge(mapped, anchors, 0.015).item() == 0
    loss = anchor_hinge(mapped, anchors, 0.006)
    np.testing.assert_allclose(loss.item(), 0.004, **CLOSE)
    assert anchor_hinge(anchors, anchors, 0.0).item() == 0
    (gradient,) = torch.autograd.grad(anchor_hinge(mapped, anchors, 0.015), mapped)
    assert not gradient.any()


def test_a_clients_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One full batch with replay, on logits z = W x + b and mapped features a = A x + c:

        L = w (CE(z, y) + 5 hinge) + v (soft CE(z', t') + mean (a' - a_t')^2),

    with w and v for three past classes and two own ones. Softmax regression has no encoder, so
    the map's gradient is that of the two distances alone, and the classifier's that of the rest.
    """
    use_softmax_regression(monkeypatch)
    params: dict[str, Any] = {**small.SYNTHESIS, "anchor_features": 6, "radius": 0.01}
    experiment = tiny("lander", training={**FULL_BATCH, "weight_decay": 0.01}, **params)
    own = plan(experiment).clients[0][1].classes
    past = [label for label in range(10) if label not in own][:3]
    worker, client_round = received(experiment, past)
    draw = generator("vectors")
    start, teacher, map_, teacher_map = (
        torch.randn(n, generator=draw) / 4 for n in (650, 650, 390, 390)
    )
    both = torch.cat([teacher, teacher_map])
    message = client_round.message | {"parameters": start, "map": map_, "announced teacher": both}
    client_round = ClientRound(client_round.round_id, client_round.plan, {}, message)
    reply = worker.method.train_client(client_round)

    x, labels = task_data(client_round, worker)
    y = inputs(worker, message["announced images"])
    anchors = message["anchors"].double().numpy()[labels.numpy()]
    a, b, t = ((of @ matrix(m).T + tail(m)) for of, m in ((x, map_), (y, map_), (y, teacher_map)))
    assert np.square(a - anchors).mean() > 0.01
    w, v = (f * g for f, g in zip((0.2, 0.4), balance(3, 2), strict=True))
    near, far = 2 * 5 * w * (a - anchors) / a.size, 2 * v * (b - t) / b.size
    gradient = np.concatenate([(near.T @ x + far.T @ y).ravel(), near.sum(0) + far.sum(0)])
    step = gradient + 0.01 * map_.double().numpy()
    np.testing.assert_allclose(
        reply.message["map"], map_.double().numpy() - 0.1 * step, rtol=0, atol=2e-6
    )

    theta = start.clone().requires_grad_()
    z, s, t_ = (
        torch.from_numpy(of).float() @ m[:640].view(10, 64).T + m[640:]
        for of, m in ((x, theta), (y, theta), (y, teacher))
    )
    rest = [label for label in range(10) if label not in past]
    targets = torch.tensor([rest.index(label) for label in labels.tolist()])
    soft = -((t_[:, past] / 2).softmax(1) * (s[:, past] / 2).log_softmax(1)).sum(1).mean()
    (w * F.cross_entropy(z[:, rest], targets) + v * soft).backward()
    assert theta.grad is not None
    expected = start - 0.1 * (theta.grad + 0.01 * start)
    torch.testing.assert_close(reply.message["parameters"], expected, rtol=0, atol=2e-6)


def matrix(map_: Tensor) -> np.ndarray:
    """The weights of a map from 64 to 6 numbers."""
    return map_[:384].double().numpy().reshape(6, 64)


def tail(map_: Tensor) -> np.ndarray:
    """The biases of the same."""
    return map_[384:].double().numpy()


def test_anchors_draw_features_towards_them() -> None:
    """Over a whole run the map brings features closer to the anchors of their classes."""
    distances = []
    for weight in (0.0, 20.0):
        experiment = whole("lander", split={"tasks": 1}, anchor_weight=weight, radius=0.0)
        worker, plan_ = small.worker(experiment, plan(experiment)), plan(experiment)
        server, states, *_ = worker.initial_states(0)
        for round_ in range(2):
            replies = [
                worker.train_client(
                    RoundId(0, u, 0, round_), states[u], worker.method.broadcast(server, u)
                ).reply
                for u in range(4)
            ]
            states = [reply.state for reply in replies]
            server = worker.method.aggregate(server, replies, Log())
        work, data = worker.work, experiment.dataset()
        indices = plan_.train_indices(data, 0, 0)
        work.model.load(server["parameters"])
        features = work.outputs(data.x_train[indices], work.classifier.encode)
        mapped = features @ server["map"][: 32 * 6].view(6, 32).T + server["map"][32 * 6 :]
        anchors = server["anchors"].float()[data.y_train[indices]]
        distances.append(float(F.mse_loss(mapped, anchors)))
    assert distances[1] < distances[0] / 2


# --- the map and the anchors on their way


def test_the_map_is_averaged_like_the_model() -> None:
    """By samples and with the server's learning rate; a client without samples does not count."""
    worker, server = server_of(whole("lander", server_lr=0.5))
    start = server["map"].clone()
    replies = [
        Reply(client, {}, {"parameters": server["parameters"], "map": start + shift}, n, 1, 0.0)
        for client, n, shift in ((0, 1, 1.0), (1, 3, 3.0), (2, 0, torch.nan))
    ]
    after = worker.method.aggregate(server, replies, Log())
    torch.testing.assert_close(after["map"], start + 0.5 * 2.5)
    assert torch.equal(server["map"], start) and after["holders"] == [0, 1, 2]
    assert torch.equal(worker.method.aggregate(server, [], Log())["map"], start)


def test_a_client_receives_the_anchors_until_it_has_replied() -> None:
    worker, server = server_of(whole("lander"))
    method = worker.method
    reply = Reply(1, {}, {"parameters": server["parameters"], "map": server["map"]}, 1, 1, 0.0)
    after = method.aggregate(server, [reply], Log())
    for state, held in ((server, set()), (after, {1})):
        without = {u for u in range(4) if "anchors" not in method.broadcast(state, u)}
        assert without == held


def test_clients_keep_the_anchors_exactly() -> None:
    """They are in float16 on the way and in the state, in every round."""
    experiment = whole("lander")
    worker, plan_ = small.worker(experiment, plan(experiment)), plan(experiment)
    server, states, *_ = worker.initial_states(0)
    first = worker.method.broadcast(server, 0)
    state = worker.train_client(RoundId(0, 0, 0, 0), states[0], first).reply.state
    later = {name: value for name, value in first.items() if name != "anchors"}
    client_round = ClientRound(RoundId(0, 0, 0, 1), plan_, state, later)
    state = worker.method.train_client(client_round).state
    assert state["anchors"].dtype == torch.float16
    assert torch.equal(state["anchors"], server["anchors"])


def test_random_anchors_are_as_far_apart_as_published() -> None:
    """The mean squared difference of two rows of CIFAR-100's table is 0.081."""
    experiment = tiny("lander")
    servers = [small.worker(experiment, plan(experiment, s)).initial_states(s)[0] for s in (0, 1)]
    one, other = (server["anchors"] for server in servers)
    assert one.shape == (10, 512) and one.dtype == torch.float16 and not torch.equal(one, other)
    squares = torch.cdist(one.float(), one.float()).square() / 512
    assert abs(float(squares.sum()) / 90 - 0.081) < 0.01
    assert LanderParams().radius < 0.081 < 3 * ANCHOR_DEVIATION**2


# --- anchors from a file


def file_of(folder: Path, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `table.npy` in the folder of downloads."""
    monkeypatch.setattr(paths, "RAW", folder)
    np.save(folder / "table.npy", rows)


def test_anchors_are_the_rows_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ten of twelve rows for ten classes, and the map is as wide as they are."""
    rows = np.arange(60, dtype=np.float64).reshape(12, 5) / 8
    file_of(tmp_path, rows, monkeypatch)
    worker, server = server_of(whole("lander", anchors="table.npy"))
    assert torch.equal(server["anchors"], torch.from_numpy(rows[:10]).half())
    assert server["map"].shape == (32 * 5 + 5,)
    assert len(worker.method.end_experience(server, Log())["replay"]["images"]) == 40


def test_other_anchors_are_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same name with other numbers: records of the first do not stand for the second."""
    experiment, found = whole("lander", anchors="table.npy"), []
    for rows in (np.zeros((10, 2)), np.ones((10, 2))):
        file_of(tmp_path, rows, monkeypatch)
        found.append(experiment.identity(plan(experiment), "cpu"))
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"anchors"}
    assert "anchors" not in whole("lander").identity(plan(experiment), "cpu")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((9, 5)), "a table with a row per class: .*table.npy has 9 rows for 10 classes"),
        (np.zeros(10), r"a table of numbers, a row per class: .* is float64 \[10\]"),
        (np.full((10, 2), "a"), "a table of numbers, a row per class: .* is <U1"),
        (np.full((10, 2), 1e9), "a table of finite numbers in float16"),
        (np.full((10, 2), np.nan), "a table of finite numbers in float16"),
        (np.array([{}]), "a .npy file of numbers: .*table.npy is not one"),
    ],
)
def test_files_without_anchors_are_refused(
    rows: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(tmp_path, rows, monkeypatch)
    with pytest.raises(ParameterError, match=f"anchors is 'table.npy'; it must be {message}"):
        small.worker(tiny("lander", anchors="table.npy"))


def test_files_that_are_missing_or_empty_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "RAW", tmp_path)
    (tmp_path / "empty.npy").touch()
    for name, message in (("no.npy", "there is none at"), ("empty.npy", "is not one")):
        with pytest.raises(ParameterError, match=f"anchors is '{name}'.*{message}"):
            small.worker(tiny("lander", anchors=name))


# --- synthesis


def test_labels_are_balanced() -> None:
    """256 of 100 classes: twice all in turn, then 56 at random."""
    each, _ = synthesis(whole("lander"))
    each.classes = torch.arange(100)
    targets = each.draw_targets(256)
    assert torch.equal(targets[:200], torch.arange(100).repeat(2))
    assert len(targets) == 256 and targets[200:].max() < 100
    each.classes = torch.arange(300)  # more classes than images
    assert len(each.draw_targets(256)) == 256


def test_a_round_starts_with_new_noisy_layers_and_the_trained_rest() -> None:
    each, _ = synthesis(whole("lander"))
    module = each.generator.module
    assert isinstance(module, NoisyLabelGenerator)
    targets, states = each.draw_targets(16), list[dict[str, Tensor]]()
    for _ in range(2):
        before = small.copied(dict(module.state_dict()))
        inputs_, _ = each.start_round(targets)
        states.append(small.copied(dict(module.state_dict())))
        changed = {name for name in before if not torch.equal(before[name], states[-1][name])}
        assert changed <= {"weight", "bias"} and "weight" in changed
        each.train_generator(targets)
    assert not torch.equal(
        states[0]["generator.project.weight"], states[1]["generator.project.weight"]
    )
    assert isinstance(each, AnchoredSynthesis) and torch.equal(inputs_, each.anchors[targets])


def test_images_of_the_first_rounds_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds to warm up, then three for 40 images; the student learns from the third on."""
    each, _ = synthesis(whole("lander", warmup=2))
    made, pools = list[Tensor](), list[int]()
    actual = AnchoredSynthesis.train_generator

    def train_generator(self: AnchoredSynthesis, targets: Tensor) -> Tensor | None:
        images = actual(self, targets)
        assert images is not None
        made.append(images.mul(255).round().to(torch.uint8))
        return images

    monkeypatch.setattr(AnchoredSynthesis, "train_generator", train_generator)
    monkeypatch.setattr(
        AnchoredSynthesis, "train_student", lambda self, student, pool: pools.append(len(pool))
    )
    images, _ = each.run()
    assert len(made) == 5 and pools == [16, 32, 48]
    assert torch.equal(images, torch.cat(made[2:])[:40])


def test_the_published_rounds() -> None:
    """Ten to warm up and 40 for 10,000 images, as 256 at a time make 10,240."""
    params = LanderParams()
    assert params.warmup + params.saved_rounds == 50 and 40 * 256 >= params.images == 10_000


def test_the_student_learns_mapped_features_too() -> None:
    """Equal logits and other mapped features: 5 times their mean squared difference."""
    each, _ = synthesis(whole("lander"))
    logits = torch.randn(4, 10, generator=generator("logits"))
    one, other = torch.zeros(4, 6), torch.full((4, 6), 0.5)
    assert each.student_loss((logits, one), (logits, one)).item() == 0
    np.testing.assert_allclose(each.student_loss((logits, one), (logits, other)).item(), 1.25)


def test_images_are_to_lie_near_their_anchors() -> None:
    """The teacher's loss: 0.5 of cross-entropy, and 5 times the hinge at radius 0.015."""
    each, _ = synthesis(whole("lander"))
    assert isinstance(each, AnchoredSynthesis)
    logits, targets = torch.zeros(3, 10), torch.tensor([0, 1, 2])
    near = each.anchors[targets]
    losses = [each.teacher_loss((logits, mapped), targets).item() for mapped in (near, near + 0.2)]
    np.testing.assert_allclose(losses, [np.log(3) / 2, np.log(3) / 2 + 5 * 0.025], **CLOSE)


# --- bytes


def test_the_map_and_the_anchors_of_the_paper_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """262,656 numbers each way in every round, the anchors once, 10,000 images in an experience."""
    work = test_bytes.workspace("local")
    method = registry.get_method("lander")(tiny("lander").params, work)
    server = method.initial_states(split.make_plan(work.setting.split, work.dataset, 0)).server
    assert server["map"].nbytes == 1_050_624 and server["anchors"].nbytes == 102_400
    model = 4 * test_bytes.P + 1_050_624
    assert tree_bytes(method.broadcast(server, 0)) == model + 102_400 + 13
    past = torch.ones(100, dtype=torch.bool)
    made = torch.zeros(10_000, 3, 32, 32, dtype=torch.uint8), torch.arange(10_000) % 100
    monkeypatch.setattr(AnchoredSynthesis, "run", lambda self: made)
    server = {**server, "holders": [0], "classes": past, "round": 2}
    second = tree_bytes(method.broadcast(method.end_experience(server, Log()), 0))
    assert second == 2 * model + 13 + 30_720_000 + 10_000


def test_every_round_sends_the_map() -> None:
    record = run(whole("lander"))
    up = [entry["bytes"]["up"] for entry in record.history]
    assert up[1::2] == 3 * [4 * 4 * (P + M)] and up[::2] == 3 * [4 * (4 * (P + M) + 2)]


# --- refused parameters
