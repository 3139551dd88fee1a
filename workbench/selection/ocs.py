"""OCS, online coreset selection by gradients of single images (Yoon et al., 2022)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative, PositiveInt
from stamp_core.core.arithmetic import sqrt
from stamp_core.coresets.selection.base import Proposal, TaskData
from workbench.per_sample import head_gradient_factors, per_sample_gradients

MAX_NUMBERS = 2**26  # in the gradients computed at a time, unless one batch has more
PAST_BATCH = 256  # past exemplars in a forward pass


@dataclass(frozen=True)
class Options:
    """How images are compared."""

    batch_size: PositiveInt = 20  # images compared with each other
    batch_candidates: PositiveInt = 10  # candidates selected from each batch
    tau: NonNegative = 1000.0  # weight of the similarity with the past tasks' gradient
    gradients: Literal["head", "all"] = "all"  # of which parameters

    def __post_init__(self) -> None:
        if self.batch_candidates > self.batch_size:
            allowed = f"at most batch_size, {self.batch_size}"
            raise invalid("batch_candidates", self.batch_candidates, allowed)


def propose(task: TaskData) -> Proposal:
    """The candidates of all batches by their score, all scored beforehand, then the others."""
    stream = torch.randperm(len(task.labels), generator=task.generator)
    scores = _stream_scores(task, stream)
    is_candidate = _select_candidates(scores, task.options)
    ranked = scores.argsort(descending=True, stable=True)
    candidates = ranked[is_candidate[ranked]]
    others = ranked[~is_candidate[ranked]]
    quotas = task.labels.bincount().clamp(max=task.exemplars_per_class)
    counts = task.labels[stream[candidates]].bincount(minlength=len(quotas))
    if (counts < quotas).any():
        task.events.append("ocs: a class had too few candidates")
    return task.proposal(stream[torch.cat([candidates, others])])


def _select_candidates(scores: Tensor, options: Options) -> Tensor:
    """Which images have one of the best finite scores of their batch.  # bool [N]"""
    batches = _in_batches(scores, options.batch_size, -torch.inf)
    best = batches.argsort(dim=1, descending=True, stable=True)[:, : options.batch_candidates]
    selected = torch.zeros_like(batches, dtype=torch.bool).scatter_(1, best, True)
    return selected.flatten()[: len(scores)] & (scores > -torch.inf)


def _stream_scores(task: TaskData, stream: Tensor) -> Tensor:
    """The score of each image of the stream, -inf where its gradient is not finite.  # [N]"""
    options: Options = task.options
    images, labels = task.inputs()
    past = _past_gradient(task)
    width = task.learner.model.parameters.numel() if options.gradients == "all" else 1
    at_a_time = options.batch_size * max(1, MAX_NUMBERS // (options.batch_size * width))
    parts = [
        _batch_scores(*_gradient_factors(task, images[part], labels[part]), past, options)
        for part in stream.to(labels.device).split(at_a_time)
    ]
    scores = torch.cat(parts).cpu()
    if not scores.isfinite().all():
        task.events.append("ocs: a gradient was not finite")
    return scores


def _gradient_factors(task: TaskData, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Two vectors for each image: their outer product is its gradient.  # [n, L], [n, R]"""
    if task.options.gradients == "head":
        errors, features = head_gradient_factors(task.learner.network, images, labels)
        return errors, F.pad(features, (0, 1), value=1.0)
    gradients = per_sample_gradients(task.learner.network, images, labels)
    return gradients.new_ones(len(gradients), 1), gradients


def _past_gradient(task: TaskData) -> Tensor | None:
    """The normalised gradient of the past exemplars' loss; None without a finite one.  # [L, R]"""
    if not len(task.past[1]):
        return None
    images, labels = task.learner.inputs(*task.past)
    batches = zip(images.split(PAST_BATCH), labels.split(PAST_BATCH), strict=True)
    if task.options.gradients == "head":
        factors = [_gradient_factors(task, *batch) for batch in batches]
        gradient = torch.stack([left.T @ right for left, right in factors]).sum(0)
    else:
        network, gradient = task.learner.network.eval(), task.learner.model.gradients.zero_()[None]
        for batch in batches:  # each adds to the model's gradients
            F.cross_entropy(network(batch[0]), batch[1], reduction="sum").backward()
    if _normalise_rows(gradient.view(1, -1)).isfinite():  # in place
        return gradient
    task.events.append("ocs: the gradient of the past was not finite")
    return None


def _batch_scores(left: Tensor, right: Tensor, past: Tensor | None, options: Options) -> Tensor:
    """Cosine with the batch's mean gradient - mean cosine within the batch + tau cosine with past.

    Gradients are outer products of `left` and `right`, which are overwritten: their cosines are
    products of the factors' cosines. Padding and gradients that are not finite become zeros that
    do not count; the latter score -inf.
    """  # [n]
    lengths = _normalise_rows(left) * _normalise_rows(right)  # [n]
    finite = lengths.isfinite()
    left[~finite] = right[~finite] = 0
    lefts, rights = (_in_batches(x, options.batch_size) for x in (left, right))  # [b, B, L | R]
    cosines = ((lefts @ lefts.mT) * (rights @ rights.mT)).double()  # [b, B, B]
    weights = _in_batches(lengths.where(finite, 0), options.batch_size)  # [b, B]
    counts = _in_batches(finite.double(), options.batch_size).sum(1, keepdim=True)  # [b, 1]
    projections = (cosines * weights[:, None]).sum(2)  # [b, B] of the batch's sum on each gradient
    norm = sqrt((projections * weights).sum(1, keepdim=True).clamp(min=0))  # [b, 1] of the sum
    affinity = projections / norm.where(norm > 0, torch.inf)
    scores = (affinity - cosines.sum(2) / counts.clamp(min=1)).flatten()[: len(lengths)]
    if past is not None:
        scores = scores + options.tau * (left * (right @ past.T)).sum(1)
    return scores.where(finite, -torch.inf)


def _normalise_rows(vectors: Tensor) -> Tensor:
    """Divide vectors by their norms, in place; returns the norms. Zeros stay zero.  # float64 [n]

    The largest value is divided out first: the squares of very small gradients would underflow.
    """
    largest = vectors.amax(1).maximum(-vectors.amin(1))
    vectors.div_(largest.where(largest > 0, 1)[:, None])
    norms = vectors.norm(dim=1)
    vectors.div_(norms.where(norms > 0, 1)[:, None])
    lengths: Tensor = largest.double() * norms
    return lengths


def _in_batches(values: Tensor, batch_size: int, fill: float = 0.0) -> Tensor:
    missing = (0, 0) * (values.dim() - 1) + (0, -len(values) % batch_size)
    return F.pad(values, missing, value=fill).view(-1, batch_size, *values.shape[1:])
