"""Building blocks of personalised methods: meta-networks, mixed normalisation, Neumann series."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call

from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.core.seeding import generator
from stamp_core.models.flat import split_like

HIDDEN = 100  # width of both hidden layers of a meta-network
GAIN = 0.1  # of the Xavier initialisation of their weights
BETA, MULTIPLIER = 0.5, 1.0  # initial value of all biases of BNNet, of LRNet
MAX_MULTIPLIER = 1000.0
VARIANCE_EPSILON = 1e-5  # added to variances
HIGH, CLIP = 100.0, 0.5  # gradients of a loss above HIGH are clipped to ±CLIP, as published

Moments = tuple[Tensor, Tensor]  # mean and variance of each channel
BatchIterator = Iterator[tuple[Tensor, Tensor]]


class LayerStatistics(NamedTuple):
    """The inputs of the meta-networks: statistics of a client's images in a network."""

    inputs: Tensor  # [L 2] mean and deviation of each learnable layer's input
    divergences: Tensor  # [N] of each normalisation's input from its running statistics


class MetaNets:
    """BNNet, LRNet and a learnt learning rate for each tensor of a model, in one vector `meta`.

    BNNet maps `divergences` to beta, the client's share in the statistics of each normalisation.
    LRNet maps `inputs` to a multiplier of each tensor's learning rate.
    """

    def __init__(self, module: nn.Module, norms: int) -> None:
        self.tensors = [p.numel() for p in module.parameters()]
        bn = _mlp_parts(norms, norms) if norms else []  # without normalisation no BNNet
        lr = _mlp_parts(2 * len(_learnable(module)), len(self.tensors))
        self.parts = [*bn, *lr, torch.empty(len(self.tensors))]
        self.bn_size = sum(part.numel() for part in bn)  # BNNet comes first in `meta`

    def initial(self, seed: int, lr: float) -> Tensor:
        """The initial `meta`: Xavier weights, constant biases, learning rates of `lr`.  # [M]"""
        fills = [*[BETA] * (len(self.parts) - 7), *[MULTIPLIER] * 6, lr]
        parts = [torch.full_like(part, fill) for part, fill in zip(self.parts, fills, strict=True)]
        draw = generator(seed, "meta")
        for part in parts:
            if part.dim() == 2:
                nn.init.xavier_normal_(part, GAIN, generator=draw)
        return torch.cat([part.flatten() for part in parts])

    def __call__(self, meta: Tensor, statistics: LayerStatistics) -> tuple[Tensor, Tensor]:
        """beta for each normalisation and the multiplied learning rate of each tensor."""
        *nets, lrs = split_like(meta, self.parts)
        multipliers = _clamp(_mlp(nets[-6:], statistics.inputs), MAX_MULTIPLIER)
        beta = _clamp(_mlp(nets[:6], statistics.divergences), 1.0) if self.bn_size else meta[:0]
        return beta, lrs * multipliers  # [N], [K]

    def expand(self, lrs: Tensor) -> Tensor:
        """The learning rate of each parameter from those of the tensors.  # [K] -> [P]"""
        return torch.cat([lr.expand(n) for lr, n in zip(lrs, self.tensors, strict=True)])


def _learnable(module: nn.Module) -> list[nn.Module]:
    """The layers that have parameters of their own."""
    return [layer for layer in module.modules() if list(layer.parameters(recurse=False))]


def _mlp_parts(inputs: int, outputs: int) -> list[Tensor]:
    """Empty weights and biases of a network with two hidden layers."""
    sizes = pairwise((inputs, HIDDEN, HIDDEN, outputs))
    return [part for a, b in sizes for part in (torch.empty(b, a), torch.empty(b))]


def _mlp(parts: Sequence[Tensor], x: Tensor) -> Tensor:
    """The output of the network with these weights and biases."""
    x = F.relu(F.linear(x, *parts[0:2]))
    x = F.relu(F.linear(x, *parts[2:4]))
    return F.linear(x, *parts[4:6])


def _clamp(x: Tensor, maximum: float) -> Tensor:
    """`x` clamped to 0 and `maximum`, with a straight-through gradient: that of `x` itself."""
    return x.detach().clamp(0, maximum) + (x - x.detach())


@torch.no_grad()
def layer_statistics(
    runtime: ClientRuntime, norms: Sequence[nn.Module], indices: Tensor
) -> LayerStatistics:
    """The statistics of some training images in the live model in evaluation mode."""
    module = runtime.model.module.eval()
    layers, sums = _learnable(module), dict[nn.Module, Tensor]()

    def add(layer: nn.Module, args: tuple[Tensor]) -> None:
        x = args[0].float()  # in bfloat16 the moments would be rounded
        dims = _all_but_channels(x) if layer in norms else None
        variance, mean = (m.double() for m in torch.var_mean(x, dims, correction=0))
        part = torch.stack([mean, variance + mean.square()]) * (len(x) / len(indices))
        sums[layer] = sums.get(layer, 0) + part  # [2, C] or [2]: means of x and of x^2

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(add).remove)
        for images, _ in plain_batches(runtime, indices, runtime.chunk):
            module(images)
    moments = [_moments(sums[layer].view(2, -1).mean(1)) for layer in layers]
    inputs = [
        value
        for mean, variance in moments
        for value in (mean, (variance + VARIANCE_EPSILON).sqrt())
    ]
    pairs = zip(running_statistics(norms), norms, strict=True)
    divergences = [_divergence(net, _moments(sums[norm])) for net, norm in pairs]
    return LayerStatistics(
        torch.stack(inputs), torch.stack(divergences) if norms else torch.empty(0)
    )


def _all_but_channels(x: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, x.dim())]


def _moments(means: Tensor) -> Moments:
    """Mean and variance from the means of x and of x^2."""
    return means[0].float(), (means[1] - means[0].square()).clamp(min=0).float()


def _divergence(one: Moments, other: Moments) -> Tensor:
    """(KL(one, other) + KL(other, one)) / 2 of Gaussians, averaged over channels."""
    (p, v), (q, w) = [(mean, variance + VARIANCE_EPSILON) for mean, variance in (one, other)]
    gap = (p - q).square()
    return (((v + gap) / w + (w + gap) / v - 2) / 4).mean()


def running_statistics(norms: Sequence[Any]) -> list[Moments]:
    """Copies of the running statistics."""
    return [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]


@contextmanager
def mixed_normalisation(
    norms: Sequence[nn.Module], net: Sequence[Moments], beta: Tensor
) -> Iterator[None]:
    """A context in which the norms use (1 - beta) net + beta own as means and as variances.

    The own ones are those of the batch in training mode, the running ones in evaluation mode.
    """
    with ExitStack() as hooks:
        for norm, *mixture in zip(norms, net, beta, strict=True):
            hooks.callback(norm.register_forward_hook(partial(_normalise, *mixture)).remove)
        yield


def _normalise(net: Moments, beta: Tensor, norm: Any, args: tuple[Tensor], _: Tensor) -> Tensor:
    """A forward hook: the output of a normalisation with mixed statistics."""
    x, own = args[0].float(), (norm.running_mean, norm.running_var)
    if norm.training:
        variance, mean = torch.var_mean(x, _all_but_channels(x), correction=0)
        own = mean, variance
    shape = (-1, *[1] * (x.dim() - 2))
    mean, variance = (torch.lerp(*pair, beta).view(shape) for pair in zip(net, own, strict=True))
    weight, bias = norm.weight.view(shape), norm.bias.view(shape)
    result: Tensor = (x - mean) / (variance + norm.eps).sqrt() * weight + bias
    return result.to(args[0])


def store_mixture(norms: Sequence[Any], net: Sequence[Moments], beta: Tensor) -> None:
    """Make the mixed statistics the running ones."""
    for norm, (mean, variance), share in zip(norms, net, beta, strict=True):
        norm.running_mean.copy_(torch.lerp(mean, norm.running_mean, share))
        norm.running_var.copy_(torch.lerp(variance, norm.running_var, share))


def plain_batches(runtime: ClientRuntime, indices: Tensor, size: int) -> BatchIterator:
    """Training images in the given order, in batches, without augmentation."""
    for batch in indices.to(runtime.x_train.device).split(size) if len(indices) else ():
        images, labels = runtime.train_images(batch)
        yield runtime.normalise(images), labels


def endless_batches(
    runtime: ClientRuntime, round_id: RoundId, indices: Tensor, purpose: str
) -> BatchIterator:
    """Augmented batches of training images without end, in a new order each epoch."""
    draw, read = round_id.generator(purpose), runtime.reader(runtime.x_train, indices)
    labels = runtime.y_train[indices.to(runtime.y_train.device)].to(runtime.device)
    while True:
        order = torch.randperm(len(indices), generator=draw)
        for drawn in runtime.draw(order.split(runtime.training.batch_size), draw):
            yield read(drawn), labels[drawn.places]


def epoch_batches(
    runtime: ClientRuntime, round_id: RoundId, indices: Tensor, purpose: str, epochs: int
) -> BatchIterator:
    """Augmented batches of training images for some epochs, in a new order each epoch."""
    steps = epochs * math.ceil(len(indices) / runtime.training.batch_size)
    return islice(endless_batches(runtime, round_id, indices, purpose), steps)


def clipped_gradient(runtime: ClientRuntime, images: Tensor, labels: Tensor) -> Tensor:
    """The live model's gradient in training mode; zero where the loss is not finite.  # [P]"""
    runtime.train_mode(len(labels))
    runtime.model.gradients.zero_()
    loss = F.cross_entropy(runtime.model.module(images), labels)
    loss.backward()
    limit = torch.where(loss > HIGH, CLIP, math.inf)  # of the device, which nobody waits for
    return runtime.model.gradients.clamp_(-limit, limit).masked_fill_(~(loss < math.inf), 0.0)


def loss_at(runtime: ClientRuntime, theta: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """The loss with the parameters `theta` in evaluation mode."""
    module = runtime.model.module.eval()
    named = dict(module.named_parameters())
    values = dict(zip(named, split_like(theta, list(named.values())), strict=True))
    return F.cross_entropy(functional_call(module, values, (images,)), labels)


def neumann_series(
    gradient: Tensor, theta: Tensor, vector: Tensor, steps: int, lr: float
) -> Tensor:
    """The sum of (I - lr H)^j vector for j = 0 … steps; H is the derivative of the gradient."""
    total = power = vector
    for _ in range(steps):
        power = power - lr * grad(gradient, theta, power, retain_graph=True)[0]
        total = total + power
    return total
