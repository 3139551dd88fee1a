"""Exemplars of a client as lists, one after the other."""

import torch
from torch import Tensor

# "images" uint8 [m, C, H, W], "labels" int64 [m], "tasks" int64 [m]
ExemplarLists = dict[str, Tensor]


def empty_lists(like_images: Tensor) -> ExemplarLists:
    """No exemplars, for images of this shape."""
    none = torch.empty(0, dtype=torch.int64)
    return {"images": like_images[:0].clone(), "labels": none, "tasks": none.clone()}
