"""Inner products, sums and coordinates of long vectors: precision, memory, differences."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small import normal
from torch import Tensor

from stamp_core.core.paths import ROOT
from stamp_core.matching.gram import (
    Difference,
    combine,
    gram,
    gram_rounding,
    orthonormal_coordinates,
    products_with_sums,
)
from stamp_core.matching.match import MatchingParams, match
from stamp_core.models.flat import layer_blocks


def exact_gram(vectors: Tensor) -> Tensor:
    """Inner products of float32 vectors, each sum rounded once.  # float64 [K, K]"""
    pairs = itertools.product(vectors.double(), repeat=2)
    sums = [math.fsum((one * other).tolist()) for one, other in pairs]
    return torch.tensor(sums, dtype=torch.float64).view(len(vectors), -1)


@pytest.mark.parametrize("width", [1, 40, 100, 70_000, 200_000, 300_000])
def test_inner_products_of_float32_vectors_are_exact_to_float64_and_their_rounding_bounded(width):
    """Relative to the two norms; one rounding to float32 would have an error of 6e-8.

    The products of float32 numbers are exact in float64, and `fsum` rounds their sum once. A matrix
    product in float64 is no reference: on some processors its error is the larger one. In sums of
    equal numbers all roundings go the same way.
    """
    alike = torch.tensor([[0.1], [0.7], [-0.3], [0.2]]).expand(4, width)
    drawn = torch.randn(4, width, generator=torch.Generator().manual_seed(0)) + 0.5
    for vectors, most in ((alike, 3e-11), (drawn, 1e-12)):
        expected = exact_gram(vectors)
        norms, (rounding,) = expected.diagonal().sqrt(), gram_rounding(vectors)
        for form in (vectors, list(vectors)):
            products = gram(form)
            assert products.shape == (1, 4, 4) and products.dtype == torch.float64
            errors = (products[0] - expected).abs() / norms[:, None] / norms
            assert errors.max() <= min(rounding, most) and rounding <= 3e-11
            assert (products == products.mT).all()
    assert gram_rounding(drawn, [width - width // 2, width // 2])[0] <= rounding


def test_products_sums_and_coordinates_of_blocks_by_definition():
    vectors, sizes, coefficients = normal(3, 500_003), [400_000, 2, 100_001], normal(3, 2, 3)
    parts = vectors.split(sizes, 1)
    for form in (vectors, list(vectors)):
        products = products_with_sums(form, coefficients, sizes)
        blocks = orthonormal_coordinates(form, sizes)
        assert products.shape == (3, 5, 2) and [len(block.T) for block in blocks] == [3, 2, 3]
        for k, (part, c) in enumerate(zip(parts, coefficients, strict=True)):
            torch.testing.assert_close(gram(form, sizes)[k], part @ part.T)
            torch.testing.assert_close(blocks[k] @ blocks[k].T, part @ part.T)
            torch.testing.assert_close(products[k], torch.cat([part, c @ part]) @ (c @ part).T)
    expected = torch.cat([c[0] @ part for c, part in zip(coefficients, parts, strict=True)])
    for form in (vectors, list(vectors.float())):
        total = combine(form, coefficients[:, 0], sizes)
        assert total.dtype == form[0].dtype
        assert (total - expected).norm() <= 1e-6 * expected.norm()


def test_sums_of_float32_vectors_are_rounded_once():
    """1e6 (a - a) + b is b; a sum in float32 has errors of 6e-8 of its largest term."""
    a, b = normal(2, 100_000).float()
    total = combine([a, b, a], torch.tensor([[1e6, 1.0, -1e6]], dtype=torch.float64))
    torch.testing.assert_close(total, b, rtol=1e-7, atol=1e-9)


def test_coordinates_have_the_digits_in_which_nearly_equal_vectors_differ():
    """|a - b| = 1e-10 |c|: its square, 1e-20, is below the rounding of the Gram matrix."""
    a, c = normal(2, 400_000) / 400_000**0.5
    first, second = orthonormal_coordinates([a, a + 1e-10 * c])[0]
    assert float((second - first).norm()) == pytest.approx(1e-10 * float(c.norm()), rel=1e-4)


MEMORY = """
import re, pathlib, torch
from stamp_core.matching.gram import Difference
from stamp_core.matching.match import MatchingParams, match
def memory(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(name + r":\\s+(\\d+)", status)[1])
torch.set_num_threads(1)
match(torch.randn(6, 300_000), MatchingParams())
size = 16_000_000
vectors = [torch.ones(size) for _ in range(6)]
differences = [Difference(each, vectors[0]) for each in vectors[1:]]
for given in (vectors, differences):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    match(given, MatchingParams())
    print((memory("VmHWM") - before) / (4 * size))
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the peak of one process is in Linux's /proc alone",
)
def test_a_match_takes_the_memory_of_one_more_vector():
    """The result itself and column chunks of a few megabytes; a second vector would give 2."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert len(done.stdout.split()) == 2
    assert all(0.5 < vectors < 2 for vectors in map(float, done.stdout.split()))


def test_a_difference_is_equivalent_to_the_vector_itself():
    base, others = normal(70_000).float(), normal(3, 70_000, seed=1).float()
    differences = [Difference(base, other) for other in others]
    for blocks in ("model", "layers"):
        one, other = (
            match(each, MatchingParams(blocks=blocks), sizes=[1, 30_000, 39_999])[0]
            for each in (differences, base - others)
        )
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("numels", "expected"),
    [
        ([5000, 64, 64, 3000], [5128, 3000]),
        ([10, 20, 3000, 2000], [3030, 2000]),
        ([600, 600, 5, 4000], [1205, 4000]),
        ([600, 600, 600, 600], [1200, 1200]),
        ([10, 20], [30]),
        ([1024], [1024]),
        ([], [0]),
    ],
)
def test_small_tensors_share_a_block(numels, expected):
    assert layer_blocks(numels) == expected
