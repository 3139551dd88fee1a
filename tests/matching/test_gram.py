"""Inner products, sums and sketches of long vectors: precision, memory, differences."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from stamp_core.core.paths import ROOT
from stamp_core.matching.gram import Difference, Sketch, combine, gram, layer_blocks, squared_norms
from stamp_core.matching.match import MatchingParams, match, match_gram


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("width", [1, 100, 70_000, 1_200_000])
def test_inner_products_of_float32_vectors_are_exact_to_one_rounding(width: int) -> None:
    """Relative to the two norms the error stays near the 6e-8 of one rounding, whatever the
    length; a float32 sum of 10^6 products would have an error of 1e-5."""
    vectors = torch.randn(4, width, generator=torch.Generator().manual_seed(0)) + 0.5
    expected = vectors.double() @ vectors.double().T
    norms = expected.diagonal().sqrt()
    for form in (vectors, list(vectors)):
        products = gram(form)
        assert products.shape == (1, 4, 4) and products.dtype == torch.float64
        assert ((products[0] - expected).abs() <= 1.2e-7 * norms[:, None] * norms).all()
        assert (products == products.mT).all()
    np.testing.assert_allclose(squared_norms(vectors), expected.diagonal(), rtol=2e-7)


def test_products_and_sums_of_blocks() -> None:
    vectors = normal(3, 1_000_003)
    sizes = [300_001, 2, 700_000]
    parts = vectors.split(sizes, 1)
    for block, part in zip(gram(vectors, sizes), parts, strict=True):
        torch.testing.assert_close(block, part @ part.T)
    coefficients = normal(3, 3)
    expected = torch.cat([c @ part for c, part in zip(coefficients, parts, strict=True)])
    for form in (vectors, list(vectors), list(vectors.float())):
        total = combine(form, coefficients, sizes)
        assert total.dtype == form[0].dtype
        assert (total - expected).norm() <= 1e-6 * expected.norm()


def test_the_precision_of_matrix_products_is_set_and_restored() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        vectors = normal(8, 20_000)
        error = (gram(vectors.float()) - gram(vectors)).abs().max() / 20_000
        assert torch.get_float32_matmul_precision() == "medium" and error < 1e-6
    finally:
        torch.set_float32_matmul_precision(before)


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
for given, blocks in ((vectors, "model"), (differences, "model"), (vectors, "elements")):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    match(given, MatchingParams(blocks=blocks))
    print((memory("VmHWM") - before) / (4 * size))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs this process's own peak")
def test_a_match_takes_the_memory_of_one_more_vector() -> None:
    """The result itself and column chunks of a few megabytes; a second vector would give 2."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert len(done.stdout.split()) == 3
    assert all(0.5 < vectors < 2 for vectors in map(float, done.stdout.split()))


def test_a_difference_is_equivalent_to_the_vector_itself() -> None:
    base, others = normal(70_000).float(), normal(3, 70_000, seed=1).float()
    differences = [Difference(base, other) for other in others]
    for blocks in ("model", "layers", "elements"):
        one, other = (
            match(each, MatchingParams(blocks=blocks), sizes=[1, 30_000, 39_999])[0]
            for each in (differences, base - others)
        )
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(Sketch(70_000)(differences[0]), Sketch(70_000)(base - others[0]))


def test_a_sketch_is_unbiased_with_the_documented_variance() -> None:
    """Var <sa, sb> = sum over places of |a|^2 |b|^2 + <a, b>^2 - 2 <a^2, b^2>: with independent
    signs only products of two positions in a place vary, once as a_p b_q and once as a_q b_p."""
    width, length, draws = 16, 200, 3000
    a, b = normal(2, length)
    sketches = (Sketch(length, seed, width=width) for seed in range(draws))
    products = [float(sketch(a) @ sketch(b)) for sketch in sketches]
    padded = torch.zeros(2, 208, dtype=torch.float64)
    padded[:, :length] = torch.stack([a, b])
    x, y = padded.view(2, 13, width)
    norms = x.square().sum(0) * y.square().sum(0) + (x * y).sum(0).square()
    variance = float(norms.sum() - 2 * (x * y).square().sum())
    assert np.mean(products) == pytest.approx(float(a @ b), abs=4 * (variance / draws) ** 0.5)
    assert np.var(products) == pytest.approx(variance, rel=0.15)


def test_sketches_are_matched_nearly_as_the_gradients_themselves() -> None:
    """Width 2^16: inner products err by about |a| |b| / 256, so F by about that share of |g|^2."""
    gradients = (normal(6, 300_000) + 2 * normal(300_000, seed=1)).float()
    sketch = Sketch(300_000, "rows", 7)
    assert sketch.signs.dtype == torch.int8 and sketch.signs.abs().min() == 1
    short = torch.stack([sketch(gradient) for gradient in gradients])
    assert short.shape == (6, 2**16)
    assert torch.equal(short[0], Sketch(300_000, "rows", 7)(gradients[0]))
    assert not torch.equal(short[0], Sketch(300_000, "rows", 8)(gradients[0]))
    norms = gradients.norm(dim=1)
    error = (gram(short) - gram(gradients))[0] / (norms[:, None] * norms)
    assert 1e-5 < error.abs().max() < 5 / 256
    d = combine(gradients, match_gram(gram(short), MatchingParams()).coefficients)
    exact = match(gradients, MatchingParams())[0]
    assert (d - exact).norm() < 0.1 * exact.norm()


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
def test_small_tensors_share_a_block(numels: list[int], expected: list[int]) -> None:
    assert layer_blocks(numels) == expected
