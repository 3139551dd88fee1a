"""Pictures weighed so that what is learnt from them suits all (BCSR: Hao, Ji and Liu, 2023)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from stamp_core.config import above, at_least
from stamp_core.coresets import Proposal, Task, as_inputs
from stamp_core.learner import Learner
from stamp_core.simplex import project_simplex

TERMS = 4  # of the Neumann series
RISE = 10  # times its first loss: there a proxy has diverged
HALVINGS = 30  # of the proxy's rate, which then moves nothing any more
Inputs = tuple[Tensor, Tensor]  # pictures, or features of pictures, and labels


@dataclass(frozen=True)
class Options:
    """How candidates are weighed, and how the weights choose.

    The published rates are for a mean of p_i l_i over 50 pictures and for the softmax of p, and
    come to 0.1 and 1 here. On a network that has been trained on the pictures already, gradients
    are small, and a rate of 1 would leave all weights equal.
    """

    candidates: int = 250  # the most pictures that share out a weight of 1
    outer: int = 5  # steps of the weights
    inner: int = 1  # steps of the proxy before each of them
    rate_proxy: float = 0.1
    rate_weights: float = 10.0  # for weights in units of their mean, 1 / n
    beta: float = 0.1  # of the regulariser, which wants the weight on as many as will be chosen
    spread: float = 1e-3  # of the noise that smooths it
    past: float = 0.1  # weight of remembered pictures of other tasks in the outer loss
    direct: bool = True  # False: the regulariser changes nothing, as in the released code
    softmax: bool = False  # as in the released code, which trains the proxy with p all the same
    space: Literal["all", "head"] = "all"  # what the proxy learns; "head" is far cheaper
    choice: Literal["draw", "top"] = "draw"  # with the weights as chances | the largest weights

    def __post_init__(self) -> None:
        """Refuse what weighs nothing or cannot descend."""
        at_least(self, 1, "candidates", "outer", "inner")
        above(self, 0, "rate_proxy", "rate_weights", "spread")
        at_least(self, 0, "beta", "past")


def propose(task: Task) -> Proposal:
    """All pictures of the task in the order in which they are chosen."""
    task.learner.restore()
    finite = task.learner.losses(*task.inputs()).isfinite().cpu()
    shuffled = torch.randperm(len(finite), generator=task.draw)
    usable, strange = shuffled[finite[shuffled]], shuffled[~finite[shuffled]]
    if len(strange):
        task.events.append("bcsr: a loss is no number")
    weights = torch.zeros(len(finite), dtype=torch.float64)
    for batch in parts(usable, task.options.candidates):
        weights[batch] = len(batch) * weigh(task, batch)  # 1 on average in every batch
    order = torch.cat([usable, strange])
    return task.best(order[ranked(weights[order], task)])


def parts(places: Tensor, most: int) -> Sequence[Tensor]:
    """The places in parts of about the same size, at most `most`."""
    count = math.ceil(len(places) / most)
    return places.tensor_split(count) if count else ()


def ranked(weights: Tensor, task: Task) -> Tensor:
    """Places by their weights, or as draws without replacement find them.  # [N]

    Of exponential times with the weights as rates the least is the first draw, the next one the
    second. Equal weights, and those of 0 at the end, stay in the order in which they stand.
    """
    if task.options.choice == "top":
        return weights.argsort(descending=True, stable=True)
    times = torch.empty_like(weights).exponential_(generator=task.draw)
    return (times / weights).argsort(stable=True)


def weigh(task: Task, batch: Tensor) -> Tensor:
    """The weights of some of the task's pictures, which add up to 1.  # [n]

    Where the proxy diverges, they are those before the last step, whose weights it could not bear.
    """
    options, proxy = task.options, Proxy(task.learner, task.options.space)
    inputs = proxy.inputs(as_inputs(task.learner, task.pictures[batch], task.labels[batch]))
    past = proxy.inputs(as_inputs(task.learner, *remembered(task)))
    rate, highest = bearable(proxy, inputs, options.rate_proxy)
    if rate < options.rate_proxy:
        task.events.append("bcsr: the proxy's rate was lowered")
    weights = before = uniform(len(batch))
    for _ in range(options.outer):
        for _ in range(options.inner):
            proxy.step(proxy.slope(inputs, weights), rate)
        loss, gradient = through(proxy, inputs, past, weights, rate, options)
        if not (loss <= highest and gradient.isfinite().all()):
            task.events.append("bcsr: the proxy diverged")
            return before
        if options.direct:
            gradient -= options.beta * chances(weights, places(task, batch), options, task.draw)
        moved = weights - options.rate_weights / len(batch) * gradient
        before, weights = weights, torch.from_numpy(project_simplex(moved.numpy()))
    return weights


def remembered(task: Task) -> Inputs:
    """Remembered pictures of other tasks, some of them where they are more than candidates."""
    pictures, labels = task.past
    some = torch.randperm(len(labels), generator=task.draw)[: task.options.candidates]
    return pictures[some], labels[some]


def places(task: Task, batch: Tensor) -> int:
    """How many of these pictures will be chosen if all have the same chance, rounded up."""
    wanted = task.per_class * len(task.labels.unique())
    return min(len(batch), math.ceil(wanted * len(batch) / len(task.labels)))


def uniform(count: int) -> Tensor:
    """Equal weights that add up to 1.  # [n]"""
    return torch.full((count,), 1 / count, dtype=torch.float64)


class Proxy:
    """What learns from weighted pictures: a client's network, or its head from fixed features.

    In evaluation mode: in a batch that is normalised by its own statistics no picture would have
    a loss of its own.
    """

    def __init__(self, learner: Learner, space: Literal["all", "head"]) -> None:
        learner.restore()
        self.learner, self.encodes = learner, space == "head"
        self.module = learner.network.head if self.encodes else learner.network
        self.parameters = list(self.module.parameters())

    @torch.no_grad()
    def inputs(self, inputs: Inputs) -> Inputs:
        """What the module takes for normalised pictures, and their labels."""
        pictures, labels = inputs
        return self.learner.network.encode(pictures) if self.encodes else pictures, labels

    def losses(self, inputs: Inputs) -> Tensor:
        """The cross-entropy of each picture, ready for its gradient.  # [n]"""
        return F.cross_entropy(self.module(inputs[0]), inputs[1], reduction="none")

    def slope(self, inputs: Inputs, weights: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the inner loss sum_i p_i l_i.

        A sum, as the paper's expectation over p is: the released code takes the mean of p_i l_i,
        which is n times less, so that its rates mean something else for each size of a batch.
        """
        losses = self.losses(inputs)
        return grad(weights.to(losses) @ losses, self.parameters)

    @torch.no_grad()
    def step(self, slope: Sequence[Tensor], rate: float) -> None:
        """Go down a slope."""
        for parameter, part in zip(self.parameters, slope, strict=True):
            parameter.sub_(part, alpha=rate)


def bearable(proxy: Proxy, inputs: Inputs, rate: float) -> tuple[float, float]:
    """The rate, halved until a first step does not diverge, and where divergence begins."""
    slope = proxy.slope(inputs, uniform(len(inputs[1])))
    with torch.no_grad():
        highest = RISE * float(proxy.losses(inputs).mean())
        for _ in range(HALVINGS):
            proxy.step(slope, rate)
            after = float(proxy.losses(inputs).mean())
            proxy.learner.restore()
            if after <= highest:
                break
            rate /= 2
    return rate, highest


def through(
    proxy: Proxy, inputs: Inputs, past: Inputs, weights: Tensor, rate: float, options: Options
) -> tuple[float, Tensor]:
    """The proxy's mean loss, and the gradient by the weights of the outer one.  # [n]"""
    losses = proxy.losses(inputs)
    variable = weights.to(losses, copy=True).requires_grad_()
    inner = (variable.softmax(0) if options.softmax else variable) @ losses
    outer = mean = losses.mean()
    if len(past[1]) and options.past:
        outer = mean + options.past * proxy.losses(past).mean()
    gradient = implicit(inner, outer, variable, proxy.parameters, rate, TERMS)
    return float(mean.detach()), gradient.cpu().double()


def implicit(
    inner: Tensor,
    outer: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor],
    rate: float,
    terms: int,
) -> Tensor:
    """The gradient of `outer` by the weights where the parameters minimise `inner`.  # [n]

    There the slope of the inner loss stays 0, so H dtheta/dp = -dslope/dp, and the gradient is
    -<dslope/dp, H^-1 v> where v is the slope of the outer loss. H^-1 is the Neumann series
    rate * sum_k (I - rate H)^k; the released code leaves out its factor `rate`.
    """
    v = flat(grad(outer, parameters, retain_graph=True))
    slope = flat(grad(inner, parameters, create_graph=True))
    total = v
    for _ in range(terms - 1):
        v = v - rate * flat(grad(slope, parameters, v, retain_graph=True))
        total = total + v
    return -rate * grad(slope, weights, total)[0]


def chances(weights: Tensor, count: int, options: Options, draw: torch.Generator) -> Tensor:
    """How likely each of weights + spread * z, z normal, is among the `count` largest.  # [n]

    It is the gradient of what the largest add up to on average. The average is over all rotations
    of one z, so that equal weights have equal chances: a single z would choose among them.
    """
    z = torch.randn(len(weights), generator=draw, dtype=torch.float64)
    rotated = z.repeat(2).unfold(0, len(z), 1)[1:]  # [n, n]
    largest = (weights + options.spread * rotated).topk(count).indices
    return largest.flatten().bincount(minlength=len(z)).double() / len(z)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All values one after the other.  # [P]"""
    return torch.cat([tensor.flatten() for tensor in tensors])
