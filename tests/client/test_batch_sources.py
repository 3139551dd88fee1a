"""Batches besides those of local epochs: in the given order, and without end."""

from itertools import islice

import pytest
import small
import torch

from stamp_core.client.batches import augment
from stamp_core.client.runtime import ClientRuntime, RoundId

ROUND = RoundId(0, 1, 2, 3)


def runtime(**training: int) -> ClientRuntime:
    experiment = small.tiny(training={"batch_size": 3, **training})
    return small.worker(experiment, small.plan(experiment)).runtime


def test_plain_batches_are_in_order_and_unchanged():
    here = runtime(shift=2)
    one, two = here.plain_batches(torch.tensor([9, 4, 7]), 2)
    assert torch.equal(torch.cat([one.images, two.images]), here.normalise(here.x_train[[9, 4, 7]]))
    assert one.targets.tolist() == here.y_train[[9, 4]].tolist()
    assert not list(here.plain_batches(torch.arange(0), 2))


@pytest.mark.parametrize("shift", [0, 2])
def test_endless_batches_have_a_new_order_each_epoch_and_are_augmented(shift):
    """Three images at a time of seven: 3 + 3 + 1 each epoch."""
    here = runtime(shift=shift)
    draw = ROUND.generator("here")
    batches = here.endless_batches(ROUND, torch.arange(10, 17), "here")
    for _ in range(3):
        order = 10 + torch.randperm(7, generator=draw)
        for indices, batch in zip(order.split(3), islice(batches, 3), strict=True):
            expected = augment(here.x_train[indices], here.training, draw)
            assert torch.equal(batch.images, here.normalise(expected))
            assert torch.equal(batch.targets, here.y_train[indices])
