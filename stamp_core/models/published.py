"""The paper's encoders, torchvision's: ResNet-18 with either stem, and Swin-T."""

from torch import nn

from stamp_core import vision
from stamp_core.config import Network, ParameterError, wrong
from stamp_core.models.plain import Shape

LEAST = {"published": 17, "small": 5}  # sides that leave the last stage something to halve


def resnet18(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """torchvision's ResNet-18 without its head, and 512."""
    if min(shape[1:]) < LEAST[network.stem]:
        raise too_small(network, shape)
    layer = None if network.norm == "batch" else lambda width: nn.GroupNorm(32, width)
    net = vision.load().models.resnet18(norm_layer=layer)
    net.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
    if network.stem == "small":
        net.conv1, net.maxpool = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False), nn.Identity()
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")  # as all others
    net.fc = nn.Identity()
    return net, 512


def too_small(network: Network, shape: Shape) -> ParameterError:
    """The error for pictures that a stem leaves too little of for ResNet-18."""
    right = f"for {shape} pictures: their sides must be at least {LEAST[network.stem]}"
    if min(shape[1:]) < LEAST["small"]:
        right = f"for {shape} pictures: their sides must be at least {LEAST['small']}"
        return wrong("network.kind", network.kind, f"another {right}")
    return wrong("network.stem", network.stem, f"'small' {right}")


def swin_t(network: Network, shape: Shape) -> tuple[nn.Module, int]:
    """torchvision's Swin-T without its head, and 768."""
    if min(shape[1:]) < 20 or any(side % 4 for side in shape[1:]):  # it drops what fills no patch
        right = f"another for {shape} pictures: their sides must be multiples of 4, at least 20"
        raise wrong("network.kind", network.kind, right)
    torchvision = vision.load()
    net = torchvision.models.swin_t()
    if shape[0] != 3:
        net.features[0][0] = nn.Conv2d(shape[0], 96, 4, stride=4)
    for part in net.modules():
        if isinstance(part, torchvision.ops.StochasticDepth):
            part.p = 0.0  # published: up to 0.2, drawn from the global generator: without address
        if hasattr(part, "relative_position_index"):
            index = part.relative_position_index  # a constant: as a buffer it would be averaged
            del part.relative_position_index
            part.relative_position_index = index
    net.head = nn.Identity()
    return net, 768
