"""SRe2L (VILA-Lab/SRe2L): the recovery `get_images` of SRe2L/*small_dataset/recover_cifar.py."""

import numpy as np
import pytest
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.config.params import read_params
from stamp_core.config.schema import Network
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection.base import TaskData
from stamp_core.methods.base.registry import resolve_preset
from stamp_core.models.networks import build_network
from workbench.selection import sre2l

SRE2L = Execution("sre2l", "SRe2L", "8d00cba", 1e-12)
OPTIONS: sre2l.Options = resolve_preset("keep_sre2l", read_params())[1].memory.options
NETWORK = Network("cnn", features=8, channels=(4, 6), norm="batch")
CLASSES, SHAPE, WIDTHS = 5, (3, 32, 32), NETWORK.channels
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of the released code
LAYERS = [
    *((4, 3, 5, 5), (4,), (4,), (4,)),  # a convolution and batch normalisation
    *((6, 4, 5, 5), (6,), (6,), (6,)),
    *((8, 150), (8,), (CLASSES, 8), (CLASSES,)),
]


def weights() -> list[Tensor]:
    return [0.3 * draws(i, *shape) for i, shape in enumerate(LAYERS)]


def statistics() -> list[Tensor]:
    """Running mean and variance of each batch normalisation."""
    pairs = [(draws(20 + n, n), draws(30 + n, n).square() + 0.5) for n in WIDTHS]
    return [part for pair in pairs for part in pair]


def noise() -> Tensor:
    return draws(50, CLASSES, *SHAPE)


def rolls(axis: int) -> Tensor:
    """By how many pixels images are rolled in each iteration."""
    integers = np.random.default_rng(axis).integers(OPTIONS.roll + 1, size=OPTIONS.iterations)
    return torch.from_numpy(integers)


def normalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(part, dtype=torch.float64).view(3, 1, 1) for part in (MEAN, STD))
    return (images.double() / 255 - mean) / std


def make_task() -> TaskData:
    network = build_network(NETWORK, SHAPE, CLASSES, seed=0).double()
    values, buffers = (torch.cat([x.flatten() for x in part]) for part in (weights(), statistics()))
    learner = Learner(network, normalise, values, buffers)
    images, labels = torch.zeros(CLASSES, *SHAPE, dtype=torch.uint8), torch.arange(CLASSES)
    past = images[:0], labels[:0]
    return TaskData(images, labels, past, 1, OPTIONS, learner, torch.Generator())


def test_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, which the rule has for statistics only here."""
    axes = iter((2, 3))
    monkeypatch.setattr(torch, "randn", lambda *shape, generator: noise())
    monkeypatch.setattr(torch, "randint", lambda high, size, generator: rolls(next(axes)))
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    task = make_task()
    pixels = sre2l._recover(task, task.labels)
    SRE2L.check({"pixels": pixels[..., ::4, ::4]})
