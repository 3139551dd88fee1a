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


def test_a_sketch_is_a_product_with_a_sparse_matrix():
    x, _ = pair()
    torch.testing.assert_close(sketch(x, K, draw(3)).double(), matrix(3) @ x.double())


def test_it_is_read_in_chunks(monkeypatch):
    """Of a difference as of the vector, whose draws follow one another."""
    x, y = pair()
    whole = sketch(x - y, K, draw())
    monkeypatch.setattr(module, "CHUNK", 64)
    torch.testing.assert_close(sketch(Difference(x, y), K, draw()), whole)


@pytest.mark.parametrize("numbers", [P, P + 1])
def test_with_as_many_numbers_as_elements_it_is_the_vector(numbers):
    x, y = pair()
    assert torch.equal(sketch(x, numbers, draw()), x)
    assert torch.equal(sketch(Difference(x, y), numbers, draw()), x - y)
