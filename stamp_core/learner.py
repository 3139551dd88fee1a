"""A network of a coreset rule's own, and losses and gradients of single pictures."""

from collections.abc import Callable, Iterable
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from stamp_core.models import Classifier, train_mode
from stamp_core.vectors import FlatModel

CHUNK = 64  # pictures whose gradients are held at a time while they are made


class Learner:
    """A copy of a client's network that a rule may train as it likes: the live one stays.

    Pictures are given as `normalise` makes them and used as they are: nothing is augmented.
    """

    def __init__(
        self,
        network: Classifier,
        normalise: Callable[[Tensor], Tensor],
        parameters: Tensor,
        buffers: Tensor,
    ) -> None:
        """`network` has fresh weights; `parameters` and `buffers` are what a client has learnt."""
        self.network, self.model, self.normalise = network, FlatModel(network), normalise
        self.fresh = self.model.parameters.clone(), self.model.buffers.clone()
        self.learnt = parameters.clone(), buffers.clone()
        self.restore()

    def restore(self) -> None:
        """Take up the client's weights again, ready for evaluation."""
        self.model.load(*self.learnt)
        self.network.eval()

    def restart(self) -> None:
        """Take up the fresh weights, always the same ones, ready for evaluation."""
        self.model.load(*self.fresh)
        self.network.eval()

    def descend(
        self, pictures: Tensor, labels: Tensor, batches: Iterable[Tensor], rate: float
    ) -> None:
        """Plain SGD, a step for each batch of places; ready for evaluation afterwards."""
        for places in batches:
            train_mode(self.network, gathers=len(places) > 1)
            self.model.gradients.zero_()
            F.cross_entropy(self.network(pictures[places]), labels[places]).backward()
            self.model.parameters.add_(self.model.gradients, alpha=-rate)
        self.network.eval()

    @torch.no_grad()
    def losses(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of each picture, in evaluation mode.  # [N]"""
        return F.cross_entropy(self.network.eval()(pictures), labels, reduction="none")


def gradients(network: Classifier, pictures: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each picture's cross-entropy, of all parameters, in their order.  # [N, P]

    In evaluation mode: in a batch that is normalised by its own statistics no picture has a
    gradient of its own. In float32 whatever the network's precision: vmap mixes no types.
    """
    network = copy(network.eval())  # with the same layers
    network.precision = "float32"
    values = {name: value.detach() for name, value in network.named_parameters()}
    buffers = dict(network.named_buffers())

    def loss(values: dict[str, Tensor], picture: Tensor, label: Tensor) -> Tensor:
        answer = functional_call(network, {**values, **buffers}, (picture[None],))
        return F.cross_entropy(answer, label[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=CHUNK)(values, pictures, labels)
    return torch.cat([each[name].flatten(1) for name in values], dim=1)


@torch.no_grad()
def head_parts(network: Classifier, pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What the head's gradients are made of: errors and features.  # [N, classes], [N, D]

    The gradient of cross-entropy by the head's weight is error x feature, by its bias the error
    alone, where the error is softmax minus one-hot. So the inner product of two pictures'
    gradients is that of their errors times (1 + that of their features).
    """
    features: Tensor = network.eval().encode(pictures)
    answers: Tensor = network.head(features)
    errors = answers.softmax(1) - F.one_hot(labels, answers.shape[1])
    return errors, features


def head_gradients(network: Classifier, pictures: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each picture's cross-entropy by the head, weight then bias.  # [N, H]"""
    errors, features = head_parts(network, pictures, labels)
    weight = errors[:, :, None] * features[:, None]  # [N, classes, D]
    return torch.cat([weight.flatten(1), errors], dim=1)
