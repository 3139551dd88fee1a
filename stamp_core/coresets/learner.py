"""A copy of the client's network that a selection rule may train."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from stamp_core.models.flat import FlatModel
from stamp_core.models.networks import Classifier, set_train_mode

Normalise = Callable[[Tensor], Tensor]  # uint8 images -> inputs of the network


class Learner:
    """A copy of a client's network that a rule may train, left in evaluation mode."""

    def __init__(
        self, network: Classifier, normalise: Normalise, parameters: Tensor, buffers: Tensor
    ) -> None:
        """`network` has its initial weights; `parameters` and `buffers` are the client's."""
        self.network, self.model, self.normalise = network, FlatModel(network), normalise
        self.initial_weights = self.model.parameters.clone(), self.model.buffers.clone()
        self.client_weights = parameters.clone(), buffers.clone()
        self.load_client_weights()

    def load_client_weights(self) -> None:
        self.model.load(*self.client_weights)
        self.network.eval()

    def load_initial_weights(self) -> None:
        self.model.load(*self.initial_weights)
        self.network.eval()

    def inputs(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.normalise(images)
        return inputs, labels.to(inputs.device)

    def train(self, images: Tensor, labels: Tensor, batches: Iterable[Tensor], lr: float) -> None:
        for indices in (batch.to(labels.device) for batch in batches):
            set_train_mode(self.network, update_norms=len(indices) > 1)
            self.step(F.cross_entropy(self.network(images[indices]), labels[indices]), lr)
        self.network.eval()

    def step(self, loss: Tensor, lr: float) -> None:
        self.model.gradients.zero_()
        loss.backward()
        self.model.parameters.add_(self.model.gradients, alpha=-lr)

    def train_epochs(
        self, images: Tensor, labels: Tensor, epochs: int, size: int, lr: float, draws: Generator
    ) -> None:
        orders = [torch.randperm(len(labels), generator=draws) for _ in range(epochs)]
        self.train(images, labels, [batch for order in orders for batch in order.split(size)], lr)

    @torch.no_grad()
    def losses(self, images: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of each image in evaluation mode.  # [N]"""
        return F.cross_entropy(self.network.eval()(images), labels, reduction="none")
