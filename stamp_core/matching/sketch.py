"""Random projections that keep inner products in the mean: count sketches."""

import torch
from torch import Tensor

from stamp_core.matching.gram import Vector

CHUNK = 2**20  # elements that are drawn at a time


def sketch(vector: Vector, numbers: int, draw: torch.Generator) -> Tensor:
    """Sums of the vector's elements, each with a random sign in one random sum; float32 [numbers].

    This is a k x P matrix with one entry of 1 or -1 in each column (Charikar et al., 2002). Inner
    products of sketches have the right mean and the variance
    (|x|^2 |y|^2 + <x, y>^2 - 2 sum_p x_p^2 y_p^2) / k: below that of a matrix of draws from
    N(0, 1 / k), which takes k times as many. From k = P on, it is the vector itself.
    """
    length = len(vector)
    if numbers >= length:
        return vector.narrow(0, 0, length).float().clone()
    sums = torch.zeros(2, numbers, dtype=torch.float64, device=vector.device)  # with + and with -
    for start in range(0, length, CHUNK):
        size = min(CHUNK, length - start)
        places = torch.randint(2 * numbers, (size,), generator=draw).to(vector.device)
        sums.view(-1).index_add_(0, places, vector.narrow(0, start, size).double())
    return (sums[0] - sums[1]).float()
