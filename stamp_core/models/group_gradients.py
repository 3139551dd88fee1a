"""Gradients of groups of images of a batch, from one backward pass through the whole batch.

The gradient by a layer's weights is made of the layer's inputs and of the slopes of its outputs. A
forward pass gives the inputs of all groups, a backward pass the slopes. Of linear layers no
gradient is formed: inner products and weighted sums of the groups' gradients follow from these two
(Goodfellow, 2015). Other networks need a backward pass for each group.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from stamp_core.models.flat import flatten_like
from stamp_core.models.networks import Classifier


@dataclass(frozen=True, eq=False)
class LinearGradients:
    """Gradients by a linear layer of N images in K groups."""

    inputs: Tensor  # [N, I]
    slopes: Tensor  # [N, O]
    members: Tensor  # float64 [N, K]: 1 where an image is of a group
    bias: bool

    def gram(self) -> Tensor:
        """Inner products of the groups' gradients.  # float64 [K, K]"""
        inputs, slopes = self.inputs.double(), self.slopes.double()
        products = (inputs @ inputs.T + self.bias) * (slopes @ slopes.T)  # [N, N], of images
        return self.members.T @ products @ self.members

    def weighted(self, weights: Tensor) -> list[Tensor]:
        """The sum of the groups' gradients with weights [K], of each parameter."""
        slopes = (self.members @ weights.to(self.members)).to(self.slopes)[:, None] * self.slopes
        return [slopes.T @ self.inputs, slopes.sum(0)][: 1 + self.bias]


class ConvolutionGradients:
    """Gradients by a convolution, which are short: inputs [N, I, H, W], slopes [N, O, H, W]."""

    def __init__(self, layer: nn.Conv2d, inputs: Tensor, slopes: Tensor, sizes: list[int]) -> None:
        self.shapes = [p.shape for p in layer.parameters()]
        pairs = zip(inputs.split(sizes), slopes.split(sizes), strict=True)
        self.gradients = torch.stack([_by_convolution(layer, *pair) for pair in pairs])  # [K, p]

    def gram(self) -> Tensor:
        gradients = self.gradients.double()
        return gradients @ gradients.T

    def weighted(self, weights: Tensor) -> list[Tensor]:
        total = weights.to(self.gradients) @ self.gradients
        parts = total.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def _by_convolution(layer: nn.Conv2d, inputs: Tensor, slopes: Tensor) -> Tensor:
    """The gradient by a convolution's weights, and by its bias if it has one.  # [p]"""
    options = layer.stride, layer.padding, layer.dilation
    weights = conv2d_weight(inputs, layer.weight.shape, slopes, *options)
    parts = [weights] if layer.bias is None else [weights, slopes.sum((0, 2, 3))]
    return torch.cat([part.reshape(-1) for part in parts])


@dataclass(frozen=True, eq=False)
class GroupGradients:
    """The mean loss of each of K groups of images, and its gradient layer by layer."""

    losses: Tensor  # [K]
    layers: Sequence[LinearGradients | ConvolutionGradients]  # in the order of the parameters
    parameters: Sequence[Tensor]  # of the model

    def gram(self) -> Tensor:
        """Inner products of the groups' gradients.  # float64 [K, K], on the CPU"""
        return torch.stack([layer.gram() for layer in self.layers]).sum(0).cpu()

    def weighted(self, coefficients: Tensor) -> Tensor:
        """The sum of the groups' gradients with coefficients [1, K].  # [P]"""
        parts = [part for layer in self.layers for part in layer.weighted(coefficients[0])]
        return flatten_like(parts, self.parameters)


def in_one_pass(classifier: Classifier) -> bool:
    """Whether all parameters are those of linear layers and of plain convolutions."""
    owners = [
        m for m in classifier.modules() if next(m.parameters(recurse=False), None) is not None
    ]
    return not classifier.pixels and all(map(_is_plain, owners))


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is linear, or a convolution of all channels padded with zeros."""
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return isinstance(layer, nn.Linear)


def group_gradients(
    classifier: Classifier, images: Tensor, targets: Tensor, sizes: list[int]
) -> GroupGradients:
    """Mean cross-entropy of each group of `sizes` consecutive images, and its gradient."""
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(images.device)
    members = F.one_hot(groups).double()
    with _calls(classifier) as calls:
        logits = classifier(images)
    each = F.cross_entropy(logits, targets, reduction="none").split(sizes)
    losses = torch.stack([part.mean() for part in each])
    ordered = [layer for layer in classifier.modules() if layer in calls]  # as the parameters
    slopes = torch.autograd.grad(losses.sum(), [calls[layer][1] for layer in ordered])
    layers = list[LinearGradients | ConvolutionGradients]()
    for layer, own in zip(ordered, slopes, strict=True):
        inputs, _ = calls[layer]
        if isinstance(layer, nn.Linear):
            layers.append(LinearGradients(inputs, own, members, layer.bias is not None))
        elif isinstance(layer, nn.Conv2d):
            layers.append(ConvolutionGradients(layer, inputs, own, sizes))
    return GroupGradients(losses.detach(), layers, list(classifier.parameters()))


@contextmanager
def _calls(classifier: Classifier) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """The inputs and the outputs of every layer that is called inside."""
    calls = dict[nn.Module, tuple[Tensor, Tensor]]()

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls[layer] = inputs[0].detach(), output

    layers = [layer for layer in classifier.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
