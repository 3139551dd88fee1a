"""The loss of prototypical networks (Snell et al., 2017) inside a batch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def prototype_loss(features: Tensor, labels: Tensor) -> Tensor:
    """The mean of d(z, p_y) + log sum_l exp(-d(z, p_l)) over the queries z, d = squared distance.

    Of the n images of a class in the batch the first ceil(n / 2) are its support, whose mean is the
    prototype p_l; the others are queries. A class with one image is ignored.
    Without queries the loss is 0.

    All shapes depend on N alone, so that a device never waits for the labels: each class is
    represented by its first image.
    """
    same = labels[:, None] == labels  # [N, N]
    rank, count = same.tril().sum(1), same.sum(1)  # [N]; the rank in the class begins with 1
    support = (rank <= (count + 1) // 2) & (count > 1)
    query = (count > 1) & ~support
    z = features - features.detach().mean(0)  # a common shift of all changes rounding alone
    members = (same & support).to(z.dtype)  # [N, N]
    prototypes = members @ z / members.sum(1, keepdim=True).clamp(min=1)  # [N, D], of own classes
    similarities = 2 * z @ prototypes.T - prototypes.square().sum(1)  # |z|^2 - d(z, p)
    first = support & (rank == 1)
    logits = similarities.masked_fill(~first, torch.finfo(z.dtype).min)
    losses = F.cross_entropy(logits, same.int().argmax(1), reduction="none")
    loss: Tensor = losses.where(query, 0.0).sum() / query.sum().clamp(min=1)
    return loss
