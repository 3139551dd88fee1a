"""Networks as an encoder and a linear head over all classes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate, count

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from stamp_core.config import Network
from stamp_core.models.plain import Shape, cnn, lenet, mlp
from stamp_core.models.pretrained import load
from stamp_core.models.published import resnet18, swin_t
from stamp_core.seeding import address

BEGIN: ContextVar[int] = ContextVar("begin", default=0)  # of the part that passes, in its batch


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
        # its batch normalisations, the first one first
        self.norms = tuple(m for m in encoder.modules() if isinstance(m, _BatchNorm))

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits over all classes of the data."""  # [N, C, H, W] -> [N, classes]
        logits: Tensor = self.head(self.encode(pictures))
        return logits

    def encode(self, pictures: Tensor) -> Tensor:
        """Features, so many pictures at once as the network says.  # float32 [N, D]

        What the layers of one part keep for its gradient is forgotten before the next part and
        computed again when its turn comes: less memory (but for a gradient in which parts add up),
        a third more work, the same gradient (of batch normalisation: that of smaller batches,
        which are gathered once). Weights that are computed themselves are gone by then, as are
        hooks beside them: there a batch passes whole.
        """
        if self.at_once is None or len(pictures) <= self.at_once or not self.lasts():
            return self.computed(pictures)
        parts = pictures.tensor_split(math.ceil(len(pictures) / self.at_once))
        begins = accumulate((len(part) for part in parts[:-1]), initial=0)
        features = [
            checkpoint(self.part, part, begin, count(), use_reentrant=False)
            for part, begin in zip(parts, begins, strict=True)
        ]
        return torch.cat(features)

    def lasts(self) -> bool:
        """Whether the encoder's weights are its own, not put in for one pass (functional_call)."""
        return all(weight.is_leaf for weight in self.encoder.parameters())

    def part(self, pictures: Tensor, begin: int, times: Iterator[int]) -> Tensor:
        """Features of the pictures of a batch from `begin` on.

        Of all `times` the first one alone is gathered by batch normalisation, and a single picture
        never, as `train_mode` says: with at_once 1 it stays what it was at first.
        """
        again = next(times) > 0
        changes = {"training": False} if len(pictures) == 1 else {"momentum": 0.0} if again else {}
        with part_from(begin), having(self.norms, changes):
            return self.computed(pictures)

    def computed(self, pictures: Tensor) -> Tensor:
        """Features in the network's precision; loss, head and weights stay as they are."""
        if self.precision == "float32":
            features: Tensor = self.encoder(pictures)
            return features
        with torch.autocast(pictures.device.type, torch.bfloat16):
            features = self.encoder(pictures)
        return features.float()


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


def train_mode(network: Classifier, gathers: bool) -> None:
    """Make a network ready for a training step; batch normalisation only if it `gathers`.

    Else it uses what it has gathered: a single picture has no spread of its own.
    """
    if not network.training:  # to walk through a small network takes a tenth of its step
        network.train()
    for norm in network.norms:
        norm.train(gathers)


@contextmanager
def having(norms: Sequence[nn.Module], values: Mapping[str, float]) -> Iterator[None]:
    """While it lasts, these batch normalisations have these values of their attributes."""
    before = [{name: getattr(norm, name) for name in values} for norm in norms]
    for norm in norms:
        vars(norm).update(values)
    try:
        yield
    finally:
        for norm, own in zip(norms, before, strict=True):
            vars(norm).update(own)


@contextmanager
def part_from(begin: int) -> Iterator[None]:
    """While it lasts, hooks on layers can read in BEGIN where in its batch a part begins."""
    token = BEGIN.set(begin)
    try:
        yield
    finally:
        BEGIN.reset(token)


ENCODERS = {"mlp": mlp, "cnn": cnn, "lenet": lenet, "resnet18": resnet18, "swin_t": swin_t}
