"""Exemplars under one budget for all classes: a herded list for each class of each task."""

import torch
from torch import Tensor

from stamp_core.client.by_class import first_per_class
from stamp_core.coresets.selection.base import Candidates
from stamp_core.coresets.selection.herding import choose
from stamp_core.methods.base.exemplar_lists import ExemplarLists


def updated_lists(
    lists: ExemplarLists, images: Tensor, labels: Tensor, features: Tensor, task: int, budget: int
) -> ExemplarLists:
    """The lists with one for each class of a new task; all have an equal share of the budget.

    Where a class returns, its exemplars from both tasks stay. A list that must become shorter
    loses the exemplars that were chosen last. `features` are those of the task's images.
    """
    keys = (lists["tasks"] << 32) + lists["labels"]
    classes = labels.unique().tolist()
    share = budget // max(1, len(keys.unique()) + len(classes))
    kept = first_per_class(keys, share)
    chosen = torch.cat([labels[:0], *(_herd(images, labels, features, c, share) for c in classes)])
    tasks = torch.full_like(chosen, task)
    new = {"images": images[chosen], "labels": labels[chosen], "tasks": tasks}
    return {name: torch.cat([lists[name][kept], new[name]]) for name in new}


def _herd(images: Tensor, labels: Tensor, features: Tensor, label: int, count: int) -> Tensor:
    """Indices of the images of one class that herding chooses, in order of choice.  # [count]"""
    own = (labels == label).nonzero().flatten()
    mean = features[own].double().mean(0)
    unused = torch.Generator()  # herding draws nothing
    candidates = Candidates(images[own], features[own], mean, torch.zeros_like(mean), count, unused)
    return own[choose(candidates)]
