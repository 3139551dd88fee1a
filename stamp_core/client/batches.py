"""What one SGD step gets: a batch and its context; how a batch's images are drawn and augmented."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import starmap

import torch
from torch import Tensor

from stamp_core.config.schema import Training


@dataclass(frozen=True)
class Batch:
    """The input of one SGD step: new images, followed by exemplars of past tasks."""

    images: Tensor  # float32 [N, C, H, W], normalised
    targets: Tensor  # int64, labels [N] or masks [N, H, W]
    exemplars: int = 0  # how many of the images are exemplars: the last ones
    soft: Tensor | None = None  # [exemplars, L], a teacher's logits for them
    tasks: Tensor | None = None  # int64 [exemplars], the task of each

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def new(self) -> int:
        return len(self.targets) - self.exemplars


def append_exemplars(new: Batch, past: Batch) -> Batch:
    """A batch of new images, followed by one of exemplars; the same batch if there are none."""
    if not len(past):
        return new
    images = torch.cat([new.images, past.images])
    targets = torch.cat([new.targets, past.targets])
    return Batch(images, targets, len(past), past.soft, past.tasks)


@dataclass
class StepContext:
    """What a client round prepares for its steps, and what they leave for its end.

    A method extends it with typed fields. A captured step (see `graphs.py`) sees its tensors alone:
    everything else would be that of the one client whose step was captured.
    """


def tensor_fields(values: Batch | StepContext) -> dict[str, Tensor]:
    """The tensors of a batch or context, by the names of their fields."""
    found = {each.name: getattr(values, each.name) for each in fields(values)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Drawn:
    """Which images a batch has, and how they are augmented: drawn on the CPU."""

    index: Tensor  # [n], on the device
    index_cpu: Tensor  # the same on the CPU, for images that are stored there
    mirrored: Tensor | None  # [n, 1, 1, 1], on the device
    shifts: Tensor | None  # [2, n, 1], on the device


def draw_batches(
    batches: Iterable[Tensor], training: Training, draw: torch.Generator, device: torch.device
) -> list[Drawn]:
    """The batches of indices with their augmentation; all of it goes to the device at once."""
    indices = list[Tensor]()
    changes = list[Tensor]()
    for batch in batches:  # which may draw from the same generator
        indices.append(batch)
        changes.append(_draw_changes(len(batch), training, draw))
    if not indices:
        return []
    sizes = list(map(len, indices))
    moved = torch.cat([torch.cat(indices)[None], torch.cat(changes, 1)]).to(device)
    mirrored, shifts = _split_changes(moved[1:], training)
    none = [None] * len(sizes)
    parts = zip(
        moved[0].split(sizes),
        indices,
        none if mirrored is None else mirrored.split(sizes),
        none if shifts is None else shifts.split(sizes, 1),
        strict=True,
    )
    return list(starmap(Drawn, parts))


def augment(images: Tensor, training: Training, draw: torch.Generator) -> Tensor:
    """Images, each randomly shifted (with edges repeated) and mirrored."""
    changes = _draw_changes(len(images), training, draw).to(images.device)
    return apply_changes(images, *_split_changes(changes, training))


def _draw_changes(count: int, training: Training, draw: torch.Generator) -> Tensor:
    """Whether images are mirrored [1, n] and their shifts [2, n], one below the other.  # [k, n]"""
    changes = [torch.empty(0, count, dtype=torch.int64)]
    if training.flip:
        changes.append(torch.randint(2, (1, count), generator=draw))
    if shift := training.shift:
        changes.append(torch.randint(-shift, shift + 1, (2, count), generator=draw))
    return torch.cat(changes)


def _split_changes(changes: Tensor, training: Training) -> tuple[Tensor | None, Tensor | None]:
    """What `_draw_changes` returned in the form that images need.  # [n, 1, 1, 1], [2, n, 1]"""
    mirrored = changes[0].bool().view(-1, 1, 1, 1) if training.flip else None
    return mirrored, changes[-2:, :, None] if training.shift else None


def apply_changes(images: Tensor, mirrored: Tensor | None, shifts: Tensor | None) -> Tensor:
    """The images mirrored and shifted as drawn."""
    n, _, height, width = images.shape
    if mirrored is not None:
        images = torch.where(mirrored, images.flip(3), images)
    if shifts is not None:
        ys = (torch.arange(height, device=images.device) + shifts[0]).clamp(0, height - 1)  # [N, H]
        xs = (torch.arange(width, device=images.device) + shifts[1]).clamp(0, width - 1)  # [N, W]
        each = torch.arange(n, device=images.device)[:, None, None]
        shifted = images.permute(0, 2, 3, 1)[each, ys[:, :, None], xs[:, None, :]]
        images = shifted.permute(0, 3, 1, 2)
    return images
