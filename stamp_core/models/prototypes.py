"""The loss of prototypical networks (Snell et al., 2017) inside a batch."""

import torch.nn.functional as F
from torch import Tensor


def prototype_loss(features: Tensor, labels: Tensor) -> Tensor:
    """The mean of d(z, p_y) + log sum_l exp(-d(z, p_l)) over the queries z, d = squared distance.

    Of the n images of a class in the batch the first ceil(n / 2) are its support, whose mean is the
    prototype p_l; the others are queries. A class with one image is ignored.
    Without queries the loss is 0.
    """
    classes, own = labels.unique(return_inverse=True)  # [L], [N]
    members = F.one_hot(own, len(classes))  # [N, L]
    rank = (members.cumsum(0) * members).sum(1)  # [N], from 1 inside each class
    counts = members.sum(0)  # [L]
    support = (rank <= (counts[own] + 1) // 2) & (counts[own] > 1)
    query = (counts[own] > 1) & ~support
    if not query.any():
        return features.sum() * 0
    usable = counts > 1
    weights = (members * support[:, None]).T.to(features.dtype)[usable]  # [L', N]
    prototypes = weights @ features / weights.sum(1, keepdim=True)  # [L', D]
    distances = (features[query][:, None] - prototypes).square().sum(2)  # [Q, L']
    targets = usable.cumsum(0)[own[query]] - 1  # labels among the usable classes
    return F.cross_entropy(-distances, targets)
