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
NETWORKS = Network("mlp", features=8), Network("cnn", features=8, channels=(3, 4)), Network("lenet")


class Odd(nn.Module):
    """A convolution with stride, padding and dilation and without bias, before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3 * 8 * 8, 8, bias=False)  # in the order of parameters the first
        self.first = nn.Conv2d(2, 3, 3, stride=2, padding=2, dilation=2, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.first(images).flatten(1)).relu()


@pytest.mark.parametrize("network", [*NETWORKS, None], ids=["mlp", "cnn", "lenet", "odd"])
def test_they_are_those_of_a_pass_for_each_group(network):
    built = build_network(network, (2, 16, 16), 5, 0) if network else Classifier(Odd(), 8, 5)
    net = built.double()
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


def test_other_networks_need_a_pass_for_each_group():
    norms = Network("cnn", norm="batch"), Network("cnn", norm="group")
    built = [build_network(each, (2, 16, 16), 5, 0) for each in (*norms, Network("fcn"))]
    for layer in (nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(2, 4, 3, padding_mode="circular")):
        built.append(Classifier(nn.Sequential(layer, nn.Flatten()), 8, 5))
    assert list(map(in_one_pass, built)) == [False] * 5
