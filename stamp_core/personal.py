"""Fine-tuning that is itself learnt: meta-networks, mixed normalisation, hypergradients."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call

from stamp_core.seeding import generator
from stamp_core.vectors import pieces
from stamp_core.workspace import Visit, Workspace, augment

HIDDEN = 100  # width of both hidden layers of a meta-network
GAIN, SHARE, MULTIPLIER = 0.1, 0.5, 1.0  # of first weights; what all biases of a network are first
LIMIT = 1000.0  # of a multiplier
EPSILON = 1e-5  # beside a variance
HIGH, CLIP = 100.0, 0.5  # above such a loss each number of a gradient is clipped, as published

Moments = tuple[Tensor, Tensor]  # mean and variance of each channel
Batches = Iterator[tuple[Tensor, Tensor]]


class Seen(NamedTuple):
    """What a client's pictures are to the layers of a net."""

    inputs: Tensor  # [L 2] mean and deviation of all that each learnable layer is given
    distances: Tensor  # [N] how far what a normalisation is given is from what it has gathered


class MetaNets:
    """Two small networks and a rate for each tensor of a model, all in one vector `meta`.

    BNNet makes of `distances` the client's share in each normalisation's statistics (published in
    reverse order of layers, which to a dense network is all the same); LRNet makes of `inputs`
    what each tensor's rate is multiplied by.
    """

    def __init__(self, module: nn.Module, norms: int) -> None:
        self.tensors = [p.numel() for p in module.parameters()]
        bn = parts(norms, norms) if norms else []  # else there is nothing to mix
        lr = parts(2 * len(learnable(module)), len(self.tensors))
        self.parts = [*bn, *lr, torch.empty(len(self.tensors))]
        self.mixing = sum(part.numel() for part in bn)  # BNNet's numbers come first

    def start(self, seed: int, rate: float) -> Tensor:
        """What a training starts from.  # [M]"""
        values = [*[SHARE] * (len(self.parts) - 7), *[MULTIPLIER] * 6, rate]
        first = [torch.full_like(p, value) for p, value in zip(self.parts, values, strict=True)]
        draw = generator(seed, "meta")
        for weight in first:
            if weight.dim() == 2:
                nn.init.xavier_normal_(weight, GAIN, generator=draw)
        return torch.cat([part.flatten() for part in first])

    def __call__(self, meta: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """The client's share in each normalisation and every tensor's multiplied rate."""
        *nets, rates = pieces(meta, self.parts)
        multipliers = straight(network(nets[-6:], seen.inputs), LIMIT)
        shares = straight(network(nets[:6], seen.distances), 1.0) if self.mixing else meta[:0]
        return shares, rates * multipliers  # [N], [K]

    def spread(self, rates: Tensor) -> Tensor:
        """Every parameter's rate from every tensor's.  # [K] -> [P]"""
        return torch.cat([rate.expand(n) for rate, n in zip(rates, self.tensors, strict=True)])


def learnable(module: nn.Module) -> list[nn.Module]:
    """The layers that have parameters of their own."""
    return [each for each in module.modules() if list(each.parameters(recurse=False))]


def parts(inputs: int, outputs: int) -> list[Tensor]:
    """Room for weights and biases of a network with two hidden layers."""
    sizes = pairwise((inputs, HIDDEN, HIDDEN, outputs))
    return [part for a, b in sizes for part in (torch.empty(b, a), torch.empty(b))]


def network(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """What a network with these weights and biases makes of `x`."""
    x = F.relu(F.linear(x, *weights[0:2]))
    x = F.relu(F.linear(x, *weights[2:4]))
    return F.linear(x, *weights[4:6])


def straight(x: Tensor, most: float) -> Tensor:
    """`x` clamped to 0 and `most`, with the gradient of `x` as it is."""
    return x.detach().clamp(0, most) + (x - x.detach())


# --- what a client's pictures are like


@torch.no_grad()
def look(work: Workspace, norms: Sequence[nn.Module], indices: Tensor) -> Seen:
    """What the live model's layers are given of some training pictures, in evaluation mode."""
    module = work.model.module.eval()
    layers, both = learnable(module), dict[nn.Module, Tensor]()

    def add(layer: nn.Module, given: tuple[Tensor]) -> None:
        x = given[0].float()  # moments of bfloat16 would be rounded to it
        dims = channels(x) if layer in norms else None
        variance, mean = (m.double() for m in torch.var_mean(x, dims, correction=0))
        part = torch.stack([mean, variance + mean.square()]) * (len(x) / len(indices))
        both[layer] = both.get(layer, 0) + part  # [2, C] or [2]: means of x and of its square

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(add).remove)
        for chunk in indices.split(work.chunk):
            module(work.normalise(work.examples(chunk)[0]))
    inputs = [moments(both[layer].view(2, -1).mean(1)) for layer in layers]
    own = [moments(both[norm]) for norm in norms]
    apart = [distance(*pair) for pair in zip(gathered(norms), own, strict=True)]
    features = [value for mean, variance in inputs for value in (mean, (variance + EPSILON).sqrt())]
    return Seen(torch.stack(features), torch.stack(apart) if apart else torch.empty(0))


def channels(x: Tensor) -> list[int]:
    """The dimensions of `x` but for the channels'."""
    return [0, *range(2, x.dim())]


def moments(both: Tensor) -> Moments:
    """Mean and variance from the means of x and of its square."""
    return both[0].float(), (both[1] - both[0].square()).clamp(min=0).float()


def distance(one: Moments, other: Moments) -> Tensor:
    """The mean over channels of half the divergence of two Gaussians there and back."""
    (p, v), (q, w) = [(mean, variance + EPSILON) for mean, variance in (one, other)]
    apart = (p - q).square()
    return (((v + apart) / w + (w + apart) / v - 2) / 4).mean()


# --- normalisation between the net and the client


def gathered(norms: Sequence[Any]) -> list[Moments]:
    """What normalisations have gathered, as copies."""
    return [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]


def forget(norms: Sequence[Any]) -> None:
    """Let normalisations gather from 0 and 1 again."""
    for norm in norms:
        norm.running_mean.zero_()
        norm.running_var.fill_(1)


@contextmanager
def mixed(norms: Sequence[nn.Module], net: Sequence[Moments], shares: Tensor) -> Iterator[None]:
    """While it lasts, normalisations go by `net` but for the client's share.

    That is the batch in training, which they gather as ever, and what they have gathered else.
    """
    with ExitStack() as hooks:
        for norm, *how in zip(norms, net, shares, strict=True):
            hooks.callback(norm.register_forward_hook(partial(normalised, *how)).remove)
        yield


def normalised(net: Moments, share: Tensor, norm: Any, given: tuple[Tensor], _: Tensor) -> Tensor:
    """What a mixed normalisation makes of its input."""
    x, own = given[0].float(), (norm.running_mean, norm.running_var)
    if norm.training:
        variance, mean = torch.var_mean(x, channels(x), correction=0)
        own = mean, variance
    shape = (-1, *[1] * (x.dim() - 2))
    mean, variance = (torch.lerp(*pair, share).view(shape) for pair in zip(net, own, strict=True))
    weight, bias = norm.weight.view(shape), norm.bias.view(shape)
    result: Tensor = (x - mean) / (variance + norm.eps).sqrt() * weight + bias
    return result.to(given[0])


def settle(norms: Sequence[Any], net: Sequence[Moments], shares: Tensor) -> None:
    """Leave in normalisations what they go by when mixed."""
    for norm, (mean, variance), share in zip(norms, net, shares, strict=True):
        norm.running_mean.copy_(torch.lerp(mean, norm.running_mean, share))
        norm.running_var.copy_(torch.lerp(variance, norm.running_var, share))


# --- steps and their derivatives


def endless(work: Workspace, visit: Visit, indices: Tensor, purpose: str) -> Batches:
    """Batches of training pictures, in a new order each time round."""
    training, draw = work.setting.training, visit.generator(purpose)
    while True:
        order = indices[torch.randperm(len(indices), generator=draw)]
        for batch in order.split(training.batch):
            pictures, labels = work.examples(batch)
            yield work.normalise(augment(pictures, training, draw)), labels


def slope(work: Workspace, pictures: Tensor, labels: Tensor) -> Tensor:
    """The live model's gradient on a batch in training; 0 where the loss is no number.  # [P]"""
    work.train_mode(len(labels))
    work.model.gradients.zero_()
    loss = F.cross_entropy(work.model.module(pictures), labels)
    loss.backward()
    if not loss.isfinite():
        work.model.gradients.zero_()
    elif loss > HIGH:
        work.model.gradients.clamp_(-CLIP, CLIP)
    return work.model.gradients


def loss_at(work: Workspace, theta: Tensor, pictures: Tensor, labels: Tensor) -> Tensor:
    """The loss of the parameters `theta` on a batch, in evaluation mode."""
    module = work.model.module.eval()
    named = dict(module.named_parameters())
    values = dict(zip(named, pieces(theta, list(named.values())), strict=True))
    logits: Tensor = functional_call(module, values, (pictures,))
    return F.cross_entropy(logits, labels)


def neumann(gradient: Tensor, theta: Tensor, start: Tensor, steps: int, rate: float) -> Tensor:
    """The sum of (I - rate H)^j start for j up to `steps`; H is the gradient's derivative."""
    total = power = start
    for _ in range(steps):
        power = power - rate * grad(gradient, theta, power, retain_graph=True)[0]
        total = total + power
    return total
