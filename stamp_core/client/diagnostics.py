"""Angles between gradients, in space (clients) and in time (tasks), which matching should change.

Both are means over pairs i < j; the paper's early code also counted every gradient with itself,
which moves the mean towards 1 by a share of 1 / K. NaN where there is no pair.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.core.arithmetic import sqrt
from stamp_core.data.plan import Plan
from stamp_core.matching.gram import Difference, gram


def spatial_angles(before: Tensor, after: Tensor, received: Sequence[Tensor]) -> dict[str, float]:
    """Angles of one round between the clients' updates and the update of the global model.

    `update`: mean_u cos(theta_new - theta_old, theta_u - theta_old); `clients`: mean_{u<v} cos of
    two clients' updates; with the length of the global update and the clients' mean length.
    """
    updates = [Difference(model, before) for model in (after, *received)]  # [1 + U, P]
    products = gram(updates)[0]
    lengths = sqrt(products.diagonal())
    return {
        "spatial update": float(cosines(products)[0, 1:].mean()),
        "spatial clients": mean_pair_cosine(products[1:, 1:]),
        "update length": float(lengths[0]),
        "client length": float(lengths[1:].mean()),
    }


def temporal_angles(
    runtime: ClientRuntime, plan: Plan, round_id: RoundId, displacements: bool
) -> dict[str, float]:
    """Angles between the tasks that a client has learnt, at the live model after training.

    `gradients`: mean_{i<j} cos of the gradients on all training images of two tasks;
    `displacements`: of the updates by a client round's epochs on each task from that model.
    """
    tasks = range(min(round_id.experience + 1, plan.tasks))
    indices = [plan.train_indices(runtime.dataset, round_id.client, task) for task in tasks]
    indices = [each for each in indices if len(each)]
    gradients = [gradient(runtime, each) for each in indices]
    angles = {"temporal gradients": mean_pair_cosine(gram(gradients)[0])}
    if displacements:
        updates = list(_displacements(runtime, round_id, indices))
        angles["temporal displacements"] = mean_pair_cosine(gram(updates)[0])
    return angles


def gradient(runtime: ClientRuntime, indices: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy over training images, in evaluation mode.  # [P]"""
    model = runtime.model
    model.module.eval()
    model.gradients.zero_()
    for part in indices.to(runtime.x_train.device).split(runtime.chunk):
        images, labels = runtime.train_images(part)
        loss = F.cross_entropy(model.module(runtime.normalise(images)), labels, reduction="sum")
        (loss / len(indices)).backward()
    return model.gradients.clone()


def _displacements(
    runtime: ClientRuntime, round_id: RoundId, tasks: list[Tensor]
) -> Iterator[Tensor]:
    """Minus the update by the local epochs on each task; the live model is restored.  # [P] each"""
    start, buffers = runtime.model.parameters.clone(), runtime.model.buffers.clone()
    for indices in tasks:
        runtime.fit(runtime.batches(round_id, indices))
        yield start - runtime.model.parameters
        runtime.model.load(start, buffers)


def cosines(products: Tensor) -> Tensor:
    """Cosines from a Gram matrix; NaN for a vector of zeros.  # [K, K]"""
    lengths = sqrt(products.diagonal())
    return products / torch.outer(lengths, lengths)


def mean_pair_cosine(products: Tensor) -> float:
    """The mean cosine over pairs i < j of the vectors behind a Gram matrix."""
    size = len(products)
    above = torch.triu_indices(size, size, offset=1)
    return float(cosines(products)[above[0], above[1]].mean()) if size > 1 else float("nan")
