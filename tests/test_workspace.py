"""Batches, augmentation and scores of one process."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stamp_core import data, workspace
from stamp_core.config import Network, Setting, Split, Training
from stamp_core.data import ImageSet
from stamp_core.records import SCORINGS
from stamp_core.seeding import generator
from stamp_core.split import Plan, Task
from stamp_core.workspace import Visit, Workspace, augment

MLP = Network("mlp", features=16)
NORMED = Network("cnn", features=8, channels=(4,), norm="batch")
SPLIT = Split("classes", clients=2, tasks=2, classes_per_task=2)
TRAINING = Training(rounds=1, epochs=3, batch=16, rate=0.1)
HERE = Visit(seed=1, client=2, step=3, round=4)


def pictures(count: int, *shape: int, seed: int = 0) -> Tensor:
    """Random pictures: no two rows, columns or mirror images alike."""
    return torch.randint(256, (count, *shape), generator=generator(seed)).to(torch.uint8)


def labelled(x: Tensor, test: Tensor, y_test: Tensor) -> ImageSet:
    """Pictures of four classes whose normalised pixels are their bytes (mean 0, deviation 1/255)
    and whose training labels are their places."""
    channels = x.shape[1]
    return ImageSet(
        "by hand",
        x_train=x,
        y_train=torch.arange(len(x)),
        x_test=test,
        y_test=y_test,
        classes=tuple("abcd"),
        domains=("all",),
        domain_train=torch.zeros(len(x), dtype=torch.int64),
        domain_test=torch.zeros(len(test), dtype=torch.int64),
        digest="by hand",
        mean=torch.zeros(channels),
        std=torch.full((channels,), 1 / 255),
    )


def numbered(**training: Any) -> Workspace:
    """50 training pictures, each filled with its own place."""
    x = torch.arange(50, dtype=torch.uint8).view(-1, 1, 1, 1).expand(50, 2, 6, 6)
    images = labelled(x, x[:4], torch.arange(4))
    setting = Setting("by hand", {}, SPLIT, MLP, replace(TRAINING, **training))
    return Workspace(setting, images)


def order(batches: Iterator[tuple[Tensor, Tensor]]) -> list[int]:
    """Which pictures come, one after the other."""
    return [label for _, labels in batches for label in labels.tolist()]


# --- batches


def test_every_picture_comes_once_an_epoch_with_its_label_and_the_short_batch_is_kept() -> None:
    """37 pictures in batches of 16: 16, 16 and 5, three times."""
    indices = torch.arange(3, 40)
    seen, sizes = [], []
    for batch, labels in numbered().batches(HERE, indices):
        assert torch.equal(batch, labels.float().view(-1, 1, 1, 1).expand(-1, 2, 6, 6))
        sizes.append(len(labels))
        seen += labels.tolist()
    assert sizes == 3 * [16, 16, 5]
    epochs = [seen[:37], seen[37:74], seen[74:]]
    assert all(sorted(epoch) == indices.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, indices.tolist()]}) == 4  # each shuffled anew


def test_the_order_depends_on_the_visit_alone() -> None:
    """Not on what was drawn before, on other visits under way, or on the augmentation."""
    indices, other = torch.arange(40), replace(HERE, client=0)
    expected = order(numbered().batches(HERE, indices))
    work = numbered(shift=2, flip=True)
    torch.manual_seed(5)
    torch.rand(7)
    before = torch.get_rng_state()
    pairs = zip(work.batches(other, indices), work.batches(HERE, indices), strict=True)
    assert order(mine for _, mine in pairs) == expected
    assert order(work.batches(replace(HERE, last=True), indices)) == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("part", ["seed", "client", "step", "round"])
def test_every_part_of_the_address_changes_the_order(part: str) -> None:
    work, indices = numbered(), torch.arange(40)
    other = replace(HERE, **{part: 9})
    assert order(work.batches(other, indices)) != order(work.batches(HERE, indices))


def test_no_epochs_or_no_pictures_are_no_batches() -> None:
    assert list(numbered(epochs=0).batches(HERE, torch.arange(40))) == []
    assert list(numbered().batches(HERE, torch.arange(0))) == []


def test_pictures_are_augmented_differently_in_each_epoch_and_the_data_stay_as_they_are() -> None:
    x = pictures(10, 1, 6, 6)
    kept = x.clone()
    setting = Setting("by hand", {}, SPLIT, MLP, replace(TRAINING, epochs=20, shift=2))
    work = Workspace(setting, labelled(x, x[:4], torch.arange(4)))
    views: dict[int, set[bytes]] = {}
    for batch, labels in work.batches(HERE, torch.arange(10)):
        for picture, label in zip(batch, labels.tolist(), strict=True):
            views.setdefault(label, set()).add(picture.numpy().tobytes())
    assert min(map(len, views.values())) > 5  # of 25 shifts, 20 times
    assert torch.equal(work.x_train, kept)


# --- normalisation


def test_normalised_training_pictures_have_mean_0_and_deviation_1() -> None:
    setting = Setting("digits", {"source": "digits"}, SPLIT, MLP, TRAINING)
    work = Workspace(setting, data.load(setting.data))
    normal = work.normalise(work.x_train)
    assert normal.dtype == torch.float32
    torch.testing.assert_close(normal.double().mean(), torch.zeros(()).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.double().std(), torch.ones(()).double(), atol=1e-4, rtol=0)


def test_each_channel_is_normalised_on_its_own() -> None:
    """Bytes 0 and 255 are 0 and 1: mean 0.5, deviation 0.25 give -2 and 2; 0 and 0.5 give 0, 2."""
    x = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 2, 1, 2)
    images = labelled(x, x, torch.zeros(1, dtype=torch.int64))
    images = replace(images, mean=torch.tensor([0.5, 0.0]), std=torch.tensor([0.25, 0.5]))
    work = Workspace(Setting("by hand", {}, SPLIT, MLP, TRAINING), images)
    expected = torch.tensor([[-2.0, 2.0], [0.0, 2.0]]).view(1, 2, 1, 2)
    torch.testing.assert_close(work.normalise(x), expected, atol=1e-6, rtol=0)


# --- augmentation


def draw(*parts: int) -> torch.Generator:
    return generator("augment", *parts)


def test_without_augmentation_pictures_stay() -> None:
    x = pictures(5, 3, 4, 4)
    assert torch.equal(augment(x, TRAINING, draw()), x)


def test_a_shift_is_a_translation_with_repeated_edges() -> None:
    """Each picture is one of the 25 cuts out of itself with its edges repeated twice, the same cut
    in every channel; 500 pictures meet every cut (one is missed with 25 * 0.96^500 < 1e-7)."""
    x = pictures(500, 3, 7, 5)
    moved = augment(x, replace(TRAINING, shift=2), draw())
    assert moved.shape == x.shape and moved.dtype == torch.uint8
    found: Counter[tuple[int, int]] = Counter()
    for before, after in zip(x.numpy(), moved.numpy(), strict=True):
        wide = np.pad(before, ((0, 0), (2, 2), (2, 2)), mode="edge")
        cuts = [
            (dy, dx)
            for dy, dx in product(range(5), range(5))
            if np.array_equal(wide[:, dy : dy + 7, dx : dx + 5], after)
        ]
        assert len(cuts) == 1
        found.update(cuts)
    assert len(found) == 25


def test_a_shift_beyond_the_picture_repeats_its_edge() -> None:
    x = pictures(50, 1, 2, 2)
    assert set(augment(x, replace(TRAINING, shift=9), draw()).unique().tolist()) <= set(
        x.unique().tolist()
    )


def test_half_of_the_pictures_are_mirrored_left_to_right() -> None:
    """Of 1000 pictures 500, give or take 5 standard deviations of sqrt(250) = 16."""
    x = pictures(1000, 3, 4, 5)
    flipped = augment(x, replace(TRAINING, flip=True), draw())
    mirrored = (flipped == x.flip(3)).flatten(1).all(1)
    assert (mirrored ^ (flipped == x).flatten(1).all(1)).all()
    assert 420 < mirrored.sum() < 580


def test_augmentation_follows_its_address() -> None:
    x, training = pictures(20, 1, 6, 6), replace(TRAINING, shift=2, flip=True)
    assert torch.equal(augment(x, training, draw(1)), augment(x, training, draw(1)))
    assert not torch.equal(augment(x, training, draw(1)), augment(x, training, draw(2)))


# --- scores

TASKS = (  # client 0 meets class b twice, client 1 none twice; nobody has a test picture of d
    (Task((0, 1)), Task((1, 2))),
    (Task((2, 3)), Task((0, 1))),
    (Task((0, 2)), Task((3,))),
)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> tuple[Workspace, Plan]:
    """An untrained network, 30 test pictures of the classes a, b and c, looked at 7 at a time."""
    monkeypatch.setattr(workspace, "CHUNK", 7)
    images = labelled(pictures(4, 1, 5, 5), pictures(30, 1, 5, 5, seed=1), torch.arange(30) % 3)
    images = replace(images, mean=torch.full((1,), 0.5), std=torch.full((1,), 0.3))
    split = replace(SPLIT, clients=3, cycles=2)
    plan = Plan(split, seed=0, data_digest="by hand", clients=TASKS, classes=4)
    return Workspace(Setting("by hand", {}, split, MLP, TRAINING), images), plan


def expected(work: Workspace, client: int, step: int, task: int, scoring: str) -> float:
    """The share of right answers, picture by picture and class by class."""
    own, met = TASKS[client][task].classes, TASKS[client][: step + 1]
    seen = {label for past in met for label in past.classes}
    allowed = {"all": {0, 1, 2, 3}, "seen": seen, "task": set(own)}[scoring]
    right = []
    for picture, label in zip(work.images.x_test, work.images.y_test.tolist(), strict=True):
        if label in own:
            with torch.no_grad():
                logits = work.model.module.eval()(work.normalise(picture[None]))[0].tolist()
            right.append(max(allowed, key=lambda answer: logits[answer]) == label)
    if not right or not set(own) <= allowed:
        return float("nan")
    return sum(right) / len(right)


@pytest.mark.parametrize("clients", [[0, 1, 2], [2], [1, 0]])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_scores_are_those_of_a_loop(
    scored: tuple[Workspace, Plan], clients: list[int], step: int
) -> None:
    work, plan = scored
    found = work.score(plan, clients, step).numpy()
    wanted = [
        [[expected(work, client, step, task, scoring) for task in range(2)] for client in clients]
        for scoring in SCORINGS
    ]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_scorings_differ_and_a_task_to_come_is_not_seen(scored: tuple[Workspace, Plan]) -> None:
    """After step 0 client 0 has met a and b: its task of b and c cannot be scored among them.
    Fewer wrong answers to choose from can only help."""
    work, plan = scored
    found = dict(zip(SCORINGS, work.score(plan, [0], 0)[:, 0], strict=True))
    assert found["seen"].isnan().tolist() == [False, True]
    assert not found["all"].isnan().any() and not found["task"].isnan().any()
    assert found["seen"][0] == found["task"][0] > found["all"][0]
    after = dict(zip(SCORINGS, work.score(plan, [0], 1)[:, 0], strict=True))
    assert (after["all"] <= after["seen"]).all() and (after["seen"] <= after["task"]).all()
    assert after["seen"].tolist() != after["task"].tolist()


def test_a_task_without_test_pictures_is_undefined(scored: tuple[Workspace, Plan]) -> None:
    work, plan = scored
    assert work.score(plan, [2], 1)[:, 0].isnan().tolist() == 3 * [[False, True]]


def test_scores_follow_the_live_model(scored: tuple[Workspace, Plan]) -> None:
    """A head that always says b is right on half of (a, b) and (b, c)."""
    work, plan = scored
    work.model.parameters.zero_()
    work.model.module.head.bias.data[1] = 1.0
    assert work.score(plan, [0], 1).tolist() == 3 * [[[0.5, 0.5]]]


# --- how many pictures at a time, and where they are kept


@pytest.mark.parametrize(
    ("shape", "at_once", "many"),
    [
        ((3, 32, 32), None, 512),
        ((1, 28, 28), None, 512),  # never more
        ((3, 64, 64), None, 128),  # four times the pixels, a quarter of the pictures
        ((3, 224, 224), None, 10),  # 512 x 1,024 / 50,176 = 10.4
        ((3, 800, 1000), None, 1),
        ((3, 32, 32), 8, 8),
        ((3, 224, 224), 64, 10),
        ((3, 224, 224), 1, 1),
    ],
)
def test_how_many_pictures_are_evaluated_at_a_time(
    shape: tuple[int, int, int], at_once: int | None, many: int
) -> None:
    assert workspace.chunk(shape, at_once) == many


@pytest.mark.parametrize("at_once", [None, 3])
def test_no_more_pictures_pass_in_evaluation(at_once: int | None) -> None:
    x = pictures(10, 1, 64, 128)
    images = labelled(x, x, torch.zeros(10, dtype=torch.int64))
    setting = Setting("by hand", {}, SPLIT, replace(MLP, at_once=at_once), TRAINING)
    work, sizes = Workspace(setting, images), list[int]()
    work.chunk = min(work.chunk, 4)
    encoder = work.classifier.encoder
    encoder.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    work.outputs(x)
    assert sizes == ([4, 4, 2] if at_once is None else [3, 3, 3, 1])


def test_scores_are_the_same_bit_for_bit_however_many_are_looked_at_at_a_time(
    scored: tuple[Workspace, Plan],
) -> None:
    work, plan = scored
    found = []
    for work.chunk in (1, 2, 7, 29, 30, 512):
        found.append(work.score(plan, [0, 1, 2], 1).numpy())
        np.testing.assert_array_equal(found[-1], found[0])
    assert np.unique(found[0][np.isfinite(found[0])]).size > 3


@pytest.mark.parametrize(("free", "home"), [(4 * 288, "cuda"), (4 * 288 - 1, "cpu")])
def test_training_pictures_stay_on_a_gpu_with_room_for_four_times_as_many(
    free: int, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 pictures of 36 bytes; the rest of the room is for models and batches."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    assert workspace.home_of(pictures(8, 1, 6, 6), torch.device("cuda")).type == home


def test_without_a_gpu_nobody_asks_for_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    assert workspace.home_of(pictures(8, 1, 6, 6), torch.device("cpu")).type == "cpu"


def test_pictures_kept_elsewhere_come_to_the_device_batch_by_batch() -> None:
    """The device is one without values: what comes is of its kind, and the rest stays at home."""
    work, sizes = numbered(epochs=1), []
    work.device = torch.device("meta")
    work.scale, work.offset = work.scale.to("meta"), work.offset.to("meta")
    for batch, labels in work.batches(HERE, torch.arange(37)):
        assert batch.device.type == labels.device.type == "meta"
        sizes.append(len(batch))
    chosen, known = work.examples(torch.tensor([3, 5]))
    assert sizes == [16, 16, 5] and chosen.device.type == known.device.type == "meta"
    assert work.x_train.device.type == work.y_train.device.type == "cpu"


def test_examples_are_training_pictures_with_their_labels() -> None:
    chosen, known = numbered().examples(torch.tensor([30, 4, 4]))
    assert chosen.dtype == torch.uint8 and known.tolist() == [30, 4, 4]
    assert torch.equal(chosen[:, 1, 2, 3].long(), known)


# --- batch normalisation


@pytest.mark.parametrize(
    ("buffers", "move"), [("shared", True), ("local", True), ("frozen", False)]
)
def test_frozen_buffers_stay_in_training_and_others_move(buffers: Any, move: bool) -> None:
    x = pictures(8, 1, 8, 8)
    training = replace(TRAINING, buffers=buffers)
    images = labelled(x, x, torch.zeros(8, dtype=torch.int64))
    work = Workspace(Setting("by hand", {}, SPLIT, NORMED, training), images)
    before = work.model.buffers.clone()
    work.outputs(x)
    assert torch.equal(work.model.buffers, before)  # evaluation never moves them
    work.train_mode(8)
    module = work.model.module
    module(work.normalise(x)).sum().backward()
    assert torch.equal(work.model.buffers, before) == (not move)
    norm = next(m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d))
    assert module.training and module.head.training and norm.training == move
    assert norm.weight.grad is not None and norm.weight.grad.any()  # scale and shift still learn


def test_a_single_picture_is_normalised_by_what_was_gathered_before() -> None:
    """It has no spread of its own: torch refuses it, or gives back zeros."""
    x = pictures(8, 1, 8, 8)
    images = labelled(x, x, torch.zeros(8, dtype=torch.int64))
    work = Workspace(Setting("by hand", {}, SPLIT, NORMED, TRAINING), images)
    expected = work.outputs(x[:1])
    work.train_mode(1)
    torch.testing.assert_close(work.model.module(work.normalise(x[:1])).detach(), expected)
    work.train_mode(2)
    assert not torch.equal(work.model.module(work.normalise(x[:2])).detach()[:1], expected)


def test_outputs_do_not_depend_on_the_other_pictures() -> None:
    """In evaluation mode, batch normalisation or not, a picture is looked at on its own."""
    x = pictures(8, 1, 8, 8)
    images = labelled(x, x, torch.zeros(8, dtype=torch.int64))
    work = Workspace(Setting("by hand", {}, SPLIT, NORMED, TRAINING), images)
    work.train_mode(8)
    alone = torch.cat([work.outputs(picture[None]) for picture in x])
    torch.testing.assert_close(work.outputs(x), alone)
    features = work.outputs(x, work.model.module.encoder)
    assert features.shape == (8, 8) and not features.requires_grad
