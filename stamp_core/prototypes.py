"""The prototypical-network loss (Snell et al., 2017) inside a batch."""

import torch.nn.functional as F
from torch import Tensor


def prototype_loss(features: Tensor, labels: Tensor) -> Tensor:
    """The mean of d(z, p_y) + log sum_l exp(-d(z, p_l)), d = squared distance, over the queries.

    Of the n pictures of a class in the batch the first ceil(n / 2) make its prototype p_l and the
    others are queries z; a class with one picture takes no part. Zero where nobody is a query.
    """
    classes, own = labels.unique(return_inverse=True)  # [L], [N]
    members = F.one_hot(own, len(classes))  # [N, L]
    place = (members.cumsum(0) * members).sum(1)  # [N], from 1 inside each class
    counts = members.sum(0)  # [L]
    support = (place <= (counts[own] + 1) // 2) & (counts[own] > 1)
    query = (counts[own] > 1) & ~support
    if not query.any():
        return features.sum() * 0
    taking_part = counts > 1
    weights = (members * support[:, None]).T.to(features.dtype)[taking_part]  # [L', N]
    prototypes = weights @ features / weights.sum(1, keepdim=True)  # [L', D]
    away = features[query][:, None] - prototypes  # [Q, L', D]
    distances = away.square().sum(2)
    renumbered = taking_part.cumsum(0)[own[query]] - 1
    return F.cross_entropy(-distances, renumbered)
