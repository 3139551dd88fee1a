"""Sketches: products with a dense matrix that is made from the same draws."""

import pytest
import torch
from torch import Tensor

from stamp_core.matching import gram as module
from stamp_core.matching.gram import Difference, sketch

P, K = 400, 8


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair() -> tuple[Tensor, Tensor]:
    noise = torch.randn(2, P, generator=draw(5))
    common = torch.arange(P) / P
    return noise[0] * common, noise[1] + 2 * common


def matrix(seed: int) -> Tensor:
    """The matrix of a sketch, drawn again: one 1 or -1 in every column.  # float64 [K, P]"""
    dense = torch.zeros(K, P, dtype=torch.float64)
    for column, place in enumerate(torch.randint(2 * K, (P,), generator=draw(seed)).tolist()):
        dense[place % K, column] = 1.0 if place < K else -1.0
    return dense


@pytest.mark.parametrize("chunk", [64, P])
def test_a_sketch_is_a_product_with_a_sparse_matrix(chunk, monkeypatch):
    """Of a vector or a difference, read in chunks whose draws follow one another."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    x, y = pair()
    for vector in (x - y, Difference(x, y)):
        expected = matrix(3) @ (x - y).double()
        torch.testing.assert_close(sketch(vector, K, draw(3)).double(), expected)


@pytest.mark.parametrize("numbers", [P, P + 1])
def test_with_as_many_numbers_as_elements_it_is_the_vector(numbers):
    x, y = pair()
    assert torch.equal(sketch(x, numbers, draw()), x)
    assert torch.equal(sketch(Difference(x, y), numbers, draw()), x - y)
