"""The published weights: features as by another author's network, and from the last block on."""

import numpy as np
import pytest
import torch
from torch import Tensor

from stamp_core.config.schema import Network
from stamp_core.core import paths
from stamp_core.data.images import ImageOptions, convert
from stamp_core.data.loading import load_dataset
from stamp_core.models.flat import FlatModel
from stamp_core.models.networks import build_network
from workbench.efficientnet import VARIANTS, load_encoder, save_last_block, weights_path

# Most machines do not have the weights: only these tests and `make pretrained` need them.
REASON = "`make test-pretrained` installs the extra `pretrained`"
published = pytest.importorskip("efficientnet_lite_pytorch", reason=REASON)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RAW", tmp_path / "raw")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    torch.set_num_threads(1)


def photographs(size: int, count: int = 2) -> Tensor:
    """Smooth images: of noise alone, features hardly differ."""
    draw = np.random.default_rng(size)
    coarse = draw.integers(0, 256, (count, 3, 5, 5), np.uint8)
    return torch.from_numpy(convert(coarse, ImageOptions(size=size)))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", [64, 100, 128])
def test_features_are_those_of_the_published_network(name, size):
    """It pads for one size of images, which is told; folded batch norms change last digits."""
    theirs = published.EfficientNet.from_name(name.replace("_", "-"), image_size=size)
    theirs.load_state_dict(torch.load(weights_path(name), weights_only=True))
    images = photographs(size)
    with torch.inference_mode():
        expected = theirs.eval().extract_features((images.float() - 127) / 128).mean((2, 3))
        found = load_encoder(name)(images)
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_last_block_goes_on_where_maps_end(name):
    """With its weights from the file: pooled features to 1e-4, and gradients in every tensor."""
    encoder, images = load_encoder(name), photographs(96)
    file, width = save_last_block(name).name, VARIANTS[name].widths[-1]
    network = Network("last_block", channels=(width,), pretrained=file)
    maps = encoder.maps(images)
    model = FlatModel(build_network(network, tuple(maps.shape[1:]), 5, seed=0))
    torch.testing.assert_close(model.module.encode(maps), encoder(images), rtol=0, atol=1e-4)
    model.module(maps).square().sum().backward()
    assert all(p.grad.any() for p in model.module.parameters())
    assert not any(p.requires_grad for p in encoder.parameters())


def test_maps_in_the_cache_are_what_the_last_block_needs(tmp_path):
    """Rounded to levels, they give the encoder's pooled features to a hundredth of their size."""
    (tmp_path / "raw").mkdir()
    images = photographs(32, 40)
    labels = np.arange(40) % 4
    arrays = {"x_train": images.numpy(), "y_train": labels}
    arrays |= {"x_test": images[:8].numpy(), "y_test": labels[:8]}
    np.savez(tmp_path / "raw" / "images.npz", **arrays)
    spec = {"source": "features", "of": {"source": "npz", "file": "images.npz"}, "size": 64}
    pooled, maps = (load_dataset({**spec, "output": output}) for output in ("pooled", "maps"))
    assert pooled.shape == (1280, 1, 1) and maps.shape == (208, 2, 2)
    encoder = load_encoder("efficientnet_lite2")
    x, mean, std = maps.x_test.float() / 255, maps.mean[:, None, None], maps.std[:, None, None]
    found = encoder.tail((x - mean) / std)
    resized = torch.from_numpy(convert(images[:8].numpy(), ImageOptions(size=64)))
    expected = encoder(resized)
    assert (found - expected).norm() < 0.02 * expected.norm()
    span = expected.std(0) > 0.05
    found = pooled.x_test[:, :, 0, 0].float()
    assert all(
        np.corrcoef(found[:, c], expected[:, c])[0, 1] > 0.999
        for c in span.nonzero().flatten().tolist()
    )
