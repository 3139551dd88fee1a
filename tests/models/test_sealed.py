"""Sealed vectors: their one sum is that of the vectors, and nothing else is to be had."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stamp_core.models.flat import weighted_average
from stamp_core.models.sealed import OPERATORS, Sealed, SingleUploadError, weighted_sum

WEIGHTS = [3.0, 0.0, 1e-3, 170.0]


def vectors(length: int = 1000) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(length, generator=draw) * 10**k for k in range(len(WEIGHTS))]


def sealed(plain: list[Tensor]) -> list[Sealed]:
    return [Sealed(vector, client) for client, vector in enumerate(plain)]


def test_a_mean_of_sealed_vectors_is_bit_identical_to_that_of_the_vectors():
    plain = vectors()
    moved = [each.to("cpu") for each in sealed(plain)]
    assert torch.equal(weighted_average(moved, WEIGHTS), weighted_average(plain, WEIGHTS))


def test_a_vector_of_weight_0_may_hold_nan():
    plain = vectors()
    expected = weighted_sum(plain, WEIGHTS)
    plain[1].fill_(torch.nan)
    assert torch.equal(weighted_sum(sealed(plain), WEIGHTS), expected)


ONES = torch.ones(3)
REFUSED: dict[str, tuple[list[Tensor | Sealed], list[float]]] = {
    "one": ([Sealed(ONES, 5)], [1.0]),
    "two of one client": ([Sealed(ONES, 5), Sealed(ONES, 5)], [1.0, 1.0]),
    "one of two without weight": ([Sealed(ONES, 5), Sealed(ONES, 6)], [1.0, 0.0]),
    "one and a known vector": ([ONES, Sealed(ONES, 5)], [1.0, 1.0]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_sum_that_shows_one_upload_is_refused(case):
    with pytest.raises(SingleUploadError, match="client 5 alone"):
        weighted_sum(*REFUSED[case])


def test_a_second_sum_is_refused():
    uploads = sealed(vectors())
    weighted_sum(uploads, WEIGHTS)
    with pytest.raises(SingleUploadError, match="second sum with the upload of client 0"):
        weighted_sum(uploads, [1.0, 0.0, 0.0, 1.0])


READINGS: dict[str, Callable[[Any], object]] = {
    "norm": lambda v: v.norm(),
    "difference": lambda v: torch.ones(3) - v,
    "in place": lambda v: torch.ones(3).copy_(v),
    "stack": lambda v: torch.stack([torch.ones(3), v]),
    "equal": lambda v: torch.equal(torch.ones(3), v),
    "list": list,
    "numbers": float,
    "data": lambda v: v.data,
    **{name: lambda v, name=name: getattr(v, f"__{name}__")(1) for name in OPERATORS.split()},
}


@pytest.mark.parametrize("reading", READINGS)
def test_reading_a_single_upload_is_refused(reading):
    with pytest.raises(SingleUploadError):
        READINGS[reading](Sealed(torch.ones(3), 0))
