"""Networks: the published sizes, seeds, and refusals by name."""

import sys

import pytest
import torch
from torch import nn

from stamp_core import models, vision
from stamp_core.config import Network, ParameterError
from stamp_core.vectors import FlatModel, flatten

PAPER = Network("cnn", features=512, channels=(32, 64))
SMALL = [
    Network("mlp", features=8),
    Network("cnn", features=8, channels=(4, 6)),
    Network("cnn", features=8, channels=(4, 6), norm="batch"),
    Network("cnn", features=8, channels=(4, 6), norm="group"),
]


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def weights(network: Network, seed: int) -> torch.Tensor:
    return flatten(list(models.build(network, (3, 20, 20), 5, seed).parameters()))


def test_the_papers_cnn() -> None:
    """3 * 25 * 32 + 32 = 2,432; 32 * 25 * 64 + 64 = 51,264; sides 32 -> 14 -> 5, so
    64 * 25 * 512 + 512 = 819,712; 512 * 100 + 100 = 51,300: together 924,708."""
    network = models.build(PAPER, (3, 32, 32), 100, seed=0)
    assert size(network) == 924_708
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize(("classes", "parameters"), [(1000, 11_689_512), (100, 11_227_812)])
def test_resnet18_is_the_published_one(classes: int, parameters: int) -> None:
    """torchvision's card says 11,689,512 for 1000 classes; 900 classes fewer save 900 * 513. Its
    20 norms of 64 to 512 channels hold 4,800 means and as many variances."""
    model = FlatModel(models.build(Network("resnet18", norm="batch"), (3, 32, 32), classes, 0))
    assert len(model.parameters) == parameters and len(model.buffers) == 9_600
    assert model.module.encoder.conv1.kernel_size == (7, 7)


def test_resnet18_with_group_norm_has_no_buffers() -> None:
    network = models.build(Network("resnet18", norm="group"), (3, 32, 32), 10, seed=0)
    kinds = [type(m) for m in network.modules() if "Norm" in type(m).__name__]
    assert kinds == [nn.GroupNorm] * 20 and not list(network.buffers())
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_mlp_by_hand() -> None:
    """64 * 7 + 7 hidden, 7 * 10 + 10 in the head; no weight depends on the pictures' layout."""
    network = models.build(Network("mlp", features=7), (1, 8, 8), 10, seed=0)
    assert size(network) == 455 + 80
    assert network.encoder(torch.zeros(3, 1, 8, 8)).shape == (3, 7)


@pytest.mark.parametrize("network", SMALL, ids=lambda n: f"{n.kind}-{n.norm}")
def test_logits_are_the_head_on_the_encoders_features(network: Network) -> None:
    model = models.build(network, (3, 20, 20), 5, seed=0).eval()
    pictures = torch.randn(2, 3, 20, 20)
    features = model.encoder(pictures)
    assert features.shape == (2, 8) and (features >= 0).all()
    logits = features @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(pictures), logits)


@pytest.mark.parametrize(
    ("norm", "kind", "groups"), [("batch", nn.BatchNorm2d, None), ("group", nn.GroupNorm, [4, 8])]
)
def test_norms_of_the_cnn(norm: str, kind: type[nn.Module], groups: list[int] | None) -> None:
    """Group norm takes the greatest number of groups up to 8 that parts the channels evenly."""
    network = models.build(Network("cnn", channels=(12, 16), norm=norm), (3, 20, 20), 5, seed=0)
    found = [m for m in network.modules() if isinstance(m, kind)]
    assert [m.weight.numel() for m in found] == [12, 16]
    assert groups is None or [m.num_groups for m in found] == groups
    assert bool(list(network.buffers())) == (norm == "batch")


@pytest.mark.parametrize("network", SMALL, ids=lambda n: f"{n.kind}-{n.norm}")
def test_the_seed_alone_decides_the_weights(network: Network) -> None:
    first = weights(network, 1)
    torch.rand(3)
    assert torch.equal(weights(network, 1), first)
    assert (weights(network, 2) != first).float().mean() > 0.8


def test_building_leaves_global_randomness_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    models.build(SMALL[2], (3, 20, 20), 5, seed=1)
    with pytest.raises(ParameterError):
        models.build(SMALL[2], (3, 8, 8), 5, seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_the_dry_run_leaves_no_trace_in_the_buffers() -> None:
    network = models.build(SMALL[2], (3, 20, 20), 5, seed=0)
    means = [b for name, b in network.named_buffers() if name.endswith("running_mean")]
    assert len(means) == 2 and not any(mean.any() for mean in means)
    assert network.training


@pytest.mark.parametrize(("side", "fits"), [(16, True), (15, False)])
def test_too_many_convolutions_are_refused_by_name(side: int, fits: bool) -> None:
    """16 -> 12 -> 6 -> 2 -> 1 is a picture still, 15 -> 11 -> 5 -> 1 -> 0 is none. The shorter
    side counts."""
    shape = (3, 24, side)
    network = Network("cnn", features=8, channels=(4, 6))
    if fits:
        assert models.build(network, shape, 5, seed=0)(torch.zeros(1, *shape)).shape == (1, 5)
        return
    with pytest.raises(ParameterError) as error:
        models.build(network, shape, 5, seed=0)
    assert str(error.value) == (
        "network.channels is [4, 6]; it must be shorter for (3, 24, 15) pictures"
    )


def test_resnet18_is_refused_for_grey_pictures() -> None:
    with pytest.raises(ParameterError) as error:
        models.build(Network("resnet18", norm="batch"), (1, 32, 32), 5, seed=0)
    assert str(error.value) == (
        "network.kind is 'resnet18'; it must be another: the pictures are not in colour"
    )


def test_torchvision_loads_whatever_the_build_of_torch() -> None:
    torchvision = vision.load()
    assert torchvision is vision.load() is sys.modules["torchvision"]
    with torch.device("meta"):  # shapes only
        assert size(torchvision.models.swin_t()) == 28_288_354
