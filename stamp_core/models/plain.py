"""Encoders without torchvision: one hidden layer, convolutions with pooling, LeNet-5."""

import math

from torch import nn

from stamp_core.config import Network, wrong

Shape = tuple[int, ...]  # of one picture: channels, height, width


def mlp(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """One hidden layer, and its width."""
    layers = [nn.Flatten(), *hidden(math.prod(shape), network.features)]
    return nn.Sequential(*layers), network.features


def cnn(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """5 x 5 convolutions with pooling and one hidden layer (channels 32, 64 and features 512 on
    32 x 32 pictures: the network of the paper's public code), and its width."""
    layers, flat = convolutions(network, network.channels, shape)
    if not flat:
        raise wrong("network.channels", list(network.channels), f"shorter for {shape} pictures")
    return nn.Sequential(*layers, *hidden(flat, network.features)), network.features


def lenet(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """LeNet-5 with ReLU and max-pooling, without its head, and 84."""
    layers, flat = convolutions(network, (6, 16), shape)
    if not flat:
        right = f"another for {shape} pictures: their sides must be at least 16"
        raise wrong("network.kind", network.kind, right)
    return nn.Sequential(*layers, *hidden(flat, 120), *hidden(120, 84)), 84


def convolutions(
    network: Network, channels: tuple[int, ...], shape: Shape
) -> tuple[list[nn.Module], int]:
    """5 x 5 convolutions, each halved by pooling, and how many values come out; 0 if none can."""
    layers: list[nn.Module] = []
    depth, *sides = shape
    for width in channels:
        layers += [nn.Conv2d(depth, width, 5), *norm(network, width), nn.ReLU(), nn.MaxPool2d(2)]
        depth, sides = width, [max(0, side - 4) // 2 for side in sides]
    return [*layers, nn.Flatten()], depth * math.prod(sides)


def hidden(inputs: int, width: int) -> list[nn.Module]:
    """A linear layer with ReLU."""
    return [nn.Linear(inputs, width), nn.ReLU()]


def norm(network: Network, width: int) -> list[nn.Module]:
    """The normalisation after a convolution with `width` channels."""
    if network.norm == "batch":
        return [nn.BatchNorm2d(width)]
    return [nn.GroupNorm(math.gcd(8, width), width)] if network.norm == "group" else []
