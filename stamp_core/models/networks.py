"""Networks as an encoder and a linear head over all classes, of images or of pixels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stamp_core.config.schema import Network
from stamp_core.core.seeding import address
from stamp_core.models.encoders import ENCODERS, Shape, double
from stamp_core.models.pretrained import load_weights


class Classifier(nn.Module):
    """Logits = head(encoder(images)); the encoder's outputs are the features."""

    def __init__(
        self,
        encoder: nn.Module,
        features: int,
        classes: int,
        pixels: bool = False,  # whether the features are maps, with a head for each place
    ) -> None:
        super().__init__()
        self.features = features  # how many
        self.images_backpropagated = 0  # encoded for a gradient so far
        self.encoder: nn.Module = encoder
        self.head: nn.Module = (
            nn.Conv2d(features, classes, 1) if pixels else nn.Linear(features, classes)
        )
        self.pixels = pixels
        # the encoder's batch normalisations in order
        self.norms = tuple(m for m in encoder.modules() if isinstance(m, _BatchNorm))

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move Swin's constants to a device too, which are neither parameters nor buffers."""
        for module in self.modules():
            if isinstance(index := getattr(module, "relative_position_index", None), Tensor):
                module.relative_position_index = change(index)
        return super()._apply(change, recurse)  # type: ignore[no-untyped-call]

    def forward(self, images: Tensor) -> Tensor:
        """Logits over all classes, of images [N, classes] or of pixels [N, classes, H, W]."""
        return self.classify(self.encode(images))

    def classify(self, features: Tensor) -> Tensor:
        """Logits of features, those of pixels at the size of the images."""
        logits: Tensor = self.head(features)
        return double(logits) if self.pixels else logits

    def encode(self, images: Tensor) -> Tensor:
        """The outputs of the encoder.  # [N, D], with masks [N, D, h, w]"""
        if torch.is_grad_enabled():
            self.images_backpropagated += len(images)
        features: Tensor = self.encoder(images)
        return features


def build_network(network: Network, shape: Shape, classes: int, seed: int) -> Classifier:
    """The network of a setting with the initial weights of `seed`, or those of its file."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(address(seed, "weights"))
        encoder, features = ENCODERS[network.kind](network, shape)
        classifier = Classifier(encoder, features, classes, network.kind == "fcn")
    load_weights(network, classifier.encoder, classifier.head)
    return classifier


def set_train_mode(network: Classifier, update_norms: bool) -> None:
    """Prepare a training step; norms that are not updated use their running statistics."""
    if not network.training:  # train() takes a tenth of the time of a small network's step
        network.train()
    for norm in network.norms:
        norm.train(update_norms)
