"""Networks as an encoder and a linear head over all classes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from stamp_core.config import Network
from stamp_core.models.plain import Shape, cnn, lenet, mlp
from stamp_core.models.pretrained import load
from stamp_core.models.published import resnet18, swin_t
from stamp_core.seeding import address


class Classifier(nn.Module):
    """Logits = head(encoder(pictures)); the encoder's output is what a prototype is made of."""

    def __init__(
        self,
        encoder: nn.Module,
        features: int,
        classes: int,
        precision: str = "float32",
        at_once: int | None = None,
    ) -> None:
        super().__init__()
        self.precision, self.at_once = precision, at_once
        self.encoder: nn.Module = encoder
        self.head: nn.Module = nn.Linear(features, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits over all classes of the data."""  # [N, C, H, W] -> [N, classes]
        logits: Tensor = self.head(self.encode(pictures))
        return logits

    def encode(self, pictures: Tensor) -> Tensor:
        """Features, so many pictures at once as the network says.  # float32 [N, D]

        What the layers of one part keep for its gradient is forgotten before the next part and
        computed again when its turn comes: less memory, a third more work, the same gradient (of
        batch normalisation: that of smaller batches, which are gathered once).
        """
        if self.at_once is None or len(pictures) <= self.at_once or not torch.is_grad_enabled():
            return self.part(pictures)
        parts = [
            checkpoint(self.part, part, use_reentrant=False, context_fn=self.contexts)
            for part in pictures.split(self.at_once)
        ]
        return torch.cat(parts)

    def part(self, pictures: Tensor) -> Tensor:
        """Features in the network's precision; loss, head and weights stay as they are."""
        half = self.precision == "bfloat16"
        with torch.autocast(pictures.device.type, torch.bfloat16, enabled=half):
            features: Tensor = self.encoder(pictures)
        return features.float()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What a part is computed in the first time, and again: then nothing is gathered."""
        return nullcontext(), gathering_nothing(self.encoder)


def build(network: Network, shape: Shape, classes: int, seed: int) -> Classifier:
    """The network of a setting with the initial weights of `seed`, those in its file over them.

    Global draws stay untouched.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(address(seed, "weights"))
        encoder, features = ENCODERS[network.kind](network, shape)
        how = network.precision, network.at_once
        classifier = Classifier(encoder, features, classes, *how)
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


@contextmanager
def gathering_nothing(module: nn.Module) -> Iterator[None]:
    """While it lasts, batch normalisation in training leaves its running statistics alone."""
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


ENCODERS = {"mlp": mlp, "cnn": cnn, "lenet": lenet, "resnet18": resnet18, "swin_t": swin_t}
