"""A model as one flat vector of parameters and one of buffers; the module's tensors are views."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stamp_core.config import Training


class FlatModel:
    """A module whose parameters, gradients and float buffers are views into three vectors."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        drop_counters(module)
        parameters = list(module.parameters())
        self.parameters = flatten(parameters)  # [P]
        self.gradients = torch.zeros_like(self.parameters)  # [P]
        self.buffers = flatten(list(module.buffers()))  # [B]
        for p, value, gradient in zip(
            parameters,
            pieces(self.parameters, parameters),
            pieces(self.gradients, parameters),
            strict=True,
        ):
            p.data, p.grad = value, gradient
        buffers = list(module.buffers())
        for b, value in zip(buffers, pieces(self.buffers, buffers), strict=True):
            b.data = value

    def load(self, parameters: Tensor, buffers: Tensor | None = None) -> None:
        """Copy a vector of parameters (and one of buffers) into the live module."""
        self.parameters.copy_(parameters)
        if buffers is not None:
            self.buffers.copy_(buffers)


class Descent:
    """Stochastic gradient descent on the flat vectors, step for step torch.optim.SGD."""

    def __init__(self, model: FlatModel, training: Training) -> None:
        self.model, self.training = model, training
        self.velocity: Tensor | None = None

    def step(self) -> None:
        """Take one step along the model's current gradient."""
        gradient = self.model.gradients
        if self.training.weight_decay:
            gradient = gradient.add(self.model.parameters, alpha=self.training.weight_decay)
        if self.training.momentum:
            gradient = self.accelerate(gradient)
        self.model.parameters.add_(gradient, alpha=-self.training.rate)

    def accelerate(self, gradient: Tensor) -> Tensor:
        """The velocity after this gradient."""
        if self.velocity is None:
            self.velocity = gradient.clone()
        else:
            self.velocity.mul_(self.training.momentum).add_(gradient)
        return self.velocity


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All values of `tensors` one after the other, as a new vector."""
    if not tensors:
        return torch.zeros(0)
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def pieces(vector: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views into `vector` with the shapes of `like`, in order."""
    parts = vector.split([t.numel() for t in like])
    return (part.view(t.shape) for part, t in zip(parts, like, strict=True))


def drop_counters(module: nn.Module) -> None:
    """Remove batch normalisation's integer counters: with a fixed momentum nothing reads them."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.num_batches_tracked = None


def average(vectors: list[Tensor], weights: list[float]) -> Tensor:
    """The weighted mean, added up in float64 in the given order and rounded once.

    So equal vectors give themselves back bit for bit, whatever the weights.
    """
    total = torch.full_like(vectors[0], -0.0, dtype=torch.float64)  # -0.0 + x is x, even for -0.0
    for vector, weight in zip(vectors, weights, strict=True):
        total.add_(vector, alpha=weight)
    return total.div_(sum(weights)).to(vectors[0].dtype)
