"""MixStyle mixes channel statistics of images."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_tasks import colour_images as images
from rule_tasks import generator
from scipy import stats

from stamp_core.coresets.memory import mix_statistics, mixing_weights, mixstyle_images

quick = settings(deadline=None, max_examples=50, derandomize=True)
seeds = st.integers(0, 10**6)


@quick
@given(seed=seeds, side=st.sampled_from([1, 2, 5]), spread=st.sampled_from([1, 2, 256]))
def test_a_weight_of_one_is_the_identity_bit_for_bit(seed, side, spread):
    content, style = images(4, 0, spread, seed, side), images(4, seed=seed + 1, side=side)
    assert torch.equal(mixstyle_images(content, style, torch.ones(4)), content)


@pytest.mark.parametrize("side", [1, 4])
def test_constant_images_stay_finite(side):
    """Constant content becomes the style's mean; a constant style leaves almost no contrast."""
    flat, rich = torch.full((2, 3, side, side), 7, dtype=torch.uint8), images(2, side=side)
    half = torch.full((2,), 0.5)
    assert torch.isfinite(mix_statistics(flat / 255.0, rich / 255.0, half)).all()
    expected = rich.double().mean((2, 3), keepdim=True).round().expand(rich.shape)
    assert torch.equal(mixstyle_images(flat, rich, torch.zeros(2)), expected.to(torch.uint8))
    faded = mixstyle_images(rich, flat, torch.zeros(2)).int()
    assert (faded - 7).abs().max() <= 1


@pytest.mark.parametrize("alpha", [0.1, 1.0, 4.0])
def test_mixing_weights_follow_the_beta_distribution(alpha):
    found = mixing_weights(5000, generator(), alpha).numpy()
    assert found.dtype == np.float64
    assert stats.kstest(found, stats.beta(alpha, alpha).cdf).pvalue > 0.01
