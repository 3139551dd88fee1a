"""Vectors as long as the model: their inner products, sums and sketches, without copies of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stamp_core.config import wrong
from stamp_core.seeding import generator

Array = NDArray[np.float64]
SHORT = 4096  # columns whose products are added up in float32


class Difference:
    """The vector `left` - `right`, formed piece by piece where it is looked at."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.shape, self.dtype, self.device = left.shape, left.dtype, left.device

    def __len__(self) -> int:
        """How many elements there are."""
        return len(self.left)

    def narrow(self, dimension: int, start: int, length: int) -> Tensor:
        """A piece, as of a tensor."""
        left, right = (x.narrow(dimension, start, length) for x in (self.left, self.right))
        return left - right


Vector = Tensor | Difference
Rows = Sequence[Vector] | Tensor  # K vectors [P], or one tensor [K, P]


def gram(rows: Rows, sizes: Sequence[int] | None = None) -> Tensor:
    """The inner products of the rows within each block.  # [L, K, K], float64, on the CPU"""
    blocks = []
    for start, size in spans(rows, sizes):
        total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows[0].device)
        for columns in chunks(rows, start, size):
            total += products(columns, columns)
        blocks.append((total + total.T) / 2)  # rounding in float32 may be lopsided
    return torch.stack(blocks).cpu()


def products(left: Tensor, right: Tensor) -> Tensor:
    """left right': float32 sums of pieces, short lest rounding piles up, added in float64."""
    count = left.shape[1] // SHORT
    with float32_products():
        total = left[:, count * SHORT :].matmul(right[:, count * SHORT :].T).double()
        a, b = (
            each[:, : count * SHORT].unflatten(1, (count, SHORT)).transpose(0, 1)
            for each in (left, right)
        )  # [count, rows, SHORT]
        return total.add_(torch.bmm(a, b.mT).sum(0, dtype=torch.float64))


def squares(rows: Rows) -> Array:
    """The squared length of every row.  # [K]"""
    total = torch.zeros(len(rows), dtype=torch.float64, device=rows[0].device)
    for columns in chunks(rows, 0, len(rows[0])):
        total += columns.square().sum(1)
    return total.cpu().numpy()


def combine(rows: Rows, coefficients: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    """The sum of coefficients[block, i] rows[i], block by block.  # [P]"""
    result = torch.zeros(rows[0].shape, dtype=working(rows), device=rows[0].device)
    width = cached(result.device) // 16
    for (start, size), shares in zip(spans(rows, sizes), coefficients.tolist(), strict=True):
        for first, many in steps(start, size, width):
            part = result.narrow(0, first, many)
            for row, share in zip(rows, shares, strict=True):
                if share:  # a row without a share may hold anything, and 0 * nan is nan
                    part.add_(row.narrow(0, first, many), alpha=share)
    return result


def spans(rows: Rows, sizes: Sequence[int] | None) -> list[tuple[int, int]]:
    """Start and size of every block."""
    sizes = [len(rows[0])] if sizes is None else list(sizes)
    if sum(sizes) != len(rows[0]):
        raise wrong("sizes", sizes, f"{len(rows[0])} elements in all")
    return [(sum(sizes[:block]), size) for block, size in enumerate(sizes)]


def chunks(rows: Rows, start: int, size: int) -> Iterator[Tensor]:
    """Columns start .. start + size, as many at a time as a cache holds.  # [K, few]"""
    width = max(64, cached(rows[0].device) // (4 * len(rows)))
    for first, many in steps(start, size, width):
        if isinstance(rows, Tensor):
            yield rows.narrow(1, first, many).to(working(rows))
        else:
            yield torch.stack([row.narrow(0, first, many) for row in rows]).to(working(rows))


def steps(start: int, size: int, width: int) -> Iterator[tuple[int, int]]:
    """start .. start + size in pieces: where each begins and how long it is, at most `width`."""
    for first in range(start, start + size, width):
        yield first, min(width, start + size - first)


def cached(device: torch.device) -> int:
    """Bytes worth working on at a time: on a CPU what its cache holds."""
    return 2**22 if device.type == "cpu" else 2**25


def working(rows: Rows) -> torch.dtype:
    """What sums are done in: float32, or float64 for rows of float64."""
    return torch.promote_types(rows[0].dtype, torch.float32)


@contextmanager
def float32_products() -> Iterator[None]:
    """Products of float32 matrices are not rounded to TF32 or bfloat16 in here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def layers(numels: Sequence[int], least: int = 1024) -> list[int]:
    """Sizes of blocks: one a tensor; small tensors fill a block together or join the one before."""
    blocks: list[int] = []
    waiting = 0
    for numel in numels:
        if numel >= least and blocks:
            blocks[-1] += waiting
            waiting = 0
        waiting += numel
        if waiting >= least:
            blocks.append(waiting)
            waiting = 0
    if blocks:
        blocks[-1] += waiting
    return blocks or [waiting]


class Sketch:
    """Rows as short vectors whose inner products are right on average.

    sketch[j] sums sign[p] row[p] over the positions p = j modulo width. Of <sketch a, sketch b>
    only products of two positions in one place are noise: its variance is the sum over places of
    |a|^2 |b|^2 + <a, b>^2 - 2 <a^2, b^2>, about (|a|^2 |b|^2 + <a, b>^2) / width.
    """

    def __init__(self, length: int, *where: int | str, width: int = 2**16) -> None:
        draw = generator("sketch", length, width, *where)
        signs = torch.randint(0, 2, (length,), generator=draw, dtype=torch.int8)
        self.signs = signs.mul_(2).sub_(1)  # [P]
        self.width = width

    def __call__(self, row: Tensor) -> Tensor:
        """The sketch of a row.  # [width]"""
        result = torch.zeros(self.width, dtype=working([row]), device=row.device)
        for first, many in steps(0, len(row), self.width):
            signs = self.signs.narrow(0, first, many).to(row.device)
            result[:many].addcmul_(row.narrow(0, first, many).to(result.dtype), signs)
        return result
