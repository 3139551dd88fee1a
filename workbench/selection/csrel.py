"""CSReL: coreset selection by reducible loss (Tong et al., 2025)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config.limits import Positive, PositiveInt
from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection.base import Proposal, TaskData
from stamp_core.models.networks import set_train_mode

LOWEST = -1e300  # below every float32 score
NOT_FINITE = "csrel: losses that are not finite"


@dataclass(frozen=True)
class Options:
    """How the reference model and the selection model are trained, as published for CIFAR-100."""

    reference_epochs: PositiveInt = 10  # of an untrained network on the whole task
    reference_lr: Positive = 3e-3  # of its SGD
    selection_steps: PositiveInt = 40  # in which the coreset grows to its size
    # SGD steps on the coreset after each of them, from initial weights
    train_steps: PositiveInt = 7
    train_lr: Positive = 5e-3  # of these steps
    batch_size: PositiveInt = 32  # of both models
    # Classes with the fewest images in the coreset first. The published runs on task sequences
    # rank all classes together; here every class keeps its own first images.
    balanced: bool = True


def propose(task: TaskData) -> Proposal:
    """The task's images in order of selection, then the others by their last score.

    A score is the loss after training on the coreset minus the loss after training on the whole
    task. Unlike in the paper, past tasks are not selected again: quotas never shrink.
    """
    options = task.options
    learner = task.learner
    inputs, labels = task.inputs()
    reference = _reference_losses(task)
    total = int(task.labels.bincount().clamp(max=task.exemplars_per_class).sum())
    share = max(total // options.selection_steps, 1)
    selected = torch.empty(0, dtype=torch.int64)
    learner.load_initial_weights()
    while True:
        scores = _finite_scores(learner.losses(inputs, labels).cpu() - reference, task)
        rest = _rank(scores, task.labels, selected, options.balanced)
        if len(selected) + share >= total:
            return task.proposal(torch.cat([selected, rest]))
        selected = torch.cat([selected, rest[:share]])
        _train_from_scratch(inputs[selected], labels[selected], task)


def _reference_losses(task: TaskData) -> Tensor:
    options = task.options
    inputs, labels = task.inputs()
    task.learner.load_initial_weights()
    schedule = options.reference_epochs, options.batch_size, options.reference_lr
    task.learner.train_epochs(inputs, labels, *schedule, task.generator)
    return task.learner.losses(inputs, labels).cpu()


def _train_from_scratch(images: Tensor, labels: Tensor, task: TaskData) -> None:
    """Train the untrained network on batches drawn from a coreset with replacement.

    A single image is not repeated: copies have no variance for batch normalisation. Without it,
    each image of a coreset that is smaller than a batch is computed once, weighted by its draws.
    """
    options = task.options
    learner = task.learner
    count = len(labels)
    size = options.batch_size if count > 1 else 1
    draws = torch.randint(count, (options.train_steps, size), generator=task.generator)
    learner.load_initial_weights()
    if learner.network.norms or count > size:
        learner.train(images, labels, draws, options.train_lr)
    else:
        weights = F.one_hot(draws, count).sum(1) / size  # [steps, n]
        train_weighted(learner, images, labels, weights, options.train_lr)


def train_weighted(
    learner: Learner, images: Tensor, labels: Tensor, weights: Tensor, lr: float
) -> None:
    """Plain SGD with one step on all images for each row of their weights.  # [steps, N]"""
    set_train_mode(learner.network, update_norms=len(labels) > 1)
    for row in weights.to(images):
        losses = F.cross_entropy(learner.network(images), labels, reduction="none")
        learner.step(row.dot(losses), lr)
    learner.network.eval()


def _finite_scores(scores: Tensor, task: TaskData) -> Tensor:
    """The scores; those that are not finite become the lowest, in random order.  # [N]"""
    finite = scores.isfinite()
    if finite.all():
        return scores
    if NOT_FINITE not in task.events:
        task.events.append(NOT_FINITE)
    order = 1 + torch.rand(len(scores), generator=task.generator, dtype=torch.float64)
    return torch.where(finite, scores, LOWEST * order)


def _rank(scores: Tensor, labels: Tensor, selected: Tensor, balanced: bool) -> Tensor:
    """Indices of the images not selected yet, the highest score first.

    If balanced, in rounds over the classes: no class has another image selected before a class
    with fewer. Within a round the class with the higher score comes first.
    """
    order = scores.argsort(descending=True, stable=True)
    rest = order[~torch.isin(order, selected)]
    if not balanced:
        return rest
    queue = torch.cat([selected, rest])
    counts = F.one_hot(labels[queue]).cumsum(0)  # [N, classes] of each class up to this image
    rounds = counts.gather(1, labels[queue, None]).flatten()[len(selected) :]
    return rest[rounds.argsort(stable=True)]
