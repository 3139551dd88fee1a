"""An AC-GAN (Odena et al., 2017) whose discriminator is the classifier with an adversarial head."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime, evaluation_batch_size
from stamp_core.models.encoders import Shape
from stamp_core.models.flat import FlatModel
from workbench.methods.base.generators import build_seeded

NETWORKS = ("adversarial_head", "generator")  # sent and averaged besides the classifier
SMALLEST = 4  # the sides of the first maps are at most this

Sides = tuple[int, int]  # height and width


class Generator(nn.Module):
    """Images in (-1, 1) from noise; normalised by the batch, so without buffers."""

    def __init__(self, shape: Shape, inputs: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(inputs, width)]
        chain = _sides(shape)
        for index, after in enumerate(chain):
            last = after == chain[-1]
            outputs = shape[0] if last else max(1, width // 2)
            if index:
                layers.append(Upsampling(width, outputs, after))
            else:  # of 1 x 1 maps a transposed convolution is a linear layer
                first = nn.Linear(width, outputs * math.prod(after), bias=False)
                layers += [first, nn.Unflatten(1, (outputs, *after))]
            if not last:
                layers += [nn.BatchNorm2d(outputs, track_running_stats=False), nn.ReLU()]
            width = outputs
        self.layers = nn.Sequential(*layers, nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        """One image for each row of noise.  # [n, inputs] -> [n, C, H, W]"""
        images: Tensor = self.layers(noise)
        return images


class Upsampling(nn.Module):
    """A transposed convolution to maps with twice the sides, or one pixel less.

    Its kernel is 4 or 3 pixels wide, stride 2, padding 1, without bias. As a matrix product and a
    sum of overlapping patches it takes a third of the time of torch's layer for small images.
    """

    def __init__(self, inputs: int, outputs: int, after: Sides) -> None:
        super().__init__()
        kernel = 4 - after[0] % 2, 4 - after[1] % 2
        self.weight = nn.Parameter(torch.empty(inputs, outputs * math.prod(kernel)))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as in torch's layer
        self.fold = nn.Fold(after, kernel, padding=1, stride=2)

    def forward(self, maps: Tensor) -> Tensor:
        patches = maps.flatten(2).transpose(1, 2) @ self.weight  # [n, h w, outputs kernel]
        larger: Tensor = self.fold(patches.transpose(1, 2))
        return larger


def _sides(shape: Shape) -> list[Sides]:
    """The sides of the maps after each layer, from at most `SMALLEST` to those of the images."""
    _, height, width = shape
    sides = [(height, width)]
    while max(sides[-1]) > SMALLEST:
        height, width = sides[-1]
        sides.append(((height + 1) // 2, (width + 1) // 2))
    return sides[::-1]


class Acgan:
    """The live networks, whose weights are loaded before each use, and images of generators."""

    def __init__(self, runtime: ClientRuntime, params: Any) -> None:
        self.runtime = runtime
        self.features = runtime.classifier.features
        self.inputs = runtime.classes + params.noise
        self.width: int = params.width
        self.networks = {name: self.network(name, 0) for name in NETWORKS}
        self.head, self.generator = self.networks.values()
        self.sampler = self.network("generator", 0)
        self.chunk = evaluation_batch_size(runtime.shape)
        # from -1 .. 1 to what the runtime makes of 0 .. 255
        self.gain = 127.5 * runtime.scale
        self.shift = self.gain - runtime.offset

    def network(self, name: str, seed: int) -> FlatModel:
        """The adversarial head or the generator with the initial weights of `seed`."""

        def build() -> nn.Module:
            if name == "generator":
                return Generator(self.runtime.shape, self.inputs, self.width)
            return nn.Linear(self.features, 1)

        return FlatModel(build_seeded(build, seed, name).to(self.runtime.device))

    def normalised(self, images: Tensor) -> Tensor:
        """Images in (-1, 1) with the normalisation of training images."""
        return images * self.gain + self.shift

    def generate(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Normalised images of the live generator, with their graph.  # [n, C, H, W]"""
        inputs = generator_inputs(labels, noise, self.runtime.classes)
        return self.normalised(self.generator.module(inputs))

    @torch.no_grad()
    def sample(self, parameters: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Images in (-1, 1) by a generator with these parameters.  # [n, C, H, W]"""
        self.sampler.load(parameters)
        parts = generator_inputs(labels, noise, self.runtime.classes).split(self.chunk)
        return torch.cat([self.sampler.module(part) for part in parts])

    def discriminate(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the classes, and scores above 0 for images that look real.  # [n, L], [n]"""
        self.runtime.train_mode(len(images))
        features = self.runtime.classifier.encode(images)
        return self.runtime.classifier.head(features), self.head.module(features).squeeze(1)


def generator_inputs(labels: Tensor, noise: Tensor, classes: int) -> Tensor:
    """One-hot labels followed by noise.  # [n], [n, noise] -> [n, classes + noise]"""
    return torch.cat([F.one_hot(labels, classes).to(noise.dtype), noise], 1)
