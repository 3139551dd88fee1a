"""Batches, normalisation, training mode and outputs of one process."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from four_classes import images, labelled
from stamp_core.client.workspace import RoundId, Workspace
from torch import Tensor

from stamp_core.client import workspace
from stamp_core.config.schema import Network, Setting, Split, Training
from stamp_core.data import dataset as data
from stamp_core.data.dataset import ImageDataset

MLP = Network("mlp", features=16)
NORMED = Network("cnn", features=8, channels=(4,), norm="batch")
SPLIT = Split("classes", clients=2, tasks=2, classes_per_task=2)
TRAINING = Training(rounds=1, epochs=3, batch_size=16, lr=0.1)
HERE = RoundId(seed=1, client=2, experience=3, round=4)


def numbered(**training: Any) -> Workspace:
    """50 training images, each filled with its own index."""
    x = torch.arange(50, dtype=torch.uint8).view(-1, 1, 1, 1).expand(50, 2, 6, 6)
    dataset = labelled(x, x[:4], torch.arange(4))
    setting = Setting("by hand", {}, SPLIT, MLP, replace(TRAINING, **training))
    return Workspace(setting, dataset)


def order(batches: Iterator[tuple[Tensor, Tensor]]) -> list[int]:
    """The labels of the batches, in order."""
    return [label for _, labels in batches for label in labels.tolist()]


# --- batches


def test_every_image_comes_once_per_epoch_with_its_label_and_short_batches_are_kept() -> None:
    """37 images in batches of 16: 16, 16 and 5, three times."""
    indices = torch.arange(3, 40)
    seen, sizes = [], []
    for batch, labels in numbered().batches(HERE, indices):
        assert torch.equal(batch, labels.float().view(-1, 1, 1, 1).expand(-1, 2, 6, 6))
        sizes.append(len(labels))
        seen += labels.tolist()
    assert sizes == 3 * [16, 16, 5]
    epochs = [seen[:37], seen[37:74], seen[74:]]
    assert all(sorted(epoch) == indices.tolist() for epoch in epochs)
    assert (
        len({tuple(epoch) for epoch in [*epochs, indices.tolist()]}) == 4
    )  # each with its own order


def test_the_order_depends_on_the_client_round_alone() -> None:
    """Not on earlier draws, other client rounds at the same time, or augmentation."""
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


@pytest.mark.parametrize("part", ["seed", "client", "experience", "round"])
def test_every_part_of_the_address_changes_the_order(part: str) -> None:
    work, indices = numbered(), torch.arange(40)
    other = replace(HERE, **{part: 9})
    assert order(work.batches(other, indices)) != order(work.batches(HERE, indices))


@pytest.mark.parametrize("network", [MLP, NORMED], ids=["mlp", "cnn"])
def test_images_normalised_once_are_those_normalised_in_every_batch(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; at most FLOATS values are, and none where every epoch augments anew."""
    x, indices = images(50, 3, 6, 6), torch.arange(40).flip(0)
    work, calls = Workspace(Setting("by hand", {}, SPLIT, network, TRAINING), noisy(x)), []
    monkeypatch.setattr(work, "normalise", counting(work.normalise, calls))
    monkeypatch.setattr(workspace, "FLOATS", 40 * 3 * 6 * 6)
    once = list(work.batches(HERE, indices))
    assert calls == [40]
    monkeypatch.setattr(workspace, "FLOATS", 40 * 3 * 6 * 6 - 1)
    for (batch, labels), (again, known) in zip(once, work.batches(HERE, indices), strict=True):
        assert torch.equal(batch, again) and torch.equal(labels, known)
        assert batch.stride() == again.stride()
    assert calls == [40, *3 * [16, 16, 8]]


def noisy(x: Tensor) -> ImageDataset:
    """These images with a mean and a deviation whose products round."""
    third = torch.full((x.shape[1],), 1 / 3)
    return replace(labelled(x, x[:4], torch.arange(4)), mean=third, std=third)


def counting(normalise: Any, calls: list[int]) -> Any:
    """`normalise`, noting how many images each call has."""

    def counted(batch: Tensor) -> Tensor:
        calls.append(len(batch))
        return normalise(batch)

    return counted


def test_without_epochs_or_images_there_are_no_batches() -> None:
    assert list(numbered(epochs=0).batches(HERE, torch.arange(40))) == []
    assert list(numbered().batches(HERE, torch.arange(0))) == []


def test_each_epoch_augments_differently_and_the_data_set_does_not_change() -> None:
    x = images(10, 1, 6, 6)
    kept = x.clone()
    setting = Setting("by hand", {}, SPLIT, MLP, replace(TRAINING, epochs=20, shift=2))
    work = Workspace(setting, labelled(x, x[:4], torch.arange(4)))
    views: dict[int, set[bytes]] = {}
    for batch, labels in work.batches(HERE, torch.arange(10)):
        for image, label in zip(batch, labels.tolist(), strict=True):
            views.setdefault(label, set()).add(image.numpy().tobytes())
    assert min(map(len, views.values())) > 5  # of 25 shifts, 20 times
    assert torch.equal(work.x_train, kept)


# --- normalisation


def test_normalised_training_images_have_mean_0_and_deviation_1() -> None:
    setting = Setting("digits", {"source": "digits"}, SPLIT, MLP, TRAINING)
    work = Workspace(setting, data.load_dataset(setting.data))
    normal = work.normalise(work.x_train)
    assert normal.dtype == torch.float32
    torch.testing.assert_close(normal.double().mean(), torch.zeros(()).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.double().std(), torch.ones(()).double(), atol=1e-4, rtol=0)


def test_each_channel_is_normalised_separately() -> None:
    """Bytes 0 and 255 are 0 and 1: mean 0.5, deviation 0.25 give -2 and 2; 0 and 0.5 give 0, 2."""
    x = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 2, 1, 2)
    dataset = labelled(x, x, torch.zeros(1, dtype=torch.int64))
    dataset = replace(dataset, mean=torch.tensor([0.5, 0.0]), std=torch.tensor([0.25, 0.5]))
    work = Workspace(Setting("by hand", {}, SPLIT, MLP, TRAINING), dataset)
    expected = torch.tensor([[-2.0, 2.0], [0.0, 2.0]]).view(1, 2, 1, 2)
    torch.testing.assert_close(work.normalise(x), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("shape", "micro_batch_size", "many"),
    [
        ((3, 32, 32), None, 512),
        ((1, 28, 28), None, 512),  # never more
        ((3, 64, 64), None, 128),  # four times the pixels, a quarter of the images
        ((3, 224, 224), None, 10),  # 512 x 1,024 / 50,176 = 10.4
        ((3, 800, 1000), None, 1),
        ((3, 32, 32), 8, 8),
        ((3, 224, 224), 64, 10),
        ((3, 224, 224), 1, 1),
    ],
)
def test_how_many_images_are_evaluated_at_once(
    shape: tuple[int, int, int], micro_batch_size: int | None, many: int
) -> None:
    assert workspace.evaluation_batch_size(shape, micro_batch_size) == many


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_evaluation_passes_have_no_more_images(micro_batch_size: int | None) -> None:
    x = images(10, 1, 64, 128)
    dataset = labelled(x, x, torch.zeros(10, dtype=torch.int64))
    setting = Setting(
        "by hand", {}, SPLIT, replace(MLP, micro_batch_size=micro_batch_size), TRAINING
    )
    work, sizes = Workspace(setting, dataset), list[int]()
    work.chunk = min(work.chunk, 4)
    encoder = work.classifier.encoder
    encoder.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    work.outputs(x)
    assert sizes == ([4, 4, 2] if micro_batch_size is None else [3, 3, 3, 1])


def test_images_stored_elsewhere_are_moved_to_the_device_batch_by_batch() -> None:
    """On torch's device without values: batches are there, and the data set is not."""
    work, sizes = numbered(epochs=1), []
    work.device = torch.device("meta")
    work.scale, work.offset = work.scale.to("meta"), work.offset.to("meta")
    for batch, labels in work.batches(HERE, torch.arange(37)):
        assert batch.device.type == labels.device.type == "meta"
        sizes.append(len(batch))
    chosen, known = work.train_images(torch.tensor([3, 5]))
    assert sizes == [16, 16, 5] and chosen.device.type == known.device.type == "meta"
    assert work.x_train.device.type == work.y_train.device.type == "cpu"


def test_train_images_are_uint8_with_their_labels() -> None:
    chosen, known = numbered().train_images(torch.tensor([30, 4, 4]))
    assert chosen.dtype == torch.uint8 and known.tolist() == [30, 4, 4]
    assert torch.equal(chosen[:, 1, 2, 3].long(), known)


# --- batch normalisation


def batch_normalised(**training: Any) -> tuple[Tensor, Workspace]:
    """Eight images, and a network with batch normalisation."""
    x = images(8, 1, 8, 8)
    dataset = labelled(x, x, torch.zeros(8, dtype=torch.int64))
    setting = Setting("by hand", {}, SPLIT, NORMED, replace(TRAINING, **training))
    return x, Workspace(setting, dataset)


@pytest.mark.parametrize(
    ("buffers", "changes"), [("shared", True), ("local", True), ("frozen", False)]
)
def test_frozen_buffers_do_not_change_in_training_and_others_do(
    buffers: Any, changes: bool
) -> None:
    x, work = batch_normalised(buffers=buffers)
    before = work.model.buffers.clone()
    work.outputs(x)
    assert torch.equal(work.model.buffers, before)  # evaluation never changes them
    work.train_mode(8)
    module = work.model.module
    module(work.normalise(x)).sum().backward()
    assert torch.equal(work.model.buffers, before) == (not changes)
    norm = next(m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d))
    assert module.training and module.head.training and norm.training == changes
    assert norm.weight.grad is not None and norm.weight.grad.any()  # scale and shift still learn


def test_a_single_image_is_normalised_by_the_running_statistics() -> None:
    """It has no variance: torch refuses it, or returns zeros."""
    x, work = batch_normalised()
    expected = work.outputs(x[:1])
    work.train_mode(1)
    torch.testing.assert_close(work.model.module(work.normalise(x[:1])).detach(), expected)
    work.train_mode(2)
    assert not torch.equal(work.model.module(work.normalise(x[:2])).detach()[:1], expected)


def test_outputs_do_not_depend_on_the_other_images() -> None:
    """In evaluation mode, with batch normalisation too."""
    x, work = batch_normalised()
    work.train_mode(8)
    alone = torch.cat([work.outputs(image[None]) for image in x])
    torch.testing.assert_close(work.outputs(x), alone)
    features = work.outputs(x, work.model.module.encoder)
    assert features.shape == (8, 8) and not features.requires_grad
