"""Gradients of groups of images from one pass: those of a backward pass for each group."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.config.schema import Network
from stamp_core.models.flat import FlatModel
from stamp_core.models.group_gradients import group_gradients, in_one_pass
from stamp_core.models.networks import Classifier, build_network

SIZES = [3, 1, 4]
NETWORKS = {
    "mlp": Network("mlp", features=8),
    "cnn": Network("cnn", features=8, channels=(3, 4)),
    "lenet": Network("lenet"),
}


class Odd(nn.Module):
    """A convolution with stride, padding and dilation and without bias, before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3 * 8 * 8, 8, bias=False)  # in the order of parameters the first
        self.first = nn.Conv2d(2, 3, 3, stride=2, padding=2, dilation=2, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.first(images).flatten(1)).relu()


def networks() -> dict[str, Classifier]:
    built = {name: build_network(each, (2, 16, 16), 5, 0) for name, each in NETWORKS.items()}
    return {**built, "odd": Classifier(Odd(), 8, 5)}


@pytest.mark.parametrize("name", [*NETWORKS, "odd"])
def test_they_are_those_of_a_pass_for_each_group(name):
    net = networks()[name].double()
    model = FlatModel(net)
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(sum(SIZES), 2, 16, 16, generator=draw, dtype=torch.float64)
    targets = torch.randint(5, (sum(SIZES),), generator=draw)
    expected, losses = [], []
    for some, own in zip(images.split(SIZES), targets.split(SIZES), strict=True):
        model.gradients.zero_()
        loss = F.cross_entropy(net(some), own)
        loss.backward()
        losses.append(loss.detach())
        expected.append(model.gradients.clone())
    vectors = torch.stack(expected)
    model.gradients.fill_(7.0)
    assert in_one_pass(net)
    found = group_gradients(net, images, targets, SIZES)
    assert (model.gradients == 7.0).all()
    torch.testing.assert_close(found.losses, torch.stack(losses))
    torch.testing.assert_close(found.gram(), vectors @ vectors.T)
    weights = torch.tensor([[0.5, -2.0, 1.25]], dtype=torch.float64)
    torch.testing.assert_close(found.weighted(weights), weights[0] @ vectors)


@pytest.mark.parametrize(
    "network",
    [Network("cnn", norm="batch"), Network("cnn", norm="group"), Network("fcn", channels=(2, 4))],
    ids=["batch norm", "group norm", "pixels"],
)
def test_other_networks_need_a_pass_for_each_group(network):
    assert not in_one_pass(build_network(network, (2, 16, 16), 5, 0))


def test_grouped_convolutions_need_a_pass_for_each_group():
    for layer in (nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(2, 4, 3, padding_mode="circular")):
        assert not in_one_pass(Classifier(nn.Sequential(layer, nn.Flatten()), 8, 5))
