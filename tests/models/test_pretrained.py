"""Pretrained weights: torchvision's files and those of run records, misfits and damaged files."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stamp_core.config.decode import ParameterError
from stamp_core.config.schema import Network
from stamp_core.core import paths, vision
from stamp_core.models.encoders import Shape
from stamp_core.models.networks import Classifier, build_network
from stamp_core.models.pretrained import weights_digest

BIAS, WEIGHT = "encoder.1.bias", "encoder.1.weight"
SMALL_STEM = Network("resnet18", norm="batch", stem="small")
NETWORKS = [
    Network("mlp", features=8),
    Network("cnn", features=8, channels=(4, 6), norm="batch"),
    Network("lenet"),
    SMALL_STEM,
    Network("swin_t"),
    Network("last_block", channels=(5,)),
]


def recorded(network: Classifier) -> dict[str, Tensor]:
    values = network.state_dict().items()
    return {name: value.clone() for name, value in values if not name.endswith("batches_tracked")}


def refusal(network: Network, shape: Shape) -> str:
    with pytest.raises(ParameterError) as error:
        build_network(network, shape, 5, seed=0)
    return str(error.value)


@pytest.fixture
def raw(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RAW", tmp_path)
    return tmp_path


def torchvision_network(kind: str) -> nn.Module:
    """torchvision's network over five classes, with statistics of batch normalisation."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        net: nn.Module = getattr(vision.load_torchvision().models, kind)(num_classes=5)
    for key, buffer in net.named_buffers():
        if key.endswith(("mean", "var")):
            buffer += 0.5
    return net.eval()


def write_weights(values: dict[str, Tensor], path: Path) -> None:
    save_file(values, path) if path.suffix == ".safetensors" else torch.save(values, path)


def mlp(file: str) -> Network:
    """A network for images of 12 values with 3 features and weights from a file."""
    return Network("mlp", features=3, pretrained=file)


def mlp_weights() -> dict[str, Tensor]:
    """Weights that fit it, over 5 classes."""
    shapes = {WEIGHT: (3, 12), BIAS: (3,), "head.weight": (5, 3), "head.bias": (5,)}
    return {name: torch.full(shape, 0.5) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("kind", "file"), [("resnet18", "w.pth"), ("resnet18", "w.safetensors"), ("swin_t", "w.pth")]
)
def test_torchvisions_weights_give_torchvisions_logits(raw, kind, file):
    net, images = torchvision_network(kind), torch.randn(2, 3, 20, 20)
    write_weights(net.state_dict(), raw / file)
    network = Network(kind, norm="batch" if kind == "resnet18" else "none", pretrained=file)
    loaded = build_network(network, (3, 20, 20), 5, seed=0).eval()
    assert torch.equal(loaded(images), net(images))


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.kind)
def test_the_weights_of_a_run_record_load_bit_identically(raw, network):
    model = build_network(network, (3, 20, 20), 5, seed=0)
    model.train()(torch.randn(4, 3, 20, 20))
    save_file(recorded(model), raw / "w.safetensors")
    loaded = build_network(replace(network, pretrained="w.safetensors"), (3, 20, 20), 5, seed=9)
    stored, values = recorded(model), recorded(loaded)
    assert all(torch.equal(values[name], value) for name, value in stored.items())


@pytest.mark.parametrize("names", ["torchvision", "run record", "without a head"])
def test_a_head_over_other_classes_is_not_loaded(raw, names):
    """The encoder is the file's, of seed 5; the head is that of the seed asked for."""
    stored = recorded(build_network(SMALL_STEM, (3, 8, 8), 7, seed=5))
    encoder = {k: v for k, v in stored.items() if k.startswith("encoder.")}
    if names == "torchvision":
        stored = {k.replace("encoder.", "").replace("head.", "fc."): v for k, v in stored.items()}
    torch.save(encoder if names == "without a head" else stored, raw / "w.pt")
    network = Network("resnet18", norm="batch", stem="small", pretrained="w.pt")
    loaded, initial = (
        recorded(build_network(each, (3, 8, 8), 5, seed=1)) for each in (network, SMALL_STEM)
    )
    assert len(encoder) == len(loaded) - 2 == 100
    assert all(torch.equal(loaded[k], v) for k, v in encoder.items())
    assert all(torch.equal(loaded[k], initial[k]) for k in ("head.weight", "head.bias"))


def test_float16_weights_are_read_as_float32(raw):
    torch.save({name: value.half() for name, value in mlp_weights().items()}, raw / "w.pth")
    loaded = build_network(mlp("w.pth"), (3, 2, 2), 5, seed=0)
    assert all(p.dtype is torch.float32 and (p == 0.5).all() for p in loaded.parameters())


MISFITS: dict[str, dict[str, object]] = {
    f"lacks '{BIAS}', float32 [3]": {k: v for k, v in mlp_weights().items() if k != BIAS},
    "has 'more.weight', which is not in": {**mlp_weights(), "more.weight": torch.zeros(3)},
    f"has '{WEIGHT}' as float32 [3, 13] instead of float32 [3,": {
        **mlp_weights(),
        WEIGHT: torch.zeros(3, 13),
    },
    f"has '{BIAS}' with values that are not": {
        **mlp_weights(),
        BIAS: torch.tensor([0.0, float("nan"), 0.0]),
    },
    "holds more than tensors by name": {"epoch": 3, "model": mlp_weights()},
}


@pytest.mark.parametrize("problem", MISFITS)
def test_weights_that_do_not_fit_are_refused_by_name(raw, problem):
    torch.save(MISFITS[problem], raw / "w.pth")
    message = f"network.pretrained is 'w.pth'; it must be a file of weights of this mlp: {raw}"
    assert refusal(mlp("w.pth"), (3, 2, 2)).startswith(f"{message}/w.pth {problem}")


@pytest.mark.parametrize("file", ["w.pth", "w.safetensors"])
def test_a_file_that_is_no_file_of_weights_is_refused(raw, file):
    write_weights(mlp_weights(), raw / file)
    whole = (raw / file).read_bytes()
    kind = "torch" if file == "w.pth" else "safetensors"
    for content in (b"", whole[: len(whole) // 2], b"<html>no such file</html>"):
        (raw / file).write_bytes(content)
        assert refusal(mlp(file), (3, 2, 2)) == (
            f"network.pretrained is '{file}'; it must be a whole {kind} file of tensors alone: "
            f"{raw / file} cannot be read as one"
        )


def test_a_missing_file_is_refused_and_a_digest_is_that_of_the_file(raw):
    message = f"network.pretrained is 'w.pth'; it must be a file: there is none at {raw / 'w.pth'}"
    assert refusal(mlp("w.pth"), (3, 2, 2)) == message
    (raw / "w.pth").write_bytes(b"abc")
    assert weights_digest(mlp("w.pth")) == hashlib.sha256(b"abc").hexdigest()
    assert weights_digest(Network("mlp")) is None
