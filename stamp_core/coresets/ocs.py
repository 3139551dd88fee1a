"""Online coreset selection: pictures with the best gradients of their batch (Yoon et al., 2022)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import at_least, wrong
from stamp_core.coresets import Proposal, Task
from stamp_core.learner import gradients, head_parts

ROOM = 2**26  # numbers in the gradients that are held at a time, unless one batch has more
FORWARD = 256  # remembered pictures at a time


@dataclass(frozen=True)
class Options:
    """What pictures are compared by, and which of them come first."""

    batch: int = 20  # pictures that are compared with each other
    kept: int = 10  # candidates of each batch
    tau: float = 1000.0  # weight of the agreement with the past
    gradients: Literal["head", "all"] = "all"  # of which parameters
    order: Literal["score", "random"] = "score"  # of the candidates

    def __post_init__(self) -> None:
        """Refuse empty batches and more candidates than pictures."""
        at_least(self, 1, "batch", "kept")
        at_least(self, 0, "tau")
        if self.kept > self.batch:
            raise wrong("kept", self.kept, f"at most batch, {self.batch}")


def propose(task: Task) -> Proposal:
    """All pictures: the candidates of all batches by their score, then the others by theirs.

    As published the network learns from a batch's kept pictures before the next batch is looked
    at. Here training is the method's, so all batches meet the network as that has left it.
    The released code shuffles the candidates in the end: order "random".
    """
    stream = torch.randperm(len(task.labels), generator=task.draw)
    scores = stream_scores(task, stream)
    chosen = candidates(scores, task.options)
    ranked = scores.argsort(descending=True, stable=True)
    first, others = ranked[chosen[ranked]], ranked[~chosen[ranked]]
    if task.options.order == "random":
        first = first[torch.randperm(len(first), generator=task.draw)]
    note_shortage(task, task.labels[stream[first]])
    return task.best(stream[torch.cat([first, others])])


def note_shortage(task: Task, labels: Tensor) -> None:
    """Say so if of a class there are fewer candidates, of these `labels`, than it may keep."""
    wanted = task.labels.bincount().clamp(max=task.per_class)
    if (labels.bincount(minlength=len(wanted)) < wanted).any():
        task.events.append("ocs: a class had too few candidates")


def candidates(scores: Tensor, options: Options) -> Tensor:
    """Which pictures are among the best of their batch, and have a score.  # bool [N]"""
    batches = in_batches(scores, options.batch, -torch.inf)
    best = batches.argsort(dim=1, descending=True, stable=True)[:, : options.kept]
    chosen = torch.zeros_like(batches, dtype=torch.bool).scatter_(1, best, True)
    return chosen.flatten()[: len(scores)] & (scores > -torch.inf)


def stream_scores(task: Task, stream: Tensor) -> Tensor:
    """The score of each picture of the stream, -inf where its gradient is not finite.  # [N]"""
    options: Options = task.options
    pictures, labels = task.inputs()
    past = past_direction(task)
    width = task.learner.model.parameters.numel() if options.gradients == "all" else 1
    at_a_time = options.batch * max(1, ROOM // (options.batch * width))
    parts = [
        batch_scores(*factors(task, pictures[places], labels[places]), past, options)
        for places in stream.to(labels.device).split(at_a_time)
    ]
    scores = torch.cat(parts).cpu()
    if not scores.isfinite().all():
        task.events.append("ocs: a gradient was not finite")
    return scores


def factors(task: Task, pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Two vectors for each picture, whose outer product its gradient is.  # [n, L], [n, R]

    By the head's weight and bias that is error x (feature, 1); of all parameters, 1 x itself.
    """
    if task.options.gradients == "head":
        errors, features = head_parts(task.learner.network, pictures, labels)
        return errors, F.pad(features, (0, 1), value=1.0)
    each = gradients(task.learner.network, pictures, labels)
    return each.new_ones(len(each), 1), each


def past_direction(task: Task) -> Tensor | None:
    """The direction of the gradient on the whole past, if there is one.  # [L, R]"""
    if not len(task.past[1]):
        return None
    slope = past_slope(task)
    if unit(slope.view(1, -1)).isfinite():
        return slope
    task.events.append("ocs: the gradient of the past was not finite")
    return None


def past_slope(task: Task) -> Tensor:
    """The gradient of the past's cross-entropy, added up.  # [L, R]"""
    pictures, labels = task.past_inputs()
    pairs = zip(pictures.split(FORWARD), labels.split(FORWARD), strict=True)
    if task.options.gradients == "head":
        parts = [factors(task, *pair) for pair in pairs]
        return torch.stack([left.T @ right for left, right in parts]).sum(0)
    network, model = task.learner.network.eval(), task.learner.model
    model.gradients.zero_()
    for some, their in pairs:
        F.cross_entropy(network(some), their, reduction="sum").backward()
    return model.gradients[None]


def batch_scores(left: Tensor, right: Tensor, past: Tensor | None, options: Options) -> Tensor:
    """A gradient's cosine with its batch's, less the mean one with each there, and tau times
    that with the past; -inf where it is not finite. Both factors are overwritten.  # [n]

    Outer products have as cosine the product of their factors'. What a last, smaller batch lacks
    and what is not finite become gradients of 0 that do not count.
    """
    lengths = unit(left) * unit(right)  # [n]
    finite = lengths.isfinite()
    left[~finite] = right[~finite] = 0
    lefts, rights = (in_batches(each, options.batch) for each in (left, right))  # [b, B, L | R]
    cosines = ((lefts @ lefts.mT) * (rights @ rights.mT)).double()  # [b, B, B]
    weights = in_batches(lengths.where(finite, 0), options.batch)  # [b, B]
    count = in_batches(finite.double(), options.batch).sum(1, keepdim=True)  # [b, 1]
    along = (cosines * weights[:, None]).sum(2)  # [b, B] by the batch's sum, a vector
    length = (along * weights).sum(1, keepdim=True).clamp(min=0).sqrt()  # [b, 1] of that sum
    found = along / length.where(length > 0, torch.inf) - cosines.sum(2) / count.clamp(min=1)
    scores = found.flatten()[: len(lengths)]
    if past is not None:
        scores = scores + options.tau * (left * (right @ past.T)).sum(1)
    return scores.where(finite, -torch.inf)


def unit(vectors: Tensor) -> Tensor:
    """The lengths of vectors, which are divided by them; a vector of 0 stays.  # float64 [n]

    First by their largest value: what a sure answer leaves may have squares too small to add up.
    """
    largest = vectors.amax(1).maximum(-vectors.amin(1))
    vectors.div_(largest.where(largest > 0, 1)[:, None])
    rest = vectors.norm(dim=1)
    vectors.div_(rest.where(rest > 0, 1)[:, None])
    lengths: Tensor = largest.double() * rest
    return lengths


def in_batches(values: Tensor, batch: int, fill: float = 0.0) -> Tensor:
    """Values in batches, the last one filled up.  # [n, ...] -> [b, batch, ...]"""
    missing = (0, 0) * (values.dim() - 1) + (0, -len(values) % batch)
    return F.pad(values, missing, value=fill).view(-1, batch, *values.shape[1:])
