"""Networks as an encoder and a linear head over all classes, of images or of pixels."""

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

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
        precision: str = "float32",
        micro_batch_size: int | None = None,
        pixels: bool = False,  # whether the features are maps, with a head for each place
    ) -> None:
        super().__init__()
        self.features = features  # how many
        self.precision = precision
        self.micro_batch_size = micro_batch_size
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
        """Features, computed in micro-batches of at most `micro_batch_size`.  # float32 [N, D]

        The activations of a micro-batch are freed before the next one and computed again in the
        backward pass: less memory, a third more work, the same gradient (with batch normalisation
        that of smaller batches, whose statistics are updated once). Parameters that functional_call
        replaces for one pass, and their hooks, no longer exist then: such a batch is not divided.
        """
        if torch.is_grad_enabled():
            self.images_backpropagated += len(images)
        size = self.micro_batch_size
        if size is None or len(images) <= size:
            return self._features(images)
        if not all(weight.is_leaf for weight in self.encoder.parameters()):
            return self._features(images)
        parts = images.tensor_split(math.ceil(len(images) / size))
        features = [
            checkpoint(self._micro_batch, part, count(), use_reentrant=False) for part in parts
        ]
        return torch.cat(features)

    def _micro_batch(self, images: Tensor, passes: Iterator[int]) -> Tensor:
        """Features of a part of a batch; `passes` counts the computations.

        Only the first pass updates the statistics of batch normalisation. A single image never
        does (see set_train_mode): with micro_batch_size 1 the statistics never change.
        """
        recomputed = next(passes) > 0
        name, value = ("training", False) if len(images) == 1 else ("momentum", 0.0)
        norms = self.norms if len(images) == 1 or recomputed else ()
        before = [getattr(norm, name) for norm in norms]
        for norm in norms:
            setattr(norm, name, value)
        try:
            return self._features(images)
        finally:
            for norm, own in zip(norms, before, strict=True):
                setattr(norm, name, own)

    def _features(self, images: Tensor) -> Tensor:
        """Features in the network's precision; loss, head and weights stay in float32."""
        if self.precision == "float32":
            features: Tensor = self.encoder(images)
            return features
        with torch.autocast(images.device.type, torch.bfloat16):
            features = self.encoder(images)
        return features.float()


def build_network(network: Network, shape: Shape, classes: int, seed: int) -> Classifier:
    """The network of a setting with the initial weights of `seed`, or those of its file.

    The global generator is left unchanged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(address(seed, "weights"))
        encoder, features = ENCODERS[network.kind](network, shape)
        options = network.precision, network.micro_batch_size, network.kind == "fcn"
        classifier = Classifier(encoder, features, classes, *options)
    load_weights(network, classifier.encoder, classifier.head)
    return classifier


def set_train_mode(network: Classifier, update_norms: bool) -> None:
    """Prepare a network for a training step; batch normalisation only if `update_norms`.

    Otherwise the running statistics are used: a single image has no variance of its own.
    """
    if not network.training:  # train() takes a tenth of the time of a small network's step
        network.train()
    for norm in network.norms:
        norm.train(update_norms)
