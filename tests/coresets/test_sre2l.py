"""SRe2L: statistics and images by hand, the teacher and its logits, quotas, divergence."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from rule_tasks import BATCH_NORM, CLASSES, MLP, NETWORKS, Array, float_buffers, generator
from rule_tasks import sre2l_task as make_task
from torch import Tensor, nn

from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection import base
from stamp_core.coresets.selection.base import TaskData
from stamp_core.models.networks import Classifier, set_train_mode
from workbench.selection import sre2l

NO_NORM = "sre2l: no batch normalisation, no statistics to match"
NO_SQUEEZE = "sre2l: the squeeze did not lower the loss"
REPLACED = "sre2l: real images in place of synthetic ones that are not finite"


def per_channel(images: Tensor) -> Tensor:
    channels = images.shape[1]
    mean, std = torch.tensor([0.2, 0.5, 0.7])[:channels], torch.tensor([0.5, 0.1, 0.3])[:channels]
    return (images.float() / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)


class Backwards(nn.Module):
    def __init__(self, first: nn.Sequential, second: nn.Sequential) -> None:
        super().__init__()
        self.second, self.first = second, first

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.second(self.first(images))
        return features


def two_norms() -> Classifier:
    """A network with two batch normalisations, registered in reverse order of execution."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh())
        second = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * 36), nn.Linear(3 * 36, 5))
        network = Classifier(Backwards(first, second), 5, CLASSES)
        for norm in network.norms:
            nn.init.uniform_(norm.weight, 0.5, 2)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.2, 3)
    return network.eval()


Layer = tuple[float, Tensor, tuple[Tensor, Tensor]]


def layers_of(network: Classifier, images: Tensor) -> list[Layer]:
    """Weight, input, running mean and variance of each normalisation, without hooks."""
    if not isinstance(network.encoder, Backwards):
        return []
    first, second = network.encoder.first, network.encoder.second
    inputs = first[0](images), second[0](first(images))
    norms = [(norm.running_mean, norm.running_var) for norm in (first[1], second[1])]
    return list(zip((10.0, 1.0), inputs, norms, strict=True))


def test_the_gradient_of_a_statistics_loss_of_0_is_finite():
    """Although a norm has no gradient at 0: here of a constant batch."""
    norm = nn.BatchNorm2d(1)
    norm.running_var.zero_()
    x = torch.zeros(2, 1, 3, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(sre2l._statistics_loss({norm: x}), x)
    assert not gradient.any()


def defined_images(task: TaskData, labels: Tensor) -> Array:
    """The iterations with Adam and its decay in numpy; pixels from 0 to 255, not rounded.

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, and from x is subtracted lr (1 + cos(pi t /
    T)) / 2 times m / (1 - b1^(t + 1)) over sqrt(v / (1 - b2^(t + 1))) + 1e-8, for t = 0 ... T - 1.
    """
    options, network, draws = task.options, task.learner.network, task.generator
    channels, height, width = task.images.shape[1:]
    black = torch.zeros(1, channels, height, width, dtype=torch.uint8)
    low, high = (task.learner.normalise(image).double().numpy() for image in (black, black + 255))
    x = torch.randn(len(labels), channels, height, width, generator=draws).double().numpy()
    down, right = (
        torch.randint(min(options.roll, side // 8) + 1, (options.iterations,), generator=draws)
        for side in (height, width)
    )
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, (i, j) in enumerate(zip(down.tolist(), right.tolist(), strict=True)):
        rolled = torch.tensor(np.roll(np.roll(x, i, axis=2), j, axis=3), requires_grad=True)
        logits = network(rolled.float())
        loss = (logits.logsumexp(1) - logits[torch.arange(len(labels)), labels]).mean()
        for weight, inputs, (mean, variance) in layers_of(network, rolled.float()):
            flat = inputs.transpose(0, 1).flatten(1)
            spread = ((flat - flat.mean(1, keepdim=True)) ** 2).mean(1)
            gap = ((spread - variance) ** 2).sum() ** 0.5
            gap = gap + ((flat.mean(1) - mean) ** 2).sum() ** 0.5
            loss = loss + options.statistics_weight * weight * gap
        g = torch.autograd.grad(loss, rolled)[0].numpy()
        g = np.roll(np.roll(g, -i, axis=2), -j, axis=3)
        m, v = 0.5 * m + 0.5 * g, 0.9 * v + 0.1 * g**2
        lr = options.lr * (1 + np.cos(np.pi * t / options.iterations)) / 2
        x = x - lr * m / (1 - 0.5 ** (t + 1)) / (np.sqrt(v / (1 - 0.9 ** (t + 1))) + 1e-8)
        x = np.clip(x, low, high)
    return np.asarray(255 * (x - low) / (high - low))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"shape": (2, 8, 24), "roll": 2, "lr": 0.1, "iterations": 9},
        {"shape": (1, 16, 8), "roll": 9, "iterations": 2},
        {"shape": (2, 8, 8), "roll": 0, "iterations": 5, "lr": 1.0},
        {"shape": (2, 8, 8), "lr": 0.05, "statistics_weight": 0.3},
    ],
    ids=["rolled", "tall", "clamped", "statistics"],
)
def test_the_images_are_those_of_the_definition(options, seed):
    task = make_task(3, 2, 2, seed=seed, normalise=per_channel, **options)
    if "statistics_weight" in options:
        network = two_norms()
        weights = 2 * small.flat(list(network.parameters())), small.flat(float_buffers(network))
        task = replace(task, learner=Learner(network, per_channel, *weights))
    labels = torch.tensor([0, 1, 2, 0, 1])
    expected = defined_images(replace(task, generator=generator(9)), labels)
    pixels = sre2l._recover(replace(task, generator=generator(9)), labels)
    assert pixels.dtype == torch.float32 and pixels.shape == expected.shape
    np.testing.assert_allclose(255 * pixels.numpy(), expected, atol=0.05)
    assert (expected == 0).any() and (expected == 255).any()
    assert ((expected > 1) & (expected < 254)).mean() > 0.02


@pytest.mark.parametrize("network", [MLP, BATCH_NORM], ids=lambda n: n.kind)
def test_the_teacher_is_the_clients_model_after_more_training(network):
    """Step for step torch.optim.SGD over the same batches; the client's weights are kept."""
    options = {"squeeze_epochs": 3, "squeeze_lr": 0.05, "batch_size": 4, "soft": False}
    task = make_task(5, 4, network=network, **options)
    learner, (inputs, labels) = task.learner, task.inputs()
    expected, draws = copy.deepcopy(learner.network), generator()
    sgd = torch.optim.SGD(expected.parameters(), lr=0.05)
    for _ in range(3):
        for indices in torch.randperm(9, generator=draws).split(4):
            set_train_mode(expected, len(indices) > 1)
            sgd.zero_grad()
            F.cross_entropy(expected(inputs[indices]), labels[indices]).backward()
            sgd.step()
    sre2l.propose(task)
    assert task.events == ([NO_NORM] if network is MLP else [])
    torch.testing.assert_close(learner.model.parameters, small.flat(list(expected.parameters())))
    torch.testing.assert_close(learner.model.buffers, small.flat(list(expected.buffers())))
    assert (learner.model.parameters - learner.client_weights[0]).abs().max() > 1e-3


@pytest.mark.parametrize(("lr", "epochs"), [(0.1, 0), (50.0, 5), (1e30, 5)])
def test_a_squeeze_that_fails_leaves_the_clients_model(lr, epochs):
    """Whether it ends at a higher loss or at nan; without epochs it does not fail."""
    task = make_task(5, 4, network=BATCH_NORM, squeeze_lr=lr, squeeze_epochs=epochs)
    proposal = sre2l.propose(task)
    assert task.events == [NO_SQUEEZE] * (epochs > 0)
    assert torch.equal(task.learner.model.parameters, task.learner.client_weights[0])
    assert torch.equal(task.learner.model.buffers, task.learner.client_weights[1])
    assert proposal.soft.isfinite().all()


def test_soft_labels_are_the_teachers_logits_on_the_stored_images():
    options = {"network": BATCH_NORM, "exemplars_per_class": 3, "group_size": 4}
    task = make_task(5, 4, 3, normalise=per_channel, **options)
    proposal = sre2l.propose(task)
    with torch.no_grad():
        expected = task.learner.network.eval()(per_channel(proposal.images))
    assert proposal.soft.dtype == torch.float32 and proposal.soft.shape == (9, CLASSES)
    torch.testing.assert_close(proposal.soft, expected)
    assert not proposal.soft.requires_grad


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("sizes", [(5, 1, 3), (1,), (0, 2), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("exemplars_per_class", [1, 4])
def test_each_class_has_as_many_images_as_exemplars(network, sizes, exemplars_per_class):
    shape, count = (2, 8, 8), exemplars_per_class
    task = make_task(*sizes, network=network, exemplars_per_class=count, shape=shape)
    task = replace(task, past=(task.images[:0], task.labels[:0]))
    proposal = base.propose_exemplars("sre2l", task)
    images, labels = proposal.images, proposal.labels
    assert images.dtype == torch.uint8 and images.shape[1:] == shape and images.is_contiguous()
    counts = torch.bincount(labels, minlength=len(sizes))
    assert labels.dtype == torch.int64 and counts.tolist() == [count * (n > 0) for n in sizes]
    assert proposal.soft.shape == (len(labels), CLASSES) and proposal.soft.isfinite().all()
    assert len(images) == len({image.numpy().tobytes() for image in images})


def test_only_images_that_are_not_finite_are_replaced():
    task = make_task(5, 4, exemplars_per_class=3)
    pixels = torch.rand(6, 1, 8, 8, generator=generator(1))
    pixels[2, 0, 1, 1] = torch.nan
    images, labels = sre2l._replace_invalid(task, pixels, torch.tensor([0, 1, 0, 1, 0, 1]))
    assert task.events == [REPLACED] and labels.tolist() == [0, 0, 0, 1, 1, 1]
    expected = (pixels.double() * 255 + 0.5).floor().to(torch.uint8)  # rounded, not cut off
    assert torch.equal(images[[0, 1, 3, 4, 5]], expected[[0, 4, 1, 3, 5]])
    assert any(torch.equal(images[2], real) for real in task.images[:5])
