"""Batches: their order, augmentation and normalisation, images by class; the mode of training."""

from collections import Counter
from dataclasses import replace
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
import torch
from four_classes import images, labelled
from torch import Tensor

from stamp_core.client import runtime as runtimes
from stamp_core.client.batches import Batch, append_exemplars, augment
from stamp_core.client.by_class import sample_balanced
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.schema import Network, Setting, Split, Training
from stamp_core.core.seeding import generator

MLP = Network("mlp", features=16)
CNN = Network("cnn", features=8, channels=(4,), norm="batch")
SPLIT = Split("classes", clients=2, tasks=2, classes_per_task=2)
TRAINING = Training(rounds=1, epochs=3, batch_size=16, lr=0.1)
HERE = RoundId(seed=1, client=2, experience=3, round=4)


def runtime_of(x: Tensor, network: Network = MLP, **training: Any) -> ClientRuntime:
    """A client's runtime with training images whose labels are their numbers."""
    setting = Setting("by hand", {}, SPLIT, network, replace(TRAINING, **training))
    return ClientRuntime(setting, labelled(x, x[:4], torch.arange(4)))


def test_a_shift_is_a_translation_with_repeated_edges():
    """Each image is one of the 25 cuts out of itself with its edges repeated twice, the same cut
    in every channel; 500 images meet every cut (one is missed with 25 * 0.96^500 < 1e-7)."""
    x = images(500, 3, 7, 5)
    moved = augment(x, replace(TRAINING, shift=2), generator("augment"))
    assert moved.shape == x.shape and moved.dtype == torch.uint8
    counts: Counter[tuple[int, int]] = Counter()
    for before, after in zip(x.numpy(), moved.numpy(), strict=True):
        wide = np.pad(before, ((0, 0), (2, 2), (2, 2)), mode="edge")
        cuts = [
            (dy, dx)
            for dy, dx in product(range(5), range(5))
            if np.array_equal(wide[:, dy : dy + 7, dx : dx + 5], after)
        ]
        assert len(cuts) == 1
        counts.update(cuts)
    assert len(counts) == 25


def test_half_of_the_images_are_mirrored_left_to_right():
    """Of 1000 images 500, give or take 5 standard deviations of sqrt(250) = 16."""
    x = images(1000, 3, 4, 5)
    flipped = augment(x, replace(TRAINING, flip=True), generator("augment"))
    mirrored = (flipped == x.flip(3)).flatten(1).all(1)
    assert (mirrored ^ (flipped == x).flatten(1).all(1)).all()
    assert 420 < mirrored.sum() < 580


def test_each_epoch_augments_differently_and_augmentation_does_not_change_the_order():
    """Nor do the batches of another client round that are drawn at the same time."""
    x = images(40, 1, 6, 6)
    before = x.clone()
    plain = runtime_of(x, epochs=20)
    expected = [batch.targets.tolist() for batch in plain.batches(HERE, torch.arange(40))]
    moving = runtime_of(x, epochs=20, shift=2, flip=True)
    other = moving.batches(replace(HERE, client=0), torch.arange(40))
    found, views = [], dict[int, set[bytes]]()
    for batch, _ in zip(moving.batches(HERE, torch.arange(40)), other, strict=True):
        found.append(batch.targets.tolist())
        for image, label in zip(batch.images, found[-1], strict=True):
            views.setdefault(label, set()).add(image.numpy().tobytes())
    assert found == expected
    assert min(map(len, views.values())) > 5  # of 50 views, 20 times
    assert torch.equal(moving.x_train, before)


def test_exemplars_bring_their_soft_labels_and_a_batch_without_any_is_unchanged():
    new = Batch(torch.zeros(3, 1, 2, 2), torch.tensor([1, 1, 2]))
    past = Batch(torch.ones(2, 1, 2, 2), torch.tensor([7, 8]), soft=torch.eye(2))
    assert append_exemplars(new, past).soft is past.soft
    none = Batch(past.images[:0], past.targets[:0], soft=past.soft[:0])
    assert append_exemplars(new, none) is new


@pytest.mark.parametrize("network", [MLP, CNN], ids=["mlp", "cnn"])
def test_images_normalised_once_are_those_normalised_in_every_batch(network, monkeypatch):
    """Bit for bit and in the same layout; at most FLOATS values are."""
    x = images(50, 3, 6, 6)
    third = torch.full((3,), 1 / 3)  # whose products round
    dataset = replace(labelled(x, x[:4], torch.arange(4)), mean=third, std=third)
    runtime = ClientRuntime(Setting("by hand", {}, SPLIT, network, TRAINING), dataset)
    normalise, calls = runtime.normalise, list[int]()

    def counted(batch: Tensor) -> Tensor:
        calls.append(len(batch))
        return normalise(batch)

    monkeypatch.setattr(runtime, "normalise", counted)
    found = []
    for room, expected in ((0, [40]), (-1, 3 * [16, 16, 8])):
        calls.clear()
        monkeypatch.setattr(runtimes, "FLOATS", 40 * 3 * 6 * 6 + room)
        found.append(list(runtime.batches(HERE, torch.arange(40).flip(0))))
        assert calls == expected
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.images, other.images) and torch.equal(one.targets, other.targets)
        assert one.images.stride() == other.images.stride()


def test_plain_batches_are_in_the_given_order_and_unchanged():
    runtime = runtime_of(images(10, 1, 6, 6), shift=2)
    one, two = runtime.plain_batches(torch.tensor([9, 4, 7]), 2)
    found = torch.cat([one.images, two.images])
    assert torch.equal(found, runtime.normalise(runtime.x_train[[9, 4, 7]]))
    assert one.targets.tolist() == [9, 4]
    assert not list(runtime.plain_batches(torch.arange(0), 2))


@pytest.mark.parametrize("shift", [0, 2])
def test_endless_batches_have_a_new_order_each_epoch_and_are_augmented(shift):
    """Three images at a time of seven: 3 + 3 + 1 each epoch."""
    runtime = runtime_of(images(20, 1, 6, 6), batch_size=3, shift=shift)
    draw = HERE.generator("here")
    batches = runtime.endless_batches(HERE, torch.arange(10, 17), "here")
    for _ in range(3):
        order = 10 + torch.randperm(7, generator=draw)
        for indices, batch in zip(order.split(3), islice(batches, 3), strict=True):
            expected = augment(runtime.x_train[indices], runtime.training, draw)
            assert torch.equal(batch.images, runtime.normalise(expected))
            assert torch.equal(batch.targets, indices)


def test_images_stored_elsewhere_are_moved_to_the_device_batch_by_batch():
    """On torch's device without values: batches are there, and the data set is not."""
    runtime = runtime_of(images(50, 1, 6, 6), epochs=1)
    runtime.device = torch.device("meta")
    runtime.scale, runtime.offset = runtime.scale.to("meta"), runtime.offset.to("meta")
    batches = list(runtime.batches(HERE, torch.arange(37)))
    chosen, known = runtime.train_images(torch.tensor([3, 5]))
    tensors = [each for batch in batches for each in (batch.images, batch.targets)]
    assert {each.device.type for each in [*tensors, chosen, known]} == {"meta"}
    assert [len(batch) for batch in batches] == [16, 16, 5]
    assert runtime.x_train.device.type == runtime.y_train.device.type == "cpu"


def test_each_channel_is_normalised_separately():
    """Bytes 0 and 255 are 0 and 1: mean 0.5, deviation 0.25 give -2 and 2; 0 and 0.5 give 0, 2."""
    x = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 2, 1, 2)
    dataset = labelled(x, x, torch.zeros(1, dtype=torch.int64))
    dataset = replace(dataset, mean=torch.tensor([0.5, 0.0]), std=torch.tensor([0.25, 0.5]))
    runtime = ClientRuntime(Setting("by hand", {}, SPLIT, MLP, TRAINING), dataset)
    expected = torch.tensor([[-2.0, 2.0], [0.0, 2.0]]).view(1, 2, 1, 2)
    torch.testing.assert_close(runtime.normalise(x), expected, atol=1e-6, rtol=0)


def test_a_balanced_sample_has_as_many_images_of_each_class():
    """Of 9, 2 and 5 images, 8 are 3, 2 and 3; each is there once."""
    order = torch.randperm(16, generator=generator("order"))
    labels = torch.tensor([0] * 9 + [1] * 2 + [2] * 5)[order]
    sample, another = (sample_balanced(labels, 8, generator("balanced", k)) for k in range(2))
    assert len(sample.unique()) == 8
    assert sorted(labels[sample].bincount().tolist()) == [2, 3, 3]
    assert sample_balanced(labels, 16, generator("balanced")).tolist() == [*range(16)]
    assert sorted(another.tolist()) != sorted(sample.tolist())


@pytest.mark.parametrize("buffers", ["shared", "local", "frozen"])
def test_frozen_buffers_do_not_change_in_training_and_others_do(buffers):
    x = images(8, 1, 8, 8)
    runtime = runtime_of(x, CNN, buffers=buffers)
    changes = buffers != "frozen"
    before = runtime.model.buffers.clone()
    runtime.outputs(x)
    assert torch.equal(runtime.model.buffers, before)  # evaluation never changes them
    runtime.train_mode(8)
    module = runtime.model.module
    module(runtime.normalise(x)).sum().backward()
    assert torch.equal(runtime.model.buffers, before) == (not changes)
    norm = next(m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d))
    assert module.training and norm.training == changes
    assert norm.weight.grad is not None and norm.weight.grad.any()  # scale and shift still learn
