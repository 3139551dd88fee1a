"""SRe2L (VILA-Lab/SRe2L): the recovery `get_images` of SRe2L/*small_dataset/recover_cifar.py."""

import numpy as np
import pytest
import rules
import small
import torch
from executed import Execution, draws
from torch import Tensor

from stamp_core.config.schema import Network
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection.base import TaskData
from stamp_core.models.networks import build_network
from workbench.selection import sre2l

SRE2L = Execution("sre2l", "SRe2L", "8d00cba", 1e-12)
OPTIONS: sre2l.Options = rules.preset("sre2l")
NETWORK = Network("cnn", features=8, channels=(4, 6), norm="batch")
CLASSES, SHAPE = 5, (3, 32, 32)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of the released code
LAYERS = [
    *((4, 3, 5, 5), (4,), (4,), (4,)),  # a convolution and batch normalisation
    *((6, 4, 5, 5), (6,), (6,), (6,)),
    *((8, 150), (8,), (CLASSES, 8), (CLASSES,)),
]


def normalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(part, dtype=torch.float64).view(3, 1, 1) for part in (MEAN, STD))
    return (images.double() / 255 - mean) / std


def make_task() -> TaskData:
    network = build_network(NETWORK, SHAPE, CLASSES, seed=0).double()
    values = small.flat([0.3 * draws(i, *shape) for i, shape in enumerate(LAYERS)])
    statistics = [(draws(20 + n, n), draws(30 + n, n).square() + 0.5) for n in NETWORK.channels]
    learner = Learner(network, normalise, values, torch.cat([torch.cat(x) for x in statistics]))
    images, labels = torch.zeros(CLASSES, *SHAPE, dtype=torch.uint8), torch.arange(CLASSES)
    past = images[:0], labels[:0]
    return TaskData(images, labels, past, 1, OPTIONS, learner, torch.Generator())


def test_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, which the rule has for statistics only here."""
    rolls = map(np.random.default_rng, (2, 3))  # along the two axes
    monkeypatch.setattr(torch, "randn", lambda *shape, generator: draws(50, *shape))

    def drawn(high: int, size: tuple[int], generator: object) -> Tensor:
        return torch.from_numpy(next(rolls).integers(high, size=size))

    monkeypatch.setattr(torch, "randint", drawn)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    task = make_task()
    pixels = sre2l._recover(task, task.labels)
    SRE2L.check({"pixels": pixels[..., ::4, ::4]})
