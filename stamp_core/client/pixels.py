"""Images with masks: what a setting for them must be, and how well the classes of pixels fit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stamp_core.config.decode import invalid
from stamp_core.config.schema import Setting
from stamp_core.data.dataset import ImageDataset


def check_masks(setting: Setting, dataset: ImageDataset) -> None:
    """Refuse a network that does not fit the data set, and tasks that do not fit its masks."""
    kind, split = setting.network.kind, setting.split
    if (kind == "fcn") != dataset.masks:
        right = "'fcn', as the data have masks" if dataset.masks else "another: no masks are there"
        raise invalid("network.kind", kind, right)
    if not dataset.masks:
        return
    found = (split.kind, split.classes_per_task, split.cycles)
    if found != ("classes", 1, 1):
        right = "('classes', 1, 1), as a mask for training shows one class alone"
        raise invalid("split: kind, classes_per_task, cycles", found, right)
    for name in ("features", "memory"):  # no page shows maps of features or masks
        if value := getattr(setting.diagnostics, name):
            raise invalid(f"diagnostics.{name}", value, "0, as the data have masks")


def predict_pixels(logits: Tensor, classes: Sequence[int]) -> Tensor:
    """The class of each pixel among some and the last, that of no class.  # [n, H, W]"""
    allowed = torch.tensor([*classes, logits.shape[1] - 1])
    predicted: Tensor = allowed[logits[:, allowed].argmax(1)]
    return predicted


def count_pixels(predicted: Tensor, masks: Tensor, classes: int) -> Tensor:
    """The pixels of each image that are right, predicted and true in a class.  # [n, 3, classes]"""
    every = torch.arange(classes).view(-1, 1, 1)
    found, true = predicted[:, None] == every, masks[:, None] == every  # [n, classes, H, W]
    return torch.stack([each.sum((2, 3)) for each in (found & true, found, true)], 1)


def intersection_over_union(counts: Tensor) -> Tensor:
    """The right pixels among those predicted or true; NaN without any.  # [3, L] -> [L]"""
    right, predicted, true = counts.double()
    shares: Tensor = right / (predicted + true - right)
    return shares
