"""Pictures made from noise that a teacher knows by heart: SRe2L (Yin, Xing and Shen, 2023)."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from stamp_core.config import above, at_least
from stamp_core.coresets import Proposal, Task
from stamp_core.models import Classifier

FIRST = 10.0  # weight of the first batch normalisation, whose statistics are those of low features
SURE = 10.0  # logit of a label where the teacher has no answer

Entries = dict[_BatchNorm, Tensor]  # what has last entered each, the first one first


@dataclass(frozen=True)
class Options:
    """How a teacher is trained and how pictures are made from it."""

    soft: bool = True  # label pictures with the teacher's logits
    squeeze_epochs: int = 20  # from the client's model on (published: 200 from none)
    squeeze_rate: float = 0.1
    batch: int = 128  # of the squeeze
    iterations: int = 1000
    rate: float = 0.25  # of Adam, falling to 0 along a cosine
    statistics: float = 0.01  # weight of what batch normalisation has gathered
    roll: int = 4  # pixels, at most an eighth of the side
    together: int = 256  # pictures made at a time, at most

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        at_least(self, 0, "squeeze_epochs", "squeeze_rate", "statistics", "roll")
        at_least(self, 1, "batch", "iterations", "together")
        above(self, 0, "rate")


def propose(task: Task) -> Proposal:
    """As many made pictures of each class as may be kept, also where there are fewer real ones."""
    squeeze(task)
    labels = task.labels.unique().repeat(task.per_class)  # classes in turn: every group mixes them
    network, together = task.learner.network, task.options.together
    if network.norms:  # whose statistics are those of what passes at once
        together = min(together, network.at_once or together)
    groups = labels.tensor_split(math.ceil(len(labels) / together))
    if task.options.statistics and not network.norms:
        task.events.append("sre2l: no batch normalisation, no statistics to match")
    made = torch.cat([recover(task, group) for group in groups])
    pictures, labels = complete(task, made, labels)
    return Proposal(pictures, labels, relabel(task, pictures, labels))


def squeeze(task: Task) -> None:
    """Make the learner the teacher: the client's model, trained on the task alone.

    Without the paper's augmentation, momentum and decay, which the client's training may not have
    either. Where this does not lower the loss, the teacher is the client's model as it is.
    """
    options, learner, (inputs, labels) = task.options, task.learner, task.inputs()
    learner.restore()
    before = learner.losses(inputs, labels).mean()
    learner.descend(inputs, labels, batches(task), options.squeeze_rate)
    if not learner.losses(inputs, labels).mean() <= before:  # also where one is no number
        task.events.append("sre2l: the squeeze did not lower the loss")
        learner.restore()


def batches(task: Task) -> Iterator[Tensor]:
    """Places of the task's pictures, in a new order in every epoch."""
    for _ in range(task.options.squeeze_epochs):
        yield from torch.randperm(len(task.labels), generator=task.draw).split(task.options.batch)


def recover(task: Task, labels: Tensor) -> Tensor:
    """Pictures in pixels from 0 to 1, made so that the teacher answers `labels`.  # [n, C, H, W]"""
    options, learner, (low, high) = task.options, task.learner, bounds(task)
    noise = torch.randn(len(labels), *low.shape[1:], generator=task.draw)
    x, labels = noise.to(low.device).requires_grad_(), labels.to(low.device)
    adam = torch.optim.Adam([x], lr=options.rate, betas=(0.5, 0.9))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, options.iterations)
    with entries(learner.network) as seen:
        for shifts in rolls(task):
            loss = F.cross_entropy(learner.network(x.roll(shifts, (2, 3))), labels)
            loss = loss + options.statistics * mismatch(seen)
            (x.grad,) = torch.autograd.grad(loss, x)  # none for the teacher's parameters
            adam.step()
            cosine.step()
            with torch.no_grad():
                x.clamp_(low, high)
    return ((x.detach() - low) / (high - low)).cpu()


def bounds(task: Task) -> tuple[Tensor, Tensor]:
    """What pixels without and with all light are to the learner.  # [1, C, H, W] each"""
    dark = torch.zeros_like(task.pictures[:1])
    return task.learner.normalise(dark), task.learner.normalise(dark + 255)


def rolls(task: Task) -> Iterator[tuple[int, int]]:
    """How far pictures are rolled down and right in each iteration.

    At most an eighth of the way round, as the published 4 of 32 pixels: of 8 they would be half.
    """
    shape = (task.options.iterations,)
    most = [min(task.options.roll, size // 8) for size in task.pictures.shape[2:]]
    down, right = (torch.randint(m + 1, shape, generator=task.draw).tolist() for m in most)
    yield from zip(down, right, strict=True)


@contextmanager
def entries(network: Classifier) -> Iterator[Entries]:
    """What enters batch normalisations while the context is open."""
    seen: Entries = {}
    with ExitStack() as hooks:
        for norm in network.norms:
            hooks.enter_context(norm.register_forward_pre_hook(lambda m, x: seen.update({m: x[0]})))
        yield seen


def mismatch(seen: Entries) -> Tensor:
    """How far means and variances of what has entered are from those gathered in training."""
    total = torch.zeros(())
    for place, (norm, x) in enumerate(seen.items()):
        assert norm.running_mean is not None and norm.running_var is not None
        others = [axis for axis in range(x.dim()) if axis != 1]  # all but the channels
        variance, mean = torch.var_mean(x.float(), others, correction=0)
        gap = (variance - norm.running_var).norm() + (mean - norm.running_mean).norm()
        total = total + (1 if place else FIRST) * gap
    return total


def complete(task: Task, made: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures as uint8; in place of any that are no numbers, real ones at random."""
    fine = made.flatten(1).isfinite().all(1)
    pictures, labels = made[fine].mul(255).round().to(torch.uint8), labels[fine]
    if fine.all():
        return pictures, labels
    task.events.append("sre2l: real pictures for made ones that are no numbers")
    order = torch.randperm(len(task.labels), generator=task.draw)
    pictures = torch.cat([pictures, task.pictures[order]])
    labels = torch.cat([labels, task.labels[order]])
    places = [(labels == each).nonzero().flatten()[: task.per_class] for each in labels.unique()]
    first = torch.cat(places)
    return pictures[first], labels[first]


@torch.no_grad()
def relabel(task: Task, pictures: Tensor, labels: Tensor) -> Tensor:
    """The teacher's logits on the pictures as they are stored.  # [n, classes], or [n, 0]"""
    network = task.learner.network.eval()
    if not task.options.soft:
        return torch.empty(len(pictures), 0)
    parts = pictures.split(task.options.together)
    logits = torch.cat([network(task.learner.normalise(part)) for part in parts]).cpu()
    sure = SURE * F.one_hot(labels, logits.shape[1])
    return torch.where(logits.isfinite().all(1, keepdim=True), logits, sure)
