"""The live model of one process: training mode, evaluation, and the one loop of SGD steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from four_classes import images, labelled
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.schema import Network, Setting, Split, Training

NORMED = Network("cnn", features=8, channels=(4,), norm="batch")
SPLIT = Split("classes", clients=2, tasks=2, classes_per_task=2)
TRAINING = Training(rounds=1, epochs=3, batch_size=16, lr=0.1, momentum=0.9)


def batch_normalised(**training: Any) -> tuple[Tensor, ClientRuntime]:
    x = images(8, 1, 8, 8)
    dataset = labelled(x, x, torch.zeros(8, dtype=torch.int64))
    setting = Setting("by hand", {}, SPLIT, NORMED, replace(TRAINING, **training))
    return x, ClientRuntime(setting, dataset)


def test_each_loop_of_steps_has_its_own_optimiser():
    """Twice the same steps from the same model, with momentum; each batch is passed on once."""
    x, runtime = batch_normalised()
    start = runtime.model.parameters.clone()
    context, seen = StepContext(), []

    def step(batch: Batch, given: StepContext) -> Tensor:
        seen.append((len(batch), given is context))
        return runtime.cross_entropy_step(batch, given)

    found = []
    for _ in range(2):
        runtime.model.load(start, runtime.untrained)
        batches = [Batch(runtime.normalise(x), torch.arange(8) % 4)] * 3
        losses = runtime.run_steps(step, batches, context)
        found.append((runtime.model.parameters.clone(), torch.stack(losses)))
    assert seen == 6 * [(8, True)]
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], start) and found[0][1].isfinite().all()


@pytest.mark.parametrize("buffers", ["shared", "local", "frozen"])
def test_frozen_buffers_do_not_change_in_training_and_others_do(buffers):
    x, runtime = batch_normalised(buffers=buffers)
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


def test_a_single_image_is_normalised_by_the_running_statistics():
    x, runtime = batch_normalised()
    expected = runtime.outputs(x[:1])
    normal = runtime.normalise(x)
    runtime.train_mode(1)
    torch.testing.assert_close(runtime.model.module(normal[:1]).detach(), expected)
    runtime.train_mode(2)
    assert not torch.equal(runtime.model.module(normal[:2]).detach()[:1], expected)
