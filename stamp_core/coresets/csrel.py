"""Coreset selection via reducible loss (Tong et al., 2025)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import above, at_least
from stamp_core.coresets import Proposal, Task

LAST = -1e300  # below every score in single precision
STRANGE = "csrel: losses that are not finite"

Data = tuple[Tensor, Tensor]  # a task's inputs and labels, on the learner's device


@dataclass(frozen=True)
class Options:
    """How the reference and the selecting network learn, as published for CIFAR-100."""

    # Whose losses cannot be reduced further: those of a fresh network that has learnt the whole
    # task, as published, or of the client's own, which costs no training.
    reference: Literal["fresh", "client"] = "fresh"
    reference_epochs: int = 10
    reference_rate: float = 3e-3
    steps_of_selection: int = 40  # in which the coreset grows to its size
    train_steps: int = 7  # of SGD on the coreset, anew after each of them
    train_rate: float = 5e-3
    batch: int = 32
    # Classes with the fewest pictures in the coreset come first. Published runs on a sequence of
    # tasks rank all classes in one; but here each class is remembered by its own first pictures.
    balanced: bool = True

    def __post_init__(self) -> None:
        """Refuse networks that could not learn."""
        at_least(self, 1, "reference_epochs", "steps_of_selection", "train_steps", "batch")
        above(self, 0, "reference_rate", "train_rate")


def propose(task: Task) -> Proposal:
    """The task's pictures in the order of choice, and then the others by their last score.

    A score is how much more a picture loses with the coreset learnt than with the whole task
    learnt. Published, old tasks are selected again when they get less room; here the budget of a
    class never shrinks.
    """
    data, options = task.inputs(), task.options
    reference, total = reference_losses(task, data), budget(task)
    share = max(total // options.steps_of_selection, 1)
    chosen = torch.empty(0, dtype=torch.int64)
    task.learner.restart()
    while True:
        scores = usable(losses(task, data) - reference, task)
        rest = ranked(scores, task.labels, chosen, options.balanced)
        if len(chosen) + share >= total:
            return task.best(torch.cat([chosen, rest]))
        chosen = torch.cat([chosen, rest[:share]])
        task.learner.restart()
        learn(task, data, samples(chosen, task), options.train_rate)


def budget(task: Task) -> int:
    """How many of the task's pictures will be remembered."""
    return int(task.labels.bincount().clamp(max=task.per_class).sum())


def reference_losses(task: Task, data: Data) -> Tensor:
    """What each picture loses when the whole task has been learnt.  # [N]"""
    if task.options.reference == "client":
        task.learner.restore()
    else:
        task.learner.restart()
        learn(task, data, epochs(task), task.options.reference_rate)
    return losses(task, data)


def epochs(task: Task) -> list[Tensor]:
    """The places of all pictures in random batches, for each epoch of the reference."""
    count, options = len(task.labels), task.options
    orders = [torch.randperm(count, generator=task.draw) for _ in range(options.reference_epochs)]
    return [batch for order in orders for batch in order.split(options.batch)]


def samples(chosen: Tensor, task: Task) -> list[Tensor]:
    """Batches drawn from the coreset with replacement.

    Of one picture a batch is that picture: copies have the same gradient, and no spread that
    batch normalisation could gather.
    """
    width = task.options.batch if len(chosen) > 1 else 1
    size = (task.options.train_steps, width)
    return list(chosen[torch.randint(len(chosen), size, generator=task.draw)])


def learn(task: Task, data: Data, batches: list[Tensor], rate: float) -> None:
    """Train the learner, on pictures as they are: when published, they were augmented."""
    on_device = [batch.to(data[1].device) for batch in batches]
    task.learner.descend(*data, on_device, rate)


def losses(task: Task, data: Data) -> Tensor:
    """What each picture loses now; on the CPU, where draws are.  # [N]"""
    return task.learner.losses(*data).cpu()


def usable(scores: Tensor, task: Task) -> Tensor:
    """The scores, with those that are not finite last, in random order.  # [N]"""
    finite = scores.isfinite()
    if finite.all():
        return scores
    if STRANGE not in task.events:
        task.events.append(STRANGE)
    order = 1 + torch.rand(len(scores), generator=task.draw, dtype=torch.float64)
    return torch.where(finite, scores, LAST * order)


def ranked(scores: Tensor, labels: Tensor, chosen: Tensor, balanced: bool) -> Tensor:
    """The places of pictures not chosen yet, the highest score first.

    If balanced, by turns: no class gets its next picture before one with fewer has as many. The
    turn goes to the class whose best picture scores higher.
    """
    line = scores.argsort(descending=True, stable=True)
    rest = line[~torch.isin(line, chosen)]
    if not balanced:
        return rest
    queue = torch.cat([chosen, rest])
    before = F.one_hot(labels[queue]).cumsum(0)  # [N, classes] of each class up to this place
    turns = before.gather(1, labels[queue, None]).flatten()[len(chosen) :]
    return rest[turns.argsort(stable=True)]
