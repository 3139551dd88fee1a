"""Encoders and their numbers of features: MLP, CNN, LeNet-5, FCN; ResNet-18, Swin-T; last block."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.config.decode import invalid
from stamp_core.config.schema import Network
from stamp_core.core import vision

Shape = tuple[int, ...]  # of one image: channels, height, width


def _mlp(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """One hidden layer."""
    layers = [nn.Flatten(), *_hidden_layer(math.prod(shape), network.features)]
    return nn.Sequential(*layers), network.features


def _cnn(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """5 x 5 convolutions with pooling, and a hidden layer; 32, 64 and 512 are the public code's."""
    layers, values = _convolutions(network, network.channels, shape)
    if not values:
        raise invalid("network.channels", list(network.channels), f"shorter for {shape} images")
    return nn.Sequential(*layers, *_hidden_layer(values, network.features)), network.features


def _lenet(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """LeNet-5 with ReLU and max-pooling."""
    _require_sides(network, shape, 16)
    layers, values = _convolutions(network, (6, 16), shape)
    return nn.Sequential(*layers, *_hidden_layer(values, 120), *_hidden_layer(120, 84)), 84


class FCN(nn.Module):
    """A fully convolutional encoder and decoder: features at half the size of an image."""

    def __init__(self, channels: int, widths: Sequence[int], features: int) -> None:
        super().__init__()
        first, second = widths
        self.outer = nn.Sequential(_conv(channels, first), nn.ReLU(), _conv(first, second, 2))
        self.inner = _conv(second, 2 * second, 2)
        self.dilated = nn.ModuleList(_conv(2 * second, second, 1, size) for size in (1, 2, 4))
        self.joined = nn.Conv2d(4 * second, features, 1)

    def forward(self, images: Tensor) -> Tensor:
        """The features.  # [N, C, H, W] -> [N, D, H / 2, W / 2]"""
        outer = self.outer(images).relu()
        inner = self.inner(outer).relu()
        wide = torch.cat([layer(inner) for layer in self.dilated], 1).relu()
        joined: Tensor = self.joined(torch.cat([double(wide), outer], 1)).relu()
        return joined


def double(maps: Tensor) -> Tensor:
    """Maps of twice the height and width, interpolated.  # [N, C, H, W] -> [N, C, 2 H, 2 W]"""
    return F.interpolate(maps, scale_factor=2, mode="bilinear")


def _conv(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Module:
    """A 3 x 3 convolution that keeps the size, but for its stride."""
    return nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation)


def _fcn(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """An encoder and decoder for a class per pixel."""
    _require_sides(network, shape, 8, multiple=4)
    if len(network.channels) != 2:
        right = "two numbers, as kind is 'fcn': widths at the full and at half the size"
        raise invalid("network.channels", list(network.channels), right)
    return FCN(shape[0], network.channels, network.features), network.features


def _convolutions(
    network: Network, channels: Sequence[int], shape: Shape
) -> tuple[list[nn.Module], int]:
    """5 x 5 convolutions with pooling, and the number of values after them: 0 if too many."""
    layers: list[nn.Module] = []
    depth, *sides = shape
    for width in channels:
        layers.append(nn.Conv2d(depth, width, 5))
        if network.norm == "batch":
            layers.append(nn.BatchNorm2d(width))
        elif network.norm == "group":
            layers.append(nn.GroupNorm(math.gcd(8, width), width))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        depth, sides = width, [max(0, side - 4) // 2 for side in sides]
    return [*layers, nn.Flatten()], depth * math.prod(sides)


def _hidden_layer(inputs: int, width: int) -> list[nn.Module]:
    """A linear layer with ReLU."""
    return [nn.Linear(inputs, width), nn.ReLU()]


def _resnet18(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """ResNet-18 with either stem."""
    _require_sides(network, shape, 5)  # its last stage must have something to halve
    if network.stem == "published" and min(shape[1:]) < 17:
        right = f"'small' for {shape} images: their sides must be at least 17"
        raise invalid("network.stem", network.stem, right)
    layer = None if network.norm == "batch" else lambda width: nn.GroupNorm(32, width)
    encoder = vision.load_torchvision().models.resnet18(norm_layer=layer)
    encoder.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
    if network.stem == "small":
        encoder.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        encoder.maxpool = nn.Identity()
    # initialised as torchvision initialises its convolutions
    nn.init.kaiming_normal_(encoder.conv1.weight, mode="fan_out", nonlinearity="relu")
    encoder.fc = nn.Identity()
    return encoder, 512


def _swin_t(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """Swin-T without stochastic depth."""
    _require_sides(network, shape, 20, multiple=4)  # it would cut off the rest
    torchvision = vision.load_torchvision()
    encoder = torchvision.models.swin_t()
    if shape[0] != 3:
        encoder.features[0][0] = nn.Conv2d(shape[0], 96, 4, stride=4)
    for module in encoder.modules():
        if isinstance(module, torchvision.ops.StochasticDepth):
            module.p = 0.0  # published: up to 0.2, but drawn from the global generator
        if hasattr(module, "relative_position_index"):
            index = module.relative_position_index  # a constant: as a buffer it would be averaged
            del module.relative_position_index
            module.relative_position_index = index
    encoder.head = nn.Identity()
    return encoder, 768


def _last_block(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """EfficientNet-Lite's last inverted residual block and what follows, its norms folded in."""
    if len(network.channels) != 1:
        right = "one number, as kind is 'last_block': channels after the block"
        raise invalid("network.channels", list(network.channels), right)
    (width,), wide = network.channels, 6 * shape[0]
    layers = [nn.Conv2d(shape[0], wide, 1), nn.ReLU6()]
    layers += [nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.ReLU6()]
    layers += [nn.Conv2d(wide, width, 1), nn.Conv2d(width, 1280, 1), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 1280


def _require_sides(network: Network, shape: Shape, minimum: int, multiple: int = 1) -> None:
    """Refuse images that are too small for a network, or do not divide into its patches."""
    if min(shape[1:]) < minimum or any(side % multiple for side in shape[1:]):
        sides = f"at least {minimum}"
        if multiple > 1:
            sides = f"multiples of {multiple}, {sides}"
        right = f"another for {shape} images: their sides must be {sides}"
        raise invalid("network.kind", network.kind, right)


ENCODERS = {
    "mlp": _mlp,
    "cnn": _cnn,
    "lenet": _lenet,
    "fcn": _fcn,
    "resnet18": _resnet18,
    "swin_t": _swin_t,
    "identity": lambda network, shape: (nn.Flatten(), math.prod(shape)),
    "last_block": _last_block,
}
