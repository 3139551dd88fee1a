"""Networks as an encoder and a linear head over all classes."""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stamp_core import vision
from stamp_core.config import Network, wrong
from stamp_core.seeding import address

Shape = tuple[int, ...]  # of one picture: channels, height, width


class Classifier(nn.Module):
    """Logits = head(encoder(pictures)); the encoder's output is what a prototype is made of."""

    def __init__(self, encoder: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.encoder: nn.Module = encoder
        self.head: nn.Module = nn.Linear(features, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits over all classes of the data."""  # [N, C, H, W] -> [N, classes]
        logits: Tensor = self.head(self.encoder(pictures))
        return logits


def build(network: Network, shape: Shape, classes: int, seed: int) -> Classifier:
    """The network of a setting with the initial weights of `seed`; global draws stay untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(address(seed, "weights"))
        encoder, features = ENCODERS[network.kind](network, shape)
        return Classifier(encoder, features, classes)


def train_mode(module: nn.Module, gathers: bool) -> None:
    """Make a module ready for a training step; batch normalisation only if it `gathers`.

    Else it uses what it has gathered: a single picture has no spread of its own.
    """
    module.train()
    for norm in module.modules():
        if isinstance(norm, _BatchNorm):
            norm.train(gathers)


def mlp(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """One hidden layer, and its width."""
    hidden = nn.Linear(shape[0] * shape[1] * shape[2], network.features)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU()), network.features


def cnn(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """5 x 5 convolutions with pooling and one hidden layer (channels 32, 64 and features 512 on
    32 x 32 pictures: the network of the paper's public code), and its width."""
    layers: list[nn.Module] = []
    channels, side = shape[0], min(shape[1:])
    for width in network.channels:
        layers += [nn.Conv2d(channels, width, 5), *norm(network, width), nn.ReLU(), nn.MaxPool2d(2)]
        channels, side = width, (side - 4) // 2
        if side < 1:
            raise wrong("network.channels", list(network.channels), f"shorter for {shape} pictures")
    with torch.no_grad():
        flat = nn.Sequential(*layers, nn.Flatten()).eval()(torch.zeros(1, *shape)).shape[1]
    layers += [nn.Flatten(), nn.Linear(flat, network.features), nn.ReLU()]
    return nn.Sequential(*layers), network.features


def resnet18(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """torchvision's ResNet-18 with the published 7 x 7 stem, without its head, and 512."""
    if shape[0] != 3:
        raise wrong("network.kind", "resnet18", "another: the pictures are not in colour")
    layer = None if network.norm == "batch" else lambda width: nn.GroupNorm(32, width)
    net = vision.load().models.resnet18(norm_layer=layer)
    net.fc = nn.Identity()
    return net, 512


def norm(network: Network, width: int) -> list[nn.Module]:
    """The normalisation after a convolution with `width` channels."""
    if network.norm == "batch":
        return [nn.BatchNorm2d(width)]
    return [nn.GroupNorm(math.gcd(8, width), width)] if network.norm == "group" else []


ENCODERS = {"mlp": mlp, "cnn": cnn, "resnet18": resnet18}
