"""Networks as an encoder and a linear head over all classes."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stamp_core.config import Network
from stamp_core.models.plain import Shape, cnn, lenet, mlp
from stamp_core.models.pretrained import load
from stamp_core.models.published import resnet18, swin_t
from stamp_core.seeding import address


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
    """The network of a setting with the initial weights of `seed`, those in its file over them.

    Global draws stay untouched.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(address(seed, "weights"))
        encoder, features = ENCODERS[network.kind](network, shape)
        classifier = Classifier(encoder, features, classes)
    load(network, classifier.encoder, classifier.head)
    return classifier


def train_mode(module: nn.Module, gathers: bool) -> None:
    """Make a module ready for a training step; batch normalisation only if it `gathers`.

    Else it uses what it has gathered: a single picture has no spread of its own.
    """
    module.train()
    for norm in module.modules():
        if isinstance(norm, _BatchNorm):
            norm.train(gathers)


ENCODERS = {"mlp": mlp, "cnn": cnn, "lenet": lenet, "resnet18": resnet18, "swin_t": swin_t}
