"""BCSR: bilevel coreset selection by image weights on the simplex (Hao, Ji and Liu, 2023)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.autograd import grad

from stamp_core.config.limits import NonNegative, Positive, PositiveInt
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection.base import Proposal, TaskData
from stamp_core.matching.simplex import Array

NEUMANN_TERMS = 4
DIVERGENCE = 10  # times its first loss, above which the proxy has diverged
MAX_HALVINGS = 30  # of the proxy's learning rate
Inputs = tuple[Tensor, Tensor]  # normalised images, or their features, and labels
Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Options:
    """How the weights of images are optimised, and how the weights select."""

    # candidates whose weights sum to 1, at most; also of past exemplars
    batch_size: PositiveInt = 250
    outer_steps: PositiveInt = 5  # of the weights
    inner_steps: PositiveInt = 1  # of the proxy before each of them
    # In these units the published values, for a mean of p_i l_i over 50 images and for softmax(p),
    # are 0.2 and 1. At 1 all weights stay equal: the network was trained on the images already.
    proxy_lr: Positive = 0.1
    weights_lr: Positive = 10.0  # for weights in units of their mean, 1 / n
    # Of the regulariser, which concentrates weight on as many images as selected. In the released
    # code it has no effect: 0.
    beta: NonNegative = 0.1
    smoothing: Positive = 1e-3  # deviation of the noise that smooths the regulariser
    past_weight: NonNegative = 0.1  # of past exemplars' loss in the outer loss
    space: Literal["all", "head"] = "all"  # the proxy's parameters; "head" is far cheaper


def propose(task: TaskData) -> Proposal:
    """All images of the task in order of selection; those without a finite loss come last."""
    task.learner.load_client_weights()
    finite = task.learner.losses(*task.inputs()).isfinite().cpu()
    order = torch.randperm(len(finite), generator=task.generator)
    valid, invalid = order[finite[order]], order[~finite[order]]
    if len(invalid):
        task.events.append("bcsr: a loss is not finite")
    weights = torch.zeros(len(finite), dtype=torch.float64)
    parts = math.ceil(len(valid) / task.options.batch_size)
    for batch in valid.tensor_split(parts) if parts else ():
        weights[batch] = len(batch) * _optimise_weights(task, batch)  # mean 1 in every batch
    order = torch.cat([valid, invalid])
    return task.proposal(order[_sample(weights[order], task.generator)])


def _sample(weights: Tensor, generator: Generator) -> Tensor:
    """Indices by weight without replacement, the shortest exponential time first; 0 last.  # [N]"""
    times = torch.empty_like(weights).exponential_(generator=generator)
    return (times / weights).argsort(stable=True)


class _Proxy:
    """The model trained on weighted images in evaluation mode: the network, or its head alone."""

    def __init__(self, learner: Learner, space: Literal["all", "head"]) -> None:
        self.learner = learner
        self.head_only = space == "head"
        self.module = learner.network.head if self.head_only else learner.network
        self.parameters = list(self.module.parameters())

    @torch.no_grad()
    def inputs(self, images: Tensor, labels: Tensor) -> Inputs:
        inputs, labels = self.learner.inputs(images, labels)
        return self.learner.network.encode(inputs) if self.head_only else inputs, labels

    def losses(self, inputs: Inputs) -> Tensor:
        return F.cross_entropy(self.module(inputs[0]), inputs[1], reduction="none")

    def train(self, inputs: Inputs, weights: Tensor, lr: float) -> float:
        """One step on the inner loss sum_i p_i l_i (released: the mean); the mean l_i before it."""
        losses = self.losses(inputs)
        gradient = grad(weights.to(losses) @ losses, self.parameters)
        with torch.no_grad():
            for parameter, part in zip(self.parameters, gradient, strict=True):
                parameter.sub_(part, alpha=lr)
        return float(losses.detach().mean())


def _optimise_weights(task: TaskData, batch: Tensor) -> Tensor:
    """Weights on the simplex; equal ones if the proxy always diverges.  # float64 [n]

    The proxy's learning rate is halved until no step diverges. All attempts have the same draws.
    """
    options = task.options
    task.learner.load_client_weights()
    proxy = _Proxy(task.learner, options.space)
    inputs = proxy.inputs(task.images[batch], task.labels[batch])
    sample = torch.randperm(len(task.past[1]), generator=task.generator)[: options.batch_size]
    past = proxy.inputs(*(part[sample] for part in task.past))
    draws = task.generator.get_state()
    for halvings in range(MAX_HALVINGS + 1):
        task.generator.set_state(draws)
        weights = _descend(task, proxy, inputs, past, options.proxy_lr / 2**halvings)
        if weights is not None:
            if halvings:
                task.events.append("bcsr: the proxy's learning rate was lowered")
            return weights
    task.events.append("bcsr: the proxy diverged")
    return torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)


def _descend(
    task: TaskData, proxy: _Proxy, inputs: Inputs, past: Inputs, lr: float
) -> Tensor | None:
    options, count = task.options, len(inputs[1])
    total = task.exemplars_per_class * len(task.labels.unique())
    share = min(count, math.ceil(total * count / len(task.labels)))  # how many will be selected
    proxy.learner.load_client_weights()
    max_loss = DIVERGENCE * float(proxy.losses(inputs).detach().mean())
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    for _ in range(options.outer_steps):
        losses = [proxy.train(inputs, weights, lr) for _ in range(options.inner_steps)]
        loss, gradient = _hypergradient(proxy, inputs, past, weights, lr, options)
        stable = all(each <= max_loss for each in (*losses, loss))  # not if one is nan
        if not (stable and gradient.isfinite().all()):
            return None
        inclusion = _inclusion_probabilities(weights, share, options.smoothing, task.generator)
        gradient -= options.beta * inclusion
        moved = weights - options.weights_lr / count * gradient
        weights = torch.from_numpy(project_simplex(moved.numpy()))
    return weights


def _hypergradient(
    proxy: _Proxy, inputs: Inputs, past: Inputs, weights: Tensor, lr: float, options: Options
) -> tuple[float, Tensor]:
    """The proxy's mean loss, and the outer loss's gradient w.r.t. the weights.  # float64 [n]"""
    losses = proxy.losses(inputs)
    p = weights.to(losses, copy=True).requires_grad_()
    outer = mean = losses.mean()
    if len(past[1]) and options.past_weight:
        outer = mean + options.past_weight * proxy.losses(past).mean()
    gradient = _implicit_gradient(p @ losses, outer, p, proxy.parameters, lr, NEUMANN_TERMS)
    return float(mean.detach()), gradient.cpu().double()


def _implicit_gradient(
    inner: Tensor, outer: Tensor, weights: Tensor, parameters: Tensors, lr: float, terms: int
) -> Tensor:
    """The gradient of `outer` w.r.t. the weights where the parameters minimise `inner`.  # [n]

    By the implicit function theorem H dtheta/dp = -dg/dp with g the inner gradient, so the
    result is -<dg/dp, H^-1 v> with v the outer gradient. H^-1 is the truncated Neumann series
    lr * sum_k (I - lr H)^k; the released code omits its factor lr.
    """
    v = _flat(grad(outer, parameters, retain_graph=True))
    inner_gradient = _flat(grad(inner, parameters, create_graph=True))
    total = v
    for _ in range(terms - 1):
        v = v - lr * _flat(grad(inner_gradient, parameters, v, retain_graph=True))
        total = total + v
    return -lr * grad(inner_gradient, weights, total)[0]


def _inclusion_probabilities(
    weights: Tensor, count: int, smoothing: float, generator: Generator
) -> Tensor:
    """How likely each of weights + smoothing * z, z normal, is among the `count` largest.  # [n]

    This is the gradient of the smoothed sum of the largest weights. The expectation is over all
    rotations of one z: equal weights are equally likely.
    """
    z = torch.randn(len(weights), generator=generator, dtype=torch.float64)
    rotations = z.repeat(2).unfold(0, len(z), 1)[1:]  # [n, n]
    largest = (weights + smoothing * rotations).topk(count).indices
    return largest.flatten().bincount(minlength=len(z)).double() / len(z)


def _flat(tensors: Tensors) -> Tensor:  # [P]
    return torch.cat([tensor.flatten() for tensor in tensors])


def project_simplex(v: Array) -> Array:
    """The point of the simplex nearest to `v`."""
    v = v - v.max()  # so that adding 1 is not lost in large numbers
    descending = -np.sort(-v)
    levels = (np.cumsum(descending) - 1) / np.arange(1, len(v) + 1)
    return np.asarray(np.maximum(v - levels[np.flatnonzero(descending > levels)[-1]], 0.0))
