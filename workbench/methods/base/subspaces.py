"""Gradient projection: layers of a network as matrices, and bases of the spaces of their inputs.

The gradient of a layer lies in the space of its inputs: a change that is orthogonal to that space
leaves the layer's outputs for these inputs as they are.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.models.flat import in_flat_order

NOISE = 1e-10  # a smaller share of the squares is rounding, whose directions are not orthogonal
IMAGES = 16  # whose layers' inputs are held at a time

Bases = dict[str, Tensor]  # orthonormal columns by the name of a layer  # [d, k]


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer as a matrix [o, d], and where it is in the flat vector."""

    module: nn.Module
    weight: slice
    bias: slice | None  # the matrix's last column, for an input of 1
    shape: tuple[int, int]  # [o, d]

    def matrix(self, vector: Tensor) -> Tensor:
        """The layer's part of a flat vector; a copy where there is a bias.  # [o, d]"""
        weight = vector[self.weight].view(self.shape[0], -1)
        return weight if self.bias is None else torch.cat([weight, vector[self.bias, None]], 1)

    def write(self, vector: Tensor, matrix: Tensor) -> None:
        columns = self.shape[1] - (self.bias is not None)
        vector[self.weight] = matrix[:, :columns].flatten()
        if self.bias is not None:
            vector[self.bias] = matrix[:, -1]

    def columns(self, x: Tensor) -> Tensor:
        """The vectors that the matrix is multiplied with, for an input of the layer.  # [d, n L]"""
        if isinstance(self.module, nn.Conv2d):
            conv = self.module
            assert not isinstance(conv.padding, str)
            patches = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
            inputs = patches.transpose(1, 2).reshape(-1, *conv.weight.shape[1:])  # [n L, I, h, w]
            columns = in_flat_order(inputs, conv.weight).flatten(1).T
        else:
            columns = x.flatten(0, -2).T
        if self.bias is not None:
            columns = torch.cat([columns, torch.ones_like(columns[:1])])
        return columns.double()


Layers = Mapping[str, Layer]  # by their names in the classifier, in order


def find_layers(runtime: ClientRuntime) -> Layers:
    """The linear and convolutional layers; biases are a part of their matrices."""
    if runtime.setting.network.kind == "swin_t":
        right = "another for gradient projection: its attention uses layers without calling them"
        raise invalid("network.kind", "swin_t", right)
    slices = dict[str, slice]()
    start = 0
    for name, value in runtime.classifier.named_parameters():
        slices[name] = slice(start, start + value.numel())
        start += value.numel()
    layers = dict[str, Layer]()
    for name, module in runtime.classifier.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            bias = slices.get(f"{name}.bias")
            shape = len(module.weight), module.weight[0].numel() + (bias is not None)
            layers[name] = Layer(module, slices[f"{name}.weight"], bias, shape)
    return layers


def empty_bases(layers: Layers, device: torch.device | None = None) -> Bases:
    """Bases without columns."""
    return {n: torch.zeros(layer.shape[1], 0, device=device) for n, layer in layers.items()}


def grown_bases(
    runtime: ClientRuntime, layers: Layers, bases: Bases, images: Tensor, epsilon: float
) -> Bases:
    """The bases with a share `epsilon` of the live model's layer inputs for uint8 images."""
    inputs = layer_inputs(runtime, layers, images)
    share = min(1.0, epsilon)
    return {n: grow(basis.double(), inputs[n], share).float() for n, basis in bases.items()}


def layer_inputs(runtime: ClientRuntime, layers: Layers, images: Tensor) -> dict[str, Tensor]:
    """Inputs of each layer for uint8 images: columns R [d, m] or, if fewer numbers, R R' [d, d]."""
    found: dict[str, list[Tensor]] = {name: [] for name in layers}

    def add(name: str, module: nn.Module, args: tuple[Tensor]) -> None:
        columns = layers[name].columns(args[0])
        held = found[name]
        if columns.shape[1] * len(images) < layers[name].shape[1] * len(args[0]):
            held.append(columns)
        else:
            held[:] = [sum(held, columns @ columns.T)]

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.module.register_forward_pre_hook(partial(add, name)).remove)
        for part in images.split(IMAGES):
            runtime.outputs(part)
    return {name: torch.cat(held, 1) for name, held in found.items()}


def grow(basis: Tensor, inputs: Tensor, epsilon: float) -> Tensor:
    """The basis with as few new columns as hold a share `epsilon` of the squares.  # [d, k]"""
    gram = inputs.shape[0] == inputs.shape[1]
    total = float(inputs.trace() if gram else inputs.square().sum())
    if not 0 < total < math.inf:  # a dead layer, or one that overflows
        return basis
    rest = inputs - basis @ (basis.T @ inputs)
    if gram:
        values, vectors = torch.linalg.eigh(rest - (rest @ basis) @ basis.T)
        squares = values.flip(0).clamp(min=0)
        vectors = vectors.flip(1)
    else:
        vectors, values, _ = torch.linalg.svd(rest, full_matrices=False)
        squares = values.square()
    new = columns_needed(squares / total, epsilon)
    if not new:
        return basis
    grown: Tensor = torch.linalg.qr(torch.cat([basis, vectors[:, :new]], 1)).Q
    return grown.contiguous()  # as on disk: the order of sums in a product depends on it


def columns_needed(shares: Tensor, epsilon: float) -> int:
    """How many of the descending shares it takes to reach `epsilon` with what they lack to 1."""
    held = (1 - shares.sum(0, keepdim=True)).clamp(min=0)  # by the columns that are there
    reached = torch.cat([held, shares]).cumsum(0)  # after 0, 1, ... new columns
    return min(int((reached < epsilon).sum()), int((shares > NOISE).sum()))


def component(
    vector: Tensor, layers: Layers, bases: Bases, others: Tensor, weights: Bases | None = None
) -> Tensor:
    """The part of a flat vector in the bases' spaces; where these are empty `others`.  # [P]"""
    result = others.clone()
    for name, layer in layers.items():
        if bases[name].shape[1]:
            inside = layer.matrix(vector) @ bases[name]
            inside = inside if weights is None else inside * weights[name]
            layer.write(result, inside @ bases[name].T)
    return result


def descent_direction(runtime: ClientRuntime) -> Tensor:
    """The live gradient with the weight decay that a step adds to it.  # [P]"""
    model = runtime.model
    decay = runtime.training.weight_decay
    return model.gradients.add(model.parameters, alpha=decay) if decay else model.gradients


def filled(layers: Layers, bases: Bases) -> dict[str, float]:
    """The columns over the dimensions, of all layers together and of each, for the log."""
    columns = {name: bases[name].shape[1] for name in layers}
    shares = {f"filled {name}": columns[name] / layer.shape[1] for name, layer in layers.items()}
    total = sum(layer.shape[1] for layer in layers.values())
    return {**shares, "filled": sum(columns.values()) / total}


def has_columns(bases: Bases) -> bool:
    """Whether anything is protected."""
    return any(basis.shape[1] for basis in bases.values())
