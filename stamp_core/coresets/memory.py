"""A client's exemplar memory: exemplars of each class, and the number of its images seen so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor

from stamp_core.config.limits import NonNegativeInt, Positive
from stamp_core.core.arithmetic import sqrt
from stamp_core.coresets.selection.base import Candidates, Proposal, choose_exemplars, rule_options

EPSILON = 1e-6  # added to variances, as published: the deviation of a constant channel is not 0

# "images" uint8 [M, C, H, W], "labels" int64 [M], "tasks" int64 [M] the task of each exemplar,
# "soft" float32 [M, classes] logits of a teacher, or [M, 0] without soft labels,
# "seen" int64 [classes] training images of each class seen so far
Memory = dict[str, Tensor]


@dataclass(frozen=True)
class MemoryParams:
    """Which exemplars of a class are kept, and what becomes of them when the class returns."""

    selection: str = "herding"  # the selection rule: a file of stamp_core/coresets/selection
    options: Mapping[str, Any] = field(default_factory=dict)  # of the rule, as its Options
    exemplars_per_class: NonNegativeInt = 20  # at most
    # When a later task has images of the class, they transfer their style to the old exemplars,
    # which all stay | take the share of the memory that they have in a uniform sample.
    merge: Literal["mixstyle", "reservoir"] = "mixstyle"
    mixstyle_alpha: Positive = 0.1  # of MixStyle's Beta distribution

    def __post_init__(self) -> None:
        if not is_dataclass(self.options):
            object.__setattr__(self, "options", rule_options(self.selection, self.options))

    @property
    def soft(self) -> bool:
        """Whether the rule labels exemplars with a teacher's logits."""
        return bool(getattr(self.options, "soft", False))


@dataclass(frozen=True, eq=False)
class ClassSamples:
    """Images of one class with their tasks, soft labels and features."""

    images: Tensor  # uint8 [n, C, H, W]
    tasks: Tensor  # int64 [n]
    soft: Tensor  # [n, classes or 0]
    features: Tensor  # [n, D]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Tensor | slice) -> "ClassSamples":
        return ClassSamples(*(part[index] for part in vars(self).values()))

    def __add__(self, other: "ClassSamples") -> "ClassSamples":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return ClassSamples(*map(torch.cat, pairs))


def empty_memory(like_images: Tensor, classes: int, soft: bool = False) -> Memory:
    """A memory without exemplars, for images of this shape and optionally soft labels."""
    return {
        "images": like_images[:0].clone(),
        "labels": torch.empty(0, dtype=torch.int64),
        "tasks": torch.empty(0, dtype=torch.int64),
        "soft": torch.empty(0, classes if soft else 0),
        "seen": torch.zeros(classes, dtype=torch.int64),
    }


def past_tasks(memory: Memory, task: int) -> list[int]:
    """The tasks of all exemplars in increasing order, without `task`."""
    tasks: list[int] = memory["tasks"].unique().tolist()
    return [past for past in tasks if past != task]


def class_samples(proposal: Proposal, label: int, task: int, features: Tensor) -> ClassSamples:
    """The images of one class in the proposal for a task; `features` are theirs."""
    of_class = proposal.labels == label
    tasks = torch.full_like(proposal.labels[of_class], task)
    return ClassSamples(proposal.images[of_class], tasks, proposal.soft[of_class], features)


def class_prototype(features: Tensor, old_mean: Tensor, seen: int) -> Tensor:
    """The mean of new finite features and `seen` earlier ones; 0 without any.  # float64 [D]"""
    finite = features[features.isfinite().all(1)].double()  # [n, D]
    return (seen * old_mean + finite.sum(0)) / max(seen + len(finite), 1)


def update_memory(
    memory: Memory,
    label: int,
    new: ClassSamples,
    met: int,
    old_features: Tensor,
    params: MemoryParams,
    generator: Generator,
) -> Memory:
    """The memory after a task that has `met` images of the class `label`.

    `new` holds the candidates: these images, or those that a rule has proposed. `old_features`
    are the features of the class's exemplars. A class with fewer than `exemplars_per_class`
    exemplars is filled up by later tasks; an exemplar is dropped only for a new one.
    """
    if not len(new):
        return memory
    own = memory["labels"] == label
    old = ClassSamples(
        memory["images"][own], memory["tasks"][own], memory["soft"][own], old_features
    )
    merged = _merge(old, new, int(memory["seen"][label]), met, params, generator)
    labels = torch.full_like(merged.tasks, label)
    seen = memory["seen"].clone()
    seen[label] += met
    return {
        "images": torch.cat([memory["images"][~own], merged.images]),
        "labels": torch.cat([memory["labels"][~own], labels]),
        "tasks": torch.cat([memory["tasks"][~own], merged.tasks]),
        "soft": torch.cat([memory["soft"][~own], merged.soft]),
        "seen": seen,
    }


def _merge(
    old: ClassSamples,
    new: ClassSamples,
    seen: int,
    met: int,
    params: MemoryParams,
    generator: Generator,
) -> ClassSamples:
    """At most `exemplars_per_class` exemplars from a class's old exemplars and new candidates."""
    count = params.exemplars_per_class
    zero = torch.zeros(new.features.shape[1]).double()
    old_mean = class_prototype(old.features, zero, 0)
    prototype = class_prototype(new.features, old_mean, seen if len(old) else 0)

    def select(exemplar_mean: Tensor) -> ClassSamples:
        data = (new.images, new.features, prototype, exemplar_mean, count, generator)
        return new[choose_exemplars(params.selection, Candidates(*data))]

    if not len(old):
        return select(zero)
    if params.merge == "reservoir":
        stay = old[_draw_remaining(len(old), len(new), seen, met, count, generator)]
        return (stay + select(class_prototype(stay.features, zero, 0)))[:count]
    selected = select(old_mean)
    restyled = _transfer_style(old, selected, params.mixstyle_alpha, generator)
    repeated = bool((old.tasks == new.tasks[0]).any())  # the same images: none is added twice
    return restyled if repeated else (restyled + selected)[:count]


def _draw_remaining(
    old: int, new: int, seen: int, met: int, count: int, generator: Generator
) -> Tensor:
    """Indices of the old exemplars that stay: a random subset, ascending.

    Their number is that of old images in a uniform sample of `seen` old and `met` new images,
    which is hypergeometric. So a random memory stays a uniform sample of all images. Synthetic
    exemplars can be more than the images that they represent; then each counts as one.
    """
    seen = max(seen, old)
    room = min(count, old + new)
    sample = torch.randperm(seen + max(met, new), generator=generator)[:room]
    number = int((sample < seen).sum())
    number = min(max(number, room - new), old)  # a rule may propose fewer than all images
    return torch.randperm(old, generator=generator)[:number].sort().values


def _transfer_style(
    old: ClassSamples, selected: ClassSamples, alpha: float, generator: Generator
) -> ClassSamples:
    """Each old exemplar in the style of a random new one."""
    order = torch.randperm(len(selected), generator=generator)
    styles = order[torch.arange(len(old)) % len(order)]  # all are used before one is reused
    weights = mixing_weights(len(styles), generator, alpha)
    return replace(old, images=mixstyle_images(old.images, selected.images[styles], weights))


# --- MixStyle (Zhou et al., 2021): the content of one image with the channel statistics of another


def mixstyle_images(content: Tensor, style: Tensor, weights: Tensor) -> Tensor:
    """Images of `content` in a mixture of both styles, clipped.  # uint8 [n, C, H, W]"""
    mixed = mix_statistics(content.double() / 255, style.double() / 255, weights)
    return (255 * mixed).round().clamp(0, 255).to(torch.uint8)


def mix_statistics(content: Tensor, style: Tensor, weights: Tensor) -> Tensor:
    """`content` with both images' mean and deviation, `weights` of its own.  # [n, C, H, W]"""
    mean, deviation = _channel_statistics(content)
    style_mean, style_deviation = _channel_statistics(style)
    own = weights.to(content).view(-1, 1, 1, 1)
    scale = torch.lerp(style_deviation, deviation, own)
    return scale * (content - mean) / deviation + torch.lerp(style_mean, mean, own)


def _channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, defined for a single pixel.  # [n, C, 1, 1] each"""
    variance, mean = torch.var_mean(images, (2, 3), correction=0, keepdim=True)
    return mean, sqrt(variance + EPSILON)


def mixing_weights(count: int, generator: torch.Generator, alpha: float = 0.1) -> Tensor:
    """Weights of own styles ~ Beta(alpha, alpha); torch's takes no generator.  # float64 [count]"""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, count))
