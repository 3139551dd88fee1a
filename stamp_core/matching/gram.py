"""Inner products, weighted sums and sketches of vectors as long as the model, without copies."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stamp_core.config.decode import invalid
from stamp_core.core.seeding import generator
from stamp_core.matching.simplex import Array

_SHORT = 4096  # columns whose products are added up in float32


class Difference:
    """The vector `left` - `right`, which is computed piece by piece where it is read."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.shape, self.dtype, self.device = left.shape, left.dtype, left.device

    def __len__(self) -> int:
        """The number of elements."""
        return len(self.left)

    def narrow(self, dimension: int, start: int, length: int) -> Tensor:
        """A piece of the vector, as `Tensor.narrow`."""
        left, right = (x.narrow(dimension, start, length) for x in (self.left, self.right))
        return left - right


Vector = Tensor | Difference
Vectors = Sequence[Vector] | Tensor  # K vectors [P], or one tensor [K, P]


def gram(
    vectors: Vectors, sizes: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The Gram matrix of the vectors in each block.  # [L, K, K], float64, on the CPU"""
    count, device, blocks = len(vectors), vectors[0].device, []
    for start, size in _spans(vectors, sizes):
        total = torch.zeros(count, count, dtype=torch.float64, device=device)
        for columns in column_chunks(vectors, start, size, dtype):
            total += inner_products(columns, columns)
        blocks.append((total + total.T) / 2)  # rounding in float32 may break the symmetry
    return torch.stack(blocks).cpu()


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T: float32 sums over short pieces, which limit rounding, added in float64."""
    count = left.shape[1] // _SHORT
    a, b = (x[:, : count * _SHORT].unflatten(1, (count, _SHORT)) for x in (left, right))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # not TF32 or bfloat16
    try:
        total = left[:, count * _SHORT :].matmul(right[:, count * _SHORT :].T).double()
        parts = torch.bmm(a.transpose(0, 1), b.transpose(0, 1).mT)  # [count, K, K']
        return total.add_(parts.sum(0, dtype=torch.float64))
    finally:
        torch.set_float32_matmul_precision(precision)


def squared_norms(vectors: Vectors) -> Array:
    """The squared norm of each vector.  # [K]"""
    total = torch.zeros(len(vectors), dtype=torch.float64, device=vectors[0].device)
    for columns in column_chunks(vectors, 0, len(vectors[0])):
        total += columns.square().sum(1)
    return total.cpu().numpy()


def combine(
    vectors: Vectors,
    coefficients: Tensor,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """sum_i coefficients[block, i] vectors[i], block by block.  # [P]"""
    first = vectors[0]
    result = torch.zeros(first.shape, dtype=dtype or sum_dtype(vectors), device=first.device)
    width = _cache_size(result.device) // 16
    for (start, size), row in zip(_spans(vectors, sizes), coefficients.tolist(), strict=True):
        for place, length in _pieces(start, size, width):
            part = result.narrow(0, place, length)
            for vector, coefficient in zip(vectors, row, strict=True):
                if coefficient:  # a vector that takes no part may hold nan, and 0 * nan is nan
                    part.add_(vector.narrow(0, place, length), alpha=coefficient)
    return result


def column_chunks(
    vectors: Vectors, start: int, size: int, dtype: torch.dtype | None = None
) -> Iterator[Tensor]:
    """Columns start .. start + size, as many at a time as the cache holds.  # [K, few]"""
    width = max(64, _cache_size(vectors[0].device) // (4 * len(vectors)))
    dtype = dtype or sum_dtype(vectors)
    for first, length in _pieces(start, size, width):
        if isinstance(vectors, Tensor):
            yield vectors.narrow(1, first, length).to(dtype)
        else:
            yield torch.stack([each.narrow(0, first, length) for each in vectors]).to(dtype)


def sum_dtype(vectors: Vectors) -> torch.dtype:
    """The type of sums of these vectors: float32, or float64 for vectors in float64."""
    return torch.promote_types(vectors[0].dtype, torch.float32)


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


def _cache_size(device: torch.device) -> int:
    """The number of bytes to work on at a time: on a CPU what its cache holds."""
    return 2**22 if device.type == "cpu" else 2**25


def layer_blocks(numels: Sequence[int], minimum: int = 1024) -> list[int]:
    """Block sizes: one block per tensor; small tensors share a block or join the one before."""
    blocks, pending = list[int](), 0
    for numel in numels:
        if numel >= minimum and blocks:
            blocks[-1], pending = blocks[-1] + pending, 0
        pending += numel
        if pending >= minimum:
            blocks, pending = [*blocks, pending], 0
    if blocks:
        blocks[-1] += pending
    return blocks or [pending]


class Sketch:
    """A CountSketch: short vectors whose inner products are unbiased estimates.

    sketch[j] sums sign[p] vector[p] over the positions p = j modulo width. In <sketch a, sketch b>
    only products of two positions with the same j are noise: its variance is the sum over j of
    |a|^2 |b|^2 + <a, b>^2 - 2 <a^2, b^2>, about (|a|^2 |b|^2 + <a, b>^2) / width.
    """

    def __init__(self, length: int, *address: int | str, width: int = 2**16) -> None:
        draw = generator("sketch", length, width, *address)
        signs = torch.randint(0, 2, (length,), generator=draw, dtype=torch.int8)
        self.signs = signs.mul_(2).sub_(1)  # [P]
        self.width = width

    def __call__(self, vector: Tensor) -> Tensor:
        """The sketch of a vector.  # [width]"""
        result = torch.zeros(self.width, dtype=sum_dtype([vector]), device=vector.device)
        for first, length in _pieces(0, len(vector), self.width):
            signs = self.signs.narrow(0, first, length).to(vector.device)
            result[:length].addcmul_(vector.narrow(0, first, length).to(result.dtype), signs)
        return result
