"""SRe2L (Yin, Xing and Shen, 2023): synthetic images, optimised from noise against a teacher."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from stamp_core.config.limits import NonNegative, NonNegativeInt, Positive, PositiveInt
from stamp_core.coresets.selection.base import Proposal, TaskData
from stamp_core.models.networks import Classifier
from workbench.adam import Adam

IMAGES = True  # it makes images, which it cannot where the data are features
FIRST_LAYER = 10.0  # weight of the first batch normalisation's statistics; the others have 1
BETAS = (0.5, 0.9)  # of Adam
FALLBACK_LOGIT = 10.0  # of the label where the teacher's logits are not finite

NormInputs = dict[_BatchNorm, Tensor]  # the last input of each layer, in order of execution


@dataclass(frozen=True)
class Options:
    """How the teacher is trained (squeeze) and images are optimised against it (recover)."""

    soft: bool = True  # label images with the teacher's logits (relabel)
    squeeze_epochs: NonNegativeInt = 20  # from the client's model (published: 200 from scratch)
    squeeze_lr: NonNegative = 0.1  # of SGD
    batch_size: PositiveInt = 128  # of the squeeze
    iterations: PositiveInt = 1000  # of Adam on the images
    lr: Positive = 0.25  # of Adam, decayed to 0 along a cosine
    # of matching batch normalisation's running statistics
    statistics_weight: NonNegative = 0.01
    roll: NonNegativeInt = 4  # pixels, at most an eighth of the side
    group_size: PositiveInt = 256  # images optimised together, at most


def propose(task: TaskData) -> Proposal:
    """`exemplars_per_class` synthetic images of each class, even if it has fewer real ones."""
    _squeeze(task)
    labels = task.labels.unique().repeat(task.exemplars_per_class)  # every group mixes classes
    if task.options.statistics_weight and not task.learner.network.norms:
        task.events.append("sre2l: no batch normalisation, no statistics to match")
    groups = labels.tensor_split(math.ceil(len(labels) / task.options.group_size))
    pixels = torch.cat([_recover(task, group) for group in groups])
    images, labels = _replace_invalid(task, pixels, labels)
    return Proposal(images, labels, _relabel(task, images, labels))


def _squeeze(task: TaskData) -> None:
    """Train the learner from the client's weights; these are the teacher if the loss stays."""
    options, learner, (inputs, labels) = task.options, task.learner, task.inputs()
    learner.load_client_weights()
    before = learner.losses(inputs, labels).mean()
    schedule = options.squeeze_epochs, options.batch_size, options.squeeze_lr
    learner.train_epochs(inputs, labels, *schedule, task.generator)
    if not learner.losses(inputs, labels).mean() <= before:  # also if it is nan
        task.events.append("sre2l: the squeeze did not lower the loss")
        learner.load_client_weights()


def _recover(task: TaskData, labels: Tensor) -> Tensor:
    """Images with pixels in [0, 1] that the teacher classifies as `labels`.  # [n, C, H, W]"""
    options, learner, dark = task.options, task.learner, torch.zeros_like(task.images[:1])
    low, high = learner.normalise(dark), learner.normalise(dark + 255)  # [1, C, H, W]
    noise = torch.randn(len(labels), *low.shape[1:], generator=task.generator)
    x, labels = noise.to(low.device), labels.to(low.device)
    adam = Adam(x, BETAS)
    with _record_norm_inputs(learner.network) as norm_inputs:
        for step, (down, right) in enumerate(_random_rolls(task)):
            rolled = x.roll((down, right), (2, 3)).requires_grad_()
            loss = F.cross_entropy(learner.network(rolled), labels)
            if norm_inputs:
                loss = loss + options.statistics_weight * _statistics_loss(norm_inputs)
            (gradient,) = torch.autograd.grad(loss, rolled)  # none for the teacher's parameters
            cosine = math.cos(math.pi * step / options.iterations)
            adam.descend(gradient.roll((-down, -right), (2, 3)), options.lr * (1 + cosine) / 2)
            torch.clamp(x, low, high, out=x)
    return ((x - low) / (high - low)).cpu()


def _random_rolls(task: TaskData) -> Iterator[tuple[int, int]]:
    """By how many pixels images are rolled in each iteration, at most 1/8 of the side."""
    size = (task.options.iterations,)
    limits = [min(task.options.roll, side // 8) for side in task.images.shape[2:]]
    down, right = (torch.randint(m + 1, size, generator=task.generator).tolist() for m in limits)
    yield from zip(down, right, strict=True)


@contextmanager
def _record_norm_inputs(network: Classifier) -> Iterator[NormInputs]:
    inputs: NormInputs = {}
    with ExitStack() as hooks:
        for norm in network.norms:
            hook = norm.register_forward_pre_hook(lambda m, x: inputs.update({m: x[0]}))
            hooks.enter_context(hook)
        yield inputs


def _statistics_loss(inputs: NormInputs) -> Tensor:
    """Weighted distances of the inputs' means and variances to the running statistics."""
    total = torch.zeros(())
    for layer, (norm, x) in enumerate(inputs.items()):
        assert norm.running_mean is not None and norm.running_var is not None
        axes = [axis for axis in range(x.dim()) if axis != 1]  # all but the channels
        variance, mean = torch.var_mean(x.float(), axes, correction=0)
        gap = (variance - norm.running_var).norm() + (mean - norm.running_mean).norm()
        total = total + (1 if layer else FIRST_LAYER) * gap
    return total


def _replace_invalid(task: TaskData, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The images as uint8 with their labels; random real ones in place of nan and infinity."""
    finite = pixels.flatten(1).isfinite().all(1)
    images, labels = pixels[finite].mul(255).round().to(torch.uint8), labels[finite]
    if finite.all():
        return images, labels
    task.events.append("sre2l: real images in place of synthetic ones that are not finite")
    order = torch.randperm(len(task.labels), generator=task.generator)
    images = torch.cat([images, task.images[order]])
    labels = torch.cat([labels, task.labels[order]])
    first = [(labels == c).nonzero().flatten()[: task.exemplars_per_class] for c in labels.unique()]
    indices = torch.cat(first)
    return images[indices], labels[indices]


@torch.no_grad()
def _relabel(task: TaskData, images: Tensor, labels: Tensor) -> Tensor:
    network = task.learner.network.eval()
    if not task.options.soft:
        return torch.empty(len(images), 0)
    batches = images.split(task.options.group_size)
    logits = torch.cat([network(task.learner.normalise(batch)) for batch in batches]).cpu()
    fallback = FALLBACK_LOGIT * F.one_hot(labels, logits.shape[1])
    return torch.where(logits.isfinite().all(1, keepdim=True), logits, fallback)
