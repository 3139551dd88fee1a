"""A model as one flat vector of parameters and one of buffers, with SGD on it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stamp_core.config.schema import Training
from stamp_core.models.sealed import Sealed, weighted_sum


class FlatModel:
    """A module whose parameters, gradients and float buffers are views into three vectors.

    The tensors are in the order of the module. Its values are in the order in which it
    was in memory: O, H, W, I for a convolution whose channels are last, else O, I, H, W.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        for child in module.modules():  # with a fixed momentum nothing reads these counters
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                child.num_batches_tracked = None
        parameters, buffers = list(module.parameters()), list(module.buffers())
        self.tensors = parameters  # the module's own, in order: collecting them takes time
        self.parameters = flatten_like(parameters, parameters)  # [P]
        self.gradients = torch.zeros_like(self.parameters)  # [P]
        self.buffers = flatten_like(buffers, buffers)  # [B]
        values = split_like(self.parameters, parameters)
        gradients = split_like(self.gradients, parameters)
        for p, value, gradient in zip(parameters, values, gradients, strict=True):
            p.data, p.grad = value, gradient
        for b, value in zip(buffers, split_like(self.buffers, buffers), strict=True):
            b.data = value

    def load(self, parameters: Tensor, buffers: Tensor | None = None) -> None:
        self.parameters.copy_(parameters)
        if buffers is not None and len(buffers):
            self.buffers.copy_(buffers)


class FlatSGD:
    """Stochastic gradient descent on the flat vectors, bit-identical to torch.optim.SGD."""

    def __init__(self, model: FlatModel, training: Training, lr: Tensor | None = None) -> None:
        self.model, self.training = model, training
        self.lr = lr  # [], the round's learning rate where it changes; None: that of `training`
        self.velocity: Tensor | None = None  # [P], from the first step with momentum

    def restart(self) -> None:
        """Forget the velocity; its address stays, as captured steps need."""
        if self.velocity is not None:
            self.velocity.fill_(-0.0)

    def step(self) -> None:
        gradient = self.model.gradients
        if self.training.weight_decay:
            gradient = gradient.add(self.model.parameters, alpha=self.training.weight_decay)
        if self.training.momentum:
            if self.velocity is None:  # -0.0 + x is x, even for -0.0
                self.velocity = torch.full_like(gradient, -0.0)
            gradient = self.velocity.mul_(self.training.momentum).add_(gradient)
        if self.lr is None:
            self.model.parameters.add_(gradient, alpha=-self.training.lr)
        else:  # from its address: a captured step keeps no number that changes
            self.model.parameters.addcmul_(gradient, self.lr, value=-1)


def in_flat_order(values: Tensor, like: Tensor) -> Tensor:
    """`values` with their axes as a flat vector has those of `like`; axes may precede them."""
    return values.movedim(-3, -1) if _has_channels_last(like) else values


def flatten_like(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """The values of a model's `tensors`, as a new vector in their order; undone by `split_like`."""
    if not tensors:
        return torch.zeros(0)
    pairs = zip(values, tensors, strict=True)
    return torch.cat([in_flat_order(v.detach(), t).reshape(-1) for v, t in pairs])


def split_like(vector: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views into `vector` with the shapes of `tensors`, in order."""
    parts = vector.split([t.numel() for t in tensors])
    for part, t in zip(parts, tensors, strict=True):
        shape = in_flat_order(t, t).shape
        yield part.view(shape).movedim(-1, -3) if _has_channels_last(t) else part.view(shape)


def _has_channels_last(tensor: Tensor) -> bool:
    """Whether a convolution's weights are in memory as O, H, W, I, where it makes a difference."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


def weighted_average(vectors: Sequence[Tensor | Sealed], weights: Sequence[float]) -> Tensor:
    """The mean in float64, rounded once: that of equal vectors is bit-identical to them."""
    return weighted_sum(vectors, weights).div_(sum(weights)).to(vectors[0].dtype)


def layer_blocks(numels: Sequence[int], minimum: int = 1024) -> list[int]:
    """Block sizes: one block per tensor; small tensors share a block or join the one before."""
    blocks, pending = list[int](), 0
    for numel in numels:
        if numel >= minimum and blocks:
            blocks[-1], pending = blocks[-1] + pending, 0
        pending += numel
        if pending >= minimum:
            blocks, pending = [*blocks, pending], 0
    if blocks:
        blocks[-1] += pending
    return blocks or [pending]
