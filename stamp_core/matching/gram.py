"""Inner products and weighted sums of vectors as long as the model, in float64 without copies."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stamp_core.config.decode import invalid
from stamp_core.core.devices import cache_size

CHUNK = 2**20  # elements of a sketch that are drawn at a time


class Difference:
    """The vector `left` - `right`, which is computed piece by piece where it is read."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.shape, self.dtype, self.device = left.shape, left.dtype, left.device

    def __len__(self) -> int:
        return len(self.left)

    def narrow(self, dimension: int, start: int, length: int) -> Tensor:
        left, right = (x.narrow(dimension, start, length) for x in (self.left, self.right))
        return left - right


Vector = Tensor | Difference
Vectors = Sequence[Vector] | Tensor  # K vectors [P], or one tensor [K, P]


def gram(vectors: Vectors, sizes: Sequence[int] | None = None) -> Tensor:
    """The Gram matrix of the vectors in each block.  # [L, K, K], float64, on the CPU"""
    count, device, blocks = len(vectors), vectors[0].device, []
    for start, size in _spans(vectors, sizes):
        total = torch.zeros(count, count, dtype=torch.float64, device=device)
        for columns in _column_chunks(vectors, start, size):
            total += columns @ columns.T
        blocks.append((total + total.T) / 2)  # rounding may break the symmetry
    return torch.stack(blocks).cpu()


def gram_rounding(vectors: Vectors, sizes: Sequence[int] | None = None) -> list[float]:
    """Bound of the error of products of weighted sums by `gram`, in each block.  # [L]

    Relative to sum_i |a_i| |x_i| and sum_i |b_i| |x_i|. A sum of n products, in whatever order, has
    an error of at most n u sum_p |x_p y_p|, u = 2^-53 (Higham, 2002, 3.1), and that sum is at most
    |x| |y|. The products of float32 numbers are exact; those of float64 numbers are rounded once
    more, as are sums and coefficients. The products a'Gb add 2 K terms.
    """
    width = _chunk_width(vectors)
    blocks = [size for _, size in _spans(vectors, sizes)]
    terms = [min(width, size) + math.ceil(size / width) + 2 * len(vectors) for size in blocks]
    return [1.01 * (count + 10) * 2.0**-53 for count in terms]


def products_with_sums(
    vectors: Vectors, coefficients: Tensor, sizes: Sequence[int] | None = None
) -> Tensor:
    """Inner products of the vectors and of m weighted sums of them with these sums, in each block.

    coefficients [L, m, K] -> [L, K + m, m], float64, on the CPU
    """
    count, blocks = coefficients.shape[1], []
    for (start, size), each in zip(_spans(vectors, sizes), coefficients, strict=True):
        weights = each.to(vectors[0].device)
        total = weights.new_zeros(len(vectors) + count, count)
        for columns in _column_chunks(vectors, start, size):
            sums = weights @ columns
            total[: len(vectors)] += columns @ sums.T
            total[len(vectors) :] += sums @ sums.T
        blocks.append(total)
    return torch.stack(blocks).cpu()


def orthonormal_coordinates(vectors: Vectors, sizes: Sequence[int] | None = None) -> list[Tensor]:
    """Coordinates of the vectors in an orthonormal basis of their span, block by block.  # [K, k]

    A QR decomposition column chunk by column chunk: without the squares of a Gram matrix, it also
    has the digits in which nearly dependent vectors differ, at about three times the cost.
    """
    blocks = []
    for start, size in _spans(vectors, sizes):
        triangle = torch.zeros(0, len(vectors), dtype=torch.float64, device=vectors[0].device)
        for columns in _column_chunks(vectors, start, size):
            triangle = torch.linalg.qr(torch.cat([triangle, columns.T]), mode="r").R
        blocks.append(triangle.T.cpu())
    return blocks


def combine(
    vectors: Vectors,
    coefficients: Tensor,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """sum_i coefficients[block, i] vectors[i], block by block; sums are in float64.  # [P]"""
    like = vectors[0]
    dtype = dtype or torch.promote_types(like.dtype, torch.float32)
    result = torch.empty(like.shape, dtype=dtype, device=like.device)
    width = cache_size(result.device) // 64
    for (start, size), row in zip(_spans(vectors, sizes), coefficients.tolist(), strict=True):
        for first, length in _pieces(start, size, width):
            total = torch.zeros(length, dtype=torch.float64, device=like.device)
            for vector, coefficient in zip(vectors, row, strict=True):
                if coefficient:  # a vector that takes no part may hold nan, and 0 * nan is nan
                    total.add_(vector.narrow(0, first, length), alpha=coefficient)
            result.narrow(0, first, length).copy_(total)
    return result


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
        indices = torch.randint(2 * numbers, (size,), generator=draw).to(vector.device)
        sums.view(-1).index_add_(0, indices, vector.narrow(0, start, size).double())
    return (sums[0] - sums[1]).float()


def _column_chunks(vectors: Vectors, start: int, size: int) -> Iterator[Tensor]:
    """Columns start .. start + size in float64, each time in the same memory.  # [K, few]"""
    device = vectors[0].device
    width = _chunk_width(vectors)
    buffer = torch.empty(len(vectors) * min(width, size), dtype=torch.float64, device=device)
    for first, length in _pieces(start, size, width):
        columns = buffer[: len(vectors) * length].view(len(vectors), length)
        for row, vector in zip(columns, vectors, strict=True):
            row.copy_(vector.narrow(0, first, length))
        yield columns


def _chunk_width(vectors: Vectors) -> int:
    """The number of columns that the cache holds in float64."""
    return max(2 * len(vectors), cache_size(vectors[0].device) // (8 * len(vectors)))


def _spans(vectors: Vectors, sizes: Sequence[int] | None) -> list[tuple[int, int]]:
    """Start and size of every block."""
    sizes = [len(vectors[0])] if sizes is None else list(sizes)
    if sum(sizes) != len(vectors[0]):
        raise invalid("sizes", sizes, f"{len(vectors[0])} elements in all")
    return [(sum(sizes[:block]), size) for block, size in enumerate(sizes)]


def _pieces(start: int, size: int, width: int) -> Iterator[tuple[int, int]]:
    """start .. start + size in pieces: the start and the length, at most `width`, of each."""
    for first in range(start, start + size, width):
        yield first, min(width, start + size - first)
