"""Angles between gradients, in space (clients) and in time (tasks): what matching is meant to move.

Both are means over pairs i < j; the paper's early code also counted every row with itself, which
moves the mean towards 1 by a share of 1 / K. NaN where there is no pair.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.rows import Difference, gram
from stamp_core.split import Plan
from stamp_core.vectors import Descent
from stamp_core.workspace import Visit, Workspace


def spatial(before: Tensor, after: Tensor, received: Sequence[Tensor]) -> dict[str, float]:
    """Angles of one round between the clients' updates and the step of the global model.

    `update`: mean_u cos(theta_new - theta_old, theta_u - theta_old); `clients`: mean_{u<v} cos of
    two clients' updates; with the length of the step and the mean length of the updates.
    """
    rows = [Difference(each, before) for each in (after, *received)]  # [1 + U, P]
    products = gram(rows)[0]
    lengths = products.diagonal().sqrt()
    return {
        "spatial update": float(cosines(products)[0, 1:].mean()),
        "spatial clients": pairs(products[1:, 1:]),
        "update length": float(lengths[0]),
        "client length": float(lengths[1:].mean()),
    }


def temporal(work: Workspace, plan: Plan, visit: Visit, displacements: bool) -> dict[str, float]:
    """Angles between the tasks that a client has met, at the model as training left it.

    `gradients`: mean_{i<j} cos of the gradients on all training pictures of two tasks;
    `displacements`: of the ways that the visit's epochs on each task take from there.
    """
    tasks = range(min(visit.step + 1, plan.tasks))
    indices = [plan.train_indices(work.images, visit.client, task) for task in tasks]
    indices = [each for each in indices if len(each)]
    here = work.model.parameters.clone(), work.model.buffers.clone()
    found = {"temporal gradients": pairs(gram([gradient(work, each) for each in indices])[0])}
    if displacements:
        rows = list(_displacements(work, visit, indices))
        found["temporal displacements"] = pairs(gram(rows)[0])
        work.model.load(*here)
    return found


def gradient(work: Workspace, indices: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy over training pictures, in evaluation mode.  # [P]"""
    model = work.model
    model.module.eval()
    model.gradients.zero_()
    for part in indices.split(work.chunk):
        pictures, labels = work.examples(part)
        loss = F.cross_entropy(model.module(work.normalise(pictures)), labels, reduction="sum")
        (loss / len(indices)).backward()
    return model.gradients.clone()


def _displacements(work: Workspace, visit: Visit, tasks: list[Tensor]) -> Iterator[Tensor]:
    """Where the visit's epochs on each task lead from the live model.  # [P] each"""
    start, buffers = work.model.parameters.clone(), work.model.buffers.clone()
    for indices in tasks:
        work.model.load(start, buffers)
        descent = Descent(work.model, work.setting.training)
        for pictures, labels in work.batches(visit, indices):
            work.train_mode(len(labels))
            work.model.gradients.zero_()
            F.cross_entropy(work.model.module(pictures), labels).backward()
            descent.step()
        yield start - work.model.parameters


def cosines(products: Tensor) -> Tensor:
    """Cosines from a Gram matrix; NaN beside a row of zeros.  # [K, K]"""
    lengths = products.diagonal().sqrt()
    return products / torch.outer(lengths, lengths)


def pairs(products: Tensor) -> float:
    """The mean cosine over pairs i < j of the rows behind a Gram matrix."""
    size = len(products)
    above = torch.triu_indices(size, size, offset=1)
    return float(cosines(products)[above[0], above[1]].mean()) if size > 1 else float("nan")
