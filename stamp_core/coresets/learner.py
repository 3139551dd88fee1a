"""A copy of the client's network that a selection rule may train, and per-sample gradients."""

from collections.abc import Callable, Iterable
from copy import copy

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.func import functional_call, grad, vmap

from stamp_core.models.flat import FlatModel, in_flat_order
from stamp_core.models.networks import Classifier, set_train_mode

Normalise = Callable[[Tensor], Tensor]  # uint8 images -> inputs of the network
CHUNK = 64  # per-sample gradients computed at a time


class Learner:
    """A copy of a client's network that a rule may train: the client's model is not changed.

    Images are given as returned by `inputs`. Every method leaves the network in evaluation mode.
    """

    def __init__(
        self, network: Classifier, normalise: Normalise, parameters: Tensor, buffers: Tensor
    ) -> None:
        """`network` has its initial weights; `parameters` and `buffers` are the client's."""
        self.network, self.model, self.normalise = network, FlatModel(network), normalise
        self.initial_weights = self.model.parameters.clone(), self.model.buffers.clone()
        self.client_weights = parameters.clone(), buffers.clone()
        self.load_client_weights()

    def load_client_weights(self) -> None:
        """Set the network to the client's weights after training."""
        self.model.load(*self.client_weights)
        self.network.eval()

    def load_initial_weights(self) -> None:
        """Set the network to its untrained weights, the same at every call."""
        self.model.load(*self.initial_weights)
        self.network.eval()

    def inputs(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and their labels on the network's device."""
        inputs = self.normalise(images)
        return inputs, labels.to(inputs.device)

    def train(self, images: Tensor, labels: Tensor, batches: Iterable[Tensor], lr: float) -> None:
        """Plain SGD with one step for each batch of indices."""
        for indices in (batch.to(labels.device) for batch in batches):
            set_train_mode(self.network, update_norms=len(indices) > 1)
            self._step(F.cross_entropy(self.network(images[indices]), labels[indices]), lr)
        self.network.eval()

    def train_weighted(self, images: Tensor, labels: Tensor, weights: Tensor, lr: float) -> None:
        """Plain SGD with one step on all images for each row of their weights.  # [steps, N]"""
        set_train_mode(self.network, update_norms=len(labels) > 1)
        for row in weights.to(images):
            losses = F.cross_entropy(self.network(images), labels, reduction="none")
            self._step(row.dot(losses), lr)
        self.network.eval()

    def _step(self, loss: Tensor, lr: float) -> None:
        """One step of gradient descent."""
        self.model.gradients.zero_()
        loss.backward()
        self.model.parameters.add_(self.model.gradients, alpha=-lr)

    def train_epochs(
        self, images: Tensor, labels: Tensor, epochs: int, size: int, lr: float, draws: Generator
    ) -> None:
        """Plain SGD on batches of `size` images, in a new random order in every epoch."""
        orders = [torch.randperm(len(labels), generator=draws) for _ in range(epochs)]
        self.train(images, labels, [batch for order in orders for batch in order.split(size)], lr)

    @torch.no_grad()
    def losses(self, images: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of each image in evaluation mode.  # [N]"""
        return F.cross_entropy(self.network.eval()(images), labels, reduction="none")


def per_sample_gradients(network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each image's cross-entropy with respect to all parameters.  # [N, P]

    In the order of the flat vector.
    In evaluation mode: with the statistics of a batch no image has a gradient of its own.
    """
    network.images_backpropagated += len(images)
    network = copy(network.eval())  # shares its layers, but counts the images of vmap as one
    values = {name: value.detach() for name, value in network.named_parameters()}
    buffers = dict(network.named_buffers())

    def loss(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(network, {**values, **buffers}, (image[None],))
        return F.cross_entropy(logits, label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=CHUNK)(values, images, labels)
    pairs = ((gradients[name], value) for name, value in values.items())
    return torch.cat([in_flat_order(*pair).flatten(1) for pair in pairs], dim=1)


@torch.no_grad()
def head_gradient_factors(
    network: Classifier, images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Errors (softmax minus one-hot) and features of each image.  # [N, classes], [N, D]

    The gradient of cross-entropy with respect to the head's weight is the outer product error x
    feature, with respect to its bias the error. So the inner product of two images' head gradients
    is the product of their errors' inner product and 1 + that of their features.
    """
    features: Tensor = network.eval().encode(images)
    logits: Tensor = network.head(features)
    errors = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
    return errors, features
