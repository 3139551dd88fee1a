"""How the images of a batch are mirrored and shifted: drawn on the CPU, applied on the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from stamp_core.config.schema import Training

Changes = tuple[Tensor | None, Tensor | None]  # which images are mirrored, and their shifts


class Drawn(NamedTuple):
    """Which images a batch has, and how they are augmented."""

    places: Tensor  # [n], on the device
    stored: Tensor  # the same on the CPU, for images that are there
    mirrored: Tensor | None  # [n, 1, 1, 1], on the device
    shifts: Tensor | None  # [2, n, 1], on the device


def augment(images: Tensor, training: Training, generator: torch.Generator) -> Tensor:
    """Images, each randomly shifted (with edges repeated) and mirrored."""
    drawn = draw_changes(len(images), training, generator)
    whole = torch.cat(drawn).to(images.device) if drawn else images.new_empty(0, len(images))
    return apply_changes(images, *split_changes(whole, training))


def draw_changes(count: int, training: Training, generator: torch.Generator) -> list[Tensor]:
    """Whether images are mirrored [1, n], and their shifts [2, n], where there are any."""
    changes, shift = [], training.shift
    if training.flip:
        changes.append(torch.randint(2, (1, count), generator=generator))
    if shift:
        changes.append(torch.randint(-shift, shift + 1, (2, count), generator=generator))
    return changes


def split_changes(changes: Tensor, training: Training) -> Changes:
    """What `draw_changes` returned, as one tensor, in the form that images need.  # [k, n]"""
    mirrored = changes[0].bool().view(-1, 1, 1, 1) if training.flip else None  # [n, 1, 1, 1]
    return mirrored, changes[-2:, :, None] if training.shift else None  # [2, n, 1]


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
