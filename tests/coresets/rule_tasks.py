"""Small candidates and tasks for selection rules."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import small
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stamp_core.config.schema import Network
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.memory import class_prototype
from stamp_core.coresets.selection.base import Candidates, Proposal, TaskData
from stamp_core.models.networks import Classifier, build_network
from workbench.selection import bcsr, csrel, ocs, sre2l

CLASSES = 4
MLP = Network("mlp", features=6)
BATCH_NORM = Network("cnn", features=6, channels=(3,), norm="batch")
NETWORKS = {
    "mlp": MLP,
    "cnn": Network("cnn", features=6, channels=(3,)),
    "batch norm": BATCH_NORM,
    "group norm": Network("cnn", features=6, channels=(4,), norm="group"),
}
Shape = tuple[int, int, int]
Array = NDArray[np.float64]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def to_unit(images: Tensor) -> Tensor:
    return images.float() / 255


def colour_images(n: int, low: int = 0, high: int = 256, seed: int = 0, side: int = 4) -> Tensor:
    values = torch.randint(low, high, (n, 3, side, side), generator=generator(seed))
    return values.to(torch.uint8)


def candidates_of(
    features: Tensor, count: int, exemplar_mean: Tensor | None = None, seen: int = 0, seed: int = 0
) -> Candidates:
    """Candidates of a class of which `seen` images with this mean were met."""
    mean = torch.zeros(features.shape[1]).double() if exemplar_mean is None else exemplar_mean
    images = torch.zeros(len(features), 1, 2, 2, dtype=torch.uint8)
    prototype = class_prototype(features, mean, seen)
    return Candidates(images, features, prototype, mean, count, generator(seed))


def float_buffers(network: Classifier) -> list[Tensor]:
    return [b for b in network.buffers() if b.is_floating_point()]


def with_nan(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values between -1 and 1; a white pixel is nan."""
    return (images.to(dtype) / 127 - 1).masked_fill(images == 255, torch.nan)


def random_samples(n: int, shape: Shape, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images without white pixels of three classes, the first class the most frequent one."""
    draws = generator(seed)
    images = torch.randint(0, 255, (n, *shape), generator=draws).to(torch.uint8)
    return images, torch.randint(0, 5, (n,), generator=draws).clamp(min=2) - 2


def random_learner(
    network: Network, shape: Shape, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Learner:
    """A network whose client weights differ from the initial ones, as do its buffers."""
    built = build_network(network, shape, CLASSES, seed=0).to(dtype)
    weights = nn.utils.parameters_to_vector(built.parameters()).detach()
    weights = scale * (weights + 0.1 * normal(len(weights), dtype=dtype))
    count = sum(buffer.numel() for buffer in float_buffers(built))
    buffers = torch.rand(count, generator=generator(1), dtype=dtype)
    return Learner(built, partial(with_nan, dtype=dtype), weights, buffers)


def random_task(
    options_of: Callable[..., Any],
    defaults: Mapping[str, Any],
    n: int = 13,
    *,
    dtype: torch.dtype,
    shape: Shape,
    past: int = 7,
    seed: int = 0,
    network: Network = MLP,
    exemplars_per_class: int = 2,
    **options: Any,
) -> TaskData:
    return TaskData(
        *random_samples(n, shape),
        random_samples(past, shape, seed=1),
        exemplars_per_class,
        options_of(**{**defaults, **options}),
        random_learner(network, shape, dtype),
        generator(seed),
    )


def class_task(
    options_of: Callable[..., Any],
    defaults: Mapping[str, Any],
    *sizes: int,
    seed: int = 0,
    network: Network = MLP,
    shape: Shape = (1, 8, 8),
    normalise: Callable[[Tensor], Tensor] = to_unit,
    exemplars_per_class: int = 2,
    **options: Any,
) -> TaskData:
    """So many random images of the classes 0, 1, ... and one past exemplar.

    The client's weights are those of another seed and twice as large.
    """
    images = torch.randint(250, (sum(sizes) + 1, *shape), generator=generator(seed))
    images = images.to(torch.uint8)
    initial, client = (build_network(network, shape, CLASSES, seed + i) for i in (0, 1))
    weights = 2 * small.flat(list(client.parameters())), small.flat(float_buffers(client))
    return TaskData(
        images[:-1],
        torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        (images[-1:], torch.tensor([CLASSES - 1])),
        exemplars_per_class,
        options_of(**{**defaults, **options}),
        Learner(initial, normalise, *weights),
        generator(seed),
    )


# 13 images are batches of 5, 5 and 3.
OCS: Mapping[str, Any] = {"batch_size": 5, "batch_candidates": 2, "tau": 3.0}
# Learning rates at which a few steps learn something.
CSREL: Mapping[str, Any] = {
    "reference_epochs": 3,
    "reference_lr": 0.3,
    "selection_steps": 3,
    "train_steps": 4,
    "train_lr": 0.4,
    "batch_size": 5,
}
SRE2L: Mapping[str, Any] = {"squeeze_epochs": 2, "batch_size": 3, "iterations": 6}

bcsr_task = partial(random_task, bcsr.Options, {}, dtype=torch.float64, shape=(1, 2, 2))
ocs_task = partial(random_task, ocs.Options, OCS, dtype=torch.float32, shape=(2, 8, 8))
csrel_task = partial(class_task, csrel.Options, CSREL)
sre2l_task = partial(class_task, sre2l.Options, SRE2L)


def indices_of(proposal: Proposal, task: TaskData) -> list[int]:
    """The indices of a proposal's images in the task, which are all different."""
    known = {image.numpy().tobytes(): i for i, image in enumerate(task.images)}
    assert len(known) == len(task.images)
    indices = [known[image.numpy().tobytes()] for image in proposal.images]
    assert torch.equal(proposal.labels, task.labels[indices])
    assert proposal.soft.shape == (len(indices), 0) and proposal.images.dtype == torch.uint8
    return indices
